"""Metrics of answers against expected texts, and of losses. Imports no torch.

Metrics of answers are in 0 to 1, but for BLEU and chrF, which are in 0 to 100 as their authors report them. A fenced
code block is no JSON, and space around an answer is not part of it. `f1` and `rouge_l` see words, so texts in scripts
that put no space between words, such as Chinese, are better compared by `chrf`.
"""

from __future__ import annotations

import importlib.util
import re
import statistics as quantiles
import string
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from app.eval.corpus import bleu, chrf
from app.eval.rows import Row
from app.eval.statistics import RowSums, mean_of, ratio_of
from trainers.config.json_schema import parsed_json, schema_mistakes, schema_test
from trainers.config.mistakes import ConfigError, Mistake, nearest
from trainers.config.objective_file import read_file, split_objective

LOSS_METRICS = ("loss", "perplexity", "bits_per_character")
ANSWER_METRICS = ("exact_match", "f1", "rouge_l", "bleu", "chrf", "json", "json_schema")
LOWER_IS_BETTER = frozenset(LOSS_METRICS)
OPTION = "metrics"
SCHEMA_OPTION = "metric_schema"
INSTALL = 'pip install -e ".[eval]"'
_PACKAGES = {"rouge_l": "rouge_score", "bleu": "sacrebleu", "chrf": "sacrebleu", "json_schema": "jsonschema"}
_EVERY_METRIC = "scipy"
_PHRASE = 4
"""Words of the median expected text from which phrases are worth comparing: the longest n-grams of BLEU."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class UnicodeWords:
    """Words for ROUGE: as those of rouge-score for ASCII, which drops all other letters."""

    def tokenize(self, text: str) -> list[str]:
        """The words of a text in lower case."""
        return re.findall(r"[^\W_]+", text.lower())


def exact_match(answer: str, expected: str) -> float:
    """1 for an answer that is the expected text, but for space around it; otherwise 0."""
    return float(answer.strip() == expected.strip())


def f1(answer: str, expected: str) -> float:
    """F1 of the words that both texts have, as SQuAD's script 2.0 computes it.

    In lower case, without ASCII punctuation and the articles a, an, the; a word counts as often as both have it. If
    either has no word, it is 1 if neither has.
    """
    answer_words, expected_words = _squad_words(answer), _squad_words(expected)
    if not answer_words or not expected_words:
        return float(answer_words == expected_words)
    common = sum((Counter(answer_words) & Counter(expected_words)).values())
    return 2 * common / (len(answer_words) + len(expected_words))


def _squad_words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def is_json(answer: str) -> float:
    """1 for an answer that is nothing but JSON (RFC 8259), without NaN and with each key once; otherwise 0."""
    try:
        parsed_json(answer)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def rouge_l(answers: Sequence[str], expected: Sequence[str]) -> list[float]:
    """The F-measure of ROUGE-L of each answer, by the package rouge-score, without a stemmer."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=UnicodeWords())
    return [
        float(scorer.score(target=wanted, prediction=answer)["rougeL"].fmeasure)
        for answer, wanted in zip(answers, expected, strict=True)
    ]


def row_values(metric: str, answers: Sequence[str], expected: Sequence[str], schema: str | None = None) -> list[float]:
    """A metric of each row, `[rows]`.

    Args:
        metric: one that is a mean over rows: of `ANSWER_METRICS` without `bleu` and `chrf`.
        answers: the answers.
        expected: the expected texts.
        schema: path of the JSON Schema, for `json_schema`.
    """
    if metric == "rouge_l":
        return rouge_l(answers, expected)
    if metric == "json":
        return [is_json(answer) for answer in answers]
    if metric == "json_schema":
        fits = schema_test(parsed_json(read_file(SCHEMA_OPTION, schema or "")))
        return [float(fits(answer)) for answer in answers]
    function = {"exact_match": exact_match, "f1": f1}[metric]
    return [function(answer, wanted) for answer, wanted in zip(answers, expected, strict=True)]


def answer_sums(metric: str, rows: Sequence[Row], schema: str | None = None) -> RowSums:
    """A metric of the answers of rows, all of which have one; arguments as for `row_values`."""
    answers, expected = [row.answer or "" for row in rows], [row.expected for row in rows]
    corpus: dict[str, Callable[[Sequence[str], Sequence[str]], RowSums]] = {"bleu": bleu, "chrf": chrf}
    return corpus[metric](answers, expected) if metric in corpus else mean_of(
        row_values(metric, answers, expected, schema)
    )  # fmt: skip


def loss_sums(metric: str, rows: Sequence[Row]) -> RowSums:
    """A metric of the losses of rows, as the ratio of sums over rows.

    Args:
        metric: `loss`, nats per trained token; `perplexity`, exp of it; `bits_per_character` of what is trained,
            which does not depend on the tokenizer.
        rows: rows, each with a trained token and, for `bits_per_character`, a character.
    """
    if metric == "bits_per_character":
        return ratio_of([row.loss / np.log(2) for row in rows], [row.characters for row in rows])
    losses, tokens = [row.loss for row in rows], [row.tokens for row in rows]
    return ratio_of(losses, tokens, np.exp) if metric == "perplexity" else ratio_of(losses, tokens)


def has_input(metric: str, row: Row) -> bool:
    """Whether a row has what a metric is computed from; metrics of one's own are computed from answers."""
    if metric not in LOSS_METRICS:
        return row.answer is not None
    return row.tokens > 0 and (metric != "bits_per_character" or row.characters > 0)


def check_metrics(requested: Iterable[str] | None, schema: str | None) -> None:
    """Checks a request for metrics before any model runs; files of one's own are checked by `own_metrics`.

    Args:
        requested: names, among them `path.py:function`; None for those that fit the data.
        schema: path of a JSON Schema.

    Raises:
        ConfigError: for an unknown metric, a package or a schema that is missing, and a schema that is none.
    """
    mistakes = []
    names = list(requested or ())
    known = (*LOSS_METRICS, *ANSWER_METRICS)
    for name in names:
        if name not in known and split_objective(name) is None:
            remedy = nearest(name, known, f"use {', '.join(known)}, or path.py:function")
            mistakes.append(Mistake(OPTION, name, "is no metric", remedy))
        elif not _is_installed(name):
            problem = f"needs the package {_PACKAGES[name].replace('_', '-')}"
            mistakes.append(Mistake(OPTION, name, problem, INSTALL))
    if len({*names}) < len(names):
        mistakes.append(Mistake(OPTION, ",".join(names), "has a metric twice", "name each once"))
    if importlib.util.find_spec(_EVERY_METRIC) is None:
        mistakes.append(Mistake("", None, f"confidence intervals need the package {_EVERY_METRIC}", INSTALL))
    if schema is None and "json_schema" in names:
        mistakes.append(Mistake(SCHEMA_OPTION, None, "is not set, and the metric json_schema needs it",
                                "name its file"))  # fmt: skip
    elif schema is not None and not _is_installed("json_schema"):
        mistakes.append(Mistake(SCHEMA_OPTION, schema, "needs the package jsonschema", INSTALL))
    elif schema is not None:
        mistakes += schema_mistakes(SCHEMA_OPTION, schema)
    if mistakes:
        raise ConfigError(mistakes)


def default_metrics(rows: Sequence[Row], schema: str | None = None) -> list[str]:
    """The metrics that fit rows: those whose packages and inputs are there and which say something of them.

    Phrases (`rouge_l`, `bleu`, `chrf`) are compared if expected texts have four words or more in the median; `json` if
    all of them are JSON objects or lists, `json_schema` if there is a schema.

    Args:
        rows: rows of any of the models.
        schema: path of a JSON Schema.
    """
    metrics = [name for name in ("loss", "perplexity") if any(has_input(name, row) for row in rows)]
    answered = [row.expected for row in rows if row.answer is not None]
    if not answered:
        return metrics
    metrics += ["exact_match", "f1"]
    if quantiles.median(len(text.split()) for text in answered) >= _PHRASE:
        metrics += ["rouge_l", "bleu", "chrf"]
    if all(_is_json_container(text) for text in answered):
        metrics.append("json")
    if schema is not None:
        metrics.append("json_schema")
    return [name for name in metrics if _is_installed(name)]


def _is_json_container(text: str) -> bool:
    try:
        return isinstance(parsed_json(text), dict | list)
    except (ValueError, RecursionError):
        return False


def _is_installed(metric: str) -> bool:
    package = _PACKAGES.get(metric)
    return package is None or importlib.util.find_spec(package) is not None
