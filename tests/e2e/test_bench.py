"""`tunesmith bench` as its user types it: real runs of a few steps, and Ctrl-C on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil

from tests import forked
from tests.e2e.test_commands import TUNESMITH, tunesmith, wait_for
from tests.launching import ROOT, environment

INJECT = ROOT / "tests" / "faults" / "inject"
WORDS = ["bench", "tiny-full", "--num_processes", "2", "--max_train_samples", "300", "--json", "--settings"]


def start(tmp_path: Path, *words: str, fault: str = "") -> tuple[forked.Popen, Path, Path]:
    """The verb, with the folder of its temporary files and the one in which it was typed, both empty."""
    temporary, home = tmp_path / "tmp", tmp_path / "home"
    temporary.mkdir()
    home.mkdir()
    own = {"XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": str(temporary), "FAULT": fault}
    env = environment(PYTHONPATH=f"{INJECT}{os.pathsep}{ROOT}", CUDA_VISIBLE_DEVICES="", **own)
    program = forked.Popen([*TUNESMITH, *WORDS, *words], cwd=home, env=env, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    return program, temporary, home


def left_of(folder: Path) -> list[str]:
    """What is still in a folder, and processes that have it in their command line."""
    lines = (" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [*map(str, folder.iterdir()), *(line for line in lines if str(folder) in line)]


def test_the_settings_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    words = ["gradient_checkpointing,per_device_train_batch_size", "--steps", "3", "--global_batch_size", "4"]
    words += ["--per_device_train_batch_size", "1"]
    program, temporary, home = start(tmp_path, *words, fault="memory:1:1")
    out, errors = program.communicate(timeout=300)
    assert program.returncode == 0, errors
    document = json.loads(out)
    base, (saving, double) = document["base"], document["variants"]
    assert (double["changes"], double["outcome"]) == ({"per_device_train_batch_size": 2}, "out of memory")
    assert "rank 1: OutOfMemoryError: CUDA out of memory" in double["reason"]
    for row in (base, saving):
        assert (row["outcome"], len(row["repeats"])) == ("measured", 2)
        assert row["tokens_per_second"] > 100
        assert 0.001 < row["seconds_per_step"] < 60
        assert 0.1 < row["memory_gib"] < 8
        assert 0 < row["loss"] < 20
    assert saving["changes"] == {"gradient_checkpointing": True}
    for loss in ("first_loss", "loss"):
        assert abs(saving[loss] - base[loss]) < 1e-5, "speed and memory may change, never the model"
    assert saving["ratio"] == saving["tokens_per_second"] / base["tokens_per_second"]
    assert (document["steps"], document["world_size"], document["strategy"]) == (3, 2, "ddp")
    assert left_of(temporary) == left_of(home) == []
    assert json.loads(tunesmith("runs", "list", "--json", cwd=tmp_path).stdout) == []


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    program, temporary, home = start(tmp_path, "packing", "--steps", "5000")
    wait_for(lambda: any(path.stat().st_size for path in temporary.glob("tunesmith-bench-*/*/metrics.jsonl")))
    program.send_signal(signal.SIGINT)
    out, errors = program.communicate(timeout=300)
    assert program.returncode == 130, errors
    document = json.loads(out)
    assert (document["interrupted"], document["base"]["outcome"], document["advice"]) == (True, "not run", [])
    assert "stopping: nothing is saved" in errors
    assert left_of(temporary) == left_of(home) == []
