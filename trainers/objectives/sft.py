"""Supervised fine-tuning: next-token cross-entropy over the trained tokens, summed over the micro-batch in fp32.

The caller divides by the number of trained tokens in the global batch; nothing here averages.
"""

from __future__ import annotations

from typing import Any

import torch

from trainers.data.micro_batch import LabelSources

# 32M fp32 logits (128 MiB) at once. Chunks depend only on the vocabulary size, so that all strategies chunk equally.
LOGITS_PER_CHUNK = 2**25


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Linear head and cross-entropy in chunks of tokens; computes gradients in the forward pass.

    Logits are thus never stored for the backward pass, which only scales the gradients by its upstream factor, as in
    Liger Kernel (https://arxiv.org/abs/2410.10989).
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
        sources: LabelSources | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, cap = rule
        compute = weight.to(hidden.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        by_source = None if sources is None else loss.new_zeros(sources.number)
        hidden_gradient = torch.zeros_like(hidden) if want_gradients and ctx.needs_input_grad[0] else None
        head_needs = want_gradients and ctx.needs_input_grad[1]
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if head_needs else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if head_needs and bias is not None else None
        size = max(64, LOGITS_PER_CHUNK // weight.shape[0])
        for start in range(0, hidden.shape[0], size):
            # Logits of one chunk: matmul in the compute dtype; bias, scale and cap in fp32.
            rows, targets = hidden[start : start + size], labels[start : start + size, None]
            logits = rows @ compute.t()
            logits = logits.float() if bias is None else logits.float() + bias.float()
            logits = logits * scale if scale != 1.0 else logits
            capped = torch.tanh(logits / cap) if cap is not None else None
            logits = capped * cap if capped is not None and cap is not None else logits
            log_sum = logits.logsumexp(-1, keepdim=True)
            losses = log_sum - logits.gather(1, targets)
            loss += losses.sum()
            if sources is not None and by_source is not None:
                by_source += sources.sums(losses[:, 0], slice(start, start + size))
            if not want_gradients:
                correct += (logits.argmax(-1, keepdim=True) == targets).sum()
                continue
            # d loss / d logits = softmax - one-hot, back through cap and scale.
            gradient = (logits - log_sum).exp_()
            gradient.scatter_add_(1, targets, torch.full_like(log_sum, -1.0))
            gradient = gradient * (1 - capped**2) if capped is not None else gradient
            gradient = gradient * scale if scale != 1.0 else gradient
            # Accumulate the gradients of the head; write those of its input.
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[start : start + size] = gradient @ compute
            if weight_gradient is not None:
                weight_gradient += gradient.t() @ rows
        ctx.gradients = (hidden_gradient, weight_gradient, bias_gradient)
        metrics = correct if by_source is None else by_source
        ctx.mark_non_differentiable(metrics)
        return loss, metrics

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        factor = upstream[0].float()  # bf16 would round the factor by up to 0.4 %
        hidden, weight, bias = (None if grad is None else scaled(grad, factor) for grad in ctx.gradients)
        del ctx.gradients
        return hidden, weight, bias, None, None, None, None


def scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiplies a gradient by a factor in the factor's dtype; in place if equal to its own, as it may be large."""
    wide = factor.dtype
    return gradient.mul_(factor) if gradient.dtype == wide else (gradient.to(wide) * factor).to(gradient.dtype)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scale: float = 1.0,
    cap: float | None = None,
    sources: LabelSources | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy of `cap * tanh(scale * (hidden @ weight.T + bias) / cap)`, in chunks of tokens.

    Args:
        hidden: `[tokens, hidden size]`, in the compute dtype.
        weight: `[vocabulary, hidden size]`, in its master dtype.
        bias: `[vocabulary]` or None.
        labels: `[tokens]` target ids, all of them trained.
        scale: factor on the logits.
        cap: softcap of the logits (Gemma 2); None for none.
        sources: which source of a mix each label is from.

    Returns:
        The summed loss (fp32 scalar), and the number of correctly predicted tokens (counted only without gradients) or
        `[sources]` the loss of each source.
    """
    want = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, (scale, cap), want, sources)
