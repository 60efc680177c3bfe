"""Progress of a foreground run: a progress bar on a terminal, the log lines of rank 0 elsewhere."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from app.console import clean, say
from app.launch.supervisor import Listener
from app.runs.runs import Tail
from trainers.config.objectives import WATCHED
from trainers.run.folder import RunFolder, read_json

if TYPE_CHECKING:
    from rich.progress import Progress


# Beginnings of rank 0's log lines that every display shows.
_NOTED = ("warning:", "checkpoint ", "there is no checkpoint", "the best checkpoint")
_NARROW = 60
_BAR_AND_REST = 105


@contextlib.contextmanager
def progress_display(run: RunFolder, quiet: bool, printed: Sequence[str] = ()) -> Iterator[Listener]:
    """Yields a listener that shows the progress of a run on stderr.

    Args:
        run: the run; earlier log lines and metrics are not shown.
        quiet: show only notes and warnings.
        printed: lines that have already been printed.
    """
    if quiet:
        yield _QuietDisplay(run, printed)
    elif sys.stderr.isatty():
        progress = _bar()
        progress.start()
        try:
            yield _TerminalDisplay(run, progress, printed)
        finally:
            with contextlib.suppress(OSError):  # the terminal may have hung up
                progress.stop()
    else:
        yield _PlainDisplay(run, printed)


def _end_of(run: RunFolder, name: str) -> Tail:
    path = run.path / name
    return Tail(path, path.stat().st_size if path.exists() else 0)


class _FirstRank:
    """New lines of rank 0 in the log, without their timestamps.

    Args:
        run: the run.
        printed: lines to leave out.
    """

    def __init__(self, run: RunFolder, printed: Sequence[str]):
        self.log = _end_of(run, "log.txt")
        self.printed = set(printed)

    def lines(self, starts: tuple[str, ...] = ("",)) -> Iterator[str]:
        """New lines that begin with one of `starts`."""
        for line in self.log.lines():
            _, mark, message = line.partition(" [rank 0] ")
            if mark and message.startswith(starts) and clean(message) not in self.printed:
                yield clean(message)


class _QuietDisplay:
    """Shows notes, and important lines of rank 0."""

    def __init__(self, run: RunFolder, printed: Sequence[str] = ()):
        self.rank = _FirstRank(run, printed)

    def __call__(self, kind: str, text: str) -> None:
        for line in self.rank.lines(_NOTED):
            say(line)
        if kind == "note":
            say(text)


class _PlainDisplay:
    """Shows notes, and all log lines of rank 0."""

    def __init__(self, run: RunFolder, printed: Sequence[str] = ()):
        self.rank = _FirstRank(run, printed)

    def __call__(self, kind: str, text: str) -> None:
        for line in self.rank.lines():
            say(line)
        if kind == "note":
            say(text)


def _bar(width: int | None = None) -> Progress:
    """A progress bar that fits `width` columns (default: the terminal's); step count and loss come first."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    width = console.width if width is None else width
    doing, steps = TextColumn("{task.description}"), MofNCompleteColumn()
    measure = TextColumn("{task.fields[measure]}")
    columns: tuple[ProgressColumn, ...] = (doing, steps, measure)
    if width >= _NARROW:
        doing = TextColumn("{task.description:<10}")
        bar = BarColumn(max(4, min(40, 40 - (_BAR_AND_REST - width))))
        rate = () if width < 80 else (TextColumn("{task.fields[rate]} tok/s"),)
        columns = (doing, bar, steps, measure, *rate, TimeElapsedColumn(), TextColumn("left {task.fields[eta]}"))
    return Progress(*columns, console=console)


class _TerminalDisplay:
    """A progress bar fed from `metrics.jsonl`, `state.json` and the heartbeat of rank 0.

    Args:
        run: the run.
        progress: the started progress bar.
        printed: lines that have already been printed.
    """

    def __init__(self, run: RunFolder, progress: Progress, printed: Sequence[str] = ()):
        self.run, self.progress = run, progress
        self.rank = _FirstRank(run, printed)
        self.metrics = _end_of(run, "metrics.jsonl")
        self.task = progress.add_task("starting", total=None, measure="loss -", rate="-", eta="-")

    def __call__(self, kind: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may have hung up; the run must not crash because of it
            for line in self.rank.lines((*_NOTED, "resumed from")):
                self.progress.console.print(line, markup=False, highlight=False)
            if kind == "note":
                self.progress.console.print(text, markup=False)
            self._update()

    def _update(self) -> None:
        state = self.run.read_state() or {}
        beat = read_json(self.run.heartbeats / "rank-0.json") or {}
        numbers: dict[str, Any] = {}
        for line in self.metrics.lines():
            with contextlib.suppress(ValueError):
                numbers.update(_fields(json.loads(line)))
        step = max(int(state.get("step") or 0), int(beat.get("step") or 0))
        self.progress.update(
            self.task, completed=step, total=state.get("total_steps"), description=_doing(state, beat), **numbers
        )


def _doing(state: dict[str, Any], beat: dict[str, Any]) -> str:
    """The current activity in one word: the state, or a long section of a running run."""
    if state.get("state") != "running":
        return clean(str(state.get("state") or "starting"))
    return str(beat["section"]) if beat.get("section") in ("evaluation", "save", "export") else "training"


def _fields(row: Any) -> dict[str, str]:
    """The fields of the progress bar that a metrics row updates."""
    texts: dict[str, str] = {}
    if not isinstance(row, dict):
        return texts
    name = next((name for name in WATCHED if isinstance(row.get(name), int | float)), None)
    if name:
        texts["measure"] = f"{name} {row[name]:.4f}"
    rate = row.get("recent_tokens_per_second", row.get("tokens_per_second"))
    if isinstance(rate, int | float):
        texts["rate"] = f"{rate:,.0f}"
    if isinstance(row.get("eta_s"), int | float):
        texts["eta"] = _duration(row["eta_s"])
    return texts


def _duration(seconds: float) -> str:
    minutes, remainder = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"
