"""What the models made of the rows: read from JSON lines, and aligned between models."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.config.mistakes import ConfigError

_AGAIN = "run the evaluation again"


@dataclass(frozen=True)
class Row:
    """What a model made of a row.

    Args:
        row: the name of the row, such as `file:12`.
        source: the source of a mix that it belongs to.
        loss: nats, summed over its trained tokens.
        tokens: how many these are.
        prompt: the text before the answer.
        expected: the answer in the data.
        answer: the model's answer; None if it was not asked for one.
        ended: whether the model ended its answer by itself.
        characters: of all that is trained.
    """

    row: str
    source: str | None
    loss: float
    tokens: int
    prompt: str
    expected: str
    answer: str | None
    ended: bool
    characters: int


_TYPES: dict[str, tuple[type, ...]] = {
    "row": (str,), "source": (str, type(None)), "loss": (int, float, type(None)), "tokens": (int,), "prompt": (str,),
    "expected": (str,), "answer": (str, type(None)), "ended": (bool,),
    "characters": (int,),
}  # fmt: skip


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of JSON lines; a loss of null is one that is not finite.

    Raises:
        ConfigError: if the file cannot be read or a line is not such a row.
    """
    rows = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                rows.append(_row(line, f"{path}:{number}"))
    except (OSError, UnicodeError) as error:
        raise ConfigError.about("", None, f"{path} cannot be read: {error}", _AGAIN) from None
    return rows


def _row(line: str, where: str) -> Row:
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError.about("", None, f"{where} is no JSON", _AGAIN) from None
    if not isinstance(values, dict) or {*values} != {*_TYPES}:
        raise ConfigError.about("", None, f"{where} does not have the keys {', '.join(_TYPES)}", _AGAIN)
    for name, types in _TYPES.items():
        value = values[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ConfigError.about("", None, f"{where} has {name} of the wrong type", _AGAIN)
    if values["tokens"] < 0:
        raise ConfigError.about("", None, f"{where} has fewer than 0 tokens", _AGAIN)
    try:
        loss = float("nan") if values["loss"] is None else float(values["loss"])
    except OverflowError:
        loss = float("inf")
    return Row(**{**values, "loss": loss})


@dataclass(frozen=True)
class Aligned:
    """The rows that two models have in common, in the order of the first.

    Args:
        a: rows of the first model.
        b: the same rows of the second.
        only_a: how many rows the second lacks.
        only_b: how many rows the first lacks.
        unlike: how many rows have the same name and another expected text (but for space around it); they are in
            neither list.
    """

    a: list[Row]
    b: list[Row]
    only_a: int
    only_b: int
    unlike: int


def align(a: Sequence[Row], b: Sequence[Row]) -> Aligned:
    """Aligns the rows of two models by source and name; rows of the same name by their order."""
    by_key = dict(zip(_keys(b), b, strict=True))
    pairs = [(row, by_key.pop(key, None)) for key, row in zip(_keys(a), a, strict=True)]
    common = [(row, other) for row, other in pairs if other is not None]
    alike = [(row, other) for row, other in common if row.expected.strip() == other.expected.strip()]
    return Aligned(
        [row for row, _ in alike], [other for _, other in alike], len(pairs) - len(common), len(by_key),
        len(common) - len(alike),
    )  # fmt: skip


def _keys(rows: Iterable[Row]) -> list[tuple[str | None, str, int]]:
    seen: Counter[tuple[str | None, str]] = Counter()
    keys = []
    for row in rows:
        keys.append((row.source, row.row, seen[row.source, row.row]))
        seen[row.source, row.row] += 1
    return keys
