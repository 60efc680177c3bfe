"""Imports Gradio without features that a local server does not need. Import this module before Gradio.

Also fixes two shortcomings of Gradio's upload parser: it limits the size of form fields that are not files, and removes
the partial file of an aborted upload.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

from starlette.formparsers import MultiPartException

for _name in [name for name in os.environ if name.startswith("GRADIO_") and name != "GRADIO_TEMP_DIR"]:
    del os.environ[_name]  # could enable sharing or proxies, or expose paths
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"


@contextlib.contextmanager
def _no_stub_files() -> Iterator[None]:
    """Keeps Gradio from rewriting a stub file for each of its components, which takes a second at every start.

    Gradio skips components whose source file it cannot find.
    """
    find = inspect.getfile

    def getfile(component: Any) -> str:
        if str(getattr(component, "__module__", "")).startswith("gradio."):
            raise OSError("no stub files")
        return find(component)

    inspect.getfile = getfile  # type: ignore[assignment]
    try:
        yield
    finally:
        inspect.getfile = find


with _no_stub_files():
    import gradio  # noqa: F401
    from gradio import route_utils, routes
    from gradio.routes import App

MAX_FIELD = 64 << 10
"""Most bytes of a form field that is not a file; such fields are kept in memory."""


class _UploadParser(route_utils.GradioMultiPartParser):
    """Limits form fields while an upload arrives, and cleans up after an aborted one."""

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._current_part
        if part.file is None and len(part.data) + end - start > MAX_FIELD:
            raise MultiPartException(f"a form field has more than {MAX_FIELD:,} bytes; send it as a file")
        super().on_part_data(data, start, end)

    async def parse(self) -> Any:
        try:
            return await super().parse()
        except BaseException:
            for file in self._files_to_close_on_error:
                file.close()
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
            raise


route_utils.GradioMultiPartParser = routes.GradioMultiPartParser = _UploadParser


@contextlib.contextmanager
def one_app_at_the_end() -> Iterator[None]:
    """Keeps `gr.Blocks` from building a web app after every page, which the next page would replace."""
    create = App.create_app
    App.create_app = staticmethod(lambda *_, **__: None)
    try:
        yield
    finally:
        App.create_app = create
