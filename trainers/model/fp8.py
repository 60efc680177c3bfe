"""`mixed_precision=fp8`: computes the decoder's linear layers in float8 with torchao; weights stay fp32, the rest bf16.

Not covered by the parity promise. Operands of each product are scaled dynamically, per tensor, by their maximum.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.objectives.output_head import decoder_of


def fitting_layers(base: Any) -> list[str]:
    """Names (within the decoder) of linear layers that float8 kernels support: both sizes are multiples of 16."""
    linear = [(name, layer) for name, layer in decoder_of(base).named_modules() if isinstance(layer, nn.Linear)]
    return [name for name, layer in linear if layer.in_features % 16 == 0 and layer.out_features % 16 == 0]


def convert(base: Any) -> None:
    """Replaces the fitting layers with float8 ones in place, keeping names and weights.

    Raises:
        ConfigError: if no layer fits, so that nothing would be computed in float8.
    """
    names = set(fitting_layers(base))
    if not names:
        problem = f": {base.config.model_type} has no linear layer with both sizes divisible by 16"
        raise ConfigError.about("mixed_precision", "fp8", problem, "use bf16")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        decoder_of(base),
        module_filter_fn=lambda module, name: name in names,
        config=Float8LinearConfig(pad_inner_dim=True),  # weight gradients sum over any number of tokens
    )
