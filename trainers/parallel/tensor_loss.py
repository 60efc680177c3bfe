"""Cross-entropy with a vocabulary-parallel output head: no rank ever holds all logits of a token."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from trainers.data.micro_batch import LabelSources
from trainers.objectives import sft


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Linear head and cross-entropy in chunks of tokens; computes gradients in the forward pass.

    At most three collectives per chunk: the maximum logit, the sums, and (in evaluation) the index of the maximum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        rule: tuple[float, float | None],
        want_gradients: bool,
        part: tuple[Any, int, int],
        sources: LabelSources | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (scale, cap), (group, start, vocab_size) = rule, part
        compute = weight.to(hidden.dtype)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        by_source = None if sources is None else loss.new_zeros(sources.number)
        hidden_gradient = torch.zeros_like(hidden) if want_gradients and ctx.needs_input_grad[0] else None
        head_needs = want_gradients and ctx.needs_input_grad[1]
        weight_gradient = torch.zeros_like(weight, dtype=wide) if head_needs else None
        bias_gradient = torch.zeros_like(bias, dtype=wide) if head_needs and bias is not None else None
        size = max(64, sft.LOGITS_PER_CHUNK // vocab_size)  # as without tensor parallelism
        for begin in range(0, hidden.shape[0], size):
            rows, targets = hidden[begin : begin + size], labels[begin : begin + size, None] - start
            logits = (rows @ compute.t()).to(wide)
            logits = logits if bias is None else logits + bias.to(wide)
            logits = logits * scale if scale != 1.0 else logits
            capped = torch.tanh(logits / cap) if cap is not None else None
            logits = capped * cap if capped is not None and cap is not None else logits

            # Find the maximum logit over all ranks first, so that no exponential overflows.
            largest, largest_index = logits.max(-1, keepdim=True)
            top = largest.clone()
            distributed.all_reduce(top, distributed.ReduceOp.MAX, group)

            # Sum the exponentials, and the target's logit, which only one rank holds.
            elsewhere = (targets < 0) | (targets >= logits.shape[1])
            targets = targets.masked_fill(elsewhere, 0)
            odds = (logits - top).exp_()
            target = (logits.gather(1, targets) - top).masked_fill(elsewhere, 0.0)
            sums = torch.cat([odds.sum(-1, keepdim=True), target], 1)
            distributed.all_reduce(sums, group=group)
            total, target = sums.split(1, 1)
            losses = total.log() - target
            loss += losses.sum()
            if sources is not None and by_source is not None:
                by_source += sources.sums(losses[:, 0], slice(begin, begin + size))
            if not want_gradients:
                # Break ties in favor of the lowest index, as a single process does.
                first = torch.where(largest == top, largest_index + start, vocab_size)
                distributed.all_reduce(first, distributed.ReduceOp.MIN, group)
                correct += (first == labels[begin : begin + size, None]).sum()
                continue

            # d loss / d logits = softmax - one-hot, back through cap and scale.
            gradient = odds.div_(total)
            gradient.scatter_add_(1, targets, elsewhere.to(wide) - 1.0)
            gradient = gradient * (1 - capped**2) if capped is not None else gradient
            gradient = gradient * scale if scale != 1.0 else gradient
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[begin : begin + size] = gradient @ compute
            if weight_gradient is not None:
                weight_gradient += gradient.t() @ rows

        # Each rank's share of the vocabulary contributes a term to the input's gradient.
        if hidden_gradient is not None:
            distributed.all_reduce(hidden_gradient, group=group)
        ctx.gradients = (hidden_gradient, weight_gradient, bias_gradient)
        metrics = correct if by_source is None else by_source
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        wide = torch.promote_types(upstream[0].dtype, torch.float32)
        factor = upstream[0].to(wide)
        hidden, weight, bias = (None if grad is None else sft.scaled(grad, factor) for grad in ctx.gradients)
        del ctx.gradients
        return hidden, weight, bias, None, None, None, None, None


def vocabulary_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scale: float = 1.0,
    cap: float | None = None,
    sources: LabelSources | None = None,
    *,
    group: Any,
    start: int,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_cross_entropy` with a head whose vocabulary is split over a group of ranks. Collective.

    Args:
        hidden: `[tokens, hidden size]`, equal on every rank of the group.
        weight: `[local vocabulary, hidden size]`, in its master dtype.
        bias: `[local vocabulary]` or None.
        labels: `[tokens]` target ids, all of them trained, equal on every rank.
        scale: factor on the logits.
        cap: softcap of the logits; None for none.
        sources: which source of a mix each label is from.
        group: the ranks that share the vocabulary, each with a contiguous range of it.
        start: first token id of this rank's range.
        vocab_size: size of the full vocabulary.

    Returns:
        The summed loss (scalar, fp32 or wider), and the number of correctly predicted tokens (counted only without
        gradients) or `[sources]` the loss of each source, equal on every rank. The gradient of `hidden` is summed over
        the ranks.
    """
    want = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    part = (group, start, vocab_size)
    return _VocabularyCrossEntropy.apply(hidden, weight, bias, labels, (scale, cap), want, part, sources)
