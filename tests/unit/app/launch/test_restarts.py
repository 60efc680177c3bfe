"""A run from the queue to its published end, with small launchers that are real processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.hardware import Devices
from app.launch import restarts, supervisor
from app.launch.job import refuse_unresumable
from app.launch.restarts import run_to_end
from app.runs.runs import true_state
from trainers.config.mistakes import ConfigError
from trainers.run.device_locks import Holder, Need, holders, place_of, take_now
from trainers.run.folder import END_STATES, RunFolder

ROOT = Path(__file__).resolve().parents[4]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.unit.app.launch.test_restarts"])
EVERY_SLOT = Need(cpu_slots=1000)
# What rank 0 writes, in the standard library alone: a launcher of a test starts in milliseconds.
PRELUDE = """
import json, os, signal, subprocess, sys, time
run, launch = sys.argv[1], int(sys.argv[2])

def here(name):
    return os.path.join(run, name)

def state(**changes):
    with open(here("state.json")) as file:
        merged = {**json.load(file), **changes}
    with open(here("half"), "w") as file:
        json.dump(merged, file)
    os.replace(here("half"), here("state.json"))

def end(name, cause=None, **more):
    retry = "again" if name == "failed" else "never"
    state(state="stopping", ending={"state": name, "cause": cause, "retry": retry, **more})

def wait_for(name):
    while not os.path.exists(here(name)):
        time.sleep(0.02)
    with open(here(name)) as file:
        return file.read()

def note(name, text=""):
    with open(here(name), "a") as file:
        file.write(text + "\\n")

def checkpoint(step):
    os.makedirs(here("checkpoints/step-%08d" % step), exist_ok=True)

note("launchers", str(os.getpid()))
while True:  # real ranks take seconds before they write; the supervisor has long named the launcher by then
    with open(here("state.json")) as file:
        if any(one["role"] == "launcher" for one in json.load(file)["processes"]):
            break
    time.sleep(0.01)
"""
IGNORES_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(100)"
STUBBORN = f"child = subprocess.Popen([sys.executable, '-I', '-S', '-c', {IGNORES_TERM!r}], start_new_session=True)\n"


@pytest.fixture(autouse=True)
def _quick(elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXIT_TIMEOUT", "TEARDOWN_TIMEOUT", "TERM_TIMEOUT"):
        monkeypatch.setattr(supervisor, name, 0.5)
    monkeypatch.setattr(supervisor, "POLL", 0.03)
    monkeypatch.setattr(restarts, "POLL", 0.03)
    monkeypatch.setattr(restarts, "QUEUE_POLL", 0.03)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "a run")
    folder.create()
    return folder


def script(run: RunFolder, body: str) -> Path:
    path = run.path / "launcher.py"
    path.write_text(PRELUDE + textwrap.dedent(body), encoding="utf-8")
    return path


class Attempts:
    """`run_to_end` with a launcher of the test's own; keeps from where each launch was to resume."""

    def __init__(self, run: RunFolder, monkeypatch: pytest.MonkeyPatch):
        self.run, self.sources, self.notes = run, list[str | None](), list[str]()
        monkeypatch.setattr(restarts, "launch_argv", self._argv)

    def _argv(self, run: RunFolder, processes: int, source: str | None) -> list[str]:
        self.sources.append(source)
        return [sys.executable, "-I", "-S", str(run.path / "launcher.py"), str(run.path), str(len(self.sources) - 1)]

    def __call__(
        self, body: str, max_restarts: int = 0, when: Callable[[str, dict], None] | None = None, **more: Any
    ) -> dict[str, Any]:
        script(self.run, body)

        def listen(kind: str, text: str) -> None:
            if kind == "note":
                self.notes.append(text)
            if when is not None:
                when(text, self.run.read_state() or {})

        return run_to_end(self.run, Devices([], 1), os.environ, listen, max_restarts=max_restarts, **more)


@pytest.fixture
def go(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    return Attempts(run, monkeypatch)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.02)
    return value


def launchers(run: RunFolder) -> list[int]:
    """Process ids of the launchers that were started, and of what they noted besides."""
    path = run.path / "launchers"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def living(run: RunFolder) -> list[int]:
    return [pid for pid in launchers(run) if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_a_crash_is_restarted_from_the_newest_checkpoint_while_it_gets_further(go: Attempts, run: RunFolder) -> None:
    body = """
    state(state="running", step=5 * launch + 5)
    if launch == 1:
        checkpoint(10)
    if launch < 2:
        sys.exit(1)
    end("done", step=15)
    """
    state = go(body, max_restarts=3, resume_from="/elsewhere/step-00000002")
    assert go.sources == ["/elsewhere/step-00000002", "/elsewhere/step-00000002", "auto"]
    assert (state["state"], state["step"], state["attempt"]) == ("done", 15, 2)
    told = [line.partition("[supervisor] ")[2] for line in run.log.read_text().splitlines() if "[supervisor]" in line]
    assert [line.partition(", after: ")[0] for line in told] == [
        "restart 1 of 3, from the beginning",
        "restart 2 of 3, from step-00000010",
    ]
    assert holders() == {}


@pytest.mark.parametrize("allowed", [0, 2])
def test_no_more_restarts_than_allowed(allowed: int, go: Attempts) -> None:
    state = go("state(state='running', step=launch + 1); sys.exit(1)", max_restarts=allowed)
    assert (state["state"], len(go.sources), state["attempt"]) == ("failed", allowed + 1, allowed)
    assert state["cause"].endswith("; gave up after 2 restarts") == bool(allowed), state["cause"]


@pytest.mark.parametrize(
    ("body", "launches", "why"),
    [
        ("sys.exit(1)", 1, "it made no step beyond its start"),
        ("state(state='running', step=5); sys.exit(1)", 2, "the last 2 attempts crashed at the same step, 5"),
        (
            "state(state='running', step=5 + launch); checkpoint(6); sys.exit(1)", 2,
            "it made no step beyond its checkpoint of step 6",
        ),
    ],
    ids=["before the first step", "at the same step", "at the step of its checkpoint"],
)  # fmt: skip
def test_a_crash_loop_ends_and_says_so(body: str, launches: int, why: str, go: Attempts) -> None:
    state = go(body, max_restarts=5)
    assert (state["state"], len(go.sources)) == ("failed", launches)
    assert state["cause"].startswith("the launcher ended with exit status 1")
    assert state["cause"].endswith(f"; not restarted: {why}")


def test_rolling_back_from_a_spike_is_no_restart_after_a_crash(go: Attempts, run: RunFolder) -> None:
    body = """
    with open(here("passed_over.json"), "w") as file:
        json.dump({"steps": list(range(launch + 1))}, file)
    if launch < 2:
        end("failed", "a spike", retry="roll_back")
    elif launch == 2:
        end("done")
    """
    state = go(body, max_restarts=0)
    assert (state["state"], len(go.sources), "retry" in state) == ("done", 3, False)
    assert go.notes.count("a spike") == 2


def test_rolling_back_without_a_step_to_skip_would_never_end(go: Attempts) -> None:
    state = go("end('failed', 'a spike', retry='roll_back')", max_restarts=0)
    assert (state["state"], len(go.sources)) == ("failed", 1)


def test_kills_at_any_steps_are_restarted_as_often_as_allowed(go: Attempts) -> None:
    """A run that is killed for no fault of its own may fall earlier than before."""
    body = "state(state='running', step=[30, 25, 28, 26][launch]); sys.exit(1) if launch < 3 else end('done')"
    assert (go(body, max_restarts=3)["state"], len(go.sources)) == ("done", 4)


def test_a_heartbeat_is_progress_too(go: Attempts, run: RunFolder) -> None:
    """A rank may be killed before the step that it is in is logged."""
    body = """
    with open(here("heartbeat/rank-1.json"), "w") as file:
        json.dump({"step": launch + 3}, file)
    sys.exit(1)
    """
    assert go(body, max_restarts=2)["state"] == "failed"
    assert len(go.sources) == 3


def test_a_failure_that_would_come_again_is_not_restarted(go: Attempts) -> None:
    body = "state(state='running', step=launch + 1); end('failed', 'loss nan', retry='never'); sys.exit(1)"
    state = go(body, max_restarts=5)
    assert (state["state"], state["cause"], len(go.sources)) == ("failed", "loss nan", 1)


def test_a_crash_after_a_stop_request_is_a_stop(go: Attempts, run: RunFolder) -> None:
    body = "state(state='running', step=4); wait_for('stop'); raise ValueError('row 7')"
    state = go(body, max_restarts=5, when=lambda text, state: run.ask_stop() if state["state"] == "running" else None)
    assert (state["state"], len(go.sources)) == ("stopped", 1)
    assert state["cause"] == "stopped by request; before that: launcher: ValueError: row 7"


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_a_run_waits_for_its_slots_and_says_for_whom(go: Attempts, run: RunFolder) -> None:
    busy = take_now(EVERY_SLOT, Holder("busy"))
    seen = []

    def when(text: str, state: dict[str, Any]) -> None:
        if text.startswith("queued"):
            seen.append((text, state["state"], place_of(run.path)))
            busy.close()

    assert go("end('done')", when=when)["state"] == "done"
    assert [(text.endswith("held by busy"), *rest) for text, *rest in seen] == [(True, "queued", 1)]
    assert place_of(run.path) is None


def test_a_queued_run_is_cancelled(go: Attempts, run: RunFolder) -> None:
    with take_now(EVERY_SLOT, Holder("busy")):
        state = go("end('done')", when=lambda text, state: run.ask_stop() if text.startswith("queued") else None)
        assert {holder["run"] for holder in holders().values()} == {"busy"}
    assert (state["state"], state["cause"]) == ("stopped", "cancelled before it started")
    assert (go.sources, place_of(run.path), state.get("ending")) == ([], None, None)


def test_a_run_that_is_stopped_before_its_launch_is_never_launched(go: Attempts, run: RunFolder) -> None:
    run.ask_stop()
    assert go("end('done')")["cause"] == "cancelled before it started"
    run.ask_stop()
    assert go("end('done')", share_gpus=True)["cause"] == "cancelled before it started"
    assert (go.sources, holders()) == ([], {})


def test_with_share_gpus_it_waits_for_nobody(go: Attempts) -> None:
    with take_now(EVERY_SLOT, Holder("busy")):
        assert go("end('done')", share_gpus=True)["state"] == "done"


# -- the published end -------------------------------------------------------------------------------------------------


def _watch(home: str, path: str, pipe: Connection) -> None:
    """Looks without a pause; the moment that the state says that it is over, takes the slots and counts the living."""
    os.environ["XDG_STATE_HOME"] = home
    run, busy = RunFolder(path), 0
    pipe.send("ready")
    while (state := run.read_state() or {}).get("state") not in END_STATES:
        if state.get("ending"):
            with contextlib.suppress(ConfigError):
                take_now(EVERY_SLOT, Holder("watcher")).close()
                if alive := living(run):
                    pipe.send(f"the slots are free while {alive} live")
                    return
            busy += 1
    alive = living(run)
    try:
        take_now(EVERY_SLOT, Holder("watcher")).close()
        pipe.send((state["state"], alive, "free", busy > 0))
    except ConfigError as error:
        pipe.send((state["state"], alive, str(error), busy > 0))


LINGERS = STUBBORN + "note('launchers', str(child.pid))\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (LINGERS + "end('done', step=3)", ("done", [], "free", True)),
        (LINGERS + "end('stopped', 'stopped by request')", ("stopped", [], "free", True)),
        (LINGERS + "os.abort()", ("failed", [], "free", False)),
    ],
    ids=["done", "stopped", "failed"],
)
def test_the_end_is_published_when_nothing_lives_and_the_slots_are_free(
    body: str, expected: tuple, go: Attempts, run: RunFolder, tmp_path: Path
) -> None:
    pipe, theirs = CONTEXT.Pipe()
    watcher = CONTEXT.Process(target=_watch, args=(str(tmp_path / "state"), str(run.path), theirs), daemon=True)
    watcher.start()
    assert pipe.recv() == "ready"
    go(body)
    assert len(launchers(run)) == 2
    assert pipe.poll(30)
    assert pipe.recv() == expected
    watcher.join(30)


# -- stops -------------------------------------------------------------------------------------------------------------

STOPS = """
wait_for("begin")
state(state="running", step=1)
wait_for("stop")
state(state="stopping")
wait_for("finish")
asked = json.loads(wait_for("stop"))
if asked["save"]:
    note("saves")
end("stopped", "saved" if asked["save"] else "not saved")
"""


@pytest.mark.parametrize("phase", ["starting", "running", "stopping"])
@pytest.mark.parametrize("times", [1, 5])
def test_a_stop_in_any_phase_asked_once_or_often_is_one_stop(
    phase: str, times: int, go: Attempts, run: RunFolder
) -> None:
    def when(text: str, state: dict[str, Any]) -> None:
        if state["state"] == "starting" and phase != "starting":
            (run.path / "begin").touch()
        if state["state"] == "running" and phase == "stopping":
            run.ask_stop()
        if state["state"] == phase and launchers(run):
            for _ in range(times):
                run.ask_stop()
            (run.path / "begin").touch()
            (run.path / "finish").touch()

    state = go(STOPS, max_restarts=3, when=when)
    assert (state["state"], state["cause"], len(go.sources)) == ("stopped", "saved", 1)
    assert (run.path / "saves").read_text() == "\n"
    assert (living(run), holders()) == ([], {})


@pytest.mark.parametrize("order", [(True, False), (False, True)], ids=["taken back", "not asked back"])
def test_stop_without_saving_holds_whatever_else_is_asked(
    order: tuple[bool, bool], go: Attempts, run: RunFolder
) -> None:
    (run.path / "begin").touch()

    def when(text: str, state: dict[str, Any]) -> None:
        if state["state"] == "running":
            for save in order:
                run.ask_stop(save)
            (run.path / "finish").touch()

    assert go(STOPS, when=when)["cause"] == "not saved"


# -- a run folder that is lost -----------------------------------------------------------------------------------------


def removed(run: RunFolder) -> None:
    shutil.rmtree(run.path)


def made_anew(run: RunFolder) -> None:
    run.path.rename(run.path.with_name("elsewhere"))
    run.path.mkdir()
    (run.path / "save").write_text("mine")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize(("take", "how"), [(removed, "removed"), (made_anew, "replaced by another")])
@pytest.mark.parametrize(("phase", "doing"), [("queued", "waited for its turn"), ("running", "trained")])
def test_a_lost_run_folder_ends_the_run_and_nothing_is_written_in_its_place(
    phase: str, doing: str, take: Callable[[RunFolder], None], how: str, number: signal.Signals, go: Attempts,
    run: RunFolder,
) -> None:  # fmt: skip
    taken: list[int] = []

    def when(text: str, state: dict[str, Any]) -> None:
        if state.get("state") == phase and not taken:
            taken.extend(launchers(run))
            taken.append(0)
            take(run)
            os.kill(os.getpid(), number)

    with take_now(EVERY_SLOT, Holder("busy")) if phase == "queued" else contextlib.nullcontext():
        state = go("state(state='running', step=2); wait_for('never')", max_restarts=3, when=when)
    assert (state["state"], state["cause"]) == ("failed", f"the run folder {run.path} was {how} while it {doing}")
    assert len(go.sources) == (phase == "running"), "it is not launched again"
    assert not [pid for pid in taken if pid and psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    found = {path.name: path.read_text() for path in run.path.iterdir()} if run.path.exists() else None
    assert found == (None if take is removed else {"save": "mine"})
    assert (place_of(run.path), holders()) == (None, {})


# -- supervisors that are killed ---------------------------------------------------------------------------------------

SUPERVISE = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from app.launch import restarts as attempts
from app.hardware import Devices
from trainers.run.folder import RunFolder
run = RunFolder(sys.argv[1])
words = [sys.executable, "-I", "-S", str(run.path / "launcher.py"), str(run.path), "0"]
attempts.launch_argv = lambda *more: words
with run.hold():
    attempts.run_to_end(run, Devices([], 1), os.environ, lambda kind, text: None, None, 3)
"""
ENDS_ITSELF = f"""
state(state="running", step=2)
wait_for("finish")
sys.path[:0] = {[str(ROOT), *sys.path]!r}
from trainers.run.ending import Ending
from trainers.run.folder import RunFolder
RunFolder(run).end(Ending("done", step=9), True)
wait_for("leave")
"""


@pytest.fixture
def supervised(run: RunFolder) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a supervisor in a process of its own; ends it and its launcher."""
    made = []

    def start(body: str) -> subprocess.Popen[bytes]:
        script(run, body)
        made.append(subprocess.Popen([sys.executable, "-c", SUPERVISE, str(run.path)], start_new_session=True))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()
    for pid in living(run):
        os.kill(pid, signal.SIGKILL)


Starter = Callable[[str], subprocess.Popen[bytes]]


def killed(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_training_goes_on_without_its_supervisor_and_says_itself_how_it_ended(
    supervised: Starter, run: RunFolder
) -> None:
    process = supervised(ENDS_ITSELF)
    until(lambda: (run.read_state() or {}).get("state") == "running")
    killed(process)
    assert (true_state(run)["state"], [holder["run"] for holder in holders().values()]) == ("running", [run.id])
    with pytest.raises(ConfigError, match="is running; stop it first"):
        refuse_unresumable(run)
    (run.path / "finish").touch()
    until(lambda: (run.read_state() or {}).get("state") == "done")
    assert holders(), "its launcher still holds the slot"
    (run.path / "leave").touch()
    until(lambda: not holders() and not living(run))
    assert (true_state(run)["state"], true_state(run)["step"]) == ("done", 9)


def test_an_ending_that_its_supervisor_did_not_live_to_publish_counts(supervised: Starter, run: RunFolder) -> None:
    process = supervised("end('done', step=9, export_dir='m'); wait_for('leave')")
    until(lambda: (run.read_state() or {}).get("ending"))
    killed(process)
    assert true_state(run)["state"] == "stopping", "its launcher lives"
    (run.path / "leave").touch()
    until(lambda: not living(run))
    state = true_state(run)
    assert (state["state"], state["step"], state["export_dir"]) == ("done", 9, "m")
    assert (run.read_state() or {})["state"] == "stopping", "a reader writes nothing"


def test_a_launch_whose_supervisor_is_killed_before_the_ranks_report_is_not_taken_for_dead(
    supervised: Starter, run: RunFolder
) -> None:
    """It would be started a second time in the same folder."""
    process = supervised("wait_for('leave')")
    until(lambda: len((run.read_state() or {}).get("processes", [])) == 2 and launchers(run))
    killed(process)
    assert true_state(run)["state"] == "starting"
    (run.path / "leave").touch()
    until(lambda: not living(run))
    assert true_state(run)["state"] == "failed"


def test_a_killed_supervisor_leaves_the_queue(supervised: Starter, run: RunFolder) -> None:
    with take_now(EVERY_SLOT, Holder("busy")):
        process = supervised("end('done')")
        until(lambda: place_of(run.path) == 1 and (run.read_state() or {}).get("state") == "queued")
        killed(process)
        assert place_of(run.path) is None
    assert true_state(run)["state"] == "failed"
    assert launchers(run) == []


def test_a_signal_to_a_queued_supervisor_cancels_the_run(supervised: Starter, run: RunFolder) -> None:
    with take_now(EVERY_SLOT, Holder("busy")):
        process = supervised("end('done')")
        until(lambda: place_of(run.path) == 1 and (run.read_state() or {}).get("state") == "queued")
        process.terminate()
        assert process.wait(30) == 0
    assert true_state(run)["cause"] == "cancelled before it started"
