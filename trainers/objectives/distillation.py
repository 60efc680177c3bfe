"""Divergence between the distributions of a student and a teacher, in chunks of tokens over the vocabulary.

Logits of all tokens never exist at once, of neither model. Gradients are computed in the forward pass, where FSDP and
ZeRO 3 have gathered the weights of both output heads.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from trainers.objectives.output_head import HeadRule
from trainers.objectives.sft import LOGITS_PER_CHUNK, scaled


class Head:
    """An output head and its input.

    Deliberately not a dataclass: module wrappers such as FSDP recurse into those.

    Args:
        hidden: `[labels, hidden size]` in the compute dtype; without a layer, the logits `[labels, vocabulary]`.
        layer: the linear layer; None if it was applied already.
        rule: scale and cap of the logits.
    """

    def __init__(self, hidden: torch.Tensor, layer: nn.Linear | None, rule: HeadRule):
        self.hidden, self.rule = hidden, rule
        self.weight: torch.Tensor | None = None if layer is None else layer.weight
        self.bias: torch.Tensor | None = None if layer is None else layer.bias

    @property
    def vocab_size(self) -> int:
        """Number of logits of a token."""
        return self.hidden.shape[1] if self.weight is None else self.weight.shape[0]

    def narrowed(self, vocab_size: int) -> Head:
        """A head of the first tokens of the vocabulary, outside the graph, with its weight in the compute dtype."""
        head = Head(self.hidden.detach(), None, self.rule)
        if self.weight is None:
            head.hidden = head.hidden[:, :vocab_size]
        else:
            head.weight = self.weight.detach()[:vocab_size].to(self.hidden.dtype)
        head.bias = None if self.bias is None else self.bias.detach()[:vocab_size]
        return head

    def logits(self, span: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[chunk, vocabulary]` logits of some tokens in fp32 or wider, and their hyperbolic tangents under a cap."""
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

    def of_logits(
        self, student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor, want_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The summed loss of a chunk (a scalar), and its gradient with respect to the student's logits.

        Args:
            student: `[chunk, vocabulary]` logits in fp32 or wider.
            teacher: the same of the teacher.
            labels: `[chunk]` token ids.
            want_gradient: whether to compute the gradient; otherwise it is None.
        """
        own = functional.log_softmax(student / self.temperature, -1)
        other = functional.log_softmax(teacher / self.temperature, -1)
        gradient: torch.Tensor | None = None
        if self.loss_type == "forward_kl":
            loss = _kl(other, own).sum()
            gradient = own.exp().sub_(other.exp()).div_(self.temperature) if want_gradient else None
        else:
            # d loss / d logits = share * q * (log q - log m - KL(q, m)) / temperature, of the student q
            share = 1.0 if self.loss_type == "reverse_kl" else 1.0 - self.beta
            mixed = other
            if self.loss_type == "jsd":
                mixed = torch.logaddexp(other + math.log(self.beta), own + math.log(share))
            per_token = _kl(own, mixed)
            loss = share * per_token.sum()
            if self.loss_type == "jsd":
                loss = loss + self.beta * _kl(other, mixed).sum()
            if want_gradient:
                gradient = (own - mixed).sub_(per_token).mul_(own.exp()).mul_(share / self.temperature)
        if self.nll_weight:
            plain = own if self.temperature == 1.0 else functional.log_softmax(student, -1)
            loss = loss - self.nll_weight * plain.gather(1, labels[:, None]).sum()
            if gradient is not None:
                one_hot = torch.full_like(gradient[:, :1], -self.nll_weight)
                gradient.add_(plain.exp(), alpha=self.nll_weight).scatter_add_(1, labels[:, None], one_hot)
        return loss, gradient

    def metrics(self, student: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """`[2]`: KL(teacher, student) and the number of tokens that the student predicts, summed over a chunk."""
        own, other = (functional.log_softmax(logits / self.temperature, -1) for logits in (student, teacher))
        return torch.stack([_kl(other, own).sum(), (student.argmax(-1) == labels).sum().to(own.dtype)])


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`[chunk, 1]` KL(first, second) of log-probabilities `[chunk, vocabulary]`."""
    return (first.exp() * (first - second)).sum(-1, keepdim=True)


@torch.no_grad()
def compare_heads(
    student: Head, teacher: Head, labels: torch.Tensor, divergence: Divergence, want_gradients: bool
) -> tuple[torch.Tensor, torch.Tensor, Gradients]:
    """Summed loss of the student's predictions, in chunks of tokens, and its gradients.

    Both distributions are over the tokens that both models have: rows that pad the larger head are cut off.

    Args:
        student: head of the model that is trained, and its input.
        teacher: the same of the teacher, of the same tokens.
        labels: `[labels]` token ids.
        divergence: the loss.
        want_gradients: whether gradients are computed.

    Returns:
        The loss (a scalar), `[2]` metrics (counted only without gradients, otherwise 0), and the gradients of the
        student's head and input.
    """
    vocab_size = min(student.vocab_size, teacher.vocab_size)
    own, other = student.narrowed(vocab_size), teacher.narrowed(vocab_size)
    wide = torch.promote_types(own.hidden.dtype, torch.float32)
    loss, metrics = own.hidden.new_zeros((), dtype=wide), own.hidden.new_zeros(2, dtype=wide)
    gradients = _empty_gradients(student, wide) if want_gradients else Gradients(None, None, None)
    size = max(64, LOGITS_PER_CHUNK // (2 * vocab_size))
    for start in range(0, own.hidden.shape[0], size):
        span = slice(start, start + size)
        (logits, capped), targets = own.logits(span), labels[span]
        expected, _ = other.logits(span)
        term, gradient = divergence.of_logits(logits, expected.to(logits.dtype), targets, want_gradients)
        loss += term
        if gradient is None:
            metrics += divergence.metrics(logits, expected.to(logits.dtype), targets)
            continue
        gradient = own.before_rule(gradient, capped)
        if gradients.bias is not None:
            gradients.bias[:vocab_size] += gradient.sum(0)
        gradient = gradient.to(own.hidden.dtype)
        if gradients.hidden is not None and own.weight is None:
            gradients.hidden[span, :vocab_size] = gradient
        elif gradients.hidden is not None and own.weight is not None:
            gradients.hidden[span] = gradient @ own.weight
        if gradients.weight is not None:
            gradients.weight[:vocab_size] += gradient.t() @ own.hidden[span]
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
