"""The folders that the server was started with, fixed for its lifetime."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ServerContext:
    """The folders that the server may use.

    Args:
        runs_dir: folder of run folders.
        roots: folders that models and data may be read from; paths outside them are refused.
        uploads: folder, inside a root, for uploaded files.
        remote_code: whether `trust_remote_code` was allowed on the command line.
    """

    runs_dir: Path
    roots: tuple[Path, ...]
    uploads: Path
    remote_code: bool = False
