"""The Runs page: the table of all runs."""

from __future__ import annotations

from typing import Any

import gradio as gr
from starlette.responses import Response

from app.runs.history import History, page
from ui.context import Here
from ui.live import answer, live_part
from ui.parts import title


def build(here: Here) -> None:
    """Lays out the page."""
    history = History(here.runs_dir)

    def runs_table(request: dict[str, Any]) -> Response:
        return answer(lambda: page(history, request))

    gr.HTML(title("Runs", "Every run of this machine's runs folder, and those elsewhere that it knows of."))
    live_part("runs", "runs", [runs_table])
