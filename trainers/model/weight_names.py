"""Whether weight files and a model have the same tensors, and what to say if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.scalar_head import HEAD_WEIGHT, has_head

Shapes = Mapping[str, Sequence[int]]
"""Tensor shapes by name."""
_OUTPUT_HEADS = ("lm_head.", "embed_out.", "output.")
"""Names that families give to the output head of a causal language model."""


def fit_lines(config: TrainConfig, report: dict[str, Any], model_config: Any) -> list[str]:
    """Checks that the files contain every weight of the model; returns a log line about unused ones, if any.

    The head of a reward model may be missing, and its files may have the output head of a causal language model.

    Args:
        config: the run's config.
        report: transformers' loading info, which never lists tied weights or those that a family does not save.
        model_config: the transformers config of the model.

    Raises:
        ConfigError: naming weights that are missing or have another shape, and would be initialised randomly.
    """
    missing, unexpected = (sorted(report[kind]) for kind in ("missing_keys", "unexpected_keys"))
    if config.objective_spec.scalar_head and not has_head(model_config):
        missing = [name for name in missing if name != HEAD_WEIGHT]
        unexpected = [name for name in unexpected if not name.startswith(_OUTPUT_HEADS)]
    mistakes = []
    if missing:
        only = f"; they have {first_names(unexpected)}, which the model does not use" if unexpected else ""
        mistakes.append(f"weights that the model needs are not in its files: {first_names(missing)}{only}")
    if mismatched := sorted(report["mismatched_keys"]):
        name, actual, needed = mismatched[0]
        sizes = " and ".join("x".join(map(str, size)) for size in (actual, needed))
        others = f" (so are {len(mismatched) - 1} others)" if len(mismatched) > 1 else ""
        mistakes.append(f"{name} is {sizes.replace(' and ', ' in the files and ')} in config.json{others}")
    if errors := report.get("error_msgs"):
        mistakes.append(str(errors[0]).partition("\n")[0][:200])
    if mistakes:
        raise ConfigError.about(
            "model_name_or_path",
            config.model_name_or_path,
            f": {'; '.join(mistakes)}",
            "what is missing would be random: download the model again, or correct its config.json",
        )
    if unexpected and config.num_hidden_layers is None:
        return [f"not used by the model: {first_names(unexpected)}"]
    return []


def misfits(expected: Shapes, shapes: Shapes) -> list[str]:
    """One line for each kind of mismatch between the tensors of a model and those in a file.

    Args:
        expected: shapes of the model's tensors, by name.
        shapes: shapes of the saved tensors, by name.
    """
    missing, unexpected = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    differing = sorted(name for name in expected.keys() & shapes.keys() if list(expected[name]) != list(shapes[name]))
    lines = [f"weights that the model needs are not in it: {first_names(missing)}"] if missing else []
    lines += [f"the model does not have {first_names(unexpected)}"] if unexpected else []
    if differing:
        sizes = ["x".join(map(str, each[differing[0]])) for each in (shapes, expected)]
        others = f" (so are {len(differing) - 1} others)" if len(differing) > 1 else ""
        lines.append(f"{differing[0]} is {sizes[0]} in it and {sizes[1]} in the model{others}")
    return lines


def first_names(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
