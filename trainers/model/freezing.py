"""Freezes some weights of a model that is otherwise trained in full (`--freeze`)."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.weight_names import first_names


def freeze(config: TrainConfig, model: Any) -> list[str]:
    """Freezes the weights that `freeze` names, before a strategy wraps the model.

    Args:
        config: the run's config.
        model: the transformers model on any device, with its embeddings tied or not as they will be trained.

    Returns:
        Log lines; none if nothing was to be frozen.

    Raises:
        ConfigError: if a pattern matches no weight, or no weight is left to train.
    """
    if not config.freeze:
        return []
    weights = [*model.named_parameters(remove_duplicate=False)]  # a tied weight has two names
    matches = {pattern: [name for name, _ in weights if _fits(name, pattern)] for pattern in config.freeze}
    if unmatched := [pattern for pattern, names in matches.items() if not names]:
        raise ConfigError.about(
            "freeze",
            ",".join(unmatched),
            f"matches no weight of {config.model_name_or_path}",
            f"write parts of names such as {first_names([name for name, _ in weights])}",
        )
    matched = {name for names in matches.values() for name in names}
    ends = [end.weight for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    if config.new_tokens and any(name in matched and any(weight is end for end in ends) for name, weight in weights):
        problem = f"with new_tokens={','.join(config.new_tokens)}, whose rows would never be trained"
        raise ConfigError.about("freeze", ",".join(config.freeze), problem, "leave embeddings and head out of it")
    for name, weight in weights:
        if name in matched:
            weight.requires_grad_(False)
    if not any(weight.requires_grad for _, weight in weights):
        raise ConfigError.about("freeze", ",".join(config.freeze), "leaves nothing to train", "name fewer weights")
    ids = {id(weight): name for name, weight in weights if name in matched}
    tied = [f"{name} is {ids[id(weight)]}" for name, weight in weights if id(weight) in ids and name not in matched]
    both = f"; tied, so frozen as well: {', '.join(tied)}" if tied else ""
    elements = sum(weight.numel() for weight in model.parameters() if id(weight) in ids)
    return [f"frozen: {len(ids)} weights, {elements:,} elements ({first_names(list(ids.values()))}){both}"]


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern fits consecutive parts of a weight's name, such as `layers.0-3.mlp` or `embed_tokens`."""
    parts, wanted = name.split("."), pattern.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(_part_fits, parts[start : start + len(wanted)], wanted)) for start in starts)


def _part_fits(part: str, wanted: str) -> bool:
    if numbers := re.fullmatch(r"([0-9]{1,6})-([0-9]{1,6})", wanted):
        return part.isdecimal() and int(numbers[1]) <= int(part) <= int(numbers[2])
    return fnmatchcase(part, wanted)
