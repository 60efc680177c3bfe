"""The Compare page: curves, measures and settings of several runs, and the best of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import gradio as gr
from starlette.responses import Response

from app.runs.compare import MAX_RUNS, MEASURES, as_csv, chosen_runs, compare, measure_texts
from app.runs.history import History
from app.runs.metrics import READ_SECONDS, Curves
from app.runs.runs import run_of_id
from app.sweep.record import SweepFolder, SweepRecord, list_sweeps, true_state
from app.sweep.report import comparison_of, standing
from trainers.config.fields import text_of
from ui.context import ServerContext
from ui.live import json_response, live_part
from ui.parts import (
    Html,
    alert_list,
    badge,
    data_table,
    duration_text,
    element,
    join,
    link,
    note,
    run_link,
    section,
    title,
)  # fmt: skip

_MOST_SWEEPS = 20
_POLL_SECONDS = 3.0
"""Seconds between two refreshes."""
_NAVIGATE = "(ids) => { location.assign('compare?runs=' + encodeURIComponent(ids.join(','))); }"
_REMEMBER = "(by) => { Live.remember({ by }); return by; }"


def build(context: ServerContext) -> None:
    """Lays out the page."""
    history, cache = History(context.runs_dir), Curves()

    def curves(request: dict[str, Any]) -> Response:
        query = request if isinstance(request, dict) else {}
        return json_response(lambda: cache.view(run_of_id(query.get("run"), context.runs_dir), query.get("since")))

    def groups(request: dict[str, Any]) -> Response:
        runs, _ = chosen_runs(request.get("runs"), context.runs_dir)
        return json_response(lambda: {"groups": compare(runs, cache, None, READ_SECONDS)["groups"] if runs else []})

    def table(request: dict[str, Any]) -> Response:
        runs, _ = chosen_runs(request.get("runs"), context.runs_dir)
        return json_response(lambda: {"csv": as_csv(compare(runs, cache))})

    def choices(request: gr.Request) -> Any:
        runs, _ = chosen_runs(request.query_params.get("runs"), context.runs_dir)
        measure = request.query_params.get("by")
        chosen = gr.update(choices=[row["id"] for row in history.rows()], value=[run.id for run in runs])
        return [chosen, gr.update(visible=bool(runs), value=measure if measure in dict(_measures()).values() else "")]

    def refresh(by: str | None, digest: str | None, request: gr.Request) -> list[Any]:
        runs, errors = chosen_runs(request.query_params.get("runs"), context.runs_dir)
        comparison = compare(runs, cache, by or None, READ_SECONDS) if runs else None
        warnings = alert_list(errors, "warning")
        panels = [
            join([warnings, _verdict(comparison)])
            if comparison
            else join([warnings, _welcome(history.rows()), _sweeps(list_sweeps(context.runs_dir))]),
            _measured(comparison) if comparison else "",
            _settings(comparison) if comparison else "",
        ]
        digests = [hashlib.sha256(panel.encode()).hexdigest()[:12] for panel in panels]
        known = str(digest or "").split(" ")
        changed = [new not in known for new in digests]  # what a reader has unfolded stays so while it is the same
        return [*(panel if new else gr.skip() for panel, new in zip(panels, changed, strict=True)), " ".join(digests)]

    gr.HTML(title("Compare", f"Up to {MAX_RUNS} runs in one chart, what differs between them, and which is the best."))
    selected = gr.Dropdown([], multiselect=True, max_choices=MAX_RUNS, label="Runs", elem_id="compare-runs")
    by = gr.Dropdown(_measures(), value="", label="Best by", elem_id="compare-by", visible=False)
    verdict = gr.HTML(apply_default_css=False)
    live_part("charts", "compare", [curves, groups, table])
    with gr.Row(elem_id="compare-tables"):
        measures = gr.HTML(apply_default_css=False)
        settings = gr.HTML(apply_default_css=False)
    digest = gr.Textbox(visible=False)
    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    outputs = [verdict, measures, settings, digest]
    gr.on(None, choices, None, [selected, by], **quiet).then(refresh, [by, digest], outputs, **quiet)
    by.input(None, by, by, js=_REMEMBER).then(refresh, [by, digest], outputs, **quiet)
    gr.Timer(_POLL_SECONDS).tick(refresh, [by, digest], outputs, **quiet)
    selected.input(None, selected, None, js=_NAVIGATE)


def _measures() -> list[tuple[str, str]]:
    """The measures to choose from, as label and value."""
    decisive = ((measure.label, name) for name, measure in MEASURES.items() if measure.better)
    return [("Evaluation loss, else training loss", ""), *decisive]


def _welcome(rows: Sequence[dict[str, Any]]) -> Html:
    """What to do while no run is chosen.

    Args:
        rows: all runs, newest first.
    """
    trained = [row["id"] for row in rows if row["value"] is not None]
    if len(trained) < 2:
        text = join(["It takes two runs that have trained; start them on the ", link("./", "Train page"), "."])
        return element("div", join([element("h2", "Nothing to compare yet"), element("p", text)]), class_="ts-panel")
    newest = link("compare", f"{trained[0]} and {trained[1]}", runs=",".join(trained[:2]))
    text = join(["Choose runs above, or tick them on the ", link("runs", "Runs page"), "."])
    parts = [
        element("h2", "Nothing chosen yet"),
        element("p", join(["Compare the two newest runs: ", newest])),
        element("p", text),
    ]
    return element("div", join(parts), class_="ts-panel")


def _sweeps(sweeps: Sequence[tuple[SweepFolder, SweepRecord]]) -> Html:
    """The sweeps, newest first, each with what leads it and a link that compares its best runs."""
    if not sweeps:
        return Html("")
    rows = []
    for folder, record in sweeps[:_MOST_SWEEPS]:
        query = comparison_of(folder, record)
        name = link("compare", folder.id, **query) if query else folder.id
        leads, score, best = standing(record)
        state = badge(true_state(record))
        rows.append([name, leads, score, _measure_label(record), best, state, len(record.trials)])
    headers = ["Sweep", "Best so far", "Score", "Measured by", "Better with every seed", "State", "Trials"]
    table = data_table(headers, rows, "Sweeps", numeric=[2, 6], cards=True)
    explained = join([note("Each link compares the runs of the best trials."), table])
    return element("div", section("Sweeps", explained), class_="ts-sweeps")


def _measure_label(record: SweepRecord) -> str:
    measure = MEASURES.get(record.measure)
    return measure.label if measure else record.measure


def _verdict(comparison: dict[str, Any]) -> Html:
    line = "Reading the metrics…" if comparison["more"] else comparison["verdict"]
    return element("p", line, class_="ts-best", role="status")


def _head(comparison: dict[str, Any], first: str) -> list[Any]:
    return [first, *(join([run_link(run["id"]), " ", badge(run["state"])]) for run in comparison["runs"])]


def _measured(comparison: dict[str, Any]) -> Html:
    """Measures side by side, with the best of each row in bold, and their spread over seeds."""
    rows = []
    for row in comparison["measures"]:
        cells = []
        texts = _measure_texts(row["name"], row["values"])
        for index, (text, step) in enumerate(zip(texts, row["steps"], strict=True)):
            cell = join([text, _small(f"step {step:,}") if step is not None else ""])
            best = join([cell, element("span", " (best)", class_="ts-unseen")])
            cells.append(element("strong", best) if index in row["best"] else cell)
        rows.append([join([row["label"], _small(row["pick"])]), *cells])
    numeric = range(1, len(comparison["runs"]) + 1)
    table = data_table(_head(comparison, "Measure"), rows, "Measures", numeric=numeric, empty="No metrics yet.")
    return join([section("Measures", _side_by_side(table)), _spread(comparison)])


def _spread(comparison: dict[str, Any]) -> Html:
    """The spread of each measure over the seeds of each group."""
    if not comparison["groups"]:
        return Html("")
    tables = []
    for group in comparison["groups"]:
        rows = []
        for row in comparison["measures"]:
            if (spread := group["values"].get(row["name"])) and row["better"]:
                values = _measure_texts(row["name"], [spread[key] for key in ("mean", "std", "min", "max")])
                rows.append([row["label"], *values, spread["runs"]])
        seeds = f"{len(group['runs'])} seeds: {', '.join(map(str, group['seeds']))}"
        unfinished = f"; not finished: {', '.join(group['unfinished'])}" if group["unfinished"] else ""
        headers = ["Measure", "Mean", "Standard deviation", "Lowest", "Highest", "Runs"]
        tables += [
            note(f"{group['label']} ({seeds}{unfinished})"),
            data_table(headers, rows, f"Spread of {group['label']}", numeric=range(1, 6), empty="No metrics yet."),
        ]
    return section("Spread over seeds", join([note("Runs that differ in the seed only."), *tables]))


def _measure_texts(name: str, values: Sequence[float | None]) -> list[str]:
    if name == "time":
        return list(map(duration_text, values))
    return measure_texts(values, MEASURES[name])


def _small(content: str) -> Html:
    return element("span", content, class_="ts-beside")


def _settings(comparison: dict[str, Any]) -> Html:
    """What differs, and folded below it what does not."""
    single = len(comparison["runs"]) < 2
    differing = [row for row in comparison["settings"] if row["differs"]]
    alike = [row for row in comparison["settings"] if not row["differs"]]
    intro = note("Add a second run to see what differs." if single else "These runs have the same settings.")
    table = _settings_table(comparison, differing, "Settings that differ") if differing else intro
    folded = element(
        "details",
        join([element("summary", f"{len(alike)} settings are the same"),
              _settings_table(comparison, alike, "Settings that are the same")]),
    )  # fmt: skip
    return section("Settings", join([table, folded if alike else ""]))


def _settings_table(comparison: dict[str, Any], settings: list[dict[str, Any]], caption: str) -> Html:
    rows = []
    for row in settings:
        option = element("code", join(row["name"].split("_"), Html("_<wbr>")), class_="ts-option ts-beside")
        label = join([row["label"], option]) if row["label"] else row["name"]
        rows.append([label, *(_setting_text(value) for value in row["values"])])
    return _side_by_side(data_table(_head(comparison, "Setting"), rows, caption, sort=True))


def _side_by_side(table: Html) -> Html:
    """A table with a column per run, whose first column stays in sight."""
    return element("div", table, class_="ts-side-by-side")


def _setting_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(text_of, value)) or "-"
    return "-" if value in (None, "", {}) else text_of(value)
