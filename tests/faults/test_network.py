"""Machines with addresses of their own and a bad network: seen before the first step, or lived with."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.detached import saved, until
from tests.faults.conftest import Note, Undisturbed
from tests.faults.machines import Machines
from tests.faults.oracle import INTERVAL, OPTIONS, exact, rows, told
from tests.launching import ROOT
from tests.network import run, set_up
from tests.relay import Relay

long = pytest.mark.long
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*original)(clockid_t, struct timespec *);
    if (!original) original = dlsym(RTLD_NEXT, "clock_gettime");
    int result = original(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 90;
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}
"""
"""A library that puts a process's clock 90 s ahead. libfaketime 0.9.10 breaks Python's waits, which use sem_clockwait
and clock_nanosleep with absolute times."""
CUT = 10.0


class FarApart(Machines):
    """Two machines whose link is a relay."""

    relay: Relay

    def connect(self) -> None:
        names = (f"{self.mark}-a", f"{self.mark}-b")
        self.relay = Relay(names)
        for number, (machine, name) in enumerate(zip(self.names, names, strict=True)):
            run("ip", "link", "set", name, "netns", machine)
            run("ip", "-n", machine, "link", "set", name, "name", "eth0")
            run("ip", "-n", machine, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            run("ip", "-n", machine, "link", "set", "eth0", "up")

    def tear_down(self) -> None:
        super().tear_down()
        self.relay.kill()


@pytest.fixture
def far(home: Path) -> Iterator[FarApart]:
    net = FarApart(home, 2, **OPTIONS)
    with set_up(net):
        net.relay.order("delay 0.02 loss 0.01 seed 7")
        yield net


@pytest.fixture
def near(home: Path) -> Iterator[Machines]:
    net = Machines(home, 2, **OPTIONS, max_restarts=0)
    with set_up(net):
        yield net


@pytest.fixture
def three(home: Path) -> Iterator[Machines]:
    shorter = {"global_batch_size": 12, "per_device_train_batch_size": 4, "max_steps": 6}
    net = Machines(home, 3, **OPTIONS | shorter, max_restarts=0)
    with set_up(net):
        yield net


def hosts(net: Machines, machine: int, **names: str) -> None:
    """Gives a machine an `/etc/hosts` of its own."""
    path = net.home / f"hosts-{machine}"
    path.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items()))
    net.odd[machine] = f"mount --bind {path} /etc/hosts"


def log(net: Machines) -> str:
    return net.run.log.read_text() if net.run.log.exists() else ""


# -- during a run ------------------------------------------------------------------------------------------------------


@long
def test_a_far_and_lossy_link(far: FarApart, undisturbed: Undisturbed, noted: Note) -> None:
    """And Debian's host names; the log has the addresses and no fault."""
    uncut, fault = undisturbed("ddp"), noted("frames arrive 20 ms late, 1 % of them not at all", "ddp")
    hosts(far, 0, node0="127.0.1.1")
    hosts(far, 1, node1="127.0.1.1", node0=far.address(0))
    for machine in (1, 0):
        far.train(machine, main_process_ip="node0")
    fault.at()
    far.codes(0, 1)
    passed, dropped = far.relay.end()
    assert 0.002 * passed < dropped < 0.03 * passed
    assert rows(far.run)[-1]["elapsed_s"] > len(rows(far.run)) * 0.02, "each step waits for the link"
    exact(far.run, uncut, replays=0)
    fault.harmless(far.run)
    lines = [line.partition("[supervisor] ")[2] for line in log(far).splitlines() if "[supervisor] " in line]
    assert "machine 0: 10.87.0.10 on eth0, port 29500" in lines
    assert "machine 1: 10.87.0.11 on eth0 to machine 0 at 10.87.0.10" in lines
    assert [line for line in lines if re.search("warning|reach|restart", line)] == []


@long
def test_a_link_that_is_cut_for_ten_seconds(far: FarApart, undisturbed: Undisturbed, noted: Note) -> None:
    uncut, fault = undisturbed("ddp"), noted("the link between two machines is cut for 10 s", "ddp")
    for machine in (1, 0):
        far.train(machine, max_restarts=3)
    far.until_saved()
    far.relay.order("cut")
    began = time.monotonic()
    fault.at()
    until(lambda: "machine 1: it cannot reach machine 0 at 10.87.0.10:29500" in log(far), 60)
    until(lambda: time.monotonic() - began > CUT)
    far.relay.order("mend")
    far.codes(0, 1)
    exact(far.run, uncut, replays=INTERVAL)
    fault.harmless()
    assert "machine 1: it can reach machine 0 again" in log(far) or "restart 1 of 3" in log(far)


# -- before the first step ---------------------------------------------------------------------------------------------


def dropped(net: Machines, machine: int, *ports: str) -> None:
    """What arrives at ports of a machine gets no answer: by rules of routing, which are there without iptables."""
    net.on(machine, "ip", "rule", "add", "pref", "10", "lookup", "local")
    net.on(machine, "ip", "rule", "delete", "pref", "0")
    for pref, port in enumerate(ports, 1):
        arriving = ("iif", "eth0", "ipproto", "tcp", "dport", port)
        net.on(machine, "ip", "rule", "add", "pref", str(pref), *arriving, "blackhole")


def closed_port(net: Machines) -> None:
    dropped(net, 0, "29500")


def rejected_port(net: Machines) -> None:
    net.on(0, "iptables", "-A", "INPUT", "-p", "tcp", "--dport", "29500", "-j", "REJECT")


def other_ports(net: Machines) -> None:
    dropped(net, 0, "1-29499", "29501-65534")


def members_ports(net: Machines) -> None:
    net.on(1, "iptables", "-A", "INPUT", "-i", "eth0", "-p", "tcp", "--syn", "-j", "DROP")


def own_name(net: Machines) -> None:
    hosts(net, 1, node0="127.0.1.1")
    hosts(net, 0, node0="127.0.1.1")
    net.options["main_process_ip"] = "node0"


def no_interface(net: Machines) -> None:
    net.variables[1] = {"GLOO_SOCKET_IFNAME": "eth7"}


def loopback(net: Machines) -> None:
    net.variables[0] = {"GLOO_SOCKET_IFNAME": "lo"}


def dead_end(net: Machines) -> None:
    net.on(1, "ip", "link", "add", "eth1", "type", "veth", "peer", "name", "nowhere")
    net.on(1, "ip", "link", "set", "nowhere", "up")
    net.on(1, "ip", "address", "add", "10.88.0.11/24", "dev", "eth1")
    net.on(1, "ip", "link", "set", "eth1", "up")
    net.variables[1] = {"GLOO_SOCKET_IFNAME": "eth1"}


def other_version(package: str, number: str) -> Callable[[Machines], None]:
    def set_version(net: Machines) -> None:
        folder = net.home / "other" / f"{package}-{number}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n")
        net.variables[1] = {"PYTHONPATH": f"{net.home / 'other'}:{ROOT}"}

    return set_version


FAULTS: dict[str, tuple[Callable[[Machines], None], str]] = {
    "a port closed by DROP": (
        closed_port, r"machine 1: it cannot reach machine 0 at 10\.87\.0\.10:29500 from 10\.87\.0\.11 on eth0 \(no "
        r"answer, as from a firewall or a wrong address\); open port 29500 of machine 0 in its firewall"),
    "a port closed by REJECT": (
        rejected_port, r"machine 1: it cannot reach machine 0 at 10\.87\.0\.10:29500 from 10\.87\.0\.11 on eth0 "
        r"\(connection refused, as by a firewall\); open port 29500 of machine 0 in its firewall"),
    "only the port of the run open": (
        other_ports, r"machine 1: it cannot reach machine 0 at 10\.87\.0\.10:\d+ from .* open all ports between"),
    "ports of the member closed": (
        members_ports, r"machine 1: machine 0 cannot reach it at 10\.87\.0\.11:\d+ \(no answer.*; open all ports"),
    "the name of machine 0 is 127.0.1.1": (
        own_name, r"machine 1: main_process_ip=node0 resolves to 127\.0\.1\.1 here, which is this machine itself; "
        r"write machine 0's IP address"),
    "no such interface": (
        no_interface, r"machine 1: GLOO_SOCKET_IFNAME=eth7 names no network interface of this machine that is up; "
        r"name one that leads to the other machines: eth0 \(10\.87\.0\.11"),
    "the loopback interface": (
        loopback, r"machine 0: GLOO_SOCKET_IFNAME=lo has no address that other machines can reach; .* eth0 \("),
    "an interface that leads elsewhere": (
        dead_end, r"machine 1: machine 0 cannot reach it at 10\.88\.0\.11:\d+ \(.*name the network to use with "
        r"GLOO_SOCKET_IFNAME there"),
    "another torch": (
        other_version("torch", "2.99.1"), r"machine 1: it has torch 2\.99\.1, and machine 0 2\.\d+\.\d+; install the"),
    "another transformers": (
        other_version("transformers", "5.99.1"), r"machine 1: it has transformers 5\.99\.1, and machine 0 5\.\d+\.\d+"),
    "another Tunesmith": (
        other_version("tunesmith", "99.1"), r"machine 1: it has tunesmith 99\.1 \(\w+\), and machine 0 \S+ \(\w+\)"),
}  # fmt: skip
OFTEN = ("another torch", "a port closed by DROP")


@pytest.mark.parametrize("name", [name if name in OFTEN else pytest.param(name, marks=long) for name in FAULTS])
def test_what_would_only_hang_is_refused_with_the_remedy(name: str, near: Machines) -> None:
    cause, expected = FAULTS[name]
    try:
        cause(near)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot be caused here: {error}")
    for machine in (1, 0):
        near.train(machine)
    codes = {machine: near.typed[machine].wait(300) for machine in (0, 1)}
    assert codes[0] == 1, near.printed()
    assert codes[1] in (1, 2), "it ends with the run, or is refused"
    assert re.match(expected, told(near.run)), told(near.run)
    assert saved(near.run) == 0
    assert "[rank " not in log(near), "no rank was started"
    assert re.search(expected.partition(": ")[2].partition("machine 0 cannot")[0], near.printed())


def cut_between(net: Machines, machine: int, other: int) -> None:
    """Frames of one machine to another arrive nowhere, so neither gets an answer; all others reach each other."""
    nowhere = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
    net.on(machine, "ip", "neighbour", "replace", net.address(other), *nowhere)


BLOCKED = (
    r"machine 1 cannot reach it at 10\.87\.0\.12:\d+ \(no answer, as from a firewall or a wrong address\); open all"
)


@long
def test_two_machines_that_do_not_reach_each_other(three: Machines) -> None:
    """Both reach machine 0, and the ranks of sharded strategies would wait for each other."""
    cut_between(three, 1, 2)
    for machine in (2, 1, 0):
        three.train(machine, strategy="fsdp2")
    three.codes(0, 1, 2, expected=1)
    assert re.match(f"machine 2: {BLOCKED}", told(three.run)), told(three.run)
    assert "machine 1: it cannot reach machine 2 at 10.87.0.12:" in log(three)
    assert "machine 2: it cannot reach machine 1 at 10.87.0.11:" in log(three)
    assert saved(three.run) == 0
    assert "[rank " not in log(three), "no rank was started"


@long
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_run_goes_on_without_one_of_them(is_cut: bool, three: Machines) -> None:
    if is_cut:
        cut_between(three, 1, 2)
    for machine in (2, 1, 0):
        three.train(machine, strategy="fsdp2", min_machines=2)
    three.codes(0, 1, 2)
    assert three.participants() == ([0, 1] if is_cut else [0, 1, 2])
    assert len(rows(three.run)) == 6
    assert bool(re.search(f"goes on with 2 of 3 machines; machine 2: {BLOCKED}", log(three))) == is_cut
    assert ("cannot reach" in log(three)) == is_cut


@long
def test_a_link_between_two_others_that_is_cut_in_mid_run(three: Machines) -> None:
    """Nobody watches it; the ranks stand still for `hang_timeout`, and the restart finds it."""
    for machine in (2, 1, 0):
        three.train(machine, strategy="fsdp2", min_machines=2, max_steps=60, max_restarts=3, hang_timeout=40)
    three.until_saved()
    assert three.participants() == [0, 1, 2]
    cut_between(three, 1, 2)
    three.codes(0, 1, 2)
    assert three.participants() == [0, 1]
    assert len(rows(three.run)) == 60
    assert re.search(f"goes on with 2 of 3 machines; machine 2: {BLOCKED}", log(three))


@long
def test_clocks_90_seconds_apart_are_a_warning(near: Machines, undisturbed: Undisturbed) -> None:
    source, library = near.home / "clock.c", near.home / "clock.so"
    source.write_text(CLOCK)
    try:
        run("cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl")
    except OSError:
        pytest.skip("this machine has no C compiler")
    near.variables[1] = {"LD_PRELOAD": str(library)}
    uncut = undisturbed("ddp")
    for machine in (1, 0):
        near.train(machine)
    near.codes(0, 1)
    exact(near.run, uncut, replays=0)
    (line,) = [line for line in log(near).splitlines() if "warning: " in line and "[supervisor]" in line]
    assert re.search(
        r"warning: machine 1 is (89|90)\.\d s ahead of machine 0, so the lines of the log are out of", line
    )
    assert "timedatectl" in line
