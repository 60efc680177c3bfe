"""Measures the time between the start of a rank and the end of its first step. Standard library only."""

from __future__ import annotations

import time


class StartupTimer:
    """Seconds of each phase of startup, in order; starts when it is created."""

    def __init__(self) -> None:
        self.last = time.perf_counter()
        self.phases: dict[str, float] = {}
        self.reported = False

    def ended(self, phase: str) -> None:
        """Ends the current phase; a phase that ends several times is summed."""
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.last
        self.last = now

    def first_step_ended(self, report: bool) -> None:
        """Ends the startup; further calls do nothing.

        Args:
            report: print the phases as one line, which `read_start` parses.
        """
        if self.reported:
            return
        self.reported = True
        self.ended("first step")
        if report:
            parts = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.phases.items())
            print(f"{_MARK}{sum(self.phases.values()):.2f} s: {parts}", flush=True)


_MARK = "first step after "


def read_start(text: str) -> dict[str, float] | None:
    """Parses the line that a rank prints at the end of its first step; None for any other line."""
    mark, _, parts = text.strip().partition(" s: ")
    if not mark.startswith(_MARK):
        return None
    pairs = (part.removesuffix(" s").rpartition(" ") for part in parts.split(", "))
    return {phase: float(seconds) for phase, _, seconds in pairs}
