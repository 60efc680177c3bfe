"""Supervised fine-tuning: the next trained token, summed over the micro-batch, in fp32.

The loss is computed inside the wrapped module, so that whatever shards the weights has gathered the output head.
The caller divides by the number of trained tokens of the whole global batch; nothing here averages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainers.data.layout import AttentionMetadata, DocumentLayout, MetadataRoute
from trainers.objectives.load_balancing import LoadBalancing, weighted_probabilities

# 32M fp32 logits (128 MiB) at once; it depends on the vocabulary alone, so that all strategies chunk alike.
LOGITS_PER_CHUNK = 2**25

# Models whose logits are head(decoder(x)), then scaled, then capped, as `_head_rule` reads it from their config.
# tests/unit/objectives/test_sft_loss.py compares each with its own forward pass; any other model uses its own.
LINEAR_HEADS = {
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
    *("olmo", "olmo2", "smollm3", "granite", "cohere", "stablelm"),
}


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Linear head and cross-entropy, chunk by chunk, with the gradients taken in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        rule: tuple[float, float | None],
        want_gradients: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, cap = rule
        compute = weight.to(hidden.dtype)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.zeros((), dtype=torch.int64, device=hidden.device)
        hidden_gradient = torch.zeros_like(hidden) if want_gradients and ctx.needs_input_grad[0] else None
        head_needs = want_gradients and ctx.needs_input_grad[1]
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if head_needs else None
        bias_gradient = torch.zeros_like(bias, dtype=torch.float32) if head_needs and bias is not None else None
        size = max(64, LOGITS_PER_CHUNK // weight.shape[0])
        for start in range(0, hidden.shape[0], size):
            # The head, its scale and its cap, in fp32, for as many tokens as there is room for.
            rows, targets = hidden[start : start + size], labels[start : start + size, None]
            logits = rows @ compute.t()
            logits = logits.float() if bias is None else logits.float() + bias.float()
            logits = logits * scale if scale != 1.0 else logits
            capped = torch.tanh(logits / cap) if cap is not None else None
            logits = capped * cap if capped is not None and cap is not None else logits
            log_sum = logits.logsumexp(-1, keepdim=True)
            loss += (log_sum - logits.gather(1, targets)).sum()
            if not want_gradients:
                correct += (logits.argmax(-1, keepdim=True) == targets).sum()
                continue
            # d loss / d logits = softmax - one-hot, back through cap and scale.
            gradient = (logits - log_sum).exp_()
            gradient.scatter_add_(1, targets, torch.full_like(log_sum, -1.0))
            gradient = gradient * (1 - capped**2) if capped is not None else gradient
            gradient = gradient * scale if scale != 1.0 else gradient
            # The gradients of the head, and of what goes into it.
            if bias_gradient is not None:
                bias_gradient += gradient.sum(0)
            gradient = gradient.to(hidden.dtype)
            if hidden_gradient is not None:
                hidden_gradient[start : start + size] = gradient @ compute
            if weight_gradient is not None:
                weight_gradient += gradient.t() @ rows
        ctx.gradients = (hidden_gradient, weight_gradient, bias_gradient)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        factor = upstream[0].float()  # rounded to bf16 it would scale the gradient wrongly by up to 0.4 %
        hidden, weight, bias = (None if grad is None else scaled(grad, factor) for grad in ctx.gradients)
        del ctx.gradients
        return hidden, weight, bias, None, None, None


def scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Times the factor, in the factor's dtype; in place where that is its own, as it may be as large as the head."""
    wide = factor.dtype
    return gradient.mul_(factor) if gradient.dtype == wide else (gradient.to(wide) * factor).to(gradient.dtype)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    scale: float = 1.0,
    cap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy of `cap * tanh(scale * (hidden @ weight.T + bias) / cap)` without all logits at once.

    Args:
        hidden: `[tokens, hidden size]`, in the compute dtype.
        weight: `[vocabulary, hidden size]`, in its master dtype.
        bias: `[vocabulary]` or None.
        labels: `[tokens]`, every one a trained token.
        scale: factor on the logits.
        cap: softcap of the logits (Gemma 2), None for none.

    Returns:
        The summed loss (fp32 scalar) and the number of tokens predicted right (counted without gradients only).
    """
    want = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, (scale, cap), want)


def _head_rule(config: Any) -> tuple[float, float | None]:
    """Scale and softcap of the logits, as the model's config has them."""
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if getattr(config, "logits_scaling", None):
        scale /= float(config.logits_scaling)
    cap = getattr(config, "final_logit_softcapping", None)
    return scale, float(cap) if cap else None


def inner_model(model: Any) -> Any:
    """The transformers model, taken out of peft's wrapper where there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class SupervisedLoss(nn.Module):
    """The model and its loss as one module, which the strategy wraps.

    Args:
        model: a transformers or peft causal language model; its parameters are the only ones here.
        offloads: keep what the backward pass needs of the layers in CPU memory until then.
        compute: dtype of matrix products. The one place where it is applied, by autocast, for every strategy:
            parameters, norms, softmax, logits, loss and the reduction of gradients stay fp32.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype = torch.float32, offloads: bool = False):
        super().__init__()
        self.model, self.compute, self.offloads = model, compute, offloads
        self.over_ranks: Any = None  # where each rank has a part of the rows: see trainers/parallel/sequence.py
        head = self.base.get_output_embeddings()
        text = self.base.config.get_text_config()  # of a model with a vision tower, its language part
        self.chunked = text.model_type in LINEAR_HEADS and isinstance(head, nn.Linear)
        self.rule = _head_rule(text)
        self.route = MetadataRoute(self.base, self.base.get_decoder() if self.chunked else self.base)
        self.balancing = LoadBalancing.of(text)
        adapted: list[Any] = [layer for layer in self.model.modules() if hasattr(layer, "cast_input_dtype_enabled")]
        for layer in adapted if compute != torch.float32 else ():
            layer.cast_input_dtype_enabled = False  # peft would make an fp32 copy of each input, which autocast undoes
        # Tensor parallelism, where it is used, puts its own here (`trainers.parallel.tensor.split_model`).
        self.tensor: Any = None
        self.cross_entropy: Callable[..., tuple[torch.Tensor, torch.Tensor]] = linear_cross_entropy

    @property
    def base(self) -> Any:
        """The transformers model."""
        return inner_model(self.model)

    @property
    def vocab_size(self) -> int:
        """Tokens that the model has embeddings for."""
        return int(self.base.config.get_text_config().vocab_size)

    def tie_weights(self) -> None:
        """Ties embedding and head again; Accelerate calls it where it gives FSDP 2 new weights."""
        self.base.tie_weights()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        documents: DocumentLayout | None,
        positions: torch.Tensor,
        labels: torch.Tensor,
        own_forward: bool = False,
        real_tokens: torch.Tensor | None = None,
        expert_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss over the trained tokens.

        Args:
            input_ids: `[batch, sequence]`.
            position_ids: `[batch, sequence]`, restarting at each document.
            documents: of packed rows, None for one document per row.
            positions: `[trained]` index into the flattened batch of the token before each trained one.
            labels: `[trained]` the trained tokens.
            own_forward: the reference of the probe at the start: the model is called with the token ids alone.
            real_tokens: `[batch, sequence]`, False for padding; given where the load of experts is balanced.
            expert_weights: `[experts]` of `trainers.objectives.load_balancing`; None to count the routing.

        Returns:
            Loss (fp32 scalar, a sum) and tokens predicted right (int64 scalar; 0 while gradients are on). The gradients
            are those of the loss and the load-balancing loss. To count the routing: counts in place of the loss.
        """
        half = self.compute != torch.float32
        # The cache would keep a half copy of every weight to the end of the pass, whoever had cut them.
        with torch.autocast(input_ids.device.type, self.compute, enabled=half, cache_enabled=False):
            if own_forward and self.tensor is None:
                return self._own_forward({"input_ids": input_ids, "use_cache": False}, positions, labels)
            with self.route.hand_over(AttentionMetadata(documents, self.over_ranks)) as more:
                inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False, **more}
                # Of whole rows, models count the tokens themselves: some from 0, RoBERTa from the padding token's id.
                if self.chunked or documents is not None or self.over_ranks is not None:
                    inputs["position_ids"] = position_ids
                if not self.chunked:
                    return self._own_forward(inputs, positions, labels, real_tokens, expert_weights)
                with self._resting(input_ids.device):
                    hidden = self.base.get_decoder()(**inputs).last_hidden_state
            picked = hidden.flatten(0, 1).index_select(0, positions).to(self.compute)
        head = self.base.get_output_embeddings()
        with torch.autocast(input_ids.device.type, enabled=False):  # fp16's Accelerator has one around all this
            return self.cross_entropy(picked, head.weight, head.bias, labels, *self.rule)

    def _resting(self, device: torch.device) -> AbstractContextManager[Any]:
        """Where what the backward pass needs waits for it."""
        pinned = device.type == "cuda"
        return torch.autograd.graph.save_on_cpu(pin_memory=pinned) if self.offloads else nullcontext()

    def _own_forward(
        self,
        inputs: dict[str, Any],
        positions: torch.Tensor,
        labels: torch.Tensor,
        real: torch.Tensor | None = None,
        expert_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.balancing is not None:
            inputs = {**inputs, "output_router_logits": real is not None}
        if self.balancing is not None and real is not None and expert_weights is None:
            routed = self.base.get_decoder()(**inputs).router_logits
            return self.balancing.count(routed, real), labels.new_zeros(())
        with self._resting(positions.device):
            output = self.model(**inputs)
        picked = output.logits.flatten(0, 1).index_select(0, positions).float()
        correct = (picked.detach().argmax(-1) == labels).sum()
        loss = functional.cross_entropy(picked, labels, reduction="sum")
        if real is not None and expert_weights is not None:
            balance = weighted_probabilities(output.router_logits, real, expert_weights)
            loss = loss + (balance - balance.detach())  # its gradient, while the loss that is logged compares
        return loss, correct
