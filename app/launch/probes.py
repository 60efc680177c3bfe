"""Connections between the machines of a run: what answers them, and attempts to reach others in the background."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from app.launch.network import why_unreachable
from trainers.strategy.strategy import Machines

PROBE_TIMEOUT = 5.0
"""Seconds that a machine tries to reach another."""
PROBE_AFTER = 5.0
"""Seconds without progress after which a machine looks whether it still reaches machine 0."""
PROBE_AGAIN = 2.0
"""Seconds until it tries again."""
_MAX_LINE = 1024

Target = tuple[str, int]
"""Address and port at which a machine answers."""


class Responder:
    """Answers on a port until it is closed.

    Args:
        launch: the launch to tell about.
        port: the port; 0 for one that the system chooses.

    Raises:
        OSError: if the port cannot be opened.
    """

    def __init__(self, launch: str, port: int = 0):
        self.launch = launch
        self.reached_at: str | None = None
        """The address of this machine to which another has connected."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self.server = socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=128
        )
        self.port = int(self.server.getsockname()[1])
        self.waker, self.woken = socket.socketpair()
        self.thread = threading.Thread(target=self._answer, name="responder", daemon=True)
        self.thread.start()

    def _answer(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.server, selectors.EVENT_READ)
            selector.register(self.woken, selectors.EVENT_READ)
            while all(key.fileobj is self.server for key, _ in selector.select()):
                with contextlib.suppress(OSError):
                    connection, _ = self.server.accept()
                    with connection:
                        connection.settimeout(PROBE_TIMEOUT)
                        answer = {"launch": self.launch, "time": time.time()}
                        connection.sendall(json.dumps(answer).encode() + b"\n")
                        self.reached_at = str(connection.getsockname()[0])

    def close(self) -> None:
        """Gives the port up."""
        self.waker.close()
        self.thread.join()
        self.server.close()
        self.woken.close()


def clock_of(host: str, port: int, launch: str) -> tuple[float, float]:
    """How far the clock of another machine is ahead of this one's, and the uncertainty, in seconds.

    Args:
        host: its address or name.
        port: the port on which it answers.
        launch: the launch that it must be in.

    Raises:
        OSError: if it does not answer.
    """
    start = time.perf_counter()
    with socket.create_connection((host, port), PROBE_TIMEOUT) as connection, connection.makefile("rb") as stream:
        line = stream.readline(_MAX_LINE)
    spent = time.perf_counter() - start
    with contextlib.suppress(ValueError, TypeError, KeyError):
        answer = json.loads(line)
        if answer["launch"] == launch:
            return float(answer["time"]) - (time.time() - spent / 2), spent / 2
    raise OSError("another program answers there")


def unreachable(machines: Machines) -> str | None:
    """Why machine 0 cannot be reached from here; None if it can, even if nothing listens on its port any more."""
    try:
        socket.create_connection((machines.ip, machines.port), PROBE_TIMEOUT).close()
    except ConnectionRefusedError:
        return None
    except OSError as error:
        return f"it cannot reach machine 0 at {machines.ip}:{machines.port} ({why_unreachable(error, '')})"
    return None


class Probes:
    """Connections to other machines of a launch, in the background: one to each, and again where it has failed.

    Args:
        launch: the launch in which the others must be.
    """

    def __init__(self, launch: str):
        self.launch, self.pool = launch, ThreadPoolExecutor(16, "probes")
        self.probes: dict[int, _Probe] = {}

    def look(self, targets: Mapping[int, Target]) -> None:
        """Connects to machines that were not tried yet at this address, or that could not be reached a while ago."""
        for machine, target in targets.items():
            probe = self.probes.get(machine)
            if probe is None or probe.target != target or probe.is_due():
                last = probe.problem() if probe and probe.target == target else None
                self.probes[machine] = _Probe(self.pool.submit(clock_of, *target, self.launch), target, last)

    def pending(self) -> set[int]:
        """The machines of which it is not known yet whether they can be reached."""
        return {machine for machine, probe in self.probes.items() if not probe.future.done() and probe.last is None}

    def results(self) -> dict[int, tuple[Target, str | None]]:
        """Where each machine was tried, and why it cannot be reached there, or None; without those that are pending."""
        known = self.probes.keys() - self.pending()
        return {machine: (self.probes[machine].target, self.probes[machine].problem()) for machine in sorted(known)}

    def close(self) -> None:
        """Gives up what has not been tried."""
        self.pool.shutdown(wait=False, cancel_futures=True)


@dataclass
class _Probe:
    """An attempt to reach a member.

    Args:
        future: its result.
        target: the address and port.
        last: why the attempt before it failed; None without one.
    """

    future: Future[tuple[float, float]]
    target: tuple[str, int]
    last: str | None
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.monotonic()

    def problem(self) -> str | None:
        """Why the member cannot be reached: of the attempt before as long as this one runs."""
        if not self.future.done():
            return self.last
        if self.future.cancelled() or (error := self.future.exception()) is None:
            return None
        if not isinstance(error, OSError):
            raise error
        return f"{self.target[0]}:{self.target[1]} ({why_unreachable(error, 'as by a firewall')})"

    def is_due(self) -> bool:
        """Whether to try again, as it has failed a while ago."""
        return self.future.done() and bool(self.problem()) and time.monotonic() - self.began > PROBE_AGAIN
