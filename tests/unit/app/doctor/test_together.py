"""Machines that exchange facts: threads on loopback, each of which is a machine."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.doctor import exchange
from app.doctor.exchange import Exchange, Unreachable, meet
from app.doctor.together import clocks, connections, same_versions, shared_folder, together
from app.launch.network import Interface
from tests.launching import free_port
from trainers.strategy.strategy import Machines


def plain_line(connection: socket.socket) -> exchange._Line:
    """A line over a connection that need not be of TCP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "setsockopt", lambda *values: None)
        return exchange._Line(connection, 1)


def at_once(count: int, act: Any, timeout: float = 10.0, ranks: tuple[int, ...] | None = None) -> list[Any]:
    """What each machine returned or raised."""
    port = free_port()

    def on(rank: int) -> Any:
        try:
            with meet(Machines(count, rank, "127.0.0.1", port), timeout) as line:
                return act(line)
        except Unreachable as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(on, range(count) if ranks is None else ranks))


def test_all_get_what_each_has() -> None:
    assert at_once(3, lambda line: line.gather(line.machines.rank * 10)) == [[0, 10, 20]] * 3


def test_a_sound_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.doctor.together.versions", lambda: {"torch": "2.13.0"})
    reports = at_once(3, lambda line: together(line, tmp_path / "runs", {}))
    assert reports[0] == reports[1] == reports[2]
    assert [check.passed for check in reports[0]] == [True] * 5
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_machine_that_does_not_come() -> None:
    (lost,) = at_once(3, lambda line: None, 0.3, ranks=(0,))
    assert lost.problem.startswith("machines 1, 2 did not reach port ")
    (late,) = at_once(3, lambda line: None, 0.3, ranks=(1,))
    assert late.problem.startswith("machine 1 could not reach machine 0 at 127.0.0.1:")
    assert "connection refused" in late.problem
    first, second = at_once(3, lambda line: None, 0.5, ranks=(0, 1))
    assert first.problem.startswith("machine 2 did not reach port ")
    assert second.problem.endswith("but not all machines came")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unreachable, match=f"port {port} cannot be opened on machine 0: Address already in use"):
            meet(Machines(2, 0, "127.0.0.1", port), 1.0).__enter__()


def test_two_machines_with_one_rank() -> None:
    results = at_once(3, lambda line: None, 1.0, ranks=(0, 1, 1))
    texts = sorted(str(result) for result in results)
    assert texts[0] == "machine 0 refused machine 1: another machine has --machine_rank 1 too"


def test_strangers_are_hung_up_on() -> None:
    """What is no JSON, no greeting, and no rank, too deep or too long; then the machine that is meant comes."""
    greeting = b'{"hello": "tunesmith doctor", "rank": %b}\n'
    port, ready = free_port(), threading.Event()

    def knock() -> None:
        deep, spaces = b"[" * 200_000 + b"\n", b" " * 2_000
        for line in (b"GET / HTTP/1.1\r\n\r\n", b"[1, 2]\n", deep, greeting % b'"x"', greeting % b"1e999", spaces):
            while True:
                try:
                    stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
                    break
                except ConnectionRefusedError:
                    continue
            answer = b""
            with contextlib.suppress(ConnectionError):  # hung up on before all is sent or read
                stranger.sendall(line)
                answer = stranger.recv(100)
            assert answer == b""
            stranger.close()
        ready.set()

    def machine(rank: int) -> Any:
        if rank:
            assert ready.wait(10)
        with meet(Machines(2, rank, "127.0.0.1", port), 10.0) as line:
            return line.gather(rank)

    with ThreadPoolExecutor(3) as pool:
        knocking, first, second = pool.submit(knock), pool.submit(machine, 0), pool.submit(machine, 1)
        assert (first.result(), second.result(), knocking.result()) == ([0, 1], [0, 1], None)


def test_a_line_that_is_too_deep_to_read() -> None:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(plain_line(ours)) as line:
        theirs.sendall(b"[" * 20_000 + b"\n")
        with pytest.raises(Unreachable, match="has ended"):
            line.receive(5.0)


def test_a_line_that_drips_in_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes in time, and the line does not."""
    ours, theirs = socket.socketpair()
    now, receive = [0.0], exchange.socket.socket.recv
    with theirs, contextlib.closing(plain_line(ours)) as line:
        theirs.sendall(b"[" * 50)

        def drip(connection: socket.socket, most: int) -> bytes:
            now[0] += 1.0
            return receive(connection, 1)

        monkeypatch.setattr(exchange.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(exchange.socket.socket, "recv", drip)
        with pytest.raises(Unreachable, match="did not answer in time"):
            line.receive(3.0)
    assert now == [3.0]


def test_a_machine_that_ends_early_is_named() -> None:
    def act(line: Exchange) -> Any:
        return None if line.machines.rank else line.gather("here")

    assert at_once(2, act)[0].problem == "machine 1 has ended its doctor"


def test_the_version_that_differs_is_named_with_its_machine() -> None:
    usual = {"torch": "2.13.0", "tunesmith": "0.1.0 (abc)"}
    assert same_versions([usual, usual]).passed is True
    assert same_versions([usual, {**usual, "torch": "2.12.0"}]).value == (
        "machine 1 has torch 2.12.0, and machine 0 2.13.0"
    )
    three = same_versions([{**usual, "tunesmith": "0.1.0 (abd)"}, usual, usual])
    assert three.value == "machine 0 has tunesmith 0.1.0 (abd), and the others 0.1.0 (abc)"
    assert "deepspeed not installed" in same_versions([{**usual, "deepspeed": "1"}, usual]).value


@pytest.mark.parametrize(("shift", "passed"), [(0.0, True), (0.5, True), (30.0, False), (-30.0, False)])
def test_clocks(shift: float, passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine 1 is known by its thread."""
    machine_of, true_time = threading.local(), exchange.time.time
    monkeypatch.setattr(exchange.time, "time", lambda: true_time() + getattr(machine_of, "shift", 0.0))

    def act(line: Exchange) -> Any:
        machine_of.shift = shift if line.machines.rank == 1 else 0.0
        return clocks(line)

    first, second = at_once(2, act)
    assert first == second
    assert first.passed is passed
    if not passed:
        assert first.value == f"machine 1 is 30.0 s {'ahead of' if shift > 0 else 'behind'} machine 0"


def test_folders_at_different_paths(tmp_path: Path) -> None:
    first, _ = at_once(2, lambda line: shared_folder(line, tmp_path / str(line.machines.rank)))
    assert first.passed is False
    assert f"machine 0 has {tmp_path}/0, machine 1 has {tmp_path}/1" in first.value


def test_an_address_that_nobody_has() -> None:
    interface = {0: Interface("lo", "127.0.0.1"), 1: None}
    first, _ = at_once(2, lambda line: connections(line, interface[line.machines.rank]))
    assert first.value == "machine 1 has no address for the others"
    assert json.loads(json.dumps(first.as_json()))["passed"] is False
