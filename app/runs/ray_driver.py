"""What the driver of a run on Ray writes into the run folder, and what it means for the run's state.

The driver (`app/launch/ray_driver.py`) reserves nodes and starts a supervisor on each. It writes its file every few
seconds, so that nobody has to ask Ray, and the supervisors learn which start of the job is the current one.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from trainers.run.folder import END_STATES, Process, RunFolder, now, read_json, write_json

BEAT = 3.0
"""Seconds between two writes of a driver."""
SILENCE = 180.0
"""Seconds after which a driver that has written nothing is taken for dead, and the supervisors have saved and ended."""


def write_driver(run: RunFolder, **facts: Any) -> None:
    """Replaces the driver's file: `job`, `restarts`, `phase` (`connecting`, `waiting`, `training`, `ended`)."""
    process = Process.of("driver").as_json()
    write_json(
        run.ray, {"run": str(run.path), "host": socket.gethostname(), "process": process, "time": now(), **facts}
    )


def read_driver(run: RunFolder) -> dict[str, Any]:
    """What a driver of this folder has written; empty without one: a copied folder has the file of another run."""
    document = read_json(run.ray) or {}
    return document if document.get("run") == str(run.path) else {}


def ray_state(run: RunFolder, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """A run's state, corrected by what its driver knows; None if that adds nothing.

    A driver that is still at it may move a run that its supervisor has ended to other nodes.
    """
    driver, name = read_driver(run), state.get("state")
    is_alive = _alive(driver)
    if is_alive and driver.get("phase") != "ended":
        if name in END_STATES:
            return {**state, "state": "running" if name == "done" else "stopping"}
        return dict(state)
    if name in END_STATES or not driver or _age(driver) < SILENCE:
        return {**state, "state": "failed", "cause": _death(driver)} if name == "queued" and is_alive is False else None
    if is_alive is False:
        return {**state, "state": "failed", "cause": _death(driver)}
    silent = f"its Ray driver on {driver.get('host')} has written nothing for {_age(driver) / 60:.0f} minutes"
    return {**state, "cause": state.get("cause") or silent}


def _death(driver: Mapping[str, Any]) -> str:
    return f"its Ray driver on {driver.get('host')} has died; resume goes on from the last checkpoint"


def _alive(driver: Mapping[str, Any]) -> bool | None:
    """Whether a driver is alive; None if it is on another machine, or its file is damaged."""
    if driver.get("host") != socket.gethostname():
        return None
    try:
        return Process(**driver["process"]).alive()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _age(driver: Mapping[str, Any]) -> float:
    """Seconds since a driver has written its file; 0 if that is unknown."""
    try:
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(str(driver.get("time")))).total_seconds())
    except (ValueError, TypeError):
        return 0.0
