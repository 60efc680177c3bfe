"""Expert parallelism trains as one process does, and is refused where it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

from tests import forked
from tests.launching import ROOT, environment
from tests.parity.expert_ranks import CASES, CLIPPED, CONTROLS, FOUR, Case, config_of, curve, model_of
from tests.parity.plain import LOSS_TOLERANCE, NORM_TOLERANCE
from tests.steps import Steps

SCRIPT = Path(__file__).with_name("expert_ranks.py")
EP = ROOT / "accelerate_configs" / "ep.yaml"
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
    assert not agree(two[case.name], alone[Case().name])


@pytest.mark.long
def test_groups_with_copies_of_the_experts(folder: Path, alone: Curves) -> None:
    """Four ranks in groups of two; control: without the sum over the copies."""
    four = launched(folder, EP, 4)
    summed, apart = (four[case.name] for case in FOUR)
    assert agree(summed, alone[Case().name])
    assert not agree(apart, alone[Case().name])
