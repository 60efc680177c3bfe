"""Builds the pages and serves them. Started by `tunesmith ui`, which has checked everything and taken the port."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ui.gradio_start import one_app_at_the_end  # isort: skip - before Gradio

import gradio as gr
import uvicorn
from fastapi import FastAPI
from gradio.routes import App

from app.commands.ui import PASSWORD
from app.console import report, say
from ui.checked_blocks import CheckedBlocks
from ui.context import Here
from ui.pages import chat, compare, data, run, runs, system, train
from ui.parts import PAGES, navigation
from ui.security import MAX_UPLOAD, Guard, LoggedIn, Password, Throttle, ThrottledLogin, TrustedHosts, bracketed
from ui.theme import Tunesmith, head

_ROUTES = (
    ("train", train), ("data", data), ("runs", runs), ("run", run), ("compare", compare), ("chat", chat),
    ("system", system),
)  # fmt: skip
_EVENTS_AT_ONCE = 16
"""How often one handler may run at the same time, each for another tab."""
_QUEUE_PAUSE = 0.04
"""Seconds between two looks at an empty queue; Gradio's own millisecond costs 7 % of a core for nothing."""
_PATIENCE = 1.5
"""Seconds that open connections get when the server ends."""


@dataclass(frozen=True)
class Settings:
    """What `tunesmith ui` asks for; see `app.commands.ui.ui_verb`."""

    host: str
    socket: int
    user: str | None
    runs_dir: str
    roots: list[str]
    uploads: str
    remote_code: bool

    def here(self) -> Here:
        roots = (*map(Path, self.roots), Path(self.uploads))
        return Here(Path(self.runs_dir), roots, Path(self.uploads), self.remote_code)


def build(here: Here) -> CheckedBlocks:
    """All pages as one Gradio app."""
    with one_app_at_the_end():
        with CheckedBlocks(title="Tunesmith", analytics_enabled=False) as demo:
            _page("train", train, here)
        for name, page in _ROUTES[1:]:
            with demo.route(PAGES.get(name, "Run"), f"/{name}", show_in_navbar=False):
                _page(name, page, here)
        demo.queue(default_concurrency_limit=_EVENTS_AT_ONCE)
    demo.check_kinds()
    demo._queue.sleep_when_free = _QUEUE_PAUSE
    demo._queue.progress_update_sleep_when_free = 0.2
    return demo


def _page(name: str, page: Any, here: Here) -> None:
    gr.HTML(navigation("runs" if name == "run" else name), padding=False)
    page.build(here)


def asgi(here: Here, hosts: TrustedHosts, password: Password | None) -> Any:
    """The pages behind every check, as an ASGI app."""
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    blocks = build(here)
    note = "After five wrong passwords within a minute, every further one is refused for a while." if password else None
    warnings.filterwarnings("ignore", message="SSR mode is not supported")  # said of one that is off
    pages = gr.mount_gradio_app(
        outer, blocks, "", footer_links=[], run_history=False, app_kwargs={"openapi_url": None}, auth=password,
        auth_message=note, allowed_paths=[], show_error=True, max_file_size=MAX_UPLOAD, ssr_mode=False,
        enable_monitoring=False, pwa=False, mcp_server=False, theme=Tunesmith(), head=head(),
    )  # fmt: skip
    blocks.has_launched = True  # else Gradio takes any file for one that was uploaded
    names = ["/", *(f"/{name}" for name, _ in _ROUTES)]
    if password:
        gradio_app = pages.routes[-1].app
        pages = ThrottledLogin(LoggedIn(pages, lambda cookies: _is_logged_in(gradio_app, cookies)), Throttle())
    return Guard(pages, hosts, names)


def _is_logged_in(app: App, cookies: Mapping[str, str]) -> bool:
    """Whether the cookies hold a token that Gradio's login gave out."""
    names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
    return any(cookies.get(name) in app.tokens for name in names)


def serve(settings: Settings, password: str | None) -> int:
    """Serves until a signal ends it; the runs go on.

    Args:
        settings: what `tunesmith ui` asks for.
        password: of `settings.user`; None where there is none.

    Returns:
        The exit status: 0 after SIGTERM, 130 after Ctrl-C.
    """
    listening = socket.socket(fileno=settings.socket)
    os.set_inheritable(listening.fileno(), False)
    checks = Password(settings.user, password) if settings.user is not None and password else None
    if settings.user is not None and checks is None:
        raise ValueError("there is a user and no password")
    app = asgi(settings.here(), TrustedHosts(settings.host, (socket.gethostname(),)), checks)
    port = listening.getsockname()[1]

    class Server(uvicorn.Server):
        status = 0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            say(f"runs: {settings.runs_dir}")
            say(f"files are read from: {', '.join(settings.roots)}")
            report(f"http://{_shown(settings.host)}:{port}")

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            logging.disable()  # open pages are cut off, which is no error
            self.status = 130 if sig == signal.SIGINT else 0
            self.should_exit = True

    config = uvicorn.Config(
        app, log_level="error", access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=1, lifespan="on",
    )  # fmt: skip
    server = Server(config)
    server.run(sockets=[listening])
    _end_soon(server.status)
    return server.status


def _shown(host: str) -> str:
    """The host as a browser on this machine or beside it calls it."""
    return socket.gethostname() if host in ("0.0.0.0", "::") else bracketed(host)  # noqa: S104


def _end_soon(status: int) -> None:
    """Ends the process even where the thread of a request does not."""
    timer = threading.Timer(_PATIENCE, os._exit, (status,))
    timer.daemon = True
    timer.start()


def main() -> None:
    """The program: one argument, the settings as JSON."""
    password = os.environ.pop(PASSWORD, None)
    sys.exit(serve(Settings(**json.loads(sys.argv[1])), password))


if __name__ == "__main__":
    main()
