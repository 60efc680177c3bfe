"""The verb `data`: shows what will be trained, without using a GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from app.command_line import Args, Verb
from app.console import clean, counted, report, report_json, say, show_table
from app.launch.job import named_preset
from app.services.data import DataView, close_data, open_data
from app.services.rpc_client import WorkerDied
from trainers.config.command_line import option
from trainers.config.mistakes import Mistake, Mistakes
from trainers.config.parse import whole_number
from trainers.run.from_run import resolve_request

DEFAULT_ROWS = 3
MAX_ROWS = 50
DATA = Verb(
    "data",
    "Show what `train` with the same arguments would train on, without using a GPU: counts and shares, token lengths, "
    "packing, bad rows, and the first rows with their trained tokens marked.",
    own={"rows": option("rows", "<int>", f"Number of rows to show; default: {DEFAULT_ROWS}.")},
    launch=(),
)
_TRAINED, _PLAIN = "\x1b[4;32m", "\x1b[0m"
_BAR = 40


def data_verb(argv: Sequence[str]) -> int:
    """`tunesmith data`: returns 0, or 1 if the process that reads the data has died.

    Raises:
        ConfigError: for an invalid request, or data that contains nothing to train on.
    """
    args = DATA.read(argv)
    if args is None:
        return 0
    view, rows = _open_requested(args)
    try:
        with _progress("json" in args.switches or "quiet" in args.switches) as show:
            statistics = _statistics(view, show)
        preview = [row for part in view.sources() for row in part.rows(0, rows)["rows"]] if rows else []
    except WorkerDied as error:
        say(clean(str(error)))
        return 1
    finally:
        close_data()
    if "json" in args.switches:
        report_json({**statistics, "shown": preview})
    else:
        _print(statistics, preview)
    return 0


def _open_requested(args: Args) -> tuple[DataView, int]:
    """The data and the number of rows to show; options that only matter at launch are accepted and ignored."""
    mistakes, request, text = Mistakes(), args.request, str(args.own.get("rows", DEFAULT_ROWS))
    if (rows := whole_number(text, 0, MAX_ROWS)) is None:
        remedy = f"give a number from 0 to {MAX_ROWS}"
        mistakes.append(Mistake("rows", repr(text[:40]), "is not a valid number of rows", remedy))
    request.preset = named_preset(args.names, request.preset, mistakes)
    view = None
    with mistakes:
        view = open_data(resolve_request(request))
    mistakes.refuse()
    assert view is not None
    assert rows is not None
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
    """Shows progress: a bar on a terminal, otherwise a line per tenth."""
    if quiet:
        yield lambda progress: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda progress: bar.update(
                task, description=progress["what"], completed=progress["done"], total=progress["total"] or None
            )
    else:
        last_line = ""

        def show(progress: dict[str, Any]) -> None:
            nonlocal last_line
            tenth = 10 * progress["done"] // progress["total"] if progress["total"] else 0
            line = f"{progress['what']}: {10 * tenth}%" if progress["total"] else progress["what"]
            if line != last_line:
                say(line)
            last_line = line

        yield show


def _print(statistics: dict[str, Any], preview: Sequence[dict[str, Any]]) -> None:
    show_table(["data", clean(statistics["dataset"])], summary_lines(statistics))
    if statistics["sources"]:
        report("")
        show_table(SOURCE_HEADERS, source_rows(statistics))
    report(f"\ntokens per document: {lengths_text(statistics)}")
    max_count = max(entry["count"] for entry in statistics["histogram"])
    for entry in statistics["histogram"]:
        bar = "#" * -(-_BAR * entry["count"] // max_count)
        report(f"{entry['from']:>9,} to {entry['to']:<9,} {bar} {entry['count']:,}")
    for note in statistics["notes"]:
        report(f"\n{clean(note)}")
    if statistics["template"]:
        report("\n" + "\n".join(map(clean, statistics["template"])))
    if statistics["bad_listed"]:
        report("")
        show_table(["bad row", "kind", "what"], statistics["bad_listed"])
    if preview:
        before, after = (_TRAINED, _PLAIN) if sys.stdout.isatty() else ("«", "»")
        report(f"\nfirst rows; trained tokens are {'green and underlined' if before == _TRAINED else 'in «»'}")
    for row in preview:
        report(f"\n-- {row['where']}: {_describe(row)}")
        if row["for_rewards"]:
            report(f"rewards get {clean(row['for_rewards'])}")
        for document in row["documents"]:
            report("".join(_highlight(segment, before, after) for segment in document["segments"]))
            if document["hidden"]:
                report(f"... {document['hidden']:,} more tokens")
    for mistake in statistics["mistakes"]:
        say(f"training would refuse: {clean(mistake)}")


def _highlight(segment: dict[str, Any], before: str, after: str) -> str:
    text = clean(segment["text"])
    return f"{before}{text}{after}" if segment["trained"] else text


def _describe(row: dict[str, Any]) -> str:
    """What happens to a row in training, in a phrase."""
    if row["mistake"]:
        return clean(": ".join(row["mistake"]))
    tokens = f"{row['tokens']:,}" if row["status"] == "whole" else f"{row['kept_tokens']:,} of {row['tokens']:,}"
    use = {"eval": ", held out for evaluation", "none": ", beyond max_train_samples"}.get(row["use"], "")
    trained = "a prompt that the model answers" if row["unanswered"] else f"{row['trained_tokens']:,} trained"
    return f"{row['status']}, {tokens} tokens, {trained}{use}"


def summary_lines(statistics: dict[str, Any]) -> list[tuple[str, str]]:
    """The statistics of a data set as labels and texts."""
    rows, tokens = statistics["rows"], statistics["tokens"]
    packed = f"packed rows of {statistics['max_length']:,} tokens" if statistics["packing"] else "rows"
    steps = statistics["steps_per_epoch"]
    lines = [
        ("rows", f"{rows:,} in {counted(statistics['files'], 'file', 'files')} ({', '.join(statistics['formats'])})"),
        *_held_out(statistics["held_out"], statistics["eval_left_out"]),
        ("documents", f"{statistics['documents']:,}{_repeated(statistics['repeated'])}"),
        ("tokens", f"{tokens:,}, longest row {statistics['longest']:,}"),
        (
            "trained",
            f"{statistics['trained_tokens']:,} tokens, {statistics['trained_share']:.1%}"
            if statistics["trained_tokens"]
            else "what the model answers",
        ),
        ("truncated", f"{statistics['truncated']:,} rows, {statistics['truncated_share']:.1%}"),
        ("split", f"{statistics['split_rows']:,} rows"),
        ("dropped", f"{statistics['dropped']:,} rows, {statistics['dropped_share']:.1%}"),
        *_left_out(statistics["left_out"], statistics["limit"] or "max_train_samples"),
        ("tokens lost", f"{statistics['cut_tokens']:,}"),
        ("bad", f"{statistics['bad']:,} rows{_kinds(statistics['bad_rows'])}"),
        ("trained on", f"{statistics['training_rows']:,} {packed}"),
    ]
    if statistics["packing_efficiency"] is not None:
        lines.append(("packing efficiency", f"{statistics['packing_efficiency']:.1%}"))
    if steps is not None:
        size = statistics["global_batch_size"]
        lines.append(("steps", f"{steps:,} per pass with {size:,} rows each, {statistics['total_steps']:,} in total"))
    return lines


SOURCE_HEADERS = ("source", "rows", "documents", "tokens", "trained", "training rows", "share of rows",
                  "share of tokens", "passes per epoch")  # fmt: skip


def source_rows(statistics: dict[str, Any]) -> list[list[str]]:
    """The sources of a mix as rows of a table with `SOURCE_HEADERS`, and their sum."""
    counts = ("rows", "documents", "tokens", "trained_tokens", "training_rows")
    table = [
        [
            source["name"], *(f"{source[name]:,}" for name in counts), f"{source['share']:.1%}",
            f"{source['token_share']:.1%}", f"{source['passes']:.2f}",
        ]
        for source in statistics["sources"]
    ]  # fmt: skip
    sums = [f"{sum(source[name] for source in statistics['sources']):,}" for name in counts]
    return [*table, ["all", *sums, "100.0%", "100.0%", ""]]


def lengths_text(statistics: dict[str, Any]) -> str:
    """The lengths of documents in a phrase: the mean, and how long the shortest to the longest are."""
    labels = {0.0: "shortest", 0.5: "median", 1.0: "longest"}
    quantiles = [
        f"{labels.get(entry['share'], format(entry['share'], '.0%') + ' have at most')} {entry['tokens']:,}"
        for entry in statistics["lengths"]
    ]
    return ", ".join([f"mean {statistics['mean_length']:,.1f}", *quantiles])


def _left_out(rows: int, option: str) -> list[tuple[str, str]]:
    return [("left out", f"{rows:,} rows, by {option}")] if rows else []


def _repeated(count: int) -> str:
    return f", {count:,} of them repeat an earlier one exactly" if count else ""


def _held_out(rows: int, unused: int) -> list[tuple[str, str]]:
    limit = f"; max_eval_samples leaves {unused:,} of them out" if unused else ""
    return [("held out", f"{rows:,} rows for evaluation, by eval_share{limit}")] if rows else []


def _kinds(counts: dict[str, int]) -> str:
    return f" ({', '.join(f'{count:,} {kind}' for kind, count in sorted(counts.items()))})" if counts else ""
