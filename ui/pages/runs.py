"""The Runs page: the table of all runs."""

from __future__ import annotations

from typing import Any

import gradio as gr
from starlette.responses import Response

from app.launch.actions import move_beside
from app.runs.history import History, page
from ui.context import ServerContext
from ui.live import json_response, live_part
from ui.parts import title


def build(context: ServerContext) -> None:
    """Lays out the page."""
    history = History(context.runs_dir)

    def runs_table(request: dict[str, Any]) -> Response:
        return json_response(lambda: page(history, request))

    def queue_move(request: dict[str, Any]) -> Response:
        return json_response(lambda: move_beside(request, context.runs_dir))

    gr.HTML(
        title(
            "Runs", "Every run in the runs folder, and every run of yours on this machine that has a folder elsewhere."
        )
    )
    live_part("runs", "runs", [runs_table, queue_move])
