"""The table of all runs: one row per run, cached until its files change."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from app.runs.runs import run_paths, true_state
from app.runs.safe_read import Stamp, open_regular, read_span, stamp
from app.runs.scheduled import is_on_ray, job_of_state
from app.runs.state import queue
from trainers.config.mistakes import ConfigError
from trainers.config.objectives import WATCHED
from trainers.run.folder import END_STATES, LIVE_STATES, STATES, RunFolder, read_json

SPARKS = 40
"""Most points in a sparkline."""
PAGE = 100
"""Rows per page of the table."""
_FULL_READ_BYTES = 1 << 16
_SAMPLE_BYTES = 1 << 11
_TAIL_BYTES = 1 << 13
_HEAD_BYTES = 1 << 14
_VALUE = rb"(-?[0-9.]+(?:[eE][-+]?\d+)?)[,}]"
_POINT = re.compile(
    rb'^\{"step": (\d{1,15}),.*?"loss": ' + _VALUE + rb'(?:[^\n]*?"reward": ' + _VALUE + rb")?", re.MULTILINE
)
_ELAPSED = re.compile(rb'"elapsed_s": ([0-9.]+(?:e[-+]?\d+)?)[,}]')
_GPUS = re.compile(r"^CUDA_VISIBLE_DEVICES=([0-9,]+) ")
_STRATEGY = "# strategy:"
_FAST_SAFE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SORTS = ("started_at", "id", "state", "preset", "strategy", "progress", "value", "duration_s")

Row = dict[str, Any]


@dataclass
class _Entry:
    """A row and the stamps of its files; `fixed` holds the values that never change after the start of a run."""

    run: RunFolder
    stamps: tuple[Stamp | None, Stamp | None]
    row: Row
    fixed: Row


class History:
    """The rows of all runs of a folder. One thread-safe object serves a whole server.

    Args:
        runs_dir: folder of run folders; registered runs elsewhere are listed too.
    """

    def __init__(self, runs_dir: Path):
        self.runs_dir = runs_dir
        self.entries: dict[Path, _Entry] = {}
        self.lock = threading.Lock()

    def rows(self) -> list[Row]:
        """One row per run, newest first; of several runs with the same id, only the one in `runs_dir`.

        Keys: `id, state, cause, step, total_steps, progress` (0 to 1 or None), `preset, method, strategy, world_size,
        gpus, measure` (one of `WATCHED`), `value` (its last one), `sparkline` (at most `SPARKS` numbers), `started_at,
        ended_at, duration_s, run_dir`.
        """
        with self.lock:
            by_id: dict[str, Row] = {}
            entries: dict[Path, _Entry] = {}
            for path in run_paths(self.runs_dir):
                entry = self._entry(path)
                if entry is not None:
                    entries[path] = entry
                    by_id[path.name] = entry.row  # those of `runs_dir` come last
            self.entries = entries
            rows = [_with_duration(row) for row in by_id.values()]
        return sorted(rows, key=lambda row: (row["started_at"], row["id"]), reverse=True)

    def _entry(self, path: Path) -> _Entry | None:
        previous = self.entries.get(path)
        run = previous.run if previous else RunFolder(path)
        state_stamp = stamp(run.state_file)
        if state_stamp is None:
            return None
        unchanged = previous is not None and previous.stamps[0] == state_stamp
        # The row of an ended run is final once its state file says so itself.
        if previous and unchanged and previous.row["truly"] and previous.row["state"] in END_STATES:
            return previous
        stamps = (state_stamp, stamp(run.metrics))
        if previous is None or previous.stamps != stamps:
            row = _read_row(run, previous.fixed if previous and unchanged else None)
            return None if row is None else _Entry(run, stamps, *row)
        previous.row.update(_state_fields(run))  # a live run may have died without any file changing
        return previous


def _read_row(run: RunFolder, fixed: Row | None) -> tuple[Row, Row] | None:
    if (read_json(run.state_file) or {}).get("state") not in STATES:
        return None
    fixed = fixed or _fixed_fields(run)
    measure, values, elapsed = watched_curve(run.metrics)
    curve = {"measure": measure, "value": values[-1] if values else None, "sparkline": values, "trained_s": elapsed}
    return {"id": run.id, **_state_fields(run), **fixed, **curve}, fixed


def _state_fields(run: RunFolder) -> Row:
    """The values of the state file, each checked for its type."""
    written = read_json(run.state_file) or {}
    may_go_on = job_of_state(written) or is_on_ray(written)  # SLURM may have queued it again, Ray moved it
    may_change = written.get("state") in LIVE_STATES or may_go_on
    state = true_state(run) if may_change else written
    step, total = _count(state.get("step")), _count(state.get("total_steps"))
    return {
        "state": state.get("state"),
        "truly": state.get("state") == written.get("state"),
        "cause": str(state["cause"])[:500] if state.get("cause") else None,
        "step": step,
        "total_steps": total,
        "progress": min(1.0, step / total) if step is not None and total else None,
        "attempt": _count(state.get("attempt")) or 0,
        "started_at": _time(state.get("started_at")),
        "ended_at": _time(state.get("updated_at")),
    }


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**15 else None


def _time(value: Any) -> str:
    """The value if it is an ISO time, otherwise an empty string."""
    try:
        return datetime.fromisoformat(value).isoformat() if isinstance(value, str) else ""
    except ValueError:
        return ""


def _with_duration(row: Row) -> Row:
    """Adds the duration: wall time, or for a resumed run the time it trained, without the pauses in between."""
    begun, ended = row["started_at"], row["ended_at"]
    duration = row["trained_s"]
    if row["attempt"] == 0 and begun:
        live = row["state"] in LIVE_STATES
        end = datetime.now(UTC) if live else datetime.fromisoformat(ended or begun)
        duration = max(0.0, (_aware(end) - _aware(datetime.fromisoformat(begun))).total_seconds())
    return {key: value for key, value in row.items() if key not in ("truly", "trained_s")} | {"duration_s": duration}


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _fixed_fields(run: RunFolder) -> Row:
    """The values set when a run starts. Parses only the lines needed, as there may be a thousand configs."""
    config, accelerate = _text(run.config), _text(run.accelerate)
    first = accelerate.partition("\n")[0]
    gpus = _GPUS.match(_text(run.command))
    world_size = _scalar(accelerate, "num_processes")
    return {
        "preset": _short_text(_scalar(config, "preset")),
        "method": _short_text(_scalar(config, "method")),
        "strategy": first.removeprefix(_STRATEGY).strip()[:100] if first.startswith(_STRATEGY) else "",
        "world_size": _count(world_size),
        "gpus": [int(gpu) for gpu in gpus[1].split(",") if gpu][:64] if gpus else [],
        "run_dir": str(run.path),
    }


def _text(path: Path) -> str:
    return read_span(path, 0, _HEAD_BYTES)[0].decode("utf-8", "replace")


def _scalar(text: str, key: str) -> Any:
    """The value of a top-level `key: value` line; None when there is no such line."""
    line = re.search(rf"^{key}: (.{{1,300}})$", text, re.MULTILINE)
    try:
        return yaml.load(line[1], Loader=_FAST_SAFE) if line else None  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _short_text(value: Any) -> str | None:
    return None if value is None or isinstance(value, list | dict) else str(value)[:100]


# -- sparkline -------------------------------------------------------------------------------------------------------


def watched_curve(path: Path) -> tuple[str, list[float], float | None]:
    """What a run is watched by (see `WATCHED`), its values in at most `SPARKS` points, and the seconds trained so far.

    Samples rows evenly from a large file. Where steps were repeated after a resume, the later rows count.
    """
    points: list[tuple[bytes, bytes, bytes]] = []
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _FULL_READ_BYTES:
                data = file.read(size)
                points = _POINT.findall(data)
            else:
                for index in range(SPARKS - 1):
                    file.seek(index * size // (SPARKS - 1))
                    points += _POINT.findall(file.read(_SAMPLE_BYTES))[:1]
                file.seek(size - _TAIL_BYTES)
                data = file.read(_TAIL_BYTES)
                points += _POINT.findall(data)[-1:]
    except OSError:
        return WATCHED[-1], [], None
    rewards = [(step, reward) for step, _, reward in points if reward]
    measure, texts = ("reward", rewards) if rewards else ("loss", [(step, loss) for step, loss, _ in points])
    current: list[tuple[int, bytes]] = []
    for step, value in texts:
        while current and current[-1][0] >= int(step):
            current.pop()
        current.append((int(step), value))
    values = [number for _, value in _spread(current) if (number := _number(value)) is not None]
    elapsed = _ELAPSED.findall(data)
    return measure, values, _number(elapsed[-1]) if elapsed else None


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _spread(values: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    if len(values) <= SPARKS:
        return values
    return [values[round(index * (len(values) - 1) / (SPARKS - 1))] for index in range(SPARKS)]


# -- selecting and paging --------------------------------------------------------------------------------------------


def select(
    rows: Iterable[Row], state: str = "", search: str = "", sort: str = "started_at", descending: bool = True
) -> list[Row]:
    """Filters and sorts rows.

    Args:
        rows: from `History.rows`.
        state: one state; empty for all.
        search: words that must all appear in the id, preset, method, strategy, cause or state; case-insensitive.
        sort: one of `SORTS`; rows without a value come last.
        descending: largest or newest first, or Z to A.

    Raises:
        ConfigError: for an unknown state or sort column.
    """
    if state and state not in STATES:
        raise ConfigError(f"state={state[:50]!r} is not a run state; use one of {', '.join(STATES)}")
    if sort not in SORTS:
        raise ConfigError(f"sort={sort[:50]!r} is not a column; use one of {', '.join(SORTS)}")
    terms = search.casefold().split()
    matching = [row for row in rows if (not state or row["state"] == state) and _has_terms(row, terms)]
    sortable = [row for row in matching if row[sort] not in (None, "")]
    # a loss is not compared with a reward
    sortable.sort(key=lambda row: (row["measure"], row[sort]) if sort == "value" else row[sort], reverse=descending)
    return sortable + [row for row in matching if row[sort] in (None, "")]


def _has_terms(row: Row, terms: Sequence[str]) -> bool:
    if not terms:
        return True
    keys = ("id", "preset", "method", "strategy", "cause", "state")
    text = " ".join(str(row[key]) for key in keys if row[key]).casefold()
    return all(term in text for term in terms)


def page(history: History, query: Any) -> dict[str, Any]:
    """One page of the table.

    Args:
        history: the rows.
        query: `state`, `words`, `sort`, `down`, `page` (from 0), and `digest` of what the caller already shows.

    Returns:
        `digest` and `same: true` when nothing has changed; otherwise also `rows` (at most `PAGE`), `total`, `page`,
        `pages`, `counts` of all runs by state, and `queue` as from `state.queue`; `error` for an invalid query. The
        duration of a live run is left to the page, which computes it from `started_at`, so that it does not change the
        digest.
    """
    query = query if isinstance(query, dict) else {}
    texts = {key: str(query.get(key) or "")[:200] for key in ("state", "words", "sort", "digest")}
    rows = history.rows()
    try:
        chosen = select(
            rows, texts["state"], texts["words"], texts["sort"] or "started_at", query.get("down") is not False
        )
    except ConfigError as error:
        return {"error": str(error)}
    pages = max(1, math.ceil(len(chosen) / PAGE))
    number = min(max(0, query["page"] if isinstance(query.get("page"), int) else 0), pages - 1)
    visible = chosen[number * PAGE : (number + 1) * PAGE]
    for row in visible:
        if row["state"] in LIVE_STATES and row["attempt"] == 0:
            row["duration_s"] = None
            row["ended_at"] = ""
    counts = dict(Counter(row["state"] for row in rows))
    answer = {"rows": visible, "total": len(chosen), "page": number, "pages": pages, "counts": counts}
    answer["queue"] = queue(history.runs_dir) if "queued" in counts else []
    digest = hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()[:16]
    return {"digest": digest, "same": True} if digest == texts["digest"] else {"digest": digest, **answer}
