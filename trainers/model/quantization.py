"""`method=qlora`: the frozen base in 4 bits by bitsandbytes: nf4, blocks of 64, their scales in 8 bits.

Apart from its linear layers the model is the one of `method=lora`: embeddings, output head and norms keep the compute
dtype, the adapters fp32. peft's `prepare_model_for_kbit_training` is not used, since it casts all of that to fp32.

Weights are quantised on the CPU, before any strategy sees them, so that every strategy and every later export has the
same bits. They are stored in tensors of the compute dtype, because FSDP shards floating-point tensors only; the bits
mean nothing as numbers, so nothing may cast them. The scales are no parameters: each rank has all of them
(0.13 bits per weight).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig

_DEQUANTISED = ("mxfp4", "fp8")
"""Methods of quantisation whose weights transformers can give back in the compute dtype."""

SCALES_BLOCK = 256


def loading_options(dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` needs to quantise each weight as it is read; `finish` does the rest.

    Args:
        dtype: the compute dtype; the quantised weights are stored in tensors of it.
    """
    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=False,  # `finish` does it
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
    return {"quantization_config": quantisation, "device_map": {"": "cpu"}}


def settle_quantisation(config: TrainConfig, model_config: Any) -> None:
    """Has transformers dequantise a base that is stored in few bits, where it can; refuses any other.

    Args:
        model_config: the base model's transformers config, which is changed.

    Raises:
        ConfigError: for a base that would not be trained as what it is, or that bitsandbytes cannot quantise.
    """
    if config.random_init:
        for name in {"quantization_config", "compression_config"} & model_config.__dict__.keys():
            delattr(model_config, name)
    stored = getattr(model_config, "quantization_config", None)
    if config.method != "qlora" and stored and stored.get("quant_method") in _DEQUANTISED:
        # By itself transformers does this only where the GPU or an optional package is missing.
        model_config.quantization_config = {**stored, "dequantize": True}
    refuse_quantised(config, model_config)
    if config.method == "qlora":
        refuse_unfit(model_config, config.trust_remote_code)


def refuse_quantised(config: TrainConfig, model_config: Any, dtypes: Iterable[str] = ()) -> None:
    """Raises ConfigError for a base stored in 8 bits or less, unless its weights are dequantised as they are loaded.

    Args:
        model_config: the base model's transformers config.
        dtypes: of the weights in its files, as safetensors spells them.
    """
    stored = getattr(model_config, "quantization_config", getattr(model_config, "compression_config", None))
    narrow = sorted({dtype for dtype in dtypes if dtype.startswith(("F8_", "F4"))})
    if (stored is None and not narrow) or (stored and stored.get("dequantize")):
        return
    how = (stored or {}).get("quant_method") or ", ".join(narrow) or "by an unknown method"
    raise ConfigError.about(
        "model_name_or_path",
        config.model_name_or_path,
        f"is already quantized ({how}) and cannot be trained with method={config.method}",
        "use the model that it was made from, or an unquantized copy",
    )


def refuse_unfit(model_config: Any, trust_remote_code: bool) -> None:
    """Looks for what would not be quantised, on a model without memory for its weights.

    Args:
        model_config: the model's config.
        trust_remote_code: run model code that comes with the weights.

    Raises:
        ConfigError: when much of the model is not in linear layers, or in ones that nf4 blocks do not fit.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust_remote_code)
    total = sum(weight.numel() for weight in model.parameters())
    outside, kinds, head = 0, set(), model.get_output_embeddings()
    for part in model.modules():
        matrices = [weight for weight in part.parameters(recurse=False) if weight.ndim >= 2]
        if matrices and not isinstance(part, nn.Linear | nn.Embedding):
            outside += sum(weight.numel() for weight in matrices)
            kinds.add(type(part).__name__)
        odd = isinstance(part, nn.Linear) and (part.in_features % 2 or part.weight.numel() % 8)
        if odd and part is not head:
            size = f"{part.out_features} x {part.in_features}"
            raise ConfigError.about(
                "method",
                "qlora",
                f": {model_config.model_type} has a linear layer of {size}, which nf4 does not support",
                "use lora",
            )
    # A router or a short convolution may stay as it is; transposed layers would be exported the wrong way round.
    if outside > total / 10 or "Conv1D" in kinds:
        raise ConfigError.about(
            "method",
            "qlora",
            f": {outside / total:.0%} of the weights of {model_config.model_type} are in {', '.join(sorted(kinds))}, "
            "which cannot be quantized",
            "use method=lora, or another model",
        )


@contextmanager
def many_threads() -> Iterator[None]:
    """This rank's share of the cores: launchers allow one thread, and quantising takes 30 s per 10^9 weights on it."""
    before, ranks = torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(before, (os.cpu_count() or 1) // ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def finish(base: PreTrainedModel) -> None:
    """Quantises the scales of a model just loaded, and keeps its weights in the one format that can be sharded."""
    keep_compute_dtype(base)
    for layer in four_bit_layers(base):
        layer.register_forward_pre_hook(_cast_input)
        quantise_scales(layer.quant_state)
        layer.weight.compress_statistics = True


def keep_compute_dtype(model: nn.Module) -> None:
    """On some CPUs bitsandbytes would repack the weights in evaluation, for a kernel that computes in bf16."""
    for layer in four_bit_layers(model):
        layer.support_avx512bf16_for_cpu = False


def _cast_input(layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """As autocast does for a plain linear layer; bitsandbytes would give the output the dtype of the input."""
    return (inputs[0].to(layer.compute_dtype), *inputs[1:])


def quantise_scales(state: Any) -> None:
    """Double quantisation as bitsandbytes does it, but for the mean: torch's depends on the number of threads.

    Args:
        state: `quant_state` of a weight whose scales are fp32; changed in place.
    """
    from bitsandbytes.functional import quantize_blockwise

    mean = state.absmax.numpy().mean(dtype=np.float64)
    state.offset = torch.tensor(mean, dtype=torch.float32)
    state.absmax, state.state2 = quantize_blockwise(state.absmax - state.offset, blocksize=SCALES_BLOCK)
    state.nested = True


def four_bit_layers(model: nn.Module) -> list[Any]:
    """The quantised linear layers, whatever wraps the model."""
    linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
    return [part for part in linear if getattr(part, "quant_state", None) is not None]


def whole_layers(model: nn.Module, head: nn.Module | None) -> int:
    """How many of the quantised layers hold half a byte per weight, and no other frozen linear layer is left.

    Args:
        model: the model, sharded or not.
        head: the output head, which is not quantised.

    Returns:
        The number of quantised layers, less one for each frozen linear layer that is not.
    """
    quantised = four_bit_layers(model)
    unsharded = [part for part in quantised if _bytes(part.weight) * 2 == part.in_features * part.out_features]
    spared = {id(part) for part in [*quantised, *(head.modules() if head is not None else [])]}
    linear = [part for part in model.modules() if isinstance(part, nn.Linear) and id(part) not in spared]
    return len(unsharded) - sum(1 for part in linear if not part.weight.requires_grad)


def _bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


def dequantise(base: PreTrainedModel) -> PreTrainedModel:
    """The base with plain linear layers again, as the matrix products saw them: in the compute dtype."""
    return base.dequantize()
