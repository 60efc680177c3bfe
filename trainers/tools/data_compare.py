"""Looks for near-duplicates in the training data, and for rows of it in other data. Imports no torch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from trainers.config.options import TrainConfig
from trainers.data.contents import readable_as, rows_as_read
from trainers.data.near import SHINGLE_WORDS, TextSet, between, within
from trainers.data.report import EXAMPLES


def compare(config: TrainConfig, threshold: float, near: bool, against: TrainConfig | None) -> dict[str, Any]:
    """Compares the rows of the training data with each other, with the evaluation data, and with other data.

    Args:
        config: the run's; its data are read.
        threshold: similarity from which rows count as alike, over 0 to 1.
        near: whether to look for near-duplicates within the training data, and between it and the evaluation data.
        against: a config whose evaluation data are the other data; None without any.

    Returns:
        `threshold`; `shingle_words` of a run; `within` the training data and `evaluation` data (see
        `trainers.data.near.within`); `across`, of the evaluation data (`first`) and the training data (`second`), and
        `against`, of the training data (`first`) and the other data (`second`): see `trainers.data.near.between`. Each
        of the last four is None if it was not looked for. `unread` are the rows that could not be read: of the
        `training` and the `other` data, their number and `[where, kind, what]` of the first.

    Raises:
        ConfigError: if data cannot be read, or rensa is not installed.
    """
    answer: dict[str, Any] = dict.fromkeys(("within", "evaluation", "across", "against"))
    answer |= {"threshold": threshold, "shingle_words": SHINGLE_WORDS}
    with ExitStack() as stack:
        train = stack.enter_context(TextSet(rows_as_read(config, "train"), "training data"))
        answer["unread"] = {"training": _unread(train)}
        if near:
            answer["within"] = within(train, threshold)
        if near and config.has_evaluation():
            evaluation = stack.enter_context(TextSet(rows_as_read(config, "eval"), "evaluation data"))
            answer["evaluation"] = within(evaluation, threshold)
            answer["across"] = between(evaluation, train, threshold)
        if against is not None:
            against = readable_as(against)
            other = stack.enter_context(TextSet(rows_as_read(against, "eval"), str(against.eval_dataset_name)))
            answer["unread"]["other"] = _unread(other)
            answer["against"] = {"dataset": against.eval_dataset_name, **between(train, other, threshold)}
    return answer


def _unread(texts: TextSet) -> dict[str, Any]:
    return {"rows": texts.report.bad, "listed": texts.report.bad_listed[:EXAMPLES]}
