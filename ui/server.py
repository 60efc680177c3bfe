"""Builds the pages and serves them. Started by `tunesmith ui`, which has checked the arguments and bound the port."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ui.gradio_start import one_app_at_the_end  # isort: skip - before Gradio

import gradio as gr
import uvicorn
from fastapi import FastAPI
from gradio.routes import App
from starlette.datastructures import MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.commands.ui import PASSWORD
from app.console import report, say
from app.services import notices
from trainers.run.web_host import TrustedHosts, bracketed
from ui.checked_blocks import CheckedBlocks
from ui.context import ServerContext
from ui.live import json_response, with_plain_values
from ui.pages import chat, compare, data, evaluate, run, runs, system, train
from ui.parts import PAGES, navigation
from ui.response_cache import ResponseCache
from ui.security import MAX_UPLOAD, Guard, LoggedIn, Password, Throttle, ThrottledLogin
from ui.theme import Tunesmith, head

_ROUTES = (
    ("train", train), ("data", data), ("runs", runs), ("run", run), ("compare", compare),
    ("evaluate", evaluate), ("chat", chat), ("system", system),
)  # fmt: skip
_CONCURRENCY = 16
"""Concurrent calls of one handler, from different tabs."""
_QUEUE_POLL_SECONDS = 0.04
"""Seconds between polls of an empty queue; Gradio's default of 1 ms costs 7 % of a core when idle."""
_SHUTDOWN_SECONDS = 1.5
"""Seconds that open connections get when the server shuts down."""


@dataclass(frozen=True)
class Settings:
    """Settings passed by `tunesmith ui`; see `app.commands.ui.ui_verb`."""

    host: str
    socket: int
    user: str | None
    runs_dir: str
    roots: list[str]
    uploads: str
    remote_code: bool

    def context(self) -> ServerContext:
        roots = (*map(Path, self.roots), Path(self.uploads))
        return ServerContext(Path(self.runs_dir), roots, Path(self.uploads), self.remote_code)


def build(context: ServerContext) -> CheckedBlocks:
    """All pages as one Gradio app."""
    with one_app_at_the_end():
        with CheckedBlocks(title="Tunesmith", analytics_enabled=False, fill_width=True) as demo:
            _page("train", train, context)
        for name, page in _ROUTES[1:]:
            with demo.route(PAGES.get(name, "Run"), f"/{name}", show_in_navbar=False):
                _page(name, page, context)
        demo.queue(default_concurrency_limit=_CONCURRENCY)
    demo.check_kinds()
    demo._queue.sleep_when_free = _QUEUE_POLL_SECONDS
    demo._queue.progress_update_sleep_when_free = 0.2
    return demo


def _page(name: str, page: Any, context: ServerContext) -> None:
    def run_ends(request: dict[str, Any]) -> Response:
        return json_response(lambda: notices.run_ends(request, context.runs_dir))

    gr.HTML(
        html_template=navigation("runs" if name == "run" else name), apply_default_css=False, padding=False,
        js_on_load="Theme.bind(element); Notices.bind(element, server)", server_functions=[with_plain_values(run_ends)],
    )  # fmt: skip
    page.build(context)


def asgi(context: ServerContext, hosts: TrustedHosts, password: Password | None) -> Any:
    """The pages behind every check, as an ASGI app."""
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    blocks = build(context)
    login_note = "After five wrong passwords within a minute, logins are refused for a while." if password else None
    warnings.filterwarnings("ignore", message="SSR mode is not supported")  # warned even though it is off
    pages = gr.mount_gradio_app(
        outer, blocks, "", footer_links=[], run_history=False, app_kwargs={"openapi_url": None}, auth=password,
        auth_message=login_note, allowed_paths=[], show_error=True, max_file_size=MAX_UPLOAD, ssr_mode=False,
        enable_monitoring=False, pwa=False, mcp_server=False, theme=Tunesmith(),
    )  # fmt: skip
    blocks.has_launched = True  # otherwise Gradio treats any file as uploaded
    names = ["/", *(f"/{name}" for name, _ in _ROUTES)]
    if password:
        gradio_app = pages.routes[-1].app
        pages = ThrottledLogin(LoggedIn(pages, lambda cookies: _is_logged_in(gradio_app, cookies)), Throttle())
    return Guard(Documents(ResponseCache(pages), names), hosts, names)


class Documents:
    """Writes our styles and scripts into the documents, and compresses these: Train's has 280 kB.

    Gradio's `head=` is inserted by its own script, long after the first paint: a chosen theme would flash. Small
    answers, as of live tabs, are not worth the time of compressing.

    Args:
        app: the pages as an ASGI app.
        names: the paths of the documents.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str]):
        self.app, self.names = app, names
        self.compressed = GZipMiddleware(self._with_head, compresslevel=5)
        self.head = head().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.compressed if scope.get("path") in self.names else self.app)(scope, receive, send)

    async def _with_head(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {}
        chunks: list[bytes] = []

        async def send_document(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            if message["type"] != "http.response.body":
                return
            chunks.append(message.get("body", b""))
            if message.get("more_body"):
                return
            before, end, after = b"".join(chunks).rpartition(b"</head>")
            body = before + (self.head + end if end else b"") + after
            if scope["method"] != "HEAD":
                MutableHeaders(raw=start["headers"])["content-length"] = str(len(body))
            await send(start)
            await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, send_document)


def _is_logged_in(app: App, cookies: Mapping[str, str]) -> bool:
    """Whether the cookies contain a token issued by Gradio's login."""
    names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
    return any(cookies.get(name) in app.tokens for name in names)


def serve(settings: Settings, password: str | None) -> int:
    """Serves until a signal ends it; runs continue.

    Args:
        settings: from `tunesmith ui`.
        password: password of `settings.user`; None without a user.

    Returns:
        The exit status: 0 after SIGTERM, 130 after Ctrl-C.
    """
    listening = socket.socket(fileno=settings.socket)
    os.set_inheritable(listening.fileno(), False)
    check_password = Password(settings.user, password) if settings.user is not None and password else None
    if settings.user is not None and check_password is None:
        raise ValueError("a user is set, but no password")
    app = asgi(settings.context(), TrustedHosts(settings.host, (socket.gethostname(),)), check_password)
    port = listening.getsockname()[1]

    class Server(uvicorn.Server):
        status = 0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            say(f"runs: {settings.runs_dir}")
            say(f"allowed folders: {', '.join(settings.roots)}")
            report(f"http://{_address(settings.host)}:{port}")

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            logging.disable()  # disconnecting open pages is not worth an error message
            self.status = 130 if sig == signal.SIGINT else 0
            self.should_exit = True

    config = uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=1, lifespan="on",
    )  # fmt: skip
    server = Server(config)
    server.run(sockets=[listening])
    _exit_soon(server.status)
    return server.status


def _address(host: str) -> str:
    """The host as used by a browser on this machine or its network."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else bracketed(host)  # noqa: S104


def _exit_soon(status: int) -> None:
    """Ends the process after `_SHUTDOWN_SECONDS`, even if the thread of a request is still running."""
    timer = threading.Timer(_SHUTDOWN_SECONDS, os._exit, (status,))
    timer.daemon = True
    timer.start()


def main() -> None:
    """Entry point; takes one argument, the settings as JSON."""
    password = os.environ.pop(PASSWORD, None)
    sys.exit(serve(Settings(**json.loads(sys.argv[1])), password))


if __name__ == "__main__":
    main()
