"""The table of all runs: a row per run, kept between two looks for as long as its files do not change."""

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

from app.runs.safe_read import Stamp, open_regular, read_span, stamp
from app.runs.runs import run_paths, true_state
from trainers.config.options import ConfigError
from trainers.run.folder import END_STATES, LIVE_STATES, STATES, RunFolder, read_json

SPARKS = 40
"""Most points of a loss sparkline."""
PAGE = 100
"""Rows that a page of the table holds."""
_WHOLE = 1 << 16
_PIECE = 1 << 11
_TAIL = 1 << 13
_HEAD = 1 << 14
_LOSS = re.compile(rb'^\{"step": (\d{1,15}),.*?"loss": (-?[0-9.]+(?:[eE][-+]?\d+)?)[,}]', re.MULTILINE)
_ELAPSED = re.compile(rb'"elapsed_s": ([0-9.]+(?:e[-+]?\d+)?)[,}]')
_GPUS = re.compile(r"^CUDA_VISIBLE_DEVICES=([0-9,]+) ")
_STRATEGY = "# strategy:"
_FAST_SAFE = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SORTS = ("started_at", "id", "state", "preset", "strategy", "progress", "loss", "duration_s")

Row = dict[str, Any]


@dataclass
class _Entry:
    """A row and the files that it was made from; `fixed` is what a run never changes after its start."""

    run: RunFolder
    stamps: tuple[Stamp | None, Stamp | None]
    row: Row
    fixed: Row


class History:
    """The rows of all runs of a folder. One object serves a whole server; it may be used by several threads.

    Args:
        runs_dir: folder of run folders; registered runs elsewhere are listed too.
    """

    def __init__(self, runs_dir: Path):
        self.runs_dir = runs_dir
        self.known: dict[Path, _Entry] = {}
        self.lock = threading.Lock()

    def rows(self) -> list[Row]:
        """A row per run, newest first; of runs with the same id the one in `runs_dir` alone.

        Keys: `id, state, cause, step, total_steps, progress` (0 to 1 or None), `preset, method, strategy, world_size,
        gpus, loss, sparkline` (at most `SPARKS` numbers), `started_at, ended_at, duration_s, run_dir`.
        """
        with self.lock:
            found: dict[str, Row] = {}
            known: dict[Path, _Entry] = {}
            for path in run_paths(self.runs_dir):
                entry = self._entry(path)
                if entry is not None:
                    known[path] = entry
                    found[path.name] = entry.row  # those of `runs_dir` come last
            self.known = known
            rows = [_aged(row) for row in found.values()]
        return sorted(rows, key=lambda row: (row["started_at"], row["id"]), reverse=True)

    def _entry(self, path: Path) -> _Entry | None:
        before = self.known.get(path)
        run = before.run if before else RunFolder(path)
        seen = stamp(run.state_file)
        if seen is None:
            return None
        same = before is not None and before.stamps[0] == seen
        if before and same and before.row["truly"] and before.row["state"] in END_STATES:
            return before
        stamps = (seen, stamp(run.metrics))
        if before is None or before.stamps != stamps:
            row = _row(run, before.fixed if before and same else None)
            return None if row is None else _Entry(run, stamps, *row)
        before.row.update(_standing(run))  # a live run may have died, which no file says
        return before


def _row(run: RunFolder, fixed: Row | None) -> tuple[Row, Row] | None:
    if (read_json(run.state_file) or {}).get("state") not in STATES:
        return None
    fixed = fixed or _fixed(run)
    losses, last, elapsed = loss_curve(run.metrics)
    row = {"id": run.id, **_standing(run), **fixed, "loss": last, "sparkline": losses, "trained_s": elapsed}
    return row, fixed


def _standing(run: RunFolder) -> Row:
    """What the state file says, with every value of its type."""
    written = read_json(run.state_file) or {}
    state = true_state(run) if written.get("state") in LIVE_STATES else written
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
    """An ISO time, or an empty text for what is none."""
    try:
        return datetime.fromisoformat(value).isoformat() if isinstance(value, str) else ""
    except ValueError:
        return ""


def _aged(row: Row) -> Row:
    """The row with its duration: wall time; of a resumed run the time trained, as it lay idle in between."""
    begun, ended = row["started_at"], row["ended_at"]
    duration = row["trained_s"]
    if row["attempt"] == 0 and begun:
        live = row["state"] in LIVE_STATES
        end = datetime.now(UTC) if live else datetime.fromisoformat(ended or begun)
        duration = max(0.0, (_aware(end) - _aware(datetime.fromisoformat(begun))).total_seconds())
    return {key: value for key, value in row.items() if key not in ("truly", "trained_s")} | {"duration_s": duration}


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _fixed(run: RunFolder) -> Row:
    """What is settled when a run starts. A thousand configs are looked at: of each the lines that are shown."""
    config, accelerate = _text(run.config), _text(run.accelerate)
    first = accelerate.partition("\n")[0]
    gpus = _GPUS.match(_text(run.command))
    world = _scalar(accelerate, "num_processes")
    return {
        "preset": _word(_scalar(config, "preset")),
        "method": _word(_scalar(config, "method")),
        "strategy": first.removeprefix(_STRATEGY).strip()[:100] if first.startswith(_STRATEGY) else "",
        "world_size": _count(world),
        "gpus": [int(word) for word in gpus[1].split(",") if word][:64] if gpus else [],
        "run_dir": str(run.path),
    }


def _text(path: Path) -> str:
    return read_span(path, 0, _HEAD)[0].decode("utf-8", "replace")


def _scalar(text: str, key: str) -> Any:
    """The value of a top-level `key: value` line; None when there is none."""
    line = re.search(rf"^{key}: (.{{1,300}})$", text, re.MULTILINE)
    try:
        return yaml.load(line[1], Loader=_FAST_SAFE) if line else None  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _word(value: Any) -> str | None:
    return None if value is None or isinstance(value, list | dict) else str(value)[:100]


# -- the loss in a few points ----------------------------------------------------------------------------------------


def loss_curve(path: Path) -> tuple[list[float], float | None, float | None]:
    """The loss in at most `SPARKS` points, the last loss, and the seconds trained so far.

    Of a large file some rows are read, evenly spread over it. Where steps were repeated the later ones count.
    """
    points: list[tuple[bytes, ...]] = []
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _WHOLE:
                data = file.read(size)
                points = _LOSS.findall(data)
            else:
                for index in range(SPARKS - 1):
                    file.seek(index * size // (SPARKS - 1))
                    if found := _LOSS.search(file.read(_PIECE)):
                        points.append(found.groups())
                file.seek(size - _TAIL)
                data = file.read(_TAIL)
                points += _LOSS.findall(data)[-1:]
    except OSError:
        return [], None, None
    kept: list[tuple[int, bytes]] = []
    for step, loss in points:
        while kept and kept[-1][0] >= int(step):
            kept.pop()
        kept.append((int(step), loss))
    losses = [value for _, loss in _spread(kept) if (value := _number(loss)) is not None]
    elapsed = _ELAPSED.findall(data)
    return losses, losses[-1] if losses else None, _number(elapsed[-1]) if elapsed else None


def _number(word: bytes) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _spread(values: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    if len(values) <= SPARKS:
        return values
    return [values[round(index * (len(values) - 1) / (SPARKS - 1))] for index in range(SPARKS)]


# -- what of it is shown ---------------------------------------------------------------------------------------------


def select(
    rows: Iterable[Row], state: str = "", words: str = "", sort: str = "started_at", down: bool = True
) -> list[Row]:
    """The rows that are asked for, in the order that is asked for.

    Args:
        rows: from `History.rows`.
        state: one state; empty for all.
        words: each must stand in the id, preset, method, strategy or cause, whatever its case.
        sort: one of `SORTS`; rows without a value come last.
        down: largest, newest or last letter first.

    Raises:
        ConfigError: for a state or a sort that there is not.
    """
    if state and state not in STATES:
        raise ConfigError(f"state={state[:50]!r} is no state of a run; use one of {', '.join(STATES)}")
    if sort not in SORTS:
        raise ConfigError(f"sort={sort[:50]!r} is no column; use one of {', '.join(SORTS)}")
    wanted = words.casefold().split()
    kept = [row for row in rows if (not state or row["state"] == state) and _has_words(row, wanted)]
    valued = [row for row in kept if row[sort] not in (None, "")]
    valued.sort(key=lambda row: row[sort], reverse=down)
    return valued + [row for row in kept if row[sort] in (None, "")]


def _has_words(row: Row, wanted: Sequence[str]) -> bool:
    if not wanted:
        return True
    keys = ("id", "preset", "method", "strategy", "cause", "state")
    text = " ".join(str(row[key]) for key in keys if row[key]).casefold()
    return all(word in text for word in wanted)


def page(history: History, asked: Any) -> dict[str, Any]:
    """What the table of a page shows.

    Args:
        history: the rows.
        asked: `state`, `words`, `sort`, `down`, `page` (from 0), and as `digest` what the caller shows already.

    Returns:
        `digest` and `same: true` when nothing has changed, else also `rows` (at most `PAGE`), `total`, `page`, `pages`
        and `counts` of all runs by state; `error` for a request that is wrong. A live run's `duration_s` is left out
        of the comparison: `started_at` tells it.
    """
    asked = asked if isinstance(asked, dict) else {}
    words = {key: str(asked.get(key) or "")[:200] for key in ("state", "words", "sort", "digest")}
    rows = history.rows()
    try:
        chosen = select(
            rows, words["state"], words["words"], words["sort"] or "started_at", asked.get("down") is not False
        )
    except ConfigError as error:
        return {"error": str(error)}
    pages = max(1, math.ceil(len(chosen) / PAGE))
    number = min(max(0, asked["page"] if isinstance(asked.get("page"), int) else 0), pages - 1)
    shown = chosen[number * PAGE : (number + 1) * PAGE]
    for row in shown:
        if row["state"] in LIVE_STATES and row["attempt"] == 0:
            row["duration_s"] = None
            row["ended_at"] = ""
    counts = dict(Counter(row["state"] for row in rows))
    answer = {"rows": shown, "total": len(chosen), "page": number, "pages": pages, "counts": counts}
    digest = hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()[:16]
    return {"digest": digest, "same": True} if digest == words["digest"] else {"digest": digest, **answer}
