"""Everything that a run's page shows, as one document, and the next thing to do where a run waits or has ended."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.runs import state as run_state
from app.runs.safe_read import read_span, stamp
from app.runs.runs import gpu_ids, strategy_name, true_state, world_size
from app.runs.metrics import Curves
from trainers.run.folder import LIVE_STATES, RunFolder, read_json

MOST_TEXT = 1 << 18
"""Bytes of a config that are shown."""
_MOST_MANIFEST = 1 << 26
_MOST_RANKS = 1024
_STEP = re.compile(r"step-(\d{1,15})")
_ADVICE = (
    (r"out of memory|OutOfMemory",
     "set auto_find_batch_size to true, lower max_length, set gradient_checkpointing to true, or use fsdp2"),
    (r"SIGKILL", "if memory ran out, lower per_device_train_batch_size or max_length"),
    (r"[Nn]o space left|disk|bytes free", "free space on that disk"),
    (r"[Rr]ead-only|Permission denied|nothing can be written", "make that folder writable"),
    (r"not finite|loss (nan|inf)|gradient norm (nan|inf)", "lower learning_rate, or look at the rows that it names"),
)  # fmt: skip

View = dict[str, Any]


def run_view(run: RunFolder, curves: Curves) -> View:
    """What is known of a run now.

    Args:
        run: the run.
        curves: keeps what was read of its metrics.

    Returns:
        `id, state, cause, next` (a sentence, or empty), `actions` (see `app.runs.state.allowed`), `queue_place`;
        `phase`, `step`, `total_steps`, `progress` (0 to 1 or None), `attempt`, `started_at`, `updated_at`; from the
        newest row `loss`, `eval_loss`, `learning_rate`, `tokens_per_second`, `mfu`, `data_wait`, `eta_s` (live runs
        alone), `tokens`, `elapsed_s`; `ranks` (`rank, step, section, time, memory_gib`), `strategy`, `world_size`,
        `gpus`, `host`, `checkpoints`, `bad_checkpoints`, `export_dir` and `run_dir`.
    """
    state, newest = true_state(run), curves.latest(run)
    live = state.get("state") in LIVE_STATES
    ranks = _ranks(run, newest)
    named = checkpoints(run)
    step, total = _count(state.get("step")), _count(state.get("total_steps"))
    first = ranks[0] if ranks else {}
    if live:
        step = max((one for one in (step, _count(newest.get("step"))) if one is not None), default=None)
    values = ("loss", "eval_loss", "learning_rate", "mfu", "data_wait", "tokens", "elapsed_s")
    place = _queue_place(run) if state.get("state") == "queued" else None
    return {
        "id": run.id,
        "state": str(state.get("state")),
        "cause": str(state["cause"])[:2000] if state.get("cause") else "",
        "next": next_step(run, state, named, place),
        "actions": run_state.allowed(run),
        "queue_place": place,
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
        "gpus": gpu_ids(run),
        "host": _text(state.get("host")),
        "checkpoints": named,
        "bad_checkpoints": sorted(path.name for path in run.checkpoints.glob("bad-*"))[:100],
        "export_dir": _text(state.get("export_dir")),
        "run_dir": str(run.path),
    }


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else None


def _number(value: Any) -> float | None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300
    return value if ok and math.isfinite(value) else None


def _text(value: Any) -> str:
    return value[:1000] if isinstance(value, str) else ""


def _queue_place(run: RunFolder) -> int | None:
    with contextlib.suppress(OSError):
        return run_state.queue_place(run)
    return None


def _ranks(run: RunFolder, newest: View) -> list[View]:
    """Where each rank is, by its heartbeat, and its memory, by the newest metrics row."""
    memory = newest.get("memory_gib_by_rank")
    held = memory if isinstance(memory, list) else []
    made: list[View] = []
    for path in run.heartbeats.glob("rank-*.json"):
        name = path.stem.removeprefix("rank-")
        if not (name.isascii() and name.isdigit() and len(name) <= 6) or len(made) >= _MOST_RANKS:
            continue
        beat, rank = read_json(path) or {}, int(name)
        made.append({
            "rank": rank, "step": _count(beat.get("step")), "section": _text(beat.get("section"))[:40],
            "time": _text(beat.get("time"))[:40], "memory_gib": _number(held[rank]) if rank < len(held) else None,
        })  # fmt: skip
    beating = {one["rank"] for one in made}
    for rank, gib in enumerate(held[:_MOST_RANKS]):
        if rank not in beating:
            made.append({"rank": rank, "step": None, "section": "", "time": "", "memory_gib": _number(gib)})
    return sorted(made, key=lambda one: one["rank"])


# -- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoints(run: RunFolder) -> list[View]:
    """The published checkpoints, newest first: `name, step, bytes, saved_at, best`."""
    found = {path: int(match[1]) for path in run.checkpoints.glob("step-*") if (match := _STEP.fullmatch(path.name))}
    newest = max(found, key=lambda path: found[path], default=None)
    best = _best_step(newest) if newest else None
    rows = [
        {"name": path.name, "step": step, **_size_and_time(path), "best": step == best} for path, step in found.items()
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
    """Step of the best evaluation so far, as the newest checkpoint tells it."""
    path = folder / "manifest.json"
    seen = stamp(path)
    return _best_in(path, seen) if seen and seen[2] <= _MOST_MANIFEST else None


@functools.lru_cache(maxsize=256)
def _best_in(path: Path, seen: Any) -> int | None:
    progress = (read_json(path) or {}).get("progress")
    return _count(progress.get("best_step")) if isinstance(progress, dict) else None


# -- texts -----------------------------------------------------------------------------------------------------------


def run_files(run: RunFolder) -> dict[str, str]:
    """The run's settings as text: `config`, `accelerate`, `command`; empty where there is none."""
    paths = {"config": run.config, "accelerate": run.accelerate, "command": run.command}
    return {name: read_span(path, 0, MOST_TEXT)[0].decode("utf-8", "replace") for name, path in paths.items()}


def next_step(run: RunFolder, state: View, saved: list[View], place: int | None) -> str:
    """What to do now, with the command that does it; empty for a run that trains.

    Args:
        run: the run.
        state: its true state.
        saved: its checkpoints, newest first.
        place: its place in the queue, counted from 1.
    """
    name, now = shlex.quote(str(run.path)), state.get("state")
    if now == "queued":
        where = f"It is number {place} in the queue" if place else "It waits in the queue"
        return f"{where} and starts by itself when its devices are free. To take it out: tunesmith stop {name}"
    if now == "stopping":
        return "It ends after its current step."
    if now == "done":
        return f"Talk to it: tunesmith chat {name}"
    if now in LIVE_STATES:
        return ""
    resume = f"tunesmith resume {name}"
    from_step = f"from step {saved[0]['step']}" if saved else "from the start, as no checkpoint was saved"
    if now == "stopped":
        return f"To go on {from_step}: {resume}"
    advice = next((said for word, said in _ADVICE if re.search(word, str(state.get("cause")))), "")
    fix = f"First {advice}. " if advice else "The log's last error may tell more. "
    return f"{fix}Then go on {from_step}: {resume}"
