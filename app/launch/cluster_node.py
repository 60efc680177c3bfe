"""What the process that a scheduler starts on a node does, whichever scheduler it is: it supervises the node's ranks.

The first node takes over the run and writes its state; the others join each of its launches, as
`tunesmith train --machine_rank K` does by hand.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from trainers.config.local_paths import absolute_paths
from trainers.config.mistakes import ConfigError
from trainers.config.parse import Request
from trainers.run.folder import END_STATES, RunFolder, write_atomic
from trainers.strategy.strategy import Machines, load_strategy, over_machines


@dataclass(frozen=True)
class Node:
    """A node of a job.

    Args:
        name: its host name or address.
        count: number of nodes of the job.
        machines: the machines of the run; None for a single one.
        scheduler: what the state says about this start of the job: `kind`, `job` and `restarts`.
        gpu_remedy: what to do if it has not the GPUs that the job was submitted for.
    """

    name: str
    count: int
    machines: Machines | None
    scheduler: Mapping[str, Any]
    gpu_remedy: str

    def job(self, run: RunFolder) -> TrainJob:
        """The run as a job on this node.

        Raises:
            ConfigError: if the node lacks the GPUs that the run was submitted for.
        """
        submitted, total = submission(run) or {"options": {}}, world_size(run) or 1
        expected, visible = int(submitted["options"].get("gpus_per_node") or 0), [gpu.index for gpu in find_gpus()]
        if len(visible) != expected:
            problem = f"node {self.name} shows {len(visible)} GPUs to the job, which needs {expected}"
            raise ConfigError(f"{problem}; {self.gpu_remedy}")
        if total % self.count or (visible and total != self.count * len(visible)):
            raise ConfigError(f"the job has {self.count} nodes, and its {total} processes do not divide by them")
        chosen = choose_devices(",".join(map(str, visible)), None) if visible else Devices([], total)
        devices = replace(chosen, num_processes=total, machines=self.machines)
        config = absolute_paths(Request(config=str(run.config)).resolve())
        config = config.model_copy(update={"output_dir": str(run.path)})
        strategy = over_machines(load_strategy(str(run.accelerate)), self.machines)
        resume_from = "auto" if saved_step(run) else submitted.get("resume_from")
        return TrainJob(config, strategy, devices, run, resume_from)

    def lead(self, run: RunFolder, reserved: bool = True) -> dict[str, Any]:
        """Trains as the first node, which holds the run (`take_over`); returns the final state.

        Args:
            run: the run.
            reserved: whether the scheduler has reserved the devices, so that they are not waited for.
        """
        try:
            job = self.job(run)
        except ConfigError as error:
            return run.write_state(
                state="failed", cause="; ".join(error.lines), ending=None, scheduler=dict(self.scheduler)
            )
        write_atomic(run.accelerate, job.strategy.dump())
        write_atomic(run.command, command_line(run, job.devices) + "\n")
        # Live, so that the other nodes wait for a launch; none joins the last one of an earlier start.
        over = {"over": True} if self.machines else None
        run.write_state(state="starting", cause=None, ending=None, machines=over, scheduler=dict(self.scheduler))
        return run_to_end(
            run, job.devices, launch_environment(job.devices), unheard, job.resume_from, job.config.max_restarts,
            share_gpus=reserved,
        )  # fmt: skip

    def follow(self, run: RunFolder) -> int:
        """Trains as another node than the first, which has taken over the run; returns the exit status.

        Raises:
            ConfigError: if the node lacks the GPUs that the run was submitted for; the first node then ends the run.
        """
        state = run.read_state() or {}
        if state.get("state") in END_STATES:  # the first node refused it
            return EXIT_CODES.get(str(state["state"]), 0)
        try:
            job = self.job(run)
        except ConfigError as error:
            refuse_to_join(run, self.machines.rank if self.machines else 0, "; ".join(error.lines))
            raise
        state = join_to_end(job, launch_environment(job.devices), unheard, reserved=True)
        return EXIT_CODES.get(str(state["state"]), 0)

    def wait_for_head(self, run: RunFolder) -> dict[str, Any] | None:
        """Waits until the first node has taken over the run in this start of the job, or the run is done.

        Returns:
            The state then, which is that of an ended run if the first node refused it; None if it took too long.
        """
        deadline = time.monotonic() + FIRST_JOIN_TIMEOUT
        while time.monotonic() < deadline:
            state = run.read_state() or {}
            if state.get("state") == "done" or self._leads(state):
                return state
            time.sleep(0.2)
        rank = self.machines.rank if self.machines else 0
        say(f"node {rank}: the first node has not started job {self.scheduler['job']} for {FIRST_JOIN_TIMEOUT:g} s")
        return None

    def _leads(self, state: Mapping[str, Any]) -> bool:
        """Whether the first node wrote a state in this start of the job."""
        written = state.get("scheduler")
        return isinstance(written, dict) and {**written, **self.scheduler} == written


def take_over(run: RunFolder) -> TextIO:
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


def unheard(kind: str, text: str) -> None:
    """Ignores events: nobody watches a job, and its notes are in the log."""
