"""The supervisor on machines other than 0: joins every launch of machine 0 until the run has ended.

It reads the state that machine 0 writes, and reports its own status in a separate file (`app/launch/nodes.py`).
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from app.accelerate_launch import launch_argv
from app.launch.job import TrainJob, as_argument
from app.launch.layouts import Layouts, part_of
from app.launch.links import Arrival
from app.launch.network import interface_problem
from app.launch.nodes import FIRST_JOIN_TIMEOUT, JOIN_TIMEOUT, NodeStatus, Pulses
from app.launch.probes import PROBE_AFTER, PROBE_AGAIN, unreachable
from app.launch.process_tree import adopting_orphans
from app.launch.restarts import lost_state, wait_for_slots
from app.launch.supervisor import POLL, Listener, RunSignals, Supervision
from app.runs.machines import LOST_AFTER
from app.runs.runs import true_state
from trainers.config.local_paths import absolute_paths
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.config.yaml_file import read_yaml
from trainers.run.device_locks import HeldSlots
from trainers.run.folder import END_STATES, LIVE_STATES, RunFolder, log_line, read_json, register_outside
from trainers.strategy.strategy import Machines

LEFT = {"state": "stopped", "cause": "stopped before machine 0 had started the run", "step": 0}
_OWN = ("output_dir", "resume_from_checkpoint", "runs_dir")


def join_to_end(job: TrainJob, env: Mapping[str, str], on_event: Listener, reserved: bool = False) -> dict[str, Any]:
    """Trains this machine's part of a run that machine 0 controls.

    Args:
        job: the job, with a machine rank other than 0.
        env: the launcher's complete environment.
        on_event: receives progress events.
        reserved: whether a scheduler has reserved the devices, so that they are not waited for.

    Returns:
        The run's final state. None of its processes is alive on this machine.

    Raises:
        ConfigError: if machine 0 trains with other settings, or another process has already joined as this machine.
    """
    job.run.create()
    job.run.keep()
    with job.run.hold(job.devices.machine_rank), RunSignals() as signals:
        register_outside(job.run, job.config.runs_dir)
        node = _WorkerNode(job, env, on_event, signals, reserved)
        with node.status_file.beating():
            return node.go()


class _WorkerNode:
    """This machine's part of a run; see `join_to_end` for the arguments."""

    def __init__(self, job: TrainJob, env: Mapping[str, str], on_event: Listener, signals: RunSignals, reserved: bool):
        self.job, self.run, self.env, self.signals = job, job.run, env, signals
        self.reserved, self.has_trained = reserved, False
        self.name = f"machine {job.devices.machine_rank}"
        self.status_file = NodeStatus(job.run, job.devices.machine_rank)
        self.listener = on_event
        before = self._state()
        # `launched_at` of the last joined launch; at first that of an attempt that has ended, or whose machine 0 was
        # lost, which is not joined.
        self.joined = before.get("launched_at") if before.get("state") in END_STATES else None
        self.resumes = self.joined is not None
        self.held: HeldSlots | None = HeldSlots({}) if reserved or job.config.share_gpus else None
        self.seen: tuple[Any, ...] = ()
        self.seen_at = time.monotonic()
        self.doing = "waited for machine 0"
        self.pulse = Pulses(job.run, [0])
        self.probed_at = 0.0

    def tell(self, kind: str, text: str) -> None:
        """Passes an event on to the listener, and writes notes to the log."""
        if kind == "note" and not self.run.lost():
            with contextlib.suppress(OSError), open(self.run.log, "a", encoding="utf-8") as log:
                log.write(log_line("supervisor", f"{self.name}: {text}"))
        self.listener(kind, text)

    def go(self) -> dict[str, Any]:
        """Joins every launch; returns the final state of the run."""
        self.listener("note", f"{self.name}: waiting for machine 0 to start {self.run.path}")
        try:
            return self._to_end()
        except FileNotFoundError:
            if (state := lost_state(self.run, self.doing)) is None:
                raise
            return state
        finally:
            if self.held is not None:
                self.held.close()

    def _to_end(self) -> dict[str, Any]:
        """As `go`.

        Raises:
            FileNotFoundError: if the run folder is removed or replaced meanwhile.
        """
        while True:
            # A live run takes stop requests; an ended one ends this loop, unless it is about to be resumed. Before
            # machine 0 has started it, there is no run to ask, so a stop signal just leaves.
            state = self._state()
            self.run.refuse_lost()
            if self.reserved and self.has_trained and state.get("state") == "queued":
                return state  # for the next start of the job, which starts this node again
            if state.get("state") in LIVE_STATES:
                self.resumes = False
                self.signals.pass_on(self.run, self.tell)
            elif state.get("state") in END_STATES and not self.resumes:
                return state
            elif any(number != signal.SIGUSR1 for number in self.signals.seen):
                return dict(LEFT)
            if self._can_join(state) and time.monotonic() - self.probed_at > PROBE_AGAIN:
                self._join(state)
            elif given_up := self._silence(state):
                return {**state, "state": "failed", "cause": given_up}
            self.listener("tick", "")
            time.sleep(POLL)

    def _state(self) -> dict[str, Any]:
        if self.reserved:  # the scheduler is not asked for the state by every node of a job
            return self.run.read_state() or {}
        return true_state(self.run) if self.run.state_file.exists() else {}

    def _can_join(self, state: Mapping[str, Any]) -> bool:
        """Whether machine 0 is gathering the machines for a launch that was not joined yet."""
        launch = state.get("launched_at")
        new = state.get("state") == "starting" and launch not in (None, self.joined) and not is_over(state, launch)
        return new and (state.get("machines") or {}).get("participants") is None

    def _silence(self, state: Mapping[str, Any]) -> str:
        """Why to give up, once machine 0 is lost or has shown no progress for `FIRST_JOIN_TIMEOUT`; otherwise empty.

        A queued run may wait forever.
        """
        self.pulse.look()
        beat = read_json(self.run.heartbeats / "rank-0.json") or {}
        seen = (state.get("updated_at"), beat.get("time"))
        if seen != self.seen or state.get("state") == "queued":
            self.seen, self.seen_at = seen, time.monotonic()
        waited = time.monotonic() - self.seen_at
        if 0 in self.pulse.seen and self.pulse.silent(0) and waited > LOST_AFTER and state.get("state") in LIVE_STATES:
            return f"machine 0 was lost: no sign of life for {LOST_AFTER:g} s; {self._without_machine_0()}"
        if waited < FIRST_JOIN_TIMEOUT:
            return ""
        remedy = "start the same command there with --machine_rank 0, and check that it sees this folder"
        return f"{self.name} has not heard from machine 0 for {FIRST_JOIN_TIMEOUT:g} s; {remedy}"

    def _without_machine_0(self) -> str:
        """How the machines that are left can go on."""
        machines, devices = self.job.devices.machines, self.job.devices
        count = machines.count - 1 if machines else 1
        sizes = [] if devices.gpu_ids else ["--num_processes", str(devices.local_processes * count)]
        argv = ["tunesmith", "resume", str(self.run.path), "--num_machines", str(count), *sizes]
        network = f" --main_process_ip ADDRESS --main_process_port {machines.port} --machine_rank K" if machines else ""
        return f"on each of the others, `{shlex.join(argv)}{network if count > 1 else ''}` goes on without it"

    def _join(self, state: Mapping[str, Any]) -> None:
        """Takes part in one launch until it ends.

        Raises:
            ConfigError: if machine 0 trains with other settings, or the network interface that is named is wrong.
        """
        launch, machines = str(state["launched_at"]), self.job.devices.machines
        if machines is None:
            raise AssertionError("only a run on several machines has other nodes")
        fault = interface_problem(machines, self.env)
        if mistakes := [*self._differences(state.get("machines") or {}), *([fault] if fault else [])]:
            self.status_file.write(launch, refused="; ".join(mistakes))
            raise ConfigError(mistakes)
        self.held = self.held or self._wait_for_slots(launch)
        if self.held is None:
            return
        arrival = Arrival(machines, self.env, launch, state.get("machines") or {})
        with contextlib.closing(arrival):
            if not self._arrive(arrival, launch):
                return
            self.joined = launch
            if (notice := self._decision(launch, arrival)) is None:
                return
        participants = notice["participants"]
        if machines.rank not in participants:
            reason = (notice.get("absent") or {}).get(str(machines.rank)) or "it joins when the run is restarted"
            self.tell("note", f"waiting as a spare: {reason}")
            return
        self.doing, self.has_trained = "trained", True
        argv = launch_argv(
            self.run, self.job.devices.local_processes * len(participants), notice.get("resume_from"),
            part_of(machines, participants), float(notice.get("timeout") or JOIN_TIMEOUT),
        )  # fmt: skip
        self.tell("note", f"joining attempt {state.get('attempt')}")
        env = {**self.env, **arrival.variables()}
        part = _Part(self.run, argv, env, self.tell, 60.0, self.signals, self.held.descriptors)
        part.join(self.status_file, self.pulse, machines, launch)
        with adopting_orphans():
            part.go()
        self.run.refuse_lost()
        self.status_file.write(launch, ended=part.exit_status, unreachable=part.problem)
        self.seen_at, self.doing = time.monotonic(), "waited for machine 0"

    def _arrive(self, arrival: Arrival, launch: str) -> bool:
        """Checks the connection to machine 0, and reports the result; returns whether this machine can take part."""
        self.probed_at = time.monotonic()
        arrival.check()
        if arrival.problem and not self._can_join(self._state()):
            return False  # machine 0 does not answer any more, as the ranks of the others need its port
        if self.status_file.status.get("unreachable") != arrival.problem:
            self.tell("note", arrival.problem or "it can reach machine 0 again")
        self.status_file.facts = arrival.facts
        self.status_file.write(launch, unreachable=arrival.problem)
        return arrival.problem is None

    def _decision(self, launch: str, arrival: Arrival) -> Mapping[str, Any] | None:
        """Waits until machine 0 has decided who takes part in a launch, and meanwhile checks the links to the others.

        Returns:
            What machine 0 says about the launch; None if it is over first.
        """
        while not is_over(state := self._state(), launch):
            notice = state.get("machines") or {}
            if isinstance(notice.get("participants"), list):
                return notice
            if (problems := arrival.look(notice)) is not None:
                for problem in problems:
                    self.tell("note", problem)
                self.status_file.facts = arrival.facts
                self.status_file.write(launch)
            self.run.refuse_lost()
            self.signals.pass_on(self.run, self.tell)
            if given_up := self._silence(state):
                self.tell("note", given_up)
                return None
            self.listener("tick", "")
            time.sleep(POLL)
        return None

    def _differences(self, notice: Mapping[str, Any]) -> list[str]:
        """Differences between this machine's command and machine 0's, whose files all ranks read; a line for each.

        Args:
            notice: what machine 0 says about the machines.
        """
        theirs, ours = absolute_paths(Request(config=str(self.run.config)).resolve()), self.job.config
        machines = self.job.devices.machines
        minimum = machines.minimum if machines else None
        changed_by_0 = ours.auto_find_batch_size or minimum is not None
        halved = ("per_device_train_batch_size", "per_device_eval_batch_size") if changed_by_0 else ()
        names = [name for name in TrainConfig.model_fields if name not in (*_OWN, *halved)]
        pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
        pairs.append(("min_machines", minimum, notice.get("minimum")))
        file, own = read_yaml(self.run.accelerate), self.job.strategy.values
        with contextlib.suppress(ConfigError):  # the file is still that of the last launch
            own = Layouts(ours, self.job.strategy, self.job.devices).on(int(file.get("num_machines") or 1))[1].values
        pairs += [(name, own.get(name), file.get(name)) for name in sorted({*file, *own} - {"machine_rank"})]
        return [
            f"{name}={as_argument(local)}, but machine 0 was started with {as_argument(there)}; "
            "run the same command on each machine"
            for name, local, there in pairs
            if local != there
        ]

    def _wait_for_slots(self, launch: str) -> HeldSlots | None:
        """Waits for this machine's slots; None if the launch is over first."""

        def keep_waiting() -> bool:
            self.run.refuse_lost()
            self.signals.pass_on(self.run, self.tell)
            return not is_over(self._state(), launch)

        return wait_for_slots(self.run, self.job.devices, self.tell, keep_waiting)


def refuse_to_join(run: RunFolder, machine: int, reason: str) -> None:
    """Tells machine 0 that this machine cannot train, which ends the run there; waits for its launch to say so.

    Args:
        run: the run.
        machine: rank of this machine.
        reason: why it cannot.
    """
    deadline = time.monotonic() + FIRST_JOIN_TIMEOUT
    while (state := run.read_state() or {}).get("state") not in END_STATES and time.monotonic() < deadline:
        launch = state.get("launched_at")
        if launch is not None and not is_over(state, launch):
            NodeStatus(run, machine).write(str(launch), refused=reason)
            return
        time.sleep(POLL)


def is_over(state: Mapping[str, Any], launch: Any) -> bool:
    """Whether a launch of machine 0 is over."""
    notice = state.get("machines") or {}
    return state.get("launched_at") != launch or state.get("state") in END_STATES or notice.get("over") is True


class _Part(Supervision):
    """This machine's part of a launch that machine 0 has announced; reports to a status file, not to the state."""

    problem: str | None = None
    """Why its ranks cannot reach machine 0."""
    probed_at = 0.0
    link: str | None = None
    """Why machine 0 could not be reached when that was last tried."""

    def join(self, status_file: NodeStatus, pulse: Pulses, machines: Machines, launch: str) -> None:
        """Sets the launch to join.

        Args:
            status_file: this machine's status file.
            pulse: machine 0's signs of life.
            machines: the machines of the run.
            launch: `launched_at` of the launch.
        """
        self.status_file, self.pulse, self.machines, self.launch = status_file, pulse, machines, launch
        self.mark = f"machine {machines.rank}: "

    def _announce(self) -> None:
        """Nothing: this machine has reported already that it takes part."""

    def _name(self, launcher: subprocess.Popen[bytes]) -> None:
        self.status_file.write(self.launch, launcher.pid)

    def _over(self, launcher: subprocess.Popen[bytes]) -> bool:
        if is_over(self.run.read_state() or {}, self.launch):
            self.exit_at = self.exit_at or time.monotonic()
        return super()._over(launcher)

    def _is_cut_off(self, clock: float) -> bool:
        """Whether no rank makes progress, and nobody on machine 0 gives a sign of life, or it cannot be reached."""
        self.pulse.look()
        if self.problem is None and self._stands_still(clock, PROBE_AFTER) and clock - self.probed_at > PROBE_AFTER:
            self._probe(clock, unreachable(self.machines))
        if not self._stands_still(clock):
            if self.beat_at > self.probed_at:  # the ranks go on
                self._probe(clock, None)
            return False
        if self.problem is None and self.link:
            self.problem = self.link
            self.status_file.write(self.launch, unreachable=self.problem)
        return self.problem is not None or (0 in self.pulse.seen and self.pulse.silent(0))

    def _probe(self, clock: float, problem: str | None) -> None:
        """Notes whether machine 0 can be reached, and tells if that has changed."""
        if problem != self.link:
            self.on_event("note", problem or "it can reach machine 0 again")
        self.probed_at, self.link = clock, problem
