"""Which requests to a server on this machine come from its user, and not from a page of another site.

A browser sends whatever pages ask of it, also to servers on the user's machine. The pages and `tunesmith serve` share
these checks. Imports no torch.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

Scope = MutableMapping[str, Any]

SERVE_TOKEN = "TUNESMITH_SERVE_TOKEN"  # noqa: S105
"""Environment variable with the token that clients of `tunesmith serve` must send."""
SERVED_HOST = "TUNESMITH_SERVE_HOST"
"""Environment variable with the host that a model's server is bound to."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine reaches."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")


def bracketed(host: str) -> str:
    """A host as written in a URL: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class TrustedHosts:
    """Host names that browsers may use for this server; any other could be a DNS rebinding attack.

    Args:
        host: the host that the server is bound to.
        names: other names of this machine.
    """

    host: str
    names: tuple[str, ...] = ()

    def __contains__(self, header: object) -> bool:
        """Whether a `Host` header names this server, with any port."""
        match = _HOST.fullmatch(str(header).lower())
        if match is None:
            return False
        name = match[1]
        known = {*map(bracketed, LOOPBACK), bracketed(self.host.lower()), *(name.lower() for name in self.names)}
        # Bound to all addresses, any of them is fine: an IP address cannot be rebound.
        return name in known or (self.host in ("0.0.0.0", "::") and _is_number(name))  # noqa: S104


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def machine_names(host: str) -> tuple[str, ...]:
    """Names of this machine, for a server that is bound to `host`; none if no other machine reaches it."""
    return () if host in LOOPBACK else (socket.gethostname(), socket.getfqdn())


def header_values(scope: Scope, name: bytes) -> list[str]:
    """The values of a header, whose name is in lower case."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]


def is_from_other_site(scope: Scope, host: str) -> bool:
    """Whether a page of another site sent a request, by what browsers say of it and no page can change.

    Args:
        scope: the request.
        host: its `Host` header.
    """
    sites = ", ".join(header_values(scope, b"sec-fetch-site")).lower()
    return any(not _is_origin_of(origin, host) for origin in header_values(scope, b"origin")) or (
        sites in ("cross-site", "same-site")
    )


def _is_origin_of(origin: str, host: str) -> bool:
    scheme, mark, authority = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme)
    return bool(mark and port) and authority.removesuffix(str(port)) == host.lower().removesuffix(str(port))
