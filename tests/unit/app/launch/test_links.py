"""Machines that check each other before their ranks start: members and machine 0 in one process, on loopback."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from app.launch import network, probes
from app.launch.links import Arrival, Links
from app.launch.network import Interface, interface_problem, interface_variables, own_interface
from app.launch.probes import Responder, clock_of
from tests.detached import until
from tests.launching import free_port
from trainers.strategy.strategy import Machines

LAUNCH = "2026-01-01T00:00:00"
KNOWN = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2"], "eth1": ["10.1.0.2"], "docker0": ["172.17.0.1"]}


# -- interfaces --------------------------------------------------------------------------------------------------------


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: KNOWN)


@pytest.mark.usefixtures("interfaces")
@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, None),
        ({"GLOO_SOCKET_IFNAME": ""}, None),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, None),
        ({"NCCL_SOCKET_IFNAME": "eth"}, None),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, None),
        ({"GLOO_SOCKET_IFNAME": "eth"}, "GLOO_SOCKET_IFNAME=eth names no network interface"),
        ({"GLOO_SOCKET_IFNAME": "eth0,eth7"}, "GLOO_SOCKET_IFNAME=eth0,eth7 names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, "NCCL_SOCKET_IFNAME==eth names no network interface"),
        ({"NCCL_SOCKET_IFNAME": "ib"}, "NCCL_SOCKET_IFNAME=ib names no network interface"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "GLOO_SOCKET_IFNAME=lo has no address that other machines can reach"),
    ],
)
def test_an_interface_that_is_named(variables: dict[str, str], problem: str | None) -> None:
    found = interface_problem(Machines(2, 1, "10.0.0.1", 29500), variables)
    assert (found or "").partition("; ")[0].startswith(problem or "")
    assert (found is None) == (problem is None)
    if found:
        assert "eth0 (10.0.0.2), eth1 (10.1.0.2), docker0 (172.17.0.1); or leave it unset" in found
    assert interface_problem(Machines(2, 1, "127.0.0.1", 29500), {"GLOO_SOCKET_IFNAME": "lo"}) is None


@pytest.mark.usefixtures("interfaces")
def test_the_interface_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(2, 1, "node0", 29500)
    monkeypatch.setattr(network, "route_to", lambda host: Interface("eth0", "10.0.0.2"))
    assert own_interface(machines, {}) == Interface("eth0", "10.0.0.2")
    assert own_interface(machines, {"NCCL_SOCKET_IFNAME": "^eth0"}) == Interface("eth0", "10.0.0.2")
    assert own_interface(machines, {"NCCL_SOCKET_IFNAME": "eth1"}) == Interface("eth1", "10.1.0.2")
    monkeypatch.setattr(network, "route_to", lambda host: Interface("lo", "127.0.0.1"))
    assert own_interface(machines, {}) is None, "node0 is 127.0.1.1 on machine 0 itself"
    assert own_interface(machines, {}, "::ffff:10.1.0.2") == Interface("eth1", "10.1.0.2"), "where others reach it"


def test_the_variables_of_the_ranks() -> None:
    eth0 = Interface("eth0", "10.0.0.2")
    assert interface_variables(eth0, {}) == dict.fromkeys(network.VARIABLES, "eth0")
    assert "NCCL_SOCKET_IFNAME" not in interface_variables(eth0, {"NCCL_SOCKET_IFNAME": "eth1"}), "a user's stays"
    assert interface_variables(Interface("lo", "127.0.0.1"), {}) == {}, "all machines are one"
    assert interface_variables(None, {}) == {}


# -- connections -------------------------------------------------------------------------------------------------------


class Pair:
    """Machine 0 and a member of a run on loopback."""

    def __init__(self) -> None:
        self.machines = Machines(2, 0, "127.0.0.1", free_port())
        self.links = Links(self.machines, {})
        self.links.open(LAUNCH)

    def arrive(self, **variables: str) -> Arrival:
        arrival = Arrival(Machines(2, 1, "127.0.0.1", self.machines.port), variables, LAUNCH, self.links.notice())
        arrival.check()
        return arrival

    def look(self, facts: Any) -> None:
        """Waits for what machine 0 finds out about the member."""
        until(lambda: self.links.look(facts) or not self.links.pending(facts), 30)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    with closing(pair.links):
        yield pair


def test_a_healthy_pair(pair: Pair) -> None:
    assert pair.links.open_port() is None
    with closing(pair.arrive()) as arrival:
        facts = {1: json.loads(json.dumps(arrival.facts))}
        pair.look(facts)
        assert arrival.problem is None
        assert (pair.links.cut_off(facts), pair.links.refusals(facts), pair.links.warnings(facts)) == ({}, {}, [])
    port = pair.machines.port
    assert pair.links.lines(facts) == [
        f"machine 0: 127.0.0.1 on lo, port {port}", "machine 1: 127.0.0.1 on lo to machine 0 at 127.0.0.1"
    ]  # fmt: skip


def test_the_port_is_free_for_the_ranks_afterwards(pair: Pair) -> None:
    pair.links.open_port()
    pair.arrive().close()
    pair.links.close()
    with socket.socket() as ranks:
        ranks.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ranks.bind(("", pair.machines.port))
    pair.links.responders = []


def test_a_port_that_another_program_has(pair: Pair) -> None:
    with socket.create_server(("", pair.machines.port)) as other:
        assert "cannot be opened on machine 0: Address already in use; name a free" in str(pair.links.open_port())
        other.close()
        assert pair.links.open_port() is None, "it is tried again"


def test_a_member_that_reaches_another_program(pair: Pair) -> None:
    with closing(Responder("another launch", pair.machines.port)), closing(pair.arrive()) as arrival:
        assert "it cannot reach machine 0 at 127.0.0.1:" in str(arrival.problem)
        assert "(another program answers there); open port" in str(arrival.problem)
    with closing(Responder(LAUNCH)) as responder:
        assert abs(clock_of("127.0.0.1", responder.port, LAUNCH)[0]) < 1


def test_a_member_that_cannot_be_reached(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.links.open_port()
    monkeypatch.setattr(probes, "PROBE_AGAIN", 0.0)
    arrival = pair.arrive()
    facts = {1: arrival.facts}
    arrival.close()
    pair.look(facts)
    (reason,) = pair.links.cut_off(facts).values()
    assert f"machine 0 cannot reach it at 127.0.0.1:{arrival.facts['port']} (connection refused, as by a" in reason
    with closing(Responder(LAUNCH, arrival.facts["port"])):
        until(lambda: pair.links.look(facts) or not pair.links.cut_off(facts), 30)


def test_members_that_try_each_other(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each at the port that the other has reported to machine 0."""
    pair.links.open_port()
    monkeypatch.setattr(probes, "PROBE_AGAIN", 0.0)
    first, second = pair.arrive(), pair.arrive()
    second.machines = Machines(3, 2, "127.0.0.1", pair.machines.port)
    facts = {1: first.facts, 2: second.facts}
    pair.links.look(facts)
    assert pair.links.pending(facts) >= {1, 2}
    notice = json.loads(json.dumps(pair.links.notice()))
    with closing(first):
        with closing(second):
            until(lambda: first.look(notice) == [], 30)
            until(lambda: second.look(notice) == [], 30)
            assert first.look(notice) is None, "nothing new"
            facts = json.loads(json.dumps({"1": first.facts, "2": second.facts}))
            facts = {int(machine): known for machine, known in facts.items()}
            pair.look(facts)
            assert (pair.links.blocked(facts), list(facts[1]["links"]), list(facts[2]["links"])) == ({}, ["2"], ["1"])
        port = second.facts["port"]
        again = Arrival(first.machines, {}, LAUNCH, notice)
        with closing(again):
            until(lambda: bool(problems := again.look(notice)) and "refused" in problems[0], 30)
            assert list(pair.links.blocked({1: again.facts, 2: second.facts})) == [2]
            with closing(Responder(LAUNCH, port)):
                until(lambda: again.look(notice) == [], 30)
            assert pair.links.blocked({1: again.facts, 2: second.facts}) == {}


# -- versions and clocks -----------------------------------------------------------------------------------------------


def test_other_versions(pair: Pair) -> None:
    own = {**pair.links.own, "python": "3.11.2"}
    pair.links.own = own
    changed = {"torch": "1.0", "peft": "0.1"}
    facts = {1: {"versions": {**own, **changed}}, 2: {"versions": {**own, "python": "3.12.2"}}, 3: {"versions": own}}
    refusals = pair.links.refusals(facts)
    assert refusals[1] == (
        f"it has torch 1.0, and machine 0 {own['torch']}; install the same versions on all machines; `pip freeze` on "
        "one lists them"
    )
    assert refusals[2].startswith("it has python 3.12.2, and machine 0 3.11.2")
    assert list(refusals) == [1, 2]
    facts = {1: {"versions": {**own, "peft": "0.1", "python": "3.11.9"}}}
    assert pair.links.refusals(facts) == {}
    (warning,) = pair.links.warnings(facts)
    assert warning.startswith(f"warning: machine 1: it has peft 0.1, and machine 0 {own['peft']}; it has python 3.11.9")


@pytest.mark.parametrize(("offset", "expected"), [(90.0, "90.0 s behind"), (-90.0, "90.0 s ahead of"), (1.1, "")])
def test_clocks(offset: float, expected: str, pair: Pair) -> None:
    lines = pair.links.warnings({1: {"clock": [offset, 0.2]}})
    assert [f"warning: machine 1 is {expected} machine 0, so the lines of the log are" in line for line in lines] == (
        [True] if expected else []
    )
