"""Determines in one sentence why a run ended, from its log and its launcher's exit status."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainers.run.folder import RunFolder

TAIL_BYTES = 2_000_000
MAX_CAUSE = 500
_LINE = re.compile(r"^\S+ \[(launcher|rank \d+)\] (.*)$")
_RAISED = re.compile(r"^(?:(?:[A-Za-z_]\w*\.)*[A-Z]\w*|(?:[A-Za-z_]\w*\.)+[a-z]\w*)(?:: .*)?$")  # or socket.gaierror
# Errors that a rank reports when another rank has exited: consequences, not the cause.
_CONSEQUENCE = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|timeout)|remote process|gloo|nccl|DistBackendError",
    re.IGNORECASE,
)
_ECHOES = ("ChildFailedError", "CalledProcessError", "SignalException")
# torchrun names one failed rank at once, and all of them in its summary: those that it ended itself among them.
_EXIT_CODE = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<rank>\d+)")
_SUMMARY_RANK = re.compile(r"  rank      : \d+ \(local_rank: (?P<rank>\d+)\)$")
_SUMMARY_CODE = re.compile(r"  exitcode  : (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)")
_CLOSED = re.compile(r"Sending process (\d+) closing signal ")
_MACHINE = re.compile(r"(machine \d+): ")  # marks lines of a launcher that is not machine 0's
_MEMORY = " (manually, or by the system when memory ran out)"
# What accelerate's launcher says of a single process.
_DIED_WITH = re.compile(r"died with <Signals\.(\w+)")


@dataclass
class _Trace:
    """The tracebacks of one process: index of the first line, last exception so far, whether one is still open."""

    start: int
    raised: str = ""
    open: bool = True


def cause_of(run: RunFolder, offset: int, status: int, otherwise: str = "") -> str:
    """Why the launcher's processes ended, where rank 0 did not record it.

    Args:
        run: the run, whose log is read.
        offset: byte of the log at which this attempt begins.
        status: the launcher's exit status; negative for a signal.
        otherwise: the answer if neither the log nor a signal shows a cause.
    """
    lines = _lines(run.log, offset)
    raised = _exceptions(lines)
    # From the most to the least specific: an exception that is no mere consequence, a rank killed by a signal (whose
    # victims then report lost connections), any exception, a rank's exit status, a launcher killed by a signal.
    return (
        _origin(raised) or _killed_rank(lines, by_signal=True) or (raised and raised[0])
        or _with_last_words(_killed_rank(lines, by_signal=False), lines) or _killed_launcher(status) or otherwise
        or _with_last_words(f"the launcher ended with exit status {status} and no traceback", lines)
    )  # fmt: skip


def root_cause(cause: str, run: RunFolder, offset: int) -> str:
    """The error of the rank that failed first, if `cause` is only a consequence of it; otherwise `cause`."""
    if not _CONSEQUENCE.search(cause):
        return cause
    lines = _lines(run.log, offset)
    return _origin(_exceptions(lines)) or _killed_rank(lines, by_signal=True) or cause


def _origin(raised: list[str]) -> str:
    return next((error for error in raised if not _CONSEQUENCE.search(error)), "")


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


def _exceptions(lines: list[tuple[str, str]]) -> list[str]:
    """The last exception of each process as `rank 1: ValueError: text`, in the order of their first tracebacks.

    Those of the launcher come last.
    """
    traces: dict[str, _Trace] = {}
    for index, (source, text) in enumerate(lines):
        text = re.sub(r"^\[rank\d+\]:\s?", "", text)
        trace = traces.get(source)
        if text.startswith("Traceback (most recent call last)"):
            traces[source] = trace or _Trace(index)
            traces[source].open = True
        elif trace and trace.open and _RAISED.match(text):
            trace.open = False
            trace.raised = trace.raised if text.partition(":")[0].rpartition(".")[2] in _ECHOES else text
    errors = [(name == "launcher", trace.start, name, trace.raised) for name, trace in traces.items() if trace.raised]
    return [f"{name}: {raised}"[:MAX_CAUSE] for _, _, name, raised in sorted(errors)]


def _killed_rank(lines: list[tuple[str, str]], by_signal: bool) -> str:
    """How a rank ended, by a signal or with an exit status: the first that the launcher reports; empty if none did."""
    for machine, rank, code in _reported_ranks(lines):
        if (code < 0) == by_signal:
            how = f"was killed by {_signal_name(-code)}" if by_signal else f"ended with exit status {code}"
            return f"local rank {rank} of {machine} {how}" if machine else f"rank {rank} {how}"
    for _, text in lines if by_signal else ():
        if match := _DIED_WITH.search(text):
            return f"rank 0 was killed by {match[1]}" + _MEMORY * (match[1] == "SIGKILL")
    return ""


def _reported_ranks(lines: list[tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    """Machine, local rank and exit status of the ranks that failed; negative for a signal.

    torchrun orders failures by whole seconds: where a rank is killed and another loses its connection to it before
    torchrun looks, it may name the other. The summary names both.
    """
    closed, ranks = set[tuple[str, str]](), dict[str, str]()  # processes and ranks are numbered on each machine
    for source, text in lines:
        if source != "launcher":
            continue
        machine = match[1] if (match := _MACHINE.match(text)) else ""
        if match := _CLOSED.search(text):
            closed.add((machine, match[1]))
        elif match := _SUMMARY_RANK.search(text):
            ranks[machine] = match["rank"]
        elif match := _EXIT_CODE.search(text):
            yield machine, match["rank"], int(match["code"])
        elif (match := _SUMMARY_CODE.search(text)) and machine in ranks and (machine, match["pid"]) not in closed:
            yield machine, ranks[machine], int(match["code"])


def _killed_launcher(status: int) -> str:
    return f"the launcher was killed by {_signal_name(-status)}" if status < 0 else ""


def _with_last_words(cause: str, lines: list[tuple[str, str]]) -> str:
    """Adds the last line before the launcher's own summary, such as why a program could not be started."""
    last = ""
    for source, text in lines:
        if source == "launcher" and (_EXIT_CODE.search(text) or text.startswith("Traceback (most recent call last)")):
            break
        last = text.strip() or last
    return f"{cause}; the last line of the log: {last}"[:MAX_CAUSE] if cause and last else cause


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name + _MEMORY * (number == signal.SIGKILL)
    except ValueError:
        return f"signal {number}"
