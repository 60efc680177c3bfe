"""`method=qlora` (https://arxiv.org/abs/2305.14314): a frozen 4-bit base with bitsandbytes, nf4 in blocks of 64.

Double quantisation stores the scales of the blocks in 8 bits. Except for its linear layers, the model is the same as
with `method=lora`: embeddings, output head and norms keep the compute dtype, adapters fp32. peft's
`prepare_model_for_kbit_training` is not used, since it casts all of these to fp32.

Weights are quantised on the CPU, each in full when it is read, so that every strategy and every later export has the
same bits; a rank then keeps its part of them. They are stored in tensors of the compute dtype, because FSDP shards only
floating-point tensors; their bits are not numbers of that dtype, so nothing may cast them. The scales are not
parameters: every rank holds all of them (0.13 bits per weight).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.stored import Source, replace

_DEQUANTISED = ("mxfp4", "fp8")
"""Quantisation methods whose weights transformers can dequantise to the compute dtype."""

_NARROW = ("F8_", "F6_", "F4", "I8")
_SCALE = re.compile(r"(.+?)(?:[._]weight)?[._](?:scales?|scale_inv|qscale_weight)$")
"""A tensor of scales, which belongs to the weight of the first group."""

PIECE = 2**18
"""Weights to quantise at once, a multiple of the blocks: on a CPU bitsandbytes takes 128 bytes of memory for each."""
SCALES_BLOCK = 256
"""Number of scales that share a second-level scale."""


def loading_options(dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise each weight which it reads; `finish` does the rest.

    Args:
        dtype: the compute dtype, also the dtype of the tensors that store the quantised weights.
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
    """Makes transformers dequantise a quantised base model on loading if it can; refuses any other.

    Args:
        config: the run's config.
        model_config: the base model's transformers config; modified in place.

    Raises:
        ConfigError: for a base that stays quantised, or under qlora one that bitsandbytes cannot quantise.
    """
    if config.random_init:
        for name in {"quantization_config", "compression_config"} & model_config.__dict__.keys():
            delattr(model_config, name)
    stored = getattr(model_config, "quantization_config", None)
    if config.method != "qlora" and stored and stored.get("quant_method") in _DEQUANTISED:
        # By default, transformers does this only if the GPU or an optional package is missing.
        model_config.quantization_config = {**stored, "dequantize": True}
    refuse_quantised(config, model_config)
    if config.method == "qlora":
        refuse_unfit(model_config, config.trust_remote_code)


def refuse_quantised(config: TrainConfig, model_config: Any, dtypes: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError for a base stored in 8 bits or fewer, unless its weights are dequantised on loading.

    Args:
        config: the run's config.
        model_config: the base model's transformers config.
        dtypes: dtypes of the weights in its files by name, in safetensors' spelling.
    """
    stored = getattr(model_config, "quantization_config", getattr(model_config, "compression_config", None))
    narrow = sorted({dtype for dtype in (dtypes or {}).values() if dtype.startswith(_NARROW)})
    if stored is None and not narrow:
        return
    if stored and stored.get("dequantize"):
        _refuse_unscaled(config, dtypes or {})
        return
    how = (stored or {}).get("quant_method") or ", ".join(narrow) or "by an unknown method"
    raise ConfigError.about(
        "model_name_or_path",
        config.model_name_or_path,
        f"is already quantized ({how}) and cannot be trained with method={config.method}",
        "use the model that it was made from, or an unquantized copy",
    )


def _refuse_unscaled(config: TrainConfig, dtypes: Mapping[str, str]) -> None:
    """Raises ConfigError for 8-bit or 4-bit weights without their scales: transformers would load them unscaled."""
    scaled = {match[1] for name in dtypes if (match := _SCALE.match(name))}
    unscaled = sorted(
        name
        for name, dtype in dtypes.items()
        if ((dtype.startswith(_NARROW) and name.endswith((".weight", "_proj"))) or name.endswith("_blocks"))
        and not _SCALE.match(name)
        and name.removesuffix(".weight").removesuffix("_blocks") not in scaled
    )
    if unscaled:
        raise ConfigError.about(
            "model_name_or_path",
            config.model_name_or_path,
            f": quantized weights without scales in its files: {', '.join(unscaled[:3])}"
            + (f" and {len(unscaled) - 3} more" if len(unscaled) > 3 else ""),
            "download the model again, or use an unquantized copy",
        )


def refuse_unfit(model_config: Any, trust_remote_code: bool) -> None:
    """Checks on the meta device that most of a model would be quantised.

    Args:
        model_config: the model's transformers config.
        trust_remote_code: run model code that comes with the weights.

    Raises:
        ConfigError: if much of the model is outside linear layers, or a linear layer does not fit nf4.
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
    # Small parts such as routers and short convolutions may stay unquantised; Conv1D would be exported transposed.
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
    """Uses this rank's share of the cores. Launchers allow one thread, which quantises 10^9 weights in 30 s."""
    before, ranks = torch.get_num_threads(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(before, (os.cpu_count() or 1) // ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def finish(base: PreTrainedModel) -> None:
    """Quantises the scales of a newly loaded model, and keeps its weights in the only format that can be sharded."""
    keep_compute_dtype(base)
    for layer in four_bit_layers(base):
        layer.register_forward_pre_hook(_cast_input)
        if not layer.weight.is_meta:
            quantise_scales(layer.quant_state)
        layer.weight.compress_statistics = True


@dataclass(frozen=True)
class QuantisedTensor:
    """The weight of a 4-bit layer, quantised from the one in the files when it is read.

    Args:
        source: where the weight comes from.
        layer: the layer, which gets the scales.
        settings: how it is quantised, arguments of `quantize_4bit`.
        dtype: dtype to quantise from.
        shape: shape of the tensor that stores the quantised weight.
    """

    source: Source
    layer: Any
    settings: dict[str, Any]
    dtype: torch.dtype
    shape: torch.Size

    def mapped(self) -> torch.Tensor:
        """The quantised weight, from all of the one in the files."""
        from bitsandbytes.functional import quantize_4bit

        flat = self.source.mapped().to(self.dtype).flatten()
        with many_threads():
            pieces = [quantize_4bit(piece, compress_statistics=False, **self.settings) for piece in flat.split(PIECE)]
        state: Any = pieces[0][1]
        state.absmax, state.shape = torch.cat([piece.absmax for _, piece in pieces]), self.source.shape
        quantise_scales(state)
        self.layer.quant_state = state
        return torch.cat([packed for packed, _ in pieces])

    def error(self) -> torch.Tensor:
        """What quantisation takes from the weight, in fp32."""
        from bitsandbytes.functional import dequantize_4bit

        packed = self.mapped()
        return self.source.mapped().float() - dequantize_4bit(packed, self.layer.quant_state).float()

    def read(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """Fills a tensor with a part of the quantised weight, and puts the scales of all of it onto the same device."""
        target.detach().copy_(self.mapped()[part])
        self.layer.quant_state.to(target.device)
        self.layer.weight.quant_state = self.layer.quant_state


def leave_quantised(base: nn.Module, sources: Mapping[int, Source]) -> dict[int, Source]:
    """Gives 4-bit layers on the meta device weights of the shape that they have once they are read.

    Args:
        base: the model.
        sources: where each weight comes from, by its id.

    Returns:
        The same after that.
    """
    packed_sources = dict(sources)
    for layer in four_bit_layers(base):
        weight = layer.weight
        shape = torch.Size([weight.numel() // 2 // weight.quant_storage.itemsize, 1])
        settings = {name: getattr(weight, name) for name in ("blocksize", "quant_type", "quant_storage")}
        source = QuantisedTensor(sources[id(weight)], layer, settings, weight.dtype, shape)
        packed = torch.empty(shape, dtype=weight.quant_storage, device="meta")
        replace(weight, torch.Tensor._make_subclass(type(weight), packed))
        weight.bnb_quantized = True
        packed_sources[id(weight)] = source
    return packed_sources


def keep_compute_dtype(model: nn.Module) -> None:
    """Prevents bitsandbytes from repacking weights in evaluation for a bf16 kernel, as it would on some CPUs."""
    for layer in four_bit_layers(model):
        layer.support_avx512bf16_for_cpu = False


def _cast_input(layer: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Casts the input like autocast does for a linear layer; bitsandbytes would return the dtype of the input."""
    return (inputs[0].to(layer.compute_dtype), *inputs[1:])


def quantise_scales(state: Any) -> None:
    """Double quantisation like bitsandbytes, except for the mean: torch's depends on the number of threads.

    Args:
        state: `quant_state` of a weight whose scales are fp32; modified in place.
    """
    from bitsandbytes.functional import quantize_blockwise

    mean = state.absmax.numpy().mean(dtype=np.float64)
    state.offset = torch.tensor(mean, dtype=torch.float32)
    state.absmax, state.state2 = quantize_blockwise(state.absmax - state.offset, blocksize=SCALES_BLOCK)
    state.nested = True


def four_bit_layers(model: nn.Module) -> list[Any]:
    """The quantised linear layers of a model, wrapped or not."""
    linear = [part for part in model.modules() if isinstance(part, nn.Linear)]
    return [part for part in linear if hasattr(part, "quant_state")]


def whole_layers(model: nn.Module, head: nn.Module | None) -> int:
    """Counts properly quantised layers, for comparison with the number of quantised layers.

    Args:
        model: the model, sharded or not.
        head: the output head, which is not quantised.

    Returns:
        The number of quantised layers that hold half a byte per weight, minus the number of frozen linear layers other
        than the head that are not quantised.
    """
    quantised = four_bit_layers(model)
    unsharded = [part for part in quantised if _bytes(part.weight) * 2 == part.in_features * part.out_features]
    spared = {id(part) for part in [*quantised, *(head.modules() if head is not None else [])]}
    linear = [part for part in model.modules() if isinstance(part, nn.Linear) and id(part) not in spared]
    return len(unsharded) - sum(1 for part in linear if not part.weight.requires_grad)


def _bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()


def dequantise(base: PreTrainedModel) -> PreTrainedModel:
    """Converts the base back to plain linear layers, with weights in the compute dtype as used in matrix products."""
    return base.dequantize()
