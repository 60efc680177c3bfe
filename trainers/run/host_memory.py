"""Host memory available to this process, given the limits of the machine and of its container. Imports no torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

MAPPED = 2**25
"""Bytes from which glibc maps a block by itself and returns it when it is freed (its `DEFAULT_MMAP_THRESHOLD_MAX`)."""


def available(root: Path = Path("/")) -> int:
    """Returns the bytes available to this process: the minimum over the machine and its control groups.

    Args:
        root: Root of the file system with `/proc` and `/sys`.
    """
    # The page cache counts as available, because the kernel can reclaim it.
    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in _groups(root))]))


def total(root: Path = Path("/")) -> int:
    """Returns the bytes that this process could use if nothing else were running."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _groups(root))])


def _groups(root: Path) -> list[tuple[int, int]]:
    """Returns limit and usage of this process's control groups (version 1 and 2) and of their ancestors, in bytes."""
    limits = []
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                base, names = root / "sys/fs/cgroup/memory", _VERSION_1
            else:
                continue
            inner = base / path.lstrip("/")
            # In a container, the group's own path may not exist; the root of the hierarchy is the group then.
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(base) and (group := _group(folder, *names)) is not None:
                    limits.append(group)
    return limits


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _group(folder: Path, limit: str, usage: str, cached: str) -> tuple[int, int] | None:
    """Returns limit and usage of one group, in bytes; None if it has no limit (`max`), or cannot be read."""
    try:
        most, used = (int((folder / name).read_text(encoding="ascii")) for name in (limit, usage))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    facts = dict(line.split(" ", 1) for line in lines if " " in line)
    return most, used - int(facts.get(cached, 0))
