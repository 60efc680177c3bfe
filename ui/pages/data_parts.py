"""Parts of the Data page: rows with their trained tokens marked, packed rows, and statistics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from app.commands.data import summary_lines
from app.commands.data_tables import (
    LANGUAGE_HEADERS,
    SOURCE_HEADERS,
    comparison_lines,
    language_rows,
    languages_text,
    lengths_text,
    source_rows,
)
from app.services.data import DataJob
from app.services.form import Preview, by_field
from trainers.config.mistakes import Mistake
from ui.parts import Html, alert_list, data_table, element, join, key_values, meter, note, percent_text, section

_STATUSES = {
    "whole": "",
    "truncated": "too long: cut",
    "split": "too long: split into several documents",
    "dropped": "too long: left out",
    "bad": "cannot be read",
}
"""What happens to a row that is not trained on as it is."""
_USES = {
    "train": "",
    "eval": "held out for evaluation",
    "none": "not used: beyond max_train_samples",
    "unknown": "trained, or held out for evaluation",
}


def mistakes_panel(mistakes: Sequence[Mistake]) -> Html:
    """The mistakes of the form; each is also shown beside its field."""
    by_name = Preview(by_field(mistakes)).error_lines()
    return element("div", alert_list(list(map(str, mistakes))), data_errors=json.dumps(by_name))


def legend() -> Html:
    """What the highlighting means."""
    trained = element("mark", "coloured and underlined", class_="ts-trained")
    return element("p", join(["Trained text is ", trained, "; all other text is context."]), class_="ts-note ts-legend")


def rows_panel(page: dict[str, Any]) -> Html:
    """Rows as read, with their trained tokens marked."""
    if not page["rows"]:
        end = f"The data ends with row {page['total'] - 1:,}." if page["total"] else "The data has no rows."
        return note(f"No rows here. {end}")
    last = page["rows"][-1]["number"]
    of = f" of {page['total']:,}" if page["total"] is not None else ""
    head = note(f"Rows {page['offset']:,} to {last:,}{of}, counted from 0")
    return join([head, legend(), *map(_row, page["rows"])])


def _row(row: dict[str, Any]) -> Html:
    facts = [element("h3", f"Row {row['number']:,}"), element("span", row["where"])]
    if status := _STATUSES[row["status"]]:
        facts.append(element("span", status, class_=f"ts-fate ts-fate-{row['status']}"))
    if row["tokens"]:
        kept_tokens = "" if row["status"] in ("whole", "bad") else f"{row['kept_tokens']:,} kept of "
        trained = "a prompt that the model answers" if row["unanswered"] else f"{row['trained_tokens']:,} trained"
        facts.append(element("span", f"{kept_tokens}{row['tokens']:,} tokens, {trained}"))
    if use := _USES[row["use"]]:
        facts.append(element("span", use))
    body = [element("header", join(facts))]
    if row["mistake"]:
        body.append(alert_list([": ".join(row["mistake"])], "warning"))
    body += [_document(document) for document in row["documents"]]
    if row["for_rewards"]:
        body.append(note(join(["Rewards get ", element("code", row["for_rewards"])])))
    if row["raw"]:
        summary = element("summary", "The row as it is in the data")
        body.append(element("details", join([summary, element("pre", row["raw"])])))
    return element("article", join(body), class_="ts-row", data_number=row["number"])


def _document(document: dict[str, Any]) -> Html:
    segments = [
        element("mark", segment["text"], class_="ts-trained")
        if segment["trained"]
        else element("span", segment["text"])
        for segment in document["segments"]
    ]
    if document["hidden"]:
        segments.append(element("em", f" … {document['hidden']:,} more tokens"))
    return element("div", join(segments), class_="ts-document", tabindex=0, role="group", aria_label="Document")


def packed_panel(row: dict[str, Any]) -> Html:
    """A row of the batches, with the boundaries of its documents."""
    capacity, used = row["room"], row["tokens"]
    kind = "Packed row" if row["packing"] else "Row"
    count = len(row["documents"])
    trained = f"{row['trained_tokens']:,} trained" if row["trained_tokens"] else "prompts that the model answers"
    summary = f"{count} document{'s' * (count != 1)}, {used:,} of {capacity:,} tokens used, {trained}"
    strip = [
        element("span", style=f"width:{100 * document['tokens'] / capacity:.2f}%", title=document["where"])
        for document in row["documents"]
    ]
    parts = [
        element(
            "header", join([element("h3", f"{kind} {row['index']:,} of {row['total']:,}"), element("span", summary)])
        ),
        element("div", join(strip), class_="ts-strip", aria_hidden="true"),
    ]
    for number, document in enumerate(row["documents"], 1):
        end = document["start"] + document["tokens"] - 1
        position = f"Document {number}: {document['where']}, positions {document['start']:,} to {end:,} of the row"
        parts += [element("p", position, class_="ts-place"), _document(document)]
    isolation = note("Documents are isolated: attention and positions restart at each boundary.") if count > 1 else ""
    return join([legend(), isolation, element("article", join(parts), class_="ts-row")])


def statistics_panel(job: DataJob | None) -> Html:
    """A count: its progress, its result, or why it failed."""
    if job is None:
        return note("Not counted yet. Count everything tells how many tokens are trained, how long the documents are, "
                    "and which rows are bad.")  # fmt: skip
    return _numbers(job.statistics) if job.statistics else _unfinished(job, "Count everything")


def comparison_panel(job: DataJob | None) -> Html:
    """A search for near-duplicates: its progress, its result, or why it failed."""
    if job is None:
        return note("Not looked for yet. Find near-duplicates compares every row with every other, with the evaluation "
                    "data, and with other data if you name some.")  # fmt: skip
    if job.comparison is None:
        return _unfinished(job, "Find near-duplicates")
    parts, lines = [], comparison_lines(job.comparison)
    for number, start in enumerate(starts := [index + 1 for index, line in enumerate(lines) if not line]):
        sentence, *rows = lines[start : starts[number + 1] - 1 if number + 1 < len(starts) else None]
        parts.append(note(f"{sentence[:1].upper()}{sentence[1:]}."))
        if rows:
            listed = "\n".join(row.removeprefix("  ") for row in rows)
            parts.append(element("div", listed, class_="ts-document", tabindex=0, role="group", aria_label="Such rows"))
    return element("div", join(parts), class_="ts-comparison")


def _unfinished(job: DataJob, button: str) -> Html:
    """Why there is no result yet; `button` starts again."""
    if job.state == "waiting":
        return note("Waiting for another data set to be done, or for the process that reads it to start…")
    if job.state == "running":
        return _progress(job.progress)
    if job.state == "cancelled":
        return note(f"Stopped before the end. {button} starts again.")
    return alert_list(job.mistakes)


def _progress(progress: dict[str, Any]) -> Html:
    done, total, activity = progress.get("done", 0), progress.get("total", 0), progress.get("what", "starting")
    if not total:
        return note(f"{activity}…")
    return join(
        [note(f"{activity}: {done:,} of {total:,} rows"), meter(done / total, activity, percent_text(done / total))]
    )


def _numbers(statistics: dict[str, Any]) -> Html:
    refused = [f"Training would refuse this: {line}" for line in statistics["mistakes"][-3:]]
    notes = [f"{text[0].upper()}{text[1:]}" for text in statistics["notes"]]
    parts = [
        alert_list([*notes, *refused], "warning"),
        key_values((name[:1].upper() + name[1:], value) for name, value in summary_lines(statistics)),
        _sources(statistics),
        histogram(statistics["histogram"], lengths_text(statistics)),
        _languages(statistics["languages"]),
    ]
    if statistics["template"]:
        lines = "\n".join(statistics["template"])
        proof = element("div", lines, class_="ts-document", tabindex=0, role="group", aria_label="Chat template")
        parts.append(section("Chat template", proof))
    if statistics["bad_listed"]:
        counts = join(element("li", f"{count:,} {kind}") for kind, count in sorted(statistics["bad_rows"].items()))
        table = data_table(["Where", "Kind", "What"], statistics["bad_listed"], "Bad rows", sort=True)
        more = (
            note("The first 20 of each kind are listed.") if statistics["bad"] > len(statistics["bad_listed"]) else ""
        )
        bad = element("div", join([element("ul", counts), table, more]), class_="ts-bad-rows")
        parts.append(section(f"Bad rows: {statistics['bad']:,}", bad))
    return join(parts)


def _sources(statistics: dict[str, Any]) -> Html:
    """The sources of a mix as a table, and what its columns are."""
    if not statistics["sources"]:
        return Html("")
    headers = [name[:1].upper() + name[1:] for name in SOURCE_HEADERS]
    table = data_table(headers, source_rows(statistics), "Sources of the mix", numeric=range(1, len(headers)))
    explained = note(
        "Training rows are packed, or one for each example. The shares are those of the rows and tokens that a run "
        "reads, by weight; a source with more than one pass per epoch repeats."
    )
    return section("Sources", join([table, explained]))


def _languages(languages: dict[str, Any] | None) -> Html:
    """The languages of a sample as a table, and what it counts."""
    if not languages:
        return Html("")
    headers = [name[:1].upper() + name[1:] for name in LANGUAGE_HEADERS]
    table = data_table(headers, language_rows(languages), "Languages", numeric=range(1, len(headers)))
    return section("Languages", join([table, note(languages_text(languages) + ".")]))


def histogram(bins: Sequence[dict[str, int]], lengths: str = "") -> Html:
    """Documents by length as bars, with their quantiles, and the numbers in a table below."""
    max_count = max(entry["count"] for entry in bins)
    bars = [
        element(
            "rect", element("title", _bin(entry)), x=10 * index + 1, width=8,
            y=f"{100 - 100 * entry['count'] / max_count:.2f}", height=f"{100 * entry['count'] / max_count:.2f}",
        )
        for index, entry in enumerate(bins)
    ]  # fmt: skip
    peak = max(bins, key=lambda entry: entry["count"])
    label = f"Documents by length, {bins[0]['from']:,} to {bins[-1]['to']:,} tokens; most: {_bin(peak)}"
    chart = element(
        "svg", join(bars), viewBox=f"0 0 {10 * len(bins)} 100", preserveAspectRatio="none", role="img", aria_label=label
    )
    ends = [element("span", f"{bins[0]['from']:,} tokens"), element("span", f"{bins[-1]['to']:,} tokens")]
    rows = [[f"{entry['from']:,} to {entry['to']:,}", f"{entry['count']:,}"] for entry in bins if entry["count"]]
    table = data_table(["Tokens", "Documents"], rows, "Documents by length", numeric=(1,), sort=True)
    numbers = element("details", join([element("summary", "As numbers"), table]))
    return section(
        "Tokens per document",
        element(
            "div",
            join([chart, element("p", join(ends)), note(f"{lengths[:1].upper()}{lengths[1:]}"), numbers]),
            class_="ts-histogram",
        ),
    )


def _bin(entry: dict[str, int]) -> str:
    return f"{entry['from']:,} to {entry['to']:,} tokens: {entry['count']:,}"
