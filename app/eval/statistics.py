"""Confidence intervals, and the paired comparison of two models on the same rows.

A metric is a function of sums over rows (`RowSums`): a mean, a ratio such as loss per token, or BLEU, whose n-grams are
counted over the corpus. So one bootstrap and one test serve all of them. Rows are taken as independent draws; rows that
belong together, such as turns of one conversation, make the intervals too narrow.

Each interval and each comparison is at 95 % and 5 % by itself. Of twenty comparisons of equal models, over metrics,
sources and checkpoints, one is expected to show a difference that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
RESAMPLES = 2000
"""Of the bootstrap and of the test. At p = 0.05 the error of the p-value is 0.005."""
CONFIDENCE = 0.95
ALPHA = 0.05
_BATCH_NUMBERS = 200_000
"""Numbers drawn at a time, which fit a processor's cache: more than twice as fast as ten times as many."""


def _ratio(sums: Array) -> Array:
    return np.asarray(sums[..., 0] / sums[..., 1])


def _same(values: Array) -> Array:
    return values


@dataclass(frozen=True)
class RowSums:
    """A metric of rows by what each of them adds to.

    Args:
        terms: `[rows, terms]`; the metric depends on their sums over rows alone.
        value: `[..., terms]` sums -> `[...]` values, also of resampled rows.
        scale: an increasing function of values that makes the metric of them, such as exp of a loss for perplexity.
        is_share: whether each row adds 0 or 1 to a mean.
    """

    terms: Array
    value: Callable[[Array], Array] = _ratio
    scale: Callable[[Array], Array] = _same
    is_share: bool = False

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.terms)

    def metric(self, sums: Array) -> Array:
        """The metric `[...]` of sums `[..., terms]`; infinite where it is too large for a float."""
        with np.errstate(over="ignore"):
            return self.scale(self.value(sums))

    def take(self, rows: Sequence[int]) -> RowSums:
        """The metric of some of the rows, by their positions."""
        return RowSums(self.terms[np.asarray(rows, dtype=int)], self.value, self.scale, self.is_share)


def mean_of(values: Sequence[float] | Array) -> RowSums:
    """The mean of the rows' values `[rows]`."""
    numbers = np.asarray(values, dtype=float)
    is_share = bool(np.isin(numbers, (0.0, 1.0)).all())
    return RowSums(np.column_stack([numbers, np.ones_like(numbers)]), is_share=is_share)


def ratio_of(numerators: Sequence[float], denominators: Sequence[float], scale: Callable[[Array], Array] = _same
             ) -> RowSums:  # fmt: skip
    """The ratio of two sums over rows, `[rows]` each, such as nats and tokens; every denominator is above 0."""
    return RowSums(np.column_stack([np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)]),
                   scale=scale)  # fmt: skip


def point(metric: RowSums) -> float | None:
    """The metric of all rows; None without rows or where it is not finite."""
    return _finite(metric.metric(metric.terms.sum(axis=0))) if metric.rows else None


def interval(metric: RowSums, seed: int = 0) -> tuple[float, float] | None:
    """The 95 % confidence interval of a metric; None for fewer than two rows and where the metric is not finite.

    By the percentile bootstrap over rows. Shares of rows get Wilson's score interval instead, which the bootstrap comes
    near to with many rows, and which does not shrink to a point when all rows are right, or none.
    """
    from scipy import stats

    if metric.rows < 2 or point(metric) is None:
        return None
    if metric.is_share:
        bounds = stats.binomtest(round(metric.terms[:, 0].sum()), metric.rows).proportion_ci(CONFIDENCE, "wilson")
        return float(bounds.low), float(bounds.high)
    return _bootstrap(metric.terms, metric.metric, seed)


@dataclass(frozen=True)
class Difference:
    """The metric of a model minus that of another on the same rows.

    Args:
        value: the difference; None if either metric is not finite, or there is no row.
        low: lower end of its 95 % confidence interval by the paired bootstrap; None as for `interval`.
        high: upper end of it.
        p_value: probability of a difference at least as large, in either direction, between equal models.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None

    @property
    def significant(self) -> bool:
        """Whether the test shows a difference at the 5 % level; the interval may disagree by a hair."""
        return self.p_value is not None and self.p_value <= ALPHA


def difference(a: RowSums, b: RowSums, seed: int = 0) -> Difference:
    """Compares two models: `b` minus `a`, whose rows are the same and in the same order.

    The test exchanges the two models' results row by row at random (approximate randomisation; for a mean it is the
    sign-flip test of the paired differences), and in all possible ways if the rows are few.

    Raises:
        ValueError: if their rows are not equally many.
    """
    if a.rows != b.rows:
        raise ValueError(f"{a.rows} rows cannot be compared with {b.rows}")
    before, after = point(a), point(b)
    if before is None or after is None:
        return Difference(None)
    if np.array_equal(a.terms, b.terms):
        edge = 0.0 if a.rows > 1 else None
        return Difference(0.0, edge, edge, 1.0)
    width = a.terms.shape[1]
    low = high = None
    if a.rows > 1:
        both = np.hstack([a.terms, b.terms])
        bounds = _bootstrap(both, lambda sums: b.metric(sums[..., width:]) - a.metric(sums[..., :width]), seed)
        low, high = bounds or (None, None)
    return Difference(after - before, low, high, _exchange_test(a, b, seed))


def _bootstrap(terms: Array, metric: Callable[[Array], Array], seed: int) -> tuple[float, float] | None:
    """Percentiles of a function of the sums of resampled rows; None if it is not finite for each of them."""
    from scipy import stats

    rows, finite = len(terms), []

    def of_resampled(drawn: Array, axis: int = -1) -> Array:
        """Of row numbers `[resamples, rows]`; how often each was drawn gives the sums in one matrix product."""
        drawn = np.atleast_2d(drawn)
        offsets = np.arange(len(drawn))[:, None] * rows
        counts = np.bincount((drawn + offsets).ravel(), minlength=len(drawn) * rows).reshape(len(drawn), rows)
        values = metric(counts.astype(float) @ terms)
        finite.append(np.isfinite(values).all())
        return np.nan_to_num(values, posinf=0.0, neginf=0.0)

    with np.errstate(over="ignore", invalid="ignore"):  # perplexities close to the largest float
        resampled = stats.bootstrap(
            (np.arange(rows),), of_resampled, n_resamples=RESAMPLES, batch=_batch(rows), vectorized=True,
            confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip
    return (float(resampled.low), float(resampled.high)) if all(finite) else None


def _exchange_test(a: RowSums, b: RowSums, seed: int) -> float:
    """The two-sided p-value of `difference`. It compares values before `scale`, which keeps their order."""
    from scipy import stats

    rows, generator = a.rows, np.random.default_rng(seed)
    sums_a, sums_b, gaps = a.terms.sum(axis=0), b.terms.sum(axis=0), b.terms - a.terms

    def of_signs(signs: Array, axis: int = -1) -> Array:
        """The difference where the rows with a negative sign are exchanged; signs are `[resamples, rows]`."""
        moved = (signs < 0).astype(float) @ gaps
        return b.value(sums_b - moved) - a.value(sums_a + moved)

    def draw_signs(size: tuple[int, ...]) -> Array:
        return np.where(generator.integers(0, 2, size=size, dtype=np.int8), np.int8(1), np.int8(-1))

    none_exchanged = np.ones(rows)
    if rows == 1:  # the difference and its opposite are equally likely
        return 1.0
    if 2**rows <= RESAMPLES:  # all of them
        exact = stats.permutation_test((none_exchanged,), of_signs, permutation_type="samples", vectorized=True,
                                       n_resamples=RESAMPLES)  # fmt: skip
        return float(exact.pvalue)
    # Draws the same as `permutation_test` would, in a tenth of the time: that shuffles the pair of each row.
    drawn = stats.monte_carlo_test(
        none_exchanged, draw_signs, of_signs, vectorized=True, n_resamples=RESAMPLES, batch=_batch(rows)
    )
    return float(drawn.pvalue)


def _batch(rows: int) -> int:
    return max(1, min(RESAMPLES, _BATCH_NUMBERS // rows))


def _finite(value: Any) -> float | None:
    number = float(value)
    return number if np.isfinite(number) else None
