"""NEFTune's noise is a function of the token alone, so that it is the same under every strategy, packed or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.launching import launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume, same_bits
from tests.parity.runs import config, curve, mostly_long, options, run
from trainers.config.options import TrainConfig
from trainers.data.prepare import prepare
from trainers.tools.preflight import plan_training

ALPHA = 20.0
NOISE = {"neftune_noise_alpha": ALPHA}
MASK = 2**64 - 1


def mixed(number: int) -> int:
    """SplitMix64, as its author wrote it, in Python's integers."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


def noise(seed: int, step: int, document: int, length: int, channels: int, alpha: float) -> torch.Tensor:
    """`[length, channels]` noise of a document, with none of the trainer's code."""
    rows, golden = [], 0x9E3779B97F4A7C15
    for position in range(length):
        key = seed
        for number in (step, document, position):
            key = mixed((key + number * golden) & MASK)
        steps = np.arange(1, channels + 1, dtype=np.uint64) * np.uint64(golden) + np.uint64(key)
        steps = (steps ^ (steps >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        steps = (steps ^ (steps >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        rows.append((steps >> np.uint64(40)).astype(np.float64) / 2**23 - 1)
    return torch.from_numpy(np.stack(rows)).float() * (alpha / math.sqrt(length * channels))


def with_noise(alpha: float = ALPHA, of_step: Callable[[int], int] = lambda step: step) -> Any:
    """A stock model whose embedding adds noise, in the order in which the plain page reads documents."""

    def documents(settings: TrainConfig) -> Iterator[tuple[int, int]]:
        plan = plan_training(settings, prepare(settings, "train"), 1)
        for step in range(plan.total_steps):
            for row in plan.rows_of(step):
                for member in plan.rows.members[plan.rows.offsets[row] : plan.rows.offsets[row + 1]]:
                    yield step, int(member)

    def build(settings: TrainConfig) -> nn.Module:
        model: Any = plain.build(settings)
        upcoming = documents(settings)

        def add(embedding: nn.Module, ids: Any, embedded: torch.Tensor) -> torch.Tensor:
            step, document = next(upcoming)
            return embedded + noise(settings.seed, of_step(step), document, *embedded.shape[1:], alpha)

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.get_input_embeddings().register_forward_hook(add)
        return model

    return build


STRATEGIES = ["single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3", "tp", "sp", "cp", "pp"]


@pytest.mark.parametrize(
    ("strategy", "method", "packing"),
    mostly_long(
        [(name, method, True) for name in STRATEGIES for method in ("full", "lora")]
        + [(name, "lora", False) for name in ("single", "ddp", "fsdp2")],
        [("single", "lora", True)],
    ),
)
def test_noisy_embeddings_train_as_in_plain_torch(strategy: str, method: str, packing: bool) -> None:
    settings = config(method, packing, **NOISE)
    finished = run(1 if strategy == "single" else 2, method, packing, strategy, **NOISE)
    assert curve(finished).agrees(plain.train(settings, build=with_noise()))
    if (strategy, method) == ("single", "lora"):  # controls: no noise, and that of another step
        assert not curve(finished).agrees(plain.train(settings))
        assert not curve(finished).agrees(plain.train(settings, build=with_noise(of_step=lambda step: 0)))


@pytest.mark.long
def test_a_resume_has_the_noise_of_its_steps_and_none_without_alpha(tmp_path: Path) -> None:
    undisturbed = run(1, "lora", False, "single", **NOISE)
    more = {"resume_from_checkpoint": undisturbed.checkpoints[0]}
    again = launch_well(tmp_path / "again", 1, options("lora", False, **NOISE) | more, strategy="single")
    assert equal_after_resume(undisturbed, again)
    assert same_bits(run(1, "lora", False, "single"), run(1, "lora", False, "single", neftune_noise_alpha=0))


@pytest.mark.long
def test_the_size_of_a_micro_batch_has_no_part_in_it() -> None:
    more = {"per_device_train_batch_size": 8}
    assert curve(run(1, "lora", True, "single", **NOISE)).agrees(curve(run(1, "lora", True, "single", **NOISE, **more)))
