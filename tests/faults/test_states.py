"""Started twice, stopped while it starts, stopped twice: one run, and no state follows one that it must not follow."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.detached import (
    TUNESMITH,
    detached,
    ended,
    gone,
    inside,
    state_of,
    step_of,
    train_words,
    tunesmith,
    until,
)
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import INTERVAL, OPTIONS, clean, exact, told
from tests.forked import Popen
from trainers.run.folder import END_STATES, LIVE_STATES, RunFolder

_ORDER = {name: place for place, name in enumerate(LIVE_STATES)} | {name: len(LIVE_STATES) for name in END_STATES}


class Watch:
    """Every attempt and state of a run that a reader could see."""

    def __init__(self, run: RunFolder):
        self.run, self.seen, self.over = run, [], threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.over.wait(0.005):
            state = self.run.read_state()
            if state and (now := (state["attempt"], state["state"])) != (self.seen or [None])[-1]:
                self.seen.append(now)

    def close(self) -> list[tuple[int, str]]:
        self.over.set()
        self.thread.join()
        return self.seen


def illegal(seen: list[tuple[int, str]]) -> list[tuple]:
    """Changes that must not be: back to an earlier state but in a later attempt, or out of an end but to the queue."""
    found = []
    for (attempt, before), (later, after) in pairwise(seen):
        forward = later == attempt and _ORDER[after] > _ORDER[before] and before not in END_STATES
        again = before in END_STATES and after == "queued" and later == attempt
        restart = later == attempt + 1 and after == "starting" and before != "done"
        if not (forward or again or restart):
            found.append((attempt, before, later, after))
    return found


def test_an_illegal_change_is_seen() -> None:
    well = [
        (0, "queued"),
        (0, "starting"),
        (0, "stopping"),
        (0, "stopped"),
        (0, "queued"),
        (1, "starting"),
        (1, "done"),
    ]
    assert illegal(well) == []
    assert illegal([(0, "running"), (1, "starting"), (1, "running")]) == [], "a restart"
    for wrong in (
        [(0, "running"), (0, "starting")],
        [(0, "stopped"), (0, "running")],
        [(0, "done"), (1, "starting")],
        [(0, "stopped"), (0, "failed")],
        [(0, "starting"), (1, "running")],
    ):
        assert len(illegal(wrong)) == 1


@pytest.fixture
def watch(home: Path) -> Iterator[Watch]:
    made = Watch(RunFolder(home / "runs" / "mine"))
    yield made
    made.close()


def at_once(home: Path, *commands: list[str]) -> list[tuple[int, str]]:
    started = [
        Popen([*TUNESMITH, *words], cwd=home, env=inside(home), stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for words in commands
    ]  # fmt: skip
    return [(one.returncode, said) for one in started for said in [one.communicate(timeout=200)[0]]]


def test_started_twice_and_stopped_twice_while_it_starts(
    home: Path, watch: Watch, undisturbed: Undisturbed, noted: Note
) -> None:
    whole, fault, run = undisturbed("ddp"), noted("started twice, stopped twice while starting", "ddp"), watch.run
    words = train_words(run, 2, strategy="ddp", **OPTIONS)
    started = at_once(home, words, words)
    assert sorted(status for status, _ in started) == [0, 2], started
    (refusal,) = [said for status, said in started if status == 2]
    assert "holds a run" in refusal or "is already running" in refusal, refusal
    until(lambda: state_of(run) == "starting")
    fault.at()
    stopped = at_once(home, ["stop", "mine"], ["stop", "mine"])
    assert [status for status, _ in stopped] == [0, 0], stopped
    assert ended(run)["state"] == "stopped"
    assert told(run)
    clean(run)
    resumed = at_once(home, ["resume", "mine", "--detach"], ["resume", "mine", "--detach"])
    assert sorted(status for status, _ in resumed) == [0, 2], resumed
    exact(run, whole, replays=0)
    seen = watch.close()
    assert illegal(seen) == [], seen
    assert [state for _, state in seen if state in END_STATES] == ["stopped", "done"]
    fault.harmless()


@pytest.mark.long
def test_stopped_twice_while_it_trains(home: Path, watch: Watch, undisturbed: Undisturbed, noted: Note) -> None:
    whole, fault, run = undisturbed("ddp"), noted("stopped twice", "ddp"), watch.run
    detached(home, "mine", 2, strategy="ddp", **OPTIONS)
    until(lambda: state_of(run) == "running" and step_of(run) >= INTERVAL)
    fault.at()
    run.ask_stop()
    run.ask_stop()
    assert ended(run)["state"] == "stopped"
    gone(run)
    assert tunesmith("stop", "mine", home=home).returncode == 0, "it has ended already"
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0
    exact(run, whole, replays=0)
    seen = watch.close()
    assert illegal(seen) == [], seen
    fault.harmless(run)
