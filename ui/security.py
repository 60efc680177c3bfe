"""Access to the server: checks of host, origin, path and size, response headers, and login."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, cookie_parser

from trainers.run.web_host import Scope, TrustedHosts, header_values, is_from_other_site

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_UPLOAD = 2 << 30
"""Most bytes of an uploaded file."""
MAX_BODY = 16 << 20
"""Most bytes of any other request."""
MAX_LOGIN = 16 << 10
"""Most bytes of a login request."""

UPLOAD_PATH = "/gradio_api/upload"
LOGIN_PATH = "/login"

# The paths used by the pages and `gradio_client`. All other Gradio routes are blocked: no page shows a file of the
# server, so none is served, and nothing is proxied, recorded or shared.
_FILES = ("/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt", LOGIN_PATH, "/logout")
_FOLDERS = ("/assets/", "/static/", "/svelte/")
_API = "/gradio_api/"
_API_NAMES = (
    "api", "app_id", "call", "cancel", "component_server", "heartbeat", "info", "login_check", "queue", "reset", "run",
    "startup-events", "upload", "upload_progress",
)  # fmt: skip

# Gradio's pages need inline scripts and functions compiled from strings. Event handlers in attributes, the usual vector
# of injection, stay forbidden, and so do all other origins.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; script-src-attr 'none'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "media-src 'self' blob:; worker-src 'self' blob:; manifest-src 'self'; base-uri 'self'; form-action 'self'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), display-capture=(), payment=(), usb=()",
}
"""Headers of every response."""

_READS = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Refuses requests that do not come from a page of this server, and sets the headers of every response.

    Args:
        app: the guarded app.
        hosts: names of this server.
        pages: paths that links from other sites may open.
    """

    def __init__(self, app: App, hosts: TrustedHosts, pages: Iterable[str]):
        self.app = app
        self.hosts = hosts
        self.pages = frozenset(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # no page opens one
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal:
            await answer(_with_headers(send), *refusal)
            return
        body = _LimitedBody(receive, _with_headers(send), _max_bytes(scope))
        try:
            await self.app(scope, body.receive, body.send)
        except ClientDisconnect:
            pass  # the client is gone
        except Exception:
            if not body.is_refused:  # otherwise it only saw the client disconnect
                raise

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason if the request is refused."""
        hosts = header_values(scope, b"host")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return 400, "unknown host name for this server; open the address that `tunesmith ui` printed"
        if self._is_foreign(scope, hosts[0]):
            return 403, "refused: the request comes from a page of another site"
        if not self._is_open(scope["path"]):
            return 404, "there is no such page; the pages of Tunesmith start at /"
        return _length_refusal(scope)

    def _is_open(self, path: str) -> bool:
        """Whether the pages or `gradio_client` use this path."""
        if path.startswith(_API):
            return path.split("/")[2] in _API_NAMES
        name = path.rstrip("/") or "/"
        return name in self.pages or name in _FILES or path.startswith(_FOLDERS)

    def _is_foreign(self, scope: Scope, host: str) -> bool:
        """Whether a page of another site sent the request; following a link to a page is allowed."""
        reads = scope["method"] in ("GET", "HEAD")
        mode, target = _value(scope, b"sec-fetch-mode"), _value(scope, b"sec-fetch-dest")
        if reads and scope["path"] in self.pages and mode in ("", "navigate") and target in ("", "document"):
            return False
        return is_from_other_site(scope, host)


def _max_bytes(scope: Scope) -> int:
    """Largest allowed body of a request, in bytes."""
    if scope["method"] in _READS:
        return 0
    return {UPLOAD_PATH: MAX_UPLOAD + MAX_BODY, LOGIN_PATH: MAX_LOGIN}.get(scope["path"].rstrip("/"), MAX_BODY)


def _length_refusal(scope: Scope) -> tuple[int, str] | None:
    """Status and reason for a body without a length, with two, or of more bytes than allowed."""
    if scope["method"] in _READS:
        return None
    length, limit = _value(scope, b"content-length"), _max_bytes(scope)
    if not (length.isascii() and length.isdigit()):
        return 411, "the request has no length; send a Content-Length"
    if header_values(scope, b"transfer-encoding"):
        return 400, "the request has two lengths; send a Content-Length without Transfer-Encoding"
    return (413, _too_large(limit)) if int(length[:20]) > limit else None


def _too_large(limit: int) -> str:
    return f"the request is larger than {limit:,} bytes"


class _LimitedBody:
    """Counts the bytes of a request as they arrive; past the limit it answers 413 and disconnects the app.

    Args:
        receive: receives the client's messages.
        send: sends messages to the client.
        max_bytes: limit for the body, in bytes.
    """

    def __init__(self, receive: Receive, send: Send, max_bytes: int):
        self._receive = receive
        self._send = send
        self._max_bytes = max_bytes
        self._bytes = 0
        self._is_answered = False
        self.is_refused = False

    async def receive(self) -> MutableMapping[str, Any]:
        """The next message from the client; a disconnect once it has sent too much."""
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._max_bytes and not self.is_refused:
            self.is_refused = True
            if not self._is_answered:
                await answer(self._send, 413, _too_large(self._max_bytes), connection="close")
        return {"type": "http.disconnect"} if self.is_refused else message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Sends the app's response, unless the request was refused in the meantime."""
        self._is_answered = True
        if not self.is_refused:
            await self._send(message)


def _value(scope: Scope, name: bytes) -> str:
    """The header in lower case; empty if missing."""
    return ", ".join(header_values(scope, name)).lower()


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own_headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            names = {name for name, _ in own_headers}
            # Gradio lets other origins read its responses; the pages do not need that.
            app_headers = [
                (key, value) for key, value in message.get("headers", [])
                if bytes(key).lower() not in names and not bytes(key).lower().startswith(b"access-control-")
            ]  # fmt: skip
            message = {**message, "headers": [*app_headers, *own_headers]}
        await send(message)

    return sending


async def answer(send: Send, status: int, message: str, **headers: str) -> None:
    """Sends a complete response with one line of text."""
    body = (message + "\n").encode()
    all_headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **headers}
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


# -- the password ----------------------------------------------------------------------------------------------------


class Password:
    """Checks a user name and password in constant time.

    Args:
        user: the only user.
        password: the user's password.
    """

    def __init__(self, user: str, password: str):
        self._user, self._password = _digest(user), _digest(password)

    def __call__(self, user: str, password: str) -> bool:
        right_user = hmac.compare_digest(_digest(user), self._user)
        right_password = hmac.compare_digest(_digest(password), self._password)
        return right_user and right_password


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


@dataclass
class _Attempts:
    """Failed logins of one address, or of all."""

    limit: int
    failures: list[float] = field(default_factory=list)
    blocked_until: float = 0.0
    pauses: int = 0


class Throttle:
    """Counts wrong passwords; after too many within a minute, refuses logins for a pause that grows each time.

    The limits apply per address, and to all addresses together.

    Args:
        clock: a monotonic clock, in seconds.
    """

    MAX_FAILURES = 5
    """Wrong passwords from one address within `WINDOW` that start a pause."""
    MAX_TOTAL_FAILURES = 20
    """Wrong passwords from all addresses within `WINDOW` that start a pause."""
    WINDOW = 60.0
    """Seconds for which wrong passwords count."""
    PAUSE = 60.0
    """Seconds of the first pause; each further pause is twice as long."""
    MAX_PAUSE = 3600.0
    """Seconds of the longest pause, and after which earlier pauses are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._all = _Attempts(self.MAX_TOTAL_FAILURES)
        self._attempts: dict[str, _Attempts] = {}

    def begin(self, address: str) -> float:
        """Counts a login attempt as failed in advance, unless paused, so that concurrent attempts count too.

        Returns:
            Seconds until the next allowed attempt; 0 if this one may proceed.
        """
        self._forget_old()
        own = self._attempts.setdefault(_network(address), _Attempts(self.MAX_FAILURES))
        now = self.clock()
        wait = max(own.blocked_until, self._all.blocked_until) - now
        if wait > 0:
            return wait
        for tries in (own, self._all):
            tries.failures = [*(then for then in tries.failures if now - then < self.WINDOW), now]
            if len(tries.failures) >= tries.limit:
                tries.blocked_until = now + min(self.MAX_PAUSE, self.PAUSE * 2**tries.pauses)
                tries.pauses, tries.failures = tries.pauses + 1, []
        return 0.0

    def succeed(self, address: str) -> None:
        """Records that the last attempt succeeded: resets the address, and takes the attempt off the total."""
        self._attempts.pop(_network(address), None)
        if self._all.failures:
            self._all.failures.pop()

    def _forget_old(self) -> None:
        now = self.clock()
        over = now - self.MAX_PAUSE
        self._attempts = {
            address: tries
            for address, tries in self._attempts.items()
            if tries.blocked_until > over or any(then > now - self.WINDOW for then in tries.failures)
        }
        if self._all.blocked_until <= over:
            self._all.pauses = 0


def _network(address: str) -> str:
    """The address, or its /64 network for IPv6, as a client usually controls all of it."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((number, 64), strict=False)) if number.version == 6 else address


class ThrottledLogin:
    """Answers 429 to logins while the throttle pauses.

    Args:
        app: the guarded app; its login answers 200 only to the right password.
        throttle: counts wrong passwords.
    """

    def __init__(self, app: App, throttle: Throttle):
        self.app = app
        self.throttle = throttle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].rstrip("/") != LOGIN_PATH:
            await self.app(scope, receive, send)
            return
        address = (scope.get("client") or ("",))[0]
        wait = self.throttle.begin(address)
        if wait > 0:
            seconds = int(wait) + 1
            message = f"too many wrong passwords; try again in {seconds} s"
            await answer(send, 429, message, retry_after=str(seconds))
            return

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self.throttle.succeed(address)
            await send(message)

        await self.app(scope, receive, sending)


class LoggedIn:
    """Answers 401 to API calls without a login, before reading the body.

    Args:
        app: the guarded app.
        is_logged_in: whether a request's cookies belong to a logged-in user.
    """

    def __init__(self, app: App, is_logged_in: Callable[[Mapping[str, str]], bool]):
        self.app = app
        self.is_logged_in = is_logged_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_API):
            cookies = cookie_parser("; ".join(header_values(scope, b"cookie")))
            if not self.is_logged_in(cookies):
                await answer(send, 401, "log in first; open the address that `tunesmith ui` printed")
                return
        await self.app(scope, receive, send)
