"""Where each rank is, in a small file of its own, and the end of a run in which a rank stays where it is.

A thread writes the file: the loop only says where it is, many times a step. The rank that holds up the others is known
by its count of places, as every rank passes the same ones, or by its silence, when not even its thread runs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

import psutil

from trainers.run.folder import Process, RunFolder, now, read_json, write_json

INTERVAL = 1.0
"""Seconds between two looks of the thread."""
REPEAT = 2.0
"""Seconds after which even what has not changed is written again, as a sign of life."""
FIRST_WORD = 5.0
"""Seconds that the ranks which wait give the one that hangs: its stack tells more than theirs."""
LONG = 1800.0
"""Seconds allowed for what may take long: the start with its first step, which may compile, a save, the export."""
HUNG = 86
"""Exit status of a rank that ended because one of them hung."""
_LONG_SECTIONS = ("start", "save", "export")
_BETWEEN_STEPS = ("save", "evaluation", "export")


class Place(NamedTuple):
    """Where a rank is: section and step (from 0), how many places it passed before, since when, and the least allowed.

    Both times are seconds, the first of them on the monotonic clock.
    """

    section: str
    step: int
    passed: int
    since: float
    allowed: float = 0.0


class Heartbeat:
    """Writes `heartbeat/rank-N.json`: process, host, step, section, places passed, time.

    Args:
        folder: the run folder.
        rank: global rank.
        hang_timeout: seconds in one place after which this rank ends itself, and the run with it; 0: never.
    """

    def __init__(self, folder: RunFolder, rank: int, hang_timeout: float = 0):
        self.folder, self.rank, self.hang_timeout = folder, rank, hang_timeout
        self.path = folder.heartbeats / f"rank-{rank}.json"
        self.known = {**Process.of("rank", rank).as_json(), "host": socket.gethostname()}
        self.place = Place("start", 0, 0, time.monotonic())
        self.first_step: int | None = None
        self.written: Place | None = None
        self.written_at = 0.0
        self._write(self.place)  # at once: a rank without a file cannot be blamed
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self.thread.start()

    def at(self, section: str, step: int, allowed: float = 0.0) -> None:
        """Notes where this rank is; costs next to nothing.

        Args:
            section: what it does.
            step: number of the step, from 0.
            allowed: seconds that this may take at least, where it has no places within.
        """
        if self.first_step is None:
            self.first_step = step
        self.place = Place(section, step, self.place.passed + 1, time.monotonic(), allowed)

    def close(self) -> None:
        """Writes the last place, and watches no longer."""
        self.ended.set()
        self.thread.join()
        self._write(self.place)

    def _watch(self) -> None:
        while not self.ended.wait(INTERVAL):
            place, clock = self.place, time.monotonic()
            if place is not self.written or clock - self.written_at >= REPEAT:
                self._write(place)
            if self.hang_timeout and clock - place.since >= self._limit(place):
                self._end_if_one_hangs(clock - place.since, self._limit(place))

    def _write(self, place: Place) -> None:
        self.written, self.written_at = place, time.monotonic()
        beat = {**self.known, "step": place.step, "section": place.section, "passed": place.passed, "time": now()}
        with contextlib.suppress(OSError):  # a full disk must not end the run through its heartbeat
            self.folder.refuse_lost()
            write_json(self.path, beat)

    def _limit(self, place: Place) -> float:
        early = self.first_step is None or place.step <= self.first_step
        long = early or place.section in _LONG_SECTIONS
        return max(self.hang_timeout, place.allowed, LONG if long else 0.0)

    def _end_if_one_hangs(self, stuck: float, limit: float) -> None:
        """Ends this process, with its stack and the name of the rank that hangs in the log; the launcher ends the rest.

        A rank that only waits for another one lets it speak first.
        """
        self._write(self.place)  # others are silent when theirs is older
        hanging = hanging_ranks(self.folder)
        waits = self.rank not in [beat["rank"] for beat in hanging]
        if waits and stuck < limit + FIRST_WORD:
            return
        told = "; ".join(_told(beat) for beat in hanging) or "a rank hangs"
        main = sys._current_frames()[threading.main_thread().ident or 0]
        stack = "".join(traceback.format_stack(main))
        words = f"{told}; nothing has moved for {stuck:.0f} s (hang_timeout={self.hang_timeout:g})"
        print(f"Traceback (most recent call last):\n{stack}RankHung: {words}", file=sys.stderr, flush=True)
        os._exit(HUNG)


def hanging_ranks(folder: RunFolder) -> list[dict[str, Any]]:
    """The heartbeats of the ranks that the others wait for: those that are silent, else those that came least far."""
    beats: list[dict[str, Any]] = []
    for path in sorted(folder.heartbeats.glob("rank-*.json")):
        with contextlib.suppress(OSError):
            written = path.stat().st_mtime
            beat = read_json(path) or {}
            if isinstance(beat.get("passed"), int):
                beats.append({**beat, "written": written})
    if not beats:
        return []
    newest, least = max(beat["written"] for beat in beats), min(beat["passed"] for beat in beats)
    silent = [beat for beat in beats if newest - beat["written"] > 2 * REPEAT]
    return silent or [beat for beat in beats if beat["passed"] == least]


def _told(beat: dict[str, Any]) -> str:
    step = f"after step {beat['step']}" if beat["section"] in _BETWEEN_STEPS else f"of step {beat['step'] + 1}"
    return f"rank {beat['rank']} hangs in {beat['section']} {step}{_condition(beat)}"


def _condition(beat: dict[str, Any]) -> str:
    """What the system says of its process, where it is on this machine."""
    if beat["host"] != socket.gethostname():
        return f" on {beat['host']}"
    try:
        stopped = psutil.Process(int(beat["pid"])).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return ", its process is gone"
    return ", its process is stopped (SIGSTOP)" if stopped else ""
