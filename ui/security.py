"""Who may talk to the server: checks of host, origin, path and size, the headers of every answer, and the password."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import ClientDisconnect, cookie_parser

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_UPLOAD = 2 << 30
"""Bytes of one uploaded file."""
MAX_BODY = 16 << 20
"""Bytes of any other request."""
MAX_LOGIN = 16 << 10
"""Bytes of a user name with its password."""

UPLOAD_PATH = "/gradio_api/upload"
LOGIN_PATH = "/login"

# What the pages and `gradio_client` ask for. The rest of Gradio stays closed: no page shows a file of the server, so
# none is served, and nothing is proxied, recorded or linked to.
_FILES = ("/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt", LOGIN_PATH, "/logout")
_FOLDERS = ("/assets/", "/static/", "/svelte/")
_API = "/gradio_api/"
_API_NAMES = (
    "api", "app_id", "call", "cancel", "component_server", "heartbeat", "info", "login_check", "queue", "reset", "run",
    "startup-events", "upload", "upload_progress",
)  # fmt: skip

# Gradio's pages have inline scripts and compile the functions that they are given; handlers in attributes, which is
# what an injected text would bring, stay forbidden, and so is every other origin.
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
"""Headers of every answer."""

_READS = ("GET", "HEAD", "OPTIONS")
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")


def bracketed(host: str) -> str:
    """A host as it stands in an address: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class TrustedHosts:
    """The names under which a browser may call the server; any other name may be a rebound one.

    Args:
        host: what the server is bound to.
        names: further names of this machine.
    """

    host: str
    names: tuple[str, ...] = ()

    def __contains__(self, header: object) -> bool:
        """Whether a `Host` header names this server, with any port."""
        match = _HOST.fullmatch(str(header).lower())
        if match is None:
            return False
        name = match[1]
        known = {*_LOOPBACK, bracketed(self.host.lower()), *(one.lower() for one in self.names)}
        # Bound to every address, each of them is fine: a number cannot be rebound.
        return name in known or (self.host in ("0.0.0.0", "::") and _is_number(name))  # noqa: S104


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class Guard:
    """Refuses what does not come from a page of this server, and sets the headers of every answer.

    Args:
        app: what is guarded.
        hosts: names of this server.
        pages: paths that a link from elsewhere may open.
    """

    def __init__(self, app: App, hosts: TrustedHosts, pages: Iterable[str]):
        self.app, self.hosts, self.pages = app, hosts, frozenset(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # no page of ours opens one
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
        body = _LimitedBody(receive, _with_headers(send), _most_bytes(scope))
        try:
            await self.app(scope, body.receive, body.send)
        except ClientDisconnect:
            pass  # nobody is there to be answered
        except Exception:
            if not body.is_refused:  # else it has only heard that nobody listens any more
                raise

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Status and reason when the request is refused."""
        hosts = _values(scope, b"host")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return 400, "this server does not go by that name; open the address that `tunesmith ui` printed"
        if self._is_foreign(scope, hosts[0]):
            return 403, "refused: the request comes from a page of another site"
        return _without_length(scope) if self._is_open(scope["path"]) else (404, "there is nothing at this address")

    def _is_open(self, path: str) -> bool:
        """Whether a page of ours, or `gradio_client`, asks for such a path."""
        if path.startswith(_API):
            return path.split("/")[2] in _API_NAMES
        name = path.rstrip("/") or "/"
        return name in self.pages or name in _FILES or path.startswith(_FOLDERS)

    def _is_foreign(self, scope: Scope, host: str) -> bool:
        """Whether another site's page sent the request; following a link to a page is fine."""
        reads = scope["method"] in ("GET", "HEAD")
        mode, target = _value(scope, b"sec-fetch-mode"), _value(scope, b"sec-fetch-dest")
        if reads and scope["path"] in self.pages and mode in ("", "navigate") and target in ("", "document"):
            return False
        origins = _values(scope, b"origin")
        return any(not _is_origin_of(origin, host) for origin in origins) or (
            _value(scope, b"sec-fetch-site") in ("cross-site", "same-site")
        )


def _is_origin_of(origin: str, host: str) -> bool:
    scheme, mark, authority = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    return bool(mark and port) and authority.removesuffix(str(port)) == host.lower().removesuffix(str(port))


def _most_bytes(scope: Scope) -> int:
    """Bytes that the body of a request may have."""
    if scope["method"] in _READS:
        return 0
    return {UPLOAD_PATH: MAX_UPLOAD + MAX_BODY, LOGIN_PATH: MAX_LOGIN}.get(scope["path"].rstrip("/"), MAX_BODY)


def _without_length(scope: Scope) -> tuple[int, str] | None:
    """A refusal of a body that does not say how large it is, says it twice, or is too large."""
    if scope["method"] in _READS:
        return None
    length, most = _value(scope, b"content-length"), _most_bytes(scope)
    if not (length.isascii() and length.isdigit()):
        return 411, "the request does not say its length; send a Content-Length"
    if _values(scope, b"transfer-encoding"):
        return 400, "the request says its length in two ways; send a Content-Length and no Transfer-Encoding"
    return (413, _too_large(most)) if int(length[:20]) > most else None


def _too_large(most: int) -> str:
    return f"the request is larger than {most:,} bytes"


class _LimitedBody:
    """A request whose bytes are counted as they come: past the limit it is answered 413, and the app hears no more.

    Args:
        receive: of the request.
        send: of the request.
        most: bytes that its body may have.
    """

    def __init__(self, receive: Receive, send: Send, most: int):
        self._receive, self._send, self._most = receive, send, most
        self._bytes = 0
        self._is_answered = False
        self.is_refused = False

    async def receive(self) -> MutableMapping[str, Any]:
        """The next message of the client; a disconnect once it has sent too much."""
        message = await self._receive()
        self._bytes += len(message.get("body", b""))
        if self._bytes > self._most and not self.is_refused:
            self.is_refused = True
            if not self._is_answered:
                await answer(self._send, 413, _too_large(self._most), connection="close")
        return {"type": "http.disconnect"} if self.is_refused else message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Sends what the app answers, unless the request has been refused meanwhile."""
        self._is_answered = True
        if not self.is_refused:
            await self._send(message)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def _value(scope: Scope, name: bytes) -> str:
    """The header, in lower case; empty where it is missing."""
    return ", ".join(_values(scope, name)).lower()


def _with_headers(send: Send) -> Send:
    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            ours = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            names = {name for name, _ in ours}
            # Gradio lets other origins read what it answers; the pages need no such leave.
            others = [
                (key, value) for key, value in message.get("headers", [])
                if bytes(key).lower() not in names and not bytes(key).lower().startswith(b"access-control-")
            ]  # fmt: skip
            message = {**message, "headers": [*others, *ours]}
        await send(message)

    return sending


async def answer(send: Send, status: int, words: str, **headers: str) -> None:
    """Sends a whole answer of one line of text."""
    body = (words + "\n").encode()
    given = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **headers}
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


# -- the password ----------------------------------------------------------------------------------------------------


class Password:
    """Tells whether a user name and a password are the right ones, in a time that tells nothing.

    Args:
        user: the one user.
        password: its password.
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
class _Tries:
    """What is known of one address, or of all."""

    most: int
    wrong: list[float] = field(default_factory=list)
    until: float = 0.0
    pauses: int = 0


class Throttle:
    """Counts wrong passwords; after too many within a minute every try is refused until a growing pause is over.

    Args:
        clock: seconds that never go back.
    """

    MOST = 5
    """Wrong passwords of one address within `WINDOW`."""
    MOST_OF_ALL = 20
    """Those of all addresses together."""
    WINDOW = 60.0
    PAUSE = 60.0
    """Seconds of the first pause; each further one is twice as long."""
    LONGEST = 3600.0
    """Seconds of the longest pause, and of the quiet after which earlier pauses are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self._all = _Tries(self.MOST_OF_ALL)
        self._by_address: dict[str, _Tries] = {}

    def begin(self, address: str) -> float:
        """Takes in a try as a wrong one, unless a pause is on.

        Returns:
            Seconds until the next try; 0 when this one may go on.
        """
        self._forget()
        own = self._by_address.setdefault(_network(address), _Tries(self.MOST))
        now = self.clock()
        wait = max(own.until, self._all.until) - now
        if wait > 0:
            return wait
        for tries in (own, self._all):
            tries.wrong = [*(then for then in tries.wrong if now - then < self.WINDOW), now]
            if len(tries.wrong) >= tries.most:
                tries.until = now + min(self.LONGEST, self.PAUSE * 2**tries.pauses)
                tries.pauses, tries.wrong = tries.pauses + 1, []
        return 0.0

    def right(self, address: str) -> None:
        """The try that began last was right: the address starts afresh, and all have one wrong try less."""
        self._by_address.pop(_network(address), None)
        if self._all.wrong:
            self._all.wrong.pop()

    def _forget(self) -> None:
        now = self.clock()
        over = now - self.LONGEST
        self._by_address = {
            address: tries
            for address, tries in self._by_address.items()
            if tries.until > over or any(then > now - self.WINDOW for then in tries.wrong)
        }
        if self._all.until <= over:
            self._all.pauses = 0


def _network(address: str) -> str:
    """The address, or for IPv6 its network: whoever has one address of that has them all."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((number, 64), strict=False)) if number.version == 6 else address


class ThrottledLogin:
    """Answers 429 to logins while the throttle has a pause.

    Args:
        app: what is guarded; its login answers 200 to the right password alone.
        throttle: counts the wrong ones.
    """

    def __init__(self, app: App, throttle: Throttle):
        self.app, self.throttle = app, throttle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].rstrip("/") != LOGIN_PATH:
            await self.app(scope, receive, send)
            return
        address = (scope.get("client") or ("",))[0]
        wait = self.throttle.begin(address)
        if wait > 0:
            seconds = int(wait) + 1
            words = f"too many wrong passwords; try again in {seconds} s"
            await answer(send, 429, words, retry_after=str(seconds))
            return

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                self.throttle.right(address)
            await send(message)

        await self.app(scope, receive, sending)


class LoggedIn:
    """Answers 401 to whoever calls the pages' functions without having logged in, before a byte of the body is read.

    Args:
        app: what is guarded.
        is_logged_in: whether a request's cookies are those of somebody who has logged in.
    """

    def __init__(self, app: App, is_logged_in: Callable[[Mapping[str, str]], bool]):
        self.app, self.is_logged_in = app, is_logged_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_API):
            cookies = cookie_parser("; ".join(_values(scope, b"cookie")))
            if not self.is_logged_in(cookies):
                await answer(send, 401, "log in first; open the address that `tunesmith ui` printed")
                return
        await self.app(scope, receive, send)
