"""What the batch script of a run starts: `python -m app.launch.slurm_node node|limit|after RUN`.

`node` supervises the ranks of one node, as `tunesmith train --machine_rank K` does by hand. `limit` runs shortly before
the job's time limit: the run saves and stops. `after` runs at the end of the script, and queues the job again if the
time limit was what stopped the run.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from app.accelerate_launch import command_line, launch_environment
from app.console import say
from app.hardware import Devices, choose_devices, find_gpus
from app.launch.foreground import EXIT_CODES
from app.launch.job import TrainJob
from app.launch.nodes import FIRST_JOIN_TIMEOUT
from app.launch.restarts import run_to_end
from app.launch.worker_node import join_to_end, refuse_to_join
from app.runs.runs import saved_step, world_size
from app.runs.scheduled import submission
from app.schedulers.slurm import OUTPUT, SlurmError, hostnames, requeue, submit
from trainers.config.mistakes import ConfigError
from trainers.config.options import absolute_paths
from trainers.config.parse import Request
from trainers.run.folder import END_STATES, RunFolder, log_line, write_atomic, write_json
from trainers.run.log import start_tee
from trainers.strategy.strategy import Machines, load_strategy, over_machines

_FIRST_PORT, _PORTS = 15000, 15000
"""Ports for the rendezvous, by number of the job; below those that a kernel gives to outgoing connections."""
_MOST_OUTPUT = 1 << 20
"""Bytes at the end of a job's output in which preemption is looked for."""


@dataclass(frozen=True)
class Placement:
    """Where in a job this process is.

    Args:
        job: number of the job.
        restarts: how often SLURM has started the job before.
        nodes: host names of its nodes.
        rank: index of this node.
    """

    job: str
    restarts: int
    nodes: list[str]
    rank: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Placement:
        """From the variables that SLURM sets.

        Raises:
            ConfigError: outside a job.
        """
        try:
            return cls(
                environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT", "0")),
                hostnames(environment["SLURM_JOB_NODELIST"]), int(environment.get("SLURM_NODEID", "0")),
            )  # fmt: skip
        except (KeyError, ValueError, SlurmError) as error:
            raise ConfigError(f"this is no job of SLURM ({error}); submit the run's slurm.sh with sbatch") from None

    @property
    def start(self) -> str:
        """Names this start of the job, which may be started again under the same number."""
        return start_of(self.job, self.restarts)

    @property
    def machines(self) -> Machines | None:
        """The machines of the run; None for a single one."""
        if len(self.nodes) == 1:
            return None
        return Machines(len(self.nodes), self.rank, self.nodes[0], _FIRST_PORT + int(self.job) % _PORTS)


def node(run: RunFolder) -> int:
    """Trains this node's part of a run; returns the exit status."""
    placement = Placement.of(os.environ)
    if placement.rank == 0:
        return _head(run, placement)
    start_tee(run.log, "supervisor", echo=True)
    state = _wait_for_head(run, placement)
    if state is None:
        say(f"node {placement.rank}: the first node has not started job {placement.job} for {FIRST_JOIN_TIMEOUT:g} s")
        return 1
    if state["state"] in END_STATES:
        return EXIT_CODES.get(str(state["state"]), 0)
    try:
        job = _job(run, placement)
    except ConfigError as error:
        refuse_to_join(run, placement.rank, "; ".join(error.lines))
        raise
    state = join_to_end(job, launch_environment(job.devices), _unheard, reserved=True)
    return EXIT_CODES.get(str(state["state"]), 0)


def _head(run: RunFolder, placement: Placement) -> int:
    """The first node: takes over the run, and writes its state."""
    with _hold(run):
        if (run.read_state() or {}).get("state") == "done":
            return 0
        if (submission(run) or {}).get("limit_of") != placement.start:  # the limit may be so near that it came first
            run.stop_request.unlink(missing_ok=True)  # answered: SLURM has started the run again
        run.save_request.unlink(missing_ok=True)
        start_tee(run.log, "supervisor", echo=True)
        printed_before = _output_size(run)
        try:
            job = _job(run, placement)
        except ConfigError as error:
            run.write_state(state="failed", cause="; ".join(error.lines), ending=None, scheduler=_written(placement))
            return 2
        write_atomic(run.accelerate, job.strategy.dump())
        write_atomic(run.command, command_line(run, job.devices) + "\n")
        # Live, so that the other nodes wait for a launch; none joins the last one of an earlier start.
        over = {"over": True} if placement.machines else None
        run.write_state(state="starting", cause=None, ending=None, machines=over, scheduler=_written(placement))
        state = run_to_end(
            run, job.devices, launch_environment(job.devices), _unheard, job.resume_from, job.config.max_restarts,
            share_gpus=True,
        )  # fmt: skip
        state = _after_preemption(run, placement, _after_limit(run, placement, state), printed_before)
        return EXIT_CODES.get(str(state["state"]), 0)


def _hold(run: RunFolder) -> TextIO:
    """Holds the run, once the command that submitted it, or the last start of the job, has let go of it.

    Raises:
        ConfigError: if it does not within `FIRST_JOIN_TIMEOUT` seconds.
    """
    deadline = time.monotonic() + FIRST_JOIN_TIMEOUT
    while True:
        try:
            return run.hold()
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _written(placement: Placement) -> dict[str, Any]:
    """What the state says about the job once it has started."""
    return {"kind": "slurm", "job": placement.job, "restarts": placement.restarts}


def _wait_for_head(run: RunFolder, placement: Placement) -> dict[str, Any] | None:
    """Waits until the first node has taken over the run in this start of the job, or the run is done.

    Returns:
        The state then, which is that of an ended run if the first node refused it; None if it took too long.
    """
    deadline = time.monotonic() + FIRST_JOIN_TIMEOUT
    while time.monotonic() < deadline:
        state = run.read_state() or {}
        if state.get("state") == "done" or _is_from(state, placement):
            return state
        time.sleep(0.2)
    return None


def _is_from(state: Mapping[str, Any], placement: Placement) -> bool:
    """Whether the first node wrote a state in this start of the job."""
    scheduler = state.get("scheduler")
    return isinstance(scheduler, dict) and {**scheduler, **_written(placement)} == scheduler


def _job(run: RunFolder, placement: Placement) -> TrainJob:
    """The run as a job on this node.

    Raises:
        ConfigError: if the node lacks the GPUs that the run was submitted for.
    """
    submitted, total = submission(run) or {"options": {}}, world_size(run) or 1
    expected = int(submitted["options"].get("gpus_per_node") or 0)
    visible, nodes = [gpu.index for gpu in find_gpus()], len(placement.nodes)
    if len(visible) != expected:
        problem = f"node {placement.nodes[placement.rank]} shows {len(visible)} GPUs to the job, which needs {expected}"
        raise ConfigError(f"{problem}; submit it with other --gpus_per_node, or ask the site about its GRES")
    if total % nodes or (visible and total != nodes * len(visible)):
        raise ConfigError(f"the job has {nodes} nodes, and its {total} processes do not divide by them")
    chosen = choose_devices(",".join(map(str, visible)), None) if visible else Devices([], total)
    devices = replace(chosen, num_processes=total, machines=placement.machines)
    config = absolute_paths(Request(config=str(run.config)).resolve())
    config = config.model_copy(update={"output_dir": str(run.path)})
    strategy = over_machines(load_strategy(str(run.accelerate)), placement.machines)
    resume_from = "auto" if saved_step(run) else submitted.get("resume_from")
    return TrainJob(config, strategy, devices, run, resume_from)


def limit(run: RunFolder) -> int:
    """Asks the run to save and stop, and remembers that the job's time limit is why."""
    write_json(run.scheduler, {**(submission(run) or {}), "limit_of": _this_start()})
    run.ask_stop()
    return 0


def after(run: RunFolder) -> int:
    """Queues the job again if its time limit has stopped the run; returns the exit status of the script."""
    state, submitted, job = run.read_state() or {}, submission(run) or {}, str(os.environ.get("SLURM_JOB_ID"))
    if state.get("state") != "queued" or submitted.get("limit_of") != _this_start():
        return EXIT_CODES.get(str(state.get("state")), 1)
    with _hold(run):
        write_json(run.scheduler, {**submitted, "queued_again_at": saved_step(run), "limit_of": None})
        try:
            requeue(job)
        except SlurmError as refused:
            try:
                number = submit(run, after=job)
            except SlurmError as error:
                cause = f"{state['cause']}: SLURM queued it neither again ({refused}) nor anew ({error})"
                run.write_state(state="stopped", cause=cause)
                return 1
            run.write_state(scheduler={"kind": "slurm", "job": number})
    return 0


def start_of(job: str, restarts: int) -> str:
    """Names one start of a job."""
    return f"{job}, restart {restarts}"


def _this_start() -> str:
    """Names the start of the job that the batch script belongs to."""
    return start_of(os.environ["SLURM_JOB_ID"], int(os.environ.get("SLURM_RESTART_COUNT", "0")))


def _after_limit(run: RunFolder, placement: Placement, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a run that has ended: `queued` if it was the time limit of its job that stopped it.

    A run that has made no step since the last time would go on for ever, so it fails.
    """
    submitted, reached = submission(run) or {}, saved_step(run)
    if state["state"] != "stopped" or submitted.get("limit_of") != placement.start:
        return state
    if reached <= int(submitted.get("queued_again_at", 0)):
        cause = (
            f"it made no step beyond {reached} before its time limit, so it is not queued again; give it more --time"
        )
        return run.write_state(state="failed", cause=cause)
    return run.write_state(state="queued", cause=f"stopped at step {reached} by its time limit", processes=[])


def _output_size(run: RunFolder) -> int:
    """Size of what the job has printed."""
    output = run.path / OUTPUT
    return output.stat().st_size if output.exists() else 0


def _after_preemption(
    run: RunFolder, placement: Placement, state: dict[str, Any], printed_before: int
) -> dict[str, Any]:
    """The state of a run that has ended, with preemption as its cause if SLURM has noted that in the job's output.

    SLURM's programs do not tell: a job that is queued again has lost the mark.
    """
    size = _output_size(run)
    if state["state"] != "stopped" or size <= printed_before:
        return state
    with open(run.path / OUTPUT, "rb") as output:
        output.seek(max(printed_before, size - _MOST_OUTPUT))
        printed = output.read(_MOST_OUTPUT).decode("utf-8", "replace")
    if not re.search(rf"\*\*\* (?:JOB|STEP) {placement.job}[. ].{{0,200}}DUE TO PREEMPTION", printed):
        return state
    cause = f"stopped at step {saved_step(run)}, as SLURM preempted its job"
    return run.write_state(cause=cause, scheduler={**_written(placement), "preempted": True})


def _unheard(kind: str, text: str) -> None:
    """Ignores events: nobody watches a job, and its notes are in the log."""


def main(argv: list[str]) -> int:
    """Entry point."""
    action, run = {"node": node, "limit": limit, "after": after}[argv[0]], RunFolder(Path(argv[1]))
    try:
        return action(run)
    except ConfigError as error:
        with open(run.log, "a", encoding="utf-8") as log:
            log.writelines(log_line("supervisor", line) for line in error.lines)
        say("\n".join(error.lines))
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
