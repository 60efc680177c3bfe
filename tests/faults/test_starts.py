"""A launcher that cannot start: the run fails within seconds, says why, and goes on once that is mended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.detached import ended, inside, state_of, train_words, until
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import OPTIONS, clean, exact, told
from tests.launching import ROOT
from tests.parity.runs import mostly_long
from trainers.run.device_locks import Holder, Need, take_now
from trainers.run.folder import RunFolder

BROKEN = {
    "script": ("missing script", "train.py"),
    "python": ("bad Python", "could not be started"),
    "yaml": ("bad YAML", "yaml"),
}


@pytest.fixture
def clone(home: Path) -> Path:
    """A copy of the program with a Python of its own, so that parts of both can be taken away."""
    folder = home / "clone"
    for top in ("app", "trainers", "accelerate_configs"):
        shutil.copytree(ROOT / top, folder / top, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = next((folder / "venv" / "lib").glob("python3*")) / "site-packages" / "dependencies.pth"
    site.write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    return folder


def tunesmith(clone: Path, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [str(clone / "venv" / "bin" / "python"), "-m", "app.cli", *words]
    env = inside(home, PYTHONPATH=str(clone))
    return subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("what", mostly_long(list(BROKEN), ["script"]))
def test_the_launcher_cannot_start(what: str, clone: Path, home: Path, undisturbed: Undisturbed, noted: Note) -> None:
    whole, fault = undisturbed("ddp"), noted(BROKEN[what][0], "ddp")
    run = RunFolder(home / "runs" / "mine")
    part = {
        "script": clone / "trainers" / "train.py",
        "python": clone / "venv" / "bin" / "python",
        "yaml": run.accelerate,
    }[what]
    with take_now(Need(cpu_slots=2), Holder("another")):  # so that it waits while the part is broken
        done = tunesmith(clone, home, *train_words(run, 2, strategy="ddp", **OPTIONS))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["state"] == "queued"
        part.rename(home / "good")
        if what == "yaml":
            part.write_text("distributed_type: [MULTI_GPU\nnum_processes: 2\n")
        fault.at()
    began = time.monotonic()
    until(lambda: state_of(run) == "failed", 60)
    assert time.monotonic() - began < 30
    state = ended(run)
    assert BROKEN[what][1] in told(run), state
    assert state["attempt"] == 0, "it would only fail again"
    clean(run)
    assert not run.metrics.exists()
    os.replace(home / "good", part)
    again = tunesmith(clone, home, "resume", "mine", "--detach")
    assert again.returncode == 0, again.stderr
    exact(run, whole, replays=0)
    fault.harmless()
