"""Tokenised data: read from the cache, or tokenised once and cached. Imports no torch.

    files -> shards -> (in parallel) rows -> documents -> tokens and mask -> one memory-mapped folder

The folder is named by the fingerprint of everything that determines its content. Concurrent callers, such as the ranks
of a run, wait for the first one and then read its result.
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

from trainers.config.mistakes import ConfigError
from trainers.config.mix import Mix, config_of, read_mix
from trainers.config.objectives import FORMAT_COLUMNS, SFT_FORMATS
from trainers.config.options import TrainConfig
from trainers.config.reward_file import columns_of_rewards
from trainers.data.cache import FORMAT_VERSION, CacheWriter, TokenSet, open_cache
from trainers.data.data_file import DataFile
from trainers.data.files import identity, ignored_files, resolve
from trainers.data.formats import OPTIONAL, recognise, unrecognised, wanted_columns
from trainers.data.local_copies import cache_dir
from trainers.data.mix import MixedSet
from trainers.data.overlap import leak_lines, repeated_lines
from trainers.data.progress import Progress, say
from trainers.data.report import LONGER, TOO_LONG, Report
from trainers.data.rollouts import refuse_missing_columns
from trainers.data.shards import SHARD_BYTES, FileShard
from trainers.data.sources import plan, read, unread_columns
from trainers.data.template import Encoder, training_encoder
from trainers.data.tokenise import Options, Selection, TokenizeTask, extra_columns, row_hashes
from trainers.data.tokenizer import load_tokenizer, tokenizer_folder, tokenizer_hash
from trainers.data.workers import Pool

__all__ = ["Report", "Split", "TokenSet", "cached", "data_fingerprint", "load_tokenizer", "prepare"]

Split = Literal["train", "eval"]
_ROW_BYTES = 1000  # a rough estimate, to group rows into tasks of similar size
_SNIFFED_ROWS = 100
_EXACT_SHARE_ROWS = 50_000_000


def prepare(config: TrainConfig, split: Split) -> TokenSet:
    """The tokenised documents of one split, from the cache if possible.

    Args:
        config: Data options, model name, and `seed` when `eval_share` holds rows out.
        split: `train`, or `eval` for `eval_dataset_name` or the rows that `eval_share` holds out.

    Returns:
        The documents, memory-mapped, in the order of the data.

    Raises:
        ConfigError: if the data or the model cannot be read, rows are bad (unless `bad_rows=skip`) or too long (under
            `overlong=refuse`), the cache cannot be written, or no document is left.
    """
    token_set = tokenised(config, split)
    refuse_bad(token_set.report, config)
    refuse_missing_numbers(config, token_set)
    refuse_missing_columns(config, token_set)
    return token_set


def mix_of(config: TrainConfig, split: Split) -> Mix | None:
    """The mix that a split is made of; None if it is a data set of its own.

    Raises:
        ConfigError: if the mix cannot be read.
    """
    if config.mix is None or (split == "eval" and config.eval_dataset_name is not None):
        return None
    return read_mix(config.mix)


def files_of(config: TrainConfig, split: Split) -> list[DataFile]:
    """The files of the data, over all sources of a mix.

    Raises:
        ConfigError: if the data does not exist or cannot be read.
    """
    mix = mix_of(config, split)
    configs = [config] if mix is None else [config_of(config, source) for source in mix.sources]
    return [file for of_source in configs for file in resolve(of_source, split)]


def _tokenise_sources(config: TrainConfig, mix: Mix, split: Split) -> MixedSet:
    parts = []
    for source in mix.sources:
        of_source = config_of(config, source)
        try:
            parts.append(tokenised(of_source, split))
        except ConfigError as error:
            raise ConfigError(error.mistakes, source=f"{config.mix}: source {source.label}") from None
    return MixedSet(mix, parts, str(config.mix), split)


def tokenised(config: TrainConfig, split: Split) -> TokenSet:
    """Like `prepare`, but rows that training would refuse are left out and counted in the report."""
    if split == "eval" and not config.has_evaluation():
        raise ConfigError("there is no evaluation data; set eval_dataset_name or eval_share")
    if mix := mix_of(config, split):
        return _tokenise_sources(config, mix, split)
    files = resolve(config, split)
    fingerprint = data_fingerprint(config, split, files)
    folder = cache_dir(config) / fingerprint
    token_set = open_cache(folder, fingerprint)
    if token_set is None:
        with _locked(folder, split):
            token_set = open_cache(folder, fingerprint) or _build(config, split, files, folder, fingerprint)
    token_set.rename_sources(_dataset(config, split), [file.display_name for file in files])
    token_set.report.ignored_files = ignored_files(config, split)
    return token_set


def cached(config: TrainConfig, split: Split) -> TokenSet | None:
    """The tokenised documents of one split, if they are cached and the data is unchanged; of a mix, the first source.

    Otherwise None.
    """
    try:
        mix = mix_of(config, split)
        config = config if mix is None else config_of(config, mix.sources[0])
        fingerprint = data_fingerprint(config, split)
    except ConfigError:
        return None
    return open_cache(cache_dir(config) / fingerprint, fingerprint)


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
        "limit": _limit(config, split),
        "held_out": [split, config.eval_share, config.seed] if held_out else None,
        **({} if spec.formats == SFT_FORMATS else {"formats": spec.formats}),
        **({"numeric": [[name, name in spec.optional_columns] for name in spec.columns]} if spec.columns else {}),
        **({} if rewards is None else {"rewards": sorted(rewards.items())}),
    }
    return hashlib.sha256(json.dumps(ingredients, sort_keys=True).encode()).hexdigest()


def _limit(config: TrainConfig, split: Split) -> int | None:
    return config.max_train_samples if split == "train" else config.max_eval_samples


@contextmanager
def _locked(folder: Path, split: Split) -> Iterator[None]:
    """Holds the lock of a cache folder, which only the holder may write to."""
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"{split} data: waiting for another process to prepare it")
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
    all_shards, shards = shards, _first_rows(shards, selection, _limit(config, split))
    encoder = training_encoder(config)
    options = options_of(config, encoder, selection)
    report = Report(_dataset(config, split), split, sorted(set(formats.values())), len(files))
    of_split = _row_count(all_shards, selection)
    report.held_out = sum(shard.rows for shard in all_shards) - of_split if split == "train" else 0
    report.left_out = of_split - _row_count(shards, selection)
    try:
        writer = CacheWriter(folder)
        try:
            tasks = _tasks(shards, files, formats, writer.temporary)
            _tokenise(tasks, encoder, options, config, writer, report)
            _refuse_nothing(report, splits=config.objective_spec.loss_of != "documents")
            writer.publish(fingerprint, report, [file.display_name for file in files])
        finally:
            writer.discard()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot write tokenized data to {folder.parent}: {reason}; free space there, or set cache_dir"
        ) from None
    token_set = open_cache(folder, fingerprint)
    if token_set is None:
        raise ConfigError(f"tokenized data in {folder} cannot be read back; check the disk, or set cache_dir")
    return token_set


def report_lines(train: TokenSet, evaluation: TokenSet | None) -> list[str]:
    """The lines that a run prints about its data; a chat template that several sets have is shown once."""
    sets = [train] if evaluation is None else [train, evaluation]
    reports = [report for documents in sets for report in documents.reports]
    lines, templates = list[str](), list[list[str]]()
    for report in reports:
        lines += replace(report, template=[] if report.template in templates else report.template).lines()
        templates.append(report.template)
    return [*lines, *repeated_lines(train), *(leak_lines(train, evaluation) if evaluation is not None else [])]


def options_of(config: TrainConfig, encoder: Encoder, selection: Selection) -> Options:
    """The options that determine how rows become documents."""
    chat = encoder.options.chat_template is not None
    spec = config.objective_spec
    return Options(
        config.sample_by, config.columns, config.max_length, config.overlong, chat, selection, spec.formats, spec.parts,
        {name: name in spec.optional_columns for name in spec.columns}, columns_of_rewards(config),
    )  # fmt: skip


def _dataset(config: TrainConfig, split: Split) -> str:
    return config.eval_dataset_name if split == "eval" and config.eval_dataset_name else config.training_data


def selection_of(config: TrainConfig, split: Split, rows: int) -> Selection:
    """Selects the rows of this split by `eval_share`: an exact share, with at least one row on each side."""
    if not config.eval_share:
        return Selection()
    if rows < 2:
        raise ConfigError.about("eval_share", config.eval_share, f"cannot hold out one of {rows} rows", "add data")
    if rows > _EXACT_SHARE_ROWS:  # an approximate share, as holding all hashes would take too much memory
        threshold = int(config.eval_share * 2**64)
    else:  # exactly `count` hashes are below the one at index `count`
        count = min(rows - 1, max(1, round(config.eval_share * rows)))
        threshold = int(np.partition(row_hashes(0, rows, config.seed), count)[count])
    return Selection(config.seed, threshold, split == "eval")


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


def _first_rows(shards: list[FileShard], selection: Selection, limit: int | None) -> list[FileShard]:
    """The shards that contain the first `limit` rows of the split."""
    if limit is None:
        return shards
    selected: list[FileShard] = []
    for shard in shards:
        chosen = np.flatnonzero(selection.choose(shard.first_row, shard.rows))
        if len(chosen) >= limit:
            return [*selected, replace(shard, rows=int(chosen[limit - 1]) + 1)]
        selected.append(shard)
        limit -= len(chosen)
    return selected


def _row_count(shards: list[FileShard], selection: Selection) -> int:
    """Rows of the split in these shards."""
    return sum(int(selection.choose(shard.first_row, shard.rows).sum()) for shard in shards)


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
    tasks: list[TokenizeTask],
    encoder: Encoder,
    options: Options,
    config: TrainConfig,
    writer: CacheWriter,
    report: Report,
) -> None:
    """Runs the tasks in worker processes and appends their results in the order of the data."""
    processes = max(1, min(len(tasks), config.dataset_num_proc or _cores()))
    total = sum(shard.rows for task in tasks for shard, _, _ in task.shards)
    with Progress(f"tokenizing {report.split} data", total) as progress:
        model = config.model_name_or_path
        with Pool(processes, writer.temporary, encoder, options, model) as pool:
            for task, task_report in pool.run(tasks, progress.add):
                writer.append(task)
                report.merge(task_report)


def _cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _refuse_nothing(report: Report, splits: bool) -> None:
    """Raises `ConfigError` with the counts if no document is left.

    Args:
        report: The counts.
        splits: Whether the objective takes documents that are split.
    """
    if report.documents:
        return
    remedy = "repair the data or raise max_length" + (", or set overlong=split" if splits else "")
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


def refuse_bad(report: Report, config: TrainConfig) -> None:
    """Raises `ConfigError` for bad rows under `bad_rows=refuse`, and for rows too long under `overlong=refuse`."""
    if report.bad and config.bad_rows == "refuse":
        raise ConfigError(report.refusal())
    if report.too_long:
        listed = report.examples(TOO_LONG)
        raise ConfigError([*listed, f"{report.too_long:,} rows of {report.dataset} are {TOO_LONG}; {LONGER}"])
