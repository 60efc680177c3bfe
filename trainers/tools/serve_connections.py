"""The connections of `tunesmith serve`: uvicorn's, but they end if a client does not use them. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from trainers.run.web_host import Scope
from trainers.tools.host_guard import App, Receive, Send, send_json
from trainers.tools.serve_requests import ApiError

HEADER_SECONDS = 30.0
"""Seconds in which a client must have sent the header of a request, or read the end of an answer that was given up."""


class ConnectionLimit:
    """Refuses requests on more connections than a server can keep, as uvicorn's `limit_concurrency`, but in JSON.

    Args:
        app: the limited app.
        most: connections that are served.

    Attributes:
        connections: all that are open; to be set to the server's own.
    """

    def __init__(self, app: App, most: int):
        self.app = app
        self.most = most
        self.connections: Collection[Any] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(self.connections) > self.most:
            refusal = ApiError(503, f"{self.most} connections are open already; try again", code="overloaded",
                               headers={"retry-after": "1", "connection": "close"})  # fmt: skip
            await send_json(send, refusal.status, refusal.document(), refusal.headers)
            return
        await self.app(scope, receive, send)


def connection_class() -> type[Any]:
    """uvicorn's class of a connection, with a limit of time that it has not, and errors in JSON.

    uvicorn ends a connection that is idle after an answer, but neither one on which no header comes, or only a part of
    one, nor one that it has closed while the client reads nothing; as many as `ConnectionLimit` allows shut all others
    out.
    """
    from h11 import Data, EndOfMessage, Response
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._look_again()

        def _look_again(self) -> None:
            self._seen = self.cycle
            self._timer = self.loop.call_later(HEADER_SECONDS, self._end_if_idle)

        def _end_if_idle(self) -> None:
            idle = self.cycle is self._seen and (self.cycle is None or self.cycle.response_complete)
            if idle or self.transport.is_closing():
                self.transport.abort()
            else:
                self._look_again()

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP."""
            body = json.dumps(ApiError(400, msg).document()).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (Response(status_code=400, headers=headers, reason=HTTPStatus.BAD_REQUEST.phrase),
                          Data(data=body), EndOfMessage()):  # fmt: skip
                self.transport.write(self.conn.send(event))
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

    return Connection
