"""Scales a model's rotary position embeddings (RoPE) for rows longer than it was pretrained on.

The scaling is written into the transformers config before the model is built, so that every strategy builds the same
model, and an export carries it in its config.json.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.config_checks import own_code

_FULL = "full_attention"
_LENGTH = "original_max_position_embeddings"
_SCALINGS = ("linear", "dynamic", "yarn", "llama3", "longrope")
_OF_SCALING = {"rope_type", "type", "factor", _LENGTH, "attention_factor", "beta_fast", "beta_slow", "mscale",
               "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "short_factor",
               "long_factor"}  # fmt: skip
"""Keys of `rope_parameters` that belong to a scaling; the others (base, share of the head, sections) to the family."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""As in every Llama from 3.1 on."""
_WITHOUT: dict[str, Any] = {"alibi": True, "use_mem_rope": False, "position_embedding_type": "nope"}
"""Settings by which families that can have rotary embeddings leave them out: Falcon, Zamba 2, Granite 4."""


def scale_rope(config: TrainConfig, model_config: Any) -> str | None:
    """Sets the RoPE scaling that the run's config asks for.

    Args:
        config: the run's config.
        model_config: the base model's transformers config; modified in place.

    Returns:
        One line on what was set, and what it replaces; None without `rope_scaling`.

    Raises:
        ConfigError: if the model has no rotary embeddings, or some that cannot be scaled, if the pretrained length is
            unknown, or if the scaled model would be shorter than the model is.
    """
    kind, factor, text = config.rope_scaling, config.rope_factor, model_config.get_text_config()
    if kind == "none" or factor is None:
        return None
    nested = _nested(text)
    own = _scalable(config, model_config, nested)
    original = _original_length(config, text, own)
    limit, before = int(factor * original), position_limit(text)
    if before is not None and limit < before:
        raise _refusal(
            config,
            f": rope_factor={factor:g} x {original:,} positions reach {limit:,}, and {text.model_type} has {before:,}",
            f"use a rope_factor of {before / original:g} or more",
        )
    rope: dict[str, Any] = {name: value for name, value in own.items() if name not in _OF_SCALING}
    if own.get("rope_type") == kind:  # other settings of the same method, but not what follows from its factor
        rope = {name: value for name, value in own.items() if name != "attention_factor"}
    rope |= {"rope_type": kind, "factor": float(factor)}
    if kind == "llama3":
        rope = {**_LLAMA3, **rope}
    if kind in ("yarn", "llama3"):
        rope[_LENGTH] = original
    if hasattr(text, _LENGTH):  # Phi-3 prefers its own field
        setattr(text, _LENGTH, original)
    text.rope_parameters = {**text.rope_parameters, _FULL: rope} if nested else rope
    if vars(text).get("head_dim", 0) is None:  # Mixtral; transformers' formulas for yarn and dynamic need the number
        text.head_dim = text.hidden_size // text.num_attention_heads
    # Dynamic scaling starts beyond max_position_embeddings: for that method, transformers reads the original there.
    text.max_position_embeddings = original if kind == "dynamic" else limit
    where = f" in the {_FULL} layers; the others keep theirs" if nested and len(text.rope_parameters) > 1 else ""
    has = _scaling_of(own)
    replaced = f"; it replaces the model's own {has}" if has else ""
    return f"rope_scaling={kind}: {original:,} positions x {factor:g} = {limit:,}{where}{replaced}"


def position_limit(text_config: Any) -> int | None:
    """Positions that a model supports; None if its config does not say.

    Args:
        text_config: transformers config of the language model.
    """
    limit = getattr(text_config, "max_position_embeddings", None)
    rope = _rope_of(text_config) or {}
    dynamic = rope.get("rope_type") == "dynamic" and isinstance(limit, int)
    return int(limit * rope.get("factor", 1.0)) if dynamic else limit


def scaled_positions(config: TrainConfig, text_config: Any) -> int | None:
    """Positions of a model as `rope_scaling` extends it; None without.

    Args:
        config: the run's config.
        text_config: transformers config of the scaled language model.
    """
    return position_limit(text_config) if config.rope_scaling != "none" else None


def refuse_unscaled(config: TrainConfig, model: nn.Module) -> None:
    """Raises ConfigError if no module of a built model follows the scaling in its config."""
    if config.rope_scaling != "none" and not any(config.rope_scaling in _rope_types(part) for part in model.modules()):
        kind = model.config.model_type  # type: ignore[union-attr]
        raise _refusal(config, f": {kind} models do not follow it", "leave rope_scaling out")


def _rope_types(module: nn.Module) -> list[Any]:
    kinds = getattr(module, "rope_type", None)
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]


def _refusal(config: TrainConfig, problem: str, remedy: str) -> ConfigError:
    return ConfigError.about("rope_scaling", config.rope_scaling, problem, remedy)


def _nested(text_config: Any) -> list[str]:
    """The layer types that have RoPE parameters of their own; empty if all layers share theirs."""
    rope = getattr(text_config, "rope_parameters", None)
    return text_config.nested_rope_parameter_keys(rope) if rope else []


def _rope_of(text_config: Any) -> dict[str, Any] | None:
    """The RoPE parameters of the layers that attend to all positions."""
    rope = getattr(text_config, "rope_parameters", None)
    rope = rope.get(_FULL) if rope and _nested(text_config) else rope
    return rope if isinstance(rope, dict) else None


def _scalable(config: TrainConfig, model_config: Any, nested: list[str]) -> dict[str, Any]:
    """The model's own RoPE parameters, of the layers to scale.

    Raises:
        ConfigError: if it has none, or they have a form of the family's own.
    """
    text = model_config.get_text_config()
    kind, rope, remedy = text.model_type, _rope_of(text), "leave rope_scaling out, or use another model"
    if own_code(config, model_config):
        remedy = "set it in the model's config.json, as its code reads it"
        raise _refusal(config, f": {config.model_name_or_path} is built by code of its own", remedy)
    if any(getattr(text, name, None) == value for name, value in _WITHOUT.items()):
        rope = None
    if rope is None and nested:
        layers = f"no rotary embeddings in its {_FULL} layers" if _FULL in nested else f"its own: {', '.join(nested)}"
        raise _refusal(config, f": {kind} has rotary embeddings by layer type, and {layers}", remedy)
    if rope is None:
        raise _refusal(config, f": {kind} models have no rotary embeddings that transformers can scale", remedy)
    if rope.get("rope_type", "default") not in ("default", *_SCALINGS):
        raise _refusal(config, f": {kind} has {rope['rope_type']} rotary embeddings, which are of another form", remedy)
    if "llama_4_scaling_beta" in rope or kind == "phimoe":
        raise _refusal(config, f": {kind} also scales its attention by position, in a form of its own", remedy)
    return dict(rope)


def _original_length(config: TrainConfig, text_config: Any, own: dict[str, Any]) -> int:
    """Positions that the model was pretrained on.

    Raises:
        ConfigError: if neither the run's config nor the model's says so.
    """
    stated = own.get(_LENGTH) or (
        getattr(text_config, "max_position_embeddings", None) if own.get("rope_type") != "linear" else None
    )
    original = config.rope_original_max_positions or stated
    if not isinstance(original, int):
        has = _scaling_of(own)
        raise _refusal(
            config,
            f": {text_config.model_type} {f'has {has}, and ' if has else ''}does not say how many positions it was "
            "pretrained on",
            "give rope_original_max_positions",
        )
    return original


def _scaling_of(rope: dict[str, Any]) -> str:
    """A scaling in words, such as `llama3 scaling (factor 8, original 8,192)`; empty if there is none."""
    kind = rope.get("rope_type", "default")
    facts = [f"factor {rope['factor']:g}"] if rope.get("factor") else []
    facts += [f"original {rope[_LENGTH]:,}"] if rope.get(_LENGTH) else []
    return "" if kind == "default" else f"{kind} scaling" + (f" ({', '.join(facts)})" if facts else "")
