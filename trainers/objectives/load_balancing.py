"""The load-balancing loss of mixture-of-experts models (https://arxiv.org/abs/2101.03961), over the global batch.

    loss += coefficient * experts * sum over experts of (share of choices) * (mean router probability)

Shares and means are over all layers and real tokens. The shares have no gradient, so a first pass without gradients
counts them over the full step. Given the shares, the term is a sum over tokens, which micro-batches and ranks can
split. transformers instead uses the means of each micro-batch, whose products do not add up to that of the global batch
(https://arxiv.org/abs/2501.11873).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.layout import to_device
from trainers.data.micro_batch import StepBatch

# Families whose own forward pass has this loss; tests/unit/objectives/test_load_balancing.py compares each with it.
FAMILIES = {
    *("deepseek_v4", "ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "granitemoe_swa"),
    *("granitemoehybrid", "granitemoeshared", "jamba", "jetmoe", "laguna", "mellum", "minimax", "minimax_m2"),
    *("minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe_text"),
}


@dataclass(frozen=True)
class LoadBalancing:
    """The load-balancing loss that a model's config requests.

    Args:
        name: name of the coefficient in config.json.
        coefficient: weight of the term in the loss.
        top_k: number of experts that each token is routed to.
    """

    name: str
    coefficient: float
    top_k: int

    @classmethod
    def of(cls, text_config: Any) -> LoadBalancing | None:
        """Reads the loss from a config; None for a model without it.

        Args:
            text_config: the transformers config of the language model.
        """
        if not getattr(text_config, "output_router_logits", False):
            return None
        experts = getattr(text_config, "ffn_config", text_config)  # DBRX has a separate config for experts
        top_k = getattr(experts, "moe_top_k", None) or getattr(experts, "num_experts_per_tok", None) or 1
        for name in ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight"):
            if coefficient := getattr(experts, name, None):
                return cls(name, float(coefficient), int(top_k))
        return None

    def count(self, router_logits: Iterable[torch.Tensor], real: torch.Tensor) -> torch.Tensor:
        """Counts routing, summed over layers and real tokens.

        Args:
            router_logits: `[tokens, experts]` of each layer.
            real: `[batch, sequence]`, False for padding.

        Returns:
            `[2, experts]` in fp64: how often each expert was chosen, and the sum of its probabilities.
        """
        totals = []
        for logits in router_logits:
            probabilities, weight = logits.flatten(0, -2).float().softmax(-1), real.reshape(-1, 1).double()
            chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(self.top_k).indices, 1.0)
            totals.append(torch.stack([(values * weight).sum(0) for values in (chosen, probabilities)]))
        return torch.stack(totals).sum(0)

    def balance_term(self, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the term of the global batch, without its coefficient.

        Args:
            counted: `[2, experts]` result of `count`, summed over the global batch.

        Returns:
            The term as an fp64 scalar, and `[experts]` weights: the probabilities times these, summed over experts,
            tokens and layers, equal the term.
        """
        choices, probabilities = counted
        rows = (choices.sum() / self.top_k).clamp(min=1)  # tokens * layers
        weights = choices * len(choices) / rows**2
        return (weights * probabilities).sum(), weights


def weighted_probabilities(
    router_logits: Iterable[torch.Tensor], real: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Sums router probabilities times `weights` over experts, real tokens and layers.

    Args:
        router_logits: `[tokens, experts]` of each layer.
        real: `[batch, sequence]`, False for padding.
        weights: `[experts]`, the weights from `LoadBalancing.balance_term`.

    Returns:
        An fp32 scalar.
    """
    with torch.autocast(real.device.type, enabled=False):
        layers = [(logits.flatten(0, -2).float().softmax(-1) @ weights.float()) for logits in router_logits]
        return (torch.stack(layers) * real.reshape(-1)).sum()


@torch.no_grad()
def count_routing(
    balancing: LoadBalancing,
    model: Callable[..., Any],
    batch: StepBatch,
    device: torch.device,
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
    contributes: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts the routing of the global batch in a pass without gradients over this rank's micro-batches. Collective.

    Args:
        balancing: the loss that the model's config requests.
        model: the wrapped `LossModule`.
        batch: this rank's micro-batches.
        device: device of the model.
        all_reduce: sums a tensor over all ranks.
        contributes: False if another rank counts the same tokens.

    Returns:
        The term of the global batch as an fp64 scalar, and the `expert_weights` for `LossModule.forward`.
    """
    counted = torch.zeros((), dtype=torch.float64, device=device)
    with _same_random_numbers(device):  # so that the pass with gradients routes equally, even with dropout
        for micro_batch in batch.micro_batches:
            real = to_device(micro_batch.real, device)
            counts, _ = model(**micro_batch.inputs(device), real_tokens=real)
            counted = counted + counts
    term, weights = balancing.balance_term(all_reduce(counted if contributes else torch.zeros_like(counted)))
    # Scale by the divisor, as the caller divides the loss by it.
    return term, weights * balancing.coefficient * max(batch.divisor, 1)


def _same_random_numbers(device: torch.device) -> AbstractContextManager[Any]:
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def refuse_load_balancing(config: TrainConfig, model_config: Any) -> None:
    """Raises ConfigError if a model's config requests the loss but training cannot compute it."""
    text_config = model_config.get_text_config()
    balancing = LoadBalancing.of(text_config)
    if balancing is None:
        return
    asks = (
        f"config.json asks for a load-balancing loss (output_router_logits=true, "
        f"{balancing.name}={balancing.coefficient:g})"
    )
    remedy = "set output_router_logits to false there to train without it"
    own_code = config.trust_remote_code and getattr(model_config, "auto_map", None)
    if text_config.model_type not in FAMILIES or own_code:
        raise ConfigError(f"{model_config.model_type}: its {asks}, which is not supported for this model; {remedy}")
    if config.torch_compile:
        raise ConfigError.about(
            "torch_compile",
            True,
            f"with {model_config.model_type}, whose {asks}: compiled layers do not give their router logits",
            f"use torch_compile=false, or {remedy}",
        )


def balancing_lines(balancing: LoadBalancing | None) -> list[str]:
    """Log lines about the loss and its cost; empty without it."""
    if balancing is None:
        return []
    return [
        f"load-balancing loss: {balancing.name}={balancing.coefficient:g}, over the global batch, as its config.json "
        "asks; a pass without gradients counts the routing of each step first, which takes about a third more time"
    ]
