"""`qat`: linear layers compute with values rounded as a later quantization by torchao rounds them; weights stay fp32.

Gradients pass the rounding as if it were not there (straight-through estimator). What is saved and exported are plain
weights, for which torchao's quantization with the same config gives the forward pass of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.weight_names import first_names
from trainers.objectives.output_head import decoder_of

_INT4 = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
_DTYPES = {"8da4w": _INT4, "int4": _INT4, "int8": torch.int8}
"""Dtype of weights by `qat`."""


def quantization_config(config: TrainConfig) -> Any:
    """torchao's config of the quantization that `qat` prepares for, as `torchao.quantization.quantize_` takes it."""
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig, PerGroup

    dtype, groups = _DTYPES[config.qat], PerGroup(config.qat_group_size)
    if config.qat == "8da4w":
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=groups)
    return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=groups)


def rounded_layers(base: Any) -> dict[str, nn.Linear]:
    """The linear layers of the decoder by their names within it; embeddings and output head stay as they are."""
    return {name: layer for name, layer in decoder_of(base).named_modules() if isinstance(layer, nn.Linear)}


def prepare(config: TrainConfig, base: Any) -> None:
    """Replaces the decoder's linear layers in place with ones that round, keeping names and weights.

    Raises:
        ConfigError: if there is none, or `qat_group_size` does not divide the inputs of one.
    """
    layers = rounded_layers(base)
    if not layers:
        problem = f": {base.config.model_type} has no linear layer in its decoder"
        raise ConfigError.about("qat", config.qat, problem, "leave it out")
    if other := {name: type(layer).__name__ for name, layer in layers.items() if type(layer) is not nn.Linear}:
        kinds = ", ".join(sorted(set(other.values())))
        problem = f": {base.config.model_type} has linear layers of kind {kinds} ({first_names(list(other))})"
        raise ConfigError.about("qat", config.qat, problem, "leave it out")
    odd = [name for name, layer in layers.items() if layer.in_features % config.qat_group_size]
    if odd:
        inputs = layers[odd[0]].in_features
        problem = f"does not divide the {inputs:,} inputs of {len(odd)} linear layers ({first_names(odd)})"
        raise ConfigError.about("qat_group_size", config.qat_group_size, problem, "use another, such as 32")
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    weights = {name: (layer.weight, layer.bias) for name, layer in layers.items()}
    rounding = QATConfig(quantization_config(config), step="prepare")
    quantize_(decoder_of(base), rounding, filter_fn=lambda module, name: name in weights)
    for name, (weight, bias) in weights.items():  # torchao makes new ones on the meta device
        layer = decoder_of(base).get_submodule(name)
        layer.weight, layer.bias = weight, bias


def rounding_layers(base: Any) -> list[Any]:
    """The linear layers that round."""
    return [module for module in base.modules() if hasattr(module, "weight_fake_quantizer")]


@contextmanager
def without_rounding(base: Any) -> Iterator[None]:
    """Computes without rounding.

    Two kernels whose sums differ in the last bit would round some values differently, by far more than a bit.
    """
    layers = rounding_layers(base)
    rounding = [(layer.activation_fake_quantizer, layer.weight_fake_quantizer) for layer in layers]
    quantizers = [quantizer for pair in rounding for quantizer in pair if quantizer is not None]
    for quantizer in quantizers:
        quantizer.enabled = False
    try:
        yield
    finally:
        for quantizer in quantizers:
            quantizer.enabled = True
