"""Data as a training would see it, for the Data page and `tunesmith data`: rows, packed rows and statistics.

The work is done by `trainers/tools/data_preview.py` in processes that are kept for the next look and closed when idle.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.console import shortened
from app.launch.job import Mistakes
from app.runs.runs import run_of_id
from app.services.allowed_paths import INPUTS, path_mistakes
from app.services.fields import as_texts, fields
from app.services.rpc_client import Worker, WorkerDied
from trainers.config.options import ConfigError, TrainConfig, absolute_paths
from trainers.config.parse import Request

PROGRAM = "trainers.tools.data_preview"
IDLE_SECONDS = 600.0
ANSWER_SECONDS = 900.0
"""For one page of rows: a tokenizer or data set may have to be fetched from the Hub first."""
FIELDS = (
    "model_name_or_path", "dataset_name", "dataset_format", "columns", "chat_template", "assistant_only_loss",
    "max_length", "packing", "overlong",
)  # fmt: skip
"""Options that the Data page shows."""
COUNTED_AT_ONCE = 32 << 20
"""Bytes of data up to which the whole of it is looked at without being asked."""
_MOST_WAITING = 4
_KEPT_JOBS = 32


class _Kept:
    """A worker that is started when it is needed, and closed when it has not been for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        atexit.register(self.close)

    def get(self) -> Worker:
        """The running worker."""
        with self._lock:
            if self._worker is None or not self._worker.alive:
                if self._worker:
                    self._worker.close()
                self._worker = Worker(PROGRAM, env={"TOKENIZERS_PARALLELISM": "false"})
                self._look_later()
            self._worker.last_used = time.monotonic()
            return self._worker

    def close(self) -> None:
        """Ends it; the next look starts another."""
        with self._lock:
            if self._worker:
                self._worker.close()
            self._worker = None

    def _look_later(self) -> None:
        timer = threading.Timer(IDLE_SECONDS, self._close_if_idle)
        timer.daemon = True
        timer.start()

    def _close_if_idle(self) -> None:
        with self._lock:
            if self._worker is None:
                return
            if self._worker.busy or time.monotonic() - self._worker.last_used < IDLE_SECONDS:
                self._look_later()
                return
            self._worker.close()
            self._worker = None


_pages, _counts = _Kept(), _Kept()  # apart, so that rows are shown while a large data set is counted


class DataView:
    """A look at the data of one config.

    Args:
        config: validated; its paths have been checked by the caller.
    """

    def __init__(self, config: TrainConfig):
        self.config = config

    def rows(self, offset: int, count: int) -> dict[str, Any]:
        """Some rows, as read and as trained; see `trainers.tools.data_preview.Preview.rows`.

        Raises:
            ConfigError: when data or tokenizer cannot be read.
            WorkerDied: when the process that reads them has ended.
        """
        if not 0 <= offset <= 2**53 or not 1 <= count <= 1000:
            raise ConfigError(f"rows {offset} to {offset + count} cannot be shown; give a row from 0 on")
        return self._one({"ask": "rows", "offset": offset, "count": count})

    def packed(self, index: int) -> dict[str, Any]:
        """One row of the batches, document by document; the whole data set is tokenised for it if it is small.

        Raises:
            ConfigError: when data or tokenizer cannot be read, there is no such row, or large data is not counted yet.
            WorkerDied: when the process that reads them has ended.
        """
        job = statistics_job(statistics_key(self.config))
        if (job is None or job.state != "done") and self.rows(0, 1)["bytes"] > COUNTED_AT_ONCE:
            raise ConfigError("rows of the batches are known when the whole data set is counted; start its statistics")
        return self._one({"ask": "packed", "index": index})

    def statistics(self) -> Iterator[dict[str, Any]]:
        """What becomes of the whole data set: documents with `progress`, then one with `statistics`.

        Raises:
            ConfigError: when data or tokenizer cannot be read, or nothing of the data can be trained.
            WorkerDied: when the process that counts has ended.
        """
        return _pages.get().ask({"ask": "statistics", "config": self.config.model_dump()})

    def _one(self, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = _pages.get().ask({**request, "config": self.config.model_dump()}, ANSWER_SECONDS)
        return next(document for document in list(answer) if "progress" not in document)


def open_data(config: TrainConfig) -> DataView:
    """A look at the data that a config trains on."""
    return DataView(absolute_paths(config))


def close_data() -> None:
    """Ends the processes that look at data."""
    _pages.close()
    _counts.close()


def data_config(
    values: Mapping[str, Any],
    preset: str | None = None,
    run_id: str | None = None,
    runs_dir: Path | None = None,
    roots: Sequence[Path] | None = None,
    remote_code: bool = False,
) -> TrainConfig:
    """The config of a request that anybody may have sent.

    Args:
        values: text, number or boolean by option; a blank leaves what the preset or the run has.
        preset: its name.
        run_id: of a run in `runs_dir` to start from.
        runs_dir: folder of run folders.
        roots: folders in which files may lie; None allows every path.
        remote_code: whether `trust_remote_code` may be on.

    Raises:
        ConfigError: with every mistake at once.
    """
    optional = {one.name for one in fields() if one.optional or one.kind in ("list", "map")}
    texts = {name: text for name, text in as_texts(dict(values)).items() if text.strip() or name in optional}
    stored = str(_run_config(run_id, runs_dir)) if run_id and runs_dir else None
    name = as_texts({"preset": preset})["preset"] if preset else None
    mistakes, asked = Mistakes(), dict[str, Any](texts)
    with mistakes:
        config = Request(name, stored, options=dict(texts)).resolve()
        asked = config.model_dump()
    if roots is not None:
        mistakes.lines += path_mistakes({one: asked.get(one) for one in (*INPUTS, "cache_dir")}, roots).values()
    if asked.get("trust_remote_code") is True and not remote_code:
        refused = "trust_remote_code=true is refused here; start the server with --trust_remote_code to allow it"
        mistakes.lines.append(refused)
    mistakes.refuse()
    return config


def _run_config(run_id: str, runs_dir: Path) -> Path:
    """The config of a run; from outside only ids are taken, no paths."""
    return run_of_id(run_id, runs_dir).config


def row_number(value: object) -> int:
    """A row's number as a page or a script sends it.

    Raises:
        ConfigError: when it is no whole number from 0 on.
    """
    text = str(value if value is not None else 0).removesuffix(".0")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ConfigError(f"row {shortened(text, 40)!r} is no row; give a whole number from 0 on")
    return int(text)


# -- statistics that go on when a page is closed ---------------------------------------------------------------------


@dataclass
class StatisticsJob:
    """A count under way, or its result.

    Args:
        state: `waiting` for another count, `running`, `done`, `failed` or `cancelled`.
        progress: `what`, rows `done` and rows in all as `total` (0 while that is not known).
        statistics: the result; see `trainers.tools.data_preview.Preview.statistics`.
        mistakes: why it failed, a line each.
    """

    state: Literal["waiting", "running", "done", "failed", "cancelled"] = "waiting"
    progress: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Any] | None = None
    mistakes: list[str] = field(default_factory=list)
    unwanted: bool = False


_jobs: OrderedDict[str, StatisticsJob] = OrderedDict()
_jobs_lock = threading.Lock()
# By what decides them; a few bytes for each data set that was counted.
_rows: dict[str, int] = {}
_notes: dict[str, list[str]] = {}


def statistics_key(config: TrainConfig) -> str:
    """What tells the statistics of a config with absolute paths from others."""
    return hashlib.sha256(json.dumps(config.model_dump(), sort_keys=True).encode()).hexdigest()[:24]


def start_statistics(config: TrainConfig) -> str:
    """Counts a data set in the background; a count of the same that is under way is joined.

    Returns:
        The key under which `statistics_job` has it.

    Raises:
        ConfigError: when too many are under way.
    """
    config = absolute_paths(config)
    key, values = statistics_key(config), config.model_dump()
    with _jobs_lock:
        live = [name for name, job in _jobs.items() if job.state in ("waiting", "running")]
        if key in live:
            return key
        if len(live) >= _MOST_WAITING:
            raise ConfigError(f"{len(live)} data sets are being counted; wait, or cancel one of them")
        job = _jobs[key] = StatisticsJob()
        _jobs.move_to_end(key)
        for old in [name for name in _jobs if name not in live][: max(0, len(_jobs) - _KEPT_JOBS)]:
            del _jobs[old]
    threading.Thread(target=_count, args=(job, values), daemon=True).start()
    return key


def statistics_job(key: str) -> StatisticsJob | None:
    """The count under a key; None when it is not known (any more)."""
    return _jobs.get(key)


def cancel_statistics(key: str) -> None:
    """Stops a count; nothing happens when it is over."""
    job = _jobs.get(key)
    if job:
        job.unwanted = True
        if job.state == "running":
            _counts.get().cancel()


def known_rows(config: TrainConfig) -> int | None:
    """Rows of the batches of an epoch, where they were counted since the data last changed; else None.

    Always None for a folder or a glob: whether a file in it changed would take a look at each.
    """
    key = _data_key(absolute_paths(config).model_dump())
    return _rows.get(key) if key else None


def known_notes(config: TrainConfig) -> list[str]:
    """What is to be known of the data, such as the fields that are not used; nothing where `known_rows` is None."""
    key = _data_key(absolute_paths(config).model_dump())
    return _notes.get(key, []) if key else []


def _data_key(values: Mapping[str, Any]) -> str | None:
    """What decides how many rows there are: the options of data and tokenizer, the files' state, a split's seed."""
    if os.path.isdir(values["dataset_name"]) or any(mark in values["dataset_name"] for mark in "*?["):
        return None
    deciding = {one.name: values[one.name] for one in fields() if one.section in ("model", "data")}
    for name in ("attn_implementation", "num_hidden_layers", "random_init", "dataset_num_proc", "group_by_length"):
        del deciding[name]
    for name in ("dataset_name", "chat_template"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            status = os.stat(values[name])
            deciding[f"state of {name}"] = [status.st_size, status.st_mtime_ns]
    deciding["seed"] = values["seed"] if values["eval_share"] else None
    return json.dumps(deciding, sort_keys=True)


def _count(job: StatisticsJob, values: dict[str, Any]) -> None:
    key = _data_key(values)
    try:
        worker = _counts.get()
        for document in worker.ask({"ask": "statistics", "config": values}):
            if job.state == "waiting":
                job.state = "running"
            if job.unwanted:
                worker.cancel()
            job.progress = document.get("progress", job.progress)
            job.statistics = document.get("statistics", job.statistics)
            if document.get("cancelled"):
                job.state = "cancelled"
        if job.state == "running" and job.statistics:
            if key:
                _rows[key] = int(job.statistics["training_rows"])
                _notes[key] = list(job.statistics["notes"])
            job.state = "done"
    except (ConfigError, WorkerDied, OSError) as error:
        job.mistakes = error.mistakes if isinstance(error, ConfigError) else str(error).splitlines()
        job.state = "failed"
