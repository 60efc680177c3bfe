"""The verb `ui`: checks what it was asked for, takes the port, and becomes the server."""

from __future__ import annotations

import errno
import getpass
import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from app.console import say, shortened
from trainers.run.import_path import child_environment

# What is heavy (pydantic, through the config) is imported by the server, and here only to refuse.

DEFAULT_PORT = 7860
PORTS_TRIED = 100
PASSWORD = "TUNESMITH_UI_PASSWORD"  # noqa: S105
"""Variable that holds the password of `--auth`."""
LEAST_PASSWORD = 8

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")


def ui_verb(
    port: str | None, host: str, user: str | None, runs_dir: Path, allow: Sequence[Path], remote_code: bool
) -> int:
    """`tunesmith ui`: on success this process becomes the server and does not come back.

    Args:
        port: where to listen; None for 7860 or the next that is free.
        host: address or name to listen on.
        user: name to ask for with the password; None for no password.
        runs_dir: folder of run folders; made when it is missing.
        allow: folders that models and data may be read from, besides this one and `runs_dir`.
        remote_code: whether `trust_remote_code` may be chosen.

    Raises:
        ConfigError: with every mistake, a line each.
    """
    number, mistakes = _check(port, host, user, allow)
    if mistakes:
        raise _refused(mistakes)
    uploads = _uploads(runs_dir)
    password = _password(user)
    listening = _listen(host, number)
    if host not in _LOOPBACK:
        say("warning: what is shown and typed goes over the network unencrypted; a tunnel or a TLS proxy hides it")
    roots = [Path.cwd(), runs_dir, *allow]
    settings = {
        "host": host,
        "socket": listening.fileno(),
        "user": user,
        "runs_dir": str(runs_dir.absolute()),
        "roots": list(dict.fromkeys(str(Path(os.path.expanduser(root)).resolve()) for root in roots)),
        "uploads": str(uploads.absolute()),
        "remote_code": remote_code,
    }
    os.set_inheritable(listening.fileno(), True)
    argv = [sys.executable, "-P", "-m", "ui.server", json.dumps(settings)]
    os.execve(sys.executable, argv, _environment(password, uploads))  # noqa: S606


def _refused(mistakes: str | list[str]) -> Exception:
    from trainers.config.options import ConfigError

    return ConfigError(mistakes)


def _environment(password: str | None, uploads: Path) -> dict[str, str]:
    """This process's, with what Gradio reads at import, and these packages first: from a clone and from a wheel."""
    ours = {
        "GRADIO_TEMP_DIR": str(uploads.absolute()),
        **({PASSWORD: password} if password else {}),
    }
    return {**child_environment(os.environ, str(Path(__file__).resolve().parents[2])), **ours}


def _check(port: str | None, host: str, user: str | None, allow: Sequence[Path]) -> tuple[int | None, list[str]]:
    """The port as a number, and what is wrong with the request."""
    mistakes = []
    if importlib.util.find_spec("gradio") is None:
        mistakes.append('gradio is not installed, and the pages need it; run: pip install "tunesmith[ui]"')
    number = int(port) if port and port.isascii() and port.isdigit() and len(port) < 6 else 0
    if port is not None and not 1 <= number <= 65535:
        mistakes.append(f"port={shortened(port)!r} is no port; use 1 to 65535, or leave --port out for a free one")
    if not _HOST.fullmatch(host):
        mistakes.append(f"host={shortened(host)!r} is no host; write an address such as 127.0.0.1, or a name")
    elif host not in _LOOPBACK and user is None:
        mistakes.append(f"host={host} lets others in, and there is no password; add --auth USER, or leave --host out")
    if user is not None and not (user.strip() == user and user.isprintable() and 1 <= len(user) <= 100):
        mistakes.append(f"auth={shortened(user)!r} is no user name; use up to 100 printable letters")
    for folder in allow:
        if not Path(os.path.expanduser(folder)).is_dir():
            mistakes.append(f"allow={shortened(str(folder))!r} is no folder; name one that is there")
    return (number or None), mistakes


def _uploads(runs_dir: Path) -> Path:
    """The folder for uploaded files, made for this user alone."""
    uploads = runs_dir / ".uploads"
    try:
        uploads.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        shown = shortened(str(runs_dir))
        raise _refused(f"runs_dir={shown!r}: {error.strerror}; name a folder that can be written") from None
    if not os.access(uploads, os.W_OK | os.X_OK):
        raise _refused(f"runs_dir={str(runs_dir)!r} cannot be written; name a folder that can")
    return uploads


def _password(user: str | None) -> str | None:
    """The password of `user`, from the environment or a prompt."""
    if user is None:
        return None
    password = os.environ.get(PASSWORD)
    if password is None:
        if not sys.stdin.isatty():
            raise _refused(f"auth={user}: there is no password; set {PASSWORD}, or start it in a terminal")
        password = getpass.getpass(f"Password for {user}: ")
    if len(password) < LEAST_PASSWORD:
        raise _refused(f"the password has {len(password)} letters; use {LEAST_PASSWORD} or more")
    return password


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket that listens already, so that nobody can take the port while the pages are built.

    Args:
        host: address or name.
        port: None for the default one, or the next that is free.
    """
    family, address = _resolve(host)
    ports = [port] if port else list(range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED))
    for number in ports:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address, number))
            listening.listen(128)
        except OSError as error:
            listening.close()
            if error.errno != errno.EADDRINUSE:
                raise _refused(f"host={host} port={number}: {error.strerror}; name another") from None
            continue
        if number != DEFAULT_PORT and not port:
            say(f"port {DEFAULT_PORT} is taken, this is port {number}")
        return listening
    if port:
        raise _refused(f"port={port} is taken; name another, or leave --port out for a free one")
    raise _refused(f"ports {ports[0]} to {ports[-1]} are all taken; name another with --port")


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _refused(f"host={host}: {error.strerror}; write an address or name of this machine") from None
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])
