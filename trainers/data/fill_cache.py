"""One data set, from its files to a cache folder of tokens: what its content depends on, and how it is filled.

    files -> shards -> (in parallel) rows -> documents -> tokens and mask -> one memory-mapped folder

The folder is named by the fingerprint of everything that determines its content. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from trainers.config.mistakes import ConfigError
from trainers.config.objectives import FORMAT_COLUMNS, SFT_FORMATS
from trainers.config.options import TrainConfig
from trainers.config.reward_file import columns_of_rewards
from trainers.data.cache import FORMAT_VERSION, CacheWriter, TokenSet, open_cache
from trainers.data.data_file import DataFile
from trainers.data.files import identity, resolve
from trainers.data.formats import OPTIONAL, recognise, unrecognised, wanted_columns
from trainers.data.held_out import Selection, selection_of
from trainers.data.progress import Progress, say
from trainers.data.report import LONGER, TOO_LONG, Report
from trainers.data.shards import SHARD_BYTES, FileShard
from trainers.data.sources import plan, read, unread_columns
from trainers.data.template import Encoder, training_encoder
from trainers.data.tokenise import Options, TokenizeTask, extra_columns
from trainers.data.tokenizer import tokenizer_folder, tokenizer_hash
from trainers.data.workers import Pool

Split = Literal["train", "eval"]
_ROW_BYTES = 1000  # a rough estimate, to group rows into tasks of similar size
_SNIFFED_ROWS = 100


def data_fingerprint(config: TrainConfig, split: Split, files: list[DataFile] | None = None) -> str:
    """sha256 of all that determines the tokens: the data, the tokenizer, the template, the options.

    Raises:
        ConfigError: if the data or the tokenizer cannot be read.
    """
    files = resolve(config, split) if files is None else files
    held_out = config.eval_share > 0
    spec, rewards = config.objective_spec, columns_of_rewards(config)
    ingredients = {
        "version": FORMAT_VERSION,
        "data": identity(files),
        "tokenizer": tokenizer_hash(tokenizer_folder(config), config),
        "options": [config.dataset_format, sorted(config.columns.items()), config.sample_by],
        "loss": [config.assistant_only_loss, config.thoughts],
        "length": [config.max_length, config.overlong],
        "limit": limit_of(config, split),
        "held_out": ["content", split, config.eval_share, config.seed] if held_out else None,
        **({} if spec.formats == SFT_FORMATS else {"formats": spec.formats}),
        **({"numeric": [[name, name in spec.optional_columns] for name in spec.columns]} if spec.columns else {}),
        **({} if rewards is None else {"rewards": sorted(rewards.items())}),
    }
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


def limit_of(config: TrainConfig, split: Split) -> int | None:
    return config.max_train_samples if split == "train" else config.max_eval_samples


@contextmanager
def locked(folder: Path, split: Split | None) -> Iterator[None]:
    """Holds the lock of a cache folder, which only the holder may write to.

    Args:
        folder: the cache folder.
        split: named in a line if another process holds the lock; None prints none.
    """
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if split is not None:
                say(f"{split} data: waiting for another process to prepare it")
            lock.acquire()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write to the cache folder {folder.parent}: {reason}; set cache_dir") from None
    try:
        yield
    finally:
        lock.release()


def build_set(config: TrainConfig, split: Split, files: list[DataFile], folder: Path, fingerprint: str) -> TokenSet:
    """Tokenises everything and publishes it."""
    shards = plan(files, config.sample_by, SHARD_BYTES, config.columns)
    formats = formats_of(config, shards)
    report = Report(dataset_of(config, split), split, sorted(set(formats.values())), len(files))
    with writing(folder.parent):
        writer = CacheWriter(folder)
        try:
            tasks = _tasks(shards, files, formats, writer.temporary)
            _tokenise(tasks, config, split, writer, report)
            refuse_nothing(report, splits=config.objective_spec.loss_of != "documents")
            writer.publish(fingerprint, report, [file.display_name for file in files])
        finally:
            writer.discard()
    return read_back(folder, fingerprint)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Raises `ConfigError` if tokens cannot be written to a folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot write tokenized data to {folder}: {reason}; free space there, or set cache_dir"
        ) from None


def read_back(folder: Path, fingerprint: str) -> TokenSet:
    """The documents that were just published; raises `ConfigError` if they cannot be read."""
    token_set = open_cache(folder, fingerprint)
    if token_set is None:
        raise ConfigError(f"tokenized data in {folder} cannot be read back; check the disk, or set cache_dir")
    return token_set


def options_of(config: TrainConfig, encoder: Encoder) -> Options:
    """The options that determine how rows become documents."""
    chat = encoder.options.chat_template is not None
    spec = config.objective_spec
    return Options(
        config.sample_by, config.columns, config.max_length, config.overlong, chat, spec.formats, spec.parts,
        {name: name in spec.optional_columns for name in spec.columns}, columns_of_rewards(config),
    )  # fmt: skip


def dataset_of(config: TrainConfig, split: Split) -> str:
    return config.eval_dataset_name if split == "eval" and config.eval_dataset_name else config.training_data


def formats_of(config: TrainConfig, shards: list[FileShard]) -> dict[str, str]:
    """Detects the format of each file from its first readable rows.

    Raises:
        ConfigError: if the columns of a file fit no known format, or `columns` names roles that the format lacks.
    """
    name = config.dataset_format
    if name != "auto":
        unknown = set(config.columns) - {*FORMAT_COLUMNS[name], *OPTIONAL[name], *_columns_beside(config)}
        if unknown:
            raise ConfigError(f"columns.{min(unknown)} is not a role of dataset_format={name}; leave it out")
        return {shard.file.path: name for shard in shards}
    formats: dict[str, str] = {}
    for shard in shards:
        if shard.file.path not in formats:
            formats[shard.file.path] = _sniff(shard, config)
    return formats


def _columns_beside(config: TrainConfig) -> tuple[str, ...]:
    """The columns that the objective reads beside those of the row format."""
    return (*config.objective_spec.columns, *extra_columns(columns_of_rewards(config)))


def _sniff(shard: FileShard, config: TrainConfig) -> str:
    """The format of a file, from its first shard; `auto` (row by row) if none of its first rows can be read."""
    first: tuple[str, list[str]] | None = None
    formats, others = config.objective_spec.formats, _columns_beside(config)
    wanted = wanted_columns(config.columns, others)
    for count, (line, row) in enumerate(read(shard, config.sample_by, wanted)):
        if isinstance(row, dict):
            format_name = recognise(row, config.columns, formats, others)
            if format_name:
                return format_name
            first = first or (f"{shard.file.display_name}:{line}", [*row, *unread_columns(shard.file, wanted)])
        if count == _SNIFFED_ROWS:
            break
    if first is None:
        return "auto"
    raise unrecognised(*first, config.columns, formats)


def first_rows(
    shards: list[FileShard], limit: int | None, of_split: npt.NDArray[np.bool_] | None = None
) -> list[FileShard]:
    """The shards that contain the first `limit` rows of the split.

    Args:
        shards: All shards, in order.
        limit: Number of rows; None for all.
        of_split: `[rows]` whether each row belongs to the split; None for all.
    """
    if limit is None:
        return shards
    if of_split is None:
        last = limit
    else:
        rows_of_split = np.flatnonzero(of_split)
        last = int(rows_of_split[limit - 1]) + 1 if limit <= len(rows_of_split) else len(of_split)
    chosen = [shard for shard in shards if shard.first_row < last]
    return [replace(shard, rows=min(shard.rows, last - shard.first_row)) for shard in chosen]


def _tasks(shards: list[FileShard], files: list[DataFile], formats: dict[str, str], folder: Path) -> list[TokenizeTask]:
    """Groups shards, in order, into tasks of about `SHARD_BYTES`, each with its own path for part files."""
    numbers = {file.path: number for number, file in enumerate(files)}
    tasks: list[TokenizeTask] = []
    size = SHARD_BYTES
    for shard in shards:
        if size >= SHARD_BYTES:
            tasks.append(TokenizeTask([], str(folder / f"part-{len(tasks):06d}")))
            size = 0
        tasks[-1].shards.append((shard, numbers[shard.file.path], formats[shard.file.path]))
        size += _bytes(shard)
    return tasks


def _bytes(shard: FileShard) -> int:
    """Approximate bytes of text in a shard."""
    return shard.rows * _ROW_BYTES if shard.file.kind in ("arrow", "parquet") else shard.end - shard.start


def _tokenise(
    tasks: list[TokenizeTask], config: TrainConfig, split: Split, writer: CacheWriter, report: Report
) -> None:
    """Runs the tasks in worker processes and appends their results in the order of the data."""
    processes = max(1, min(len(tasks), config.dataset_num_proc or cores()))
    encoder = training_encoder(config)
    options, limit = options_of(config, encoder), limit_of(config, split)
    rows = _rows_in(tasks)
    with Pool(processes, writer.temporary, encoder, options, config.model_name_or_path) as pool:
        if config.eval_share:
            selection, of_split = _held_out_rows(pool, tasks, config, split)
            rows_of_split = int(of_split.sum())
            report.held_out = rows - rows_of_split if split == "train" else 0
            tasks = _first_rows(tasks, limit, of_split)
            tasks = [replace(task, selection=selection) for task in tasks]
            report.left_out = rows_of_split - int(of_split[: _rows_in(tasks)].sum())
        else:
            tasks = _first_rows(tasks, limit)
            report.left_out = rows - _rows_in(tasks)
        with Progress(f"tokenizing {split} data", rows - report.held_out - report.left_out) as progress:
            for task, task_report in pool.run(tasks, progress.add):
                writer.append(task)
                report.merge(task_report)


def _held_out_rows(
    pool: Pool, tasks: list[TokenizeTask], config: TrainConfig, split: Split
) -> tuple[Selection, npt.NDArray[np.bool_]]:
    """The rows of this split by `eval_share`, and `[rows]` whether each belongs to it; all rows are read for it."""
    hashing = [replace(task, hashes_with=config.seed) for task in tasks]
    with Progress("choosing the rows held out", _rows_in(tasks)) as progress:
        for _ in pool.run(hashing, progress.add):
            pass

    def hashes() -> Iterator[npt.NDArray[np.uint64]]:
        return (np.fromfile(task.hashes, dtype=np.uint64) for task in hashing)

    selection = selection_of(config.eval_share, config.seed, split == "eval", hashes)
    return selection, np.concatenate([(part < selection.threshold) == selection.held_out for part in hashes()])


def _first_rows(
    tasks: list[TokenizeTask], limit: int | None, of_split: npt.NDArray[np.bool_] | None = None
) -> list[TokenizeTask]:
    """The tasks with the first `limit` rows of the split; see `first_rows`."""
    if limit is None:
        return tasks
    left = first_rows([shard for task in tasks for shard, _, _ in task.shards], limit, of_split)
    shortened, shards = list[TokenizeTask](), iter(left)
    for task in tasks:
        members = [(shard, number, name) for (_, number, name), shard in zip(task.shards, shards, strict=False)]
        if members:
            shortened.append(replace(task, shards=members))
    return shortened


def _rows_in(tasks: list[TokenizeTask]) -> int:
    return sum(shard.rows for task in tasks for shard, _, _ in task.shards)


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_nothing(report: Report, splits: bool) -> None:
    """Raises `ConfigError` with the counts if no document is left.

    Args:
        report: The counts.
        splits: Whether the objective takes documents that are split.
    """
    if report.documents:
        return
    longer = " or raise max_length" + (", or set overlong=split" if splits else "")
    remedy = "repair the data" + longer * (report.bad < report.rows)
    raise ConfigError(
        [
            *report.examples()[:20],
            f"no document is left of {report.dataset} ({report.split}): {report.rows:,} rows read, {report.bad:,} bad, "
            f"{report.dropped:,} dropped (longest {report.longest:,} tokens); {remedy}",
        ]
    )


def refuse_missing_numbers(config: TrainConfig, token_set: TokenSet) -> None:
    """Raises `ConfigError` if only some examples have an optional column that the objective reads."""
    spec = config.objective_spec
    for name, numbers in zip(spec.columns, token_set.numbers.T, strict=True):
        missing, column = np.isnan(numbers), config.columns.get(name, name)
        if missing.any() and not missing.all():
            raise ConfigError(
                f"{token_set.where(int(missing.argmax()))}: {column!r} is missing, and other rows have one "
                f"({int(missing.sum()) // spec.documents:,} of {len(token_set) // spec.documents:,} lack it); give it "
                "to all rows, or leave it out"
            )


def refuse_other_numbers(config: TrainConfig, first: TokenSet, documents: TokenSet) -> None:
    """Raises `ConfigError` if later documents have an optional column that the first ones lack, or the reverse."""
    for name, before, now in zip(config.objective_spec.columns, first.numbers.T, documents.numbers.T, strict=True):
        if np.isnan(before[0]) != np.isnan(now[0]):
            problem = (
                "is there, and rows before lack it" if np.isnan(before[0]) else "is missing, and rows before have it"
            )
            column = config.columns.get(name, name)
            raise ConfigError(f"{documents.where(0)}: {column!r} {problem}; give it to all rows, or leave it out")


def refuse_bad(report: Report, config: TrainConfig) -> None:
    """Raises `ConfigError` for bad rows under `bad_rows=refuse`, and for rows too long under `overlong=refuse`."""
    if report.bad and config.bad_rows == "refuse":
        raise ConfigError(report.refusal())
    if report.too_long:
        listed = report.examples(TOO_LONG)
        raise ConfigError([*listed, f"{report.too_long:,} rows of {report.dataset} are {TOO_LONG}; {LONGER}"])
