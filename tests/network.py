"""Machines with addresses of their own on this one: network namespaces, which need root and the kernel's support."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class Network:
    """Machines with addresses of their own: a network namespace each, joined by a bridge in another.

    Args:
        home: folder that all of them see.
        count: number of machines.
    """

    def __init__(self, home: Path, count: int):
        self.home, self.count, self.mark = home, count, f"ts{os.getpid()}"
        self.names = [f"{self.mark}-{number}" for number in range(count)]
        self.switch = f"{self.mark}-s"

    def set_up(self) -> None:
        for name in (self.switch, *self.names):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        self.connect()

    def connect(self) -> None:
        """Joins the machines by a bridge."""
        run("ip", "-n", self.switch, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge0", "up")
        for number, name in enumerate(self.names):
            port = f"port{number}"
            run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", self.switch)
            run("ip", "-n", self.switch, "link", "set", port, "master", "bridge0", "up")
            run("ip", "-n", name, "address", "add", f"10.87.0.{10 + number}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")

    def tear_down(self) -> None:
        for number in range(self.count):
            self.power_off(number)
        for name in (self.switch, *self.names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def on(self, machine: int, *words: str) -> None:
        """Runs a command of `ip` or `tc` on a machine."""
        run("ip", "netns", "exec", self.names[machine], *words)

    def address(self, machine: int) -> str:
        """The address of a machine."""
        return f"10.87.0.{10 + machine}"

    def inside(self, machine: int, *argv: str) -> list[str]:
        """The command that runs another one on a machine, with a host name of its own."""
        return ["ip", "netns", "exec", self.names[machine], "unshare", "--uts", "sh", "-c",
                f'hostname node{machine}; exec "$@"', "sh", *argv]  # fmt: skip

    def power_off(self, machine: int) -> None:
        """Kills everything that runs on a machine."""
        done = subprocess.run(["ip", "netns", "pids", self.names[machine]], capture_output=True, text=True)
        for pid in done.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@contextmanager
def set_up(net: Network) -> Iterator[None]:
    """Sets a network up for a test; skips the test where there can be none."""
    try:
        net.set_up()
    except (OSError, subprocess.CalledProcessError) as error:
        net.tear_down()
        pytest.skip(f"network namespaces need root and the kernel's support: {error}")
    try:
        yield
    finally:
        net.tear_down()


def run(*words: str) -> None:
    """Runs a command that must succeed."""
    subprocess.run(words, check=True, capture_output=True)
