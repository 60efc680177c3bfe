"""Expert parallelism trains as one process does, and is refused where it cannot."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

from tests import forked
from tests.launching import ROOT, Finished, environment, launch_well
from tests.parity import plain
from tests.parity.checks import check_export, equal_after_resume
from tests.parity.expert_ranks import CASES, CLIPPED, CONTROLS, FOUR, Case, config_of, curve, model_of
from tests.parity.plain import LOSS_TOLERANCE, NORM_TOLERANCE
from tests.parity.runs import HALF, config, mostly_long, options, run
from tests.parity.runs import curve as curve_of
from tests.parity.test_families import model as small
from tests.shared import once
from tests.steps import Steps
from trainers.config.options import TrainConfig
from trainers.embedded import BASE_DIR

SCRIPT = Path(__file__).with_name("expert_ranks.py")
EP = ROOT / "accelerate_configs" / "ep.yaml"
MIXTURE: dict[str, Any] = {"random_init": True, "learning_rate": 1e-3}
Curves = dict[str, dict[str, list[float]]]


def launched(folder: Path, file: Path, processes: int) -> Curves:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command += ["--num_processes", str(processes), "--main_process_port", "0", str(SCRIPT), str(file), str(folder)]
    done = forked.run(command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    curves: Curves = json.loads((folder / "curves.json").read_text())
    return curves


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models."""
    folder = tmp_path_factory.mktemp("experts")
    for case in CASES:
        model_of(case, folder)
    return folder


@pytest.fixture(scope="module")
def two(folder: Path) -> Curves:
    return launched(folder, EP, 2)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Curves:
    """One process's curves."""
    curves = {case.name: curve(Steps(config_of(case, folder), lambda section, step: None)) for case in CASES}
    AcceleratorState._reset_state(reset_partial_state=True)
    return curves


def agree(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> bool:
    """Within the tolerances of the parity tests."""
    losses = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    norms = max(abs(a - b) / b for a, b in zip(ours["norms"], theirs["norms"], strict=True))
    return losses <= LOSS_TOLERANCE and norms <= NORM_TOLERANCE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_divided_experts_train_as_on_one_process(case: Case, two: Curves, alone: Curves) -> None:
    """Two micro-batches a step and rank, gradients clipped; of `idle`, one rank's experts get no token."""
    assert agree(two[case.name], alone[case.name])
    assert min(alone[case.name]["norms"]) > CLIPPED


@pytest.mark.parametrize("case", CONTROLS, ids=lambda case: case.name)
def test_a_fault_on_purpose_is_seen(case: Case, two: Curves, alone: Curves) -> None:
    assert not agree(two[case.name], alone[replace(case, breaks="").name])


def stacked(family: str) -> str:
    """A folder with a small mixture of experts of random weights."""

    def save(folder: Path) -> None:
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small(family)))
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(BASE_DIR).save_pretrained(folder)

    return str(once(f"stacked-{family}", save))


def with_stacks(settings: TrainConfig, adapted: bool = True) -> nn.Module:
    """The stock model with stock adapters on its experts."""
    path = settings.model_name_or_path
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    set_seed(settings.seed)
    parameters = ["experts.gate_up_proj", "experts.down_proj"] if adapted else None
    return get_peft_model(base, LoraConfig(
        r=settings.lora_r, lora_alpha=settings.lora_alpha, target_modules=settings.lora_target_modules or None,
        target_parameters=parameters,
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "family"),
    mostly_long(
        [(name, "mixtral") for name in ("ddp", "fsdp2", "zero2", "zero3", "cp", "ep")]
        + [(name, family) for name in ("single", "fsdp2", "ep") for family in ("qwen3_moe", "gpt_oss")],
        [],
    ),
)
def test_adapters_on_stacks_of_experts_are_those_of_peft(strategy: str, family: str) -> None:
    finished, settings = with_adapted_stacks(strategy, family, "q_proj,v_proj")
    saved = load_file(finished.run.model / "adapter_model.safetensors")
    assert sum(".experts." in name for name in saved) == 16
    if (strategy, family) == ("single", "qwen3_moe"):  # control
        assert not curve_of(finished).agrees(plain.train(settings, build=partial(with_stacks, adapted=False)))


@pytest.mark.parametrize("strategy", mostly_long(["ddp", "fsdp2", "zero3", "ep"], []))
def test_experts_alone_may_get_adapters(strategy: str) -> None:
    finished, _ = with_adapted_stacks(strategy, "mixtral", "none")
    saved = load_file(finished.run.model / "adapter_model.safetensors")
    assert saved.keys()
    assert all(".experts." in name for name in saved)


def with_adapted_stacks(strategy: str, family: str, modules: str) -> tuple[Finished, TrainConfig]:
    """A run whose losses were seen to be those of stock adapters on `modules` and the experts, and its settings."""
    changes = {
        "model_name_or_path": stacked(family), "lora_target_modules": modules,
        "lora_target_parameters": "experts.gate_up_proj,experts.down_proj",
    }  # fmt: skip
    finished = run(1 if strategy == "single" else 2, "lora", True, strategy, **changes)
    settings = config("lora", True, **changes)
    assert curve_of(finished).agrees(plain.train(settings, build=with_stacks))
    assert "loaded back" in finished.output
    return finished, settings


def mixture(processes: int, strategy: str | None = None, **more: Any) -> Finished:
    """Full fine-tuning of a small mixture of experts, evaluated, by the real launcher."""
    return run(processes, "full", True, strategy, **{"model_name_or_path": small("qwen3_moe"), **MIXTURE, **more})


def test_a_run_is_one_process_s_and_plain_libraries_load_its_export() -> None:
    divided = mixture(2, "ep")
    assert re.search(r"mesh +dp_replicate 2 \(ep 2\)\n +experts held +1/2\n", divided.output)
    assert curve_of(divided).agrees(curve_of(mixture(1)))
    assert divided.series("eval_loss") == pytest.approx(mixture(1).series("eval_loss"), abs=LOSS_TOLERANCE)
    check_export(divided, "full", True)


@pytest.mark.parametrize(("before", "after"), mostly_long([(2, 1), (1, 2), (2, 2)], [(2, 1), (1, 2)]))
def test_a_checkpoint_moves(before: int, after: int, tmp_path: Path) -> None:
    """From `ep` on two processes to one, the other way around, and to `ep` again, bit for bit."""
    strategies = {1: None, 2: "ep"}
    undisturbed = mixture(before, strategies[before])
    changes = {"model_name_or_path": small("qwen3_moe"), "resume_from_checkpoint": undisturbed.checkpoints[0]}
    again = options("full", True, **MIXTURE, **changes)
    moved = launch_well(tmp_path / "moved", after, again, strategy=strategies[after])
    if before == after:
        assert equal_after_resume(undisturbed, moved)
    losses, norms = (undisturbed.series(key)[HALF:] for key in ("loss", "grad_norm"))
    assert moved.series("loss") == pytest.approx(losses, abs=LOSS_TOLERANCE)
    assert moved.series("grad_norm") == pytest.approx(norms, rel=NORM_TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_a_checkpoint_of_adapters_moves(before: int, after: int, tmp_path: Path) -> None:
    """On attention and on the experts, as for full fine-tuning; its export loads in stock peft."""
    strategies = {1: None, 2: "ep"}
    changes = {"model_name_or_path": stacked("qwen3_moe"), "lora_target_modules": "q_proj,v_proj",
               "lora_target_parameters": "experts.gate_up_proj,experts.down_proj"}  # fmt: skip
    undisturbed = run(before, "lora", True, strategies[before], **changes)
    again = options("lora", True, **changes, resume_from_checkpoint=undisturbed.checkpoints[0])
    moved = launch_well(tmp_path / "moved", after, again, strategy=strategies[after])
    if before == after:
        assert equal_after_resume(undisturbed, moved)
    losses, norms = (undisturbed.series(key)[HALF:] for key in ("loss", "grad_norm"))
    assert moved.series("loss") == pytest.approx(losses, abs=LOSS_TOLERANCE)
    assert moved.series("grad_norm") == pytest.approx(norms, rel=NORM_TOLERANCE)
    started = run(after, "lora", True, strategies[after], **changes).series("loss")
    assert moved.series("loss") != pytest.approx(started[:HALF], abs=LOSS_TOLERANCE), "control: it began anew"
    check_export(moved, "lora", True)


@pytest.mark.long
def test_other_families_and_groups_with_copies_of_the_experts() -> None:
    """Four processes in groups of two; control: a copy's tokens left out."""
    assert curve_of(mixture(4, "ep")).agrees(curve_of(mixture(1)))
    mixtral = {"model_name_or_path": small("mixtral")}
    assert curve_of(mixture(2, "ep", **mixtral)).agrees(curve_of(mixture(1, **mixtral)))


@pytest.mark.long
def test_copies_that_are_not_summed_are_seen(folder: Path, alone: Curves) -> None:
    four = launched(folder, EP, 4)
    summed, apart = (four[case.name] for case in FOUR)
    assert agree(summed, alone[Case().name])
    assert not agree(apart, alone[Case().name])
