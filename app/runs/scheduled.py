"""What a cluster's scheduler says about a run that it starts: waiting with its reason, running, or gone."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from app.runs.ray_driver import ray_state
from app.schedulers.slurm import SCRIPT, JobStatus, SlurmError, cancel, forget_jobs, job_status, script_of
from trainers.config.mistakes import ConfigError
from trainers.run.folder import END_STATES, RunFolder, read_json, write_json

TITLES = {"slurm": "SLURM", "ray": "Ray"}
"""The schedulers by kind, as `--on` names them."""
_RECENT = 24 * 3600.0
"""Seconds after its end for which a job may turn out to wait again; SLURM is not asked about older runs."""
_REASONS = {
    "Resources": "waits for free nodes",
    "Priority": "waits behind jobs of higher priority",
    "Dependency": "waits for the job before it to end",
    "BeginTime": "is to start a little later",
    "JobHeldUser": "is held by its user; release it with `scontrol release`",
    "JobHeldAdmin": "is held by an administrator",
    "PartitionDown": "waits for its partition, which is down",
    "PartitionTimeLimit": "asks for more time than its partition allows; cancel it, and submit it with another --time",
    "PartitionNodeLimit": "asks for more nodes than its partition has; cancel it, and submit it with fewer --nodes",
    "ReqNodeNotAvail": "waits for nodes that are down or reserved",
}
"""What SLURM's reasons for waiting mean; any other is shown as SLURM writes it."""


def submission(run: RunFolder) -> dict[str, Any] | None:
    """What was submitted for a run: `kind`, `options` and `resume_from`; None if no scheduler starts it."""
    document = read_json(run.scheduler) or {}
    is_valid = str(document.get("kind")) in TITLES and isinstance(document.get("options"), dict)
    return document if is_valid else None


def job_of_state(state: Mapping[str, Any]) -> str | None:
    """Number of the SLURM job that a state names; None without one."""
    scheduler = state.get("scheduler")
    job = scheduler.get("job") if isinstance(scheduler, dict) and scheduler.get("kind") == "slurm" else None
    return job if isinstance(job, str) and job.isascii() and job.isdigit() else None


def scheduled_state(run: RunFolder, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """A run's state, corrected by what its scheduler knows; None if no scheduler starts the run, or it has ended.

    If SLURM cannot be asked, the state of a live run is that of the file, and its cause says so.
    """
    if is_on_ray(state):
        return ray_state(run, state)
    job = job_of_state(state)
    if job is None or state.get("state") == "done":
        return None
    if state.get("state") in END_STATES:
        return _queued_again(job, state)
    try:
        status = job_status(job)
    except SlurmError as error:
        return {**state, "cause": state.get("cause") or f"SLURM cannot be asked about job {job}: {error}"}
    if status is None:
        return {**state, "state": "failed", "cause": f"SLURM no longer knows job {job}, which reported no end"}
    if status.waits:
        return {**state, "state": "queued", "cause": _waiting(job, status, state)}
    if status.ended:
        return {**state, **_ended(job, status)}
    return {**state, "state": "starting"} if state["state"] == "queued" else dict(state)


def is_on_ray(state: Mapping[str, Any]) -> bool:
    """Whether a state is that of a run on Ray."""
    scheduler = state.get("scheduler")
    return isinstance(scheduler, dict) and scheduler.get("kind") == "ray"


def _queued_again(job: str, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of a run that ended a short time ago if its job waits or has started again.

    SLURM has then preempted it or lost a node, and what its supervisor wrote meanwhile is not how the run ends.
    """
    try:
        status = job_status(job, is_listed=True) if _is_recent(state) else None
    except SlurmError:
        return None
    if status is None:
        return None
    if status.waits:
        return {**state, "state": "queued", "cause": _waiting(job, status, state)}
    seen = state["scheduler"].get("restarts")
    is_new_start = isinstance(seen, int) and status.restarts > seen and status.state != "COMPLETING"
    return {**state, "state": "starting", "cause": None} if is_new_start else None


def _is_recent(state: Mapping[str, Any]) -> bool:
    """Whether a state was written less than `_RECENT` ago."""
    try:
        age = datetime.now(UTC) - datetime.fromisoformat(str(state.get("updated_at")))
    except (ValueError, TypeError):
        return False
    return age.total_seconds() < _RECENT


def may_come_back(state: Mapping[str, Any]) -> bool:
    """Whether a run that stopped or failed may yet be queued again: SLURM has not ended its job, or does not answer."""
    job = job_of_state(state)
    if job is None or state.get("state") == "done" or not _is_recent(state):
        return False
    try:
        status = job_status(job, is_listed=True)
    except SlurmError:
        return True
    return status is not None and not status.ended


def _waiting(job: str, status: JobStatus, state: Mapping[str, Any]) -> str:
    before = f"{state['cause']}; " if state.get("state") == "queued" and state.get("cause") else ""
    event = "preempted" if state["scheduler"].get("preempted") else "interrupted"
    again = f"was {event} and queued again, and " if state.get("state") != "queued" else ""
    meaning = _REASONS.get(status.reason, "waits")
    return f"{before}SLURM job {job} {again}{meaning}" + (f" ({status.reason})" if status.reason else "")


def _ended(job: str, status: JobStatus) -> dict[str, Any]:
    """The end of a run whose job has ended while its state was live: no supervisor was left to write it."""
    why = f"{status.state}, {status.reason}" if status.reason else status.state
    if status.state == "CANCELLED":
        return {"state": "stopped", "cause": f"SLURM job {job} was cancelled"}
    return {"state": "failed", "cause": f"SLURM job {job} ended ({why}) before the run reported its end"}


def cancel_waiting(run: RunFolder) -> bool:
    """Cancels the job of a run that waits in SLURM, and writes its end; False if it does not wait there.

    Raises:
        ConfigError: if SLURM does not cancel it.
    """
    state = run.read_state() or {}
    job = job_of_state(state)
    if job is None or state.get("state") == "done":
        return False
    forget_jobs()
    try:
        status = job_status(job)
        if status is None or not status.waits or not _is_of(run, job):
            return False
        cancel(job)
    except SlurmError as error:
        raise ConfigError(f"run {run.id} was not cancelled: {error}; try again, or use scancel {job}") from None
    finally:
        forget_jobs()
    with contextlib.suppress(ConfigError), run.hold():  # if a node has just started it, it stops by itself
        step = state.get("step") or 0
        cause = f"cancelled at step {step}, while it waited in SLURM" if step else "cancelled before it started"
        run.write_state(state="stopped", cause=cause, ending=None, scheduler=None)
    return True


def kill_job(run: RunFolder) -> bool:
    """Kills the job of a run that a scheduler has started; False if there is none.

    Raises:
        ConfigError: if SLURM does not do it.
    """
    state, submitted = run.read_state() or {}, submission(run)
    if is_on_ray(state) and submitted:
        write_json(run.scheduler, {**submitted, "killed": True})  # its driver and supervisors look at it
        return True
    job = job_of_state(state)
    try:
        if job is None or not _is_of(run, job):
            return False
        cancel(job, kill=True)
    except SlurmError as error:
        raise ConfigError(f"job {job} was not killed: {error}") from None
    forget_jobs()
    return True


def _is_of(run: RunFolder, job: str) -> bool:
    """Whether a job runs this folder's script: the state of a copied run names the job of the original."""
    return script_of(job) == str(run.path / SCRIPT)
