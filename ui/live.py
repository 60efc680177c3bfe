"""Parts of a page that a script in the browser renders from the answers of server functions."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
from starlette.responses import Response

from trainers.config.mistakes import ConfigError
from ui.checked_blocks import is_scalar

Function = Callable[[dict[str, Any]], Response]


def live_part(name: str, script: str, functions: Sequence[Function], heading: str = "") -> gr.HTML:
    """An empty element that a script fills and keeps up to date.

    Args:
        name: gives the element the class `ts-NAME`.
        script: name of the renderer, `Live.SCRIPT` in `ui/static/live_*.js`.
        functions: what the script may call as `server.FUNCTION(request)`; anyone who may open the pages
            can call them, with any plain values.
        heading: text of an `<h2>` above it.
    """
    heading_html = f"<h2>{heading}</h2>" if heading else ""
    return gr.HTML(
        html_template=f'{heading_html}<div class="ts-{name} ts-wait"></div>',
        js_on_load=f"Live.{script}(element, server)",
        server_functions=[with_plain_values(function) for function in functions], apply_default_css=False,
        padding=False,
    )  # fmt: skip


def with_plain_values(function: Function) -> Function:
    """Restricts a function to requests of plain values by name; Gradio passes on whatever is sent."""

    @functools.wraps(function)
    def checked(request: Any) -> Response:
        if isinstance(request, dict) and all(map(is_scalar, request.values())):
            return function(request)
        return json_response(lambda: {"error": "the request is not an object of plain values; reload the page"})

    return checked


def json_response(build_document: Callable[[], Any]) -> Response:
    """The document as a JSON response, which bypasses Gradio's slow processing; `{"error": …}` on ConfigError."""
    try:
        document = build_document()
    except ConfigError as error:
        document = {"error": str(error)}
    return Response(json.dumps(document, allow_nan=False, separators=(",", ":")), media_type="application/json")
