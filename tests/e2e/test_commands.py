"""The command line as its user types it: train, stop, resume, kill, export; real processes and real files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import forked
from tests.launching import ROOT, Finished, environment, flags, launch_well
from tests.rounding import bound, relative, reordered
from tests.shared import once
from trainers.run.folder import RunFolder

TUNESMITH = [sys.executable, "-m", "app.cli"]
STEPS = 40
OPTIONS: dict[str, Any] = {
    "max_steps": STEPS,
    "max_train_samples": 300,
    "eval_dataset_name": "none",
    "eval_share": 0.1,
    "save_steps": 10,
    "logging_steps": 1,
}


def tunesmith(*words: str, cwd: Path, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    env = environment(PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(cwd / "state"))
    return forked.run([*TUNESMITH, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)


def start(run: RunFolder, cwd: Path, **changes: Any) -> forked.Popen:
    env = environment(PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(cwd / "state"))
    words = ["train", "tiny-lora", "--json", *flags({**OPTIONS, "output_dir": run.path, **changes})]
    return forked.Popen([*TUNESMITH, *words], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)  # fmt: skip


def wait_for(condition: Callable[[], bool], seconds: float = 400) -> None:
    """Looks until the condition holds; the time is a bound, not a wait."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come to hold"
        time.sleep(0.05)


def steps_of(run: RunFolder) -> int:
    return len(run.metrics.read_text().splitlines()) if run.metrics.exists() else 0


def alive(run: RunFolder) -> list[int]:
    """Processes that still have the run folder in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(run.path) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def pid_of(run: RunFolder, role: str, rank: int | None = None) -> int:
    return next(one.pid for one in run.processes() if one.role == role and one.rank == rank)


def undisturbed() -> Finished:
    """The same run, never touched."""

    def train(folder: Path) -> None:
        launch_well(folder / "run", 2, {"preset": "tiny-lora", **OPTIONS})

    return Finished(RunFolder(once("undisturbed", train) / "run"), 0, "")


def one_curve(finished: Finished) -> list[tuple[int, str, str]]:
    """Step, loss and gradient norm bit for bit; of repeated steps the last attempt."""
    rows = {row["step"]: row for row in sorted(finished.rows(), key=lambda row: row["attempt"])}
    return [(step, row["loss"].hex(), row["grad_norm"].hex()) for step, row in sorted(rows.items())]


@pytest.mark.quick
def test_stop_then_resume_equals_never_stopped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "mine")
    program = start(run, tmp_path)
    wait_for(lambda: steps_of(run) >= 5)
    stopped = tunesmith("stop", "mine", "--json", cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    out, errors = program.communicate(timeout=300)
    assert program.returncode == 130, errors
    document = json.loads(out)
    assert (document["state"], document["run_dir"]) == ("stopped", str(run.path))
    state = run.read_state() or {}
    assert state["state"] == "stopped"
    assert "a stop request" in state["cause"]
    assert 5 <= state["step"] < STEPS
    assert alive(run) == []
    again = tunesmith("resume", "mine", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    document = json.loads(again.stdout)
    assert (document["state"], document["step"], document["world_size"]) == ("done", STEPS, 2)
    whole = one_curve(undisturbed())
    assert one_curve(Finished(run, 0, "")) == whole
    assert len(whole) == STEPS
    rows = Finished(run, 0, "").rows()
    assert sorted(row["step"] for row in rows) == list(range(1, STEPS + 1)), "nothing is computed again after a stop"


@pytest.mark.parametrize("times", [1, 3])
def test_ctrl_c_saves_and_stops(times: int, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "mine")
    program = start(run, tmp_path)
    wait_for(lambda: steps_of(run) >= 3)
    for _ in range(times):
        program.send_signal(signal.SIGINT)
    out, errors = program.communicate(timeout=300)
    assert program.returncode == 130, errors
    assert json.loads(out)["state"] == "stopped"
    state = run.read_state() or {}
    assert (run.checkpoints / f"step-{state['step']:08d}" / "manifest.json").exists()
    assert alive(run) == []


def test_a_killed_worker_fails_the_run_and_resume_goes_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "mine")
    program = start(run, tmp_path, max_restarts=0)
    wait_for(lambda: steps_of(run) >= 14)
    os.kill(pid_of(run, "rank", 1), signal.SIGKILL)
    _, errors = program.communicate(timeout=300)
    assert program.returncode == 1
    state = run.read_state() or {}
    assert state["state"] == "failed"
    assert "rank 1" in state["cause"]
    assert "SIGKILL" in state["cause"]
    assert "tunesmith resume" in errors
    assert alive(run) == []
    again = tunesmith("resume", "mine", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert one_curve(Finished(run, 0, "")) == one_curve(undisturbed())


def test_a_killed_launcher_leaves_no_orphans_and_loses_nothing(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "mine")
    program = start(run, tmp_path, max_restarts=0)
    wait_for(lambda: steps_of(run) >= 3)
    os.kill(pid_of(run, "launcher"), signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: alive(run) in ([], [program.pid]), 120)
    assert time.monotonic() - killed < 30
    program.communicate(timeout=300)
    state = run.read_state() or {}
    assert (program.returncode, state["state"]) == (1, "failed")
    assert "launcher" in state["cause"]


def test_lists_and_shows(tmp_path: Path) -> None:
    done = tunesmith("train", "tiny-lora", *flags({**OPTIONS, "max_steps": 2, "run_name": "shown"}), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(tunesmith("runs", "list", "--json", cwd=tmp_path).stdout)
    keys = [
        "id",
        "state",
        "cause",
        "step",
        "total_steps",
        "preset",
        "strategy",
        "world_size",
        "gpus",
        "started_at",
        "run_dir",
    ]
    assert list(row) == keys
    assert (row["state"], row["step"], row["preset"], row["strategy"], row["world_size"]) == (
        "done", 2, "tiny-lora", "ddp", 2,
    )  # fmt: skip
    logs = tunesmith("runs", "logs", row["id"], cwd=tmp_path)
    assert "step 2 loss" in logs.stdout
    assert "[rank 0]" in logs.stdout
    assert row["id"] in tunesmith("runs", "show", row["id"], cwd=tmp_path).stdout


def test_export_again_merged_gives_the_adapters_logits(tmp_path: Path) -> None:
    finished = launch_well(tmp_path / "runs" / "mine", 1, {"preset": "tiny-lora", **OPTIONS, "max_steps": 5})
    done = tunesmith("export", "mine", "--merged", "--output", "merged", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(json.loads(done.stdout)["export_dir"])
    assert folder == tmp_path / "merged"
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    adapter = AutoPeftModelForCausalLM.from_pretrained(finished.run.model).eval()
    ids = AutoTokenizer.from_pretrained(folder)("name: Ada", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = adapter(ids).logits
        with reordered("backwards"):
            limit = bound(relative(adapter(ids).logits, expected))
        assert relative(merged(ids).logits, expected) <= limit
        with adapter.disable_adapter():
            assert relative(adapter(ids).logits, expected) > limit, "control: without the adapter"
    again = tunesmith("export", "mine", "--merged", "--output", "merged", cwd=tmp_path)
    assert again.returncode == 2
    assert "name a new folder" in again.stderr


def test_early_stopping_best_weights_and_a_tracker(tmp_path: Path) -> None:
    """A rate that rises far too high makes evaluations worse: it stops early and exports the best weights."""
    options = {**OPTIONS, "method": "full", "learning_rate": 0.2, "warmup_steps": STEPS, "eval_steps": 2,
               "early_stopping_patience": 2, "load_best_model_at_end": True, "report_to": "tensorboard"}  # fmt: skip
    finished = launch_well(tmp_path / "run", 2, {"preset": "tiny-lora", **options})
    losses = {row["step"]: row["eval_loss"] for row in finished.rows("eval_loss")}
    best = min(losses, key=lambda step: losses[step])
    assert max(losses) == best + 4 < STEPS
    assert "stopped early" in finished.state["cause"]
    saved = {path.name: path for path in finished.checkpoints}[f"step-{best:08d}"]
    weight = load_file(finished.run.model / "model.safetensors")["model.norm.weight"]
    assert torch.equal(weight, tensor_of(saved, "model.model.norm.weight"))
    assert not torch.equal(weight, tensor_of(finished.checkpoints[-1], "model.model.norm.weight"))
    assert f"| exported_step | {best} |" in (finished.run.model / "README.md").read_text()
    assert list(finished.run.path.rglob("events.out.tfevents*"))


def tensor_of(checkpoint: Path, name: str) -> torch.Tensor:
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors[name]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--model_name_or_path", "no-such-org/no-such-model"], "model_name_or_path=no-such-org/no-such-model"),
        (["--dataset_name", "missing.jsonl"], "dataset_name=missing.jsonl does not exist"),
        (["--dataset_name", "empty.jsonl"], "empty.jsonl"),
        (["--dataset_name", "broken.jsonl"], "broken.jsonl:2"),
        (["--max_train_samples", "30"], "global_batch_size=16 is larger than the data"),
        (["--mixed_precision", "fp16"], "mixed_precision=fp16 needs a GPU"),
        (["--ddp_comm_hook", "power_sgd"], "ddp_comm_hook=power_sgd needs GPUs"),
        (["--report_to", "wandb"], "report_to=wandb is not installed"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_launched(words: list[str], line: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"\n')
    done = tunesmith("train", "tiny-lora", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert line in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_an_answer_that_is_ended_from_outside_reports_it(name: str, tmp_path: Path) -> None:
    command = [*TUNESMITH, "chat", "embedded", "--prompt", "hello", "--max_new_tokens", "2000", "--json"]
    env = environment(PYTHONPATH=str(ROOT), XDG_STATE_HOME=str(tmp_path / "state"))
    asking = forked.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)  # fmt: skip
    assert asking.stderr
    assert asking.stderr.readline() == "starting a process ...\n"
    children = psutil.Process(asking.pid).children(recursive=True)
    asking.send_signal(signal.Signals[name])
    out, errors = asking.communicate(timeout=60)
    assert (asking.returncode, json.loads(out)["state"]) == (130, "stopped"), errors
    psutil.wait_procs(children, timeout=30)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
