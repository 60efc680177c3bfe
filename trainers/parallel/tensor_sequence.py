"""Sequence parallelism inside a tensor-parallel group: between blocks, each rank keeps its share of the tokens.

After Megatron-LM (https://arxiv.org/abs/2205.05198). Norms and residual sums run on a rank's share; the tokens of all
ranks are gathered for a block, and its output is summed and scattered in one, which sends as much as the sum did.
Tokens are counted through all rows of a micro-batch, so that rows of any width and number divide; up to `ranks - 1`
copies of the last token fill the last shares, and nothing reads what becomes of them.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import distributed, nn

from trainers.data.layout import AttentionMetadata, MetadataRoute
from trainers.model.casts import without_values
from trainers.model.reachability import without_log
from trainers.objectives.output_head import decoder_of
from trainers.parallel.pipeline_split import final_norm

_TOKENS = 12


class _SplitTokens(torch.autograd.Function):
    """Keeps this rank's share of equal tokens; the backward pass gathers the gradients of all shares."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, shards: TokenShards) -> torch.Tensor:
        ctx.shards, ctx.shape = shards, full.shape[:-1]
        return shards.own(full)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return ctx.shards.gathered(upstream[0], ctx.shape), None


class _GatherTokens(torch.autograd.Function):
    """Gathers the shares of all ranks, where each goes on with the same; keeps its share of equal gradients."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, shards: TokenShards) -> torch.Tensor:
        ctx.shards = shards
        return shards.gathered(share, shards.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return ctx.shards.own(upstream[0], fill=False), None


class _EnterBlock(torch.autograd.Function):
    """Gathers the shares of all ranks, where each goes on with its heads; sums and scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, share: torch.Tensor, shards: TokenShards) -> torch.Tensor:
        ctx.shards = shards
        return shards.gathered(share, shards.shape)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return ctx.shards.summed(upstream[0]), None


class _LeaveBlock(torch.autograd.Function):
    """Sums what the ranks have of a block's output and scatters it; gathers the gradients of all shares."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, shards: TokenShards) -> torch.Tensor:
        ctx.shards, ctx.shape = shards, part.shape[:-1]
        return shards.summed(part)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return ctx.shards.gathered(upstream[0], ctx.shape), None


class TokenShards:
    """How a tensor-parallel group divides the tokens of a micro-batch between blocks.

    Args:
        group: the ranks of the group.
        rank: index of this rank in it.
        size: its size.

    Attributes:
        shape: `(batch, sequence)` of the micro-batch that runs.
    """

    def __init__(self, group: Any, rank: int, size: int):
        self.group, self.rank, self.size = group, rank, size
        self.shape = torch.Size((0, 0))
        self.handles: list[Any] = []

    def own(self, full: torch.Tensor, fill: bool = True) -> torch.Tensor:
        """This rank's share `[1, share, hidden size]` of `[batch, sequence, hidden size]`.

        Args:
            full: equal on every rank.
            fill: repeat the last token where a share has more than there are; otherwise zeros.
        """
        flat = full.flatten(0, -2)
        count, share = len(flat), -(-len(flat) // self.size)
        index = torch.arange(share * self.rank, share * (self.rank + 1), device=full.device)
        part = flat.index_select(0, index.clamp(max=count - 1))
        if not fill and share * (self.rank + 1) > count:
            part[max(count - share * self.rank, 0) :] = 0
        return part[None]

    def gathered(self, share: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """`[*shape, hidden size]` of the shares of all ranks."""
        parts = share.new_empty(self.size * share.shape[1], share.shape[2])
        distributed.all_gather_into_tensor(parts, share[0].contiguous(), group=self.group)
        return parts[: shape.numel()].unflatten(0, shape)

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's share `[1, share, hidden size]` of the sum of `[batch, sequence, hidden size]` over the ranks."""
        flat = part.flatten(0, -2)
        share = -(-len(flat) // self.size)
        flat = nn.functional.pad(flat, (0, 0, 0, share * self.size - len(flat)))
        total = flat.new_empty(share, flat.shape[1])
        distributed.reduce_scatter_tensor(total, flat.contiguous(), group=self.group)
        return total[None]

    def enter_block(self, share: torch.Tensor) -> torch.Tensor:
        """Input `[batch, sequence, hidden size]` of a block, of which each rank computes a part."""
        full: torch.Tensor = _EnterBlock.apply(share, self)
        return full

    def leave_block(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's share of a block's output, `[1, share, hidden size]`; `part` is to be summed over the ranks."""
        share: torch.Tensor = _LeaveBlock.apply(part, self)
        return share

    def install(self, layers: list[Any], norm: Any) -> None:
        """Divides the tokens at the first of some layers, and gathers them after `norm`, which follows the last.

        Args:
            layers: decoder layers that run one after the other.
            norm: the final norm, or what a pipeline stage has in its place.
        """
        for layer in layers:
            if not isinstance(layer, _OnShares):
                kind: Any = type(layer)
                layer.__class__, layer.token_shards = _on_shares(kind), self
            begin = self._split if layer is layers[0] else self._go_on
            self.handles.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
        self.handles.append(norm.register_forward_hook(self._gather))

    def remove(self) -> None:
        """Undoes `install`, to install it for each stage of a pipeline."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _split(self, layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = inputs[0] if inputs else kwargs["hidden_states"]
        self.shape = hidden.shape[:-1]
        share = _SplitTokens.apply(hidden, self)
        if inputs:
            return (share, *inputs[1:]), {**kwargs, "token_shape": self.shape}
        return inputs, {**kwargs, "hidden_states": share, "token_shape": self.shape}

    def _go_on(self, layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return inputs, {**kwargs, "token_shape": self.shape}

    def _gather(self, norm: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        full: torch.Tensor = _GatherTokens.apply(output, self)
        return full


class _OnShares:
    """Mixin for a decoder layer that runs on shares of tokens; remembers of how many, for when it is recomputed.

    A pipeline may have run another micro-batch since.
    """

    token_shards: TokenShards

    def forward(self: Any, *inputs: Any, token_shape: torch.Size, **kwargs: Any) -> Any:
        """Calls the forward of the original class."""
        self.token_shards.shape = token_shape
        return super().forward(*inputs, **kwargs)  # type: ignore[misc]


@lru_cache
def _on_shares(kind: Any) -> Any:
    return type(kind.__name__, (_OnShares, kind), {"__module__": kind.__module__})


def norms_between(loss: Any, blocks: set[nn.Module]) -> list[nn.Module] | None:
    """The modules with weights that can run on shares of tokens; None if something between blocks may need all.

    Between them, there may be modules without weights and those with vectors only. The layers must pass hidden states
    on to each other and to the final norm, which is found by a pass without values.

    Args:
        loss: the loss module, with weights on any device.
        blocks: its tensor-parallel blocks.
    """
    decoder = decoder_of(loss.base)
    layers, last = getattr(decoder, "layers", None), final_norm(decoder)
    if not isinstance(layers, nn.ModuleList) or last is None:
        return None
    outside = [[part for part in _outside(layer, blocks) if part._parameters] for layer in layers]
    norms = [last, *(norm for norms in outside for norm in norms)]
    vectors = all(weight is None or weight.ndim == 1 for norm in norms for weight in norm._parameters.values())
    others = [part for part in decoder.children() if part not in (layers, last, decoder.get_input_embeddings())]
    plain = vectors and not any(list(norm.children()) for norm in norms)
    plain = plain and not any(list(part.parameters()) for part in others)
    return norms if plain and _is_chain(loss, [*layers, last]) else None


def _is_chain(loss: Any, parts: list[nn.Module]) -> bool:
    """Whether each of some modules runs once in a pass, on what the one before it returned, and the last one returns
    the hidden states.
    """
    calls = list[tuple[nn.Module, Any, Any]]()

    def note(part: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.append((part, inputs[0] if inputs else kwargs.get("hidden_states"), output))

    handles = [part.register_forward_hook(note, with_kwargs=True) for part in parts]
    try:
        with without_log("torch._subclasses.fake_tensor"), without_values(loss), torch.no_grad():
            ids = torch.arange(_TOKENS)[None]
            with loss.route.hand_over(AttentionMetadata()) as more:
                states = decoder_of(loss.base)(**loss.inputs(ids, ids, None, more)).last_hidden_state
    except Exception:  # families fail in any way
        logging.getLogger(__name__).debug("how layers are called is unknown without values", exc_info=True)
        return False
    finally:
        MetadataRoute.current = None
        for handle in handles:
            handle.remove()
    passed_on = all(output is hidden for (_, _, output), (_, hidden, _) in pairwise(calls))
    return [part for part, _, _ in calls] == parts and passed_on and calls[-1][2] is states


def _outside(part: nn.Module, blocks: set[nn.Module]) -> list[nn.Module]:
    """A module and those in it, but for blocks and what is in them."""
    if part in blocks:
        return []
    return [part, *(below for child in part.children() for below in _outside(child, blocks))]
