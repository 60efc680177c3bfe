"""The rows of a data set as read, before the tokenizer: for comparing what they say. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.config.mix import config_of
from trainers.config.options import TrainConfig
from trainers.data.files import resolve
from trainers.data.fill_cache import Split, formats_of, options_of
from trainers.data.formats import Document
from trainers.data.held_out import Selection, row_hash, selection_of
from trainers.data.prepare import mix_of
from trainers.data.shards import BadRow
from trainers.data.sources import plan, read
from trainers.data.template import training_encoder
from trainers.data.tokenise import example_of

RowAsRead = tuple[str, tuple[Document, ...] | BadRow]
"""Its place, `file:line`, and its documents, or what is wrong with it."""


def rows_as_read(config: TrainConfig, split: Split) -> Iterator[RowAsRead]:
    """The rows of a split, over all sources of a mix, with `eval_share` and limits applied.

    Raises:
        ConfigError: if the data cannot be read, or its columns match no format.
    """
    mix = mix_of(config, split)
    if mix is not None:
        for source in mix.sources:
            yield from rows_as_read(config_of(config, source), split)
        return
    shards = plan(resolve(config, split), config.sample_by, columns=config.columns)
    formats = formats_of(config, shards)
    options = options_of(config, training_encoder(config))

    def all_rows() -> Iterator[RowAsRead]:
        for shard in shards:
            for line, item in read(shard, config.sample_by, options.wanted):
                documents = item if isinstance(item, BadRow) else example_of(item, formats[shard.file.path], options)
                yield f"{shard.file.display_name}:{line}", documents

    selection = Selection()
    if config.eval_share:
        rows = (row_hash(row, options.formats, config.seed) for _, row in all_rows())
        hashes = np.fromiter(rows, dtype=np.uint64)
        selection = selection_of(config.eval_share, config.seed, split == "eval", lambda: [hashes])
    limit, count = (config.max_train_samples if split == "train" else config.max_eval_samples), 0
    for where, row in all_rows():
        if not selection.has(row, options.formats):
            continue
        if count == limit:
            return
        count += 1
        yield where, row


def readable_as(config: TrainConfig) -> TrainConfig:
    """A config under which the evaluation data can be read: as its objective, and else as plain examples of `sft`.

    Columns that are mapped for the training data need not be in the evaluation data.

    Raises:
        ConfigError: if its columns match no format.
    """
    attempts = [config, config.model_copy(update={"columns": {}})]
    plain = {"objective": "sft", "dataset_format": "auto"}
    attempts += [attempt.model_copy(update=plain) for attempt in attempts]
    shards = plan(resolve(config, "eval"), config.sample_by, columns=config.columns)
    refused: ConfigError | None = None
    for attempt in attempts:
        try:
            formats_of(attempt, shards)
        except ConfigError as error:
            refused = refused or error
            continue
        return attempt
    assert refused is not None
    raise refused
