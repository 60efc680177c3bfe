"""Tables of a data set: the sources of a mix, and the lengths of documents. Imports no torch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.data.mix import MixedSet, MixOrder
from trainers.data.stream import WindowSet, rows_of_epoch

QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


def source_table(
    documents: MixedSet, bounds: npt.NDArray[np.int64], row_tokens: npt.NDArray[np.int64]
) -> list[dict[str, Any]]:
    """What each source of a mix has, and what an epoch takes of it.

    Args:
        documents: The documents of all sources.
        bounds: `[sources + 1]` first training row of each source, and the end.
        row_tokens: `[training rows]` tokens of each.

    Returns:
        Of each source its `name` and `dataset`; its `rows` as read, `documents`, `tokens`, `trained_tokens`, `bad`,
        `held_out` and `left_out` rows; its `training_rows`, packed or one per example; `share` of the training rows
        that are read, `token_share` of their tokens, and how many `passes` over the source an epoch makes. Of a source
        that is `streamed`, the counts are those of its first window, and all `passes` an estimate by it.
    """
    order = MixOrder(bounds, documents.mix, 0)
    available = list(map(rows_of_epoch, documents.parts, order.rows))
    epoch_rows = order.rows_of_epoch(available, documents.mix.stopping_strategy)
    shares = np.array(order.shares) / order.period
    tokens = shares * [row_tokens[start:end].mean() for start, end in pairwise(bounds.tolist())]
    table = []
    for number, (name, part) in enumerate(zip(documents.mix.names, documents.parts, strict=True)):
        report = part.report
        counts = ("rows", "documents", "tokens", "trained_tokens", "bad", "held_out", "left_out")
        table.append(
            {
                "name": name,
                "dataset": report.dataset,
                **{count: getattr(report, count) for count in counts},
                "training_rows": order.rows[number],
                "share": float(shares[number]),
                "token_share": float(tokens[number] / tokens.sum()),
                "passes": float(shares[number] * epoch_rows / available[number]),
                "streamed": isinstance(part, WindowSet),
            }
        )
    return table


def length_table(lengths: npt.NDArray[np.int64]) -> list[dict[str, float | int]]:
    """Document lengths in order: `share` of the documents that have at most `tokens` tokens, for `QUANTILES`.

    Args:
        lengths: `[documents]` tokens of each; not empty.
    """
    tokens = np.quantile(lengths, QUANTILES, method="inverted_cdf").tolist()
    return [{"share": share, "tokens": int(length)} for share, length in zip(QUANTILES, tokens, strict=True)]
