"""Answers that stay the same while the server runs: Gradio's scripts and styles, kept in memory.

A first view asks for some seventy of them. Through Gradio's routes each costs the server about 3 ms of CPU time, which
a browser on the same machine waits for.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HASHED = "/assets/"
"""Files whose names contain a hash of their content: a browser never has to ask for one twice."""
FOLDERS = (HASHED, "/static/")
MAX_BYTES = 64 << 20
"""Most bytes that are kept; what comes later is passed on."""
_MAX_ENTRY = 4 << 20
_OVERHEAD = 2 << 10
_OWN_HEADERS = ("range", "if-none-match", "if-modified-since", "if-match", "if-unmodified-since", "if-range")
"""Headers of requests that are not for a whole file."""


class ResponseCache:
    """Keeps the whole files that an app serves from `FOLDERS`.

    Args:
        app: an app that serves a file in the encoding that a request asks for, and files that do not change.
    """

    def __init__(self, app: ASGIApp):
        self.app = app
        self.answers: dict[tuple[str, str], list[Message]] = {}
        self.bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_for_a_file(scope):
            await self.app(scope, receive, send)
            return
        key = scope["path"], Headers(scope=scope).get("accept-encoding", "")
        answer = self.answers.get(key)
        if answer is None:
            messages: list[Message] = []
            await self.app(scope, receive, _recorder(messages, send, scope["path"].startswith(HASHED)))
            self._keep(key, messages)
            return
        for message in answer:
            await send({**message, **({"headers": list(message["headers"])} if "headers" in message else {})})

    def _keep(self, key: tuple[str, str], messages: list[Message]) -> None:
        """Keeps a complete answer, if it is a file that was there and there is room for it."""
        size = _OVERHEAD + sum(map(len, key)) + sum(len(message.get("body", b"")) for message in messages)
        if key in self.answers or not messages or messages[0].get("status") != 200:
            return
        is_complete = messages[-1]["type"] == "http.response.body" and not messages[-1].get("more_body")
        if is_complete and size <= _MAX_ENTRY and self.bytes + size <= MAX_BYTES:
            self.answers[key] = messages
            self.bytes += size


def _is_for_a_file(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "GET" or not scope["path"].startswith(FOLDERS):
        return False
    return not scope["query_string"] and not any(name in Headers(scope=scope) for name in _OWN_HEADERS)


def _recorder(messages: list[Message], send: Send, is_hashed: bool) -> Send:
    """Passes messages on, and keeps a copy of each."""

    async def record(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200 and is_hashed:
            headers = MutableHeaders(raw=list(message["headers"]))
            headers["cache-control"] = "public, max-age=31536000, immutable"
            message = {**message, "headers": headers.raw}
        messages.append({**message, **({"headers": list(message["headers"])} if "headers" in message else {})})
        await send(message)

    return record
