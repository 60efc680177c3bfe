"""The answers that changed most from one model to another."""

from __future__ import annotations

import math
from typing import Any

from app.eval.metrics import exact_match, f1
from app.eval.rows import Aligned, Row


def changed_answers(a: str, b: str, pair: Aligned, most: int, unlike_tokens: bool = False) -> list[dict[str, Any]]:
    """The rows that changed most, both texts of each: first those that were right and are wrong, then by size.

    The size is that of the change of `f1`; of the loss per token where there are no answers, or per row if the two
    models count other tokens.

    Args:
        a: name of the model before.
        b: name of the model after.
        pair: their rows.
        most: how many to list at most.
        unlike_tokens: whether the models count other tokens for the same rows.

    Returns:
        `[{a, b, row, source, metric, before, after, was_right, is_right, prompt, expected, answer_a, answer_b}]`; the
        last two and whether they are right are null without answers, values are where they are not finite.
    """
    changes = []
    for before, after in zip(pair.a, pair.b, strict=True):
        change: dict[str, Any] = {"a": a, "b": b, "row": before.row, "source": before.source}
        texts = {"prompt": before.prompt, "expected": before.expected, "answer_a": before.answer,
                 "answer_b": after.answer}  # fmt: skip
        if before.answer is not None and after.answer is not None:
            right = [bool(exact_match(row.answer or "", row.expected)) for row in (before, after)]
            values = [f1(row.answer or "", row.expected) for row in (before, after)]
            metric = "f1"
        else:
            right = [None, None]  # type: ignore[list-item]
            metric = "loss of the row" if unlike_tokens else "loss"
            values = [_loss(row, unlike_tokens) for row in (before, after)]
        scores = {"metric": metric, "before": values[0], "after": values[1], "was_right": right[0],
                  "is_right": right[1]}  # fmt: skip
        changes.append({**change, **scores, **texts})
    # A change to or from a loss that is not finite is no number; such rows come last.
    changes = [change for change in changes if change["before"] != change["after"] or _is_lost(change)]
    changes.sort(key=lambda change: (not _is_lost(change), -_size(change)))
    for change in changes[:most]:
        change |= {key: change[key] if math.isfinite(change[key]) else None for key in ("before", "after")}
    return changes[:most]


def _loss(row: Row, per_row: bool) -> float:
    return row.loss if per_row else row.loss / max(row.tokens, 1)


def _is_lost(change: dict[str, Any]) -> bool:
    return change["was_right"] is True and change["is_right"] is False


def _size(change: dict[str, Any]) -> float:
    size = abs(change["after"] - change["before"])
    return size if size == size else -1.0
