"""How the command line reports what goes wrong. Each function imports its dependencies when it runs."""

from __future__ import annotations

import contextlib
import errno
from typing import Any


def system_error(error: OSError, as_json: bool) -> int:
    """Reports an OSError that no check has caught; returns 2 if a given name is too long, otherwise 1."""
    from app.console import refuse, report_json, shortened

    subject = shortened(str(error.filename or "system"))
    if error.errno == errno.ENAMETOOLONG:
        return refused([f"{subject}: {error.strerror}; check the value"], as_json)
    line = f"{subject}: {error.strerror or error}; make room, or check its permissions"
    refuse([line])
    if as_json:
        with contextlib.suppress(OSError):  # it may be stdout that is on a full disk
            report_json({"run_dir": None, "state": "failed", "cause": line})
    return 1


def check_broke(error: Any, as_json: bool) -> int:
    """Reports a check that crashed; returns 1."""
    from app.console import clean, report_json, say

    say(clean(error.output).rstrip())
    say(clean(error.cause))
    if as_json:
        report_json({"run_dir": None, "state": "failed", "cause": error.cause})
    return 1


def mistakes_of(error: Exception) -> list[str]:
    """The lines to print for a mistake of the user's; empty for any other error."""
    if lines := [
        str(mistake) for mistake in getattr(error, "mistakes", ())
    ]:  # ConfigError, not imported here for speed
        return lines
    if not hasattr(error, "format_message"):
        return []
    text = str(error.format_message()).replace("\n", " ").strip()
    return [f"{text.rstrip('.')}; see `tunesmith --help`"] if text else []


def refused(mistakes: list[str], as_json: bool) -> int:
    """Reports mistakes of the user's; returns 2."""
    from app.console import refuse, report_json

    refuse(mistakes)
    if as_json:
        report_json({"mistakes": mistakes})
    return 2
