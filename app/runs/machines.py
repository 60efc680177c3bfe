"""What the files of a run on several machines say: how many train, which are missing, whether machine 0 is there."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainers.run.folder import LIVE_STATES, RunFolder

MOST_MACHINES = 128
SILENT_AFTER = 60.0
"""Seconds without a sign of life from machine 0 after which its run counts as ended, on the other machines."""


def machine_counts(state: Mapping[str, Any]) -> tuple[int, int | None] | None:
    """How many machines a run was started for, and the fewest that it goes on with; None for a single machine."""
    notice = state.get("machines")
    counts = [notice.get(name) if isinstance(notice, dict) else None for name in ("count", "minimum")]
    count, minimum = (number if isinstance(number, int) and 0 < number <= MOST_MACHINES else None for number in counts)
    return None if count is None or count == 1 else (count, minimum)


def machines_line(state: Mapping[str, Any]) -> str:
    """How many machines train, and why the others do not; empty for a single machine, or before that is decided."""
    counts, notice = machine_counts(state), state.get("machines")
    participants = notice.get("participants") if isinstance(notice, dict) else None
    if counts is None or not isinstance(notice, dict) or not isinstance(participants, list):
        return ""
    absent = notice.get("absent")
    pairs = list(absent.items())[:8] if isinstance(absent, dict) else []
    reasons = [f"; machine {str(number)[:4]}: {str(reason)[:200]}" for number, reason in pairs]
    return f"{min(len(participants), counts[0])} of {counts[0]} machines{''.join(reasons)}"


def lost_machine_0(run: RunFolder, state: Mapping[str, Any]) -> str:
    """That machine 0 of a live run has given no sign of life for `SILENT_AFTER` seconds; empty if it has.

    For the other machines, which cannot see its processes. Ages are those of files in the shared folder by the
    folder's own clock, as the clocks of machines differ.
    """
    if state.get("state") not in LIVE_STATES or machine_counts(state) is None:
        return ""
    try:
        written = run.machine_file(0).stat().st_mtime
        with contextlib.suppress(FileNotFoundError):
            written = max(written, (run.heartbeats / "rank-0.json").stat().st_mtime)
        if time.time() - written < SILENT_AFTER:  # no need to ask the folder for its time
            return ""
        silent = _now(run.heartbeats) - written
    except OSError:
        return ""
    if silent < SILENT_AFTER:
        return ""
    return f"machine 0 ({str(state.get('host'))[:64]}) was lost: no sign of life for {silent:.0f} s"


def _now(folder: Path) -> float:
    """The present time by the clock of the folder's file system."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
        os.utime(file.fileno())
        return os.fstat(file.fileno()).st_mtime
