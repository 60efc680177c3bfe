"""The Compare page: curves, settings and final metrics of several runs."""

from __future__ import annotations

import hashlib
from typing import Any

import gradio as gr
from starlette.responses import Response

from app.runs.compare import MAX_RUNS, chosen_runs, compare
from app.runs.history import History
from app.runs.metrics import Curves
from app.runs.runs import run_of_id
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
    note,
    number_text,
    run_link,
    section,
    title,
)  # fmt: skip

_POLL_SECONDS = 3.0
"""Seconds between two refreshes."""
_NAVIGATE = "(ids) => { location.assign('compare?runs=' + encodeURIComponent(ids.join(','))); }"
_NAMES = {
    "loss": "Training loss", "eval_loss": "Evaluation loss", "eval_perplexity": "Perplexity",
    "eval_token_accuracy": "Token accuracy", "step": "Steps", "tokens": "Tokens", "elapsed_s": "Time trained",
    "tokens_per_second": "Tokens per second", "mfu": "MFU", "memory_gib": "Memory, GiB",
}  # fmt: skip


def build(context: ServerContext) -> None:
    """Lays out the page."""
    history, cache = History(context.runs_dir), Curves()

    def curves(request: dict[str, Any]) -> Response:
        query = request if isinstance(request, dict) else {}
        return json_response(lambda: cache.view(run_of_id(query.get("run"), context.runs_dir), query.get("since")))

    def choices(request: gr.Request) -> Any:
        runs, _ = chosen_runs(request.query_params.get("runs"), context.runs_dir)
        return gr.update(choices=[row["id"] for row in history.rows()], value=[run.id for run in runs])

    def refresh(differences: bool, digest: str | None, request: gr.Request) -> list[Any]:
        runs, errors = chosen_runs(request.query_params.get("runs"), context.runs_dir)
        comparison = compare(runs, cache) if runs else {"runs": [], "metrics": [], "settings": []}
        panels = [
            join([alert_list(errors, "warning"), _metrics(comparison)]),
            _settings(comparison, differences is True),
        ]
        new_digest = hashlib.sha256("".join(panels).encode()).hexdigest()[:16]
        return [gr.skip()] * 3 if new_digest == digest else [*panels, new_digest]

    gr.HTML(title("Compare", f"Up to {MAX_RUNS} runs in one chart, and the differences between them."))
    selected = gr.Dropdown([], multiselect=True, max_choices=MAX_RUNS, label="Runs", elem_id="compare-runs")
    live_part("charts", "compare", [curves])
    metrics = gr.HTML(apply_default_css=False)
    only_differences = gr.Checkbox(True, label="Only differences", info="of the settings")
    settings = gr.HTML(apply_default_css=False)
    digest = gr.Textbox(visible=False)
    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    gr.on(None, choices, None, selected, **quiet)
    gr.on(None, refresh, [only_differences, digest], [metrics, settings, digest], **quiet)
    only_differences.change(refresh, [only_differences, digest], [metrics, settings, digest], **quiet)
    gr.Timer(_POLL_SECONDS).tick(refresh, [only_differences, digest], [metrics, settings, digest], **quiet)
    selected.input(None, selected, None, js=_NAVIGATE)


def _head(comparison: dict[str, Any]) -> list[Any]:
    return ["", *(join([run_link(run["id"]), " ", badge(run["state"])]) for run in comparison["runs"])]


def _metrics(comparison: dict[str, Any]) -> Html:
    """Final metrics side by side, with the best of each row in bold."""
    if not comparison["runs"]:
        return Html("")
    rows = []
    for metric in comparison["metrics"]:
        texts = [_metric_text(metric["name"], value) for value in metric["values"]]
        cells = [element("strong", join([word, element("span", " (best)", class_="ts-unseen")]))
                 if index == metric["best"] else word for index, word in enumerate(texts)]  # fmt: skip
        rows.append([_NAMES[metric["name"]], *cells])
    table = data_table(
        _head(comparison), rows, "Final metrics", numeric=range(1, len(comparison["runs"]) + 1), empty="no metrics"
    )
    return section("Final metrics", table)


def _metric_text(name: str, value: float | None) -> str:
    return duration_text(value) if name == "elapsed_s" else number_text(value)


def _settings(comparison: dict[str, Any], differences: bool) -> Html:
    if not comparison["runs"]:
        return Html("")
    selected = [row for row in comparison["settings"] if row["differs"] or not differences]
    if not selected:
        return section("Settings", note("These runs have the same settings."))
    rows = [[row["name"], *(_setting_text(value) for value in row["values"])] for row in selected]
    return section("Settings", data_table(_head(comparison), rows, "Settings"))


def _setting_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None or value == {} else str(value)
