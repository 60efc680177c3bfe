"""Where the seconds go between the start of a rank and the end of its first step. Standard library only."""

from __future__ import annotations

import time


class StartClock:
    """Seconds of each phase of a start, in the order in which the phases come. It runs from when it is made."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.phases: dict[str, float] = {}
        self.told = False

    def ended(self, phase: str) -> None:
        """The phase in hand is over; the parts of one that comes in several are added up."""
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.last
        self.last = now

    def first_step_ended(self, tells: bool) -> None:
        """The start is over; every further call does nothing.

        Args:
            tells: print the phases as one line, which `read_start` reads.
        """
        if self.told:
            return
        self.told = True
        self.ended("first step")
        if tells:
            parts = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.phases.items())
            print(f"{_MARK}{sum(self.phases.values()):.2f} s: {parts}", flush=True)


_MARK = "first step after "


def read_start(text: str) -> dict[str, float] | None:
    """The phases in a line that a rank printed at the end of its first step; None for any other line."""
    mark, _, parts = text.strip().partition(" s: ")
    if not mark.startswith(_MARK):
        return None
    pairs = (part.removesuffix(" s").rpartition(" ") for part in parts.split(", "))
    return {phase: float(seconds) for phase, _, seconds in pairs}
