"""What the batch script of a run starts: `python -m app.launch.slurm_node node|limit|after RUN`.

`node` supervises the ranks of one node, as `tunesmith train --machine_rank K` does by hand. `limit` runs shortly before
the job's time limit: the run saves and stops. `after` runs at the end of the script, and queues the job again if the
time limit was what stopped the run.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.console import say
from app.launch.cluster_node import Node, take_over
from app.launch.foreground import EXIT_CODES
from app.runs.runs import saved_step
from app.runs.scheduled import submission
from app.schedulers.slurm import OUTPUT, SlurmError, hostnames, requeue, submit
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, log_line, write_json
from trainers.run.log import start_tee
from trainers.strategy.strategy import Machines

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

    @property
    def node(self) -> Node:
        """This node."""
        scheduler = {"kind": "slurm", "job": self.job, "restarts": self.restarts}
        remedy = "submit it with other --gpus_per_node, or ask the site about its GRES"
        return Node(self.nodes[self.rank], len(self.nodes), self.machines, scheduler, remedy)


def node(run: RunFolder) -> int:
    """Trains this node's part of a run; returns the exit status."""
    placement = Placement.of(os.environ)
    if placement.rank == 0:
        return _head(run, placement)
    start_tee(run.log, "supervisor", echo=True)
    state = placement.node.wait_for_head(run)
    return 1 if state is None else placement.node.follow(run)


def _head(run: RunFolder, placement: Placement) -> int:
    """The first node: takes over the run, and writes its state."""
    with take_over(run):
        if (run.read_state() or {}).get("state") == "done":
            return 0
        if (submission(run) or {}).get("limit_of") != placement.start:  # the limit may be so near that it came first
            run.stop_request.unlink(missing_ok=True)  # answered: SLURM has started the run again
        run.save_request.unlink(missing_ok=True)
        start_tee(run.log, "supervisor", echo=True)
        printed_before = _output_size(run)
        state = _after_limit(run, placement, placement.node.lead(run))
        state = _after_preemption(run, placement, state, printed_before)
        return EXIT_CODES.get(str(state["state"]), 0)


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
    with take_over(run):
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
    return run.write_state(cause=cause, scheduler={**placement.node.scheduler, "preempted": True})


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
