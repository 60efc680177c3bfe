"""Documents that occur more than once: in a data set, or in training and evaluation data alike. Imports no torch."""

from __future__ import annotations

import numpy as np

from trainers.data.cache import TokenSet

_EXAMPLES = 3


def repeated(documents: TokenSet) -> int:
    """How many documents have the same tokens as an earlier one."""
    return len(documents) - len(np.unique(documents.digests))


def in_both(train: TokenSet, evaluation: TokenSet) -> list[tuple[int, int]]:
    """The documents of the evaluation data that are in the training data too: their numbers in both."""
    order = np.argsort(train.digests, kind="stable")
    known = train.digests[order]
    places = np.searchsorted(known, evaluation.digests)
    places[places == len(known)] = 0
    numbers = np.flatnonzero(known[places] == evaluation.digests)
    return list(zip(numbers.tolist(), order[places[numbers]].tolist(), strict=True))


def repeated_lines(train: TokenSet) -> list[str]:
    """A line on documents of the training data that repeat others; none if none does."""
    if not (again := repeated(train)):
        return []
    share = f"{again:,} of {len(train):,} documents ({again / len(train):.1%})"
    return [f"train data {train.report.dataset}: {share} repeat an earlier one exactly"]


def leak_lines(train: TokenSet, evaluation: TokenSet) -> list[str]:
    """A line on documents of the evaluation data that are trained on; none if none is."""
    if not (pairs := in_both(train, evaluation)):
        return []
    share = f"{len(pairs):,} of {len(evaluation):,} documents ({len(pairs) / len(evaluation):.1%})"
    listed = [f"{evaluation.where(number)} as {train.where(other)}" for number, other in pairs[:_EXAMPLES]]
    return [
        f"eval data {evaluation.report.dataset}: {share} are trained on too, so their loss says nothing of new ones: "
        + ", ".join(listed)
    ]
