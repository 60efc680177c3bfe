"""A loss of the log-probabilities of labels, computed in chunks of tokens: logits of all of them never exist at once.

Used by objectives that compare documents. Their loss is not a sum over tokens, so its gradient is known only after all
log-probabilities are: a first pass computes those, and a second one the gradients, recomputing the logits. Both run in
the forward pass, where FSDP and ZeRO 3 have gathered the weights of the output head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from trainers.objectives.output_head import HeadRule
from trainers.objectives.sft import LOGITS_PER_CHUNK, scaled

Score = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Loss (a scalar) and metrics `[metrics]` of the log-probabilities `[labels]`."""


@dataclass(frozen=True)
class VocabularyShard:
    """The tokens whose rows of the output head this rank holds.

    Args:
        start: first token id.
        vocab_size: size of the full vocabulary.
        group: the ranks that share it; None if this rank holds all of it.
    """

    start: int
    vocab_size: int
    group: Any = None

    def reduce(self, values: torch.Tensor, operation: Any = distributed.ReduceOp.SUM) -> torch.Tensor:
        """Reduces values over the ranks, in place."""
        if self.group is not None:
            distributed.all_reduce(values, operation, self.group)
        return values

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """`[chunk, local vocabulary]` log-probabilities of these tokens among all, of logits of the same shape."""
        if self.group is None:
            return functional.log_softmax(logits, -1)
        shifted = logits - self.reduce(logits.max(-1, keepdim=True).values, distributed.ReduceOp.MAX)
        return shifted - self.reduce(shifted.exp().sum(-1, keepdim=True)).log_()

    def log_sum_exp(self, values: torch.Tensor) -> torch.Tensor:
        """`[chunk, 1]` logarithm of the summed exponentials of `[chunk, local vocabulary]` values."""
        if self.group is None:
            return values.logsumexp(-1, keepdim=True)
        largest = self.reduce(values.max(-1, keepdim=True).values, distributed.ReduceOp.MAX)
        largest = largest.clamp_(min=torch.finfo(values.dtype).min)  # all may be -inf
        return largest + self.reduce((values - largest).exp_().sum(-1, keepdim=True)).log_()

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """`[chunk]` the likeliest token; the lowest of several, as in a single process."""
        if self.group is None:
            return logits.argmax(-1)
        own, index = logits.max(-1)
        largest = self.reduce(own.clone(), distributed.ReduceOp.MAX)
        first = torch.where(own == largest, index + self.start, self.vocab_size)
        return self.reduce(first, distributed.ReduceOp.MIN)

    def pick(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`[chunk, n]` the values `[chunk, local vocabulary]` of tokens `[chunk, n]`, on every rank."""
        if self.group is None:
            return values.gather(1, ids)
        local, elsewhere = self._local(values, ids)
        return self.reduce(values.gather(1, local).masked_fill_(elsewhere, 0.0))

    def put(self, values: torch.Tensor, ids: torch.Tensor, new: torch.Tensor | float) -> torch.Tensor:
        """Values `[chunk, local vocabulary]`, which may be changed, with `new` `[chunk, n]` at tokens `[chunk, n]`."""
        if self.group is None:
            return values.scatter_(1, ids, new)
        local, elsewhere = self._local(values, ids)
        spare = functional.pad(values, (0, 1))  # a column for the tokens of other ranks
        return spare.scatter_(1, local.masked_fill_(elsewhere, values.shape[1]), new)[:, :-1]

    def add(self, values: torch.Tensor, ids: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """Adds `more` `[chunk, n]` to `values` `[chunk, local vocabulary]` at tokens `[chunk, n]`, in place."""
        if self.group is None:
            return values.scatter_add_(1, ids, more)
        local, elsewhere = self._local(values, ids)
        return values.scatter_add_(1, local, more.masked_fill(elsewhere, 0.0))

    def _local(self, values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of tokens on this rank, and which tokens other ranks hold, in place of which column 0 stands."""
        local = ids - self.start
        elsewhere = (local < 0) | (local >= values.shape[1])
        return local.masked_fill_(elsewhere, 0), elsewhere


class _Chunk:
    """Logits of a chunk of tokens over this rank's part of the vocabulary, and what their gradient needs.

    Args:
        rows: `[chunk, hidden size]` input of the head, in the compute dtype.
        weight: `[local vocabulary, hidden size]`, in the compute dtype.
        bias: `[local vocabulary]` or None.
        labels: `[chunk]`.
        rule: scale and cap of the logits.
        part: this rank's part of the vocabulary.
        temperature: divides the logits.
    """

    def __init__(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor,
        rule: HeadRule, part: VocabularyShard, temperature: float,
    ):  # fmt: skip
        self.rows, self.weight, self.rule, self.part, self.temperature = rows, weight, rule, part, temperature
        wide = torch.promote_types(rows.dtype, torch.float32)
        logits = (rows @ weight.t()).to(wide)
        logits = logits if bias is None else logits + bias.to(wide)
        logits = logits * rule.scale if rule.scale != 1.0 else logits
        self.capped: torch.Tensor | None = None
        if rule.cap is not None:
            self.capped = torch.tanh(logits / rule.cap)
            logits = self.capped * rule.cap
        self.logits = logits / temperature if temperature != 1.0 else logits
        targets = labels[:, None] - part.start
        self.elsewhere = (targets < 0) | (targets >= logits.shape[1])
        self.targets = targets.masked_fill(self.elsewhere, 0)

    def log_probs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[chunk]` log-probability of each label, and `[chunk, 1]` log of the summed exponentials."""
        largest = self.part.reduce(self.logits.max(-1, keepdim=True).values, distributed.ReduceOp.MAX)
        shifted = self.logits - largest
        target = shifted.gather(1, self.targets).masked_fill(self.elsewhere, 0.0)
        sums = self.part.reduce(torch.cat([shifted.exp().sum(-1, keepdim=True), target], 1))
        log_sum = sums[:, :1].log()
        return (sums[:, 1:] - log_sum).squeeze(1), largest + log_sum

    def gradient(self, upstream: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
        """Gradient of the head's output, before bias and scale: `upstream * (one-hot - softmax)` of the logits.

        Args:
            upstream: `[chunk]` gradient of each log-probability.
            log_sum: `[chunk, 1]` from `log_probs`.
        """
        gradient = (self.logits - log_sum).exp_().mul_(-upstream[:, None])
        one_hot = upstream[:, None].masked_fill(self.elsewhere, 0.0)
        gradient.scatter_add_(1, self.targets, one_hot)
        gradient = gradient / self.temperature if self.temperature != 1.0 else gradient
        gradient = gradient if self.capped is None else gradient * (1 - self.capped**2)
        return gradient * self.rule.scale if self.rule.scale != 1.0 else gradient


class _ScoredLogProbs(torch.autograd.Function):
    """Loss of the log-probabilities of labels; computes gradients in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        rule: HeadRule,
        part: VocabularyShard,
        score: Score,
        temperature: float,
        want_gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        compute = weight.to(hidden.dtype)
        size = max(64, LOGITS_PER_CHUNK // part.vocab_size)

        def chunk(start: int) -> _Chunk:
            span = slice(start, start + size)
            return _Chunk(hidden[span], compute, bias, labels[span], rule, part, temperature)

        # First pass: log-probabilities, the loss, and the loss's gradient with respect to them.
        starts = range(0, hidden.shape[0], size)
        parts = [chunk(start).log_probs() for start in starts]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.cat([values for values, _ in parts]) if parts else hidden.new_zeros(0, dtype=wide)
        if not want_gradients:
            loss, metrics = score(log_probs)
            ctx.mark_non_differentiable(metrics)
            return loss, metrics
        with torch.enable_grad():
            leaf = log_probs.requires_grad_()
            loss, metrics = score(leaf)
            (upstream,) = torch.autograd.grad(loss, leaf, materialize_grads=True, allow_unused=True)

        # Second pass: gradients of the head and of its input.
        hidden_gradient = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        bias_gradient = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for start, (_, log_sum) in zip(starts, parts, strict=True):
            span = slice(start, start + size)
            gradient = chunk(start).gradient(upstream[span], log_sum)
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[span] = gradient @ compute
            if weight_gradient is not None:
                weight_gradient += gradient.t() @ hidden[span]
        if hidden_gradient is not None:  # each rank's part of the vocabulary contributes a term
            part.reduce(hidden_gradient)
        ctx.gradients = (hidden_gradient, weight_gradient, bias_gradient)
        loss, metrics = loss.detach(), metrics.detach()
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        factor = upstream[0].to(torch.promote_types(upstream[0].dtype, torch.float32))
        gradients = (None if gradient is None else scaled(gradient, factor) for gradient in ctx.gradients)
        del ctx.gradients
        return *gradients, None, None, None, None, None, None


def scored_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    rule: HeadRule,
    part: VocabularyShard,
    score: Score,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Applies `score` to the log-probabilities of labels under `rule(hidden @ weight.T + bias) / temperature`.

    Collective, if the vocabulary is split over ranks.

    Args:
        hidden: `[labels, hidden size]`, in the compute dtype.
        weight: `[local vocabulary, hidden size]`, in its master dtype.
        bias: `[local vocabulary]` or None.
        labels: `[labels]` token ids.
        rule: scale and cap of the logits.
        part: this rank's part of the vocabulary.
        score: gives the loss and the metrics of the log-probabilities `[labels]`, in fp32 or wider.
        temperature: divides the logits.

    Returns:
        Loss and metrics as `score` gave them. The loss is differentiable, the metrics are not.
    """
    want = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _ScoredLogProbs.apply(hidden, weight, bias, labels, rule, part, score, temperature, want)
