"""One sentence for why a run ended, from its log and its launcher's exit status."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from trainers.run_folder import RunFolder

TAIL_BYTES = 2_000_000
MAX_CAUSE = 500
_LINE = re.compile(r"^\S+ \[(launcher|rank \d+)\] (.*)$")
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*)?$")
_ECHOES = ("ChildFailedError", "CalledProcessError", "SignalException")
# The launcher's summary of a rank without a traceback, and accelerate's own launcher of one process.
_EXIT_CODE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_DIED_WITH = re.compile(r"died with <Signals\.(\w+)")


@dataclass
class _Trace:
    """A traceback being read: where it began, and its last exception so far."""

    start: int
    raised: str = ""
    open: bool = True


def cause_of(run: RunFolder, offset: int, status: int, otherwise: str = "") -> str:
    """Why the launcher's processes ended without saying so themselves.

    Args:
        run: its log is read.
        offset: byte of the log at which this attempt begins.
        status: the launcher's exit status; negative for a signal.
        otherwise: the answer where neither the log nor a signal tells more.
    """
    lines = _lines(run.log, offset)
    return (
        _first_exception(lines) or _killed_rank(lines) or _killed_launcher(status) or otherwise
        or f"the launcher ended with exit status {status} and no traceback; the log's last lines may tell more"
    )  # fmt: skip


def _lines(log: Path, offset: int) -> list[tuple[str, str]]:
    try:
        with open(log, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(offset, size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    matches = (_LINE.match(line) for line in text.splitlines())
    return [(match[1], match[2]) for match in matches if match]


def _first_exception(lines: list[tuple[str, str]]) -> str:
    """`rank 1: ValueError: text` of the traceback that began first; the others are often its consequences."""
    traces: dict[str, _Trace] = {}
    for index, (who, text) in enumerate(lines):
        text = re.sub(r"^\[rank\d+\]:\s?", "", text)
        trace = traces.get(who)
        if text.startswith("Traceback (most recent call last)"):
            traces[who] = trace or _Trace(index)
            traces[who].open = True
        elif trace and trace.open and _RAISED.match(text):
            trace.open = False
            trace.raised = trace.raised if text.partition(":")[0].rpartition(".")[2] in _ECHOES else text
    told = [(who, trace) for who, trace in traces.items() if trace.raised]
    if not told:
        return ""
    who, trace = min(told, key=lambda pair: (pair[0] == "launcher", pair[1].start))
    return f"{who}: {trace.raised}"[:MAX_CAUSE]


def _killed_rank(lines: list[tuple[str, str]]) -> str:
    for _, text in lines:
        if match := _EXIT_CODE.search(text):
            code, rank = int(match[1]), match[2]
            how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit status {code}"
            return f"rank {rank} {how}"
        if match := _DIED_WITH.search(text):
            return f"rank 0 was killed by {match[1]}"
    return ""


def _killed_launcher(status: int) -> str:
    return f"the launcher was killed by {_signal_name(-status)}" if status < 0 else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
