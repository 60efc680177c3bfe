"""Supervised fine-tuning: next-token cross-entropy over the trained tokens, summed over the micro-batch in fp32.

The loss is computed inside the wrapped module, where FSDP or ZeRO have gathered the weights of the output head.
The caller divides by the number of trained tokens in the global batch; nothing here averages.
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
from trainers.objectives.output_head import HeadRule, find_head_rule

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
            # Logits of one chunk: matmul in the compute dtype; bias, scale and cap in fp32.
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
            # Accumulate the gradients of the head; write those of its input.
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
        factor = upstream[0].float()  # bf16 would round the factor by up to 0.4 %
        hidden, weight, bias = (None if grad is None else scaled(grad, factor) for grad in ctx.gradients)
        del ctx.gradients
        return hidden, weight, bias, None, None, None


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy of `cap * tanh(scale * (hidden @ weight.T + bias) / cap)`, in chunks of tokens.

    Args:
        hidden: `[tokens, hidden size]`, in the compute dtype.
        weight: `[vocabulary, hidden size]`, in its master dtype.
        bias: `[vocabulary]` or None.
        labels: `[tokens]` target ids, all of them trained.
        scale: factor on the logits.
        cap: softcap of the logits (Gemma 2); None for none.

    Returns:
        The summed loss (fp32 scalar) and the number of correctly predicted tokens (counted only without gradients).
    """
    want = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, (scale, cap), want)


def inner_model(model: Any) -> Any:
    """The transformers model, unwrapped from peft if necessary."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class SupervisedLoss(nn.Module):
    """The model and its loss as one module, which the strategy wraps.

    Args:
        model: a transformers or peft causal language model, which provides all parameters.
        compute: dtype of matrix products. For every strategy it is applied only here, by autocast: parameters, norms,
            softmax, logits, loss and gradient reduction stay fp32.
        offloads: keep the activations saved for the backward pass in CPU memory.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype = torch.float32, offloads: bool = False):
        super().__init__()
        self.model, self.compute, self.offloads = model, compute, offloads
        self.over_ranks: Any = None  # set if rows are sharded: see trainers/parallel/sequence.py
        self.stored: dict[str, Any] = {}  # where weights on the meta device are: see trainers/model/stored.py
        rule = find_head_rule(self.base)
        self.chunked = rule is not None
        self.rule = rule or HeadRule()
        self.route = MetadataRoute(self.base, self.base.get_decoder() if self.chunked else self.base)
        self.needs_positions = any(getattr(module, "needs_positions", False) for module in self.base.modules())
        self.mixers = [layer for layer in self.base.modules() if getattr(layer, "sees_documents", False)]
        if self.mixers:  # see trainers/model/mixers.py; they do not get the arguments of attention layers
            self.route.by_argument = False
        self.balancing = LoadBalancing.of(self.base.config.get_text_config())  # the language part, if multimodal
        adapted: list[Any] = [layer for layer in self.model.modules() if hasattr(layer, "cast_input_dtype_enabled")]
        for layer in adapted if compute != torch.float32 else ():
            layer.cast_input_dtype_enabled = False  # peft would copy each input to fp32, and autocast cast it back
        # Tensor parallelism replaces both (`trainers.parallel.tensor.split_model`); expert parallelism only the first.
        self.tensor: Any = None
        self.cross_entropy: Callable[..., tuple[torch.Tensor, torch.Tensor]] = linear_cross_entropy

    @property
    def base(self) -> Any:
        """The transformers model."""
        return inner_model(self.model)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return int(self.base.config.get_text_config().vocab_size)

    def tie_weights(self) -> None:
        """Ties embedding and head again; Accelerate calls this after replacing weights for FSDP 2."""
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
            documents: boundaries of the documents in packed rows; None for one document per row.
            positions: `[trained]` index into the flattened batch of the token before each trained one.
            labels: `[trained]` the trained tokens.
            own_forward: call the model with the token ids only, as the reference of the probe.
            real_tokens: `[batch, sequence]`, False for padding; given if the load of experts is balanced.
            expert_weights: `[experts]` from `trainers.objectives.load_balancing`; None to count the routing.

        Returns:
            The summed loss (fp32 scalar) and the number of correctly predicted tokens (int64 scalar; the chunked loss
            counts 0 with gradients). Gradients include those of the load-balancing loss, the loss does not. With
            `real_tokens` but no `expert_weights`: routing counts (`LoadBalancing.count`) in place of the loss.
        """
        half = self.compute != torch.float32
        # Autocast's cache would keep a half-precision copy of every weight until the end of the pass, sharded or not.
        with torch.autocast(input_ids.device.type, self.compute, enabled=half, cache_enabled=False):
            if own_forward and (self.tensor is None or self.tensor.by_expert):
                plain = {"output_router_logits": False} if self.balancing is not None else {}
                return self._own_forward({"input_ids": input_ids, "use_cache": False, **plain}, positions, labels)
            with self.route.hand_over(AttentionMetadata(documents, self.over_ranks)) as more:
                inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False, **more}
                # Otherwise let the model number the positions of its row itself: RoBERTa's do not start at 0.
                if documents is not None or self.over_ranks is not None or self.needs_positions:
                    inputs["position_ids"] = position_ids
                if self.balancing is not None:
                    inputs["output_router_logits"] = real_tokens is not None
                if self.balancing is not None and real_tokens is not None and expert_weights is None:
                    routed = self.base.get_decoder()(**inputs).router_logits  # counting needs no head
                    return self.balancing.count(routed, real_tokens), labels.new_zeros(())
                if not self.chunked:
                    return self._own_forward(inputs, positions, labels, real_tokens, expert_weights)
                with self._resting(input_ids.device):
                    output = self.base.get_decoder()(**inputs)
            picked = output.last_hidden_state.flatten(0, 1).index_select(0, positions).to(self.compute)
        head = self.base.get_output_embeddings()
        with torch.autocast(input_ids.device.type, enabled=False):  # with fp16, Accelerate wraps all of this in one
            loss, correct = self.cross_entropy(picked, head.weight, head.bias, labels, *self.rule)
        return _with_balance(loss, output, real_tokens, expert_weights), correct

    def _resting(self, device: torch.device) -> AbstractContextManager[Any]:
        """Context manager that keeps saved activations in CPU memory if `offloads` is set."""
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
        with self._resting(positions.device):
            output = self.model(**inputs)
        picked = output.logits.flatten(0, 1).index_select(0, positions).float()
        correct = (picked.detach().argmax(-1) == labels).sum()
        loss = functional.cross_entropy(picked, labels, reduction="sum")
        return _with_balance(loss, output, real, expert_weights), correct


def _with_balance(
    loss: torch.Tensor, output: Any, real: torch.Tensor | None, expert_weights: torch.Tensor | None
) -> torch.Tensor:
    """Adds the gradient of the load-balancing loss, if any, but not its value, which is not part of the logged loss."""
    if real is None or expert_weights is None:
        return loss
    balance = weighted_probabilities(output.router_logits, real, expert_weights)
    return loss + (balance - balance.detach())
