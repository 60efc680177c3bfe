"""The reference: a page of plain PyTorch and stock transformers, one document at a time, no strategy at all.

It shares the data order with the trainer and nothing else: no packing, no chunked loss, no attention of ours.
Each negative control is the same page with one thing wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, set_seed

from trainers.config.options import TrainConfig
from trainers.data.prepare import prepare
from trainers.data.rows import Rows
from trainers.embedded import BASE_DIR
from trainers.tools.preflight import plan_training

LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4


@dataclass
class Curve:
    """Loss and gradient norm of each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def agrees(self, other: Curve) -> bool:
        """Promise P2: every loss within 1e-5, every gradient norm within 1e-4 relative."""
        assert len(self.losses) == len(other.losses) >= 14
        losses = max(abs(a - b) for a, b in zip(self.losses, other.losses, strict=True))
        norms = max(abs(a - b) / b for a, b in zip(self.norms, other.norms, strict=True))
        return losses <= LOSS_TOLERANCE and norms <= NORM_TOLERANCE


def build(config: TrainConfig, base: str | Path = BASE_DIR, **settings: Any) -> nn.Module:
    """The stock model, with stock adapters for LoRA, of which `settings` has more of peft's settings."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    if config.method == "full":
        return model
    set_seed(config.seed)
    adapters = LoraConfig(r=config.lora_r, lora_alpha=config.lora_alpha, target_modules="all-linear", **settings)
    return get_peft_model(model, adapters)


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW that decays matrices alone, with a rate of 1."""
    matrices = [weight for weight in model.parameters() if weight.requires_grad and weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.requires_grad and weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1.0)


def rate(config: TrainConfig, step: int, total: int) -> float:
    """Cosine to 0, no warm-up, as the tests' options have it."""
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / total))


Keep = Callable[[np.ndarray], np.ndarray]


def train(
    config: TrainConfig,
    mean_of_means: bool = False,
    keep: Keep = lambda rows: rows,
    forget_optimizer: bool = False,
    build: Callable[[TrainConfig], nn.Module] = build,
    adamw: Callable[[nn.Module, TrainConfig], torch.optim.Optimizer] = adamw,
) -> Curve:
    """Loss and gradient norm of every step.

    Args:
        mean_of_means: control: average the means of micro-batches, as if all had as many tokens.
        keep: control: the rows of a batch that are trained on.
        forget_optimizer: control: Adam's moments are lost half-way, as after a bad resume.
        build: makes the model.
        adamw: makes the optimizer; its rates are multiplied by that of each step.
    """
    plan = plan_training(config, prepare(config, "train"), 1)
    model = build(config)
    optimizer = adamw(model, config)
    factors = [group["lr"] for group in optimizer.param_groups]
    curve = Curve()
    for step in range(plan.total_steps):
        if forget_optimizer and step == plan.total_steps // 2:
            optimizer.state.clear()
        data, rows = plan.chosen(step)
        rows = keep(rows)
        batch_sums = [document_losses(model, data, micro) for micro in np.split(rows, range(2, len(rows), 2))]
        counts = [int(data.trained[micro].sum()) for micro in np.split(rows, range(2, len(rows), 2))]
        if mean_of_means:
            loss = sum(total / count for total, count in zip(batch_sums, counts, strict=True)) / len(counts)
        else:
            loss = sum(batch_sums) / sum(counts)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for group, factor in zip(optimizer.param_groups, factors, strict=True):
            group["lr"] = factor * rate(config, step, plan.total_steps)
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(loss.item())
        curve.norms.append(norm.item())
    return curve


def document_losses(model: nn.Module, data: Rows, rows: np.ndarray) -> torch.Tensor:
    """Summed loss of the trained tokens of some rows of the data, each document alone."""
    total = torch.zeros(())
    for row in rows:
        for member in data.members[data.offsets[row] : data.offsets[row + 1]]:
            tokens, mask = data.documents.document(int(member))
            ids = torch.from_numpy(np.array(tokens, dtype=np.int64))[None]
            wanted = torch.from_numpy(np.array(mask))[1:]
            logits = model(input_ids=ids).logits[0, :-1]
            total = total + functional.cross_entropy(logits[wanted], ids[0, 1:][wanted], reduction="sum")
    return total
