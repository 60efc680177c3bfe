"""Parts of a page that a script in the browser draws from what server functions answer."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr
from starlette.responses import Response

from trainers.config.options import ConfigError
from ui.checked_blocks import is_scalar

Function = Callable[[dict[str, Any]], Response]


def live_part(name: str, script: str, functions: Sequence[Function], heading: str = "") -> gr.HTML:
    """An empty element that a script fills and keeps current.

    Args:
        name: its element has the class `ts-NAME`.
        script: `Live.SCRIPT` of `ui/static/live_*.js` draws it.
        functions: what the script may call as `server.FUNCTION(request)`. Anybody may: they only read.
        heading: words of an `<h2>` above it.
    """
    above = f"<h2>{heading}</h2>" if heading else ""
    return gr.HTML(
        html_template=f'{above}<div class="ts-{name}"></div>', js_on_load=f"Live.{script}(element, server)",
        server_functions=[_checked(function) for function in functions], apply_default_css=False, padding=False,
    )  # fmt: skip


def _checked(function: Function) -> Function:
    """The function, for requests of names and plain values alone: Gradio hands on whatever is sent."""

    @functools.wraps(function)
    def checked(request: Any) -> Response:
        if isinstance(request, dict) and all(map(is_scalar, request.values())):
            return function(request)
        return answer(lambda: {"error": "the request is no object of plain values; reload the page"})

    return checked


def answer(make: Callable[[], Any]) -> Response:
    """The document as JSON, without Gradio's slow look at each value; `{"error": …}` for a mistake in the request."""
    try:
        document = make()
    except ConfigError as error:
        document = {"error": str(error)}
    return Response(json.dumps(document, allow_nan=False, separators=(",", ":")), media_type="application/json")
