"""The program behind `tunesmith serve`: loads one model as the chat loads it, and serves it until a signal ends it.

Takes one argument, its settings as JSON; the token is in the environment. What takes long to import is imported once a
signal can end the program without a trace.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from trainers.run.web_host import SERVE_TOKEN, TrustedHosts, bracketed, machine_names

DEFAULT_CONCURRENT = 4
_SHUTDOWN_SECONDS = 1
"""Seconds that answers get when the server shuts down, and then threads."""


@dataclass(frozen=True)
class Settings:
    """Settings passed by `tunesmith serve`.

    Args:
        name: name of the model.
        request: what to load; see `trainers.tools.chat.read_models`.
        host: the host that the socket is bound to.
        socket: descriptor of the listening socket.
        max_concurrent: answers that are generated at a time; None for the default.
        max_waiting: requests that wait for their turn.
        max_new_tokens: most tokens of an answer.
    """

    name: str
    request: dict[str, Any]
    host: str
    socket: int
    max_concurrent: int | None
    max_waiting: int
    max_new_tokens: int


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Before there is a server, nothing is lost. `print` may be what was interrupted, and cannot be entered twice."""
    os.write(2, b"interrupted\n")
    os._exit(130 if number == signal.SIGINT else 143)


def _load(settings: Settings) -> Any:
    """The model, on its device.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    import torch

    from trainers.config.mistakes import ConfigError
    from trainers.tools.chat import read_models, request_config
    from trainers.tools.chat_models import Models
    from trainers.tools.serve_generation import ServedModel

    config = request_config(settings.request)
    reading = read_models(config, settings.request, with_base=False)
    try:
        while True:
            try:
                _say(f"{next(reading)['loading']} ...")
            except StopIteration as stopped:
                base, tuned = stopped.value
                break
        return ServedModel(Models(config, base, tuned), settings.max_new_tokens)
    except torch.OutOfMemoryError:
        raise ConfigError("the model does not fit in GPU memory; choose another --device, or cpu") from None


def _concurrent(requested: int | None, possible: int | None) -> int:
    """Answers to generate at a time.

    Args:
        requested: by the user; None for the default.
        possible: most that the model can; None for any number.

    Raises:
        ConfigError: if more are requested.
    """
    from trainers.config.mistakes import ConfigError

    if requested is not None and possible is not None and requested > possible:
        problem = "is too many: this model's RoPE scaling has a state that all its answers share"
        raise ConfigError.about("max_concurrent", requested, problem, f"use {possible}")
    return requested or min(DEFAULT_CONCURRENT, possible or DEFAULT_CONCURRENT)


def _connections(limits: Any) -> int:
    """Most connections: several for each request that is answered or waits, as clients keep them open."""
    return 4 * (limits.concurrent + limits.waiting) + 16


def serve(settings: Settings, token: str | None) -> int:
    """Serves until a signal ends it.

    Args:
        settings: from `tunesmith serve`.
        token: what clients must send; None for none.

    Returns:
        The exit status: 0 after SIGTERM, 130 after Ctrl-C.

    Raises:
        ConfigError: if the model cannot be loaded or served.
    """
    import uvicorn

    from trainers.tools.host_guard import HostGuard
    from trainers.tools.serve_app import Limits, ServeApp
    from trainers.tools.serve_connections import ConnectionLimit, connection_class

    model = _load(settings)
    concurrent = _concurrent(settings.max_concurrent, model.most_concurrent)
    limits = Limits(concurrent, settings.max_waiting)
    app = ServeApp(model, settings.name, limits, token)
    guard = HostGuard(app, TrustedHosts(settings.host, machine_names(settings.host)), paths=None)
    limited = ConnectionLimit(guard, _connections(limits))
    listening = socket.socket(fileno=settings.socket)
    os.set_inheritable(settings.socket, False)
    port = listening.getsockname()[1]

    class Server(uvicorn.Server):
        status = 0

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if token is None:
                _say(f"no {SERVE_TOKEN} is set: every user and program of this machine can ask this model")
            _say(f"model {settings.name!r}, {concurrent} answers at a time; Ctrl-C ends the server")
            with suppress(BrokenPipeError):  # whoever reads it may be gone
                print(f"http://{bracketed(settings.host)}:{port}/v1", flush=True)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.status = 130 if sig == signal.SIGINT else 0
            self.should_exit = True
            # A signal during a long prompt: its thread cannot be ended otherwise.
            timer = threading.Timer(2 * _SHUTDOWN_SECONDS, os._exit, (self.status,))
            timer.daemon = True
            timer.start()

    config = uvicorn.Config(
        limited, log_level="critical", access_log=False, server_header=False, proxy_headers=False, lifespan="off",
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS, ws="none", timeout_keep_alive=30, http=connection_class(),
    )  # fmt: skip
    server = Server(config)
    limited.connections = server.server_state.connections
    server.run(sockets=[listening])
    return server.status


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, _end_at_once)
    signal.signal(signal.SIGTERM, _end_at_once)
    token = os.environ.pop(SERVE_TOKEN, None)
    from trainers.config.mistakes import ConfigError

    try:
        status = serve(Settings(**json.loads(sys.argv[1])), token)
    except ConfigError as error:
        for line in error.lines:
            _say(f"error: {line}")
        status = 2
    os._exit(status)  # threads that still generate must not find the interpreter half gone


if __name__ == "__main__":
    main()
