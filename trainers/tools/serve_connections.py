"""The connections of `tunesmith serve`: uvicorn's, but they end if a client does not use them. Imports no torch."""

from __future__ import annotations

from typing import Any

HEADER_SECONDS = 30.0
"""Seconds in which a client must have sent the header of a request, or read the end of an answer that was given up."""


def connection_class() -> type[Any]:
    """uvicorn's class of a connection, with a limit of time that it has not.

    uvicorn ends a connection that is idle after an answer, but neither one on which no header comes, or only a part of
    one, nor one that it has closed while the client reads nothing; as many as `limit_concurrency` shut all others out.
    """
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

        def connection_lost(self, exc: Exception | None) -> None:
            self._timer.cancel()
            super().connection_lost(exc)

    return Connection
