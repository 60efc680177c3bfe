"""Frozen models beside the one that is trained, wrapped by the same strategy: a teacher, or the initial model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trainers.data.layout import AttentionMetadata, DocumentLayout, TopTokens
from trainers.objectives.distillation import Divergence, Gradients, Head, classes_of, compare_heads
from trainers.objectives.loss_module import LossModule
from trainers.objectives.sft import LOGITS_PER_CHUNK


class Frozen(LossModule):
    """A frozen model, always in evaluation mode, so without dropout.

    Its weights are gathered once per micro-batch, as no gradient flows back to it.

    Args:
        model: a transformers causal language model; its weights may be on the meta device.
        compute: dtype of matrix products.
    """

    title: str

    def __init__(self, model: nn.Module, compute: torch.dtype):
        super().__init__(model.requires_grad_(False), compute)
        self.eval()

    def train(self, mode: bool = True) -> Frozen:
        """Stays in evaluation mode, whatever the module around it does."""
        return super().train(False)

    def head_input(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, documents: DocumentLayout | None,
        positions: torch.Tensor,
    ) -> Head:  # fmt: skip
        """The output head with its input at `positions`; the arguments are those of `LossModule.forward`."""
        half = self.compute != torch.float32
        with torch.autocast(input_ids.device.type, self.compute, enabled=half, cache_enabled=False):
            with self.route.hand_over(AttentionMetadata(documents, self.over_ranks)) as more:
                output = self.output(self.inputs(input_ids, position_ids, documents, more))
            return self.head(self.picked(output, positions))

    @torch.no_grad()
    def top_tokens(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, documents: DocumentLayout | None,
        positions: torch.Tensor, top_k: int, temperature: float, vocab_size: int,
    ) -> Iterator[TopTokens]:  # fmt: skip
        """The most likely tokens at `positions`, in chunks of these.

        Args:
            input_ids, position_ids, documents, positions: see `LossModule.forward`.
            top_k: number of tokens.
            temperature: divides the logits.
            vocab_size: tokens among which they are; the head may have more rows.
        """
        head = self.head_input(input_ids, position_ids, documents, positions).narrowed(vocab_size)
        size = max(64, LOGITS_PER_CHUNK // (2 * vocab_size))
        for start in range(0, len(positions), size):
            logits, _ = head.logits(slice(start, start + size))
            log_probs = head.part.log_softmax(logits / temperature)
            ids = log_probs.topk(top_k, -1).indices
            classes, _ = classes_of(log_probs, ids, head.part)
            yield TopTokens(ids, classes, vocab_size)


class InitialModel(Frozen):
    """The model as it was before training, for the log-probabilities of labels.

    Args:
        model: see `Frozen`.
        compute: see `Frozen`.
        temperature: divides its logits.
    """

    title = "initial model"

    def __init__(self, model: nn.Module, compute: torch.dtype, temperature: float):
        super().__init__(model, compute)
        self.temperature = temperature


class Teacher(Frozen):
    """A frozen model, which compares a student's predictions with its own.

    It does so in its own forward pass, in which FSDP and ZeRO 3 have gathered its head; that of the student is gathered
    too, as it calls the teacher in its forward pass.

    Args:
        model: see `Frozen`.
        compute: see `Frozen`.
        divergence: the loss.
    """

    title = "teacher"

    def __init__(self, model: nn.Module, compute: torch.dtype, divergence: Divergence):
        super().__init__(model, compute)
        self.divergence: Divergence = divergence

    def forward(self, *args: Any, student: Head | None = None, want_gradients: bool = False, **kwargs: Any) -> Any:
        """The teacher's own supervised loss, for the probe; with a `student`, what `compare` returns."""
        if student is None:
            return super().forward(*args, **kwargs)
        return self.compare(student, want_gradients, *args, **kwargs)

    def compare(
        self,
        student: Head,
        want_gradients: bool,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        documents: DocumentLayout | None,
        positions: torch.Tensor,
        labels: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
        """Compares the predictions of a student with the teacher's; see `LossModule.forward` and `compare_heads`.

        Args:
            student: the student's head, and its input at `positions`.
            want_gradients: whether gradients are computed.
            input_ids: `[batch, sequence]`.
            position_ids: `[batch, sequence]`.
            documents: the same boundaries that the student got.
            positions: `[trained]`.
            labels: `[trained]`.
        """
        head = self.head_input(input_ids, position_ids, documents, positions)
        with torch.autocast(input_ids.device.type, enabled=False):
            return compare_heads(student, head, labels, self.divergence, want_gradients)
