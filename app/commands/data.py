"""The verb `data`: what will be trained, before any GPU is taken."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from app.console import clean, counted, report, report_json, say, show_table
from app.launch.job import Mistakes, Words, named_preset, sort_words
from app.services.data import DataView, close_data, open_data
from app.services.rpc_client import WorkerDied
from trainers.config.parse import parse_request

DEFAULT_ROWS = 3
MOST_ROWS = 50
_TRAINED, _PLAIN = "\x1b[4;32m", "\x1b[0m"
_BAR = 40


def data_verb(words: Sequence[str]) -> int:
    """`tunesmith data`: 0, or 1 when the process that reads the data has died.

    Raises:
        ConfigError: for a wrong request, and for data of which nothing can be trained.
    """
    sorted_words = sort_words(words)
    if "help" in sorted_words.switches:
        from app.option_help import show_data_help

        show_data_help()
        return 0
    view, rows = _asked(sorted_words)
    try:
        with _progress("json" in sorted_words.switches or "quiet" in sorted_words.switches) as show:
            statistics = _statistics(view, show)
        shown = view.rows(0, rows)["rows"] if rows else []
    except WorkerDied as error:
        say(clean(str(error)))
        return 1
    finally:
        close_data()
    if "json" in sorted_words.switches:
        report_json({**statistics, "shown": shown})
    else:
        _print(statistics, shown)
    return 0


def _asked(words: Words) -> tuple[DataView, int]:
    """The data and how many rows to show; what only a launch needs is read and plays no part."""
    mistakes, rows = [], DEFAULT_ROWS
    request = parse_request(words.options)
    text = str(request.options.pop("rows", DEFAULT_ROWS))
    if text.isascii() and text.isdigit() and int(text[:9]) <= MOST_ROWS:
        rows = int(text)
    else:
        mistakes.append(f"rows={text[:40]!r} cannot be shown; give a number from 0 to {MOST_ROWS}")
    collected = Mistakes()
    collected.lines += mistakes
    request.preset = named_preset(words.names, request.preset, collected)
    view = None
    with collected:
        view = open_data(request.resolve())
    collected.refuse()
    if view is None:
        raise AssertionError("no mistake, and yet no data")
    for line in request.notes:
        say(clean(line))
    return view, rows


def _statistics(view: DataView, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    statistics: dict[str, Any] = {}
    for document in view.statistics():
        if "progress" in document:
            show(document["progress"])
        statistics = document.get("statistics", statistics)
    return statistics


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows progress: a bar on a terminal, elsewhere a line for each tenth."""
    if quiet:
        yield lambda progress: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda now: bar.update(
                task, description=now["what"], completed=now["done"], total=now["total"] or None
            )
    else:
        said = [""]

        def line(progress: dict[str, Any]) -> None:
            tenth = 10 * progress["done"] // progress["total"] if progress["total"] else 0
            text = f"{progress['what']}: {10 * tenth}%" if progress["total"] else progress["what"]
            if text != said[0]:
                say(text)
            said[0] = text

        yield line


def _print(statistics: dict[str, Any], shown: Sequence[dict[str, Any]]) -> None:
    show_table(["data", clean(statistics["dataset"])], summary_lines(statistics))
    report("\ntokens per document")
    most = max(entry["count"] for entry in statistics["histogram"])
    for entry in statistics["histogram"]:
        bar = "#" * -(-_BAR * entry["count"] // most)
        report(f"{entry['from']:>9,} to {entry['to']:<9,} {bar} {entry['count']:,}")
    for note in statistics["notes"]:
        report(f"\n{clean(note)}")
    if statistics["bad_listed"]:
        report("")
        show_table(["bad row", "kind", "what"], statistics["bad_listed"])
    if shown:
        before, after = (_TRAINED, _PLAIN) if sys.stdout.isatty() else ("«", "»")
        report(f"\nthe first rows; trained tokens are {'green and underlined' if before == _TRAINED else 'in «»'}")
    for row in shown:
        report(f"\n-- {row['where']}: {_told(row)}")
        for document in row["documents"]:
            report("".join(_marked(segment, before, after) for segment in document["segments"]))
            if document["hidden"]:
                report(f"... {document['hidden']:,} tokens more")
    for mistake in statistics["mistakes"]:
        say(f"training would refuse: {clean(mistake)}")


def _marked(segment: dict[str, Any], before: str, after: str) -> str:
    text = clean(segment["text"])
    return f"{before}{text}{after}" if segment["trained"] else text


def _told(row: dict[str, Any]) -> str:
    """A row's fate in words."""
    if row["mistake"]:
        return clean(": ".join(row["mistake"]))
    kept = "" if row["status"] == "whole" else f"{row['kept_tokens']:,} of "
    uses = {"eval": ", held out for evaluation", "none": ", beyond max_train_samples"}
    return (
        f"{row['status']}, {kept}{row['tokens']:,} tokens, {row['trained_tokens']:,} trained{uses.get(row['use'], '')}"
    )


def summary_lines(statistics: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers of a data set with their names, for people."""
    rows, tokens = statistics["rows"], statistics["tokens"]
    packed = f"packed rows of {statistics['max_length']:,} tokens" if statistics["packing"] else "rows"
    steps = statistics["steps_per_epoch"]
    lines = [
        ("rows", f"{rows:,} in {counted(statistics['files'], 'file', 'files')} ({', '.join(statistics['formats'])})"),
        ("documents", f"{statistics['documents']:,}"),
        ("tokens", f"{tokens:,}, longest row {statistics['longest']:,}"),
        ("trained", f"{statistics['trained_tokens']:,} tokens, {statistics['trained_share']:.1%}"),
        ("truncated", f"{statistics['truncated']:,} rows, {statistics['truncated_share']:.1%}"),
        ("split", f"{statistics['split_rows']:,} rows"),
        ("dropped", f"{statistics['dropped']:,} rows, {statistics['dropped_share']:.1%}"),
        *([("left out", f"{statistics['left_out']:,} rows, by max_train_samples")] if statistics["left_out"] else []),
        ("tokens lost", f"{statistics['cut_tokens']:,}"),
        ("bad", f"{statistics['bad']:,} rows{_kinds(statistics['bad_rows'])}"),
        ("trained on", f"{statistics['training_rows']:,} {packed}"),
    ]
    if statistics["packing_efficiency"] is not None:
        lines.append(("packing efficiency", f"{statistics['packing_efficiency']:.1%}"))
    if steps is not None:
        size = statistics["global_batch_size"]
        lines.append(("steps", f"{steps:,} per epoch of {size:,} rows each, {statistics['total_steps']:,} in all"))
    return lines


def _kinds(counts: dict[str, int]) -> str:
    return f" ({', '.join(f'{count:,} {kind}' for kind, count in sorted(counts.items()))})" if counts else ""
