"""A run's page proves its strategy: real processes, on the model and the data of a real run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from app.runs.proofs import PROOFS
from app.services import proofs
from tests import forked
from tests.detached import SMALL, until
from tests.launching import launch_well
from tests.shared import once
from trainers.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("two_cores")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run of two processes that has ended."""
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def train(folder: Path) -> None:
        launch_well(folder / "run", 2, {"preset": "tiny-lora", **SMALL, "max_steps": 2})

    shutil.copytree(once("proved", train) / "run", tmp_path / "a-run")
    return RunFolder(tmp_path / "a-run")


@pytest.mark.long
def test_a_proof_agrees_and_sees_a_known_fault(run: RunFolder) -> None:
    for control in (False, True):
        proof, doings = proofs.start(run, control), set()

        def has_ended(doings: set[str] = doings) -> bool:
            doings.add(proofs.newest(run)[0]["doing"].partition(",")[0])
            return PROOFS.running(run) is None

        until(has_ended)
        assert {"one process", "ddp"} <= doings, proof.output.read_text()
    seen, agreed = proofs.entries(run)
    assert (agreed["verdict"], seen["verdict"]) == ("agrees", "fault seen"), (agreed, seen)
    assert agreed["max_loss_difference"] <= agreed["tolerance"]["loss"] < seen["max_loss_difference"]
    assert (agreed["steps"], seen["bit_equal_steps"]) == (20, 0)
    assert not list((run.path / "proofs").rglob("*.safetensors"))


@pytest.mark.long
def test_a_proof_stops_when_it_is_told_to_and_leaves_no_process(run: RunFolder) -> None:
    proof = proofs.start(run)
    process = proof.process()
    assert process is not None
    until(lambda: "step" in proofs.newest(run)[0]["doing"])
    proofs.stop(run)
    assert proofs.newest(run)[0]["stopping"] or not PROOFS.running(run)
    until(lambda: not PROOFS.running(run))
    assert proofs.entries(run)[0]["sentence"] == "No verdict: it was stopped."
    assert not process.alive()
    assert not any(rank.alive() for rank in RunFolder(proof.report / "reference").processes())
