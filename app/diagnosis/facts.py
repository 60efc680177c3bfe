"""What a run left behind, as a diagnosis reads it: state, metrics and the log of its last attempt."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.runs.log import Line, read_log
from app.runs.runs import true_state
from trainers.run.folder import RunFolder, read_json

if TYPE_CHECKING:
    from app.runs.metrics import Curves

MAX_CAUSE = 20_000
_CHUNKS = 8
"""Chunks of the log that are read from its end."""
_SUFFIX = re.compile(r"; (?:not restarted: (?:it made no step beyond|the last 2 attempts crashed)|gave up after \d).*$")
_WRITER = re.compile(r"^(?:rank (?P<rank>\d{1,6})|launcher|machine \d+): ")
_PREFIX = re.compile(
    r"^(?:\[rank\d+\]:? ?)?(?:\[[EWIF]\d{3,8} [^\]]{0,120}\] ?|[EWIF]\d{4} [\d:.]+ +\d+ [^\]]{0,80}\] )?"
    r"(?:\[c10d\] )?"
)
"""What a rank of torchrun, and torch's own log, write before a message."""
_FLOAT = list[float | None]
_MAX_VALUE = 1e100
"""Numbers beyond it are damage: their sums and squares may be more than a float holds."""


@dataclass(frozen=True)
class Metrics:
    """The numbers of a run's steps, as few points: each is a mean over `width` steps.

    Args:
        rows: number of rows logged.
        train: columns `step`, `loss`, `learning_rate`, `data_wait`, `mfu` and others of the training rows.
        evals: columns `step` and `eval_loss` of the evaluations.
        latest: newest value of every metric.
        slow: by rank, how often it was reported as slow.
    """

    rows: int = 0
    train: dict[str, _FLOAT] = field(default_factory=dict)
    evals: dict[str, _FLOAT] = field(default_factory=dict)
    latest: dict[str, Any] = field(default_factory=dict)
    slow: dict[int, int] = field(default_factory=dict)

    def column(self, name: str) -> list[tuple[float, float]]:
        """Step and value of the points that have this metric."""
        table = self.evals if name.startswith("eval") else self.train
        pairs = zip(table.get("step", []), table.get(name, []), strict=False)
        return [
            (step, value) for step, value in pairs
            if step is not None and value is not None and abs(value) <= _MAX_VALUE
        ]  # fmt: skip

    def newest(self, name: str) -> float | None:
        """The newest value of a metric; None if there is no usable number."""
        value = self.latest.get(name)
        return float(value) if isinstance(value, int | float) and abs(value) <= _MAX_VALUE else None


def read_metrics(run: RunFolder, curves: Curves, seconds: float) -> Metrics:
    """Reads the metrics for at most `seconds`; empty while `curves` has not read all of a large file."""
    view = curves.view(run, seconds=seconds)
    if view["more"]:
        return Metrics()
    return Metrics(
        view["rows"], _means(view["train"]), _means(view["eval"]), curves.latest(run), curves.slow_ranks(run)
    )


def _means(points: dict[str, Any]) -> dict[str, _FLOAT]:
    return {name: values["mean"] if isinstance(values, dict) else values for name, values in points.items()}


def read_state(run: RunFolder) -> dict[str, Any]:
    """The true state, with `heartbeats` (by rank) and `out_of_memory` (the note of a rank, or empty) added."""
    beats: dict[int, dict[str, Any]] = {}
    for path in sorted(run.heartbeats.glob("rank-*.json"))[:1024]:
        name = path.stem.removeprefix("rank-")
        if name.isascii() and name.isdigit() and len(name) <= 6:
            beats[int(name)] = read_json(path) or {}
    return {**true_state(run), "heartbeats": beats, "out_of_memory": read_json(run.out_of_memory)}


def read_last_attempt(run: RunFolder, state: dict[str, Any]) -> list[Line]:
    """The lines that the last attempt wrote: at most the first chunk of the log and its last half MiB."""
    lines: list[Line] = []
    request: dict[str, Any] = {"after": -1}
    began = str(state.get("launched_at") or "")[:19]
    for _ in range(_CHUNKS):
        chunk = read_log(run, request)
        lines = chunk["lines"] + lines
        request = {"before": chunk["start"]}
        if not chunk["start"] or (chunk["lines"] and chunk["lines"][0].time < began):
            break
    else:
        lines = read_log(run, {"after": 0})["lines"] + lines
    return [line for line in lines if line.time >= began]


def split_cause(cause: Any) -> tuple[str, str]:
    """A state's cause without what stands around it, and the rank that it names (empty if none)."""
    text = _SUFFIX.sub("", cause[:MAX_CAUSE] if isinstance(cause, str) else "")
    text = text.partition("stopped by request; before that: ")[2] or text
    rank = ""
    while match := _WRITER.match(text):
        text, rank = text[match.end() :], match["rank"] or rank
    return text, rank


def message(line: Line) -> str:
    """The text of a log line without the prefixes of torch and torchrun."""
    return _PREFIX.sub("", line.text)
