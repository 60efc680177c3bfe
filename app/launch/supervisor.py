"""Supervises one launch: starts the launcher, waits for its last process to exit, and determines how it ended.

The supervisor writes the state file before the launch and after all processes have exited; in between, rank 0 writes
it. Success is decided by the `ending` that rank 0 recorded there, never by an exit status: the launcher exits with 1
after a clean stop as well as after a crash.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from app.launch.exit_cause import cause_of, root_cause
from app.launch.nodes import LINGER, Nodes
from app.launch.process_tree import Descendants, adopting_orphans
from app.runs.machines import LOST_AFTER
from app.runs.runs import saved_step
from trainers.run.ending import Ending
from trainers.run.folder import Process, RunFolder, log_line, now, read_json, secrets_in
from trainers.run.import_path import WORKING_FOLDER

POLL = 0.2
LOOK = 2.0
"""Seconds between two scans for new descendants; each scan reads every process of the machine."""
EXIT_TIMEOUT = 10.0
"""Seconds that the ranks have to exit on their own after their launcher has exited."""
TEARDOWN_TIMEOUT = 30.0
"""Seconds that the processes have to exit after rank 0 has recorded an ending."""
TERM_TIMEOUT = 10.0
"""Seconds between SIGTERM and SIGKILL for the remaining processes."""
MAX_LINE = 65536

Listener = Callable[[str, str], None]
"""Callback, called several times a second with `("tick", "")`, and with `("note", line)` to inform the user."""
STOP_NOTES = ("stopping: the ranks save first", "already stopping: the ranks are saving")
"""Notes for the first stop signal and for further ones."""


class RunSignals:
    """Context manager that records stop signals and SIGUSR1 (save), and restores the previous handlers on exit.

    Outside the main thread, which alone may set handlers, it does nothing.
    """

    WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.handled = 0
        self.old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> RunSignals:
        if threading.current_thread() is threading.main_thread():
            self.old = {number: signal.signal(number, self._note) for number in self.WATCHED}
        return self

    def _note(self, number: int, frame: object) -> None:
        self.seen.append(number)

    def __exit__(self, *error: object) -> None:
        for number, handler in self.old.items():
            signal.signal(number, handler)

    def pass_on(self, run: RunFolder, on_event: Listener) -> None:
        """Turns signals received since the last call into stop and save requests of the run."""
        fresh, earlier = self.seen[self.handled :], self.seen[: self.handled]
        self.handled += len(fresh)
        if run.lost():
            return  # no one can answer a request; `Supervision` ends the processes
        if signal.SIGUSR1 in fresh:
            run.ask_save()
            on_event("note", "save requested: the ranks save after their current step and continue")
        if any(number != signal.SIGUSR1 for number in fresh):
            run.ask_stop()
            again = any(number != signal.SIGUSR1 for number in earlier)
            on_event("note", STOP_NOTES[again])


def supervise(
    run: RunFolder,
    argv: Sequence[str],
    env: Mapping[str, str],
    on_event: Listener,
    signals: RunSignals,
    grace: float = 60.0,
    descriptors: Sequence[int] = (),
    nodes: Nodes | None = None,
) -> Ending:
    """Runs one launch to its end and terminates any remaining processes.

    Args:
        run: the run folder, with its config written. The caller holds it (`RunFolder.hold`), so that no other process
            can replace the config.
        argv: the launcher's command.
        env: its complete environment.
        on_event: receives progress events.
        signals: an entered `RunSignals`; received signals ask the ranks to save, or to save and stop.
        grace: seconds that the ranks have to exit after a stop request; restarted whenever a heartbeat advances.
        descriptors: file descriptors that the launcher inherits.
        nodes: the other machines of the run; None for a single machine.

    Returns:
        How the launch ended. It is not published yet, and no process of the launch is alive.
    """
    with adopting_orphans():
        return Supervision(run, argv, env, on_event, grace, signals, descriptors, nodes).go()


class Supervision:
    """One launch; see `supervise` for the arguments."""

    mark = ""
    """Prefix of the launcher's lines in the log."""

    def __init__(
        self,
        run: RunFolder,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_event: Listener,
        grace: float,
        signals: RunSignals,
        descriptors: Sequence[int],
        nodes: Nodes | None = None,
    ):
        self.nodes, self.began = nodes, time.monotonic()
        self.run, self.argv, self.env, self.descriptors = run, argv, env, descriptors
        self.on_event, self.grace, self.signals = on_event, grace, signals
        self.descendants = Descendants()
        self.stop_at: float | None = None
        self.exit_at: float | None = None
        self.end_at: float | None = None
        self.beat: tuple[Any, ...] = ()
        self.beat_at = 0.0
        self.log_start = run.log.stat().st_size if run.log.exists() else 0
        self.overdue, self.look_at = False, 0.0
        self.exit_status = 1

    def go(self) -> Ending:
        """Launches and waits; returns how the launch ended."""
        self._announce()
        if self.nodes and (ending := self._gather(self.nodes)):
            self._dismiss()
            return ending
        # The launcher has no handler for SIGUSR1 and would be killed by it, so it inherits the signal blocked (the
        # ranks unblock it). This process unblocks it again below.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        # For DeepSpeed, Accelerate puts the working folder on the import path of the ranks, so the launcher gets one
        # without user files; the ranks go back, unless it is gone.
        env = dict(self.env)
        with contextlib.suppress(OSError):
            env[WORKING_FOLDER] = os.getcwd()
        try:
            launcher = subprocess.Popen(
                list(self.argv), env=env, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=self.descriptors,
                cwd=self.run.heartbeats,
            )  # fmt: skip
        except OSError as error:
            return Ending("failed", f"the launcher could not be started: {error.strerror}", retry="again")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.descendants.waited_for = launcher.pid
        reader = threading.Thread(target=self._copy_log, args=(launcher.stdout,), daemon=True)
        reader.start()
        try:
            self._name(launcher)
            while not self._over(launcher):
                self.signals.pass_on(self.run, self.on_event)
                self.on_event("tick", "")
                time.sleep(POLL)
        finally:
            self.descendants.end(TERM_TIMEOUT)
            launcher.wait()
            reader.join(5.0)
            self._dismiss()
        self.on_event("tick", "")
        self.exit_status = launcher.returncode
        return self._ending()

    def _announce(self) -> None:
        """Writes the state `starting`, with this process, the number of the attempt and the step it starts from."""
        self.run.forget_last_attempt()
        before = self.run.read_state() or {}
        last = before.get("attempt")
        attempt, launch = (last if isinstance(last, int) else 0) + bool(before.get("launched_at")), now()
        self.run.write_state(
            state="starting", cause=None, ending=None, attempt=attempt, step=saved_step(self.run),
            processes=[Process.of("supervisor").as_json()],
            started_at=before.get("started_at") or launch, launched_at=launch, host=os.uname().nodename,
            export_dir=None, machines=self.nodes.announce(launch) if self.nodes else None,
        )  # fmt: skip

    def _gather(self, nodes: Nodes) -> Ending | None:
        """Waits for the other machines, and publishes which of them take part.

        Returns:
            How the launch ended if it does not begin.
        """
        announced = dict(nodes.links.members)
        with contextlib.closing(nodes.links):
            while (ending := nodes.gather(time.monotonic() - self.began)) is None and nodes.participants is None:
                self.signals.pass_on(self.run, self.on_event)
                self.run.refuse_lost()
                if self.run.stop_asked() is not None:
                    return Ending("stopped", "stopped before all machines had joined")
                if nodes.links.members != announced:  # the members connect to each other
                    announced = dict(nodes.links.members)
                    self.run.write_state(machines=nodes.notice(nodes.launch))
                self.on_event("tick", "")
                time.sleep(POLL)
        if nodes.participants is None:
            return ending
        self.argv, self.began = nodes.prepare(nodes.participants), time.monotonic()
        self.env = {**self.env, **nodes.links.variables()}
        for line in nodes.lines():
            self.on_event("note", line)
        self.run.write_state(machines=nodes.notice(nodes.launch))
        return None

    def _name(self, launcher: subprocess.Popen[bytes]) -> None:
        """Adds the launcher to the state's processes, long before rank 0 does so after the rendezvous.

        Otherwise, if the supervisor were killed in between, the run would look dead and could be started twice.
        """
        processes = [Process.of("supervisor").as_json(), Process.of("launcher", pid=launcher.pid).as_json()]
        with contextlib.suppress(OSError):
            self.run.write_state(processes=processes)

    def _copy_log(self, pipe: IO[bytes]) -> None:
        """Appends the launcher's output to the log, line by line; runs in its own thread."""
        hidden = secrets_in(self.env)
        with pipe, open(self.run.log, "a", encoding="utf-8") as log:
            for line in iter(lambda: pipe.readline(MAX_LINE), b""):
                with contextlib.suppress(OSError):
                    log.write(log_line("launcher", self.mark + line.decode("utf-8", "replace"), hidden))
                    log.flush()

    def _over(self, launcher: subprocess.Popen[bytes]) -> bool:
        """Whether all processes have exited, or a deadline for the remaining ones has passed.

        `exit_at`, `end_at` and `stop_at` are the times at which the conditions behind the deadlines were first seen.
        """
        clock = time.monotonic()
        # Scan right away once the launcher has exited: its children may have started since the last scan.
        gone = launcher.poll() is not None
        if gone or clock >= self.look_at:
            self.look_at = clock + LOOK
            self.descendants.collect(self._named_processes())
        if gone:
            self.exit_at = self.exit_at or clock
            if not self.descendants.alive():
                return True
        ending = (self.run.read_state() or {}).get("ending")
        self.end_at = (self.end_at or clock) if ending else None
        if self.run.stop_asked() is not None:
            self.stop_at = self.stop_at or clock
        if self.run.lost():  # the run folder is gone: nothing can be saved any more
            self.exit_at = self.exit_at or clock
        self._feel_pulse(clock)
        if not ending and self._is_cut_off(clock):  # the ranks here would wait for those that are gone
            self.exit_at = self.exit_at or clock
        self.overdue = clock > self._deadline()
        return self.overdue

    def _is_cut_off(self, clock: float) -> bool:
        """Whether ranks of another machine are gone: their launcher has failed, or nobody there gives a sign of life.

        A machine is not lost as long as the ranks make progress, which they all do together.
        """
        if self.nodes is None:
            return False
        self.nodes.pulses.look()
        return self.nodes.crashed() or (self._stands_still(clock) and bool(self.nodes.lost()))

    def _stands_still(self, clock: float, seconds: float = LOST_AFTER) -> bool:
        """Whether no rank has made progress for so long."""
        return clock - max(self.began, self.beat_at) > seconds

    def _dismiss(self) -> None:
        """Tells the nodes that the launch is over, and waits up to `LINGER` seconds for their processes to exit."""
        if self.nodes is None:
            return
        with contextlib.suppress(OSError):
            self.run.write_state(machines=self.nodes.notice(self.nodes.launch, over=True))
        deadline = time.monotonic() + LINGER
        while not self.nodes.ended() and time.monotonic() < deadline:
            self.nodes.pulses.look()
            self.signals.pass_on(self.run, self.on_event)
            self.on_event("tick", "")
            time.sleep(POLL)

    def _deadline(self) -> float:
        """The monotonic time at which remaining processes are terminated; infinite while all is well."""
        limits = [float("inf")]
        if self.exit_at is not None:
            limits.append(self.exit_at + EXIT_TIMEOUT)
        if self.end_at is not None:
            limits.append(self.end_at + TEARDOWN_TIMEOUT)
        if self.stop_at is not None:
            limits.append(max(self.stop_at, self.beat_at) + self.grace)
        return min(limits)

    def _feel_pulse(self, clock: float) -> None:
        """Records when a rank last made progress: a heartbeat that is merely rewritten does not count."""
        files = (read_json(path) or {} for path in sorted(self.run.heartbeats.glob("rank-*.json")))
        beat = tuple((status.get("section"), status.get("step"), status.get("passed")) for status in files)
        if beat != self.beat:
            self.beat, self.beat_at = beat, clock

    def _named_processes(self) -> list[Process]:
        """The processes that the state lists; none with several machines, as pids of another one mean nothing here."""
        if (self.run.read_state() or {}).get("machines"):
            return []
        try:
            return self.run.processes()
        except (KeyError, TypeError, AttributeError):
            return []

    def _ending(self) -> Ending:
        """The ending that rank 0 recorded, or one derived from the log, the other machines and a stop request."""
        written = (self.run.read_state() or {}).get("ending")
        if isinstance(written, dict):
            ending = Ending.from_json(written)
            if ending.state != "failed":
                return ending
            # Rank 0 reports only the error it ran into itself; the log shows whether another rank failed first.
            known = ending.cause and root_cause(ending.cause, self.run, self.log_start)
            cause = known or cause_of(self.run, self.log_start, self.exit_status)
            lost = ending.retry == "again" and self.nodes and self.nodes.lost()
            return replace(ending, cause=f"{lost} ({cause})" if lost else cause)
        # Rank 0 recorded nothing: in order of certainty, a lost machine, ranks that ignored a stop request, and what
        # the log shows.
        if self.nodes and (lost := self.nodes.lost()):
            return Ending("failed", lost, retry="again")
        if self.stop_at is not None and self.overdue:
            cause = f"the ranks did not end within {self.grace:g} s of the stop request and were ended"
            return Ending("stopped", cause)
        if_stopped = "stopped by request before its ranks could save" * (self.stop_at is not None)
        cause = cause_of(self.run, self.log_start, self.exit_status, if_stopped)
        return Ending("stopped", cause) if cause == if_stopped else Ending("failed", cause, retry="again")
