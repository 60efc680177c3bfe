"""Exports a run's weights from its page: `tunesmith export` in the background.

An export outlives the server and the browser; all that is told of it comes from its folders.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.console import clean, shortened
from app.launch.actions import ExportRequest, check_export
from app.launch.background_work import start_run_work, stop_work
from app.runs.detail import checkpoints
from app.runs.exports import EXPORTS, ExportFolder
from app.runs.safe_read import read_span
from trainers.config.gguf_types import offered_types
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

_MAX_TEXT_BYTES = 1 << 16
"""Bytes that are read of the end of an output."""
_MOST_LINES = 12


def _options(wanted: ExportRequest) -> list[str]:
    """The options of `tunesmith export`."""
    flags = [*(["--merged"] if wanted.merged else []), *(["--ema"] if wanted.averaged else [])]
    files = ["--gguf", wanted.gguf] if wanted.gguf else []
    return ["--checkpoint", str(wanted.checkpoint), *flags, *files, *(["--replace"] if wanted.replace else [])]


def _argv(run: RunFolder, options: Sequence[str]) -> list[str]:
    return ["export", str(run.path), *options]


def start(run: RunFolder, wanted: ExportRequest) -> ExportFolder:
    """Starts an export in the background.

    Args:
        run: the run.
        wanted: untrusted; replaces an earlier export of the same kind.

    Raises:
        ConfigError: if an export of the run is running, or with what `tunesmith export` refuses; nothing is left then.
    """
    if wanted.checkpoint not in [checkpoint["name"] for checkpoint in checkpoints(run)]:
        quoted = repr(shortened(str(wanted.checkpoint)))
        raise ConfigError(f"checkpoint={quoted} is not in this run; choose one from the list")
    types = wanted.gguf.split(",") if wanted.gguf else []
    if unknown := [name for name in types if name not in offered_types()[0]]:
        raise ConfigError.about("gguf", shortened(unknown[0]), "is not offered here", "choose one from the list")
    target, _, _ = check_export(run, wanted)
    options = _options(wanted)
    note = {"target": str(target), "options": options}
    return start_run_work(EXPORTS, run, lambda _: _argv(run, options), note, "exported")


def stop(run: RunFolder) -> None:
    """Asks the running export of a run to end, and returns immediately; it leaves nothing behind.

    Raises:
        ConfigError: if no export is running, or none that this machine can stop.
    """
    folder = EXPORTS.running(run)
    if folder is None:
        raise ConfigError(f"no export of run {run.id} is running")
    stop_work(folder, "export", to_group=False)


def newest(run: RunFolder) -> dict[str, Any] | None:
    """The newest export that the page has started; None without one.

    Returns:
        `state` (`running`, `done`, `stopped` or `failed`), `target` (where its folder is, if the run is renamed too),
        `is_there` (whether it still is), `command`, `lines` (what it printed: the results of its check), and while it
        runs `doing`, `seconds` and `stopping`.
    """
    folder = next(iter(EXPORTS.of(run)), None)
    if folder is None:
        return None
    note, is_running = folder.note(), EXPORTS.running(run) is not None
    target = str(note["target"]) if isinstance(note.get("target"), str) else ""
    lines = _lines(folder)
    is_done = bool(target) and bool(lines) and lines[-1] == target
    stopped = bool(note.get("stopped_at"))
    state = "running" if is_running else "done" if is_done else "stopped" if stopped else "failed"
    folder_now, options = run.path / Path(target).name, note.get("options")
    options = [str(option) for option in options] if isinstance(options, list) else []
    return {
        "state": state, "target": str(folder_now), "is_there": bool(target) and folder_now.is_dir(),
        "command": clean(shlex.join(["tunesmith", *_argv(run, options)])),
        "lines": (lines[:-1] if is_done else lines)[-_MOST_LINES:],
        "doing": _doing(folder_now) if is_running and target else "", "stopping": is_running and stopped,
        "seconds": _seconds_since(note.get("started_at")) if is_running else None,
    }  # fmt: skip


def _lines(folder: ExportFolder) -> list[str]:
    _, size = read_span(folder.output, 0, 0)
    text = read_span(folder.output, max(0, size - _MAX_TEXT_BYTES), _MAX_TEXT_BYTES)[0].decode("utf-8", "replace")
    return [line for line in map(clean, text.splitlines()) if line.strip()]


def _doing(target: Path) -> str:
    """What an export is at, by the files of its unfinished folder."""
    for folder in target.parent.glob(f".{target.name}.*"):
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}
        if gguf := [name for name in sizes if name.endswith(".gguf")]:
            return f"writing GGUF files: {', '.join(sorted(gguf))}"
        if "tokenizer_config.json" in sizes:
            return "loading it back, to compare it with the trained model"
        if any(name.endswith(".safetensors") for name in sizes):
            return f"writing the weights, {sum(sizes.values()) / 1e6:,.0f} MB so far"
    return "reading the checkpoint"


def _seconds_since(text: Any) -> float | None:
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds())
    return None
