"""The model of a reward model: a stock sequence-classification model with one output, `score`, and no bias.

Its decoder has the weights of a causal language model. The head is new, drawn from the seed alone, unless the files are
those of such a model already. No other weight is made up (`trainers.model.weight_names`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.objectives.output_head import SCALAR_HEAD, decoder_of, scalar_head

HEAD_WEIGHT = f"{SCALAR_HEAD}.weight"
_CLASSIFIER = "ForSequenceClassification"
_REMEDY = "use another model, such as a Llama or Qwen model"


def model_family(config: TrainConfig) -> Any:
    """The class of transformers that builds the model of the config's objective."""
    return AutoModelForSequenceClassification if config.objective_spec.scalar_head else AutoModelForCausalLM


def has_head(model_config: Any) -> bool:
    """Whether the files of a model are those of a sequence-classification model."""
    return any(name.endswith(_CLASSIFIER) for name in getattr(model_config, "architectures", None) or [])


def settle_head(config: TrainConfig, model_config: Any) -> None:
    """Gives the config of a reward model one output; refuses a model that cannot have its head.

    Args:
        config: the run's config; nothing is done unless its objective trains a scalar head.
        model_config: the transformers config of the model; modified in place.

    Raises:
        ConfigError: if transformers has no such class for the model, or its files have another number of outputs.
    """
    if not config.objective_spec.scalar_head:
        return
    subject, kind = f"model_name_or_path={config.model_name_or_path}", model_config.model_type
    if config.trust_remote_code and getattr(model_config, "auto_map", None):
        raise ConfigError(f"{subject}: objective={config.objective} does not support a model's own code; {_REMEDY}")
    if type(model_config) not in AutoModelForSequenceClassification._model_mapping:
        raise ConfigError(
            f"{subject}: transformers has no {_CLASSIFIER} class for {kind} models, which objective="
            f"{config.objective} needs; {_REMEDY}"
        )
    if has_head(model_config) and not config.random_init and model_config.num_labels != 1:
        raise ConfigError(
            f"{subject} has {model_config.num_labels} outputs, and objective={config.objective} trains one with one "
            "output; use the model it came from"
        )
    model_config.num_labels = 1


def check_head(config: TrainConfig, model: Any) -> None:
    """Raises ConfigError if a built model, on any device, has no plain scalar head on a decoder of its own."""
    if not config.objective_spec.scalar_head:
        return
    head, decoder = scalar_head(model), decoder_of(model)
    if type(head) is not nn.Linear or head.out_features != 1 or head.bias is not None or decoder in (None, model):
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path}: the {_CLASSIFIER} class of {model.config.model_type} "
            f"models has no plain linear head named {SCALAR_HEAD}, which objective={config.objective} needs; {_REMEDY}"
        )


@torch.no_grad()
def init_head(config: TrainConfig, model: Any, stored: bool) -> list[str]:
    """Sets a new head, in fp32 if weights are trained in it, and the padding that stock forward passes need.

    Args:
        config: the run's config.
        model: the model on the CPU; nothing is done unless it has a scalar head.
        stored: whether the head is in the model's files.

    Returns:
        Log lines.
    """
    head: Any = scalar_head(model)
    if head is None:
        return []
    text = model.config.get_text_config()
    if text.pad_token_id is None:  # after the embedding was built, so that it trains every token; exports set their own
        text.pad_token_id = 0
    if stored:
        return [f"starts from the head of the model's files ({HEAD_WEIGHT})"]
    spread = getattr(text, "initializer_range", 0.02)
    values = torch.empty(head.weight.shape).normal_(0.0, spread, generator=torch.Generator().manual_seed(config.seed))
    head.weight = nn.Parameter(values.to(torch.float32 if config.master_weights else head.weight.dtype))
    return [f"{HEAD_WEIGHT} is a new head: {values.numel()} weights, initialized from seed {config.seed}"]
