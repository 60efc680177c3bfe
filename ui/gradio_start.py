"""Imports Gradio without what a local server does not need: to be imported before Gradio is, anywhere."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

for _name in [name for name in os.environ if name.startswith("GRADIO_") and name != "GRADIO_TEMP_DIR"]:
    del os.environ[_name]  # shares, proxies and paths that are not ours to open
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"


@contextlib.contextmanager
def _no_stub_files() -> Iterator[None]:
    """Keeps Gradio from writing a stub file for each of its components anew, which takes a second at every start.

    It leaves out components whose source file it cannot find.
    """
    find = inspect.getfile

    def getfile(thing: Any) -> str:
        if str(getattr(thing, "__module__", "")).startswith("gradio."):
            raise OSError("no stub file is wanted")
        return find(thing)

    inspect.getfile = getfile  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getfile = find


with _no_stub_files():
    import gradio  # noqa: F401
    from gradio.routes import App


@contextlib.contextmanager
def one_app_at_the_end() -> Iterator[None]:
    """Keeps `gr.Blocks` from making a whole web app after every page, only for the next page to replace it."""
    create = App.create_app
    App.create_app = staticmethod(lambda *_, **__: None)
    try:
        yield
    finally:
        App.create_app = create
