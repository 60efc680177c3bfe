"""The document of `tunesmith eval`: metrics of each model with confidence intervals, and comparisons with the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.console import counted
from app.eval.changes import changed_answers
from app.eval.metrics import (
    ANSWER_METRICS,
    LOSS_METRICS,
    OPTION,
    answer_sums,
    check_metrics,
    default_metrics,
    has_input,
    loss_sums,
)
from app.eval.own_metrics import OwnMetrics, check_own_metrics, own_metrics
from app.eval.rows import Aligned, Row, align
from app.eval.statistics import RowSums, difference, interval, mean_of, point
from trainers.config.mistakes import ConfigError

MOST_CHANGED = 10
_BY_TOKENS = ("loss", "perplexity")
_BY_CHARACTERS = "bits_per_character"


@dataclass(frozen=True)
class Settings:
    """What is computed, and how.

    Args:
        metrics: names, among them `path.py:function`; None for those that fit the rows.
        schema: path of the JSON Schema for the metric `json_schema`.
        most_changed: how many changed answers of each comparison the document holds at most.
        seed: of the resamples; the same seed gives the same document.
        timeout: seconds that metrics of one's own may take for the answers of one model.
    """

    metrics: Sequence[str] | None = None
    schema: str | None = None
    most_changed: int = MOST_CHANGED
    seed: int = 0
    timeout: float = 600.0

    def check(self) -> None:
        """Checks the settings before any model runs.

        Raises:
            ConfigError: for what cannot be computed.
        """
        check_metrics(self.metrics, self.schema)
        check_own_metrics(self.metrics or ())


@dataclass
class _Model:
    """A model's rows, and for each metric the positions of those that have its input and what they add to it."""

    name: str
    rows: list[Row]
    sums: dict[str, RowSums] = field(default_factory=dict)
    inputs: dict[str, dict[int, int]] = field(default_factory=dict)
    """Of each metric: position of a row by its `id` -> position in the sums."""

    def of(self, metric: str, rows: Sequence[Row]) -> RowSums:
        """The metric of some of the rows, all of which have its input."""
        positions = self.inputs[metric]
        return self.sums[metric].take([positions[id(row)] for row in rows])


def compare(models: Mapping[str, Sequence[Row]], settings: Settings = Settings()) -> dict[str, Any]:
    """Compares models on the same rows.

    Args:
        models: the rows of each model by its name; the first is the one that the others are compared with.
        settings: what is computed.

    Returns:
        `metrics`, the names in the order of the tables; `rows` `[{model, source, metric, value, low, high, rows}]`,
        whose source is null for all rows; `comparisons` `[{a, b, source, metric, difference, low, high, p_value,
        significant, rows}]`, where the difference is that of b minus a, the first model; `changed`, answers of b that
        changed most from a; `notes`, sentences about what was left out. Numbers that cannot be computed are null.

    Raises:
        ConfigError: for settings that do not fit, no row, or a metric of one's own that fails.
    """
    settings.check()
    every_row = [row for rows in models.values() for row in rows]
    if not every_row:
        raise ConfigError.about("", None, "there is no row to evaluate", "check the data")
    metrics = _metrics(settings, every_row)
    first, *others = [_Model(name, list(rows)) for name, rows in models.items()]
    aligned = {other.name: align(first.rows, other.rows) for other in others}
    unlike_tokens = {name for name, pair in aligned.items() if not _same_tokens(pair)}
    if unlike_tokens and {*metrics} & {*_BY_TOKENS} and _BY_CHARACTERS not in metrics:
        metrics.insert(max(metrics.index(name) for name in _BY_TOKENS if name in metrics) + 1, _BY_CHARACTERS)
    with OwnMetrics(own_metrics(metrics), settings.timeout) as own:
        for model in (first, *others):
            _compute(model, metrics, settings.schema, own)
    notes = [note for model in (first, *others) for note in _model_notes(model, metrics)]
    comparisons, changed = [], []
    for other in others:
        pair = aligned[other.name]
        notes += _pair_notes(first.name, other.name, pair, other.name in unlike_tokens and {*metrics} & {*_BY_TOKENS})
        for metric in metrics:
            if other.name in unlike_tokens and metric in _BY_TOKENS:
                continue
            comparisons += _comparisons(first, other, pair, metric, settings.seed)
        changed += changed_answers(first.name, other.name, pair, settings.most_changed, other.name in unlike_tokens)
    rows = [entry for metric in metrics for model in (first, *others) for entry in _rows(model, metric, settings.seed)]
    return {"metrics": metrics, "rows": rows, "comparisons": comparisons, "changed": changed, "notes": notes}


def _metrics(settings: Settings, rows: Sequence[Row]) -> list[str]:
    if settings.metrics is None:
        if metrics := default_metrics(rows, settings.schema):
            return metrics
        raise ConfigError.about("", None, "no row has a trained token or an answer", "evaluate rows that have them")
    for metric in settings.metrics:
        if not any(has_input(metric, row) for row in rows):
            needed = "trained tokens" if metric in LOSS_METRICS else "answers"
            remedy = "remove it, or evaluate rows that have them"
            raise ConfigError.about(OPTION, metric, f"needs {needed}, and no row has any", remedy)
    return list(settings.metrics)


def _same_tokens(pair: Aligned) -> bool:
    return [row.tokens for row in pair.a] == [row.tokens for row in pair.b]


def _compute(model: _Model, metrics: Iterable[str], schema: str | None, own: OwnMetrics) -> None:
    """Fills in the sums of a model."""
    answered = [row for row in model.rows if row.answer is not None]
    values = own.values(answered)
    for metric in metrics:
        rows = [row for row in model.rows if has_input(metric, row)]
        model.inputs[metric] = {id(row): position for position, row in enumerate(rows)}
        if metric in LOSS_METRICS:
            model.sums[metric] = loss_sums(metric, rows)
        elif metric in ANSWER_METRICS:
            model.sums[metric] = answer_sums(metric, rows, schema)
        else:
            model.sums[metric] = mean_of(values[metric])


def _sources(rows: Iterable[Row]) -> list[str]:
    """The sources that are listed by themselves, in the order of the rows; none if there is only one."""
    sources = dict.fromkeys(row.source for row in rows)
    return [source for source in sources if source is not None] if len(sources) > 1 else []


def _parts(rows: Sequence[Row]) -> dict[str | None, list[int]]:
    """Positions of all rows, and of those of each source if there are several."""
    parts: dict[str | None, list[int]] = {None: list(range(len(rows)))}
    for source in _sources(rows):
        parts[source] = [position for position, row in enumerate(rows) if row.source == source]
    return parts


def _rows(model: _Model, metric: str, seed: int) -> list[dict[str, Any]]:
    entries = []
    for source, positions in _parts(model.rows).items():
        rows = [model.rows[position] for position in positions if has_input(metric, model.rows[position])]
        sums = model.of(metric, rows)
        low, high = interval(sums, seed) or (None, None)
        entries.append({"model": model.name, "source": source, "metric": metric, "value": point(sums), "low": low,
                        "high": high, "rows": len(rows)})  # fmt: skip
    return entries


def _comparisons(first: _Model, other: _Model, pair: Aligned, metric: str, seed: int) -> list[dict[str, Any]]:
    entries = []
    for source, positions in _parts(pair.a).items():
        common = [at for at in positions if has_input(metric, pair.a[at]) and has_input(metric, pair.b[at])]
        result = difference(
            first.of(metric, [pair.a[at] for at in common]), other.of(metric, [pair.b[at] for at in common]), seed
        )
        entries.append(
            {
                "a": first.name, "b": other.name, "source": source, "metric": metric, "difference": result.value,
                "low": result.low, "high": result.high, "p_value": result.p_value, "significant": result.significant,
                "rows": len(common),
            }
        )  # fmt: skip
    return entries


def _model_notes(model: _Model, metrics: Iterable[str]) -> list[str]:
    """What is missing from the rows of a model."""
    notes, total = [], counted(len(model.rows), "row", "rows")
    answered = [row for row in model.rows if row.answer is not None]
    missing = len(model.rows) - len(answered)
    if missing and any(metric not in LOSS_METRICS for metric in metrics):
        notes.append(f"{model.name}: {missing:,} of {total} have no answer and are left out of metrics of answers")
    if cut := sum(not row.ended for row in answered):
        notes.append(f"{model.name}: {cut:,} of {counted(len(answered), 'answer', 'answers')} were cut at the limit "
                     "of new tokens and count as they are")  # fmt: skip
    for metric in metrics:
        if metric in LOSS_METRICS and model.sums[metric].rows and point(model.sums[metric]) is None:
            notes.append(f"{model.name}: {metric} is not finite, so it is not compared")
        if metric == _BY_CHARACTERS and (without := len(model.rows) - model.sums[metric].rows):
            notes.append(f"{model.name}: {without:,} of {total} have nothing trained and are left "
                         f"out of {metric}")  # fmt: skip
    return notes


def _pair_notes(a: str, b: str, pair: Aligned, unlike_tokens: object) -> list[str]:
    """What is left out of a comparison."""
    notes = []
    for count, lacking, having in ((pair.only_a, b, a), (pair.only_b, a, b)):
        if count:
            notes.append(f"{b} against {a}: {counted(count, 'row', 'rows')} of {having} that {lacking} lacks left out")
    if not pair.a:
        notes.append(f"{b} against {a}: they have no row in common, so nothing is compared")
    if pair.unlike:
        notes.append(f"{b} against {a}: {counted(pair.unlike, 'row', 'rows')} with another expected text "
                     "left out")  # fmt: skip
    if unlike_tokens:
        notes.append(f"{b} against {a}: not compared by loss per token, as their tokenizers or templates "
                     f"make other numbers of tokens of the same rows; compare {_BY_CHARACTERS}")  # fmt: skip
    return notes
