"""What a rank gets of a step: the tensors of its micro-batches, and counts of the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from trainers.data.layout import DocumentLayout, ScoredDocuments, TopTokens, to_device
from trainers.data.noise import TokenNoise

if TYPE_CHECKING:  # the pre-flight check plans batches without waiting for torch
    import torch


class LabelSources(NamedTuple):
    """Which source of a mix each label of a micro-batch is from.

    Args:
        of_label: `[labels]` number of the source.
        number: how many sources there are.
    """

    of_label: torch.Tensor
    number: int

    def sums(self, losses: torch.Tensor, labels: slice = slice(None)) -> torch.Tensor:
        """`[sources]` sum of the losses `[labels]` of each source; of some of the labels, if a slice is given."""
        return losses.new_zeros(self.number).index_add_(0, self.of_label[labels], losses)


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward pass on one rank; the fields of `LossModule.forward`.

    Args:
        input_ids: `[batch, sequence]`.
        position_ids: `[batch, sequence]` position of each token within its document.
        documents: boundaries of the documents in packed rows; None without packing.
        positions: `[labels]` flat index of each token that predicts a label; of the last token of each document, if the
            objective scores those.
        labels: `[labels]` token ids to predict; the last tokens themselves, if those are scored.
        real: `[batch, sequence]`, False for padding.
        tokens: number of real tokens in the full rows.
        slots: number of tokens in the full rows, padding included.
        scored: the documents whose log-probabilities the objective compares; None if it sums over tokens.
        taught: whether the objective compares with the distributions of a teacher; what that predicts at each label,
            if it was recorded.
        sources: which source of a mix each label is from; None if their losses are not told apart.
        noise: what to add to the embeddings of the tokens; None for nothing.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    documents: DocumentLayout | None
    positions: torch.Tensor
    labels: torch.Tensor
    real: torch.Tensor
    tokens: int
    slots: int
    scored: ScoredDocuments | None = None
    taught: bool | TopTokens = False
    sources: LabelSources | None = None
    noise: TokenNoise | None = None

    @property
    def labels_or_documents(self) -> int:
        """Number of labels on this rank; of documents, if the objective compares those."""
        return len(self.labels) if self.scored is None else len(self.scored.numbers)

    def with_kl(self, kl: torch.Tensor) -> MicroBatch:
        """A copy whose documents know the KL divergence of the global batch, a scalar."""
        assert self.scored is not None
        return replace(self, scored=replace(self.scored, kl=kl))

    def inputs(self, device: torch.device, expert_weights: torch.Tensor | None = None) -> dict[str, Any]:
        """The arguments of `LossModule.forward`, on a device.

        Args:
            device: the device of the model.
            expert_weights: weights of a load-balancing loss, which also needs the mask of real tokens.
        """
        names = ("input_ids", "position_ids", "positions", "labels")
        moved: dict[str, Any] = {name: to_device(getattr(self, name), device) for name in names}
        moved["documents"] = None if self.documents is None else self.documents.to(device)
        if self.scored is not None:
            moved["scored"] = self.scored.to(device)
        if self.taught is not False:
            moved["taught"] = self.taught if self.taught is True else self.taught.to(device)
        if self.sources is not None:
            moved["sources"] = LabelSources(to_device(self.sources.of_label, device), self.sources.number)
        if self.noise is not None:
            moved["noise"] = self.noise.to(device)
        if expert_weights is None:
            return moved
        return {**moved, "real_tokens": to_device(self.real, device), "expert_weights": expert_weights}


@dataclass(frozen=True)
class StepBatch:
    """One rank's share of one step.

    Args:
        micro_batches: the rank's micro-batches; the same number on every rank.
        trained_tokens: trained tokens in the global batch.
        tokens: real tokens in the global batch.
        squared_lengths: sum of squared document lengths in the global batch, for counting FLOPs.
        divisor: what the loss of the global batch is divided by: its trained tokens, or its examples.
        mismatched: this rank's micro-batches of the mismatched documents; the same number on every rank.
        metrics: what is known of the global batch before the step, such as the rewards of its answers.
        trained_by_source: trained tokens of each source of a mix in the global batch; empty without `sources` in the
            micro-batches.
    """

    micro_batches: list[MicroBatch]
    trained_tokens: int
    tokens: int
    squared_lengths: int
    divisor: int
    mismatched: list[MicroBatch]
    metrics: Mapping[str, float] = field(default_factory=dict)
    trained_by_source: Mapping[str, int] = field(default_factory=dict)
