"""Checks that `embedding_learning_rate` reaches the weights that it is for."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.weight_names import first_names
from trainers.run.disk import is_embedding


def refuse_unknown_embeddings(base: Any, config: TrainConfig) -> None:
    """Checks that the weights with a rate of their own, which are told by their names, are the model's embeddings.

    Args:
        base: the transformers model, without adapters.
        config: the run's config.

    Raises:
        ConfigError: if names tell others.
    """
    if config.embedding_learning_rate is None:
        return
    layers = [base.get_input_embeddings(), base.get_output_embeddings()]
    weights = [id(layer.weight) for layer in layers if layer is not None]
    embeds = {name: id(weight) in weights for name, weight in base.named_parameters(remove_duplicate=False)}
    if wrong := [name for name, is_one in embeds.items() if is_one != is_embedding(name)]:
        problem = f": it is not known whether {first_names(wrong)} of this model embed tokens"
        raise ConfigError.about("embedding_learning_rate", config.embedding_learning_rate, problem, "leave it out")


def embedding_rate_lines(model: nn.Module, config: TrainConfig) -> list[str]:
    """A log line: which of the trained weights have the rate, or that none has; none without such a rate.

    Args:
        model: the model with its adapters, or with its frozen weights.
        config: the run's config.
    """
    if config.embedding_learning_rate is None:
        return []
    option = f"embedding_learning_rate={config.embedding_learning_rate:g}"
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad and is_embedding(name)]
    return [
        f"{option}: {first_names(trained)}" if trained else f"warning: {option} is ignored: no embedding is trained"
    ]
