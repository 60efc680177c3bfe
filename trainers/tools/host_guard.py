"""The outermost layer of a model's server: refuses what comes from pages of other sites. Imports no torch.

`vllm serve --middleware` takes it by its path, so it needs no argument: the host is in the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from trainers.run.web_host import SERVED_HOST, Scope, TrustedHosts, header_values, is_from_other_site, machine_names

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

VLLM_PATHS = frozenset({"/v1/models", "/v1/chat/completions", "/health"})
"""What clients of vLLM may ask for: its key guards `/v1` alone, and other paths answer, pause it, or change it."""


async def send_json(send: Send, status: int, document: Any, headers: MutableMapping[str, str] | None = None) -> None:
    """Sends a complete response."""
    body = json.dumps(document, ensure_ascii=False).encode()
    lines = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    encoded = [(name.encode(), value.encode()) for name, value in lines.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


class HostGuard:
    """Refuses requests under another host name (DNS rebinding), of pages of other sites, and WebSockets.

    Args:
        app: the guarded app.
        hosts: names of this server; default: those of the host in `SERVED_HOST`, and of this machine.
        paths: the only ones that reach the app; None for all. By default, those for vLLM.
    """

    def __init__(self, app: App, hosts: TrustedHosts | None = None, paths: Collection[str] | None = VLLM_PATHS):
        self.app = app
        host = os.environ.get(SERVED_HOST, "127.0.0.1")
        self.hosts = hosts or TrustedHosts(host, machine_names(host))
        self.paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self.app(scope, receive, send)
            return
        status, message, code = refusal
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        await send_json(send, status, {"error": error})

    def _refusal(self, scope: Scope) -> tuple[int, str, str] | None:
        """Status, reason and code if the request is refused."""
        hosts = header_values(scope, b"host")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            problem = "unknown host name for this server; use the address that `tunesmith serve` printed"
            return 400, problem, "refused_host"
        if is_from_other_site(scope, hosts[0]):
            return 403, "refused: the request comes from a page of another site", "refused_host"
        if self.paths is not None and scope["path"] not in self.paths:
            return 404, f"this server has {', '.join(sorted(self.paths))} alone", "unknown_url"
        return None
