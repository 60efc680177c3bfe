"""Checks that training computes what the model's own forward pass computes, and that no token sees later ones.

A few short documents are run through the training loss (packed if the run packs) and through the model's own forward
pass (one document per row). At the start of every run this probes the real model, wrapped by its strategy; before
loading weights, `small_model` probes a small copy.
"""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainers.config.mistakes import ConfigError
from trainers.data.layout import DocumentLayout, MetadataRoute
from trainers.model.attention import KERNELS
from trainers.model.qat import without_rounding
from trainers.objectives.output_head import decoder_of

_LENGTH, _HALF = 12, 6
_FAILURES = (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RuntimeError, IndexError)
"""Errors of models that cannot run this way; `torch.OutOfMemoryError` is excluded where they are caught."""
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Maximum relative difference (2-norm) of hidden states, by compute dtype: kernels sum in different orders.

Measured between two attention kernels in bf16: up to 3e-2 for 32 dense or 24 MoE layers, more for deeper models.
"""
_LOSS_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}
"""Maximum difference of the loss, relative if the loss is above 1, otherwise absolute; rounding has a floor."""
_LEAK = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Maximum change of a hidden state that must not change, as a fraction of the change of one that may."""


class ProbeError(Exception):
    """The reason that a model cannot be trained as loaded; does not state a remedy."""


@dataclass
class ForwardPass:
    """The result of a forward pass over the probe's rows.

    Args:
        hidden: `[rows, length, hidden size]` decoder outputs in fp32.
        loss: mean over the predicted tokens.
    """

    hidden: torch.Tensor
    loss: float


def probe_rows(vocabulary: int, device: torch.device) -> torch.Tensor:
    """`[4, 12]` token ids; rows 1 to 3 (from 0) differ from row 0 in token 6, 11 and 5 respectively."""
    ids = (torch.arange(_LENGTH, device=device) + 1).expand(4, _LENGTH) % vocabulary
    ids = ids.clone()
    for row, changed in enumerate((_HALF, _LENGTH - 1, _HALF - 1), start=1):
        ids[row, changed] = (ids[row, changed] + 7) % vocabulary
    return ids


@torch.no_grad()
def check_model_computes(
    wrapped: nn.Module,
    base: Any,
    packing: bool,
    device: torch.device,
    compute: torch.dtype,
    stock: bool = True,
    splits_rows: bool = False,
    of_teacher: bool = False,
) -> None:
    """Runs the probe at the start of a run.

    Args:
        wrapped: the module that computes the loss, as wrapped by the strategy.
        base: the transformers model in it.
        packing: whether rows contain several documents.
        device: the device of this rank.
        compute: dtype of matrix products.
        stock: also compare with the model's own forward pass, for which `wrapped` must have all layers.
        splits_rows: whether ranks share each row (cp, sp). As with packing, tokens may then look back only through our
            attention.
        of_teacher: probe the teacher in `wrapped`, of which `base` is the model then.

    Raises:
        ConfigError: if tokens see what they must not, if loss or hidden states differ from those of the model's own
            forward pass, or if the model cannot run with our attention at all. States a remedy.
    """
    packed, more = packing or splits_rows, {"of_teacher": True} if of_teacher else {}
    wrapped.eval()
    try:
        # Do not compile for a shape that is used once.
        with torch.compiler.set_stance("force_eager"), without_rounding(base):
            own = own_pass(wrapped, base, packed, device, **more) if stock else None
            compare(our_pass(wrapped, base, packed, device, **more), own, base.config.model_type, packed, compute)
    except ProbeError as error:
        if name := _damaged_weight(base):
            problem = f"the model's weights hold NaN or infinity (the first is {name})"
            raise ConfigError(f"{problem}; download the model again, or use another one") from None
        under = "" if type(wrapped).__name__ == "LossModule" else f" (under {type(wrapped).__name__})"
        if splits_rows:
            remedy = "a strategy without cp and sp, or another model"
        else:
            remedy = ("packing=false, " if packing else "") + "another model" + (" or strategy" if under else "")
        raise ConfigError(f"{error}{under}; use {remedy}") from None
    finally:
        wrapped.train()


def _damaged_weight(base: nn.Module) -> str | None:
    """Name of the first weight that is not finite, or of which this rank's part is not."""
    parts = ((name, weight.to_local() if isinstance(weight, DTensor) else weight)
             for name, weight in base.named_parameters())  # fmt: skip
    return next((name for name, part in parts if part.is_floating_point() and not part.isfinite().all()), None)


def compare(ours: ForwardPass, own: ForwardPass | None, kind: str, packing: bool, compute: torch.dtype) -> None:
    """Checks a pass of the training code for leaks, and against the model's own pass.

    Args:
        ours: the pass of the training code.
        own: the model's own pass; None to skip the comparison.
        kind: `model_type`, for error messages.
        packing: whether rows contain several documents.
        compute: dtype of matrix products.

    Raises:
        ProbeError: see `check_model_computes`.
    """
    for outcome in (own, ours):
        if outcome is not None and not outcome.hidden.isfinite().all():
            name = str(compute).removeprefix("torch.")
            raise ProbeError(f"{kind} models give NaN or infinity in {name}, which another mixed_precision may avoid")
    if own is not None:
        refuse_encoder(kind, own, compute)
    _refuse_leaks(kind, ours, packing, compute)
    if own is not None:
        _refuse_difference(kind, ours, own, compute)


def our_pass(wrapped: nn.Module, base: Any, packing: bool, device: torch.device, **more: bool) -> ForwardPass:
    """Runs a pass with the training code; raises ProbeError if it fails."""
    ids = probe_rows(base.config.get_text_config().vocab_size, device)
    index = torch.arange(_LENGTH, device=device).expand(4, _LENGTH)
    length = _HALF if packing else _LENGTH
    documents = DocumentLayout.of(np.arange(0, ids.numel() + 1, _HALF), 4).to(device) if packing else None
    positions, labels = _targets(ids, length)
    try:
        with decoder_outputs(base) as seen:
            total, _ = wrapped(ids, index % length, documents, positions, labels, **more)
    except _FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        kind = base.config.model_type
        if _reads_missing_mask(error):
            raise ProbeError(
                f"{kind} models compute with the mask of each row in code of their own, and our attention, which keeps "
                "documents apart, is given none"
            ) from None
        raise ProbeError(f"{kind} models fail in a training step: {in_one_line(error)}") from None
    finally:
        MetadataRoute.current = None  # the next call of the model has other documents
    return ForwardPass(seen[0], float(total) / len(labels))


def _reads_missing_mask(error: BaseException) -> bool:
    """Whether the statement that failed uses a mask that is None."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    if "'NoneType' object" not in str(error):
        return False
    end = frame.end_lineno or frame.lineno or 0
    return "mask" in "".join(linecache.getline(frame.filename, line) for line in range(_first_line(frame), end + 1))


def _first_line(frame: traceback.FrameSummary) -> int:
    """The line on which the expression of a frame begins; its own may be in the middle of a call."""
    source = ast.parse("".join(linecache.getlines(frame.filename)))
    lines = [
        node.lineno for node in ast.walk(source)
        if isinstance(node, ast.stmt) and node.lineno <= (frame.lineno or 0) <= (node.end_lineno or 0)
    ]  # fmt: skip
    return max(lines, default=frame.lineno or 0)


def own_pass(wrapped: nn.Module, base: Any, packing: bool, device: torch.device, **more: bool) -> ForwardPass:
    """Runs the model's own forward pass with its default attention, one document per row.

    Raises:
        ProbeError: if it fails.
    """
    length = _HALF if packing else _LENGTH
    ids = probe_rows(base.config.get_text_config().vocab_size, device).reshape(-1, length)
    positions, labels = _targets(ids, length)
    index = torch.arange(length, device=device).expand_as(ids)
    try:
        with own_attention(base), decoder_outputs(base) as seen:
            total, _ = wrapped(ids, index, None, positions, labels, own_forward=True, **more)
    except _FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ProbeError(f"{base.config.model_type} models fail on their own: {in_one_line(error)}") from None
    return ForwardPass(seen[0], float(total) / len(labels))


def _targets(ids: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat index of every token that has a next one in its document, and those next tokens.

    Args:
        ids: token ids in rows of full documents.
        length: length of each document.
    """
    tokens = torch.arange(ids.numel(), device=ids.device)
    positions = tokens[tokens % length < length - 1]
    return positions, ids.flatten()[positions + 1]


@contextmanager
def decoder_outputs(base: Any) -> Iterator[list[torch.Tensor]]:
    """Records the decoder's hidden states in fp32, or logits if there is no separate decoder or it returns logits."""
    seen: list[torch.Tensor] = []
    decoder = decoder_of(base)

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        states = output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)
        seen.append((output[0] if states is None else states).detach().float())

    handle = (base if decoder is None else decoder).register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def default_attention(base: Any) -> str:
    """The attention implementation that transformers would choose for the model on any device."""
    return "sdpa" if base._supports_sdpa else "eager"


@contextmanager
def own_attention(base: Any) -> Iterator[None]:
    """Runs a model with the attention that transformers would choose, in place of ours."""
    kernel = str(base.config._attn_implementation)
    if kernel not in KERNELS.values():
        yield
        return
    base.set_attn_implementation(default_attention(base))
    try:
        yield
    finally:
        base.set_attn_implementation(kernel)


def refuse_encoder(kind: str, own: ForwardPass, compute: torch.dtype) -> None:
    """Raises ProbeError if tokens see later ones in the model's own forward pass."""
    length = own.hidden.shape[1]
    rows = own.hidden.reshape(4, -1, length, own.hidden.shape[-1])
    # The first changed token lies in the middle or at the start of a document, the second at its end.
    after = (rows[1] - rows[0]).abs().amax(-1)[-1, _HALF % length + 1 :].max()
    last = (rows[2] - rows[0]).abs().amax(-1)[-1]
    if last[length - 1] == 0:  # XLM infers a row's length by counting padding tokens anywhere in it
        raise ProbeError(f"{kind} models leave out the last token of a row that contains their padding token")
    before = last[: length - 1].max()
    if not before <= _LEAK[compute] * after:
        raise ProbeError(
            f"{kind} models attend in both directions (their config.json does not say is_decoder=true), "
            "and cannot learn to predict the next token"
        )


def _refuse_leaks(kind: str, ours: ForwardPass, packing: bool, compute: torch.dtype) -> None:
    # Changing token 6 may move the states after it; changing the last token, or one of another document, must not.
    change = (ours.hidden[1:] - ours.hidden[0]).abs().amax(-1)  # [changed token, position]
    may_move, moved = change[0, _HALF + 1 :].max(), change[1, : _LENGTH - 1].max()
    if packing:
        moved = torch.maximum(moved, change[2, _HALF:].max())
    if not moved <= _LEAK[compute] * may_move:
        seen = "later tokens or another document" if packing else "later tokens"
        raise ProbeError(f"{kind} models see {seen} through their own attention or layers")


def _refuse_difference(kind: str, ours: ForwardPass, own: ForwardPass, compute: torch.dtype) -> None:
    reference = own.hidden.reshape(-1, own.hidden.shape[-1])
    hidden = float((ours.hidden.reshape(reference.shape) - reference).norm() / reference.norm())
    loss = abs(ours.loss - own.loss) / max(abs(own.loss), 1.0)
    if not (hidden <= _TOLERANCE[compute] and loss <= _LOSS_TOLERANCE[compute]):
        raise ProbeError(
            f"{kind} models would be trained as another model: on a probe our loss is {ours.loss:.6f} and the model's "
            f"own forward pass gives {own.loss:.6f}, hidden states differ by {hidden:.1e}"
        )


def in_one_line(error: BaseException) -> str:
    """The message of an exception in one line of at most 200 characters; that of a KeyError is a bare key."""
    name = f"{type(error).__name__}: " if isinstance(error, KeyError) else ""
    return name + " ".join(str(error).split())[:200] or type(error).__name__
