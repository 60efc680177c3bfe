"""The verb `ui`: checks its arguments, binds the port, and replaces itself with the server."""

from __future__ import annotations

import getpass
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from app.console import say, shortened
from app.services.listening import HOST, listen, port_number
from trainers.run.import_path import child_environment
from trainers.run.web_host import LOOPBACK

# Heavy imports (pydantic, through the config) are left to the server; here they are needed only for errors.

DEFAULT_PORT = 7860
PASSWORD = "TUNESMITH_UI_PASSWORD"  # noqa: S105
"""Environment variable with the password for `--auth`."""
MIN_PASSWORD_LENGTH = 8


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
    listening = listen(host, number, DEFAULT_PORT)
    if host not in LOOPBACK:
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
    number = None
    try:
        number = port_number(port)
    except ValueError:
        mistakes.append(f"port={shortened(str(port))!r} is not a port; use 1 to 65535, or omit --port for a free one")
    if not HOST.fullmatch(host):
        mistakes.append(f"host={shortened(host)!r} is not a host; write an address such as 127.0.0.1, or a name")
    elif host not in LOOPBACK and user is None:
        mistakes.append(
            f"host={host} is reachable from other machines, but no password is set; add --auth USER, or omit --host"
        )
    if user is not None and not (user.strip() == user and user.isprintable() and 1 <= len(user) <= 100):
        mistakes.append(f"auth={shortened(user)!r} is not a user name; use up to 100 printable characters")
    for folder in allow:
        if not Path(os.path.expanduser(folder)).is_dir():
            mistakes.append(f"allow={shortened(str(folder))!r} is not a folder; give an existing one")
    return number, mistakes


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
