"""Identifies the teacher of a run, or its initial model, by the content of the files. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from trainers.config.options import TrainConfig
from trainers.config.teacher import frozen_config
from trainers.run.folder import cache_folder, read_json, write_json
from trainers.run.manifest import sha256
from trainers.run.weight_headers import base_folder, cached_folder

META = "teacher.json"
"""In a folder of recorded predictions: what they are of."""
TEACHERS = ("the teacher", "the recorded teacher")
"""What a run may learn from, as `teacher_version` names it."""


def teacher_version(config: TrainConfig) -> dict[str, str]:
    """`{"the teacher": DIGEST}`, as checkpoints record it; empty without one, or if it is not on this machine.

    `{"the initial model": DIGEST}` if a copy of that is compared with, which a resumed run loads again.
    """
    if config.objective_spec.teacher and config.teacher_log_probs is not None:
        recorded = Path(config.teacher_log_probs)
        files = [recorded / META, *array_paths(recorded, "train"), *array_paths(recorded, "eval")]
        return {TEACHERS[1]: files_digest(files)} if recorded.is_dir() else {}
    frozen = frozen_config(config)
    if frozen is None:
        return {}
    name = TEACHERS[0] if config.objective_spec.teacher else "the initial model"
    folder = base_folder(frozen)
    local = folder if folder.is_dir() else cached_folder(frozen)
    return {} if local is None else {name: teacher_digest(local)}


def array_paths(folder: Path, split: str) -> list[Path]:
    """The files of recorded predictions for a split: ids, log-probabilities, starts."""
    return [folder / f"{split}.{name}.npy" for name in ("ids", "log_probs", "starts")]


def teacher_digest(folder: Path) -> str:
    """The digest of config and weights of the model in a folder."""
    return files_digest(sorted([folder / "config.json", *folder.glob("*.safetensors*")]))


def files_digest(paths: Sequence[Path]) -> str:
    """First 16 hex digits of a sha256 over the contents of files, which are read once per state of the files.

    Args:
        paths: the files; others than regular ones are left out.
    """
    files = [path.resolve() for path in paths]
    states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file()]
    known: Path | None = None
    with contextlib.suppress(RuntimeError, OSError):  # no home folder is known, or it cannot be written
        (cache_folder() / "teachers").mkdir(parents=True, exist_ok=True)
        known = cache_folder() / "teachers" / f"{hashlib.sha256(repr(states).encode()).hexdigest()[:32]}.json"
    if known is None:
        return _computed(states)
    with FileLock(f"{known}.lock"):  # the other ranks wait for the first
        if isinstance(digest := (read_json(known) or {}).get("digest"), str):
            return digest
        digest = _computed(states)
        write_json(known, {"digest": digest})
    return digest


def _computed(states: list[tuple[str, int, int]]) -> str:
    """Of the contents alone, so that a teacher may be moved."""
    digests = [sha256(Path(path)) for path, *_ in states]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16]
