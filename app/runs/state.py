"""The actions that a run's state allows, and its position in the queue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.runs.runs import last_checkpoint, run_of_id, true_state
from trainers.config.mistakes import ConfigError
from trainers.run import device_locks
from trainers.run.folder import END_STATES, RunFolder


def allowed(run: RunFolder) -> list[str]:
    """The actions that a run's state allows, most likely first."""
    current = true_state(run)
    state = current["state"]
    if state == "queued":  # the scheduler of a cluster has an order of its own
        return ["cancel", *([] if "scheduler" in current else _moves(run)), "clone"]
    if state not in END_STATES:
        return ["stop", *([] if state == "stopping" else ["save"]), "stop_without_saving", "clone"]
    further = ["resume", "resume_changed"]
    if state == "done":
        further = ["train_further"] if current.get("export_dir") else []
    exports = ["export"] if last_checkpoint(run) else []
    return [*further, *exports, "clone", "rename", "delete"]


def _moves(run: RunFolder) -> list[str]:
    """The directions in which a run can move in the queue of this machine."""
    position, length = queue_position(run), len(device_locks.queue())
    if position is None:
        return []
    return [*(["move_up"] if position > 1 else []), *(["move_down"] if position < length else [])]


def queue_position(run: RunFolder) -> int | None:
    """Position in the queue, counted from 1; None when the run is not queued."""
    return device_locks.place_of(run.path)


def queue(runs_dir: Path) -> list[dict[str, Any]]:
    """The queue of this machine, first in line first: a row `{id, place, run_dir, devices, held_by, listed}` per run.

    Args:
        runs_dir: folder of run folders; `listed` says whether `run_of_id` finds the run there.
    """
    tickets = device_locks.queue()
    holders = device_locks.holders() if tickets else {}
    rows = []
    for position, ticket in enumerate(tickets, start=1):
        need = ticket.need
        slots = need.gpus or [slot for slot in holders if slot.startswith(device_locks.CPU)]
        count, unit = (len(need.gpus), "GPU") if need.gpus else (need.cpu_slots, "CPU core")
        rows.append({
            "id": ticket.name, "place": position, "run_dir": ticket.run_dir,
            "devices": f"{count} {unit}{'s' * (count > 1)}",
            "held_by": sorted({str(holders[slot].get("run")) for slot in slots if slot in holders}),
            "listed": _is_listed(ticket, runs_dir),
        })  # fmt: skip
    return rows


def _is_listed(ticket: device_locks.Ticket, runs_dir: Path) -> bool:
    try:
        return run_of_id(ticket.name, runs_dir).path.resolve() == Path(ticket.run_dir).resolve()
    except (ConfigError, OSError):
        return False
