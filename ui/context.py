"""What every page knows: the folders that the server was started with. Fixed for the life of the server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Here:
    """Where the server was started, and what it may touch.

    Args:
        runs_dir: folder of run folders.
        roots: folders in which models and data may lie; a path outside of all of them is refused.
        uploads: folder, inside a root, that uploaded files are put into.
        remote_code: whether `trust_remote_code` was allowed on the command line.
    """

    runs_dir: Path
    roots: tuple[Path, ...]
    uploads: Path
    remote_code: bool = False
