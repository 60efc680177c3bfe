"""The Compare page: curves, settings and final metrics of several runs."""

from __future__ import annotations

import hashlib
from typing import Any

import gradio as gr
from starlette.responses import Response

from app.runs.compare import MOST_RUNS, chosen_runs, compare
from app.runs.history import History
from app.runs.metrics import Curves
from app.runs.runs import run_of_id
from ui.context import Here
from ui.live import answer, live_part
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

_EVERY = 3.0
"""Seconds between two looks."""
_GO = "(ids) => { location.assign('compare?runs=' + encodeURIComponent(ids.join(','))); }"
_NAMES = {
    "loss": "Training loss", "eval_loss": "Evaluation loss", "eval_perplexity": "Perplexity",
    "eval_token_accuracy": "Token accuracy", "step": "Steps", "tokens": "Tokens", "elapsed_s": "Time trained",
    "tokens_per_second": "Tokens per second", "mfu": "MFU", "memory_gib": "Memory, GiB",
}  # fmt: skip


def build(here: Here) -> None:
    """Lays out the page."""
    history, kept = History(here.runs_dir), Curves()

    def curves(request: dict[str, Any]) -> Response:
        asked = request if isinstance(request, dict) else {}
        return answer(lambda: kept.view(run_of_id(asked.get("run"), here.runs_dir), asked.get("since")))

    def choices(request: gr.Request) -> Any:
        runs, _ = chosen_runs(request.query_params.get("runs"), here.runs_dir)
        return gr.update(choices=[row["id"] for row in history.rows()], value=[run.id for run in runs])

    def look(differences: bool, digest: str | None, request: gr.Request) -> list[Any]:
        runs, refused = chosen_runs(request.query_params.get("runs"), here.runs_dir)
        seen = compare(runs, kept) if runs else {"runs": [], "metrics": [], "settings": []}
        shown = [join([alert_list(refused, "warning"), _metrics(seen)]), _settings(seen, differences is True)]
        now = hashlib.sha256("".join(shown).encode()).hexdigest()[:16]
        return [gr.skip()] * 3 if now == digest else [*shown, now]

    gr.HTML(title("Compare", f"Up to {MOST_RUNS} runs on one axis, and what differs between them."))
    picked = gr.Dropdown([], multiselect=True, max_choices=MOST_RUNS, label="Runs", elem_id="compare-runs")
    live_part("charts", "compare", [curves])
    metrics = gr.HTML(apply_default_css=False)
    only = gr.Checkbox(True, label="Only differences", info="of the settings")
    settings = gr.HTML(apply_default_css=False)
    digest = gr.Textbox(visible=False)
    quiet: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
    gr.on(None, choices, None, picked, **quiet)
    gr.on(None, look, [only, digest], [metrics, settings, digest], **quiet)
    only.change(look, [only, digest], [metrics, settings, digest], **quiet)
    gr.Timer(_EVERY).tick(look, [only, digest], [metrics, settings, digest], **quiet)
    picked.input(None, picked, None, js=_GO)


def _head(seen: dict[str, Any]) -> list[Any]:
    return ["", *(join([run_link(run["id"]), " ", badge(run["state"])]) for run in seen["runs"])]


def _metrics(seen: dict[str, Any]) -> Html:
    """Final metrics side by side, the best of each row in bold."""
    if not seen["runs"]:
        return Html("")
    rows = []
    for metric in seen["metrics"]:
        words = [_word(metric["name"], value) for value in metric["values"]]
        cells = [element("strong", join([word, element("span", " (best)", class_="ts-unseen")]))
                 if index == metric["best"] else word for index, word in enumerate(words)]  # fmt: skip
        rows.append([_NAMES[metric["name"]], *cells])
    table = data_table(_head(seen), rows, "Final metrics", numeric=range(1, len(seen["runs"]) + 1), empty="no metrics")
    return section("Final metrics", table)


def _word(name: str, value: float | None) -> str:
    return duration_text(value) if name == "elapsed_s" else number_text(value)


def _settings(seen: dict[str, Any], differences: bool) -> Html:
    if not seen["runs"]:
        return Html("")
    kept = [row for row in seen["settings"] if row["differs"] or not differences]
    if not kept:
        return section("Settings", note("These runs have the same settings."))
    rows = [[row["name"], *(_setting(value) for value in row["values"])] for row in kept]
    return section("Settings", data_table(_head(seen), rows, "Settings"))


def _setting(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None or value == {} else str(value)
