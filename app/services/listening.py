"""Binds the port of a server before the server is built, so that no other process takes it meanwhile.

Heavy imports (pydantic, through the config) are left to the server; here they are needed only for errors.
"""

from __future__ import annotations

import errno
import re
import socket

from app.console import say

PORTS_TRIED = 100
HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")
"""What an address or a name may look like."""


def port_number(text: str | None, lowest: int = 1) -> int | None:
    """The number of a port.

    Args:
        text: what the user wrote; None stays None.
        lowest: 0 where the system may choose, otherwise 1.

    Raises:
        ValueError: if it is no port.
    """
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else -1
    if not lowest <= number <= 65535:
        raise ValueError(text)
    return number


def listen(host: str, port: int | None, default: int) -> socket.socket:
    """A listening socket.

    Args:
        host: address or name.
        port: 0 for any free one; None for the default or the next free one.
        default: the default port.

    Raises:
        ConfigError: if the host is not of this machine, or the port is taken.
    """
    family, address = _resolve(host)
    ports = [port] if port is not None else list(range(default, default + PORTS_TRIED))
    for number in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address, number))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if error.errno != errno.EADDRINUSE:
                raise _config_error(f"host={host} port={number}: {error.strerror}; choose another") from None
            continue
        if number != default and port is None:
            say(f"port {default} is in use; using port {number}")
        return listening
    if port is not None:
        raise _config_error(f"port={port} is in use; choose another, or omit --port for a free one")
    raise _config_error(f"ports {ports[0]} to {ports[-1]} are all in use; choose another with --port")


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _config_error(f"host={host}: {error.strerror}; use an address or name of this machine") from None
    family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])


def _config_error(mistake: str) -> Exception:
    from trainers.config.mistakes import ConfigError

    return ConfigError(mistake)
