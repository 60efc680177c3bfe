"""Checks of a model's config.json: values that a model can have, and a model that this project can train."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, GenerationMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.scalar_head import settle_head

_OTHER_TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice",
                "ForRewardModel", "ForMaskedLM")  # fmt: skip
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
_MOST = {"num_hidden_layers": 10_000, **dict.fromkeys(_SIZES, 2**31 - 1)}
"""Largest sizes in a config.json; layers are built one by one, even without memory for their weights."""


def check_values(model_config: Any) -> None:
    """Raises ValueError for a size below 1, or too large to ever be built, and for architectures that are no names."""
    if model_config is None:
        return
    names = getattr(model_config, "architectures", None)
    if not isinstance(names, list | None) or not all(isinstance(name, str) for name in names or ()):
        raise ValueError("architectures is not a list of names")
    text_config = model_config.get_text_config()
    for name, most in _MOST.items():
        # Not by getattr, which fails for a size that differs between layers (Gemma 4).
        key = getattr(text_config, "attribute_map", {}).get(name, name)
        size, default = vars(text_config).get(key), getattr(type(text_config), key, None)
        if size == default == 0:  # GLM-5-Next's head_dim, of the part that is rotated
            continue
        if isinstance(size, int) and not 1 <= size <= most:
            raise ValueError(f"{name}={str(size)[:20]} is not between 1 and {most:,}")


def own_code(config: TrainConfig, model_config: Any) -> bool:
    """Whether the model is built by remote code that comes with it."""
    return config.trust_remote_code and "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or {})


def is_causal(model_config: Any) -> bool:
    """Whether `AutoModelForCausalLM` builds a model, which from then on includes models of images and text.

    transformers lists those that it lists as causal language models too (Gemma 3), and others (Qwen3-VL, Ministral 3)
    under `AutoModelForImageTextToText` alone. All predict the next token of a text without images.
    """
    kind, listed = type(model_config), AutoModelForCausalLM._model_mapping
    if kind not in listed and kind in AutoModelForImageTextToText._model_mapping:
        family = AutoModelForImageTextToText._model_mapping[kind]
        # Listed too: ShieldGemma 2, a classifier, whose config is not its class's; pi0, which predicts movements; and
        # DiffusionGemma, which fills in blocks of tokens.
        is_language_model = family.config_class is kind and issubclass(family, GenerationMixin)
        if getattr(model_config, "is_encoder_decoder", False) or not is_language_model:
            return False
        AutoModelForCausalLM.register(kind, family, exist_ok=True)
    return kind in listed


def auto_class(config: TrainConfig, model_config: Any) -> str:
    """The name of the class of transformers that loads a causal language model elsewhere, where none is registered."""
    listed = model_config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or own_code(config, model_config)
    return "AutoModelForCausalLM" if listed else "AutoModelForImageTextToText"


def refuse_other_tasks(config: TrainConfig, model_config: Any) -> None:
    """Raises ConfigError for a model that is not a causal language model, or whose head is of another objective."""
    subject = f"model_name_or_path={config.model_name_or_path}"
    if own_code(config, model_config):
        return
    if not is_causal(model_config):
        raise ConfigError(
            f"{subject}: {model_config.model_type} models are not causal language models; use a decoder, such as a "
            "Llama or Qwen model"
        )
    for name in getattr(model_config, "architectures", None) or []:
        scored = config.objective_spec.scalar_head and name.endswith("ForSequenceClassification")
        if not config.random_init and name.endswith(_OTHER_TASKS) and not scored:
            raise ConfigError(f"{subject} is a {name}, which has no language-modeling head; use the model it came from")
    settle_head(config, model_config)


def check_rows(config: TrainConfig, model_config: Any) -> None:
    """Raises ConfigError for rows longer than this model's layers can take here.

    Layers of `chunked_attention` (Llama 4) attend as others do within their first chunk. Layers without positions scale
    their queries by the place in the row, in steps of `floor_scale` tokens: not by that in the document, if several
    are packed into a row.
    """
    text = model_config.get_text_config()  # a multimodal config has none of its own
    subject, length = f"with {model_config.model_type} models, whose", config.max_length
    chunk, step = getattr(text, "attention_chunk_size", None), getattr(text, "floor_scale", None)
    if chunk and "chunked_attention" in (getattr(text, "layer_types", None) or ()) and length > chunk:
        problem = f"{subject} layers attend in chunks of {chunk}, which is not supported"
        raise ConfigError.about("max_length", length, problem, f"use at most {chunk}")
    if step and getattr(text, "attn_temperature_tuning", False) and config.packing and length >= step:
        problem = f"{subject} queries are scaled by their place in a row of {step} or more, where documents are packed"
        raise ConfigError.about("max_length", length, problem, f"use at most {int(step) - 1}, or packing=false")
