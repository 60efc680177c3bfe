"""The verb `data`: shows what will be trained, without using a GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.command_line import Args, Verb
from app.commands.data_tables import lengths_text, print_comparison, print_tables
from app.console import clean, counted, report, report_json, say, show_table
from app.launch.foreground import interruptible
from app.launch.job import named_preset
from app.services.data import DEFAULT_THRESHOLD, DataView, close_data, open_data, similarity
from app.services.rpc_client import WorkerDied
from trainers.config.command_line import option
from trainers.config.mistakes import Mistake, Mistakes
from trainers.config.options import TrainConfig
from trainers.config.parse import whole_number
from trainers.run.from_run import resolve_request

DEFAULT_ROWS = 3
IN_OTHER_DATA = 3
"""Exit code if a row of the training data is in the data of `--against`."""
MAX_LANGUAGES = 10**6
MAX_ROWS = 50
DATA = Verb(
    "data",
    "Show what `train` with the same arguments would train on, without using a GPU: counts and shares, token lengths, "
    "packing, bad rows, and the first rows with their trained tokens marked.",
    own={
        "rows": option("rows", "<int>", f"Number of rows to show, of each source of a mix; default: {DEFAULT_ROWS}."),
        "languages": option(
            "languages", "<int>", "Tell the languages of so many documents, drawn with the run's seed, such as 10000."
        ),
        "near_duplicates": option(
            "near_duplicates",
            "<share>",
            "List rows that share so much of their runs of 3 words, such as 0.7, also with the evaluation data.",
        ),
        "against": option(
            "against",
            "<data>",
            "List the rows that are in other data too, such as a benchmark, exactly or nearly (see near_duplicates, "
            f"default {DEFAULT_THRESHOLD}); exits with {IN_OTHER_DATA} then. Read as eval_dataset_name and eval_split.",
        ),
        "against_columns": option(
            "against_columns", "<pairs>", "The columns of that data by role, such as prompt=question,completion=answer."
        ),
    },
    launch=(),
)
_TRAINED, _PLAIN = "\x1b[4;32m", "\x1b[0m"
_BAR = 40


@dataclass(frozen=True)
class _Requested:
    """What a command line asks for.

    Args:
        view: the data.
        rows: rows to show.
        languages: documents whose language is told.
        near_duplicates: similarity from which rows count as alike; None does not look for near-duplicates.
        against: a config whose evaluation data are the other data; None without any.
    """

    view: DataView
    rows: int
    languages: int
    near_duplicates: float | None
    against: TrainConfig | None


def data_verb(argv: Sequence[str]) -> int:
    """`tunesmith data`: returns 0, 1 if the process that reads the data has died, or `IN_OTHER_DATA`.

    Raises:
        ConfigError: for an invalid request, or data that contains nothing to train on.
    """
    args = DATA.read(argv)
    if args is None:
        return 0
    requested = _open_requested(args)
    view, rows = requested.view, requested.rows
    try:
        with interruptible(), _progress("json" in args.switches or "quiet" in args.switches) as show:
            statistics = _last(view.statistics(requested.languages), "statistics", show)
            comparison = _comparison(requested, show)
        preview = [row for part in view.sources() for row in part.rows(0, rows)["rows"]] if rows else []
    except WorkerDied as error:
        say(clean(str(error)))
        return 1
    finally:
        close_data()
    if "json" in args.switches:
        report_json({**statistics, "shown": preview, "comparison": comparison})
    else:
        _print(statistics, preview)
        if comparison is not None:
            print_comparison(comparison)
    in_other = (comparison or {}).get("against")
    return IN_OTHER_DATA if in_other and in_other["first"]["share"] else 0


def _open_requested(args: Args) -> _Requested:
    """The data and what to do with it; options that only matter at launch are accepted and ignored."""
    mistakes, request, own = Mistakes(), args.request, args.own
    rows = _number(own, "rows", DEFAULT_ROWS, MAX_ROWS, mistakes)
    languages = _number(own, "languages", 0, MAX_LANGUAGES, mistakes)
    threshold = similarity(own["near_duplicates"], mistakes) if "near_duplicates" in own else None
    if "against_columns" in own and "against" not in own:
        mistakes.append(Mistake("against_columns", None, "names the columns of no data", "add --against DATA"))
    request.preset = named_preset(args.names, request.preset, mistakes)
    config = against = None
    with mistakes:
        config = resolve_request(request)
        if "against" in own:
            if "against_columns" in own:
                request.options["columns"] = str(own["against_columns"])
            other = {"eval_dataset_name": str(own["against"]), "eval_share": 0.0, "max_eval_samples": None}
            against = resolve_request(request).model_copy(update=other)
    mistakes.refuse()
    assert config is not None
    for line in request.notes:
        say(clean(line))
    return _Requested(open_data(config), rows, languages, threshold, against)


def _number(own: Mapping[str, Any], name: str, default: int, most: int, mistakes: Mistakes) -> int:
    kind = "rows" if name == "rows" else "documents"
    text = str(own.get(name, default))
    if (number := whole_number(text, 0, most)) is None:
        mistakes.append(
            Mistake(name, repr(text[:40]), f"is not a valid number of {kind}", f"give a number from 0 to {most}")
        )
    return number or 0


def _comparison(requested: _Requested, show: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
    near, against = requested.near_duplicates, requested.against
    if near is None and against is None:
        return None
    answers = requested.view.comparison(near or DEFAULT_THRESHOLD, near is not None, against)
    return _last(answers, "comparison", show)


def _last(documents: Iterable[dict[str, Any]], name: str, show: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The result among the documents of a long request; shows the progress among them."""
    result: dict[str, Any] = {}
    for document in documents:
        if "progress" in document:
            show(document["progress"])
        result = document.get(name, result)
    return result


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
    print_tables(statistics)
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


def _left_out(rows: int, option: str) -> list[tuple[str, str]]:
    return [("left out", f"{rows:,} rows, by {option}")] if rows else []


def _repeated(count: int) -> str:
    return f", {count:,} of them repeat an earlier one exactly" if count else ""


def _held_out(rows: int, unused: int) -> list[tuple[str, str]]:
    limit = f"; max_eval_samples leaves {unused:,} of them out" if unused else ""
    return [("held out", f"{rows:,} rows for evaluation, by eval_share{limit}")] if rows else []


def _kinds(counts: dict[str, int]) -> str:
    return f" ({', '.join(f'{count:,} {kind}' for kind, count in sorted(counts.items()))})" if counts else ""
