"""Tokenised data: read from the cache, or tokenised once and cached; a data set, a mix or a stream. Imports no torch.

Concurrent callers, such as the ranks of a run, wait for the first one and then read its result.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trainers.config.mistakes import ConfigError
from trainers.config.mix import Mix, config_of, read_mix
from trainers.config.options import TrainConfig
from trainers.data.cache import TokenSet, open_cache
from trainers.data.data_file import DataFile
from trainers.data.files import ignored_files, resolve
from trainers.data.fill_cache import (
    Split,
    build_set,
    data_fingerprint,
    dataset_of,
    locked,
    refuse_bad,
    refuse_missing_numbers,
)
from trainers.data.local_copies import cache_dir
from trainers.data.mix import MixedSet
from trainers.data.overlap import leak_lines, repeated_lines
from trainers.data.remote import files_in_place
from trainers.data.report import Report
from trainers.data.rollouts import refuse_missing_columns
from trainers.data.stream import Stream, Window, stream_lines
from trainers.data.stream_rows import position_in
from trainers.data.tokenizer import load_tokenizer
from trainers.run.compatibility import checkpoint_to_resume
from trainers.run.manifest import read_manifest

__all__ = ["Report", "TokenSet", "cached", "data_fingerprint", "load_tokenizer", "prepare"]


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


def prepare_splits(config: TrainConfig) -> tuple[TokenSet, TokenSet | None]:
    """Training and evaluation data; the latter for both if nothing is trained. See `prepare`."""
    if config.eval_only:
        evaluation = prepare(config, "eval")
        return evaluation, evaluation
    return prepare(config, "train"), prepare(config, "eval") if config.has_evaluation() else None


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
    return [file for of_source in configs for file in _files_of(of_source, split)]


def _files_of(config: TrainConfig, split: Split) -> list[DataFile]:
    return files_in_place(config)[0] if split == "train" and config.dataset_streaming else resolve(config, split)


def _tokenise_sources(config: TrainConfig, mix: Mix, split: Split) -> MixedSet:
    parts, streams, windows = list[TokenSet](), list[Stream](), _resumed_windows(config, len(mix.sources))
    for source, window in zip(mix.sources, windows, strict=True):
        of_source = config_of(config, source)
        try:
            if split == "train" and of_source.dataset_streaming:
                parts.append(Stream(of_source, source.label, streams).open_first(window))
            else:
                parts.append(tokenised(of_source, split))
        except ConfigError as error:
            raise ConfigError(error.mistakes, source=f"{config.mix}: source {source.label}") from None
    return MixedSet(mix, parts, str(config.mix), split)


def _resumed_windows(config: TrainConfig, sources: int) -> list[Window]:
    """The window of each source that the run begins with, as far as this machine can tell before the ranks agree.

    Another one is tokenised too, should they begin elsewhere.
    """
    folder = checkpoint_to_resume(config.resume_from_checkpoint, Path(config.output_dir) if config.output_dir else None)
    first = [Window(0, 0)] * sources
    if folder is None:
        return first
    try:
        positions = read_manifest(folder)["progress"]["stream"]
        known = [position_in(saved) for saved in positions]
        windows = [Window(0, 0) if position is None else position.window for position in known]
    except (OSError, ValueError, KeyError, TypeError):  # the ranks report what is wrong with it
        return first
    return windows if len(windows) == sources else first


def tokenised(config: TrainConfig, split: Split) -> TokenSet:
    """Like `prepare`, but rows that training would refuse are left out and counted in the report."""
    if split == "eval" and not config.has_evaluation():
        raise ConfigError("there is no evaluation data; set eval_dataset_name or eval_share")
    if mix := mix_of(config, split):
        return _tokenise_sources(config, mix, split)
    if split == "train" and config.dataset_streaming:
        return Stream(config).open_first(*_resumed_windows(config, 1))
    if config.dataset_streaming and config.eval_dataset_name is None:
        return _holding_out(config).held_out()
    files = resolve(config, split)
    fingerprint = data_fingerprint(config, split, files)
    folder = cache_dir(config) / fingerprint
    token_set = open_cache(folder, fingerprint)
    if token_set is None:
        with locked(folder, split):
            token_set = open_cache(folder, fingerprint) or build_set(config, split, files, folder, fingerprint)
    token_set.rename_sources(dataset_of(config, split), [file.display_name for file in files])
    token_set.report.ignored_files = ignored_files(config, split)
    return token_set


def _holding_out(config: TrainConfig) -> Stream:
    """The stream whose rows are held out: all rows, however many are trained."""
    return Stream(config.model_copy(update={"max_train_samples": None}))


def cached(config: TrainConfig, split: Split) -> TokenSet | None:
    """The tokenised documents of one split, if they are cached and the data is unchanged; otherwise None.

    Of a mix, those of the first source; of a stream, those of a shard.
    """
    try:
        mix = mix_of(config, split)
        config = config if mix is None else config_of(config, mix.sources[0])
        if split == "train" and config.dataset_streaming:
            stream = Stream(config)
            return next(filter(None, map(stream.cached, range(len(stream.shards)))), None)
        if config.dataset_streaming and config.eval_dataset_name is None:
            return _holding_out(config).cached_held_out()
        fingerprint = data_fingerprint(config, split)
    except ConfigError:
        return None
    return open_cache(cache_dir(config) / fingerprint, fingerprint)


def report_lines(train: TokenSet, evaluation: TokenSet | None) -> list[str]:
    """The lines that a run prints about its data; a chat template that several sets have is shown once."""
    evaluation = None if evaluation is train else evaluation
    sets = [train] if evaluation is None else [train, evaluation]
    reports = [report for documents in sets for report in documents.reports]
    lines, templates = list[str](), list[list[str]]()
    for report in reports:
        lines += replace(report, template=[] if report.template in templates else report.template).lines()
        templates.append(report.template)
    return [
        *lines,
        *repeated_lines(train),
        *stream_lines(train),
        *(leak_lines(train, evaluation) if evaluation is not None else []),
    ]
