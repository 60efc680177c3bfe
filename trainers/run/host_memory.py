"""Main memory that this process may take, of the machine or of the container that it runs in. Imports no torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


def available(root: Path = Path("/")) -> int:
    """Bytes that are free for this process: the least of what the machine and its control groups have.

    Args:
        root: of the file system that holds `/proc` and `/sys`.
    """
    # Files that the system keeps in memory count as free: it lets them go.
    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in _groups(root))]))


def total(root: Path = Path("/")) -> int:
    """Bytes that this process could have with nothing else there."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _groups(root))])


def _groups(root: Path) -> list[tuple[int, int]]:
    """Limit and use of the groups that this process is in, and of those around them: version 1 and 2."""
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
            # In a container the group's own path may not be there: its root is then the group.
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(base) and (group := _group(folder, *names)) is not None:
                    limits.append(group)
    return limits


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _group(folder: Path, limit: str, usage: str, cached: str) -> tuple[int, int] | None:
    """Limit and use of one group; None where it has none (`max`), or cannot be read."""
    try:
        most, used = (int((folder / name).read_text(encoding="ascii")) for name in (limit, usage))
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    facts = dict(line.split(" ", 1) for line in lines if " " in line)
    return most, used - int(facts.get(cached, 0))
