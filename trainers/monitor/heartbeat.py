"""Writes each rank's position in the run to a small file, and ends a run in which a rank hangs.

A thread writes the file; the loop only updates the position, many times a step. All ranks pass the same positions, so
the rank that blocks the others has passed the fewest, or is silent if not even its thread runs.
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
"""Seconds between two checks by the thread."""
REPEAT = 2.0
"""Seconds after which an unchanged position is written again, as a sign of life."""
GRACE = 5.0
"""Seconds that waiting ranks leave the hanging rank to report first: its stack is more informative than theirs."""
LONG_LIMIT = 1800.0
"""Seconds allowed for slow sections: startup with the first step (which may compile), a save, the export."""
EXIT_HUNG = 86
"""Exit status of a rank that ended because some rank hung."""
_LONG_SECTIONS = ("start", "save", "export")
_BETWEEN_STEPS = ("reference", "save", "evaluation", "export")


class Position(NamedTuple):
    """Where a rank is.

    Args:
        section: what it does, such as `forward`.
        step: number of the step, from 0.
        passed: number of positions passed before.
        since: monotonic time in seconds at which it got here.
        allowed: minimum seconds that it may stay here.
        rows: how many rows of all ranks are done, and how many there are, where rows are counted.
    """

    section: str
    step: int
    passed: int
    since: float
    allowed: float = 0.0
    rows: tuple[int, int] | None = None


class Heartbeat:
    """Writes `heartbeat/rank-N.json`: process, host, step, section, positions passed, rows (where counted), time.

    Args:
        folder: the run folder.
        rank: global rank.
        hang_timeout: seconds at one position after which this rank ends itself, and so the run; 0: never.
    """

    def __init__(self, folder: RunFolder, rank: int, hang_timeout: float = 0):
        self.folder = folder
        self.rank = rank
        self.hang_timeout = hang_timeout
        self.path = folder.heartbeats / f"rank-{rank}.json"
        self.known = {**Process.of("rank", rank).as_json(), "host": socket.gethostname()}
        self.position = Position("start", 0, 0, time.monotonic())
        self.first_step: int | None = None
        self.written: Position | None = None
        self.written_at = 0.0
        self._write(self.position)  # immediately: a rank without a file cannot be identified as hanging
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self.thread.start()

    def at(self, section: str, step: int, allowed: float = 0.0, rows: tuple[int, int] | None = None) -> None:
        """Sets the position of this rank; almost free.

        Args:
            section: what it does.
            step: number of the step, from 0.
            allowed: minimum seconds that this may take, if it has no positions inside.
            rows: rows of all ranks that are done, and all rows, where rows are counted.
        """
        if self.first_step is None:
            self.first_step = step
        self.position = Position(section, step, self.position.passed + 1, time.monotonic(), allowed, rows)

    def close(self) -> None:
        """Writes the last position and stops the thread."""
        self.ended.set()
        self.thread.join()
        self._write(self.position)

    def _watch(self) -> None:
        while not self.ended.wait(INTERVAL):
            position, clock = self.position, time.monotonic()
            if position is not self.written or clock - self.written_at >= REPEAT:
                self._write(position)
            if self.hang_timeout and clock - position.since >= self._limit(position):
                self._end_if_one_hangs(clock - position.since, self._limit(position))

    def _write(self, position: Position) -> None:
        self.written = position
        self.written_at = time.monotonic()
        beat = {
            **self.known,
            "step": position.step,
            "section": position.section,
            "passed": position.passed,
            "time": now(),
            **({"rows": position.rows} if position.rows else {}),
        }
        with contextlib.suppress(OSError):  # a full disk must not end the run through its heartbeat
            self.folder.refuse_lost()
            write_json(self.path, beat)

    def _limit(self, position: Position) -> float:
        early = self.first_step is None or position.step <= self.first_step
        long = early or position.section in _LONG_SECTIONS
        return max(self.hang_timeout, position.allowed, LONG_LIMIT if long else 0.0)

    def _end_if_one_hangs(self, stuck: float, limit: float) -> None:
        """Ends this process and logs its stack and the hanging rank; the launcher then ends the other ranks.

        A rank that only waits for another lets that one report first.
        """
        self._write(self.position)  # ranks with older files count as silent
        hanging = hanging_ranks(self.folder)
        waits = self.rank not in [beat["rank"] for beat in hanging]
        if waits and stuck < limit + GRACE:
            return
        hangs = "; ".join(_describe(beat) for beat in hanging) or "a rank hangs"
        main = sys._current_frames()[threading.main_thread().ident or 0]
        stack = "".join(traceback.format_stack(main))
        message = f"{hangs}; no progress for {stuck:.0f} s (hang_timeout={self.hang_timeout:g})"
        print(f"Traceback (most recent call last):\n{stack}RankHung: {message}", file=sys.stderr, flush=True)
        os._exit(EXIT_HUNG)


def hanging_ranks(folder: RunFolder) -> list[dict[str, Any]]:
    """Heartbeats of the ranks that the others wait for: the silent ones, or else those that passed fewest positions."""
    beats: list[dict[str, Any]] = []
    for path in sorted(folder.heartbeats.glob("rank-*.json")):
        with contextlib.suppress(OSError):
            written = path.stat().st_mtime
            beat = read_json(path) or {}
            if isinstance(beat.get("passed"), int):
                beats.append({**beat, "written": written})
    if not beats:
        return []
    # Judge silence against the newest file: this machine's clock may differ from that of the file system.
    newest, least = max(beat["written"] for beat in beats), min(beat["passed"] for beat in beats)
    silent = [beat for beat in beats if newest - beat["written"] > 2 * REPEAT]
    return silent or [beat for beat in beats if beat["passed"] == least]


def _describe(beat: dict[str, Any]) -> str:
    step = f"after step {beat['step']}" if beat["section"] in _BETWEEN_STEPS else f"of step {beat['step'] + 1}"
    return f"rank {beat['rank']} hangs in {beat['section']} {step}{_condition(beat)}"


def _condition(beat: dict[str, Any]) -> str:
    """The state of the rank's process, if it is on this machine."""
    if beat["host"] != socket.gethostname():
        return f" on {beat['host']}"
    try:
        stopped = psutil.Process(int(beat["pid"])).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return ", its process is gone"
    return ", its process is stopped (SIGSTOP)" if stopped else ""
