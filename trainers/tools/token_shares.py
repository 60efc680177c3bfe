"""Lets a model on the meta device hold what one tensor-parallel rank does of the tokens between its blocks."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from trainers.objectives.output_head import decoder_of
from trainers.parallel.pipeline_split import final_norm
from trainers.parallel.tensor_sequence import TokenShards, norms_between
from trainers.strategy.tensor_plan import layer_plan


class _WithoutRanks(TokenShards):
    """Allocates what the first rank would, and asks no other."""

    def gathered(self, share: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """See `TokenShards`."""
        parts = share.new_empty(self.size * share.shape[1], share.shape[2])
        return parts[: shape.numel()].unflatten(0, shape)

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """See `TokenShards`."""
        return part.new_empty(1, -(-part.shape[:-1].numel() // self.size), part.shape[-1])

    def enter(self, block: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook before a block."""
        if inputs:
            return (self.enter_block(inputs[0]), *inputs[1:]), kwargs
        return inputs, {**kwargs, "hidden_states": self.enter_block(kwargs["hidden_states"])}

    def leave(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        """A hook after a block."""
        return (self.leave_block(output[0]), *output[1:]) if isinstance(output, tuple) else self.leave_block(output)


def divide_tokens(loss: Any, size: int) -> bool:
    """Divides the tokens between blocks, where `trainers.parallel.tensor` would; otherwise changes nothing.

    Args:
        loss: a `LossModule` with a model on the meta device that has the sizes of one rank.
        size: ranks that share each matrix.

    Returns:
        Whether it divided them.
    """
    plan, decoder = layer_plan(loss.base.config.get_text_config()), decoder_of(loss.base)
    names = [name for name, _ in decoder.named_modules() if re.sub(r"\.\d+\.", ".*.", name) in plan]
    blocks = {decoder.get_submodule(name.rpartition(".")[0]) for name in names}
    if not blocks or norms_between(loss, blocks) is None:
        return False
    shards = _WithoutRanks(None, 0, size)
    shards.install(list(decoder.layers), final_norm(decoder))
    for block in blocks:
        block.register_forward_pre_hook(shards.enter, with_kwargs=True)
        block.register_forward_hook(shards.leave)
    return True
