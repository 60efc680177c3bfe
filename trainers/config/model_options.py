"""The options of the model and of the method that trains it. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from trainers.config.option_types import (
    MAX_RANK,
    AlphaPattern,
    Names,
    Optionally,
    OptionGroup,
    RankPattern,
    TokenNames,
    option,
)


class ModelOptions(OptionGroup):
    """Which model is trained, and how it computes."""

    preset: Annotated[str | None, Optionally] = option("model", None)
    """Preset to start from; options given here override its values."""
    model_name_or_path: str = option("model", min_length=1)
    """Hub id or local folder of the base model; `embedded` is the small model that ships with Tunesmith."""
    model_revision: Annotated[str | None, Optionally] = option("model", None)
    """Branch, tag or commit of the base model on the Hub."""
    from_run: Annotated[str | None, Optionally] = option("model", None)
    """Start from a run's result: its name or folder, or the folder of an export or adapter."""
    trust_remote_code: bool = option("model", False)
    """Allow custom model code from the model's repository; enable only if you have read and trust that code."""
    random_init: bool = option("model", False)
    """Initialize the weights randomly from `seed` instead of loading the pretrained ones."""
    num_hidden_layers: Annotated[int | None, Optionally] = option("model", None, "layers", ge=1, le=10**6)
    """Keep only the first N decoder layers, to try out a model that would not fit."""
    new_tokens: TokenNames = option("model", [])
    """Tokens to add to the vocabulary: `<think>,</think>`; they begin as the mean of all others."""
    pad_vocab_to_multiple_of: Annotated[int | None, Optionally] = option("model", None, "tokens", ge=2, le=2**16)
    """Pad embedding and head with unused tokens, to a multiple of this number."""
    rope_scaling: Literal["none", "linear", "dynamic", "yarn", "llama3"] = option("model", "none")
    """Scale the rotary position embeddings for rows longer than the model supports; none: as the model is."""
    rope_factor: Annotated[float | None, Optionally] = option("model", None, "times", gt=1, le=1000)
    """How many times more positions than in pretraining rope_scaling makes room for."""
    rope_original_max_positions: Annotated[int | None, Optionally] = option("model", None, "tokens", ge=8, le=2**24)
    """Positions in pretraining, for rope_scaling; default: what the model's config says."""
    attn_implementation: Literal["auto", "varlen", "flex", "documents", "sdpa", "eager"] = option("model", "auto")
    """Attention kernel; each keeps packed documents apart; auto: the fastest that supports device, dtype and model."""


class MethodOptions(OptionGroup):
    """Which of its weights are trained."""

    method: Literal["full", "lora", "qlora"] = option("method", "lora")
    """Train all weights, LoRA adapters on a frozen base, or LoRA adapters on a base quantized to 4 bits (nf4)."""
    freeze: Names = option("method", [])
    """Weights that method=full leaves as they are, by parts of names: `embed_tokens,layers.0-3`."""
    lora_r: int = option("method", 16, ge=1, le=MAX_RANK)
    """Rank of the adapters."""
    lora_alpha: float = option("method", 32.0, gt=0)
    """LoRA scaling; the adapters' output is multiplied by alpha / r."""
    lora_rank_pattern: RankPattern = option("method", {})
    """Other ranks for some modules: `q_proj=8,down_proj=32`; a suffix of the name, or a regex."""
    lora_alpha_pattern: AlphaPattern = option("method", {})
    """Other values of lora_alpha for some modules, such as `q_proj=16,down_proj=64`."""
    loraplus_lr_ratio: float = option("method", 1.0, ge=1, le=10**4)
    """Learning rate of the adapters' B matrices over that of their A matrices (LoRA+); its paper advises 16."""
    lora_dropout: float = option("method", 0.0, ge=0, lt=1)
    """Dropout on the adapters' input; above 0, runs are not covered by the parity promise."""
    lora_target_modules: Names = option("method", ["all-linear"])
    """Modules that get an adapter: `all-linear`, or name suffixes such as `q_proj,v_proj`."""
    lora_target_parameters: Names = option("method", [])
    """Stacked weights that get adapters, as experts have them: `experts.gate_up_proj`."""
    modules_to_save: Names = option("method", [])
    """Modules trained in full beside adapters, and saved with them: `embed_tokens,lm_head`."""
    init_lora_weights: Literal["default", "pissa", "loftq"] = option("method", "default")
    """First weights of adapters: random, the weight's singular vectors (PiSSA), or the rounding error's (LoftQ)."""
    qat: Literal["none", "8da4w", "int4", "int8"] = option("method", "none")
    """Train for a later quantization of linear layers: of weights, or int4 weights and int8 inputs (8da4w)."""
    qat_group_size: int = option("method", 32, "inputs", ge=8, le=2**15)
    """Inputs of a linear layer that share a scale in the quantization that qat prepares for."""
    neftune_noise_alpha: float = option("method", 0.0, ge=0, le=10**4)
    """NEFTune: uniform noise on embeddings, up to alpha / sqrt(tokens x channels); 5 is usual."""
    use_rslora: bool = option("method", False)
    """Rank-stabilized LoRA: scale by alpha / sqrt(r), which keeps training stable at high ranks."""
    use_dora: bool = option("method", False)
    """DoRA: adapters turn a weight, and a trained vector has its magnitude; slower."""

    def adapter_rank(self, module: str) -> int:
        """The rank of an adapter by the name of its module."""
        patterns = matching_patterns(self.lora_rank_pattern, module)
        return self.lora_rank_pattern[patterns[0]] if patterns else self.lora_r


def matching_patterns(patterns: Iterable[str], module: str) -> list[str]:
    """Those of peft's patterns, regular expressions for the last parts of a name, that fit a module."""
    return [pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)]
