"""How the machines of a `doctor` exchange facts: JSON lines over one connection from each machine to machine 0.

Free of torch, so that it also works between machines whose versions differ. The connections stay open while the ranks
run; only the listening port is given up, as the ranks meet there.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

from app.launch.network import why_unreachable
from trainers.strategy.strategy import Machines

MOST_BYTES, MOST_HELLO = 64 * 2**20, 1024
HELLO_SECONDS = 5.0
PINGS = 8
HELLO = "tunesmith doctor"


class Unreachable(Exception):
    """The machines do not come together.

    Args:
        problem: which machine cannot reach which, and why.
        remedy: how to mend it.
    """

    def __init__(self, problem: str, remedy: str):
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


class _Line:
    """A connection that carries JSON lines.

    Args:
        connection: the connected socket.
        machine: the machine at its other end.
    """

    def __init__(self, connection: socket.socket, machine: int):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.machine, self.unread = connection, machine, bytearray()

    def send(self, value: Any) -> None:
        """Sends a value.

        Raises:
            Unreachable: if the other machine is gone.
        """
        try:
            self.socket.sendall(json.dumps(value).encode() + b"\n")
        except OSError as error:
            raise self._lost(error) from None

    def receive(self, timeout: float, most: int = MOST_BYTES) -> Any:
        """Receives a value of at most `most` bytes within `timeout` seconds, however its parts drip in.

        Raises:
            Unreachable: if none comes.
        """
        try:
            return json.loads(self._read_line(time.monotonic() + timeout, most))
        except (OSError, ValueError, RecursionError) as error:
            raise self._lost(error) from None

    def _read_line(self, deadline: float, most: int) -> bytes:
        patience, seen = self.socket.gettimeout(), 0
        try:
            while (end := self.unread.find(b"\n", seen)) < 0:
                seen = len(self.unread)
                if seen >= most:
                    raise ValueError(f"a line of more than {most} bytes")
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                self.socket.settimeout(left)
                data = self.socket.recv(min(most - seen, 2**16))
                if not data:
                    raise ConnectionResetError
                self.unread += data
        finally:
            self.socket.settimeout(patience)  # the time left is no limit for the next value sent
        line = bytes(self.unread[:end])
        del self.unread[: end + 1]
        return line

    def _lost(self, error: Exception) -> Unreachable:
        why = "did not answer in time" if isinstance(error, TimeoutError) else "has ended its doctor"
        return Unreachable(f"machine {self.machine} {why}", "look at its output, and start the command on each again")

    def close(self) -> None:
        """Closes the connection."""
        self.socket.close()


class Exchange:
    """Connections of this machine: to all others on machine 0, to machine 0 on the others.

    Args:
        machines: the machines.
        lines: the connections, by machine.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, machines: Machines, lines: dict[int, _Line], timeout: float):
        self.machines, self.lines, self.timeout = machines, lines, timeout

    def own_address(self) -> str:
        """The address of this machine on its connection to another."""
        line = next(iter(self.lines.values()))
        return str(line.socket.getsockname()[0])

    def gather(self, value: Any, timeout: float | None = None) -> list[Any]:
        """The value of each machine, in order; the same list on all of them.

        Args:
            value: this machine's value.
            timeout: seconds to wait for the slowest machine; default: the exchange's.

        Raises:
            Unreachable: if a machine is gone.
        """
        limit = timeout or self.timeout
        if self.machines.rank:
            self.lines[0].send(value)
            return list(self.lines[0].receive(limit + 5.0))
        values = [value, *(self.lines[rank].receive(limit) for rank in range(1, self.machines.count))]
        for line in self.lines.values():
            line.send(values)
        return values

    def clock_offset(self) -> tuple[float, float]:
        """How far machine 0's clock is ahead of this one's, and the uncertainty, in seconds.

        Its answer is taken to have been given half-way through the quickest round trip.
        """
        if self.machines.rank == 0:
            for rank in range(1, self.machines.count):
                for _ in range(PINGS):
                    self.lines[rank].receive(self.timeout)
                    self.lines[rank].send(time.time())
            return 0.0, 0.0
        best = (0.0, float("inf"))
        for _ in range(PINGS):
            sent, start = time.time(), time.perf_counter()
            self.lines[0].send("time")
            there = self.lines[0].receive(self.timeout * self.machines.count)
            half = (time.perf_counter() - start) / 2
            best = min(best, (float(there) - sent - half, half), key=lambda sample: sample[1])
        return best


@contextlib.contextmanager
def meet(machines: Machines, timeout: float) -> Iterator[Exchange]:
    """Connects all machines.

    Args:
        machines: the machines, as seen from this one.
        timeout: seconds that all have to come.

    Raises:
        Unreachable: if they do not.
    """
    lines = _listen(machines, timeout) if machines.rank == 0 else {0: _call(machines, timeout)}
    try:
        yield Exchange(machines, lines, timeout)
    finally:
        for line in lines.values():
            line.close()


def _listen(machines: Machines, timeout: float) -> dict[int, _Line]:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        server = socket.create_server(("", machines.port), family=family, dualstack_ipv6=family == socket.AF_INET6,
                                      backlog=machines.count)  # fmt: skip
    except OSError as error:
        problem = f"port {machines.port} cannot be opened on machine 0: {error.strerror or error}"
        raise Unreachable(problem, "name a free one with --main_process_port, on every machine") from None
    lines: dict[int, _Line] = {}
    deadline = time.monotonic() + timeout
    with server:
        while missing := [rank for rank in range(1, machines.count) if rank not in lines]:
            try:
                if (left := deadline - time.monotonic()) <= 0:  # accept would go on as long as strangers knock
                    raise TimeoutError
                server.settimeout(left)
                connection, _ = server.accept()
            except TimeoutError:
                for line in lines.values():
                    line.close()
                absent = f"machine{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                problem = f"{absent} did not reach port {machines.port} of machine 0 within {timeout:g} s"
                remedy = "start the same command there with its --machine_rank; open the port in the firewall"
                raise Unreachable(problem, remedy) from None
            connection.settimeout(timeout)
            _admit(connection, machines, lines, min(HELLO_SECONDS, max(0.1, deadline - time.monotonic())))
    for line in lines.values():
        line.send("welcome")
    return lines


def _admit(connection: socket.socket, machines: Machines, lines: dict[int, _Line], timeout: float) -> None:
    """Adds a connection to `lines`, or answers why not; strangers are hung up on, after `timeout` seconds at most."""
    line = _Line(connection, -1)
    try:
        hello = line.receive(timeout, MOST_HELLO)
        if not isinstance(hello, dict) or hello.get("hello") != HELLO:
            raise Unreachable("a stranger", "")
        rank, count = int(hello.get("rank", -1)), hello.get("count")
        refusal = ""
        if count != machines.count:
            refusal = f"it was started with --num_machines {count}, and machine 0 with {machines.count}"
        elif rank in lines or rank not in range(1, machines.count):
            refusal = f"another machine has --machine_rank {rank} too"
        if refusal:
            line.send({"refused": refusal})
            raise Unreachable(refusal, "")
    except (Unreachable, TypeError, ValueError, OverflowError):  # the last one from a rank of 1e999
        line.close()
        return
    line.machine = rank
    lines[rank] = line


def _call(machines: Machines, timeout: float) -> _Line:
    """Connects to machine 0, which may start later.

    Raises:
        Unreachable: with the last reason.
    """
    deadline, label = time.monotonic() + timeout, f"machine 0 at {machines.ip}:{machines.port}"
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((machines.ip, machines.port), timeout=max(0.1, min(left, 5.0)))
            break
        except OSError as error:
            if left <= 0:
                why = why_unreachable(error, "so nothing listens there yet")
                problem = f"machine {machines.rank} could not reach {label} within {timeout:g} s: {why}"
                raise Unreachable(problem, "start the same command with --machine_rank 0 there, and open the port in "
                                  "its firewall") from None  # fmt: skip
            time.sleep(0.2)
    connection.settimeout(timeout)
    line = _Line(connection, 0)
    line.send({"hello": HELLO, "rank": machines.rank, "count": machines.count})
    try:
        answer = line.receive(timeout)
    except Unreachable:
        line.close()
        remedy = "another program may listen on that port; name a free one with --main_process_port on every machine"
        raise Unreachable(f"machine {machines.rank} reached {label}, but not all machines came", remedy) from None
    if isinstance(answer, dict):
        line.close()
        raise Unreachable(f"machine 0 refused machine {machines.rank}: {answer.get('refused')}",
                          "start the same command on each machine, each with its own --machine_rank")  # fmt: skip
    return line
