"""Everything the page of a run shows, as one document, with the next thing to do when a run is queued or has ended."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import shlex
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from app.runs import state as run_state
from app.runs.machines import join_lines, machines_line, members, resume_line
from app.runs.metrics import Curves
from app.runs.profiles import profiles
from app.runs.runs import gpu_ids, strategy_name, sweep_of, true_state, world_size
from app.runs.safe_read import read_span, stamp
from app.runs.scheduled import submission
from trainers.run.folder import LIVE_STATES, RunFolder, read_json
from trainers.run.lineage import in_words, stages_before

MAX_TEXT_BYTES = 1 << 18
"""Bytes shown of a config."""
_MAX_MANIFEST_BYTES = 1 << 26
_MAX_RANKS = 1024
_MAX_ORIGIN = 2000
_STEP = re.compile(r"step-(\d{1,15})")

View = dict[str, Any]


def run_view(run: RunFolder, curves: Curves) -> View:
    """The current view of a run.

    Args:
        run: the run.
        curves: cache of its metrics.

    Returns:
        `id, state, cause, next` (a sentence, or empty), `actions` (see `app.runs.state.allowed`), `queue_place`;
        `phase`, `step`, `total_steps`, `progress` (0 to 1 or None), `attempt`, `started_at`, `updated_at`; from the
        newest row `loss`, `eval_loss`, `reward`, `eval_reward`, `learning_rate`, `tokens_per_second`, `mfu`,
        `data_wait`, `eta_s` (live runs only), `tokens`, `elapsed_s`; `ranks` (`rank, step, section, time,
        memory_gib`, the most so far), `strategy`, `world_size`, `machines` (how many of several train, and why the
        others do not), `members` (see `app.runs.machines`), `join_lines` (the command of each machine but 0; empty
        where a scheduler starts them), `join_by` (until when, in words), `sweep` (see `sweep_of`), `from_run` (the
        stages of training before it, in words), `gpus`, `host`,
        `checkpoints`, `bad_checkpoints`, `profiles` (see `app.runs.profiles`), `export_dir` and `run_dir`.
    """
    state, newest = true_state(run), curves.latest(run)
    live = state.get("state") in LIVE_STATES
    ranks = _ranks(run, newest, curves.peaks(run).get("memory_gib", []))
    saved = checkpoints(run)
    step, total = _count(state.get("step")), _count(state.get("total_steps"))
    first = ranks[0] if ranks else {}
    if live:
        step = max((value for value in (step, _count(newest.get("step"))) if value is not None), default=None)
    values = ("loss", "eval_loss", "reward", "eval_reward", "learning_rate", "mfu", "data_wait", "tokens", "elapsed_s")
    position = _queue_position(run) if state.get("state") == "queued" else None
    return {
        "id": run.id,
        "state": str(state.get("state")),
        "cause": str(state["cause"])[:2000] if state.get("cause") else "",
        "next": next_step(run, state, saved, position),
        "actions": run_state.allowed(run),
        "queue_place": position,
        "phase": str(first.get("section") or "") if state.get("state") in ("running", "stopping") else "",
        "step": step,
        "total_steps": total,
        "progress": min(1.0, step / total) if step is not None and total else None,
        "attempt": _count(state.get("attempt")) or 0,
        "started_at": _text(state.get("started_at")),
        "updated_at": _text(state.get("updated_at")),
        **{name: _number(newest.get(name)) for name in values},
        "tokens_per_second": _number(newest.get("recent_tokens_per_second", newest.get("tokens_per_second"))),
        "eta_s": _number(newest.get("eta_s")) if live else None,
        "ranks": ranks,
        "strategy": strategy_name(run),
        "world_size": world_size(run),
        "machines": machines_line(state),
        "members": members(run, state),
        "join_lines": [] if submission(run) else join_lines(run, state),
        "join_by": _join_by(state),
        "sweep": sweep_of(run),
        "from_run": in_words(stages_before(run))[:_MAX_ORIGIN],
        "gpus": gpu_ids(run),
        "host": _text(state.get("host")),
        "checkpoints": saved,
        "profiles": profiles(run),
        "bad_checkpoints": sorted(path.name for path in run.checkpoints.glob("bad-*"))[:100],
        "export_dir": _text(state.get("export_dir")),
        "run_dir": str(run.path),
    }


def _join_by(state: View) -> str:
    """Until when machines may join a launch, in words; empty unless some are awaited."""
    notice = state.get("machines")
    seconds = _number(notice.get("timeout")) if isinstance(notice, dict) else None
    if state.get("state") != "starting" or seconds is None or not notice or notice.get("participants") is not None:
        return ""
    with contextlib.suppress(ValueError, OverflowError):
        end = datetime.fromisoformat(_text(state.get("launched_at"))) + timedelta(seconds=seconds)
        return f", until {end.astimezone():%H:%M:%S}"
    return ""


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else None


def _number(value: Any) -> float | None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
    return value if ok and math.isfinite(value) else None


def _text(value: Any) -> str:
    return value[:1000] if isinstance(value, str) else ""


def _queue_position(run: RunFolder) -> int | None:
    with contextlib.suppress(OSError):
        return run_state.queue_position(run)
    return None


def _ranks(run: RunFolder, newest: View, peaks: list[float | None]) -> list[View]:
    """Step and section of each rank from its heartbeat, and its most memory.

    Args:
        run: the run.
        newest: its newest row of metrics.
        peaks: the most memory of each rank in GiB; for further ranks, that of the newest row counts.
    """
    memory = newest.get("memory_gib_by_rank")
    memory_gib = [*peaks, *(memory[len(peaks) :] if isinstance(memory, list) else [])]
    ranks: list[View] = []
    for path in run.heartbeats.glob("rank-*.json"):
        name = path.stem.removeprefix("rank-")
        if not (name.isascii() and name.isdigit() and len(name) <= 6) or len(ranks) >= _MAX_RANKS:
            continue
        heartbeat, rank = read_json(path) or {}, int(name)
        ranks.append({
            "rank": rank, "step": _count(heartbeat.get("step")), "section": _text(heartbeat.get("section"))[:40],
            "time": _text(heartbeat.get("time"))[:40],
            "memory_gib": _number(memory_gib[rank]) if rank < len(memory_gib) else None,
        })  # fmt: skip
    reporting = {entry["rank"] for entry in ranks}
    for rank, gib in enumerate(memory_gib[:_MAX_RANKS]):
        if rank not in reporting:
            ranks.append({"rank": rank, "step": None, "section": "", "time": "", "memory_gib": _number(gib)})
    return sorted(ranks, key=lambda entry: entry["rank"])


# -- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoints(run: RunFolder) -> list[View]:
    """The published checkpoints, newest first: `name, step, bytes, saved_at, best`."""
    steps = {path: int(match[1]) for path in run.checkpoints.glob("step-*") if (match := _STEP.fullmatch(path.name))}
    newest = max(steps, key=lambda path: steps[path], default=None)
    best = _best_step(newest) if newest else None
    rows = [
        {"name": path.name, "step": step, **_size_and_time(path), "best": step == best} for path, step in steps.items()
    ]
    return sorted(rows, key=lambda row: row["step"], reverse=True)


def _size_and_time(folder: Path) -> View:
    manifest = stamp(folder / "manifest.json")
    total = 0
    with contextlib.suppress(OSError):
        total = sum(path.lstat().st_size for path in folder.iterdir())
    saved = datetime.fromtimestamp(manifest[1] / 1e9, UTC).isoformat(timespec="seconds") if manifest else ""
    return {"bytes": total, "saved_at": saved}


def _best_step(folder: Path) -> int | None:
    """Step of the best evaluation so far, from the manifest of a checkpoint."""
    path = folder / "manifest.json"
    manifest_stamp = stamp(path)
    return _best_in(path, manifest_stamp) if manifest_stamp and manifest_stamp[2] <= _MAX_MANIFEST_BYTES else None


@functools.lru_cache(maxsize=256)
def _best_in(path: Path, manifest_stamp: Any) -> int | None:
    progress = (read_json(path) or {}).get("progress")
    return _count(progress.get("best_step")) if isinstance(progress, dict) else None


# -- files and the next step ---------------------------------------------------------------------------------------


def run_files(run: RunFolder) -> dict[str, str]:
    """The settings files as text: `config`, `accelerate`, `command`; empty where a file is missing."""
    paths = {"config": run.config, "accelerate": run.accelerate, "command": run.command}
    return {name: read_span(path, 0, MAX_TEXT_BYTES)[0].decode("utf-8", "replace") for name, path in paths.items()}


def next_step(run: RunFolder, state: View, saved: list[View], position: int | None) -> str:
    """What to do next, with the command for it; empty while the run trains.

    Args:
        run: the run.
        state: its true state.
        saved: its checkpoints, newest first.
        position: its position in the queue, counted from 1.
    """
    name, status = shlex.quote(str(run.path)), state.get("state")
    if status == "queued":
        waiting = f"Number {position} in the queue" if position else "Queued"
        return f"{waiting}; starts by itself when its devices are free. To remove it: tunesmith stop {name}"
    if status == "stopping":
        return "Ends after the current step."
    if status == "done":
        return f"Chat with the model: tunesmith chat {name}"
    if status in LIVE_STATES:
        return ""
    origin = f"from step {saved[0]['step']}" if saved else "from the start, as no checkpoint was saved"
    return f"To continue {origin}: {resume_line(run, state)}"
