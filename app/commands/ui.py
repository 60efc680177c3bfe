"""The verb `ui`: checks its arguments, binds the port, and replaces itself with the server."""

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

# Heavy imports (pydantic, through the config) are left to the server; here they are needed only for errors.

DEFAULT_PORT = 7860
PORTS_TRIED = 100
PASSWORD = "TUNESMITH_UI_PASSWORD"  # noqa: S105
"""Environment variable with the password for `--auth`."""
MIN_PASSWORD_LENGTH = 8

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")


def ui_verb(
    port: str | None, host: str, user: str | None, runs_dir: Path, allow: Sequence[Path], remote_code: bool
) -> int:
    """`tunesmith ui`: on success this process becomes the server and does not return.

    Args:
        port: port to listen on; None for 7860 or the next free one.
        host: address or name to listen on.
        user: user name to log in with; None for no login.
        runs_dir: folder of run folders; created if missing.
        allow: folders that models and data may be read from, besides the current folder and `runs_dir`.
        remote_code: whether `trust_remote_code` may be chosen.

    Raises:
        ConfigError: with one line per mistake.
    """
    number, mistakes = _check(port, host, user, allow)
    if mistakes:
        raise _config_error(mistakes)
    uploads = _uploads(runs_dir)
    password = _password(user)
    listening = _listen(host, number)
    if host not in _LOOPBACK:
        say("warning: traffic to this server is not encrypted; use an SSH tunnel or a TLS proxy")
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


def _config_error(mistakes: str | list[str]) -> Exception:
    from trainers.config.mistakes import ConfigError

    return ConfigError(mistakes)


def _environment(password: str | None, uploads: Path) -> dict[str, str]:
    """This process's environment with what Gradio reads at import, and these packages first on the path."""
    settings = {
        "GRADIO_TEMP_DIR": str(uploads.absolute()),
        **({PASSWORD: password} if password else {}),
    }
    return {**child_environment(os.environ, str(Path(__file__).resolve().parents[2])), **settings}


def _check(port: str | None, host: str, user: str | None, allow: Sequence[Path]) -> tuple[int | None, list[str]]:
    """The port as a number, and a line per mistake."""
    mistakes = []
    if importlib.util.find_spec("gradio") is None:
        mistakes.append('gradio is not installed, but the pages need it; run: pip install "tunesmith[ui]"')
    number = int(port) if port and port.isascii() and port.isdigit() and len(port) < 6 else 0
    if port is not None and not 1 <= number <= 65535:
        mistakes.append(f"port={shortened(port)!r} is not a port; use 1 to 65535, or omit --port for a free one")
    if not _HOST.fullmatch(host):
        mistakes.append(f"host={shortened(host)!r} is not a host; write an address such as 127.0.0.1, or a name")
    elif host not in _LOOPBACK and user is None:
        mistakes.append(
            f"host={host} is reachable from other machines, but no password is set; add --auth USER, or omit --host"
        )
    if user is not None and not (user.strip() == user and user.isprintable() and 1 <= len(user) <= 100):
        mistakes.append(f"auth={shortened(user)!r} is not a user name; use up to 100 printable characters")
    for folder in allow:
        if not Path(os.path.expanduser(folder)).is_dir():
            mistakes.append(f"allow={shortened(str(folder))!r} is not a folder; give an existing one")
    return (number or None), mistakes


def _uploads(runs_dir: Path) -> Path:
    """The folder for uploaded files, created with access for this user only."""
    uploads = runs_dir / ".uploads"
    try:
        uploads.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        folder = shortened(str(runs_dir))
        raise _config_error(f"runs_dir={folder!r}: {error.strerror}; give a writable folder") from None
    if not os.access(uploads, os.W_OK | os.X_OK):
        raise _config_error(f"runs_dir={str(runs_dir)!r} is not writable; give a writable folder")
    return uploads


def _password(user: str | None) -> str | None:
    """The password of `user`, from the environment or a prompt."""
    if user is None:
        return None
    password = os.environ.get(PASSWORD)
    if password is None:
        if not sys.stdin.isatty():
            raise _config_error(f"auth={user}: no password is set; set {PASSWORD}, or start in a terminal")
        password = getpass.getpass(f"Password for {user}: ")
    if len(password) < MIN_PASSWORD_LENGTH:
        raise _config_error(f"the password has {len(password)} characters; use {MIN_PASSWORD_LENGTH} or more")
    return password


def _listen(host: str, port: int | None) -> socket.socket:
    """Returns a listening socket, so that no other process takes the port while the pages are built.

    Args:
        host: address or name.
        port: None for the default port or the next free one.
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
                raise _config_error(f"host={host} port={number}: {error.strerror}; choose another") from None
            continue
        if number != DEFAULT_PORT and not port:
            say(f"port {DEFAULT_PORT} is in use; using port {number}")
        return listening
    if port:
        raise _config_error(f"port={port} is in use; choose another, or omit --port for a free one")
    raise _config_error(f"ports {ports[0]} to {ports[-1]} are all in use; choose another with --port")


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _config_error(f"host={host}: {error.strerror}; use an address or name of this machine") from None
    family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])
