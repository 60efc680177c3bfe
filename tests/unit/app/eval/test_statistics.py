"""Intervals and paired tests: false alarms, power and coverage over seeded data, against scipy and sacrebleu."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scipy import stats

from app.eval import statistics
from app.eval.corpus import bleu, chrf
from app.eval.statistics import ALPHA, Array, RowSums, difference, interval, mean_of, point, ratio_of

MOST_FALSE_ALARMS = 0.065
LEAST_POWER = 0.8
Pair = tuple[RowSums, RowSums]


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """Degenerate rows give a defined answer, and no line of numpy's on a user's terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for of_others in (ResourceWarning, pytest.PytestUnraisableExceptionWarning):  # what earlier tests left open
            warnings.simplefilter("default", of_others)
        yield


def equal_shares(rng: np.random.Generator, rows: int = 300) -> Pair:
    """Two equal models whose answers agree on four rows of five, as those of neighbouring checkpoints do."""
    easiness = rng.beta(1.5, 1.0, rows)
    first, second = (rng.random((2, rows)) < easiness).astype(float)
    return mean_of(first), mean_of(np.where(rng.random(rows) < 0.6, first, second))


def equal_losses(rng: np.random.Generator, rows: int = 100) -> Pair:
    """Two equal models' losses per token: rows of unlike lengths and difficulties, with heavy tails."""
    tokens = rng.integers(1, 200, rows)
    difficulty = rng.gamma(2.0, 0.7, rows)
    losses = [tokens * (difficulty + 0.1 * rng.standard_t(3, rows)) for _ in range(2)]
    return ratio_of(losses[0], tokens), ratio_of(losses[1], tokens)


def p_values(pairs: Callable[[np.random.Generator], Pair], count: int) -> Array:
    """Of `count` seeded pairs."""
    return np.array([difference(*pairs(np.random.default_rng(seed)), seed).p_value for seed in range(count)])


def binomial_bound(count: int) -> int:
    """False alarms of `count` that a test at 5 % exceeds with a probability of 0.001."""
    return int(stats.binom.ppf(0.999, count, ALPHA))


@pytest.mark.parametrize("pairs", [equal_shares, equal_losses])
def test_equal_models_are_seldom_told_apart(
    pairs: Callable[[np.random.Generator], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: at twice the level, as of a direction chosen after a look at the data, the bound is exceeded."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    values = p_values(pairs, 300)
    assert (values <= ALPHA).sum() <= binomial_bound(300)
    assert (values / 2 <= ALPHA).mean() > MOST_FALSE_ALARMS


@pytest.mark.long
@pytest.mark.parametrize("pairs", [equal_shares, equal_losses])
def test_of_2000_equal_models_few_are_told_apart(pairs: Callable[[np.random.Generator], Pair]) -> None:
    values = p_values(pairs, 2000)
    assert (values <= ALPHA).mean() <= MOST_FALSE_ALARMS
    assert (values / 2 <= ALPHA).mean() > MOST_FALSE_ALARMS


def gained(rng: np.random.Generator) -> Pair:
    """60 % of 400 rows right before and 70 % after: 15 % were mended and 5 % broken."""
    kind = rng.choice(4, 400, p=[0.55, 0.15, 0.05, 0.25])
    return mean_of(np.isin(kind, (0, 2))), mean_of(np.isin(kind, (0, 1)))


def test_a_gain_of_ten_points_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: intervals that do not overlap, which compare two models as if they had seen other rows, miss it."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    detections = naive = 0
    for seed in range(100):
        a, b = gained(np.random.default_rng(seed))
        result = difference(a, b, seed)
        detections += result.significant and result.value is not None and result.value > 0
        intervals = interval(a), interval(b)
        assert intervals[0]
        assert intervals[1]
        naive += intervals[0][1] < intervals[1][0]
    assert detections / 100 >= LEAST_POWER
    assert naive / 100 < LEAST_POWER


def test_shares_are_tested_as_mcnemar_does() -> None:
    """Whose exact test is a sign test of the rows that differ."""
    for seed in range(5):
        a, b = gained(np.random.default_rng(seed)) if seed else equal_shares(np.random.default_rng(1), 400)
        gaps = b.terms[:, 0] - a.terms[:, 0]
        exact = stats.binomtest(int((gaps > 0).sum()), int((gaps != 0).sum())).pvalue
        assert difference(a, b).p_value == pytest.approx(exact, abs=0.03)


def test_few_rows_are_exchanged_in_every_way() -> None:
    gaps = np.array([0.3, 0.1, 0.4, 0.2, 0.5])
    result = difference(mean_of(np.full(5, 0.2)), mean_of(0.2 + gaps))
    assert result.p_value == pytest.approx(2 / 2**5)
    assert not result.significant
    drawn = difference(mean_of(np.full(12, 0.2)), mean_of(0.2 + np.linspace(0.1, 1.0, 12))).p_value
    assert drawn == pytest.approx(2 / 2001)


def test_the_test_is_that_of_scipy() -> None:
    rng = np.random.default_rng(5)
    before, after = rng.normal(0, 1, 60), rng.normal(0.25, 1, 60)
    oracle = stats.permutation_test((after - before,), np.mean, permutation_type="samples", n_resamples=20_000,
                                    vectorized=True, rng=rng)  # fmt: skip
    assert difference(mean_of(before), mean_of(after)).p_value == pytest.approx(oracle.pvalue, abs=0.03)


def test_intervals_hold_the_truth_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a ratio, of a difference of ratios, and of a share. Control: intervals of a tenth of the rows' deviation."""
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    covered = dict.fromkeys(("ratio", "difference", "share", "narrow"), 0)
    for seed in range(200):
        rng = np.random.default_rng(seed)
        a, b = equal_losses(rng, 200)
        low, high = interval(a, seed) or (np.nan, np.nan)
        covered["ratio"] += low <= 1.4 <= high
        covered["narrow"] += abs((point(a) or 0) - 1.4) <= (high - low) / 20
        gap = difference(a, b, seed)
        assert gap.low is not None
        assert gap.high is not None
        covered["difference"] += gap.low <= 0 <= gap.high
        low, high = interval(mean_of(rng.random(200) < 0.9)) or (np.nan, np.nan)
        covered["share"] += low <= 0.9 <= high
    least = stats.binom.ppf(0.001, 200, 0.93)  # the percentile bootstrap of 200 rows is a little narrow
    assert {name: count for name, count in covered.items() if count < least} == {"narrow": covered["narrow"]}


def sentences(seed: int, rows: int) -> tuple[list[str], list[str], list[str]]:
    """Expected texts and two equal models' answers, each with a fifth of the words replaced."""
    draw = random.Random(seed)
    vocabulary = [f"word{number}" for number in range(200)]
    expected = [draw.choices(vocabulary, k=draw.randint(5, 20)) for _ in range(rows)]
    answers = [
        [" ".join(draw.choice(vocabulary) if draw.random() < 0.2 else word for word in words) for words in expected]
        for _ in range(2)
    ]
    return [" ".join(words) for words in expected], *answers


@pytest.mark.parametrize("metric", [bleu, chrf])
def test_equal_corpora_are_seldom_told_apart(
    metric: Callable[[list[str], list[str]], RowSums], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one whose answers lose another fifth of the words is shown to be worse."""
    monkeypatch.setattr(statistics, "RESAMPLES", 200)
    alarms = 0
    for seed in range(60):
        expected, first, second = sentences(seed, 30)
        alarms += difference(metric(first, expected), metric(second, expected), seed).significant
    assert alarms <= binomial_bound(60)
    expected, first, second = sentences(0, 60)
    worse = [text.replace("word1", "other") for text in second]
    result = difference(metric(first, expected), metric(worse, expected))
    assert result.significant
    assert (result.high or 0) < 0


def test_corpora_are_tested_as_sacrebleu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.significance import PairedTest

    monkeypatch.setenv("SACREBLEU_SEED", "7")
    expected, first, second = sentences(3, 80)
    second = [text.replace("word17", "other") for text in second]
    oracle = PairedTest([("a", first), ("b", second)], {"BLEU": BLEU()}, [expected], test_type="ar", n_samples=2000)
    signatures, scores = oracle()
    assert signatures
    result = difference(bleu(first, expected), bleu(second, expected))
    assert result.value == pytest.approx(scores["BLEU"][1].score - scores["BLEU"][0].score)
    assert result.p_value == pytest.approx(scores["BLEU"][1].p_value, abs=0.05)


@pytest.mark.parametrize(
    ("a", "b", "value", "bounds", "p_value"),
    [
        ([], [], None, None, None),
        ([1.0], [0.0], -1.0, None, 1.0),
        ([1.0], [1.0], 0.0, None, 1.0),
        ([0.4] * 9, [0.4] * 9, 0.0, (0.0, 0.0), 1.0),
        ([0.0] * 30, [1.0] * 30, 1.0, (1.0, 1.0), 2 / 2001),
        ([0.2, float("nan")], [0.2, 0.3], None, None, None),
        ([0.2, 0.3], [float("inf"), 0.3], None, None, None),
    ],
)
def test_degenerate_rows(
    a: list[float], b: list[float], value: float | None, bounds: tuple[float, float] | None, p_value: float | None
) -> None:
    result = difference(mean_of(a), mean_of(b))
    assert (result.value, result.p_value) == (value, pytest.approx(p_value))
    assert ((result.low, result.high) == bounds) if bounds else (result.low is result.high is None)
    assert result.significant == (p_value is not None and p_value <= ALPHA)


def test_intervals_of_degenerate_rows() -> None:
    assert interval(mean_of([])) is None
    assert interval(mean_of([0.3])) is None
    assert interval(mean_of([0.3, 0.3])) == (0.3, 0.3)
    assert interval(mean_of([float("inf"), 0.3])) is None
    low, high = interval(mean_of([1.0] * 20)) or (0.0, 0.0)
    assert (round(low, 3), high) == (0.839, 1.0)  # Wilson's: all of 20 right may still be 84 %
    huge = ratio_of([9e5, 1e3], [1, 1], np.exp)
    assert point(huge) is None
    assert interval(huge) is None
    assert difference(ratio_of([1.0, 2.0], [1, 1], np.exp), huge).value is None
    # One row alone is beyond a float, both together are not: the interval has no upper end, the test a result.
    edge = ratio_of([720.0, 1.0], [1, 1], np.exp)
    assert point(edge) is not None
    assert interval(edge) is None
    assert difference(edge, ratio_of([719.0, 1.0], [1, 1], np.exp)).p_value is not None


def test_a_ratio_is_one_of_sums() -> None:
    """Control: the mean of the rows' ratios is another number."""
    losses, tokens = [10.0, 1.0], [10, 100]
    assert point(ratio_of(losses, tokens)) == pytest.approx(11 / 110)
    assert point(ratio_of(losses, tokens, np.exp)) == pytest.approx(np.exp(0.1))
    assert point(mean_of([10 / 10, 1 / 100])) != pytest.approx(0.1)


def test_the_same_seed_gives_the_same_numbers_and_unequal_rows_are_refused() -> None:
    a, b = equal_losses(np.random.default_rng(0))
    assert difference(a, b, 3) == difference(a, b, 3)
    assert difference(a, b, 3) != difference(a, b, 4)
    assert interval(a, 3) == interval(a, 3)
    with pytest.raises(ValueError, match="100 rows cannot be compared with 99"):
        difference(a, b.take(range(99)))


def test_ten_thousand_rows_take_seconds() -> None:
    """Processor time, which other work on the machine does not stretch much."""
    a, b = equal_losses(np.random.default_rng(0), 10_000)
    began = time.process_time()
    difference(a, b)
    interval(a)
    assert time.process_time() - began < 6
