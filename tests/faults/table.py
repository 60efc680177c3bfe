"""What the fault suite injected and what it cost: one row for each fault and strategy, printed when the tests end.

`FAULT_TABLE=FILE` in the environment writes it as markdown too.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version

from trainers.run.folder import RunFolder, now

_LINE = re.compile(r"^(\S+) \[rank 0\] (?:(run) /|step (\d+) )", re.MULTILINE)
HEADINGS = ("fault", "strategy", "injected", "survived", "steps replayed", "seconds to recover (median)", "most")


@dataclass
class Noted:
    """One fault as one test injects it.

    Args:
        moments: when (seconds since the epoch) it was injected, each time.
        survived: how many of them the oracle found to have done no harm.
        replayed: steps that were computed again.
        seconds: from each of them to the first step beyond those that were done before it.
    """

    fault: str
    strategy: str
    moments: list[float] = field(default_factory=list)
    survived: int = 0
    replayed: int = 0
    seconds: list[float] = field(default_factory=list)

    def at(self, moment: float | None = None) -> None:
        """It is injected: now, unless told otherwise."""
        self.moments.append(time.time() if moment is None else moment)

    def harmless(self, run: RunFolder | None = None) -> None:
        """The oracle holds after all that was injected; `run` is given where it trained on after each fault."""
        self.survived = len(self.moments)
        if run is not None:
            log = run.log.read_text(errors="replace")
            costs = [cost(log, moment) for moment in self.moments]
            self.replayed, self.seconds = sum(steps for steps, _ in costs), [seconds for _, seconds in costs]


def cost(log: str, moment: float) -> tuple[int, float]:
    """Steps computed again after a fault, and seconds from it to the first step that had not been done by then.

    Only a later start of the run counts: steps that another rank still ended after the fault are of before it.
    """
    begun, found = [0.0], list[tuple[int, int, float]]()  # start of the run, step, time
    for stamp, run, step in _LINE.findall(log):
        clock = datetime.fromisoformat(stamp).timestamp()
        if run:
            begun.append(clock)
        else:
            found.append((len(begun) - 1, int(step), clock))
    hit = max(number for number, clock in enumerate(begun) if clock <= moment)
    reached = max((step for number, step, _ in found if number <= hit), default=0)
    last = max((step for number, step, _ in found if number == hit), default=0)
    later = [(step, clock) for number, step, clock in found if number > hit]
    beyond = [clock for step, clock in later if step > reached]
    assert beyond, f"no step beyond {reached} after the fault"
    return max(0, last - later[0][0] + 1), min(beyond) - moment


def rows(noted: Iterable[Noted]) -> list[tuple[str, ...]]:
    """The table's rows: what has the same fault and strategy is one."""
    groups: dict[tuple[str, str], list[Noted]] = {}
    for one in noted:
        groups.setdefault((one.fault, one.strategy), []).append(one)
    made = []
    for (fault, strategy), some in sorted(groups.items()):
        seconds = [second for one in some for second in one.seconds]
        times = (f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}") if seconds else ("-", "-")
        counts = (sum(len(one.moments) for one in some), sum(one.survived for one in some))
        made.append((fault, strategy, *map(str, counts), str(sum(one.replayed for one in some)), *times))
    return made


def markdown(noted: Iterable[Noted], command: str) -> str:
    """The table with what it was measured on."""
    lines = [HEADINGS, tuple("-" * len(one) for one in HEADINGS), *rows(noted)]
    names = ("torch", "accelerate", "transformers", "deepspeed")
    where = f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"
    what = ", ".join(f"{name} {version(name)}" for name in names)
    head = f"Faults injected into runs of two gloo ranks (tiny-lora, embedded model), {now()[:10]}: `{command}`."
    return f"{head}\n\n{where}, {what}.\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plain(noted: Iterable[Noted]) -> list[str]:
    """The table as lines for a terminal."""
    lines = [HEADINGS, *rows(noted)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
