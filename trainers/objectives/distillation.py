"""Divergence between the distributions of a student and a teacher, in chunks of tokens over the vocabulary.

Logits of all tokens never exist at once, of neither model. Gradients are computed in the forward pass, where FSDP and
ZeRO 3 have gathered the weights of both output heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from trainers.data.layout import TopTokens
from trainers.objectives.log_probs import VocabularyShard
from trainers.objectives.output_head import HeadRule
from trainers.objectives.sft import LOGITS_PER_CHUNK, scaled


class Head:
    """An output head and its input.

    Deliberately not a dataclass: module wrappers such as FSDP recurse into those.

    Args:
        hidden: `[labels, hidden size]` in the compute dtype; without a layer, the logits `[labels, vocabulary]`.
        layer: the linear layer; None if it was applied already.
        rule: scale and cap of the logits.
        part: this rank's part of the vocabulary, if that is split over ranks; the layer has the rows of it.
    """

    def __init__(
        self, hidden: torch.Tensor, layer: nn.Linear | None, rule: HeadRule, part: VocabularyShard | None = None
    ):
        self.hidden, self.rule = hidden, rule
        self.weight: torch.Tensor | None = None if layer is None else layer.weight
        self.bias: torch.Tensor | None = None if layer is None else layer.bias
        self.part = VocabularyShard(0, self.columns) if part is None else part

    @property
    def columns(self) -> int:
        """Number of logits of a token on this rank."""
        return self.hidden.shape[1] if self.weight is None else self.weight.shape[0]

    @property
    def vocab_size(self) -> int:
        """Number of logits of a token, on all ranks together."""
        return self.part.vocab_size

    def narrowed(self, vocab_size: int) -> Head:
        """A head of the first tokens of the vocabulary, outside the graph, with its weight in the compute dtype."""
        columns = max(0, min(vocab_size - self.part.start, self.columns))
        part = VocabularyShard(self.part.start, vocab_size, self.part.group)
        head = Head(self.hidden.detach(), None, self.rule, part)
        if self.weight is None:
            head.hidden = head.hidden[:, :columns]
        else:
            head.weight = self.weight.detach()[:columns].to(self.hidden.dtype)
        head.bias = None if self.bias is None else self.bias.detach()[:columns]
        return head

    def logits(self, span: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[chunk, columns]` logits of some tokens in fp32 or wider, and their hyperbolic tangents under a cap."""
        rows = self.hidden[span]
        logits = rows if self.weight is None else rows @ self.weight.t()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits if self.bias is None else logits + self.bias.to(logits.dtype)
        if self.weight is None:  # the model has applied its rule itself
            return logits, None
        logits = logits * self.rule.scale if self.rule.scale != 1.0 else logits
        if self.rule.cap is None:
            return logits, None
        capped = torch.tanh(logits / self.rule.cap)
        return capped * self.rule.cap, capped

    def before_rule(self, gradient: torch.Tensor, capped: torch.Tensor | None) -> torch.Tensor:
        """Gradient of the layer's output, from that of the logits."""
        gradient = gradient if capped is None else gradient * (1 - capped**2)
        return gradient if self.weight is None or self.rule.scale == 1.0 else gradient * self.rule.scale


class Gradients(NamedTuple):
    """Gradients of a head's input, weight and bias; None where none is wanted."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class Divergence:
    """How far a student is from its teacher at a token.

    Args:
        loss_type: `forward_kl`, KL(teacher, student); `reverse_kl`, KL(student, teacher); `jsd`, the generalised
            Jensen-Shannon divergence (https://arxiv.org/abs/2306.13649).
        jsd_beta: share of the teacher in the mixture that `jsd` compares both with.
        distill_temperature: divides the logits of both models. The loss is not multiplied by its square.
        nll_weight: weight of the cross-entropy of the labels, at temperature 1.
    """

    def __init__(self, loss_type: str, jsd_beta: float, distill_temperature: float, nll_weight: float):
        self.loss_type, self.beta = loss_type, jsd_beta
        self.temperature, self.nll_weight = distill_temperature, nll_weight

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Divergence:
        """The divergence by the values of `TrainConfig.objective_options`."""
        names = ("loss_type", "jsd_beta", "distill_temperature", "nll_weight")
        return cls(**{name: options[name] for name in names})

    def of_logits(
        self, student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, part: VocabularyShard,
        want_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """The summed loss of a chunk (a scalar), and its gradient with respect to the student's logits.

        Args:
            student: `[chunk, columns]` logits in fp32 or wider, of the tokens in `part`.
            teacher: the same of the teacher, of the same tokens.
            labels: `[chunk]` token ids.
            part: this rank's part of the vocabulary.
            want_gradient: whether to compute the gradient; otherwise it is None.
        """
        own, other = part.log_softmax(student / self.temperature), part.log_softmax(teacher / self.temperature)
        loss, gradient = self._compare(own, other, part, want_gradient)
        return self._with_nll(loss, gradient, student, own, labels, part)

    def of_top_tokens(
        self, student: torch.Tensor, top: TopTokens, labels: torch.Tensor, part: VocabularyShard, want_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same of `k + 1` classes: the tokens that a teacher found most likely, and all others together.

        Args:
            student: `[chunk, columns]` logits in fp32 or wider, of the tokens in `part`.
            top: what the teacher predicts at the same labels, of tokens in any part.
            labels: `[chunk]` token ids.
            part: this rank's part of the vocabulary.
            want_gradient: whether to compute the gradient; otherwise it is None.
        """
        own = part.log_softmax(student / self.temperature)
        classes, others = classes_of(own, top.ids, part)
        on_each_rank = VocabularyShard(0, classes.shape[1])
        loss, gradient = self._compare(classes, top.log_probs.to(own.dtype), on_each_rank, want_gradient)
        if gradient is not None:  # the logit of the last class is the log-sum-exp of its tokens: each has its share
            shares = (others - classes[:, -1:]).exp_()
            gradient = part.put(shares.mul_(gradient[:, -1:]), top.ids, gradient[:, :-1])
        return self._with_nll(loss, gradient, student, own, labels, part)

    def _compare(
        self, own: torch.Tensor, other: torch.Tensor, part: VocabularyShard, want_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The summed divergence of log-probabilities, and its gradient with respect to the logits behind `own`.

        Args:
            own: `[chunk, classes]` of the student.
            other: the same of the teacher.
            part: this rank's part of the classes.
            want_gradient: whether to compute the gradient; otherwise it is None.
        """
        if self.loss_type == "forward_kl":
            return _kl(other, own, part).sum(), own.exp().sub_(other.exp()) if want_gradient else None
        # d loss / d logits = share * q * (log q - log m - KL(q, m)), of the student q
        share = 1.0 if self.loss_type == "reverse_kl" else 1.0 - self.beta
        mixed = other
        if self.loss_type == "jsd":
            mixed = torch.logaddexp(other + math.log(self.beta), own + math.log(share))
        per_token = _kl(own, mixed, part)
        loss = share * per_token.sum()
        if self.loss_type == "jsd":
            loss = loss + self.beta * _kl(other, mixed, part).sum()
        return loss, (own - mixed).sub_(per_token).mul_(own.exp()).mul_(share) if want_gradient else None

    def _with_nll(
        self, loss: torch.Tensor, gradient: torch.Tensor | None, student: torch.Tensor, own: torch.Tensor,
        labels: torch.Tensor, part: VocabularyShard,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Adds the cross-entropy of the labels, and makes the gradient one of logits before the temperature.

        Args:
            loss, gradient: of `_compare`; the gradient `[chunk, columns]` is changed.
            student: `[chunk, columns]` logits.
            own: their log-probabilities at the temperature.
            labels: `[chunk]` token ids.
            part: this rank's part of the vocabulary.
        """
        gradient = gradient if gradient is None else gradient.div_(self.temperature)
        if self.nll_weight:
            plain = own if self.temperature == 1.0 else part.log_softmax(student)
            loss = loss - self.nll_weight * part.pick(plain, labels[:, None]).sum()
            if gradient is not None:
                one_hot = torch.full_like(labels[:, None], -self.nll_weight, dtype=gradient.dtype)
                part.add(gradient.add_(plain.exp(), alpha=self.nll_weight), labels[:, None], one_hot)
        return loss, gradient

    def metrics(
        self, student: torch.Tensor, teacher: torch.Tensor | TopTokens, labels: torch.Tensor, part: VocabularyShard
    ) -> torch.Tensor:
        """`[2]`: KL(teacher, student) and the number of tokens that the student predicts, summed over a chunk."""
        own, of_classes = part.log_softmax(student / self.temperature), part
        if isinstance(teacher, torch.Tensor):
            other = part.log_softmax(teacher / self.temperature)
        else:
            other, own = teacher.log_probs.to(own.dtype), classes_of(own, teacher.ids, part)[0]
            of_classes = VocabularyShard(0, own.shape[1])  # on each rank
        correct = (part.argmax(student) == labels).sum()
        return torch.stack([_kl(other, own, of_classes).sum(), correct.to(own.dtype)])


def classes_of(log_probs: torch.Tensor, ids: torch.Tensor, part: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """`[chunk, k + 1]` log-probabilities of some tokens and of all others together, and those of the others.

    Args:
        log_probs: `[chunk, columns]` of the tokens in `part`; so are those of the others.
        ids: `[chunk, k]` the tokens, in any part.
        part: this rank's part of the vocabulary.
    """
    others = part.put(log_probs.clone(), ids, -torch.inf)
    return torch.cat([part.pick(log_probs, ids), part.log_sum_exp(others)], 1), others


def _kl(first: torch.Tensor, second: torch.Tensor, part: VocabularyShard) -> torch.Tensor:
    """`[chunk, 1]` KL(first, second) of log-probabilities `[chunk, columns]` of the tokens in `part`."""
    return part.reduce((first.exp() * (first - second)).sum(-1, keepdim=True))


@torch.no_grad()
def compare_heads(
    student: Head, teacher: Head | TopTokens, labels: torch.Tensor, divergence: Divergence, want_gradients: bool
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """Summed loss of the student's predictions, in chunks of tokens, and its gradients.

    Both distributions are over the tokens that both models have: rows that pad the larger head are cut off. Collective,
    if the vocabulary is split over ranks; each of them then holds the same tokens of both heads.

    Args:
        student: head of the model that is trained, and its input.
        teacher: the same of the teacher, of the same tokens; or what it predicted, if that was recorded.
        labels: `[labels]` token ids.
        divergence: the loss.
        want_gradients: whether gradients are computed.

    Returns:
        The loss (a scalar), `[2]` metrics (counted only without gradients, otherwise 0), and the gradients of the
        student's head and input; all but those of the head are equal on every rank.
    """
    vocab_size = min(student.vocab_size, teacher.vocab_size)
    own, other = student.narrowed(vocab_size), teacher.narrowed(vocab_size) if isinstance(teacher, Head) else teacher
    part, columns = own.part, own.columns
    wide = torch.promote_types(own.hidden.dtype, torch.float32)
    loss, metrics = own.hidden.new_zeros((), dtype=wide), own.hidden.new_zeros(2, dtype=wide)
    gradients = _empty_gradients(student, wide) if want_gradients else Gradients(None, None, None)
    size = max(64, LOGITS_PER_CHUNK // (2 * vocab_size))
    for start in range(0, own.hidden.shape[0], size):
        span = slice(start, start + size)
        (logits, capped), targets = own.logits(span), labels[span]
        expected: torch.Tensor | TopTokens
        if isinstance(other, Head):
            expected = other.logits(span)[0].to(logits.dtype)
            term, gradient = divergence.of_logits(logits, expected, targets, part, want_gradients)
        else:
            expected = replace(other, ids=other.ids[span], log_probs=other.log_probs[span])
            term, gradient = divergence.of_top_tokens(logits, expected, targets, part, want_gradients)
        loss += term
        if gradient is None:
            metrics += divergence.metrics(logits, expected, targets, part)
            continue
        gradient = own.before_rule(gradient, capped)
        if gradients.bias is not None:
            gradients.bias[:columns] += gradient.sum(0)
        gradient = gradient.to(own.hidden.dtype)
        if gradients.hidden is not None and own.weight is None:
            gradients.hidden[span, :columns] = gradient
        elif gradients.hidden is not None and own.weight is not None:
            gradients.hidden[span] = gradient @ own.weight
        if gradients.weight is not None:
            gradients.weight[:columns] += gradient.t() @ own.hidden[span]
    if gradients.hidden is not None:  # each rank's part of the vocabulary contributes a term
        part.reduce(gradients.hidden)
    return loss, metrics, gradients


def _empty_gradients(head: Head, wide: torch.dtype) -> Gradients:
    weight, bias = (
        torch.zeros_like(part, dtype=wide) if part is not None and part.requires_grad else None
        for part in (head.weight, head.bias)
    )
    return Gradients(torch.zeros_like(head.hidden) if head.hidden.requires_grad else None, weight, bias)


class _Attached(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        loss: torch.Tensor,
        gradients: Gradients,
    ) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        factor = upstream[0].to(torch.promote_types(upstream[0].dtype, torch.float32))
        gradients = (None if gradient is None else scaled(gradient, factor) for gradient in ctx.gradients)
        del ctx.gradients
        return *gradients, None, None


def attach(loss: torch.Tensor, student: Head, gradients: Gradients) -> torch.Tensor:
    """Makes a loss differentiable with respect to a head and its input, by gradients that were computed with it."""
    attached: torch.Tensor = _Attached.apply(student.hidden, student.weight, student.bias, loss, gradients)
    return attached
