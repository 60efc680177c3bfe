"""The run folder's disk, and names that lead a machine to itself."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from app.doctor import machine
from app.doctor.machine import disk_checks, names_check
from app.launch.network import listed, route_to
from tests.faults.disk import SmallDisk, unmount
from trainers.strategy.strategy import Machines

LOCAL = route_to("10.0.0.1")
FIRST, SECOND = Machines(2, 0, "node0", 29500), Machines(2, 1, "node0", 29500)
routed = pytest.mark.skipif(LOCAL is None, reason="this machine has no network")


def test_a_disk_that_can_be_written(tmp_path: Path) -> None:
    folder, speed = disk_checks(tmp_path / "runs", least=1.0)
    assert (folder.passed, speed.passed) == (True, True)
    assert "MB/s written and synced" in speed.value
    assert list(tmp_path.iterdir()) == [], "nothing is left, and no folder made"


def test_a_quick_look_at_a_disk(tmp_path: Path) -> None:
    (folder,) = disk_checks(tmp_path, quick=True, least=1e15)
    assert folder.passed is True


def test_a_slow_disk(tmp_path: Path) -> None:
    _, speed = disk_checks(tmp_path, least=1e15)
    assert speed.passed is False
    assert "--runs_dir" in speed.remedy


def test_a_full_disk_and_one_that_is_nearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(tmp_path / "disk")
    try:
        if disk.kind == "tmpfs":
            (folder,) = disk_checks(disk.folder)  # 24 MiB, and more is written
            assert folder.passed is False
            assert "No space left" in folder.value
            assert folder.remedy
    finally:
        unmount(disk.folder)
    monkeypatch.setattr(machine, "LEAST_FREE", 1 << 60)
    assert disk_checks(tmp_path, least=1.0)[0].passed is False


class Resolver:
    """`/etc/hosts` of a test."""

    def __init__(self, **names: str):
        self.names = names

    def __call__(self, name: str, *about: Any, **more: Any) -> list[Any]:
        if name not in self.names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (self.names[name], 0))]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Any:
    def become(host: str, **names: str) -> None:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        monkeypatch.setattr(socket, "getaddrinfo", Resolver(**names))

    return become


@routed
def test_debians_own_name(hosts: Any) -> None:
    """It does not matter, as the ranks use the interface that leads to machine 0."""
    hosts("node1", node0="10.0.0.1", node1="127.0.1.1")
    check = names_check(SECOND, {})
    assert check.passed is True
    assert check.value == f"node1 is 127.0.1.1; the ranks use {LOCAL}"
    assert names_check(None, {}).passed is True, "one machine has nobody to be found by"
    hosts("node0", node0="127.0.1.1")
    assert "the address at which the others reach it" in names_check(FIRST, {}).value


@pytest.mark.parametrize("name", ["lo", "nothing0"])
def test_a_wrong_interface(name: str, hosts: Any) -> None:
    hosts("node1", node0="10.0.0.1", node1="10.0.0.2")
    check = names_check(SECOND, {"GLOO_SOCKET_IFNAME": name})
    assert check.passed is False
    assert f"GLOO_SOCKET_IFNAME={name} " in check.value
    assert listed() in check.remedy


def test_machine_0_is_known_and_elsewhere(hosts: Any) -> None:
    hosts("node1", node1="10.0.0.2")
    assert "node0 cannot be resolved" in names_check(SECOND, {}).value
    hosts("node1", node0="127.0.1.1", node1="10.0.0.2")
    assert "which is this machine itself" in names_check(SECOND, {}).value


def test_all_machines_on_loopback_are_meant() -> None:
    here = Machines(2, 1, "127.0.0.1", 29500)
    assert names_check(here, {}).passed is True
