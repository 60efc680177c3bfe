"""Fragments of the Evaluate page: the list of evaluations, and the report of one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlencode

from app.console import counted
from app.eval.view import standings
from app.services.chat import weights_of
from trainers.run.folder import RunFolder
from ui.parts import (
    Html,
    Kind,
    ago,
    alert_list,
    badge,
    data_table,
    element,
    join,
    link,
    meter,
    note,
    number_text,
    section,
    title,
    unbroken,
)  # fmt: skip

LABELS = {
    "loss": ("Loss", "how much the expected text surprises the model, by token"),
    "perplexity": ("Perplexity", "the same as a number of tokens between which the model hesitates"),
    "bits_per_character": ("Bits per character", "the same by character, for models with other tokenizers"),
    "exact_match": ("Exact match", "share of answers that are the expected text"),
    "f1": ("F1", "words that answer and expected text have in common, 0 to 1"),
    "rouge_l": ("ROUGE-L", "longest series of words in common, 0 to 1"),
    "bleu": ("BLEU", "short series of words in common, 0 to 100"),
    "chrf": ("chrF", "series of characters in common, 0 to 100"),
    "json": ("Valid JSON", "share of answers that are"),
    "json_schema": ("Fits the JSON Schema", "share of answers that do"),
    "judge_win": ("Rows won", "share of rows whose answer the judge prefers, ties as half"),
    "judge_score": ("Judge's score", "of each answer, 1 to 10"),
}
"""What a metric is called, and what it is."""
_KINDS = {"better": "ts-better", "worse": "ts-worse", "forgot": "ts-worse"}
_BESIDES = {
    "forgetting": ("Forgetting", "The loss on other texts than the rows: a model whose loss is higher there than that "
                   "of the first one has forgotten something. What is not in these texts cannot show."),
    "judge": ("A judge", "Another model read the answers. Its verdict is an opinion."),
    "tasks": ("Tasks of lm-evaluation-harness", "Intervals are 1.96 of the harness's standard errors to each side."),
}  # fmt: skip
"""Headings of what was measured besides the metrics, and what is to be known of it."""
_PLOT = 100.0


def label_of(metric: str) -> str:
    """What a metric is called; its own name if it does not ship."""
    return LABELS.get(metric, (metric, ""))[0]


# -- the list --------------------------------------------------------------------------------------------------------


def evaluation_link(entry: dict[str, Any], label: Any = None) -> Html:
    """A link to an evaluation, which says its models by default."""
    return link("/evaluate", label or _models_text(entry["models"]) or entry["id"], eval=entry["id"])


def _models_text(models: Sequence[str]) -> str:
    if len(models) < 2:
        return "".join(models)
    others = f"{models[1]} and {len(models) - 2} more" if len(models) > 3 else " and ".join(models[1:])
    return f"{models[0]}, {others}" if len(models) > 2 else f"{models[0]} and {others}"


def evaluations_table(entries: Sequence[dict[str, Any]], total: int, empty: str, caption: str = "Evaluations") -> Html:
    """The evaluations, newest first, each with its state."""
    rows = [
        [evaluation_link(entry), badge(entry["state"]), ago(entry["started_at"]) if entry["started_at"] else None,
         entry["doing"] or entry["reason"] or _outcome(entry["standings"])]
        for entry in entries
    ]  # fmt: skip
    table = data_table(["Models", "State", "Started", "What came of it"], rows, caption, empty=empty, cards=True)
    more = note(f"The newest {len(entries)} of {total:,}; the others are in the runs folder.")
    return element("div", join([table, more if total > len(entries) else ""]), class_="ts-evaluations")


def _outcome(models: Sequence[dict[str, Any]]) -> str:
    """What came of an evaluation, such as `my-run: better in 6 of 7 metrics, worse in 1`, for a line of a list."""
    lines = []
    for model in models:
        kinds = ("better", "worse", "same", "unknown")
        total = sum(len(model[kind]) for kind in kinds)
        names = dict(zip(kinds, ("better in", "worse in", "no difference shown in", "not comparable in"), strict=True))
        first, *others = [f"{names[kind]} {len(model[kind])}" for kind in kinds if model[kind]]
        clauses = [
            f"{first} of {counted(total, 'metric', 'metrics')}",
            *others,
            *(["it forgot"] if model["forgot"] else []),
        ]
        lines.append(f"{model['model']}: {', '.join(clauses)}")
    return "; ".join(lines) or "report"


def run_evaluations(run: RunFolder, entries: Sequence[dict[str, Any]], total: int) -> Html:
    """The evaluations of a run, and a link that starts one.

    Args:
        run: the run.
        entries: its evaluations, newest first.
        total: how many it has.
    """
    if not weights_of(run):
        lead = note("A run is evaluated once it has a checkpoint or an export.")
        return section("Evaluations", join([lead, evaluations_table(entries, total, "")]))
    start = element("div", element("a", "Evaluate this run", href=f"/evaluate?{urlencode({'run': run.id})}",
                                 class_="ts-button"), class_="ts-tools")  # fmt: skip
    empty = "None yet. An evaluation compares it with what it started from, on the same rows."
    return section("Evaluations", join([start, evaluations_table(entries, total, empty)]))


# -- one evaluation --------------------------------------------------------------------------------------------------


def unknown_evaluation(mistakes: Sequence[str]) -> Html:
    """The content of the page if there is no such evaluation."""
    back = element("p", join(["See ", link("/evaluate", "all evaluations"), "."]))
    return join([title("No such evaluation"), alert_list(mistakes), element("div", back, class_="ts-note")])


def headline(entry: dict[str, Any]) -> Html:
    """Which models, since when, and the progress of an evaluation."""
    models = entry["models"]
    name = _models_text(models) or entry["id"]
    heading = element("h1", join([name, " ", badge(entry["state"])]), class_="ts-run-name")
    began = join(["started ", ago(entry["started_at"])]) if entry["started_at"] else ""
    facts = join(filter(None, [entry["id"], began, link("/evaluate", "all evaluations")]), ", ")
    parts = [heading, note(facts)]
    if entry["progress"] is not None:
        doing = (
            "stopping; the models that are done will be compared" if entry["state"] == "stopping" else entry["doing"]
        )
        parts.append(meter(entry["progress"], "evaluation", doing))
        parts.append(note("It goes on when this page is closed. The comparison appears here once all models are done."))
    if entry["state"] == "stopped":
        parts.append(
            alert_list(["it was stopped; models that were done by then are below, if there are any"], "warning")
        )
    if entry["state"] == "failed":
        parts.append(alert_list([entry["reason"]]))
    return element("div", join(parts), class_="ts-evaluation-head")


def report_parts(has_report: bool, view: dict[str, Any]) -> Html:
    """The report: what it shows, all numbers, losses by source, changed answers, and notes."""
    if not has_report:
        return Html("")
    return join(
        [
            _verdicts(view),
            alert_list(view["failed"], "error") if len(view["failed"]) > 1 else "",
            _scores(view),
            _by_source(view),
            *map(_besides, view["parts"]),
            _changed(view["changed"]),
            _notes(view),
        ]
    )


def _verdicts(view: dict[str, Any]) -> Html:
    """What is shown of each model, in a sentence: the most important thing on the page."""
    models = view["models"]
    if len(models) < 2:
        if not models:
            return Html("")
        alone = " was evaluated alone, so it is compared with nothing."
        return alert_list([join([element("strong", models[0]), alone])], "info")
    return element("div", join(_verdict(model, models[0]) for model in standings(view)), class_="ts-verdicts")


def _verdict(model: dict[str, Any], first: str) -> Html:
    better, worse, same, unknown = (list(map(label_of, model[key])) for key in ("better", "worse", "same", "unknown"))
    forgot = model["forgot"]
    clauses = [join(["better in ", _listed(better)])] if better else []
    clauses += [join(["worse in ", _listed(worse)])] if worse else []
    clauses += [join(["it forgot, as ", _listed(forgot), " shows"])] if forgot else []
    clauses += [join(["no difference shown in ", _listed(same)])] if same else []
    clauses += [join(["not comparable in ", _listed(unknown)])] if unknown else []
    lost = worse or forgot
    kind: Kind = "warning" if better and lost else "good" if better else "error" if lost else "info"
    against = [element("strong", model["model"]), f" against {first}: "]
    return alert_list([join([*against, join(clauses, "; "), "."])], kind)


def _listed(names: Sequence[str]) -> Html:
    """`A, B and C`, none of which breaks at its hyphens."""
    *others, last = (element("span", name, class_="ts-word") for name in names)
    return join([*([join(others, ", "), " and "] if others else []), last])


def _scores(view: dict[str, Any]) -> Html:
    """All metrics of all rows: a group of lines for each metric, a line for each model."""
    groups = []
    for metric in view["metrics"]:
        groups.append((_heading(metric, label_of(metric["title"])),
                       [row for row in metric["rows"] if row["source"] is None]))  # fmt: skip
    if not groups:
        return note("No model was evaluated, so there is nothing to compare.")
    first = view["models"][0]
    explained = note(
        "The line of each model is its 95% interval: rows drawn anew would give a value in it 19 times of 20. p is how "
        "often chance alone would make such a difference; each is judged by itself, at 5%. No difference shown does "
        "not mean equal: with more rows, one may show."
    )
    return section("Scores", join([explained, _table(groups, first, "Scores", "Model", "model")]))


def _heading(metric: dict[str, Any], name: str) -> Html:
    """What is measured, and which is better."""
    better = {True: "lower is better", False: "higher is better", None: ""}[metric["lower"]]
    about = LABELS.get(metric["name"], ("", ""))[1]
    return join([element("strong", name), _small(", ".join(filter(None, [about, better])))])


def _besides(part: dict[str, Any]) -> Html:
    """What was measured besides the metrics: forgetting, the judge's verdicts, or tasks."""
    name, about = _BESIDES[part["name"]]
    groups = []
    for metric in part["metrics"]:
        heading = ": ".join(filter(None, [metric.get("group", ""), label_of(metric["title"])]))
        groups.append((_heading(metric, heading), [row for row in metric["rows"] if row["source"] is None]))
    notes = element("ul", join(element("li", line) for line in part["notes"]), class_="ts-plain-list")
    table = _table(groups, part["first"], name, "Model", "model") if groups else note("It has no result.")
    lead = note(" ".join(filter(None, [f"{part['about']}." if part["about"] else "", about])))
    return section(name, join([lead, table, notes if part["notes"] else ""]))


def _by_source(view: dict[str, Any]) -> Html:
    """Each metric by source, the loss in sight and the others folded."""
    parts: list[Html] = []
    for metric in view["metrics"]:
        by_source: dict[str, list[dict[str, Any]]] = {}
        for row in metric["rows"]:
            if row["source"] is not None:
                by_source.setdefault(row["source"], []).append(row)
        if not by_source:
            continue
        label = f"{label_of(metric['title'])} by source"
        groups = [(element("strong", source), rows) for source, rows in by_source.items()]
        table = _table(groups, view["models"][0], label, "Model", "model")
        opened = section(label, table) if not parts else _fold(label, table)
        parts.append(opened)
    return element("div", join(parts), class_="ts-section") if parts else Html("")


def _table(
    groups: Sequence[tuple[Html, Sequence[dict[str, Any]]]], first: str, caption: str, header: str, key: str
) -> Html:
    """A table with a group of lines for each heading.

    Args:
        groups: a heading, and rows of `app.eval.view.result`.
        first: the model that others are compared with.
        caption: what the table holds.
        header: what a line is.
        key: where a row has the name of its line.
    """
    headers = [header, "Value", "95% interval", "", f"Against {first}", "Rows"]
    right = {1: "ts-number", 2: "ts-number", 5: "ts-number"}
    head = join(element("th", cell, scope="col", class_=right.get(index)) if cell else element("td")
                for index, cell in enumerate(headers))  # fmt: skip
    lines: list[Html] = []
    for heading, rows in groups:
        lines.append(element("tr", element("th", heading, colspan=len(headers), scope="rowgroup"), class_="ts-group"))
        lines += _lines(rows, first, key)
    unseen = element("caption", caption, class_="ts-unseen")
    table = element("table", join([unseen, element("thead", element("tr", head)), element("tbody", join(lines))]))
    return element("div", table, class_="ts-table ts-scores", tabindex=0, role="region", aria_label=caption)


def _lines(rows: Sequence[dict[str, Any]], first: str, key: str) -> Iterable[Html]:
    decimals = _decimals([row[name] for row in rows for name in ("value", "low", "high")])
    ends = [row[name] for row in rows for name in ("value", "low", "high") if row[name] is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 0.0)
    for row in rows:
        value = _fixed(row["value"], decimals)
        cells = [
            element("th", row[key], scope="row"),
            element("td", value, class_="ts-number ts-value"),
            element(
                "td", _bounds(row["low"], row["high"], decimals) or "-", class_="ts-number", data_name="95% interval"
            ),
            element("td", _plot(row, low, high), class_="ts-interval"),
            element("td", _difference(row, first, decimals)),
            element("td", number_text(row["rows"]), class_="ts-number", data_name="Rows"),
        ]
        yield element("tr", join(cells))


def _plot(row: dict[str, Any], low: float, high: float) -> Html:
    """The interval as a line and the value as a dot, on the axis that the lines of a metric share."""
    if row["value"] is None:
        return Html("")

    def at(value: float) -> float:
        return 4 + (_PLOT - 8) * (value - low) / (high - low) if high > low else _PLOT / 2

    bar = ""
    if row["low"] is not None and row["high"] is not None:
        bar = f'<line x1="{at(row["low"]):.1f}%" x2="{at(row["high"]):.1f}%" y1="50%" y2="50%"/>'
    dot = f'<circle cx="{at(row["value"]):.1f}%" cy="50%" r="4"/>'
    return Html(f'<svg class="ts-whisker" aria-hidden="true">{bar}{dot}</svg>')


def _difference(row: dict[str, Any], first: str, decimals: int) -> Html:
    """The verdict in words, and the difference with its interval."""
    shows = row["verdict"]
    if shows is None:
        is_first = row["model"] == first
        return element("span", "what the others are compared with" if is_first else "not compared", class_="ts-beside")
    if row["difference"] is None:
        return element("span", shows)
    sign = "+" if row["difference"] > 0 else ""
    bounds = _bounds(row["difference_low"], row["difference_high"], decimals)
    measured = f"{sign}{_fixed(row['difference'], decimals)}{f' ({bounds})' if bounds else ''}{_chance(row['p_value'])}"
    fewer = row["compared_rows"] is not None and row["compared_rows"] != row["rows"]
    common = f", {number_text(row['compared_rows'])} rows in common" if fewer else ""
    return join([element("span", shows, class_=_KINDS.get(shows, "ts-same")), _small(f"{measured}{common}")])


def _decimals(values: Sequence[float | None]) -> int:
    """The decimals with which the largest value has four digits."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    return max(0, 3 - math.floor(math.log10(largest))) if largest > 1e-6 else 4


def _fixed(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.3e}" if abs(value) >= 1e9 else f"{value:,.{min(decimals, 6)}f}"


def _bounds(low: float | None, high: float | None, decimals: int) -> str:
    return "" if low is None or high is None else f"{_fixed(low, decimals)} to {_fixed(high, decimals)}"


def _chance(p: float | None) -> str:
    return "" if p is None else ", p < 0.001" if p < 0.001 else f", p = {p:.2g}"


def _changed(changes: Sequence[dict[str, Any]]) -> Html:
    """The answers that changed most, both texts of each, with what the other text lacks marked."""
    if not changes:
        return Html("")
    lead = note("Answers that were right and are wrong come first. What the other answer lacks is marked.")
    return section("What changed most", join([lead, *map(_change, changes)]))


def _change(change: dict[str, Any]) -> Html:
    heading = element("h3", join([change["row"] or "a row", _small(change["source"]) if change["source"] else ""]))
    texts = [_quoted(name, "", element("div", change[key].strip(), class_="ts-said", tabindex=0))
             for name, key in (("Prompt", "prompt"), ("Expected", "expected")) if change[key]]  # fmt: skip
    metric = label_of(change["metric"])
    answers = [_answer(change["a"], change["answer_a"], metric, change["before"], change["was_right"])]
    for other in change["others"]:
        answer = other["answer"], metric, other["after"], other["is_right"]
        answers.append(_answer(other["b"], *answer, lost=change["was_right"] is True))
    pair = element("div", join(answers), class_="ts-pair")
    return element("article", join([heading, *texts, pair]), class_="ts-row ts-change")


def _answer(
    model: str, parts: Sequence[tuple[str, bool]] | None, metric: str, value: float | None, right: bool | None,
    lost: bool = False,
) -> Html:  # fmt: skip
    """A model's answer with its score, or the score alone.

    Args:
        model: its name.
        parts: of the text, each with whether it is marked; None without an answer.
        metric: what is measured.
        value: the score.
        right: whether it is the expected text; None if that is unknown.
        lost: whether the model before had it right.
    """
    mark = {True: "right", False: "no longer right" if lost else "wrong", None: ""}[right]
    fate = element("span", mark, class_="ts-worse" if lost and right is False else "ts-better" if right else None)
    score = join(filter(None, [fate if mark else "", f"{metric} {number_text(value)}"]), ", ")
    if parts is None:
        return _quoted(model, score, Html(""))
    marked = join(element("mark", part) if differs else part for part, differs in parts)
    return _quoted(
        model,
        score,
        element("div", marked if parts else element("em", "empty"), class_="ts-said ts-answer", tabindex=0),
    )


def _quoted(name: str, fact: Any, content: Html) -> Html:
    """A text below who said it."""
    head = element("p", join([element("strong", name), " ", fact]), class_="ts-sayer")
    return element("div", join([head, content]))


def _notes(view: dict[str, Any]) -> Html:
    lines = [*view["notes"], *view["left_out"]]
    items = element("ul", join(element("li", line) for line in lines), class_="ts-plain-list")
    return section("Notes", items) if lines else Html("")


def files_part(entry: dict[str, Any], output: str) -> Html:
    """The command that does the same, the folder, and the end of what was printed."""
    parts = [element("p", join(["Folder: ", element("code", entry["path"])]), class_="ts-note")]
    if entry["command"]:
        parts.insert(0, command_box(entry["command"]))
    if output:
        parts.append(_fold("What it printed", element("pre", output, class_="ts-file", tabindex=0, role="region",
                                                      aria_label="What it printed")))  # fmt: skip
    return join(parts)


def command_box(line: str) -> Html:
    """The command that does the same in a terminal."""
    heading = element("div", element("h2", "The same from a terminal"), class_="ts-box-head")
    text = element("pre", unbroken(line), class_="ts-box-text", tabindex=0, role="region", aria_label="Command")
    return element("div", join([heading, text]), class_="ts-box ts-command")


def _fold(label: str, content: Html) -> Html:
    return element("details", join([element("summary", label), content]))


def _small(content: str) -> Html:
    return element("span", content, class_="ts-beside")
