"""Frozen models beside the one that is trained, wrapped by the same strategy: a teacher, or the initial model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trainers.data.layout import AttentionMetadata, DocumentLayout
from trainers.objectives.distillation import Divergence, Gradients, Head, compare_heads
from trainers.objectives.loss_module import LossModule


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
        self.divergence = divergence

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
        half = self.compute != torch.float32
        with torch.autocast(input_ids.device.type, self.compute, enabled=half, cache_enabled=False):
            with self.route.hand_over(AttentionMetadata(documents, self.over_ranks)) as more:
                output = self.output(self.inputs(input_ids, position_ids, documents, more))
            picked = self.picked(output, positions)
        with torch.autocast(input_ids.device.type, enabled=False):
            return compare_heads(student, self.head(picked), labels, self.divergence, want_gradients)
