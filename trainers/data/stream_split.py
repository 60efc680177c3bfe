"""The rows that `eval_share` holds out of a stream. Imports no torch.

A row's side is a hash of what it says, as for data that is read in full; but that each side has a row is not made sure
of, as this would take all rows. The evaluation data is the first `max_eval_samples` rows held out, and the stream is
read just as far as it has as many.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.cache import CacheWriter, TokenSet
from trainers.data.fill_cache import first_rows, options_of, read_back, refuse_nothing, writing
from trainers.data.held_out import Selection
from trainers.data.progress import Progress
from trainers.data.report import Report
from trainers.data.template import training_encoder
from trainers.data.tokenise import TokenizeTask
from trainers.data.workers import Pool


def selection_of_stream(config: TrainConfig, held_out: bool) -> Selection:
    """The rows of one side: those whose hash is below `eval_share`, or the others; all rows without it."""
    return Selection(config.seed, int(config.eval_share * 2**64), held_out)


def first_of_side(
    pool: Pool, tasks: list[TokenizeTask], config: TrainConfig, held_out: bool, limit: int
) -> list[TokenizeTask]:
    """The tasks with the first `limit` rows of one side, of which the last one is cut short.

    Args:
        pool: hashes the rows.
        tasks: a shard each, in the order of the data, with paths for their hashes.
        config: `eval_share` and `seed`.
        held_out: the side.
        limit: rows; later shards are not read.
    """
    selection, chosen, count = selection_of_stream(config, held_out), list[np.ndarray](), 0
    hashing = [replace(task, hashes_with=config.seed) for task in tasks]
    total = sum(shard.rows for task in tasks for shard, _, _ in task.shards)
    with Progress("choosing the rows held out", total) as progress:
        for task, _ in pool.run(hashing, progress.add):
            hashes = np.fromfile(task.hashes, dtype=np.uint64)
            task.hashes.unlink()
            chosen.append((hashes < selection.threshold) == held_out)
            count += int(chosen[-1].sum())
            if count >= limit:
                break
    read = tasks[: len(chosen)]
    shards = first_rows([task.shards[0][0] for task in read], limit, np.concatenate([*chosen, np.zeros(0, dtype=bool)]))
    return [replace(task, shards=[(shard, *task.shards[0][1:])], selection=selection)
            for task, shard in zip(read, shards, strict=False)]  # fmt: skip


def held_out_of_stream(
    config: TrainConfig, tasks: list[TokenizeTask], names: list[str], folder: Path, fingerprint: str, processes: int
) -> TokenSet:
    """Tokenises the evaluation data that is held out of a stream, and publishes it.

    Args:
        config: the run's config.
        tasks: the shards of the stream, one each.
        names: display names of its files.
        folder: the cache folder; the caller holds its lock.
        fingerprint: of the evaluation data.
        processes: how many tokenise.

    Raises:
        ConfigError: if no row is held out, or none of them can be used.
    """
    encoder, limit = training_encoder(config), config.max_eval_samples
    assert limit is not None
    report = Report(config.training_data, "eval", sorted({task.shards[0][2] for task in tasks}), len(names))
    with writing(folder.parent):
        writer = CacheWriter(folder)
        try:
            options, model = options_of(config, encoder), config.model_name_or_path
            with Pool(processes, writer.temporary, encoder, options, model) as pool:
                parts = [replace(task, part=f"{writer.temporary}/part-{number}") for number, task in enumerate(tasks)]
                chosen = first_of_side(pool, parts, config, True, limit)
                for task, task_report in pool.run(chosen, lambda _: None):
                    writer.append(task)
                    report.merge(task_report)
            if not report.rows:
                problem = "holds out no row of the stream"
                raise ConfigError.about("eval_share", config.eval_share, problem, "raise it, or set eval_dataset_name")
            refuse_nothing(report, splits=config.objective_spec.loss_of != "documents")
            writer.publish(fingerprint, report, names)
        finally:
            writer.discard()
    return read_back(folder, fingerprint)
