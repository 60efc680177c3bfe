"""`mixed_precision=fp8`: the decoder's linear layers in float8 by torchao; weights stay fp32, the rest is as in bf16.

Outside the parity promise. Each product scales its operands by their largest value, tensor by tensor.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def fitting_layers(base: Any) -> list[str]:
    """Names in the decoder of the layers that float8 kernels take: both sizes a multiple of 16."""
    linear = [(name, layer) for name, layer in base.get_decoder().named_modules() if isinstance(layer, nn.Linear)]
    return [name for name, layer in linear if layer.in_features % 16 == 0 and layer.out_features % 16 == 0]


def convert(base: Any) -> None:
    """Swaps those layers; names and weights stay."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    names = set(fitting_layers(base))
    convert_to_float8_training(
        base.get_decoder(),
        module_filter_fn=lambda module, name: name in names,
        config=Float8LinearConfig(pad_inner_dim=True),  # a weight's gradient sums over tokens, of any number
    )
