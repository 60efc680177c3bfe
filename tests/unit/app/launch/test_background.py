"""The detached supervisor: real processes that wait in the queue, so that none of them trains anything."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.command_line import TRAIN
from app.hardware import Devices
from app.launch import actions, background, foreground
from app.launch.job import TrainJob, train_job
from app.launch.restarts import need_of
from app.runs.machines import machine_counts
from app.runs.runs import true_state
from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.run.device_locks import HeldSlots, Holder, Need, holders, place_of, take_now
from trainers.run.folder import END_STATES, RunFolder


@pytest.fixture(autouse=True)
def busy(elsewhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldSlots]:
    """All CPU slots, held; the check of data and model, which has tests of its own, is left out."""
    monkeypatch.setattr(background, "preflight", lambda job, quiet: None)
    with take_now(Need(cpu_slots=1000), Holder("busy")) as held:
        yield held
        for path in (tmp_path / "runs").glob("*"):
            for process in RunFolder(path).processes():
                if process.role == "supervisor" and process.alive() and process.pid != os.getpid():
                    os.kill(process.pid, signal.SIGKILL)


def new_job(name: str = "mine") -> TrainJob:
    return train_job(TRAIN.read(["tiny-lora", "--num_processes", "1", "--output_dir", f"runs/{name}"]))


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.02)
    return value


def supervisor(run: RunFolder) -> psutil.Process:
    (pid,) = [process.pid for process in run.processes()]
    return psutil.Process(pid)


def test_the_supervisor_is_a_process_of_its_own_that_holds_the_run() -> None:
    run = new_job().run
    state = background.start(new_job())
    process = supervisor(run)
    assert (state["state"], os.getsid(process.pid)) == ("queued", process.pid)
    assert process.pid != os.getpid()
    with pytest.raises(ConfigError, match="already running"):
        run.hold()
    until(lambda: place_of(run.path) == 1)
    assert [process.name() for process in process.children() if "log.py" not in " ".join(process.cmdline())] == []
    actions.stop(run)
    until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    state = true_state(run)
    assert (state["state"], state["cause"]) == ("stopped", "cancelled before it started")
    run.hold().close()
    assert (place_of(run.path), {holder["run"] for holder in holders().values()}) == (None, {"busy"})
    assert "queued: cpu-0" in run.log.read_text()


def test_the_supervisor_is_small() -> None:
    """It lives as long as its run: it holds no torch, and not what the page's server holds."""
    run = new_job().run
    background.start(new_job())
    maps = Path(f"/proc/{supervisor(run).pid}/maps")
    if maps.exists():
        assert "torch" not in maps.read_text()
    assert supervisor(run).memory_info().rss < 120 * 2**20


def test_a_start_pressed_twice_starts_one_run() -> None:
    run = made_run(Path("runs"), "a", "stopped", strategy="single", world=1)
    answers: list[str] = []

    def press() -> None:
        try:
            answers.append(actions.resume(run)["state"])
        except ConfigError as error:
            answers.append(f"refused: {error}")

    presses = [threading.Thread(target=press) for _ in range(3)]
    for one in presses:
        one.start()
    for one in presses:
        one.join(90)
    assert sorted(answer.partition(":")[0] for answer in answers) == ["queued", "refused", "refused"], answers
    here = [one for one in psutil.Process().children() if "app.launch.background" in one.cmdline()]
    assert [one.pid for one in here if one.status() != psutil.STATUS_ZOMBIE] == [supervisor(run).pid]


def test_a_run_that_goes_on_here_alone_awaits_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_folder(job: TrainJob) -> None:
        foreground.write_folder(job)
        job.run.write_state(machines={"count": 3, "minimum": None})  # as its last attempt left it

    monkeypatch.setattr(background, "write_folder", write_folder)
    state = background.start(new_job())
    assert state["state"] == "queued"
    assert machine_counts(state) is None


def test_a_stop_right_after_the_start_is_heeded(busy: HeldSlots) -> None:
    run = new_job().run
    background.start(new_job())
    actions.stop(run)
    busy.close()
    until(lambda: true_state(run)["state"] in END_STATES)
    assert true_state(run)["state"] == "stopped"
    assert not run.metrics.exists()


def test_whoever_interrupts_the_start_has_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_job().run

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(background.time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            background.start(new_job())
    until(lambda: (run.read_state() or {}).get("state") == "stopped")
    assert true_state(run)["cause"] == "cancelled before it started"


def test_a_supervisor_that_cannot_be_started_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = [sys.executable, "-I", "-S", "-c", "raise SystemExit('no such module')"]
    monkeypatch.setattr(background, "module_argv", lambda module, words: broken)
    state = background.start(new_job())
    assert (state["state"], state["cause"]) == ("failed", "the supervisor could not be started: no such module")
    new_job_run = RunFolder("runs/mine")
    assert true_state(new_job_run)["state"] == "failed"
    new_job_run.hold().close()


def test_a_state_folder_that_cannot_be_written_is_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = new_job().run
    background.start(new_job())
    until(lambda: true_state(run)["state"] == "failed")
    assert "cannot be written" in true_state(run)["cause"]
    assert "XDG_STATE_HOME" in true_state(run)["cause"]


def test_what_a_run_needs() -> None:
    assert need_of(Devices([], 3)) == Need(cpu_slots=3)
    assert need_of(Devices([5], 1)) == Need(gpus=("index-5",)), "a GPU that has gone still has one name"


def test_a_config_that_cannot_be_read_is_the_cause() -> None:
    run = RunFolder("runs/a")
    run.create()
    run.config.write_text("lerning_rate: 1\n")
    with run.hold() as lock:
        argv = [str(run.path), str(lock.fileno())]
        code = f"import sys; from app.launch.background import main; sys.exit(main({argv!r}))"
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])}
        os.set_inheritable(lock.fileno(), True)
        pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], environment)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert "lerning_rate" in true_state(run)["cause"]
