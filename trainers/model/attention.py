"""Attention kernels that keep packed documents apart, registered as attention implementations of transformers.

transformers builds no mask for implementations without a mask function, so that ours always applies and no host sync is
spent on inspecting positions (its own detection of packed rows costs one per forward pass).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from trainers.data.layout import OUR_KERNELS, AttentionMetadata, DocumentLayout, received

if TYPE_CHECKING:  # slow to import
    from torch.nn.attention.flex_attention import BlockMask

# transformers treats any name containing `sdpa` as its own and checks that the model supports it: avoid the word.
KERNELS = {name: OUR_KERNELS + name for name in ("varlen", "flex", "documents", "eager")} | {
    "sdpa": f"{OUR_KERNELS}fused"
}


def avoid_cudnn() -> None:
    """Disables the cuDNN backend of PyTorch's fused attention, its first choice on Hopper since torch 2.11.

    Its backward pass gave NaN for masked rows of some lengths (pytorch issue 196678), and it builds a new plan for each
    shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def _mask(metadata: AttentionMetadata, length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Mask `[batch or 1, 1, query, key]`, True where a query may attend; None for plain causal attention."""
    ids = None if metadata.layout is None else metadata.layout.ids
    if ids is None and (window is None or window >= length):
        return None
    if window in metadata.masks:
        return metadata.masks[window]
    positions = torch.arange(length, device=device)
    allowed = positions[:, None] >= positions[None, :]
    if window is not None:
        allowed = allowed & (positions[:, None] - positions[None, :] < window)
    allowed = allowed[None]
    if ids is not None:
        allowed = allowed & (ids[:, :, None] == ids[:, None, :])
    if not torch.compiler.is_compiling():  # compiled, checkpointed blocks must have no side effects
        metadata.masks[window] = allowed[:, None]
    return allowed[:, None]


def _refuse_unknown(attention_mask: Any, arguments: dict[str, Any], softcap: bool = False, sinks: bool = True) -> None:
    """Raises ValueError for arguments that would be lost; `softcap` and `sinks` say what the caller supports."""
    if attention_mask is not None:
        raise ValueError("this model builds its own attention mask, which would be lost")
    unsupported = [*(() if sinks else ("s_aux",)), *(() if softcap else ("softcap",)), "position_bias", "cache"]
    for name in unsupported:
        if arguments.get(name) is not None:
            raise ValueError(f"this model's attention uses {name}, which is not supported")


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that PyTorch's fused attention takes besides tensors and mask."""
    return {name: arguments[name] for name in ("dropout", "scaling") if name in arguments}


_SINK_WIDTH = 8
"""Dimensions that a sink adds to each head; one would do, but fused kernels like multiples of 8."""


def _fused(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> torch.Tensor:
    """PyTorch's fused attention, causal without a mask, with the attention sinks `s_aux` if the layer has them.

    A sink (https://arxiv.org/abs/2508.10925) is a learned score per head that takes part in the softmax and has no
    value. It becomes a key before all others, with a value of zero: one more dimension of the queries holds the score,
    and only the new key has a 1 there. No kernel needs to know of it, and autograd finds its gradient.
    """
    sinks, size = kwargs.get("s_aux"), value.shape[-1]
    if sinks is None:
        return sdpa_attention_forward(module, query, key, value, mask, is_causal=True, **_plain(kwargs))[0]
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    scores = (sinks / scale).to(query.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
    query = nn.functional.pad(torch.cat([query, scores], -1), (0, _SINK_WIDTH - 1, 1, 0))
    new_key = torch.zeros_like(key[:, :, :1])
    unit = nn.functional.pad(torch.ones_like(new_key[..., :1]), (0, _SINK_WIDTH - 1))
    key = torch.cat([torch.cat([new_key, unit], -1), nn.functional.pad(key, (0, _SINK_WIDTH))], 2)
    value = nn.functional.pad(value, (0, query.shape[-1] - size, 1, 0))
    if mask is not None:
        mask = nn.functional.pad(mask, (1, 0, 1, 0), value=True)
    arguments = {**_plain(kwargs), "scaling": scale}
    output, _ = sdpa_attention_forward(module, query, key, value, mask, is_causal=True, **arguments)
    return output[:, 1:, :, :size]


def sdpa(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    metadata: AttentionMetadata, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """PyTorch's fused attention with a document mask: any device and dtype, one shape for all micro-batches.

    Args:
        module: the attention layer.
        query: `[batch, heads, sequence, head size]`.
        key: `[batch, key heads, sequence, head size]`; query heads are a multiple of key heads.
        value: same shape as `key`.
        attention_mask: must be None.
        metadata: the documents of the micro-batch.
        kwargs: further arguments of the layer, such as `scaling` and `sliding_window`.

    Returns:
        `[batch, sequence, heads, head size]`, and None in place of attention weights.

    Raises:
        ValueError: if the model passes its own mask or an unsupported argument.
    """
    _refuse_unknown(attention_mask, kwargs)
    mask = _mask(metadata, query.shape[2], kwargs.get("sliding_window"), query.device)
    return _fused(module, query, key, value, mask, **kwargs), None


class _SpreadSlots(torch.autograd.Function):
    """Scatters rows to distinct slots, with zeros in between; the backward pass gathers them (see `_GatherSlots`)."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
        ctx.slots = slots
        return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, slots, rows)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return upstream[0].index_select(0, ctx.slots), None, None


class _GatherSlots(torch.autograd.Function):
    """Gathers rows from distinct slots; its backward pass need not accumulate, unlike that of `index_select`."""

    @staticmethod
    def forward(ctx: Any, spread: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.slots, ctx.size = slots, spread.shape[0]
        return spread.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        rows = upstream[0]
        return rows.new_zeros(ctx.size, *rows.shape[1:]).index_copy_(0, ctx.slots, rows), None


def documents(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    metadata: AttentionMetadata, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """PyTorch's fused attention on each document separately, in batches of similar length. Shapes as in `sdpa`.

    The cost is quadratic in the lengths of documents, not of rows. Falls back to `sdpa` if a sliding window is shorter
    than the longest document.
    """
    layout, window = metadata.layout, kwargs.get("sliding_window")
    if layout is None or (window is not None and window < layout.longest):
        return sdpa(module, query, key, value, attention_mask, metadata, **kwargs)
    _refuse_unknown(attention_mask, kwargs)

    def attend(*states: torch.Tensor) -> torch.Tensor:
        queries, keys, values = (part.transpose(1, 2) for part in states)
        return _fused(module, queries, keys, values, None, **kwargs)

    output = by_document(attend, layout, *(_rows(states) for states in (query, key, value)))
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


def by_document(run: Callable[..., torch.Tensor], layout: DocumentLayout, *states: torch.Tensor) -> torch.Tensor:
    """Runs a function on each document separately, in batches of similar length.

    Documents are padded on the right, where causal functions do not look, so that no mask is needed.

    Args:
        run: causal; takes and returns `[documents, length, ...]`.
        layout: the documents.
        states: `[tokens, ...]` each.

    Returns:
        `[tokens, ...]`
    """
    slots, buckets = layout.side_by_side
    sizes = [count * width for count, width in buckets]
    spread = (_SpreadSlots.apply(rows, slots, sum(sizes)).split(sizes) for rows in states)
    parts = [
        run(*(part.unflatten(0, bucket) for part in batch)).flatten(0, 1)
        for bucket, *batch in zip(buckets, *spread, strict=True)
    ]
    return _GatherSlots.apply(torch.cat(parts), slots)


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """Reshapes `[batch, heads, sequence, head size]` to `[batch * sequence, heads, head size]`."""
    return heads.transpose(1, 2).flatten(0, 1)


def varlen(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    metadata: AttentionMetadata, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Flash attention over documents of varying length: NVIDIA GPUs, bf16 or fp16. Shapes as in `sdpa`.

    Layers with attention sinks are given to `documents`.
    """
    from torch.nn.attention.varlen import varlen_attn

    layout, window = metadata.layout, kwargs.get("sliding_window")
    if layout is None or kwargs.get("s_aux") is not None:
        return documents(module, query, key, value, attention_mask, metadata, **kwargs)
    _refuse_unknown(attention_mask, kwargs)
    # Autocast does not cover this kernel, and normalized queries and keys are fp32: cast them.
    queries, keys, values = (_rows(states).to(value.dtype) for states in (query, key, value))
    more: dict[str, Any] = {"scale": kwargs.get("scaling"), "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        more["enable_gqa"] = True
    else:
        groups = query.shape[1] // key.shape[1]
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    # A compiled block would recompile for each length; the length of a row is a valid bound too.
    borders, longest = layout.borders, query.shape[2] if torch.compiler.is_compiling() else layout.longest
    output: Any = varlen_attn(queries, keys, values, borders, borders, longest, longest, **more)
    return output.unflatten(0, (query.shape[0], query.shape[2])), None


def flex(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    metadata: AttentionMetadata, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compiled FlexAttention with a block mask of documents, and a softcap if any: NVIDIA GPUs. Shapes as in `sdpa`."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    _refuse_unknown(attention_mask, kwargs, softcap=True)
    cap: Any = kwargs.get("softcap")
    blocks = _blocks(metadata, query.shape[2], kwargs.get("sliding_window"), query)

    def capped(score: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    sinks: Any = kwargs.get("s_aux")
    attend = _compiled_flex() if query.is_cuda else flex_attention
    # "AUTO" picks the decoding kernel for short rows, which lacks a configuration for four query heads per key head.
    options: Any = {"BACKEND": "TRITON"} if query.is_cuda else None
    output = attend(
        query.to(value.dtype), key.to(value.dtype), value, score_mod=capped if cap else None, block_mask=blocks,
        scale=kwargs.get("scaling"), enable_gqa=query.shape[1] != key.shape[1], kernel_options=options,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is not None:  # it takes its share of the softmax, and adds nothing to the output
        output, sums = output
        output = output * torch.sigmoid(sums.lse - sinks.float()[None, :, None])[..., None].to(output.dtype)
    return output.transpose(1, 2).contiguous(), None


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _blocks(metadata: AttentionMetadata, length: int, window: int | None, like: torch.Tensor) -> BlockMask:
    """The block mask of documents and sliding window, cached in `metadata`."""
    from torch.nn.attention.flex_attention import create_block_mask

    ids = None if metadata.layout is None else metadata.layout.ids

    def allowed(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = query >= key
        seen = seen if window is None else seen & (query - key < window)
        return seen if ids is None else seen & (ids[batch, query] == ids[batch, key])

    if (length, window) not in metadata.blocks:
        rows = None if ids is None else ids.shape[0]
        metadata.blocks[length, window] = create_block_mask(allowed, rows, None, length, length, like.device)
    return metadata.blocks[length, window]


def eager(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    metadata: AttentionMetadata, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention by plain matrix products with softmax in fp32; supports a softcap. Shapes as in `sdpa`."""
    _refuse_unknown(attention_mask, kwargs, softcap=True)
    length = query.shape[2]
    mask = _mask(metadata, length, kwargs.get("sliding_window"), query.device)
    return _products(module, query, key, value, mask, **kwargs), None


def _products(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scaling = kwargs.get("scaling")
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if (cap := kwargs.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is None:
        length = query.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if (sinks := kwargs.get("s_aux")) is not None:  # a score without a key or value
        scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(query.dtype)
    weights = nn.functional.dropout(weights, kwargs.get("dropout", 0.0), module.training)
    return (weights @ value).transpose(1, 2).contiguous()


def attend_masked(
    kernel: Any, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    allowed: torch.Tensor | None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """Attention between different numbers of queries and keys under an explicit mask; shapes as in `sdpa`.

    Args:
        kernel: `eager` for plain matrix products; any other uses PyTorch's fused attention.
        module: the attention layer, or a stand-in for it.
        query: queries of one document.
        key: keys of the same document.
        value: values of the same document.
        allowed: `[query, key]`, True where a query may attend; None for causal attention of equal lengths.
        kwargs: further arguments of the layer.
    """
    if kernel is eager or kwargs.get("softcap") is not None:
        return _products(module, query, key, value, allowed, **kwargs)
    mask = None if allowed is None else allowed[None, None]
    return sdpa_attention_forward(module, query, key, value, mask, is_causal=True, **_plain(kwargs))[0]


def attention_function(kernel: Any) -> Any:
    """Wraps a kernel for transformers: finds the metadata, and attends across ranks if rows are sharded."""

    @wraps(kernel)
    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        attention_metadata: AttentionMetadata | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        metadata = received(attention_metadata, torch.compiler.is_compiling())
        if metadata.over_ranks is None:
            return kernel(module, query, key, value, attention_mask, metadata, **kwargs)
        _refuse_unknown(attention_mask, kwargs, softcap=kernel in (eager, flex), sinks=False)
        return metadata.over_ranks.attend(kernel, metadata, module, query, key, value, **kwargs)

    return attend


for _name, _kernel in (("varlen", varlen), ("flex", flex), ("documents", documents), ("sdpa", sdpa), ("eager", eager)):
    AttentionInterface.register(KERNELS[_name], attention_function(_kernel))
