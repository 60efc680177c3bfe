"""A stream: training data that is tokenised while the run goes, for data larger than the disk. Imports no torch.

    files -> shards -> in a new order each epoch, windows of whole shards -> packed, shuffled within the window -> rows

A window is a function of shards, seed, epoch and number alone, so any process can make it at any time. Each shard is
tokenised into a cache folder of its own; the least recently used ones make room for others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.remote_data import is_url
from trainers.data.cache import CacheWriter, TokenSet, open_cache
from trainers.data.data_file import DataFile
from trainers.data.fill_cache import (
    cores,
    data_fingerprint,
    first_rows,
    formats_of,
    locked,
    options_of,
    refuse_bad,
    refuse_nothing,
    writing,
)
from trainers.data.joined import JoinedSet
from trainers.data.local_copies import cache_dir
from trainers.data.mix import MixedSet
from trainers.data.progress import Progress
from trainers.data.remote import files_in_place, version_of
from trainers.data.report import Report
from trainers.data.shards import changed
from trainers.data.sources import plan
from trainers.data.stream_split import first_of_side, held_out_of_stream, selection_of_stream
from trainers.data.template import Encoder, training_encoder
from trainers.data.tokenise import TokenizeTask
from trainers.data.workers import Pool
from trainers.run.folder import read_json, write_json
from trainers.run.process_limits import open_more_files

SHARD_BYTES = 1 << 20
"""Least bytes of a shard, the unit in which the order of an epoch is shuffled."""
_MIB = 1 << 20
_PLAN = "shards.json"
_LABEL = "the data"
_TRIES = 5


class Window(NamedTuple):
    """Which window: its epoch, and its number in it, from 0."""

    epoch: int
    number: int


class WindowSet(JoinedSet):
    """The tokenised documents of a window, shard after shard.

    Args:
        stream: the stream.
        window: which window.
        shards: the documents of its shards by their numbers, of those that have any.
        report: of its shards.
    """

    def __init__(self, stream: Stream, window: Window, shards: Mapping[int, TokenSet], report: Report):
        super().__init__(list(shards.values()), stream.fingerprint, report)
        self.stream, self.window, self.shards = stream, window, list(shards)

    @cached_property
    def digest(self) -> str:
        """sha256 of all documents, which every machine must read alike."""
        return hashlib.sha256(self.lengths.tobytes() + self.digests.tobytes()).hexdigest()


class Stream:
    """The shards of a data set, and the windows in which a run reads them.

    Args:
        config: data options, `seed`, `streaming_window` and `streaming_cache`.
        label: what messages call the data.
        beside: the streams of the same run so far, to which it adds itself; no shard in use by one of them is removed.

    Raises:
        ConfigError: if the data or the model's tokenizer cannot be read, or the data cannot be streamed.
    """

    def __init__(self, config: TrainConfig, label: str = _LABEL, beside: list[Stream] | None = None):
        open_more_files()  # the arrays of the shards in use stay open
        self.config, self.label = config, label
        self.files, self._ignored = files_in_place(config)
        self._versions = {file.path: (file.size, file.digest) if is_url(file.path) else version_of(file)
                          for file in self.files}  # fmt: skip
        for file in self.files:
            _refuse_whole(file)
        self._of_shards = _sha256([data_fingerprint(config, "train", self.files), SHARD_BYTES])
        self.fingerprint = _sha256([self._of_shards, config.streaming_window])
        self.folder = cache_dir(config) / "streams" / self._of_shards
        self.limit = config.streaming_cache * _MIB
        self.tasks, self.left_out = self._known_plan() or self._planned()
        self.shards = [shard for ((shard, _, _),) in (task.shards for task in self.tasks)]
        self.rows = sum(shard.rows for shard in self.shards)
        self.is_remote = any(is_url(file.path) for file in self.files)
        self._windows: tuple[int, list[list[int]]] = (-1, [])
        self._in_use: list[int] = []
        self._together = [] if beside is None else beside
        self._together.append(self)
        self._is_first = True

    @cached_property
    def _encoder(self) -> Encoder:
        return training_encoder(self.config)

    def _known_plan(self) -> tuple[list[TokenizeTask], int] | None:
        """What `_planned` found before."""
        sealed = read_json(self.folder / _PLAN) or {}
        try:
            known = sealed["plan"]
            if sealed["sha256"] != _sha256([known]):  # damaged: it is made anew
                return None
            return [self._of_today(TokenizeTask.from_json(values)) for values in known["tasks"]], known["left_out"]
        except (KeyError, TypeError, ValueError, IndexError):
            return None

    def _planned(self) -> tuple[list[TokenizeTask], int]:
        """A task for each shard, and how many rows `max_train_samples` leaves out; all files are read once for it."""
        with locked(self.folder, "train"):
            if known := self._known_plan():
                return known
            return self._plan()

    def _plan(self) -> tuple[list[TokenizeTask], int]:
        shards = plan(self.files, self.config.sample_by, SHARD_BYTES, self.config.columns)
        rows, formats = sum(shard.rows for shard in shards), formats_of(self.config, shards)
        numbers, limit = {file.path: number for number, file in enumerate(self.files)}, self.config.max_train_samples
        shards = first_rows(shards, None if self.config.eval_share else limit)
        tasks = [TokenizeTask([(shard, numbers[shard.file.path], formats[shard.file.path])], "") for shard in shards]
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if limit is not None and self.config.eval_share:
            tasks = self._first_of_side(tasks, limit)
        left_out = rows - sum(task.shards[0][0].rows for task in tasks)
        known = {"tasks": [task.to_json() for task in tasks], "left_out": left_out}
        write_json(self.folder / _PLAN, {"sha256": _sha256([known]), "plan": known})
        return tasks, left_out

    def _first_of_side(self, tasks: list[TokenizeTask], limit: int) -> list[TokenizeTask]:
        """The tasks with the first `limit` rows that are not held out."""
        name = self.config.model_name_or_path
        with writing(self.folder), tempfile.TemporaryDirectory(prefix="tmp-", dir=self.folder) as scratch:
            parts = [replace(task, part=f"{scratch}/{number}") for number, task in enumerate(tasks)]
            options = options_of(self.config, self._encoder)
            with Pool(self._processes(len(tasks)), Path(scratch), self._encoder, options, name) as pool:
                return first_of_side(pool, parts, self.config, False, limit)

    def held_out(self) -> TokenSet:
        """The evaluation data: the first `max_eval_samples` rows that `eval_share` holds out.

        Raises:
            ConfigError: as for `prepare`, or if no row is held out.
        """
        fingerprint, names = self._of_held_out, [file.display_name for file in self.files]
        folder = self.folder.parent.parent / fingerprint
        documents = self.cached_held_out()
        if documents is None:
            with locked(folder, "eval"):
                documents = self.cached_held_out() or held_out_of_stream(
                    self.config, self.tasks, names, folder, fingerprint, self._processes(len(self.tasks))
                )
        documents.rename_sources(self.config.training_data, names)
        return documents

    def cached_held_out(self) -> TokenSet | None:
        """What `held_out` returns, if it is cached."""
        return open_cache(self.folder.parent.parent / self._of_held_out, self._of_held_out)

    @property
    def _of_held_out(self) -> str:
        return _sha256([self._of_shards, "eval", self.config.max_eval_samples])

    def _of_today(self, task: TokenizeTask) -> TokenizeTask:
        """A planned task with the current path of its file: the plan identifies data by content."""
        ((shard, number, name),) = task.shards
        return TokenizeTask([(replace(shard, file=self.files[number]), number, name)], "")

    def windows(self, epoch: int) -> list[list[int]]:
        """The shards of each window of an epoch: at least `streaming_window` rows in each, if the data has as many."""
        known, windows = self._windows
        if known != epoch:
            order = np.random.Generator(np.random.PCG64([self.config.seed, epoch])).permutation(len(self.shards))
            windows, rows = [[]], 0
            for number in order.tolist():
                if rows >= self.config.streaming_window:
                    windows.append([])
                    rows = 0
                windows[-1].append(number)
                rows += self.shards[number].rows
            if rows < self.config.streaming_window and len(windows) > 1:
                last = windows.pop()
                windows[-1] += last
            self._windows = epoch, windows
        return windows

    def after(self, window: Window) -> Window:
        """The window that follows."""
        if window.number + 1 < len(self.windows(window.epoch)):
            return Window(window.epoch, window.number + 1)
        return Window(window.epoch + 1, 0)

    def rows_in(self, window: Window) -> int:
        """Rows of the data in a window."""
        return sum(self.shards[shard].rows for shard in self.windows(window.epoch)[window.number])

    def rows_before(self, window: Window) -> int:
        """Rows of the data that earlier windows of the same epoch read."""
        earlier = self.windows(window.epoch)[: window.number]
        return sum(self.shards[shard].rows for shards in earlier for shard in shards)

    def open(self, window: Window) -> WindowSet:
        """The documents of a window; shards that are not cached are tokenised.

        Raises:
            ConfigError: as for `prepare`, about the rows of this window.
        """
        numbers = self.windows(window.epoch)[window.number]
        for _ in range(_TRIES):  # another run may make room for its own shards before these are opened
            parts = [part for part in map(self.cached, numbers) if part is not None]
            if len(parts) == len(numbers):
                break
            with locked(self.folder, None):
                missing = [number for number in numbers if self.cached(number) is None]
                self._tokenise(missing, keep=numbers, shows=self._is_first)
        else:
            raise ConfigError(f"tokenized data in {self.folder} cannot be read back; check the disk, or set cache_dir")
        self._in_use = numbers
        if self._is_first:
            self._refuse_small_cache()
        self._is_first = False
        report = self._report(window, parts)
        refuse_bad(report, self.config)
        refuse_nothing(report, splits=True)
        with_documents = {number: part for number, part in zip(numbers, parts, strict=True) if len(part)}
        return WindowSet(self, window, with_documents, report)

    def open_first(self, window: Window) -> WindowSet:
        """The documents of a window; of the first one if there is none of that number, which a resume refuses later."""
        return self.open(window if window.number < len(self.windows(window.epoch)) else Window(0, 0))

    def _report(self, window: Window, parts: Iterable[TokenSet]) -> Report:
        name = f"{self.config.training_data} (window {window.number + 1} of {len(self.windows(window.epoch))})"
        report = Report(name, "train", [], len(self.files), left_out=self.left_out)
        for part in parts:
            report.merge(part.report)
            report.formats = sorted({*report.formats, *part.report.formats})
        report.ignored_files = self._ignored
        if self.config.eval_share:
            report.held_out = self.rows_in(window) - report.rows
        return report

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}"

    def _fingerprint_of(self, number: int) -> str:
        return f"{self._of_shards}-{number}"

    def cached(self, number: int) -> TokenSet | None:
        """The documents of a shard, if they are cached; marks them as used."""
        folder = self._path(number)
        token_set = open_cache(folder, self._fingerprint_of(number))
        if token_set is not None:
            token_set.rename_sources(self.config.training_data, [self.shards[number].file.display_name])
            with contextlib.suppress(OSError):  # another process made room
                os.utime(folder)
        return token_set

    def _used(self) -> list[Path]:
        """The folders of the shards in use by the streams of this run."""
        return [stream._path(number) for stream in self._together for number in stream._in_use]

    def _tokenise(self, numbers: list[int], keep: list[int], shows: bool) -> None:
        """Tokenises shards into their folders, and removes others so that all fit into the limit.

        Args:
            numbers: the shards; the caller holds the lock.
            keep: shards that are not removed, besides those in use.
            shows: whether to show the progress.
        """
        if not numbers:
            return
        options = options_of(self.config, self._encoder)
        processes = self._processes(len(numbers))
        name, keep_folders = self.config.model_name_or_path, {*self._used(), *map(self._path, keep)}
        total = sum(self.shards[number].rows for number in numbers)
        size = max(map(_bytes_of, keep_folders), default=0) or max(
            map(_bytes_of, _shard_folders(self.folder.parent)), default=0
        )
        limit = max(0, self.limit - (processes + 1) * size)  # without those that are being written
        used = _make_room(self.folder.parent, limit, keep_folders)
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for leftover in self.folder.glob("tmp-*"):  # of a killed run: the caller holds the lock
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix="tmp-", dir=self.folder) as scratch:
                folder = Path(scratch)
                tasks = [
                    TokenizeTask(
                        [(self.shards[number], 0, self.tasks[number].shards[0][2])],
                        f"{folder}/{number}",
                        selection_of_stream(self.config, held_out=False),
                    )
                    for number in numbers
                ]
                progress_bar = Progress(f"tokenizing a window of {self.label}", total) if shows else nullcontext()
                with Pool(processes, folder, self._encoder, options, name) as pool, progress_bar as progress:
                    done = pool.run(tasks, progress.add if progress else lambda _: None)
                    for number, (task, report) in zip(numbers, done, strict=True):
                        self._publish(number, task, report)
                        used += _bytes_of(self._path(number))
                        if used > limit:
                            used = _make_room(self.folder.parent, limit, keep_folders)

    def _processes(self, shards: int) -> int:
        return max(1, min(shards, self.config.dataset_num_proc or cores()))

    def _refuse_small_cache(self) -> None:
        """Raises ConfigError if the cache does not hold the windows in use and those after them, by the first ones."""
        sizes = [_bytes_of(path) for path in self._used()]
        needed = 2 * sum(sizes) + (self._processes(len(self._in_use)) + 1) * max(sizes, default=0)
        if needed > self.limit:
            streams = len(self._together)
            problem = (
                f"MiB do not hold two windows of streaming_window={self.config.streaming_window:,} rows "
                f"{f'of each of {streams} streams ' * (streams > 1)}({needed / _MIB:,.0f} MiB)"
            )
            remedy = f"use {-(-needed // _MIB) + 1} or more, or a smaller streaming_window"
            raise ConfigError.about("streaming_cache", self.config.streaming_cache, problem, remedy)

    def _publish(self, number: int, task: TokenizeTask, report: Report) -> None:
        """Makes a cache folder of the part files of a shard.

        Raises:
            ConfigError: if its file has changed since the stream was opened.
        """
        file = self.shards[number].file
        if version_of(file) != self._versions[file.path]:
            raise changed(file.display_name)
        writer = CacheWriter(self._path(number))
        try:
            writer.append(task)
            report.formats = [task.shards[0][2]]
            writer.publish(self._fingerprint_of(number), report, [self.shards[number].file.display_name])
        finally:
            writer.discard()


def _shard_folders(streams: Path) -> list[Path]:
    """The folders of the shards of all streams."""
    return [path for path in streams.glob("*/[0-9]*") if path.suffix == "" and path.is_dir()]


def _make_room(streams: Path, limit: int, keep: set[Path]) -> int:
    """Removes the shards of all streams that were used least recently, if they take more than the limit.

    A tenth of it is left free then, so that not every further shard needs a look at all of them.

    Args:
        streams: the folder of all streams.
        limit: bytes.
        keep: folders of shards that are not removed.

    Returns:
        Bytes of the shards that are left.
    """
    folders = _shard_folders(streams)
    sizes = {path: _bytes_of(path) for path in folders}
    used = sum(sizes.values())
    if used > limit:
        for path in sorted(folders, key=_used_at):
            if path not in keep and used > 0.9 * limit:
                shutil.rmtree(path, ignore_errors=True)
                used -= sizes[path]
    return used


def _sha256(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(["stream", *values]).encode()).hexdigest()


def _used_at(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # another process removed it
        return 0.0


def _bytes_of(folder: Path) -> int:
    """Bytes of the files in a folder, of which another process may remove some."""
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries)
    except OSError:
        return 0


def _refuse_whole(file: DataFile) -> None:
    """Raises ConfigError for a file that is held whole before its first row is read."""
    if file.kind == "json":
        problem = f"dataset_streaming: {file.display_name} is a .json file, which is read as a whole"
        raise ConfigError(f"{problem}; write one object per line (.jsonl), or leave out dataset_streaming")


def streams_of(documents: TokenSet) -> list[Stream]:
    """The streams that training data is read from, of a mix those among its sources."""
    parts = documents.parts if isinstance(documents, MixedSet) else [documents]
    return [part.stream for part in parts if isinstance(part, WindowSet)]


def rows_of_epoch(documents: TokenSet, rows: int) -> int:
    """Rows of an epoch of a source; of a stream, an estimate by the window that was read.

    Args:
        documents: its documents, of a stream those of a window.
        rows: training rows that they make.
    """
    if not isinstance(documents, WindowSet):
        return rows
    return max(round(rows * documents.stream.rows / documents.stream.rows_in(documents.window)), 1)


def stream_lines(documents: TokenSet) -> list[str]:
    """The lines that a run prints about its streams; none for other data."""
    streams, lines = streams_of(documents), list[str]()
    for stream in streams:
        config, windows = stream.config, len(stream.windows(0))
        size, name = sum(file.size for file in stream.files) / _MIB, f"{stream.label}: " * (stream.label != _LABEL)
        lines.append(
            f"streaming {name}{size:,.0f} MiB: {stream.rows:,} rows in {len(stream.shards):,} shards, read in a new "
            f"order each epoch; rows are shuffled within {windows:,} window{'s'[: windows != 1]} of "
            f"{config.streaming_window:,} rows or a little more, which are tokenized ahead and take at most "
            f"{config.streaming_cache:,} MiB on disk" + " with those of the other streams" * (len(streams) > 1)
        )
        if config.dataset_query is not None:
            lines.append("the answer to dataset_query is on disk in full: a database is not read in parts")
        if packed := sum(file.content_size is not None for file in stream.files):
            lines.append(f"{packed:,} of its files are compressed: each shard is read from the beginning of its file")
    if streams:
        lines.append(
            "streaming does not promise: the steps of an epoch before it is read (max_steps decides), a shuffle of all "
            "rows, and a check of rows, repeated documents and leaks to the evaluation data beyond the first window "
            "before the start; a bad row saves and ends the run when its window comes (bad_rows=skip leaves it out)"
        )
    return lines
