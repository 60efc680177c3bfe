"""The supervisor against real processes: small launchers that behave well, badly, or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from app.launch import supervisor
from app.launch.supervisor import RunSignals, supervise
from trainers.run.ending import Ending
from trainers.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[4]
PRELUDE = f"""
import os, signal, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from trainers.monitor.heartbeat import Heartbeat
from trainers.run.ending import Ending
from trainers.run.folder import Process, RunFolder, log_line, write_json
run = RunFolder(sys.argv[1])

def note(name, pid):
    (run.path / ("pid-" + name)).write_text(str(pid))

def spawn(name, code):
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    note(name, child.pid)
    return child

def end(state, cause=None, **more):
    run.end(Ending(state, cause, **more), True)

def running(**more):
    ranks = [Process.of("rank", 0).as_json()]
    run.write_state(state="running", processes=run.read_state()["processes"] + ranks, **more)
"""
IGNORES_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run with space")
    folder.create()
    return folder


@pytest.fixture(autouse=True)
def _short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "EXIT_TIMEOUT", 0.5)
    monkeypatch.setattr(supervisor, "TEARDOWN_TIMEOUT", 0.5)
    monkeypatch.setattr(supervisor, "TERM_TIMEOUT", 0.5)


def launcher(run: RunFolder, body: str) -> list[str]:
    script = run.path / "launcher.py"
    script.write_text(PRELUDE + textwrap.dedent(body), encoding="utf-8")
    return [sys.executable, str(script), str(run.path)]


def go(run: RunFolder, body: str, grace: float = 60.0) -> Ending:
    return supervise(run, launcher(run, body), os.environ, lambda kind, text: None, RunSignals(), grace)


def alive(run: RunFolder) -> list[str]:
    """Names of the noted processes that still run."""
    noted = [(path.name, int(path.read_text())) for path in run.path.glob("pid-*")]
    return [name for name, pid in noted if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_done_is_what_the_ranks_wrote_whatever_the_exit_status(run: RunFolder) -> None:
    ending = go(run, "running(); end(state='done', step=7, export_dir='m'); os.abort()")
    assert (ending.state, ending.step, ending.cause, ending.export_dir) == ("done", 7, None, "m")


def test_the_first_state_names_the_supervisor_and_is_kept_by_the_ranks(run: RunFolder) -> None:
    go(run, "note('self', os.getpid()); running(); end(state='done')")
    state = run.read_state()
    assert state
    assert [entry["role"] for entry in state["processes"]] == ["supervisor", "launcher", "rank"]
    assert state["processes"][0]["pid"] == os.getpid()
    assert (state["attempt"], alive(run)) == (0, [])


def test_every_launch_is_one_attempt_more_and_keeps_the_first_start(run: RunFolder) -> None:
    run.write_state(state="queued")
    states = []
    for _ in range(2):
        go(run, "end('done')")
        states.append(run.read_state() or {})
    first, second = states
    assert (first["attempt"], second["attempt"]) == (0, 1)
    assert first["started_at"] == second["started_at"]


def test_an_earlier_ending_is_not_taken_for_this_one(run: RunFolder) -> None:
    assert go(run, "end('done')").state == "done"
    assert go(run, "sys.exit(1)").state == "failed"


def test_a_crash_of_a_rank_is_told_by_its_exception(run: RunFolder) -> None:
    body = """
    running()
    with open(run.log, "a") as log:
        for line in ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: row 7 is bad"]:
            log.write(log_line("rank 1", line))
        for line in ["Traceback (most recent call last):", "RuntimeError: Connection closed by peer"]:
            log.write(log_line("rank 0", line))
    sys.exit(1)
    """
    ending = go(run, body)
    assert (ending.state, ending.cause) == ("failed", "rank 1: ValueError: row 7 is bad")


def test_a_crash_of_the_launcher_itself_is_told_from_its_output(run: RunFolder) -> None:
    ending = go(run, "raise RuntimeError('no such backend')")
    assert (ending.state, ending.cause) == ("failed", "launcher: RuntimeError: no such backend")
    assert "[launcher] RuntimeError: no such backend" in run.log.read_text()


def test_a_silent_end_is_a_failure_and_not_a_success(run: RunFolder) -> None:
    ending = go(run, "running(); sys.exit(0)")
    assert ending.state == "failed"
    assert "exit status 0" in ending.cause


def test_a_launcher_that_cannot_start_is_a_failed_run(run: RunFolder) -> None:
    ending = supervise(run, [str(run.path / "missing")], os.environ, lambda kind, text: None, RunSignals())
    assert ending.state == "failed"
    assert "could not be started" in ending.cause


def test_nothing_lives_after_a_killed_launcher(run: RunFolder) -> None:
    body = f"""
    running()
    spawn("stubborn", {IGNORES_TERM!r})
    spawn("plain", "import time; time.sleep(600)")
    time.sleep(0.6)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    ending = go(run, body)
    assert ending.state == "failed"
    assert ending.cause.startswith("the launcher was killed by SIGKILL")
    assert alive(run) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are adopted on Linux alone")
def test_a_process_that_left_its_parent_is_found(run: RunFolder) -> None:
    body = f"""
    running()
    inner = {IGNORES_TERM!r}
    outer = "import os, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', " + repr(inner) + "], "
    outer += "start_new_session=True); open(" + repr(str(run.path / "pid-orphan")) + ", 'w').write(str(child.pid))"
    subprocess.run([sys.executable, "-c", outer], start_new_session=True, check=True)
    end(state="done")
    """
    assert go(run, body).state == "done"
    assert (run.path / "pid-orphan").exists()
    assert alive(run) == []


def test_a_hanging_teardown_after_done_is_ended_and_still_done(run: RunFolder) -> None:
    ending = go(run, "note('self', os.getpid()); running(); end(state='done'); time.sleep(600)")
    assert (ending.state, alive(run)) == ("done", [])


def test_ranks_that_ignore_a_stop_are_ended_after_the_grace(run: RunFolder) -> None:
    body = f"""
    running()
    spawn("stubborn", {IGNORES_TERM!r})
    run.ask_stop()
    time.sleep(600)
    """
    began = time.monotonic()
    ending = go(run, body, grace=1.0)
    assert ending.state == "stopped"
    assert "did not end within 1 s" in ending.cause
    assert alive(run) == []
    assert time.monotonic() - began < 20


def test_a_moving_heartbeat_prolongs_the_grace(run: RunFolder) -> None:
    body = """
    running()
    run.ask_stop()
    beat = Heartbeat(run, 0)
    for step in range(12):
        beat.at("save", step)
        time.sleep(0.5)
    end(state="stopped", cause="stopped by request", step=3)
    """
    ending = go(run, body, grace=3.0)
    assert (ending.state, ending.cause, ending.step) == ("stopped", "stopped by request", 3)


def test_the_log_hides_secrets_and_cuts_endless_lines(run: RunFolder) -> None:
    body = """
    print("token is", os.environ["MY_API_KEY"])
    print("x" * 300_000)
    sys.stdout.buffer.write(bytes([0xff, 0xfe, 10]))
    end(state="done")
    """
    env = {**os.environ, "MY_API_KEY": "abcdefgh-secret"}
    supervise(run, launcher(run, body), env, lambda kind, text: None, RunSignals())
    lines = run.log.read_text(encoding="utf-8").splitlines()
    assert "[launcher] token is ***" in lines[0]
    assert max(map(len, lines)) < 70_000
    assert all(" [launcher] " in line for line in lines)
    assert sum(line.count("x") for line in lines) == 300_000


def test_a_launcher_that_shares_its_working_folder_shares_none_of_the_users_files(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accelerate puts it on the ranks' import path for DeepSpeed, where a `yaml.py` beside the data would be theirs."""
    (tmp_path / "yaml.py").touch()
    monkeypatch.chdir(tmp_path)
    body = """
    os.environ["PYTHONPATH"] = os.path.abspath(".")
    code = "import os, yaml; os.chdir(os.environ['TUNESMITH_WORKING_FOLDER']); print(yaml.__file__, os.getcwd())"
    subprocess.run([sys.executable, "-c", code])
    end(state="done")
    """
    go(run, body)
    log = run.log.read_text(encoding="utf-8")
    assert str(tmp_path / "yaml.py") not in log
    assert log.endswith(f"__init__.py {tmp_path}\n")


SUPERVISE = """
import json, os, sys
from app.launch.supervisor import RunSignals, supervise
from trainers.run.folder import RunFolder
argv = json.loads(sys.argv[2])
say = lambda kind, text: kind == "note" and print(text, flush=True)
with RunSignals() as signals:
    ending = supervise(RunFolder(sys.argv[1]), argv, os.environ, say, signals)
print(ending.state, ending.cause, flush=True)
"""
POLLS_STOP = """
note("self", os.getpid())
running()
while not run.stop_request.exists():
    time.sleep(0.05)
time.sleep(1.0)
end(state="stopped", cause="stopped by request")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_the_ranks_to_stop_and_more_of_them_do_no_harm(run: RunFolder, number: signal.Signals) -> None:
    argv = [sys.executable, "-c", SUPERVISE, str(run.path), json.dumps(launcher(run, POLLS_STOP))]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        deadline = time.monotonic() + 20
        while (run.read_state() or {}).get("state") != "running" and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.stdout.readline().startswith("stopping")
        assert run.stop_request.exists()
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    finally:
        process.kill()
    assert out.splitlines()[-1] == "stopped stopped by request"
    assert (process.returncode, alive(run)) == (0, [])
