"""Main memory is what the container leaves, not what the machine has."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from trainers.run import host_memory

MIB = 1 << 20
VERSION_2 = ("0::/pod/mine", "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file"))
VERSION_1 = ("4:cpu,memory:/pod/mine", "sys/fs/cgroup/memory",
             ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))  # fmt: skip


def group(folder: Path, names: tuple[str, ...], limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cached}\n")


@pytest.mark.parametrize("version", [VERSION_1, VERSION_2], ids=["v1", "v2"])
def test_the_narrowest_group_decides(version: tuple[str, str, tuple[str, ...]], tmp_path: Path) -> None:
    line, place, names = version
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    assert host_memory.total(tmp_path) == psutil.virtual_memory().total, "without a group it is the machine's"
    group(tmp_path / place / "pod/mine", names, str(64 * MIB), 40 * MIB, cached=16 * MIB)
    assert (host_memory.available(tmp_path), host_memory.total(tmp_path)) == (40 * MIB, 64 * MIB)
    group(tmp_path / place / "pod", names, str(48 * MIB), 40 * MIB)
    assert (host_memory.available(tmp_path), host_memory.total(tmp_path)) == (8 * MIB, 48 * MIB)
    group(tmp_path / place / "pod", names, "max", 40 * MIB)
    assert host_memory.available(tmp_path) == 40 * MIB, "a group without a limit has none"
    group(tmp_path / place / "pod/mine", names, str(64 * MIB), 80 * MIB)
    assert host_memory.available(tmp_path) == 0


@pytest.mark.parametrize("version", [VERSION_1, VERSION_2], ids=["v1", "v2"])
def test_in_a_container_the_groups_root_is_its_own(version: tuple[str, str, tuple[str, ...]], tmp_path: Path) -> None:
    line, place, names = version
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    group(tmp_path / place, names, str(64 * MIB), 40 * MIB)
    assert host_memory.available(tmp_path) == 24 * MIB


def test_what_cannot_be_read_leaves_the_machines(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"\xff\n")
    assert host_memory.total(tmp_path) == psutil.virtual_memory().total
    (tmp_path / "proc/self/cgroup").write_text("nothing\n")
    assert host_memory.total(tmp_path) == psutil.virtual_memory().total
