"""Sequence sharding: each rank holds a shard of every row; only attention communicates with the other ranks.

Ulysses (`sp`, https://arxiv.org/abs/2309.14509) exchanges shards of rows for subsets of heads around attention, so that
any kernel sees full rows. Context parallelism (`cp`) gathers keys and values as Llama 3 does
(https://arxiv.org/abs/2407.21783), whatever the number of heads, and attends with the local queries; zigzag shards
balance the work of causal attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from math import lcm
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch.utils.checkpoint import checkpoint

from trainers.config.mistakes import ConfigError
from trainers.data.layout import AttentionMetadata, DocumentLayout, SequenceShard
from trainers.model.attention import attend_masked
from trainers.model.small_model import row_sharding_problem
from trainers.objectives.loss_module import LossModule
from trainers.strategy.mesh import Mesh, MeshSizes, heads_mistake

Kernel = Callable[..., tuple[torch.Tensor, None]]
LARGEST_MASK = 2**23
"""Elements of the largest mask of queries x keys: 8 MiB, which a kernel may copy to fp32."""


class _Exchange(torch.autograd.Function):
    """All-to-all: sends part `i` of the first dimension to rank `i`; the backward pass returns the gradients."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        gradient = upstream[0].contiguous()
        received = torch.empty_like(gradient)
        distributed.all_to_all_single(received, gradient, group=ctx.group)
        return received, None


class _GatherSequence(torch.autograd.Function):
    """All-gathers the shards of all ranks into `[ranks, ...]`; the backward pass reduce-scatters gradients in fp32."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.dtype = group, part.dtype
        size = distributed.get_world_size(group)
        parts = part.new_empty(size * len(part), *part.shape[1:])
        distributed.all_gather_into_tensor(parts, part.contiguous(), group=group)
        return parts.unflatten(0, (size, len(part)))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        wide = torch.promote_types(ctx.dtype, torch.float32)
        gradient = upstream[0].to(wide).flatten(0, 1).contiguous()
        part = gradient.new_empty(*upstream[0].shape[1:])
        distributed.reduce_scatter_tensor(part, gradient, group=ctx.group)
        return part.to(ctx.dtype), None


class SumOverShards(torch.autograd.Function):
    """Sums over ranks that share rows, each of which computes the same result from the sum.

    Each backpropagates to its own part alone; the strategy adds up the gradients of the weights.
    """

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: Any) -> torch.Tensor:
        summed = parts.clone()
        distributed.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return upstream[0], None


class Ulysses:
    """Attention over full rows with a subset of the heads per rank.

    Args:
        group: the ranks that share rows.
    """

    def __init__(self, group: Any):
        self.group, self.size = group, distributed.get_world_size(group)

    def attend(
        self, kernel: Kernel, metadata: AttentionMetadata, module: Any,
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Runs a kernel; same shapes as the kernel, with this rank's shard of the sequence."""
        # Repeat key heads where the ranks outnumber or do not divide them, so that every rank gets the same number.
        repeats = lcm(key.shape[1], self.size) // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        query, key, value = (self._to_heads(states) for states in (query, key, value))
        attended, _ = kernel(_stand_in(module, query, key), query, key, value, None, metadata, **kwargs)
        return self._to_rows(attended), None

    def _to_heads(self, rows: torch.Tensor) -> torch.Tensor:
        """Converts `[batch, heads, shard, head size]` to `[batch, heads / ranks, sequence, head size]`."""
        parts = rows.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        return _Exchange.apply(parts, self.group).movedim(0, 2).flatten(2, 3)

    def _to_rows(self, heads: torch.Tensor) -> torch.Tensor:
        """Converts `[batch, sequence, heads / ranks, head size]` to `[batch, shard, heads, head size]`."""
        parts = heads.unflatten(1, (self.size, -1)).movedim(1, 0).contiguous()
        return _Exchange.apply(parts, self.group).movedim(0, 2).flatten(2, 3)


class ContextParallel:
    """Attention of this rank's queries to the keys and values of full rows, one document at a time.

    Args:
        group: the ranks that share rows.
    """

    def __init__(self, group: Any):
        self.group, self.size = group, distributed.get_world_size(group)
        self.rank = distributed.get_rank(group)

    def attend(
        self, kernel: Kernel, metadata: AttentionMetadata, module: Any,
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Runs a kernel; same shapes as the kernel, with this rank's shard of the sequence."""
        key, value = self._gathered(torch.stack([key.to(value.dtype), value])).unbind()
        stand_in, window = _stand_in(module, query, key), kwargs.get("sliding_window")
        # Which queries meet which keys depends only on documents and window: compute it once for all layers.
        if window not in metadata.pieces:
            metadata.pieces[window] = list(self._pieces(metadata.layout, key.shape[2], window, key.device))
        lines = []
        for rows, line in metadata.pieces[window]:
            parts = []
            for (start, stop, first, last), allowed, recomputes in line:
                states = query[rows, :, start:stop], key[rows, :, first:last], value[rows, :, first:last]
                attend: Callable[..., torch.Tensor] = partial(attend_masked, kernel, stand_in, **kwargs)
                if recomputes:
                    attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
                parts.append(attend(*states, allowed))
            lines.append(torch.cat(parts, 1))
        return torch.cat(lines), None

    def _pieces(
        self, layout: DocumentLayout | None, length: int, window: int | None, device: torch.device
    ) -> Iterator[tuple[slice, list[Any]]]:
        """Yields rows with equal document borders, and their `pieces` in `masked_blocks`."""
        spans = SequenceShard(self.rank, self.size, True).spans(length)
        for rows, borders in _lines(layout, length):
            local = pieces(borders, spans, window)
            yield rows, [block for piece in local for block in masked_blocks(piece, window, device)]

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        """Gathers `[2, batch, heads, shard, head size]` to `[2, batch, heads, sequence, head size]`, in token order."""
        # Shards arrive in rank order, but are zigzag: permute their columns back into place.
        length = part.shape[3] * self.size
        order = torch.cat(
            [torch.from_numpy(SequenceShard(rank, self.size, True).columns(length)) for rank in range(self.size)]
        )
        gathered = _GatherSequence.apply(part, self.group).movedim(0, 3).flatten(3, 4)
        return gathered.index_select(3, order.argsort().to(part.device))


def _stand_in(module: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    """The attributes that kernels read from an attention layer, for the given numbers of heads."""
    return SimpleNamespace(training=module.training, num_key_value_groups=query.shape[1] // key.shape[1])


def _lines(layout: DocumentLayout | None, length: int) -> Iterator[tuple[slice, list[int]]]:
    """Yields rows with equal document borders, and those borders; without a layout, each row is one document."""
    if layout is None:
        yield slice(None), [0, length]
        return
    borders = layout.host_borders
    for row in range(len(layout.ids)):
        inside = [border - row * length for border in borders if row * length <= border <= (row + 1) * length]
        yield slice(row, row + 1), inside


def pieces(borders: list[int], spans: list[tuple[int, int]], window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Local queries of each document, and the keys that they may attend to.

    Args:
        borders: start of each document in a row, and the end of the last one.
        spans: `[start, end)` columns of the row on this rank.
        window: sliding window, the maximum number of keys per query including itself; None for none.

    Yields:
        First and last-plus-one query in this rank's shard, first and last-plus-one key in the row.
    """
    done = 0  # local columns before this span: queries are indexed in the shard, keys in the row
    for span_start, span_stop in spans:
        for start, stop in pairwise(borders):
            first, last = max(start, span_start), min(stop, span_stop)
            if first < last:
                query = done + first - span_start
                yield query, query + last - first, start if window is None else max(start, first - window + 1), last
        done += span_stop - span_start


def in_blocks(piece: tuple[int, int, int, int], window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Splits the queries of a piece whose mask would have more than `LARGEST_MASK` elements; see `pieces`.

    Args:
        piece: first and last-plus-one query, first and last-plus-one key.
        window: sliding window; None for none.
    """
    start, stop, first, last = piece
    if _is_triangle(stop - start, last - first, window):
        yield piece
        return
    size = max(LARGEST_MASK // (last - first), 1)
    for query in range(start, stop, size):
        after = min(query + size, stop)
        key = last - (stop - query)  # position of the first of these queries in the row
        yield query, after, first if window is None else max(first, key - window + 1), key + after - query


def masked_blocks(
    piece: tuple[int, int, int, int], window: int | None, device: torch.device
) -> list[tuple[tuple[int, int, int, int], torch.Tensor | None, bool]]:
    """The blocks of a piece, each with its mask, and whether it is run again in the backward pass.

    A kernel may copy a mask to the dtype of the queries and keep it for the backward pass, in every layer: large blocks
    run again instead. All masks are views of one, as thousands that each grow a little leave holes in the heap that the
    next does not fit in.
    """
    blocks = list(in_blocks(piece, window))
    sizes = [(stop - start, last - first) for start, stop, first, last in blocks]
    # Queries are at the last positions of their keys, so the masks are equal as seen from the lower right corner.
    shared = _causal(max(queries for queries, _ in sizes), max(keys for _, keys in sizes), window, device)
    masked = []
    for block, (queries, keys) in zip(blocks, sizes, strict=True):
        plain = _is_triangle(queries, keys, window)
        allowed = None if plain or shared is None else shared[-queries:, -keys:]
        masked.append((block, allowed, not plain and queries * keys > LARGEST_MASK // 2))
    return masked


def _is_triangle(queries: int, keys: int, window: int | None) -> bool:
    return queries == keys and (window is None or window >= keys)


def _causal(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Mask `[queries, keys]`, True where a query may attend, with queries at the last positions of the keys.

    None if it is a plain lower triangle.
    """
    if _is_triangle(queries, keys, window):
        return None
    # Compared without a matrix of differences, which would take eight bytes per element.
    rows = torch.arange(keys - queries, keys, device=device)[:, None]
    columns = torch.arange(keys, device=device)[None]
    return columns <= rows if window is None else (columns <= rows) & (columns > rows - window)


def sequence_shard(mesh: Mesh) -> SequenceShard:
    """The shard of every row that this rank holds."""
    return SequenceShard(mesh.sequence_shard, mesh.sizes.sequence_shards, mesh.sizes.cp > 1)


def over_ranks(mesh: Mesh) -> Ulysses | ContextParallel | None:
    """Attention across the ranks that share rows; None if rows are not sharded."""
    if mesh.sizes.sp > 1:
        return Ulysses(mesh.group("sp"))
    return ContextParallel(mesh.group("cp")) if mesh.sizes.cp > 1 else None


def share_rows(loss: LossModule, mesh: Mesh) -> None:
    """Lets attention and the objective see the parts of each row that other ranks hold."""
    loss.over_ranks = over_ranks(mesh)
    if loss.over_ranks is not None:
        loss.sum_over_shards = partial(_sum_over_shards, loss.over_ranks.group)
        loss.counts_documents = mesh.sequence_shard == 0


def _sum_over_shards(group: Any, parts: torch.Tensor) -> torch.Tensor:
    summed: torch.Tensor = SumOverShards.apply(parts, group)
    return summed


def refuse_unsplittable_rows(model_config: Any, sizes: MeshSizes) -> None:
    """Raises ConfigError for a model whose rows cannot be sharded, or whose heads Ulysses cannot distribute.

    Args:
        model_config: transformers config of the language model.
        sizes: sizes of the mesh.
    """
    if sizes.sequence_shards == 1:
        return
    kind, remedy = model_config.model_type, "use a strategy without sp and cp"
    if getattr(model_config, "num_attention_heads", None) is None:
        raise ConfigError(
            f"{sizes}: {kind} has no attention heads, and only attention sees the other parts of a row; {remedy}"
        )
    other = set(getattr(model_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    rope = str(getattr(model_config, "rope_parameters", None) or getattr(model_config, "rope_scaling", None))
    if other:
        raise ConfigError(
            f"{sizes}: {kind} has {', '.join(sorted(other))} layers, which carry state from one part of a "
            f"row to the next; {remedy}"
        )
    if "longrope" in rope or "dynamic" in rope:
        raise ConfigError(
            f"{sizes}: {kind} chooses its rotary frequencies by the longest position that a rank sees, and "
            f"each sees a different one; {remedy}"
        )
    if mistake := heads_mistake(sizes, int(model_config.num_attention_heads), kind):
        raise ConfigError(mistake)
    if problem := row_sharding_problem(model_config):
        raise ConfigError(f"{sizes}: {problem}; {remedy}")
