"""What the files of a run on several machines say: how many train, which are missing, whether machine 0 is there."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.runs.scheduled import submission
from trainers.run.folder import LIVE_STATES, RunFolder, read_json

MOST_MACHINES = 128
LOST_AFTER = 20.0
"""Seconds without a sign of life of its supervisor, given every two, after which a machine counts as lost."""
_VERSIONS = ("tunesmith", "torch", "transformers", "python")
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


def join_line(run: RunFolder, machine: int, minimum: int | None = None) -> str:
    """The command that joins a run on another machine, whenever machine 0 starts or resumes it."""
    argv = ["tunesmith", "resume", str(run.path.absolute()), "--machine_rank", str(machine)]
    return shlex.join([*argv, *(["--min_machines", str(minimum)] if minimum is not None else [])])


def join_lines(run: RunFolder, state: Mapping[str, Any]) -> list[str]:
    """`join_line` for each machine but 0; empty for a single machine."""
    counts = machine_counts(state)
    return [join_line(run, machine, counts[1]) for machine in range(1, counts[0])] if counts else []


def resume_line(run: RunFolder, state: Mapping[str, Any]) -> str:
    """The command that resumes a run; of several machines that were started by hand, also where to give it."""
    command = shlex.join(["tunesmith", "resume", str(run.path)])
    return f"{command} --machine_rank K, on each machine" if _by_hand(run, state) else command


def remedy_line(run: RunFolder, state: Mapping[str, Any], number: int) -> str:
    """The command that applies a remedy to a run, or to a copy of it if it is done.

    Of several machines, machine 0 applies it and writes the config that the others then read.
    """
    verb, target = (["runs", "clone"], "DIR") if state.get("state") == "done" else (["resume"], str(run.path))
    command = shlex.join(["tunesmith", *verb, str(run.path), "--apply", str(number)])
    if not _by_hand(run, state):
        return command
    own_folder = " --output_dir DIR" if target == "DIR" else ""
    others = f"then `{shlex.join(['tunesmith', 'resume', target])} --machine_rank K` on each other machine"
    return f"`{command}{own_folder} --machine_rank 0` on machine 0, {others}"


def _by_hand(run: RunFolder, state: Mapping[str, Any]) -> bool:
    """Whether a run is on several machines, each of which takes a command; a scheduler numbers them itself."""
    return machine_counts(state) is not None and submission(run) is None


def members(run: RunFolder, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Who has joined a live run on several machines, from what each of them writes into its folder.

    Args:
        run: the run.
        state: its true state.

    Returns:
        For each machine `machine`, `host`, `address` (with the interface), `devices`, `versions` (each empty while
        unknown), `status`, `problem` (what is wrong and what to do, or empty) and `line` (the command that joins it;
        empty for machine 0). A status is `there`, `awaited`, `refused`, `unreachable`, `joined`, `trains`, `left out`
        or `lost`. Empty for a single machine, and once the run has ended.
    """
    if (counts := machine_counts(state)) is None or state.get("state") not in LIVE_STATES:
        return []
    notice, lines = state["machines"], ["", *join_lines(run, state)]
    return [{"machine": machine, **_member(run, state, notice, machine), "line": lines[machine]}
            for machine in range(counts[0])]  # fmt: skip


def _member(run: RunFolder, state: Mapping[str, Any], notice: Mapping[str, Any], machine: int) -> dict[str, Any]:
    """The row of a machine. What is in files comes from others: it is cut to a length, and shown as text only."""
    file = read_json(run.machine_file(machine)) or {}
    reported = file.get("facts")
    facts = reported if isinstance(reported, dict) else {}
    address, interface = facts.get("address"), facts.get("interface")
    if machine == 0 and address is None:
        address = notice.get("address")
    devices, versions = file.get("devices"), facts.get("versions")
    known = versions if isinstance(versions, dict) else {}
    status, problem = _status(run, state, notice, machine, file)
    return {
        "host": _short(file.get("host")),
        "address": _short(f"{address} on {interface}" if address and interface else address),
        "devices": _short(", ".join(map(str, devices[:16])) if isinstance(devices, list) else ""),
        "versions": ", ".join(f"{name} {_short(known[name], 60)}" for name in _VERSIONS if known.get(name)),
        "status": status, "problem": _short(problem, 600),
    }  # fmt: skip


def _status(
    run: RunFolder, state: Mapping[str, Any], notice: Mapping[str, Any], machine: int, file: Mapping[str, Any]
) -> tuple[str, str]:
    """The status of a machine, and what is wrong."""
    launch, participants, absent = state.get("launched_at"), notice.get("participants"), notice.get("absent")
    is_there = machine == 0 or _is_fresh(run, machine)
    joined = launch is not None and file.get("launch") == launch
    if is_there and joined and file.get("refused"):
        return "refused", str(file["refused"])
    if is_there and joined and file.get("unreachable"):
        return "unreachable", str(file["unreachable"])
    if isinstance(participants, list) and state.get("state") != "queued":
        if machine not in participants:
            return "left out", str(absent.get(str(machine), "")) if isinstance(absent, dict) else ""
        return ("trains", "") if is_there else ("lost", f"no sign of life for {LOST_AFTER:g} s")
    if machine == 0:
        return "there", ""
    return ("joined" if joined else "there", "") if is_there else ("awaited", "")


def _is_fresh(run: RunFolder, machine: int) -> bool:
    """Whether a machine has given a sign of life lately: compares times of files, which have one clock."""
    try:
        reference = run.machine_file(0).stat().st_mtime
        return reference - run.machine_file(machine).stat().st_mtime < LOST_AFTER
    except OSError:
        return False


def _short(value: object, length: int = 200) -> str:
    return "" if value is None else str(value)[:length]


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
