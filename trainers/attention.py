"""Attention that keeps packed documents apart, as one implementation registered with transformers.

transformers builds no mask for an implementation that it has no mask function for, so ours always applies and
no host sync is spent on inspecting positions (its own packed-row detection costs one per forward pass).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

KERNELS = {"sdpa": "tunesmith_fused", "eager": "tunesmith_eager"}


class _Documents:
    """The documents of the micro-batch in hand; its masks are built once for all layers."""

    def __init__(self) -> None:
        self.ids: torch.Tensor | None = None
        self.masks: dict[int | None, torch.Tensor] = {}


_current = _Documents()


def use_documents(ids: torch.Tensor | None) -> None:
    """Sets what the next forward and backward pass may attend to.

    Args:
        ids: `[batch, sequence]` document number of each token; tokens see earlier tokens of the same number.
            None: each row is one document, padded on the right if at all.
    """
    _current.ids, _current.masks = ids, {}


def _mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """`[batch or 1, 1, query, key]`, True where a query may look; None for plain causal attention."""
    if _current.ids is None and (window is None or window >= length):
        return None
    if window not in _current.masks:
        place = torch.arange(length, device=device)
        allowed = place[:, None] >= place[None, :]
        if window is not None:
            allowed = allowed & (place[:, None] - place[None, :] < window)
        allowed = allowed[None]
        if _current.ids is not None:
            allowed = allowed & (_current.ids[:, :, None] == _current.ids[:, None, :])
        _current.masks[window] = allowed[:, None]
    return _current.masks[window]


def _refuse_unknown(attention_mask: Any, arguments: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError("this model builds an attention mask of its own, which would be lost")
    for name in ("s_aux", "position_bias", "cache"):
        if arguments.get(name) is not None:
            raise ValueError(f"this model's attention uses {name}, which is not supported")


def sdpa(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **rest: Any
) -> tuple[torch.Tensor, None]:
    """PyTorch's fused attention under the document mask.

    Args:
        query: `[batch, heads, sequence, head size]`; key and value may have fewer heads.

    Returns:
        `[batch, sequence, heads, head size]` and None for the weights.
    """
    if rest.get("softcap") is not None:
        return eager(module, query, key, value, attention_mask, **rest)
    _refuse_unknown(attention_mask, rest)
    mask = _mask(query.shape[2], rest.pop("sliding_window", None), query.device)
    kept = {name: rest[name] for name in ("dropout", "scaling") if name in rest}
    return sdpa_attention_forward(module, query, key, value, mask, is_causal=True, **kept)


def eager(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **rest: Any
) -> tuple[torch.Tensor, None]:
    """The same in plain matrix products, softmax in fp32; honours a softcap. Shapes as in `sdpa`."""
    _refuse_unknown(attention_mask, rest)
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scaling = rest.get("scaling")
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if (cap := rest.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    length = query.shape[2]
    mask = _mask(length, rest.get("sliding_window"), query.device)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1).to(query.dtype)
    weights = nn.functional.dropout(weights, rest.get("dropout", 0.0), module.training)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(KERNELS["sdpa"], sdpa)
AttentionInterface.register(KERNELS["eager"], eager)
