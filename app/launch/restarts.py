"""Takes a run from the queue to its end: waits for its GPUs, launches, restarts after crashes, publishes the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from app.accelerate_launch import bound_argv, launch_argv
from app.hardware import Devices, find_gpus
from app.launch.layouts import Layouts, part_of
from app.launch.links import Links
from app.launch.nodes import FIRST_JOIN_TIMEOUT, JOIN_TIMEOUT, Nodes, NodeStatus, Pulses
from app.launch.supervisor import POLL, Listener, RunSignals, supervise
from app.runs.runs import last_checkpoint, saved_step
from trainers.config.parse import Request, dump_yaml
from trainers.run.device_locks import HeldSlots, Need, enqueue, give_up, try_take, who_has
from trainers.run.ending import Ending
from trainers.run.folder import Process, RunFolder, log_line, read_json, write_atomic
from trainers.strategy.strategy import Machines, load_strategy

QUEUE_POLL = 1.0
"""Seconds between two checks of the queue; each takes a few milliseconds, and many runs may be waiting."""
CANCELLED = Ending("stopped", "cancelled before it started")


def run_to_end(
    run: RunFolder,
    devices: Devices,
    env: Mapping[str, str],
    on_event: Listener,
    resume_from: str | None = None,
    max_restarts: int = 0,
    share_gpus: bool = False,
    bound: bool = False,
) -> dict[str, Any]:
    """Trains a run whose folder has been written, and publishes how it ended.

    When called in the main thread, SIGINT, SIGTERM and SIGHUP to this process ask the ranks to save and stop, and
    SIGUSR1 asks them to save and continue.

    Args:
        run: the run, held by the caller (`RunFolder.hold`).
        devices: devices to run on.
        env: the launcher's complete environment.
        on_event: receives progress events.
        resume_from: `auto` or the path of a checkpoint; None to start from the beginning.
        max_restarts: most restarts after crashes; an attempt that would only crash again is not restarted.
        share_gpus: neither wait for the GPUs nor lock them.
        bound: whether the run ends when this process is killed; otherwise it trains on, to its end.

    Returns:
        The final state. No process of the run is alive, and its GPUs are free.
    """
    run.keep()
    with RunSignals() as signals:
        attempts = _Attempts(run, devices, env, _noting(run, on_event), signals, bound)
        try:
            with attempts.beating():
                ending = attempts.to_end(share_gpus, resume_from, max_restarts)
            attempts.write_settings_of_all(ending)
            if not run.lost():
                run.remove_unfinished()
            state = run.write_state(**ending.published(), ending=None)
        except FileNotFoundError:
            if (lost := lost_state(run, attempts.doing)) is None:
                raise
            state = lost
    on_event("tick", "")
    return state


def lost_state(run: RunFolder, doing: str) -> dict[str, Any] | None:
    """The final state of a run whose folder was removed or replaced; it is not written anywhere.

    Args:
        run: the run; `RunFolder.keep` must have been called.
        doing: what the run did when it lost its folder, in the past tense, such as `trained`.

    Returns:
        The state, or None if the folder is still there.
    """
    if (how := run.lost()) is None:
        return None
    return {"id": run.id, "state": "failed", "cause": f"the run folder {run.path} was {how} while it {doing}"}


def _noting(run: RunFolder, on_event: Listener) -> Listener:
    """A listener that also writes notes to the run's log."""

    def listen(kind: str, text: str) -> None:
        if kind == "note" and not run.lost():
            with contextlib.suppress(OSError), open(run.log, "a", encoding="utf-8") as log:
                log.write(log_line("supervisor", text))
        on_event(kind, text)

    return listen


def need_of(devices: Devices) -> Need:
    """The slots that a run on these devices needs."""
    if not devices.gpu_ids:
        return Need(cpu_slots=devices.local_processes)
    uuids = {gpu.index: gpu.uuid for gpu in find_gpus()}
    return Need(gpus=tuple(uuids.get(index, f"index-{index}") for index in devices.gpu_ids))


def _hopeless(number: int, allowed: int, begun_at: int, reached: int, crashed_at: int) -> str:
    """Why a run that has just crashed is not restarted; empty if it is, or if restarts are off.

    Args:
        number: number of restarts so far.
        allowed: `max_restarts`.
        begun_at: step of the checkpoint from which the crashed attempt started.
        reached: step at which it crashed.
        crashed_at: step at which the previous attempt crashed; -1 if there was none.
    """
    if not allowed:
        return ""
    if reached <= begun_at:
        start = f"its checkpoint of step {begun_at}" if begun_at else "its start"
        return f"not restarted: it made no step beyond {start}"
    if reached == crashed_at:
        return f"not restarted: the last 2 attempts crashed at the same step, {reached}"
    return f"gave up after {allowed} restart{'s' * (allowed > 1)}" if number == allowed else ""


def smaller_batch(run: RunFolder) -> str | None:
    """Reduces the micro-batch in the config of a run that ran out of memory, to half or the next size that divides.

    The global batch, and so the result, stays the same: gradient accumulation makes up for the difference. Answers that
    are sampled in smaller batches differ where a rounding flips a token.

    Returns:
        A line for the user; None if the run did not run out of memory or the micro-batch cannot be reduced.
    """
    note = read_json(run.out_of_memory)
    if note is None:
        return None
    config = Request(config=str(run.config)).resolve()
    if not config.auto_find_batch_size:
        return None
    ranks = load_strategy(str(run.accelerate)).data_parallel_size
    evaluates = note.get("section") in ("evaluation", "sampling")
    name = "per_device_eval_batch_size" if evaluates else "per_device_train_batch_size"
    now = getattr(config, name)
    fits = [size for size in range(now // 2, 0, -1) if evaluates or config.global_batch_size % (size * ranks) == 0]
    if not fits:
        return None
    config = config.model_copy(update={name: fits[0]})
    write_atomic(run.config, dump_yaml(config))
    times = "" if evaluates else f", {config.accumulation_steps(ranks)} times a step"
    same = "the result" if evaluates else f"the global batch of {config.global_batch_size}"
    if evaluates and config.objective_spec.samples:
        same = "but for the rounding of what is sampled, the result"
    return (
        f"out of memory on rank {note.get('rank')} with {name}={now}: retrying with {fits[0]}{times}; "
        f"{same} stays the same"
    )


def wait_for_slots(
    run: RunFolder, devices: Devices, on_event: Listener, keep_waiting: Callable[[], bool]
) -> HeldSlots | None:
    """Waits in the queue until a run may use its slots on this machine, and takes them.

    Args:
        run: the run to enqueue.
        devices: the devices that it needs.
        on_event: receives a note on who holds the slots whenever that changes.
        keep_waiting: called several times a second; once it returns False, the run leaves the queue.

    Returns:
        The held slots; None if the run left the queue.
    """
    need, printed, looked = need_of(devices), "", -QUEUE_POLL
    ticket = enqueue(run.path, run.id, need)
    try:
        while keep_waiting():
            if time.monotonic() - looked >= QUEUE_POLL:
                looked = time.monotonic()
                if (held := try_take(ticket)) is not None:
                    return held
                if (now := f"queued: {who_has(need) or 'another run is first'}") != printed:
                    printed = now
                    on_event("note", printed)
            on_event("tick", "")
            time.sleep(POLL)
    finally:
        give_up(ticket)
    return None


class _Attempts:
    """The launches of one run; see `run_to_end` for the arguments."""

    def __init__(
        self, run: RunFolder, devices: Devices, env: Mapping[str, str], on_event: Listener, signals: RunSignals,
        bound: bool,
    ):  # fmt: skip
        self.run, self.devices, self.env, self.on_event, self.signals = run, devices, env, on_event, signals
        self.bound = bound
        self.doing = "waited for its turn"
        self.lost = ""
        """The machines that the last launch has lost, in words."""
        self.members: _Members | None = None
        if devices.machines:
            self.members = _Members(run, devices, devices.machines, env)

    def beating(self) -> contextlib.AbstractContextManager[None]:
        """Gives signs of life to the other machines, if there are any."""
        return NodeStatus(self.run, 0).beating() if self.members else contextlib.nullcontext()

    def write_settings_of_all(self, ending: Ending) -> None:
        """Writes the files of a run on all its machines again, for the next command that resumes it."""
        if self.members and self.members.is_elastic and ending.state != "done" and not self.run.lost():
            self.members.write_files(self.members.count)

    def to_end(self, share_gpus: bool, resume_from: str | None, max_restarts: int) -> Ending:
        """Waits for the slots, then launches.

        Raises:
            FileNotFoundError: when the run folder is removed or replaced meanwhile.
        """
        held = HeldSlots({}) if share_gpus else self.wait()
        if held is None:
            return CANCELLED
        with held:
            return self.go(held, resume_from, max_restarts)

    def wait(self) -> HeldSlots | None:
        """Waits for the run's slots; None if a stop is requested first."""

        def keep_waiting() -> bool:
            self.run.refuse_lost()
            self.signals.pass_on(self.run, self.on_event)
            return self.run.stop_asked() is None

        queued = {"state": "queued", "cause": None, "ending": None}
        self.run.write_state(**queued, processes=[Process.of("supervisor").as_json()])
        return wait_for_slots(self.run, self.devices, self.on_event, keep_waiting)

    def go(self, held: HeldSlots, resume_from: str | None, max_restarts: int) -> Ending:
        """Launches until the run ends by itself, is stopped, or would only crash again.

        The latter is assumed of an attempt that made no step beyond its checkpoint, or that crashed at the same step
        as the previous one.
        """
        if self.run.stop_asked() is not None:
            return CANCELLED
        crashed_at, number, without_progress, source = -1, 0, 0, resume_from
        while True:
            begun_at = saved_step(self.run)
            ending = self._launch_what_fits(held, source)
            self.run.refuse_lost()
            if ending.state != "failed" or ending.retry == "never":
                return ending
            if self.run.stop_asked() is not None:
                return replace(ending, state="stopped", cause=f"stopped by request; before that: {ending.cause}")
            reached, source = self._step(), self._source(resume_from)
            if self.lost and self.members and self.members.is_elastic:
                # It says nothing about the run that it loses a machine, so it is not counted.
                without_progress = 0 if reached > begun_at else without_progress + 1
                if without_progress > self.members.count:
                    problem = f"not restarted: the last {without_progress} attempts made no step"
                    return replace(ending, cause=f"{ending.cause}; {problem}")
                self._note_restart("with the machines that are left", str(ending.cause))
                continue
            if reason := _hopeless(number, max_restarts, begun_at, reached, crashed_at):
                return replace(ending, cause=f"{ending.cause}; {reason}")
            crashed_at = reached
            if number == max_restarts:
                return ending
            number += 1
            self._note_restart(f"{number} of {max_restarts}", str(ending.cause))

    def _source(self, resume_from: str | None) -> str | None:
        """Where another attempt resumes: `auto`, or the original source while the run has no checkpoint of its own.

        Without either, `auto` too: there may be a copy of a checkpoint elsewhere (`checkpoint_url`).
        """
        return "auto" if last_checkpoint(self.run) else resume_from or "auto"

    def _launch_what_fits(self, held: HeldSlots, source: str | None) -> Ending:
        """Launches, and launches again with a smaller micro-batch after out-of-memory, or past a loss spike.

        These do not count as restarts. The loop ends: a micro-batch can be reduced only so often, and each rollback
        must add a step to those that are skipped.
        """
        resume_from, skipped_steps = source, self.run.read_skipped_steps()
        while True:
            ending = self._launch(held, source)
            self.run.refuse_lost()
            if ending.state != "failed" or self.run.stop_asked() is not None:
                return ending
            before, skipped_steps = skipped_steps, self.run.read_skipped_steps()
            rolled_back = ending.retry == "roll_back" and len(skipped_steps) > len(before)
            change = ending.cause if rolled_back else smaller_batch(self.run)
            if change is None:
                return ending
            if self.members:
                self.members.read_micro_batches()
            self.on_event("note", change)
            source = self._source(resume_from)

    def _launch(self, held: HeldSlots, source: str | None) -> Ending:
        """Runs one launch to its end."""
        self.doing, argv, nodes = "trained", launch_argv(self.run, self.devices.num_processes, source), None
        if self.members:
            nodes = self.members.for_launch(source)
            others = ", ".join(str(number) for number in range(1, self.members.count))
            self.on_event("note", f"machine 0: waiting up to {nodes.timeout:g} s for the others to join: {others}")
        argv = bound_argv(argv) if self.bound else argv
        ending = supervise(
            self.run, argv, self.env, self.on_event, self.signals, descriptors=held.descriptors, nodes=nodes
        )
        self.lost = nodes.lost() if nodes else ""
        return ending

    def _note_restart(self, which: str, cause: str) -> None:
        come_from = last_checkpoint(self.run) or "the beginning"
        self.on_event("note", f"restart {which}, from {come_from}, after: {cause}")

    def _step(self) -> int:
        """The latest step that the last attempt is known to have reached."""
        beats = [read_json(path) or {} for path in self.run.heartbeats.glob("rank-*.json")]
        steps = [entry.get("step") for entry in [self.run.read_state() or {}, *beats]]
        return max((step for step in steps if isinstance(step, int)), default=0)


class _Members:
    """The machines of a run over all of its launches, as machine 0 sees them.

    Args:
        run: the run, with the files of all its machines.
        devices: its devices.
        machines: its machines.
        env: the launcher's environment on machine 0.
    """

    def __init__(self, run: RunFolder, devices: Devices, machines: Machines, env: Mapping[str, str]):
        self.run, self.machines, self.count, self.env = run, machines, machines.count, env
        self.is_elastic, self.launched = machines.minimum is not None, False
        config = Request(config=str(run.config)).resolve()
        self.layouts = Layouts(config, load_strategy(str(run.accelerate)), devices)
        self.pulses = Pulses(run, range(1, machines.count))

    def read_micro_batches(self) -> None:
        """Takes over the micro-batches of the config, which `smaller_batch` has changed."""
        config = Request(config=str(self.run.config)).resolve()
        self.layouts.config = config

    def write_files(self, count: int) -> None:
        """Writes config and Accelerate file of the run on so many machines."""
        config, strategy = self.layouts.on(count)
        write_atomic(self.run.config, dump_yaml(config))
        write_atomic(self.run.accelerate, strategy.dump())

    def for_launch(self, source: str | None) -> Nodes:
        """The other machines during a launch that resumes from `source`."""
        timeout = JOIN_TIMEOUT if self.launched else FIRST_JOIN_TIMEOUT

        def prepare(participants: list[int]) -> list[str]:
            if self.is_elastic:
                self.write_files(len(participants))
            processes = self.layouts.devices.local_processes * len(participants)
            return launch_argv(self.run, processes, source, part_of(self.machines, participants), timeout)

        links = Links(self.machines, self.env)
        nodes = Nodes(
            self.run, self.machines, source, timeout, self.launched, self.layouts, self.pulses, links, prepare
        )
        self.launched = True
        return nodes
