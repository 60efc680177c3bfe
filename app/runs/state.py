"""The actions that a run's state allows, and its position in the queue."""

from __future__ import annotations

from app.runs.runs import last_checkpoint, true_state
from trainers.run import device_locks
from trainers.run.folder import END_STATES, RunFolder


def allowed(run: RunFolder) -> list[str]:
    """The actions that a run's state allows, most likely first."""
    state = true_state(run)["state"]
    if state == "queued":
        return ["cancel", "move_up", "move_down", "clone"]
    if state not in END_STATES:
        return ["stop", *([] if state == "stopping" else ["save"]), "stop_without_saving", "clone"]
    exports = ["export"] if last_checkpoint(run) else []
    return [*(["resume", "resume_changed"] if state != "done" else []), *exports, "clone", "rename", "delete"]


def queue_position(run: RunFolder) -> int | None:
    """Position in the queue, counted from 1; None when the run is not queued."""
    return device_locks.place_of(run.path)
