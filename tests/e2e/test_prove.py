"""`tunesmith prove` as its user types it: real runs, a fault that must be seen, and Ctrl-C on the way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import forked
from tests.e2e.test_commands import TUNESMITH, alive, steps_of, tunesmith, wait_for
from tests.launching import ROOT, environment
from trainers.run.folder import RunFolder

SMALL = ["tiny-full", "--max_train_samples", "100"]


def prove(*words: str, cwd: Path) -> tuple[int, dict[str, Any], str]:
    """Exit status, document, and what was said on the way."""
    done = tunesmith("prove", *SMALL, *words, "--json", cwd=cwd)
    return done.returncode, json.loads(done.stdout), done.stderr


def test_single_and_ddp_train_the_same_model(tmp_path: Path) -> None:
    status, document, said = prove("--strategies", "single,ddp", "--steps", "4", cwd=tmp_path)
    assert status == 0, said
    single, ddp = document["rows"]
    assert (single["world_size"], single["bit_equal_steps"], single["passed"]) == (1, 4, True)
    assert single["weights_sha256"] == document["reference"]["weights_sha256"]
    assert (ddp["world_size"], ddp["method"], ddp["passed"], ddp["reason"]) == (2, "full", True, None)
    assert len(document["reference"]["losses"]) == 4
    assert len(document["data_fingerprint"]) == 64
    assert "[3/3] ddp on 2 CPU processes" in said
    folder = Path(document["report_dir"])
    assert folder.parent == tmp_path / "runs"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml", "ddp", "reference", "report.json", "report.md", "single",
    ]  # fmt: skip
    assert not list(folder.rglob("*.safetensors"))
    assert json.loads(tunesmith("runs", "list", "--json", cwd=tmp_path).stdout) == []


@pytest.mark.long
def test_a_checkpoint_goes_on_under_the_other_strategy(tmp_path: Path) -> None:
    status, document, said = prove("--resume", "--strategies", "single,ddp", "--steps", "4", cwd=tmp_path)
    assert status == 0, said
    assert [(row["from"], row["to"], row["passed"]) for row in document["rows"]] == [
        ("single", "single", True), ("single", "ddp", True), ("ddp", "single", True), ("ddp", "ddp", True),
    ]  # fmt: skip
    assert document["rows"][0]["bit_equal_steps"] == 2
    assert not list(Path(document["report_dir"]).rglob("*.safetensors"))


@pytest.mark.long
def test_a_checkpoint_goes_on_with_the_answers_of_the_reference(tmp_path: Path) -> None:
    """A base that answers nothing right gets a reward for every character that is no space."""
    (tmp_path / "reward.py").write_text(
        "def dense(completions):\n    return [len(text.replace(' ', '')) for text in completions]\n"
    )
    flags = [
        "--objective",
        "grpo",
        "--num_generations",
        "2",
        "--max_completion_length",
        "40",
        "--global_batch_size",
        "4",
    ]
    flags += ["--reward_funcs", "reward.py:dense"]
    status, document, said = prove("--resume", "--strategies", "single,ddp", "--steps", "2", *flags, cwd=tmp_path)
    assert status == 0, said
    assert [row["passed"] for row in document["rows"]] == [True] * 4
    assert all(norm > 0.01 for norm in document["reference"]["grad_norms"])  # so there is something to learn


def test_the_mean_of_means_is_seen_in_a_model_that_was_cut(tmp_path: Path) -> None:
    words = ["--strategies", "ddp", "--steps", "3", "--control", "mean-of-means", "--layers", "2"]
    words += ["--output_dir", "report"]
    status, document, said = prove(*words, cwd=tmp_path)
    assert status == 0, said
    (row,) = document["rows"]
    assert (row["passed"], row["fault_seen"]) == (False, True)
    assert row["max_loss_difference"] > document["tolerance"]["loss"]
    assert document["control"] == {"fault": "mean-of-means", "seen": 1, "rows": 1}
    for name in ("reference", "ddp"):
        assert "885,888" not in (tmp_path / "report" / name / "log.txt").read_text(), "the model is whole"
    assert "fault seen" in (tmp_path / "report" / "report.md").read_text()


def test_ctrl_c_reports_what_was_done(tmp_path: Path) -> None:
    words = ["prove", *SMALL, "--strategies", "single", "--steps", "2000", "--output_dir", "report", "--json"]
    env = environment(PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(tmp_path / "state"))
    program = forked.Popen([*TUNESMITH, *words], cwd=tmp_path, env=env, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    run = RunFolder(tmp_path / "report" / "reference")
    wait_for(lambda: steps_of(run) >= 2)
    program.send_signal(signal.SIGINT)
    out, errors = program.communicate(timeout=300)
    assert program.returncode == 130, errors
    document = json.loads(out)
    assert (document["interrupted"], document["reference"]["state"]) == (True, "stopped")
    assert document["rows"][0]["reason"] == "not run: interrupted"
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == document
    assert not run.checkpoints.exists()
    assert alive(run) == []


@pytest.mark.parametrize("by_hand", [False, pytest.param(True, marks=pytest.mark.long)])
def test_its_ranks_end_when_it_is_killed(tmp_path: Path, by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_hand:
        monkeypatch.setenv(forked.BY_HAND, "1")
    words = ["prove", *SMALL, "--strategies", "ddp", "--steps", "100000", "--output_dir", "report"]
    env = environment(PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(tmp_path / "state"))
    program = forked.Popen([*TUNESMITH, *words], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL)
    run = RunFolder(tmp_path / "report" / "reference")
    wait_for(lambda: steps_of(run) >= 2)
    processes = {process.role: process.pid for process in run.processes()}
    assert {"launcher", "rank"} <= processes.keys()
    assert all(map(psutil.pid_exists, processes.values()))
    program.kill()
    program.communicate(timeout=60)
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in processes.values()), seconds=60)


def test_prove_imports_no_torch() -> None:
    code = "import sys, app.prove.proof; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
