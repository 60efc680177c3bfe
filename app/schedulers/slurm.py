"""SLURM's programs: the batch script of a run, and how jobs are submitted, listed and cancelled."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from app.accelerate_launch import ROOT
from app.console import clean, shortened
from app.schedulers.slurm_options import SlurmOptions
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

SCRIPT, OUTPUT = "slurm.sh", "slurm.out"
"""Files of a run folder: the batch script, and what it and SLURM print."""
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
})  # fmt: skip
_FIELDS = "JobID:|,State:|,RestartCnt:|,Reason:|"
"""Not by `--json`, whose keys change between versions, and which needs a plugin that a site may lack."""
_SECONDS = 10.0
"""Time for one of SLURM's programs to answer; the controller is on another machine."""
_FRESH, _FRESH_ERROR = 2.0, 30.0
"""Seconds for which a list of jobs is used again, as a page asks for many runs at once; and that SLURM did not answer,
as each attempt may take `_SECONDS`.
"""
_LINGER = 120
"""Seconds that the supervisors have to end after the first of them; they end together, unless one was killed."""


class SlurmError(RuntimeError):
    """One of SLURM's programs failed; the message is one line that says how."""


@dataclass(frozen=True)
class JobStatus:
    """A job as SLURM sees it.

    Args:
        state: SLURM's word, such as `PENDING`.
        reason: why it waits or ended, such as `Resources`; empty if SLURM gives none.
        restarts: how often SLURM has started it again.
    """

    state: str
    reason: str = ""
    restarts: int = 0

    @property
    def waits(self) -> bool:
        """Whether it waits to be started, for the first time or again."""
        return self.state in WAITING

    @property
    def ended(self) -> bool:
        """Whether it has ended for good."""
        return self.state in ENDED


def call(argv: Sequence[str]) -> str:
    """Runs one of SLURM's programs; returns its standard output.

    Raises:
        SlurmError: if it is not installed, fails, or does not answer.
    """
    if shutil.which(argv[0]) is None:
        raise SlurmError(f"{argv[0]} is not installed here")
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{argv[0]} did not answer within {_SECONDS:g} s") from None
    except OSError as error:
        raise SlurmError(f"{argv[0]} could not be started: {error.strerror}") from None
    if done.returncode:
        lines = [clean(line).strip() for line in done.stderr.splitlines() if line.strip()]
        raise SlurmError(shortened(lines[-1] if lines else f"{argv[0]} failed with exit status {done.returncode}"))
    return done.stdout


def submit(run: RunFolder, after: str | None = None) -> str:
    """Submits the script of a run; returns the number of the job.

    Args:
        run: the run; its folder has the script.
        after: a job that must have ended first.

    Raises:
        SlurmError: with SLURM's reason.
    """
    wait = [f"--dependency=afterany:{after}"] if after else []
    return call(["sbatch", "--parsable", *wait, str(run.path / SCRIPT)]).strip().partition(";")[0]


def requeue(job: str) -> None:
    """Puts a running job back into the queue, which kills its processes.

    Raises:
        SlurmError: if the site does not allow it.
    """
    call(["scontrol", "requeue", job])


def cancel(job: str, kill: bool = False) -> None:
    """Cancels a job: its nodes save and stop, within the time that the site allows.

    Args:
        job: number of the job.
        kill: kill its processes at once.

    Raises:
        SlurmError: if it cannot be cancelled.
    """
    call(["scancel", *(["--signal=KILL", "--full"] if kill else []), job])


def script_of(job: str) -> str:
    """Path of the script of a job that waits or runs, or has ended a short time ago.

    Raises:
        SlurmError: if SLURM does not know the job.
    """
    lines = call(["scontrol", "show", "job", job]).splitlines()
    return next((line.strip().removeprefix("Command=") for line in lines if line.strip().startswith("Command=")), "")


def hostnames(node_list: str) -> list[str]:
    """The nodes in SLURM's short form, such as `node[1-2]`.

    Raises:
        SlurmError: if SLURM cannot read it.
    """
    return call(["scontrol", "show", "hostnames", node_list]).split()


class _Jobs:
    """What SLURM has said about jobs, kept for `_FRESH` seconds."""

    def __init__(self) -> None:
        self.lock, self.listed_at = threading.Lock(), float("-inf")
        self.listed: dict[str, JobStatus] = {}
        self.single: dict[str, tuple[float, JobStatus | None]] = {}
        self.error: SlurmError | None = None

    def status(self, job: str, is_listed: bool) -> JobStatus | None:
        """The status of a job; None if SLURM does not know it any more.

        Args:
            job: number of the job.
            is_listed: whether to ask for jobs that wait or run alone.

        Raises:
            SlurmError: if SLURM cannot be asked.
        """
        with self.lock:
            if time.monotonic() - self.listed_at > (_FRESH_ERROR if self.error else _FRESH):
                self._list()
            if self.error:
                raise self.error
            if job in self.listed or is_listed:
                return self.listed.get(job)
            looked_at, status = self.single.get(job, (float("-inf"), None))
            if (status is None or not status.ended) and time.monotonic() - looked_at > _FRESH:
                status = _of_one(job)
                self.single[job] = time.monotonic(), status
            return status

    def forget(self) -> None:
        """Asks again at the next call: a job was submitted, queued again or cancelled."""
        with self.lock:
            self.listed_at = float("-inf")
            self.single.clear()

    def _list(self) -> None:
        try:
            lines = call(["squeue", "--noheader", "--me", f"--Format={_FIELDS}"]).splitlines()
            self.error, self.listed = None, {}
            for job, state, restarts, reason in (line.strip().split("|", 3) for line in lines if line.count("|") > 3):
                reason = reason.removesuffix("|")
                count = int(restarts) if restarts.isdecimal() else 0
                self.listed[job] = JobStatus(state, "" if reason == "None" else reason, count)
        except SlurmError as error:
            self.error = error
        self.listed_at = time.monotonic()


_JOBS = _Jobs()


def job_status(job: str, is_listed: bool = False) -> JobStatus | None:
    """The status of a job of this user; None if SLURM does not know it any more.

    Args:
        job: number of the job.
        is_listed: whether only a job that waits or runs matters, so that SLURM is not asked about this one alone.

    Raises:
        SlurmError: if SLURM cannot be asked.
    """
    return _JOBS.status(job, is_listed)


def forget_jobs() -> None:
    """Makes `job_status` ask SLURM again."""
    _JOBS.forget()


def _of_one(job: str) -> JobStatus | None:
    """The status of a job that `squeue` does not list: of `scontrol` for some minutes, then of the accounting."""
    try:
        parts = call(["scontrol", "--oneliner", "show", "job", job]).split()
        facts = dict(word.split("=", 1) for word in parts if "=" in word)
        reason = facts.get("Reason", "")
        return JobStatus(facts.get("JobState", ""), "" if reason == "None" else reason)
    except SlurmError:
        pass
    try:
        lines = call(
            ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=JobID,State"]
        ).splitlines()
    except SlurmError:
        return None  # without accounting, an old job is forgotten
    states = [state for number, _, state in (line.partition("|") for line in lines) if number == job and state]
    return JobStatus(states[-1].split()[0]) if states else None  # such as `CANCELLED by 1000`


# -- the script ------------------------------------------------------------------------------------------------------


def script(run: RunFolder, options: SlurmOptions) -> str:
    """The batch script of a run.

    Args:
        run: the run.
        options: the options of the job.

    Raises:
        ConfigError: if the path of the run cannot be written in a script.
    """
    path = str(run.path)
    if not path.isprintable() or {'"', "\\"} & set(path):
        problem = "has a control character, a double quote or a backslash, which SLURM cannot read"
        raise ConfigError.about("output_dir", repr(path), problem, "use another folder")
    directives = {
        "job-name": run.id, "nodes": options.nodes, "ntasks-per-node": 1,
        "gpus-per-node": options.gpus_per_node or None, "cpus-per-task": options.cpus_per_node,
        "partition": options.partition, "account": options.account, "qos": options.qos, "time": options.time,
        "constraint": options.constraint, "container": options.container,
        "signal": f"B:USR2@{options.signal_before}", "output": f"{path}/{OUTPUT}".replace("%", "%%"),
    }  # fmt: skip
    lines = [f"--{name}={_quoted(str(value))}" for name, value in directives.items() if value is not None]
    lines += ["--open-mode=append", "--requeue", *shlex.split(options.slurm_extra)]
    cpus = f" --cpus-per-task={options.cpus_per_node}" if options.cpus_per_node else ""
    node = '"$python" -P -m app.launch.slurm_node'
    return "\n".join([
        "#!/bin/bash",
        f"# Trains the run {run.id}. Submitted again with `sbatch`, it goes on from the newest checkpoint.",
        *(f"#SBATCH {line}" for line in lines),
        "",
        f"run={shlex.quote(path)}",
        f"python={shlex.quote(sys.executable)}",
        f'export PYTHONSAFEPATH=1 PYTHONPATH={shlex.quote(str(ROOT))}"${{PYTHONPATH:+:$PYTHONPATH}}"',
        "",
        "# Shortly before the time limit: the run saves and stops, and the last line queues the job again.",
        f'trap \'{node} limit "$run"\' USR2',
        "# When the job is cancelled or preempted: every node saves and stops, and this script waits for them.",
        "trap : TERM",
        "",
        "# One supervisor on each node; a rank that dies on one of them restarts all from the newest checkpoint.",
        f"# {_LINGER} seconds after the first of them has ended, srun ends the others.",
        f'srun --kill-on-bad-exit=0 --wait={_LINGER}{cpus} {node} node "$run" &',
        'while kill -0 "$!" 2>/dev/null; do wait "$!"; done',
        f'exec {node} after "$run"',
        "",
    ])  # fmt: skip


def _quoted(value: str) -> str:
    """A value of a directive; SLURM removes the quotes."""
    return f'"{value}"' if " " in value else value
