from __future__ import annotations

import pytest

from trainers.monitor.startup_timer import StartupTimer, read_start


def test_the_phases_add_up_and_are_read_back(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    clock = iter([10.0, 12.5, 13.0, 14.25, 16.0])
    monkeypatch.setattr("trainers.monitor.startup_timer.time.perf_counter", lambda: next(clock))
    start = StartupTimer()
    for phase in ("imports", "data", "imports"):
        start.ended(phase)
    start.first_step_ended(report=True)
    start.first_step_ended(report=True)
    line = capsys.readouterr().out
    assert line == "first step after 6.00 s: imports 3.75 s, data 0.50 s, first step 1.75 s\n"
    assert read_start(line) == {"imports": 3.75, "data": 0.5, "first step": 1.75}
    assert read_start("step 1 loss 2.5") is None


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture) -> None:
    StartupTimer().first_step_ended(report=False)
    assert capsys.readouterr().out == ""
