"""What `tunesmith data` and the Data page say of a data set's sources, lengths, languages and near-duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.console import clean, report, show_table

SOURCE_HEADERS = ("source", "rows", "documents", "tokens", "trained", "training rows", "share of rows",
                  "share of tokens", "passes per epoch")  # fmt: skip
LANGUAGE_HEADERS = ("language", "documents", "share", "trained tokens", "share of tokens")


def source_rows(statistics: dict[str, Any]) -> list[list[str]]:
    """The sources of a mix as rows of a table with `SOURCE_HEADERS`, and their sum."""
    counts = ("rows", "documents", "tokens", "trained_tokens", "training_rows")
    about = "about " * any(source["streamed"] for source in statistics["sources"])
    table = [
        [
            source["name"] + " (first window)" * source["streamed"], *(f"{source[name]:,}" for name in counts),
            f"{source['share']:.1%}", f"{source['token_share']:.1%}", f"{about}{source['passes']:.2f}",
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


def language_rows(languages: dict[str, Any]) -> list[list[str]]:
    """The languages of a sample as rows of a table with `LANGUAGE_HEADERS`."""
    return [
        [entry["language"], f"{entry['documents']:,}", f"{entry['share']:.1%}", f"{entry['tokens']:,}",
         f"{entry['token_share']:.1%}"]
        for entry in languages["languages"]
    ]  # fmt: skip


def languages_text(languages: dict[str, Any]) -> str:
    """What the language table counts, in a sentence."""
    sampled, documents = languages["sampled"], languages["documents"]
    of = "all" if sampled == documents else f"{sampled:,} (drawn with seed {languages['seed']}) of"
    return (
        f"Languages of the trained text, by py3langid, in {of} {documents:,} documents, as ISO 639-1 codes; unclear "
        "are texts that are too short, mixed, or code"
    )


def comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """The near-duplicates of a data set and what of it is in other data, as lines."""
    threshold, length = comparison["threshold"], comparison["shingle_words"]
    alike = f"at least {threshold:.0%} of the runs of {length} words that either has are in both"
    lines = []
    for name in ("within", "evaluation"):
        if result := comparison[name]:
            data = "training data" if name == "within" else "evaluation data"
            lines += [
                "",
                f"repeated in the {data}: {result['exact']:,} of {result['rows']:,} rows say the same as an "
                f"earlier one and {result['near']:,} almost the same, {result['share']:.2%} together; {alike}",
            ]
            lines += [line for group in result["listed"] for line in _group_lines(group)]
            if (more := result["groups"] - len(result["listed"])) > 0:
                lines.append(f"  and {more:,} more groups")
    if result := comparison["across"]:
        lines += ["", f"evaluated and trained on: {_side_text(result['first'])} of the evaluation data; {alike}"]
        lines += _pair_lines(result, ("evaluated", "trained on"))
    if result := comparison["against"]:
        lines += [
            "",
            f"trained on and in {result['dataset']}: {_side_text(result['first'])} of the training data, and "
            f"{_side_text(result['second'])} of {result['dataset']}; {alike}",
        ]
        lines += _pair_lines(result, ("trained on", result["dataset"]))
    for name, unread in comparison["unread"].items():
        if unread["rows"]:
            lines += ["", f"{unread['rows']:,} rows of the {name} data cannot be read and were not compared, such as"]
            lines += [f"  {': '.join(bad)}" for bad in unread["listed"]]
    return lines


def print_comparison(comparison: dict[str, Any]) -> None:
    """Prints `comparison_lines`."""
    for line in comparison_lines(comparison):
        report(clean(line))


def _side_text(side: dict[str, Any]) -> str:
    return (
        f"{side['exact'] + side['near']:,} of {side['rows']:,} rows ({side['share']:.2%}: {side['exact']:,} the same, "
        f"{side['near']:,} almost)"
    )


def _group_lines(group: dict[str, Any]) -> list[str]:
    lines = [f"  {group['rows']:,} rows that are almost the same, such as"]
    return lines + [f"    {row['where']} ({row['similarity']:.0%}): {row['text']}" for row in group["members"]]


def _pair_lines(result: dict[str, Any], names: Sequence[str]) -> list[str]:
    lines = []
    for pair in result["listed"]:
        lines.append(f"  {pair[0]['similarity']:.0%} alike")
        lines += [f"    {name}: {row['where']}: {row['text']}" for name, row in zip(names, pair, strict=True)]
    total = result["first"]["exact"] + result["first"]["near"]
    return lines if total <= len(result["listed"]) else [*lines, f"  and {total - len(result['listed']):,} more"]


def print_tables(statistics: dict[str, Any]) -> None:
    """Prints the sources of a mix and the languages, if they were counted."""
    if statistics["sources"]:
        report("")
        show_table(SOURCE_HEADERS, source_rows(statistics))
    if statistics["languages"]:
        report(f"\n{languages_text(statistics['languages'])}")
        show_table(LANGUAGE_HEADERS, language_rows(statistics["languages"]))
