"""The tables and lines of `tunesmith eval`: models' answers are shown without control characters, and shortened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.console import clean, counted, number, report, shortened, show_table
from app.eval.metrics import LOWER_IS_BETTER
from app.eval.statistics import ALPHA
from trainers.config.objective_file import short_name

_LONGEST = 200
"""Characters of a prompt or an answer that are shown."""
ONE_BY_ONE = (
    f"Each comparison is at {ALPHA:.0%} by itself: of 20 comparisons of equal models, one is expected to show a "
    "difference."
)


def print_comparison(document: Mapping[str, Any]) -> None:
    """Prints the document of `compare` on stdout: a table of each metric, a line for each comparison, what changed."""
    for metric in document["metrics"]:
        rows = [entry for entry in document["rows"] if entry["metric"] == metric]
        report(f"\n{_safe(_title(metric))}")
        show_table(*_table(rows))
        for entry in document["comparisons"]:
            if entry["metric"] == metric:
                report(_safe(comparison_line(entry)))
    if len(document["comparisons"]) > 1:
        report(f"\n{ONE_BY_ONE}")
    if "judge" in document:
        _print_judge(document["judge"])
    if "tasks" in document:
        _print_tasks(document["tasks"])
    if "forgetting" in document:
        _print_forgetting(document["forgetting"])
    _print_changed(document["changed"])
    for note in document["notes"]:
        report(_safe(f"note: {note}"))
    if document.get("interrupted"):
        before = "the models above were evaluated before" if document["rows"] else "no model was evaluated to its end"
        report(f"interrupted: {before}; repeat the command to evaluate all")


def _print_judge(part: Mapping[str, Any]) -> None:
    report(_safe(f"\nJudged by {part['model']} at {part['url']}: {_title(part['metric'])}"))
    against = [entry for entry in part["rows"] if "against" in entry]
    show_table(*_table([{**entry, "model": f"{entry['model']} against {entry['against']}"} for entry in against]
                       or part["rows"]))  # fmt: skip
    for entry in part["comparisons"]:
        report(_safe(comparison_line(entry)))
        if "wins" in entry:
            first = "-" if entry["first_position"] is None else f"{entry['first_position']:.0%}"
            report(f"  {entry['wins']:,} won, {entry['losses']:,} lost, {entry['ties']:,} tied, {entry['identical']:,} "
                   f"identical; {entry['inconsistent']:,} judged otherwise in the other order; the first answer won "
                   f"{first}")  # fmt: skip
    usage = part["usage"]
    malformed = sum(part["malformed"].values())
    cost = "" if usage["cost"] is None else f", cost {number(usage['cost'])}"
    report(f"{usage['requests']:,} requests, {usage['cached']:,} from the cache, {usage['retries']:,} repeated, "
           f"{malformed:,} without a verdict; {usage['prompt_tokens']:,} tokens in, {usage['completion_tokens']:,} "
           f"out{cost}")  # fmt: skip
    report(_safe(f"prompt: {_line(part['template'])}"))
    for note in part["notes"]:
        report(_safe(f"note: judge, {note}"))


def _print_tasks(part: Mapping[str, Any]) -> None:
    report(_safe(f"\nTasks of lm-evaluation-harness {part['version']}"))
    cells = [[entry["task"], entry["metric"], entry["model"], number(entry["value"]), number(entry["stderr"]),
              f"{entry['rows']:,}"] for entry in part["rows"]]  # fmt: skip
    show_table(["task", "metric", "model", "value", "standard error", "rows"],
               [[_safe(cell) for cell in row] for row in sorted(cells, key=lambda row: row[:2])])  # fmt: skip
    for entry in part["comparisons"]:
        report(_safe(comparison_line({**entry, "source": f"{entry['task']}, {entry['metric']}"})))


def _print_forgetting(part: Mapping[str, Any]) -> None:
    for sample in part["samples"]:
        for metric in dict.fromkeys(entry["metric"] for entry in part["rows"]):
            rows, comparisons = (
                [entry for entry in part[key] if entry["sample"] == sample["name"] and entry["metric"] == metric]
                for key in ("rows", "comparisons")
            )
            if rows:
                report(_safe(f"\nForgetting: {_title(metric)}, {sample['name']}"))
                show_table(*_table(rows))
            for entry in comparisons:
                report(_safe(comparison_line(entry)))
    for note in part["notes"]:
        report(_safe(f"note: forgetting, {note}"))


def comparison_line(entry: Mapping[str, Any]) -> str:
    """What a comparison shows, in a line; never that two models are equal, which no test can show."""
    source = "" if entry["source"] is None else f" on {entry['source']}"
    pair = f"{entry['b']} against {entry['a']}{source}"
    if entry["difference"] is None:
        return f"{pair}: cannot be compared"
    rows = entry["rows"]
    bounds = "" if entry["low"] is None else f" [{number(entry['low'])}, {number(entry['high'])}]"
    measured = f"{entry['difference']:+.4f}{bounds}, p = {number(entry['p_value'])}, {counted(rows, 'row', 'rows')}"
    shows = entry.get("verdict") or verdict(entry["metric"], entry["difference"], entry["significant"])
    return f"{pair}: {shows} ({measured})"


def verdict(metric: str, difference: float | None, significant: bool) -> str:
    """What a comparison shows of the model that is compared, in words.

    Args:
        metric: its name.
        difference: what is added to the metric by taking it in place of the first model; None if unknown.
        significant: whether the test shows a difference.
    """
    if difference is None:
        return "cannot be compared"
    if not significant:
        return "no difference shown"
    return "better" if (difference < 0) == (metric in LOWER_IS_BETTER) else "worse"


def _title(metric: str) -> str:
    better = "lower" if metric in LOWER_IS_BETTER else "higher"
    return f"{short_name(metric)} ({better} is better)"


def _table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    with_sources = any(entry["source"] is not None for entry in rows)
    headers = ["model", *(["source"] if with_sources else []), "value", "95 % interval", "rows"]
    cells = []
    for entry in rows:
        bounds = "-" if entry["low"] is None else f"{number(entry['low'])} to {number(entry['high'])}"
        source = ["all" if entry["source"] is None else entry["source"]] if with_sources else []
        cells.append([_safe(entry["model"]), *map(_safe, source), number(entry["value"]), bounds, f"{entry['rows']:,}"])
    return headers, cells


def _print_changed(changes: Sequence[Mapping[str, Any]]) -> None:
    if changes:
        report("\nChanged most")
    for change in changes:
        right = {True: "right", False: "wrong"}
        verdict = ""
        if change["was_right"] is not None:
            verdict = f"{right[change['was_right']]} before, {right[change['is_right']]} after; "
        measured = f"{change['metric']} {number(change['before'])} to {number(change['after'])}"
        report(_safe(f"  {change['row']} ({verdict}{measured})"))
        texts = {"prompt": change["prompt"], "expected": change["expected"], change["a"]: change["answer_a"],
                 change["b"]: change["answer_b"]}  # fmt: skip
        for label, text in texts.items():
            if text is not None:
                report(_safe(f"    {label}: {_line(text)}"))


def _line(text: str) -> str:
    """A text in one line."""
    return shortened(" ".join(_safe(text).split()), _LONGEST)


def _safe(text: str) -> str:
    """A text for a terminal, without control characters, and halves of surrogate pairs, which JSON may have."""
    return clean(text.encode(errors="replace").decode())
