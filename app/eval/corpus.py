"""BLEU and chrF as functions of n-gram counts, which add up over rows: so that rows can be resampled.

The counts are those of sacrebleu. Its own resampling gives no interval of a difference; that the values are those of
its `corpus_score`, a test shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.eval.statistics import Array, RowSums

_BLEU_ORDER = 4
_CHRF_ORDER = 6
_CHRF_BETA = 2


def bleu(answers: Sequence[str], expected: Sequence[str]) -> RowSums:
    """BLEU with sacrebleu's defaults: tokenizer 13a, exponential smoothing, in 0 to 100."""
    from sacrebleu.metrics.bleu import BLEU

    scorer = BLEU(effective_order=True)  # asked for by `sentence_score`; it changes no count
    terms = []
    for answer, wanted in zip(answers, expected, strict=True):
        score = scorer.sentence_score(answer, [wanted])
        terms.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
    return RowSums(np.array(terms, dtype=float).reshape(len(terms), 2 * _BLEU_ORDER + 2), _bleu)


def _bleu(sums: Array) -> Array:
    """BLEU `[...]` of counts `[..., 10]`: of n-grams that match and that there are, of words, of expected words."""
    matches, totals = sums[..., :_BLEU_ORDER], sums[..., _BLEU_ORDER : 2 * _BLEU_ORDER]
    length, expected_length = sums[..., -2], sums[..., -1]
    halvings = np.cumsum(matches == 0, axis=-1)  # of the precision of an order without a match
    precisions = np.where(matches > 0, matches, 0.5**halvings) / np.maximum(totals, 1)
    brevity = np.minimum(0.0, 1 - expected_length / np.maximum(length, 1))
    defined = (matches > 0).any(axis=-1) & (totals > 0).all(axis=-1)
    return np.where(defined, 100 * np.exp(brevity + np.log(precisions).mean(axis=-1)), 0.0)


def chrf(answers: Sequence[str], expected: Sequence[str]) -> RowSums:
    """chrF2 with sacrebleu's defaults: n-grams of up to 6 characters without white space, in 0 to 100."""
    from sacrebleu.metrics.helpers import extract_all_char_ngrams

    terms = np.zeros((len(answers), _CHRF_ORDER, 3))
    for row, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        of_answer, of_expected = (extract_all_char_ngrams(text, _CHRF_ORDER) for text in (answer, wanted))
        for order, (ngrams, target) in enumerate(zip(of_answer, of_expected, strict=True)):
            # As sacrebleu does, an answer's n-grams do not count where the expected text has none.
            terms[row, order] = ((ngrams & target).total(), ngrams.total() if target else 0, target.total())
    return RowSums(terms.reshape(len(terms), 3 * _CHRF_ORDER), _chrf)


def _chrf(sums: Array) -> Array:
    """chrF `[...]` of counts `[..., 18]`: for each order of n-grams that match, of answers and of expected texts."""
    matches, of_answers, of_expected = np.moveaxis(sums.reshape(*sums.shape[:-1], _CHRF_ORDER, 3), -1, 0)
    present = (of_answers > 0) & (of_expected > 0)
    orders = np.maximum(present.sum(axis=-1), 1)
    precision = np.where(present, matches / np.maximum(of_answers, 1), 0).sum(axis=-1) / orders
    recall = np.where(present, matches / np.maximum(of_expected, 1), 0).sum(axis=-1) / orders
    weight = _CHRF_BETA**2
    divisor = weight * precision + recall
    return 100 * (1 + weight) * precision * recall / np.where(divisor > 0, divisor, 1.0)
