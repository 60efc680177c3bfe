"""The ranks of `test_experts.py`: a few steps of each case under expert parallelism. Run by `accelerate launch`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from peft.tuners.lora.layer import ParamWrapper
from torch import distributed
from transformers import AutoModelForCausalLM

from tests.families import save_small
from tests.steps import Steps
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.parallel.replicated import Replicated
from trainers.strategy.strategy import load_strategy, resolve

STEPS, CLIPPED = 3, 0.5


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and what is broken on purpose."""

    family: str = "qwen3_moe"
    options: dict[str, Any] = field(default_factory=dict)
    breaks: str = ""
    idle: bool = False

    @property
    def name(self) -> str:
        words = [
            self.family,
            "idle" * self.idle,
            self.breaks,
            *(f"{key}={value}" for key, value in self.options.items()),
        ]
        return " ".join(filter(None, words))


STACKS = {"lora_target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
CASES = [
    Case(),
    Case("mixtral", {"packing": False, "gradient_checkpointing": True}),
    Case(options={"method": "lora"}),
    Case("gpt_oss", {"method": "lora", **STACKS, "lora_target_modules": ["q_proj"], "gradient_checkpointing": True}),
    Case(options={"method": "lora", **STACKS, "lora_target_modules": [], "use_rslora": True}, idle=True),
    Case(options={"method": "lora", "modules_to_save": ["lm_head"], "new_tokens": ["<|note|>"]}),
    Case(options={"gradient_checkpointing": True, "selective_checkpointing": True}, idle=True),
]
ADAPTED = CASES[4]
CONTROLS = [Case(breaks="averaged"), Case(breaks="swapped"), replace(ADAPTED, breaks="others' adapters")]
FOUR = [Case(), Case(breaks="copies not summed")]


def config_of(case: Case, folder: Path) -> TrainConfig:
    """Two micro-batches a step on two ranks, one on four."""
    return build({
        "model_name_or_path": str(model_of(case, folder)), "dataset_name": "embedded", "eval_dataset_name": "none",
        "method": "full", "max_train_samples": 150, "max_length": 192, "packing": True,
        "per_device_train_batch_size": 2, "global_batch_size": 8, "max_steps": 10, "learning_rate": 1e-3,
        "max_grad_norm": CLIPPED, "cache_dir": str(folder / "cache"), **case.options,
    })  # fmt: skip


def model_of(case: Case, folder: Path) -> Path:
    """A folder with a small model; `idle`: whose tokens all go to the first experts, those of the first rank."""
    target = folder / f"{case.family}{'-idle' * case.idle}"
    if target.exists():
        return target
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.1} if case.family == "mixtral" else {}
    made = folder / f"{target.name}.partial"
    save_small(made, case.family, **changes)
    if case.idle:
        model = AutoModelForCausalLM.from_pretrained(made)
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.data.zero_()
        model.save_pretrained(made)
    made.rename(target)
    return target


def curve(taken: Steps) -> dict[str, list[float]]:
    """Loss and gradient norm of each step."""
    results = [taken.take(step) for step in range(STEPS)]
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return {"losses": [result.loss for result in results], "norms": [result.grad_norm for result in results]}


def swap_experts(taken: Steps) -> None:
    """Gives this rank the experts of the next one."""
    slices = taken.loss.tensor.slices
    for name, weight in taken.loss.model.named_parameters():
        if name in slices:
            parts = [torch.empty_like(weight) for _ in range(distributed.get_world_size())]
            distributed.all_gather(parts, weight.detach())
            weight.data.copy_(parts[1 - distributed.get_rank()])


def broken(taken: Steps, case: Case) -> None:
    """Breaks what the case says."""
    backend: Any = taken.context.backend
    assert isinstance(backend, Replicated)
    average = backend._average_experts

    def averaged() -> None:
        average()
        for weight in backend.experts:
            weight.grad /= backend.tensor.size

    if case.breaks == "averaged":
        backend._average_experts = averaged
    elif case.breaks == "swapped":
        swap_experts(taken)
    elif case.breaks == "others' adapters":
        for module in taken.loss.model.modules():
            if isinstance(module, ParamWrapper):
                adapters: Any = module.get_delta_factors
                factors, local = adapters.args
                size = local.stop - local.start
                start = size - local.start
                module.get_delta_factors = partial(adapters.func, factors, slice(start, start + size))
    elif case.breaks == "copies not summed":
        backend.tensor = None


def main(file: str, folder: str) -> None:
    torch.set_num_threads(1)
    loaded = load_strategy(file)
    world = int(os.environ["WORLD_SIZE"])
    curves: dict[str, Any] = {}
    for case in [*CASES, *CONTROLS] if world == 2 else FOUR:
        config = config_of(case, Path(folder))
        strategy = resolve(loaded, world, config.mixed_precision)
        taken = Steps(config, lambda section, step: None, strategy, Path(folder) / "run")
        broken(taken, case)
        curves[case.name] = curve(taken)
    if distributed.get_rank() == 0:
        Path(folder, "curves.json").write_text(json.dumps(curves))
    distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
