"""The driver of a run on Ray: `python -m app.launch.ray_driver RUN LOCK`.

Reserves the nodes, starts a supervisor on each (`app/launch/ray_node.py`), and starts them again on other nodes when
one is lost. It writes the run's state while no supervisor does: when the run waits for nodes, and when it is over
without a supervisor having said so.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from app.accelerate_launch import ROOT
from app.launch.cluster_node import take_over, unheard
from app.launch.ray_job import node_argv
from app.launch.restarts import CANCELLED
from app.launch.supervisor import RunSignals
from app.runs.ray_driver import BEAT, write_driver
from app.runs.runs import saved_step, world_size
from app.runs.scheduled import submission
from app.schedulers.ray_cluster import Cluster, ClusterError
from app.schedulers.ray_options import RayOptions
from trainers.config.mistakes import ConfigError
from trainers.run.folder import END_STATES, Process, RunFolder, log_line, secrets_in
from trainers.run.log import start_tee

_SETTLE = 60.0
"""Seconds for the other supervisors to end after one has, and for Ray to notice that a node is lost."""
_PATIENCE = 3.0
"""Seconds for Ray to reserve what is free, before the run is said to wait."""
_MOST_LOSSES = 3
"""Times that a node may be lost in a row without a new checkpoint; a run that takes its nodes down is not moved on."""
Outcomes = dict[int, int | ClusterError]


class Driver:
    """One run, from the queue to its end.

    Args:
        run: the run.
        lock: the lock on it, which is let go while a supervisor holds the run.
        options: what it needs of the cluster.
        cluster: the cluster.
    """

    def __init__(self, run: RunFolder, lock: TextIO, options: RayOptions, cluster: Cluster, signals: RunSignals):
        self.run, self.lock, self.options, self.cluster, self.signals = run, lock, options, cluster, signals
        self.processes, self.restarts, self.losses, self.phase = world_size(run) or 1, 0, 0, "waiting"
        self.needs = options.needs(self.processes)
        self.beat_at = 0.0
        self.addresses: list[str] = []

    @property
    def scheduler(self) -> dict[str, Any]:
        """What the state says about the job; the first node adds which start of it has taken over the run."""
        return {"kind": "ray", "job": self.cluster.job}

    def to_end(self) -> None:
        """Trains the run to its end, which its state then says."""
        self.cluster.reserve(self.options.nodes)
        while self._has_nodes() and self._sees_files():
            reached = saved_step(self.run)
            outcomes = self._train()
            if not self._moves_on(outcomes, reached):
                break
        self.phase = "ended"
        self.beat(now=True)

    def beat(self, now: bool = False) -> None:
        """Writes the driver's file every `BEAT` seconds, and passes signals to it on to the run."""
        self.signals.pass_on(self.run, unheard)
        if now or time.monotonic() - self.beat_at > BEAT:
            self.beat_at = time.monotonic()
            with contextlib.suppress(OSError):
                write_driver(self.run, phase=self.phase, job=self.cluster.job, restarts=self.restarts)

    def is_killed(self) -> bool:
        """Whether the run is to end at once, without saving."""
        return bool((submission(self.run) or {}).get("killed"))

    def note(self, text: str) -> None:
        """Writes a line to the run's log."""
        with contextlib.suppress(OSError), open(self.run.log, "a", encoding="utf-8") as log:
            log.write(log_line("supervisor", f"Ray: {text}", secrets_in(os.environ)))

    # -- waiting -----------------------------------------------------------------------------------------------------

    def _has_nodes(self) -> bool:
        """Waits until the nodes are reserved; False if the run is stopped first."""
        self.phase, printed = "waiting", ""
        before = (self.run.read_state() or {}).get("cause") if self.restarts else None
        self._queued(before)
        patient_until = time.monotonic() + _PATIENCE
        while (addresses := self._addresses()) is None:
            cause = self._shortage()
            if cause != printed and time.monotonic() > patient_until:
                printed = cause
                self._queued(f"{before}; {cause}" if before else cause)
                self.note(cause)
            self.beat()
            if self._stopped():
                return False
            time.sleep(0.5)
        self.addresses = addresses
        return not self._stopped()

    def _addresses(self) -> list[str] | None:
        """Addresses of the reserved nodes; None while one is missing, or does not answer as Ray is yet to miss it."""
        addresses = self.cluster.addresses()
        try:
            for rank in range(len(addresses or [])):
                self.beat()
                self.cluster.run(rank, ["true"])
        except ClusterError:
            return None
        return addresses

    def _shortage(self) -> str:
        """Why the nodes are not reserved yet."""
        fitting = self.cluster.fitting_nodes()
        reason = "in use by others" if fitting >= self.options.nodes else f"the cluster has {fitting}"
        return f"needs {self.needs}; {reason}"

    def _queued(self, cause: str | None) -> None:
        processes = [Process.of("supervisor").as_json()]
        self.run.write_state(
            state="queued", cause=cause, ending=None, processes=processes, host=os.uname().nodename,
            scheduler=self.scheduler,
        )  # fmt: skip
        self.beat(now=True)

    def _stopped(self) -> bool:
        """Ends a run that is asked to stop while it waits."""
        if self.run.stop_asked() is None and not self.is_killed():
            return False
        step = saved_step(self.run)
        cause = f"cancelled at step {step}, while it waited for nodes" if step else CANCELLED.cause
        self._end("stopped", str(cause))
        return True

    def _sees_files(self) -> bool:
        """Ends the run if a node does not see the run, Python or Tunesmith under the same path as this machine."""
        needed = (str(self.run.config), sys.executable, str(ROOT / "app" / "launch" / "ray_node.py"))
        remedy = "all nodes need the run folder, Python and Tunesmith under the same paths as this machine"
        for rank, path in itertools.product(range(self.options.nodes), needed):
            self.beat()
            try:
                if self.cluster.run(rank, ["test", "-e", path]):
                    self._end("failed", f"node {self.addresses[rank]} has no {path}; {remedy}")
                    return False
            except ClusterError:
                break  # it is lost, which its supervisor will show
        return True

    # -- training ----------------------------------------------------------------------------------------------------

    def _train(self) -> Outcomes:
        """Starts the supervisors; returns how they ended, once all have, or a node is lost."""
        self.phase = "training"
        self.beat(now=True)
        self.lock.close()
        self.cluster.calls.clear()
        for rank in range(self.options.nodes):
            argv = node_argv(
                self.run, self.cluster.job, self.restarts, self.addresses, rank, self.cluster.is_local
            )  # fmt: skip
            self.cluster.start(rank, argv)
        first_end: float | None = None
        while True:
            outcomes = self.cluster.outcomes(1.0)
            self.beat()
            if len(outcomes) == self.options.nodes or any(isinstance(end, ClusterError) for end in outcomes.values()):
                return outcomes
            if outcomes or self.is_killed():  # the others end with it, or Ray notices that they are lost
                first_end = first_end or time.monotonic()
                if time.monotonic() - first_end > _SETTLE:
                    return outcomes

    def _moves_on(self, outcomes: Outcomes, reached: int) -> bool:
        """Whether the run is to go on, as a node was lost; otherwise its state says how it ended.

        Args:
            outcomes: of the supervisors.
            reached: step of the newest checkpoint when they were started.
        """
        lost = {rank: str(end) for rank, end in outcomes.items() if isinstance(end, ClusterError)}
        ended_well = (self.run.read_state() or {}).get("state") == "done"
        if lost and not ended_well:
            for rank, error in lost.items():
                self.note(f"node {self.addresses[rank]} is lost: {error}")
        self.restarts += bool(lost)
        self._clear()
        state, killed = str((self.run.read_state() or {}).get("state")), self.is_killed()
        if killed or ended_well or (not lost and state in END_STATES):
            self.lock = take_over(self.run)
            if killed and state not in END_STATES:
                self._end("stopped", "ended by force; the last checkpoint remains")
            return False
        self.lock = take_over(self.run)
        names = ", ".join(self.addresses[rank] for rank in lost)
        saved = saved_step(self.run)
        self.losses = 1 if saved > reached else self.losses + 1
        if not lost:
            ended = ", ".join(f"{self.addresses[rank]} (exit status {end})" for rank, end in outcomes.items())
            self._end("failed", f"the supervisor on {ended} ended before the run; see the log")
        elif self.run.stop_asked() is not None:
            self._end("stopped", f"stopped by request; before that, node {names} was lost")
        elif self.losses >= _MOST_LOSSES:
            self._end(
                "failed", f"node {names} was lost, for the {self.losses}rd time in a row without a new checkpoint"
            )
        else:
            self.run.write_state(state="queued", cause=f"node {names} was lost; goes on from step {saved}")
            return True
        return False

    def _clear(self) -> None:
        """Waits until no supervisor of this start is left: each ends itself once it sees the next number."""
        self.beat(now=True)
        deadline = time.monotonic() + _SETTLE
        while len(self.cluster.outcomes(1.0)) < self.options.nodes:
            self.beat()
            if time.monotonic() > deadline:
                self.note("a supervisor does not end; Ray kills it")
                self.cluster.cancel()
                return

    def _end(self, state: str, cause: str) -> None:
        self.run.write_state(state=state, cause=cause, ending=None, processes=[], scheduler=self.scheduler)


def _connect(run: RunFolder, options: RayOptions) -> Cluster:
    """Reaches the cluster.

    Raises:
        ClusterError: if that fails, or a local one could never hold the run.
    """
    resources = options.resources(world_size(run) or 1)
    cluster = Cluster(os.environ.get("RAY_ADDRESS"), resources)
    if cluster.is_local and (fitting := cluster.fitting_nodes()) < options.nodes:
        needs = options.needs(world_size(run) or 1)
        raise ClusterError(f"it needs {needs}, and this machine makes {fitting}; RAY_ADDRESS names a larger cluster")
    return cluster


def main(argv: list[str]) -> int:
    """Entry point: takes over the lock on a written run folder, and trains the run to its end."""
    run, descriptor = RunFolder(Path(argv[0])), int(argv[1])
    os.set_inheritable(descriptor, False)
    lock = os.fdopen(descriptor, "w")
    options = RayOptions.checked((submission(run) or {}).get("options", {}))
    write_driver(run, phase="connecting")
    try:
        cluster = _connect(run, options)
    except ClusterError as error:
        write_driver(run, phase="connecting", cause=str(error))
        return 1
    start_tee(run.log, "supervisor", echo=False)
    run.keep()
    with RunSignals() as signals:
        driver = Driver(run, lock, options, cluster, signals)
        try:
            driver.to_end()
        except (ConfigError, FileNotFoundError) as error:
            driver.note(str(error))
            return 1
        finally:
            cluster.end()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
