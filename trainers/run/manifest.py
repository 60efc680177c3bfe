"""The manifest of a checkpoint (`manifest.json`): everything but the tensors, and checksums of the files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainers.run.folder import read_json

FORMAT = 1


@dataclass
class Progress:
    """The state of a run besides its tensors; saved in checkpoints and restored from them.

    Args:
        step: Completed optimizer steps.
        elapsed_s: Seconds of training over all attempts.
        tokens: Tokens trained on, without padding.
        best_step, best_score, best_results: The best evaluation so far.
        stale_evaluations: Evaluations since the best one.
        loss_scale: State of the fp16 gradient scaler.
        skipped_steps: Steps (from 1) without an update, because of non-finite values or a loss spike.
        recent_losses: Losses that the next one is compared with, to detect spikes.
        stream: Of each source, the window of a stream that the step has come to, and how many rows of it were trained;
            see `StreamPlan.position`.
    """

    step: int = 0
    elapsed_s: float = 0.0
    tokens: int = 0
    best_step: int | None = None
    best_score: float | None = None
    best_results: dict[str, float] = field(default_factory=dict)
    stale_evaluations: int = 0
    loss_scale: dict[str, Any] | None = None
    skipped_steps: list[int] = field(default_factory=list)
    recent_losses: list[float] = field(default_factory=list)
    stream: list[dict[str, int]] = field(default_factory=list)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        """Rebuilds the progress from a manifest; older ones call `skipped_steps` `passed_over`."""
        return cls(**{"skipped_steps" if name == "passed_over" else name: value for name, value in values.items()})


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint comes from; saved in its manifest.

    Args:
        base: Digest of the frozen base weights, which a checkpoint of adapters does not contain; empty if there are
            none.
        from_run: What the run started from, if that is the result of another run; see `from_run.record_start`.
    """

    layout: str
    config: dict[str, Any]
    data_fingerprint: str
    base: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    from_run: dict[str, Any] | None = None


def sha256(path: Path) -> str:
    """Returns the sha256 of a file in hex, without loading the file into memory."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flushes a file or folder to disk, so that it survives a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Removes a checkpoint; if it is a symlink, only the link."""
    with contextlib.suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path, why: str) -> Path:
    """Renames a checkpoint to `<why>-<name>`, so that it is not used as one; the next save removes it."""
    aside = folder.with_name(f"{why}-{folder.name}")
    remove(aside)
    return folder.rename(aside)


_KEYS = {
    **dict.fromkeys(("step", "world"), int),
    **dict.fromkeys(("base", "data_fingerprint"), str),
    **dict.fromkeys(("config", "files", "progress", "tensors", "versions"), dict),
}


def seal(manifest: dict[str, Any]) -> str:
    """Returns the digest of a manifest without its own seal, to detect corruption of the manifest itself."""
    body = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint.

    Raises:
        ValueError: If it is missing, damaged or of another format.
    """
    manifest = read_json(folder / "manifest.json")
    if manifest is None:
        raise ValueError("its manifest is missing or not JSON")
    if manifest.get("seal") != seal(manifest):
        raise ValueError("its manifest was changed after it was written")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"its format is {manifest.get('format')}, this version reads {FORMAT}")
    if missing := [key for key, kind in _KEYS.items() if not isinstance(manifest.get(key), kind)]:
        raise ValueError(f"its manifest lacks {', '.join(missing)}")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a checkpoint, and checks sizes and checksums of its files.

    Raises:
        ValueError: If the manifest is invalid, or a file is missing or has changed; names the first such file.
    """
    manifest = read_manifest(folder)
    match = re.fullmatch(r"step-(\d{8})(\.tmp-\w+)?", folder.name)
    if match and int(match[1]) != manifest["step"]:
        raise ValueError(f"its name is for another step than its manifest, {manifest['step']}")
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, {expected['bytes']} were written")
        if sha256(path) != expected["sha256"]:
            raise ValueError(f"{name} was changed after it was written")
    return manifest
