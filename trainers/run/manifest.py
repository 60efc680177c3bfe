"""What is known of a checkpoint besides its tensors: `manifest.json`, and whether the files are as it says."""

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
    """What a run knows besides tensors; it is saved and comes back with a checkpoint.

    Args:
        step: optimizer steps done.
        elapsed_s: seconds of training over all attempts.
        tokens: real tokens trained on.
        best_step, best_score, best_results: the best evaluation so far.
        stale_evaluations: evaluations since the best one.
        loss_scale: state of fp16's gradient scaler.
        skipped_steps: steps (from 1) without an update: their numbers, or their batches, were bad.
        recent_losses: those that the next one is held against.
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

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        """Reads what a manifest holds; in older ones `skipped_steps` is called `passed_over`."""
        return cls(**{"skipped_steps" if name == "passed_over" else name: value for name, value in values.items()})


@dataclass(frozen=True)
class Origin:
    """Where a checkpoint comes from; kept in its manifest.

    Args:
        base: digest of the frozen weights, which a checkpoint of adapters does not hold; empty without any.
    """

    layout: str
    config: dict[str, Any]
    data_fingerprint: str
    base: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Makes a file's or folder's content survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Removes a checkpoint; of one that is a link, the link alone."""
    with contextlib.suppress(OSError):
        if folder.is_symlink():
            folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path, why: str) -> Path:
    """Renames a checkpoint so that nothing takes it for one; the next save removes it."""
    aside = folder.with_name(f"{why}-{folder.name}")
    remove(aside)
    return folder.rename(aside)


def seal(manifest: dict[str, Any]) -> str:
    """Digest of a manifest without its own seal, so that a flipped bit in it is seen too."""
    body = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: when it is missing, damaged or of another format.
    """
    manifest = read_json(folder / "manifest.json")
    if manifest is None:
        raise ValueError("its manifest is missing or not JSON")
    if manifest.get("seal") != seal(manifest):
        raise ValueError("its manifest was changed after it was written")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"its format is {manifest.get('format')}, this version reads {FORMAT}")
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint whose every file is as it was written.

    Raises:
        ValueError: naming the first file that is missing, of another size, or of another content.
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
