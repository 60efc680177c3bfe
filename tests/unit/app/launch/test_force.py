"""A run that does not stop when it is asked to is ended by force, and nothing else is touched."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from app.runs.runs import end_by_force, stop_run
from tests.unit.app.launch.test_restarts import (
    LINGERS,
    Starter,
    _quick,
    killed,
    launchers,
    living,
    run,
    supervised,
    until,
)
from trainers.run.device_locks import holders
from trainers.run.folder import RunFolder

__all__ = ["_quick", "run", "supervised"]


@pytest.mark.parametrize("reported", [True, False], ids=["running", "starting"])
def test_a_run_that_does_not_stop_is_ended_by_force(reported: bool, supervised: Starter, run: RunFolder) -> None:
    lines = ["signal.signal(signal.SIGTERM, signal.SIG_IGN)", LINGERS, "state(state='running', step=3)" * reported]
    process = supervised("\n".join([*lines, "time.sleep(100)"]))
    until(lambda: len(launchers(run)) == 2 and (not reported or (run.read_state() or {}).get("state") == "running"))
    assert not stop_run(run, 0.3).in_time
    stopped = end_by_force(run)
    assert (stopped.in_time, stopped.state["state"]) == (True, "stopped")
    assert "force" in stopped.state["cause"]
    assert (living(run), holders()) == ([], {})
    assert process.wait(30) == 0


def test_a_supervisor_that_hangs_is_ended_by_force_too(supervised: Starter, run: RunFolder) -> None:
    process = supervised("state(state='running'); time.sleep(100)")
    until(lambda: (run.read_state() or {}).get("state") == "running")
    process.send_signal(signal.SIGSTOP)
    assert not stop_run(run, 0.3).in_time
    stopped = end_by_force(run, timeout=1.0)
    assert (stopped.in_time, stopped.state["state"]) == (True, "stopped")
    assert not psutil.pid_exists(process.pid)
    assert (living(run), holders()) == ([], {})


def test_force_does_not_touch_a_process_that_only_has_the_pid(run: RunFolder) -> None:
    bystander = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)"])
    try:
        past = {"role": "launcher", "rank": None, "pid": bystander.pid, "started": 1.0}
        run.write_state(state="running", processes=[past])
        end_by_force(run, timeout=0.5)
        assert bystander.poll() is None
    finally:
        killed(bystander)
