"""Finds how a model turns hidden states into logits, by running its own forward pass on stand-ins.

Where the logits are `cap * tanh(scale * head(hidden) / cap)`, the loss can apply the head itself, in chunks of tokens.
The probe replaces the decoder by random hidden states and the head's weights by small random ones, so that it needs
neither memory nor time, and works for weights that are not loaded yet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers.modeling_outputs import BaseModelOutput

_TOKENS, _WIDTH, _VOCABULARY = 6, 16, 24
_TOLERANCE = 1e-5
"""Maximum difference of logits, relative to the largest: a model may cast, or scale in another order."""


SCALAR_HEAD = "score"
"""Name of the head of sequence-classification models."""


class HeadRule(NamedTuple):
    """Logits are `cap * tanh(scale * head(hidden) / cap)`, or `scale * head(hidden)` without a cap.

    Args:
        scale: factor on the head's output.
        cap: softcap of the logits (Gemma 2); None for none.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies the rule to the head's output."""
        logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def scalar_head(model: Any) -> Any:
    """The layer of a transformers sequence-classification model that scores hidden states; None for other models."""
    return getattr(model, SCALAR_HEAD, None) if "ForSequenceClassification" in type(model).__name__ else None


class HeadWeights(NamedTuple):
    """What an output head multiplies with.

    Args:
        weight: `[vocabulary, hidden size]`.
        bias: `[vocabulary]`, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None


def head_weights(head: Any) -> HeadWeights:
    """The weights of an output head, of which peft may train some rows (its `trainable_token_indices`)."""
    tokens = _token_adapter(head)
    if tokens is None:
        return HeadWeights(head.weight, head.bias)
    layer = tokens.base_layer
    weight = layer.weight if tokens.disable_adapters else tokens.get_merged_weights(tokens.active_adapters)
    return HeadWeights(weight, layer.bias)


def _token_adapter(head: Any) -> Any:
    return getattr(head, "_modules", {}).get("token_adapter")


def _computing(head: Any) -> Any:
    """The layer that computes: peft's trained copy of a head, if it has one, or the head of which it trains rows."""
    if (tokens := _token_adapter(head)) is not None:
        return tokens.base_layer
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies["default"]


class _DecoderOutput(BaseModelOutput):
    """Hidden states, and None for everything else that a family's decoder may return."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def decoder_of(model: Any) -> Any:
    """The part of a causal language model below its head; None if it has none.

    Of Llama 4, transformers' `get_decoder` returns the model itself, whose class has another prefix than the weights.
    """
    decoder = model.get_decoder()
    return getattr(model, "model", decoder) if decoder is model else decoder


def find_head_rule(model: Any) -> HeadRule | None:
    """Probes how a model's forward pass computes its logits.

    Args:
        model: a transformers causal language model; its weights may be on the meta device.

    Returns:
        The rule; None if the model computes its logits in another way, or changes its inputs before its decoder.
    """
    outer, decoder = model.get_output_embeddings(), decoder_of(model)
    head = _computing(outer)
    # Not a subclass: quantised and adapted heads compute something else.
    if type(head) is not nn.Linear or decoder is None or decoder is model:
        return None
    with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
        if _token_adapter(outer) is None:
            return _probe(model, head, decoder)
        with _replaced(outer, head.forward):  # the rows that are trained do not fit the stand-ins
            return _probe(model, head, decoder)


def _probe(model: Any, head: nn.Linear, decoder: Any) -> HeadRule | None:
    generator = torch.Generator().manual_seed(0)
    sizes = (1, _TOKENS, _WIDTH), (_VOCABULARY, _WIDTH), (_VOCABULARY,)
    hidden, weight, bias = (3 * torch.randn(size, generator=generator, dtype=torch.float32) for size in sizes)
    ids, calls = torch.arange(1, _TOKENS + 1)[None], list[dict[str, Any]]()

    def stand_in(*args: Any, **kwargs: Any) -> _DecoderOutput:
        calls.append({**dict(zip(("input_ids",), args, strict=False)), **kwargs})
        return _DecoderOutput(last_hidden_state=hidden)

    def embed(ids: torch.Tensor) -> torch.Tensor:  # multimodal models embed tokens before their decoder
        return torch.zeros(*ids.shape, model.config.get_text_config().hidden_size)

    small: dict[str, torch.Tensor | None] = {"weight": weight, "bias": None if head.bias is None else bias}
    try:
        with _replaced(decoder, stand_in), _replaced(model.get_input_embeddings(), embed), with_weights(head, small):
            logits = model(input_ids=ids, use_cache=False).logits
    except Exception:  # families fail in any way if they need more than the decoder's output
        logging.getLogger(__name__).debug("the model needs more than hidden states for its logits", exc_info=True)
        return None
    plain = nn.functional.linear(hidden, weight, small["bias"])
    unlike = not isinstance(logits, torch.Tensor) or logits.shape != plain.shape
    if unlike or len(calls) != 1 or not _unchanged(model, calls[0], ids):
        return None
    measured = float((logits * plain).sum() / plain.square().sum())  # of a scale that the config does not state
    return next((rule for rule in _candidates(model, measured) if _close(rule(plain), logits)), None)


def _unchanged(model: Any, call: dict[str, Any], ids: torch.Tensor) -> bool:
    """Whether the decoder got the token ids; multimodal models embed them first, as their decoder would."""
    return call.get("input_ids") is ids or model.config.get_text_config() is not model.config


def _candidates(model: Any, measured: float) -> Iterator[HeadRule]:
    """Rules with the scales and softcaps in the model's config; then one with the measured scale."""
    values = {name: value for name, value in vars(model.config.get_text_config()).items()
              if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0}  # fmt: skip
    scales = [float(value) for name, value in values.items() if "scal" in name or "multiplier" in name]
    caps = [float(value) for name, value in values.items() if "cap" in name]
    for cap, scale in product([None, *caps], [1.0, *scales, *(1 / scale for scale in scales)]):
        yield HeadRule(scale, cap)
    yield HeadRule(measured)


def _close(ours: torch.Tensor, logits: torch.Tensor) -> bool:
    return bool((ours - logits.float()).abs().max() <= _TOLERANCE * ours.abs().max())


@contextmanager
def _replaced(module: nn.Module, forward: Any) -> Iterator[None]:
    """Replaces the forward method of one module, which may already be another than its class's."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def with_weights(head: nn.Linear, weights: dict[str, torch.Tensor | None]) -> Iterator[None]:
    """Replaces weight and bias of a layer, for any number of features."""
    own = dict(head._parameters)
    head._parameters.update(
        {name: None if value is None else nn.Parameter(value, requires_grad=False) for name, value in weights.items()}
    )
    try:
        yield
    finally:
        head._parameters.update(own)
