"""An export whose command is interrupted or killed ends with it, publishes nothing, and works when it is repeated."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from app.accelerate_launch import _BOUND
from tests import forked
from tests.detached import TUNESMITH, inside, until
from tests.launching import launch_well
from tests.shared import once
from trainers.run.folder import RunFolder
from trainers.run.unfinished import being_written, new_beside

OPTIONS = {
    "preset": "tiny-lora",
    "max_steps": 1,
    "max_train_samples": 60,
    "global_batch_size": 4,
    "eval_dataset_name": "none",
}
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with an adapter."""
    made = once("exported", lambda folder: launch_well(folder / "run", 1, OPTIONS) and None)
    return RunFolder(shutil.copytree(made / "run", tmp_path / "runs" / "mine"))


def unfinished(target: Path) -> list[Path]:
    return list(target.parent.glob(f".{target.name}.*"))


def killed(command: list[str], target: Path, number: int, home: Path) -> tuple[int, str]:
    """Sends a signal to a command whose program stands still while it writes; returns status and errors.

    The program then goes on, if it can.
    """
    with forked.Popen(command, cwd=home, env=inside(home), stderr=subprocess.PIPE, text=True) as it:
        until(lambda: unfinished(target))
        (program,) = psutil.Process(it.pid).children()
        program.suspend()
        it.send_signal(number)
        if number == signal.SIGKILL:
            it.wait(60)
        program.resume()
        errors = it.communicate(timeout=60)[1]
    until(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE)
    return it.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_export_ends_with_its_command(number: signal.Signals, run: RunFolder, tmp_path: Path) -> None:
    """After SIGKILL the command can do nothing any more."""
    target = tmp_path / "out ä" if number == signal.SIGINT else run.path / "export-merged"
    output = ["--output", str(target)] if number == signal.SIGINT else []
    command = [*TUNESMITH, "export", str(run.path), "--merged", *output]
    before = sorted(target.parent.iterdir())
    status, errors = killed(command, target, number, tmp_path)
    assert (status, "Traceback" in errors) == (-9 if number == signal.SIGKILL else 130, False), errors
    assert sorted(target.parent.iterdir()) == before, "neither an export nor a part of one"
    if number == signal.SIGKILL:  # the control: the same command, left alone
        done = forked.run(command, cwd=tmp_path, env=inside(tmp_path), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (target / "model.safetensors").is_file()
        assert not unfinished(target)
        (target / "README.md").write_text("of the first")
        for more, expected, text in (([], 2, "of the first"), (["--replace"], 0, "# ")):
            again = forked.run([*command, *more], cwd=tmp_path, env=inside(tmp_path), capture_output=True, text=True)
            assert again.returncode == expected, again.stderr
            assert text in (target / "README.md").read_text()
        assert not unfinished(target)


def test_two_exports_into_a_run_at_once_are_refused(run: RunFolder, tmp_path: Path) -> None:
    """The second would replace what the first is writing without having been asked to; elsewhere it may go on."""
    command = [*TUNESMITH, "export", str(run.path), "--merged"]
    for more, expected in (([], 2), (["--output", str(tmp_path / "out")], 0)):
        with run.record.exported_alone():
            done = forked.run([*command, *more], cwd=tmp_path, env=inside(tmp_path), capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
        assert ("run mine is being exported by another process; wait" in done.stderr) == (expected == 2)
    assert not (run.path / "export-merged").exists()


def test_what_a_killed_program_has_left_is_removed_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "out"
    left, foreign = new_beside(target), tmp_path / ".out.notes"
    foreign.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with being_written(new_beside(target)):
        assert not left.exists(), "nobody writes it"
        (other,) = set(unfinished(target)) - {foreign}
        mine = new_beside(target)
        assert other.exists(), "control: it is being written"
        assert mine != other
    assert foreign.exists(), "it has another kind of name"


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_a_bound_program_ends_with_its_starter_alone() -> None:
    """Also when it was started in vain: the starter had gone before it could be bound."""
    starter = f"import subprocess, os, sys; subprocess.Popen([*sys.argv[1:3], {str(_BOUND)!r}, str(os.getpid()), " \
              "*sys.argv[3:]]); print('begun', flush=True); sys.stdin.read()"  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", starter, sys.executable, "-IS", *SLEEP], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as it:  # fmt: skip
        assert it.stdout is not None
        it.stdout.readline()
        (program,) = psutil.Process(it.pid).children()
        until(lambda: program.cmdline() == SLEEP)
        it.kill()
    until(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE)
    late = subprocess.run([sys.executable, "-IS", str(_BOUND), str(os.getpid() + 1), *SLEEP], check=False, timeout=60)
    assert late.returncode == 0
