"""Reads the profiles of a run (`--profile_steps`): where the time went on each profiled rank."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

from app.runs.safe_read import Stamp, read_span, stamp
from trainers.run.folder import RunFolder

FOLDER = "profile"
SHARES = {
    "compute": "computing", "overlapped": "computing and communicating", "exposed": "only communicating",
    "data": "waiting for data", "host": "waiting for the host",
}  # fmt: skip
"""What a share of the time went to, by its name in the file."""
_NAME = re.compile(r"rank-(\d{1,6})\.json")
_MAX_RANKS, _MAX_OPERATORS, _MAX_BYTES = 64, 15, 1 << 16


def profiles(run: RunFolder) -> list[dict[str, Any]]:
    """The profiles of a run, by rank; files that are not profiles are left out.

    Returns:
        For each `rank`, `first_step`, `steps`, `seconds`, `shares` (fractions, as in `SHARES`), `operators` (`name`,
        `calls`, `seconds`, `share`), and `trace` (path of the trace).
    """
    try:
        names = sorted(path.name for path in (run.path / FOLDER).iterdir())
    except OSError:
        return []
    ranks = sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))[:_MAX_RANKS]
    paths = [run.path / FOLDER / f"rank-{rank}.json" for rank in ranks]
    read = [_read(path, stamp(path)) for path in paths]
    return [profile for profile in read if profile is not None]


@functools.lru_cache(maxsize=256)
def _read(path: Path, version: Stamp | None) -> dict[str, Any] | None:
    data, size = read_span(path, 0, _MAX_BYTES)
    try:
        if size > _MAX_BYTES:
            return None
        values = json.loads(data)
        return {
            "rank": int(path.stem.removeprefix("rank-")),
            "first_step": int(values["first_step"]), "steps": int(values["steps"]),
            "seconds": _number(values["seconds"]),
            "shares": {name: _number(values["shares"][name]) for name in SHARES},
            "operators": [
                {"name": str(each["name"])[:200], "calls": int(each["calls"]),
                 "seconds": _number(each["seconds"]), "share": _number(each["share"])}
                for each in values["operators"][:_MAX_OPERATORS]
            ],
            "trace": str(path.with_suffix(".trace.json.gz")),
        }  # fmt: skip
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not a number")
    return number
