"""Data as training sees it, for the Data page and `tunesmith data`: rows, packed rows and statistics.

`trainers/tools/data_preview.py` does the work, in processes that are reused and closed when idle.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.console import shortened
from app.runs.runs import run_of_id
from app.services.allowed_paths import path_mistakes
from app.services.fields import as_texts
from app.services.rpc_client import Worker, WorkerDied
from trainers.config.fields import fields
from trainers.config.local_paths import INPUT_PATHS, absolute_paths
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.mix import config_of, read_mix
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.run.from_run import resolve_request

PROGRAM = "trainers.tools.data_preview"
IDLE_SECONDS = 600.0
ANSWER_SECONDS = 900.0
"""Timeout for one page of rows: the tokenizer or data set may have to be downloaded from the Hub first."""
FIELDS = (
    "model_name_or_path", "dataset_name", "mix", "dataset_format", "columns", "chat_template", "assistant_only_loss",
    "max_length", "packing", "overlong",
)  # fmt: skip
"""Options that the Data page shows."""
AUTO_COUNT_BYTES = 32 << 20
"""Data sets up to this many bytes are counted automatically."""
DEFAULT_THRESHOLD, LEAST_THRESHOLD = 0.7, 0.3
"""Similarity from which rows count as alike, unless another is named, and the least; see `trainers.data.near`."""
_MAX_RUNNING_JOBS = 4
_MAX_JOBS = 32


class _IdleWorker:
    """A worker that is started on demand and closed after `IDLE_SECONDS` without use."""

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
                self._schedule_idle_check()
            self._worker.last_used = time.monotonic()
            return self._worker

    def close(self) -> None:
        """Ends the worker; the next `get` starts another."""
        with self._lock:
            if self._worker:
                self._worker.close()
            self._worker = None

    def _schedule_idle_check(self) -> None:
        timer = threading.Timer(IDLE_SECONDS, self._close_if_idle)
        timer.daemon = True
        timer.start()

    def _close_if_idle(self) -> None:
        with self._lock:
            if self._worker is None:
                return
            if self._worker.busy or time.monotonic() - self._worker.last_used < IDLE_SECONDS:
                self._schedule_idle_check()
                return
            self._worker.close()
            self._worker = None


_pages, _counts = _IdleWorker(), _IdleWorker()  # two, so that rows can be shown while a large data set is counted


class DataView:
    """Reads the data of one config.

    Args:
        config: validated; the caller has checked its paths.
    """

    def __init__(self, config: TrainConfig):
        self.config = config

    def sources(self) -> list[DataView]:
        """The sources of a mix, each as data of its own; otherwise the data itself.

        Raises:
            ConfigError: when the mix cannot be read.
        """
        if self.config.mix is None:
            return [self]
        return [DataView(config_of(self.config, source)) for source in read_mix(self.config.mix).sources]

    def rows(self, offset: int, count: int) -> dict[str, Any]:
        """Rows as read and as trained; see `trainers.tools.data_preview.Preview.rows`.

        Raises:
            ConfigError: when data or tokenizer cannot be read.
            WorkerDied: when the process that reads them ends.
        """
        if not 0 <= offset <= 2**53 or not 1 <= count <= 1000:
            raise ConfigError(f"rows {offset} to {offset + count} cannot be shown; give a row number of 0 or more")
        return self._request({"ask": "rows", "offset": offset, "count": count})

    def packed(self, index: int) -> dict[str, Any]:
        """One row of the batches, document by document; tokenizes the whole data set if it is small.

        Raises:
            ConfigError: when data or tokenizer cannot be read, there is no such row, or large data is not counted yet.
            WorkerDied: when the process that reads them ends.
        """
        key = statistics_key(self.config)
        counted = any(name.startswith(key) and job.statistics for name, job in list(_jobs.items()))
        if not counted and self.rows(0, 1)["bytes"] > AUTO_COUNT_BYTES:
            raise ConfigError("batch rows are only known once the whole data set is counted; start the statistics")
        return self._request({"ask": "packed", "index": index})

    def statistics(self, languages: int = 0) -> Iterator[dict[str, Any]]:
        """Statistics of the whole data set: documents with `progress`, then one with `statistics`.

        Args:
            languages: number of documents whose language is told; 0 leaves languages out.

        Raises:
            ConfigError: when data or tokenizer cannot be read, or the data contains nothing to train on.
            WorkerDied: when the process that counts ends.
        """
        return _pages.get().ask({"ask": "statistics", "config": self.config.model_dump(), "languages": languages})

    def comparison(self, threshold: float, near: bool, against: TrainConfig | None) -> Iterator[dict[str, Any]]:
        """Compares rows: documents with `progress`, then one with `comparison`; see `trainers.tools.data_compare`.

        Args:
            threshold: similarity from which rows count as alike.
            near: whether to look for near-duplicates in the data itself.
            against: a config whose evaluation data are the other data; None without any.

        Raises:
            ConfigError: when data cannot be read.
            WorkerDied: when the process that compares ends.
        """
        other = None if against is None else absolute_paths(against).model_dump()
        request = {"ask": "comparison", "threshold": threshold, "near": near, "against": other}
        return _pages.get().ask({**request, "config": self.config.model_dump()})

    def _request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = _pages.get().ask({**request, "config": self.config.model_dump()}, ANSWER_SECONDS)
        return next(document for document in list(answer) if "progress" not in document)


def open_data(config: TrainConfig) -> DataView:
    """Opens the data that a config trains on."""
    return DataView(absolute_paths(config))


def close_data() -> None:
    """Ends the processes that read data."""
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
    """Validates an untrusted request; returns its config.

    Args:
        values: text, number or boolean by option; blank keeps the value of the preset or the run.
        preset: its name.
        run_id: of a run in `runs_dir` to start from.
        runs_dir: folder of run folders.
        roots: folders that files may be in; None allows every path.
        remote_code: whether `trust_remote_code` may be on.

    Raises:
        ConfigError: with all mistakes at once.
    """
    optional = {option.name for option in fields() if option.optional or option.kind in ("list", "map")}
    texts = {name: text for name, text in as_texts(dict(values)).items() if text.strip() or name in optional}
    stored = str(_run_config(run_id, runs_dir)) if run_id and runs_dir else None
    name = as_texts({"preset": preset})["preset"] if preset else None
    errors, requested = Mistakes(), dict[str, Any](texts)
    if roots is not None:  # before the folder or file is read
        errors += path_mistakes(
            {name: texts.get(name) for name in ("from_run", "teacher", "objective", "reward_funcs", "reward_schema")},
            roots,
        )
        errors.refuse()
    with errors:
        config = resolve_request(Request(name, stored, options=dict(texts)))
        requested = config.model_dump()
    if roots is not None:
        errors += path_mistakes({option: requested.get(option) for option in (*INPUT_PATHS, "cache_dir")}, roots)
    if requested.get("trust_remote_code") is True and not remote_code:
        mistake = Mistake(
            "trust_remote_code", True, "is refused here", "start the server with --trust_remote_code to allow it"
        )
        errors.append(mistake)
    errors.refuse()
    return config


def _run_config(run_id: str, runs_dir: Path) -> Path:
    """The config of a run; untrusted callers may give only ids, not paths."""
    return run_of_id(run_id, runs_dir).config


def similarity(value: object, mistakes: Mistakes) -> float:
    """The similarity from which rows count as alike; adds a mistake and returns NaN if it is none."""
    text = str(value).strip()
    try:
        threshold = float(text) if text.isascii() else math.nan
    except ValueError:
        threshold = math.nan
    if not LEAST_THRESHOLD <= threshold <= 1:
        remedy = f"give one from {LEAST_THRESHOLD} to 1, such as {DEFAULT_THRESHOLD}"
        mistakes.append(Mistake("near_duplicates", repr(text[:40]), "is not a valid similarity", remedy))
        return math.nan
    return threshold


def row_number(value: object) -> int:
    """Parses a row number from a page or a script.

    Raises:
        ConfigError: unless it is a whole number of 0 or more.
    """
    text = str(value if value is not None else 0).removesuffix(".0")
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise ConfigError(f"row {shortened(text, 40)!r} is not a row number; give a whole number of 0 or more")
    return int(text)


# -- statistics and comparisons, which continue when a page is closed -------------------------------------------------


@dataclass
class DataJob:
    """A count or a comparison in progress, or its result.

    Args:
        state: `waiting` for another one, `running`, `done`, `failed` or `cancelled`.
        progress: `what`, rows `done` and `total` rows (0 while unknown).
        statistics: the result; see `trainers.tools.data_preview.Preview.statistics`.
        comparison: the result of a comparison; see `trainers.tools.data_compare.compare`.
        mistakes: lines that say why it failed.
        cancel_requested: set by `cancel_job`.
    """

    state: Literal["waiting", "running", "done", "failed", "cancelled"] = "waiting"
    progress: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Any] | None = None
    comparison: dict[str, Any] | None = None
    mistakes: list[str] = field(default_factory=list)
    cancel_requested: bool = False


_jobs: OrderedDict[str, DataJob] = OrderedDict()
_jobs_lock = threading.Lock()
# Results by `_data_key`; a few bytes per counted data set.
_rows: dict[str, int] = {}
_notes: dict[str, list[str]] = {}


def statistics_key(config: TrainConfig) -> str:
    """A key that identifies the statistics of a config with absolute paths."""
    return hashlib.sha256(json.dumps(config.model_dump(), sort_keys=True).encode()).hexdigest()[:24]


def start_statistics(config: TrainConfig, languages: int = 0) -> str:
    """Counts a data set in the background, or joins a running count of the same data.

    Args:
        config: validated.
        languages: number of documents whose language is told; 0 leaves languages out.

    Returns:
        The key for `data_job`.

    Raises:
        ConfigError: when too many are running.
    """
    config = absolute_paths(config)
    key = statistics_key(config) + (f"-{languages}" if languages else "")
    return _start(key, config, {"ask": "statistics", "languages": languages})


def start_comparison(config: TrainConfig, threshold: float, against: TrainConfig | None = None) -> str:
    """Looks for near-duplicates in the background, or joins a running search for the same; see `DataView.comparison`.

    Args:
        config: validated.
        threshold: similarity from which rows count as alike.
        against: a config whose evaluation data are other data to compare with; None without any.

    Returns:
        The key for `data_job`.

    Raises:
        ConfigError: when too many are running.
    """
    config, other = absolute_paths(config), None if against is None else absolute_paths(against)
    key = f"{statistics_key(config)}-{threshold}-{statistics_key(other) if other else ''}"
    request = {"ask": "comparison", "threshold": threshold, "near": True, "against": other and other.model_dump()}
    return _start(key, config, request)


def _start(key: str, config: TrainConfig, request: dict[str, Any]) -> str:
    with _jobs_lock:
        live = [name for name, job in _jobs.items() if job.state in ("waiting", "running")]
        if key in live:
            return key
        if len(live) >= _MAX_RUNNING_JOBS:
            raise ConfigError(f"{len(live)} data sets are being counted or compared; wait, or cancel one")
        job = _jobs[key] = DataJob()
        _jobs.move_to_end(key)
        for old in [name for name in _jobs if name not in live][: max(0, len(_jobs) - _MAX_JOBS)]:
            del _jobs[old]
    threading.Thread(target=_work, args=(job, config.model_dump(), request), daemon=True).start()
    return key


def data_job(key: str) -> DataJob | None:
    """The count or comparison for a key; None if there is none, or no longer."""
    return _jobs.get(key)


def cancel_job(key: str) -> None:
    """Stops a count or a comparison; does nothing when it is over."""
    job = _jobs.get(key)
    if job:
        job.cancel_requested = True
        if job.state == "running":
            _counts.get().cancel()


def known_rows(config: TrainConfig) -> int | None:
    """Rows in the batches of an epoch, if counted since the data last changed; otherwise None.

    Always None for a folder or a glob, also as the source of a mix: that it changed would be seen in its files alone.
    """
    key = _data_key(absolute_paths(config).model_dump())
    rows = _rows.get(key) if key else None
    if rows is None or config.mix is None or read_mix(config.mix).stopping_strategy == "all_exhausted":
        return rows
    return rows - rows % config.global_batch_size  # full batches alone


def known_notes(config: TrainConfig) -> list[str]:
    """Notes on the data, such as unused fields; empty where `known_rows` is None."""
    key = _data_key(absolute_paths(config).model_dump())
    return _notes.get(key, []) if key else []


def _data_key(values: Mapping[str, Any]) -> str | None:
    """A key of all that determines the number of rows: data and tokenizer options, state of the files, split seed.

    None for a folder or a glob, also as the source of a mix.
    """
    try:
        sources = [values] if values["mix"] is None else [dict(source) for source in read_mix(values["mix"]).sources]
    except ConfigError:
        return None
    data = [str(source["dataset_name"]) for source in sources]
    if any(os.path.isdir(name) or any(mark in name for mark in "*?[") for name in data):
        return None
    deciding = {option.name: values[option.name] for option in fields() if option.section in ("model", "data")}
    deciding |= {name: values[name] for name in ("objective", "reward_funcs")}  # which columns are read
    # These options of the same sections do not affect the rows.
    for name in ("attn_implementation", "num_hidden_layers", "random_init", "dataset_num_proc", "group_by_length"):
        del deciding[name]
    for path in filter(None, (values["mix"], *data, *(source["chat_template"] for source in sources))):
        with contextlib.suppress(OSError, ValueError, TypeError):
            status = os.stat(path)
            deciding[f"state of {path}"] = [status.st_size, status.st_mtime_ns]
    deciding["seed"] = values["seed"] if values["eval_share"] else None
    return json.dumps(deciding, sort_keys=True)


def _work(job: DataJob, values: dict[str, Any], request: dict[str, Any]) -> None:
    key = _data_key(values)
    try:
        worker = _counts.get()
        for document in worker.ask({**request, "config": values}):
            if job.state == "waiting":
                job.state = "running"
            if job.cancel_requested:
                worker.cancel()
            job.progress = document.get("progress", job.progress)
            job.statistics = document.get("statistics", job.statistics)
            job.comparison = document.get("comparison", job.comparison)
            if document.get("cancelled"):
                job.state = "cancelled"
        if job.state == "running" and (job.statistics or job.comparison):
            if key and job.statistics:
                _rows[key] = int(job.statistics["epoch_rows"])
                _notes[key] = list(job.statistics["notes"])
            job.state = "done"
    except (ConfigError, WorkerDied, OSError) as error:
        job.mistakes = error.lines if isinstance(error, ConfigError) else str(error).splitlines()
        job.state = "failed"
