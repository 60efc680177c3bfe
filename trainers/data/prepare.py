"""Tokenised data: found in the cache, or made once and found from then on. Imports no torch.

    files -> shards -> (in parallel) rows -> documents -> tokens and mask -> one memory-mapped folder

The folder's name is the fingerprint of everything that decides its content. Callers that come at once, such as the
ranks of a run, wait for the first one and then read what it made.
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
from filelock import FileLock, Timeout

from trainers.config.options import ConfigError, TrainConfig
from trainers.data.cache import FORMAT_VERSION, CacheWriter, TokenSet, open_cache
from trainers.data.files import DataFile, identity, ignored_files, resolve
from trainers.data.formats import NEEDED, OPTIONAL, recognise, unrecognised
from trainers.data.progress import Progress, say
from trainers.data.report import TOO_LONG, Report
from trainers.data.shards import SHARD_BYTES, Shard
from trainers.data.sources import plan, read
from trainers.data.template import Encoder, training_encoder
from trainers.data.tokenise import Job, Options, Selection, row_hashes
from trainers.data.tokenizer import load_tokenizer, tokenizer_folder, tokenizer_hash
from trainers.data.workers import Pool

__all__ = ["Report", "Split", "TokenSet", "cached", "data_fingerprint", "load_tokenizer", "prepare"]

Split = Literal["train", "eval"]
_HUB_ROW_BYTES = 1000  # a guess, to tell large Hub data from small
_SNIFFED_ROWS = 100
_EXACT_SHARE_ROWS = 50_000_000


def prepare(config: TrainConfig, split: Split) -> TokenSet:
    """The tokenised documents of one split, from the cache or made now.

    Args:
        config: Data options, model name, and `seed` when `eval_share` holds rows out.
        split: `train`, or `eval` for `eval_dataset_name` or the rows that `eval_share` holds out.

    Returns:
        The documents, memory-mapped, in the order of the data.

    Raises:
        ConfigError: for data or a model that cannot be read, bad rows (unless `bad_rows=skip`), rows too long under
            `overlong=refuse`, no room for the cache, or when nothing is left.
    """
    found = tokenised(config, split)
    refuse_bad(found.report, config)
    return found


def tokenised(config: TrainConfig, split: Split) -> TokenSet:
    """Like `prepare`, but rows that training would refuse are left out and stand in the report."""
    if split == "eval" and not config.has_evaluation():
        raise ConfigError("there is no evaluation data; set eval_dataset_name or eval_share")
    files = resolve(config, split)
    fingerprint = data_fingerprint(config, split, files)
    folder = cache_dir(config) / fingerprint
    found = open_cache(folder, fingerprint)
    if found is None:
        with _locked(folder, split):
            found = open_cache(folder, fingerprint) or _build(config, split, files, folder, fingerprint)
    found.rename_sources(_dataset(config, split), [file.shown for file in files])
    found.report.ignored_files = ignored_files(config, split)
    return found


def cached(config: TrainConfig, split: Split) -> TokenSet | None:
    """The tokenised documents of one split where they are in the cache, and the data as they were; else None."""
    try:
        fingerprint = data_fingerprint(config, split)
    except ConfigError:
        return None
    return open_cache(cache_dir(config) / fingerprint, fingerprint)


def data_fingerprint(config: TrainConfig, split: Split, files: list[DataFile] | None = None) -> str:
    """sha256 of all that decides the tokens: the data, the tokenizer, the template, the options.

    Raises:
        ConfigError: when the data or the tokenizer cannot be read.
    """
    files = resolve(config, split) if files is None else files
    held_out = config.eval_share > 0
    parts = {
        "version": FORMAT_VERSION,
        "data": identity(files),
        "tokenizer": tokenizer_hash(tokenizer_folder(config), config),
        "options": [config.dataset_format, sorted(config.columns.items()), config.sample_by],
        "loss": [config.assistant_only_loss, config.thoughts],
        "length": [config.max_length, config.overlong],
        "limit": _limit(config, split),
        "held_out": [split, config.eval_share, config.seed] if held_out else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _limit(config: TrainConfig, split: Split) -> int | None:
    return config.max_train_samples if split == "train" else config.max_eval_samples


def cache_dir(config: TrainConfig) -> Path:
    """The folder of what is made once and found from then on."""
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "tunesmith"


@contextmanager
def _locked(folder: Path, split: Split) -> Iterator[None]:
    """Holds the lock of a cache folder; only its holder writes there."""
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"{split} data: waiting for another process that prepares it")
            lock.acquire()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot write to the cache folder {folder.parent}: {reason}; set cache_dir") from None
    try:
        yield
    finally:
        lock.release()


def _build(config: TrainConfig, split: Split, files: list[DataFile], folder: Path, fingerprint: str) -> TokenSet:
    """Tokenises everything and publishes it."""
    shards = plan(files, config.sample_by, SHARD_BYTES, config.columns)
    selection = selection_of(config, split, sum(shard.rows for shard in shards))
    formats = formats_of(config, shards)
    every, shards = shards, _first_rows(shards, selection, _limit(config, split))
    encoder = training_encoder(config)
    options = options_of(config, encoder, selection)
    report = Report(_dataset(config, split), split, sorted(set(formats.values())), len(files))
    report.left_out = _row_count(every, selection) - _row_count(shards, selection)
    try:
        writer = CacheWriter(folder)
        try:
            jobs = _jobs(shards, files, formats, writer.temporary)
            _tokenise(jobs, encoder, options, config, writer, report)
            _refuse_nothing(report)
            writer.publish(fingerprint, report, [file.shown for file in files])
        finally:
            writer.discard()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot write tokenised data to {folder.parent}: {reason}; free space there, or set cache_dir"
        ) from None
    made = open_cache(folder, fingerprint)
    if made is None:
        raise ConfigError(f"tokenised data in {folder} cannot be read back; check the disk, or set cache_dir")
    return made


def options_of(config: TrainConfig, encoder: Encoder, selection: Selection) -> Options:
    """What decides how a row becomes documents."""
    chat = encoder.options.chat_template is not None
    return Options(config.sample_by, config.columns, config.max_length, config.overlong, chat, selection)


def _dataset(config: TrainConfig, split: Split) -> str:
    return config.eval_dataset_name if split == "eval" and config.eval_dataset_name else config.dataset_name


def selection_of(config: TrainConfig, split: Split, rows: int) -> Selection:
    """Which rows `eval_share` gives to this split: an exact share, at least one row for each side."""
    if not config.eval_share:
        return Selection()
    if rows < 2:
        raise ConfigError(f"eval_share={config.eval_share} cannot hold out one of {rows} rows; add data")
    if rows > _EXACT_SHARE_ROWS:
        threshold = int(config.eval_share * 2**64)
    else:
        count = min(rows - 1, max(1, round(config.eval_share * rows)))
        threshold = int(np.partition(row_hashes(0, rows, config.seed), count)[count])
    return Selection(config.seed, threshold, split == "eval")


def formats_of(config: TrainConfig, shards: list[Shard]) -> dict[str, str]:
    """The format of each file, by its first rows that can be read.

    Raises:
        ConfigError: when a file has columns of no known format, or `columns` names roles that the format lacks.
    """
    name = config.dataset_format
    if name != "auto":
        strange = set(config.columns) - {*NEEDED[name], *OPTIONAL[name]}
        if strange:
            raise ConfigError(f"columns.{min(strange)} is no role of dataset_format={name}; leave it out")
        return {shard.file.path: name for shard in shards}
    formats: dict[str, str] = {}
    for shard in shards:
        if shard.file.path not in formats:
            formats[shard.file.path] = _sniff(shard, config)
    return formats


def _sniff(shard: Shard, config: TrainConfig) -> str:
    """The format of a file's first shard; `auto` (row by row) when none of its first rows can be read."""
    first: tuple[str, list[str]] | None = None
    for count, (line, row) in enumerate(read(shard, config.sample_by)):
        if isinstance(row, dict):
            found = recognise(row, config.columns)
            if found:
                return found
            first = first or (f"{shard.file.shown}:{line}", list(row))
        if count == _SNIFFED_ROWS:
            break
    if first is None:
        return "auto"
    raise unrecognised(*first, config.columns)


def _first_rows(shards: list[Shard], selection: Selection, limit: int | None) -> list[Shard]:
    """The shards with the first `limit` rows of the split."""
    if limit is None:
        return shards
    kept: list[Shard] = []
    for shard in shards:
        chosen = np.flatnonzero(selection.choose(shard.first_row, shard.rows))
        if len(chosen) >= limit:
            return [*kept, replace(shard, rows=int(chosen[limit - 1]) + 1)]
        kept.append(shard)
        limit -= len(chosen)
    return kept


def _row_count(shards: list[Shard], selection: Selection) -> int:
    """Rows of the split in these shards."""
    return sum(int(selection.choose(shard.first_row, shard.rows).sum()) for shard in shards)


def _jobs(shards: list[Shard], files: list[DataFile], formats: dict[str, str], folder: Path) -> list[Job]:
    """Shards in order, small ones together, each lot with its place for part files."""
    numbers = {file.path: number for number, file in enumerate(files)}
    jobs: list[Job] = []
    size = SHARD_BYTES
    for shard in shards:
        if size >= SHARD_BYTES:
            jobs.append(Job([], str(folder / f"part-{len(jobs):06d}")))
            size = 0
        jobs[-1].shards.append((shard, numbers[shard.file.path], formats[shard.file.path]))
        size += _bytes(shard)
    return jobs


def _bytes(shard: Shard) -> int:
    """Roughly how much text a shard holds."""
    return shard.rows * _HUB_ROW_BYTES if shard.file.kind in ("hub", "parquet") else shard.end - shard.start


def _tokenise(
    jobs: list[Job], encoder: Encoder, options: Options, config: TrainConfig, writer: CacheWriter, report: Report
) -> None:
    """Runs the jobs in processes, and gathers what they made in the order of the data."""
    processes = max(1, min(len(jobs), config.dataset_num_proc or _cores()))
    total = sum(shard.rows for job in jobs for shard, _, _ in job.shards)
    with Progress(f"tokenising {report.split} data", total) as progress:
        model = config.model_name_or_path
        with Pool(processes, writer.temporary, encoder, options, model) as pool:
            for job, part in pool.run(jobs, progress.add):
                _gather(job, part, writer, report)


def _gather(job: Job, part: Report, writer: CacheWriter, report: Report) -> None:
    writer.append(job)
    report.merge(part)


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _refuse_nothing(report: Report) -> None:
    """Refuses data of which nothing is left, with the counts."""
    if report.documents:
        return
    raise ConfigError(
        [
            *report.bad_examples[:20],
            f"no document is left of {report.dataset} ({report.split}): {report.rows:,} rows read, {report.bad:,} bad, "
            f"{report.dropped:,} dropped (longest {report.longest:,} tokens); repair the data, raise max_length, or "
            "set overlong=split",
        ]
    )


def refuse_bad(report: Report, config: TrainConfig) -> None:
    """Refuses bad rows unless they are to be skipped, and rows too long if they are to be refused."""
    if report.bad and config.bad_rows == "refuse":
        raise ConfigError(report.refusal())
    long = report.bad_rows.get(TOO_LONG, 0)
    if long:
        listed = [line for line in report.bad_examples if f": {TOO_LONG}: " in line]
        way = "raise max_length, or set overlong=truncate, drop or split"
        raise ConfigError([*listed, f"{long:,} rows of {report.dataset} are {TOO_LONG}; {way}"])
