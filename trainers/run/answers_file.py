"""The file of the answers to the same prompts (`answers.jsonl`): its prompts, and then the answers by step.

A prompt is a line `{"row", "prompt", "expected"}`, and an answer to it `{"step", "row", "answer", "ended"}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainers.run.folder import write_atomic


@dataclass(frozen=True)
class PromptLine:
    """A prompt that is answered.

    Args:
        row: file and line of the data; in the file, another prompt of the same file and line has a number behind them.
        prompt: its text.
        expected: the answer in the data, or "".
    """

    row: str
    prompt: str
    expected: str


def forget_later(path: Path, step: int | None) -> None:
    """Removes the answers after a step, as they are trained again, and lines that a kill has cut.

    Args:
        path: the file, if there is one.
        step: the step that training goes on from; None from the beginning, which removes the file.
    """
    if step is None:
        path.unlink(missing_ok=True)
    elif path.exists():
        _replace(path, [line for row, line in _rows(path) if row.get("step", -1) <= step])


def begin_answers(path: Path, prompts: Sequence[PromptLine]) -> tuple[list[str], int, list[str]]:
    """Begins the file, or prepares it for going on: adds the prompts it lacks, and removes an incomplete last step.

    Args:
        path: the file.
        prompts: the prompts to answer.

    Returns:
        `row` of each prompt in the file, the last step that has answers (-1 without), and `row` of each of these.
    """
    rows = _rows(path) if path.exists() else []
    known = {row["row"]: PromptLine(**row) for row, _ in rows if "step" not in row}
    in_file = list(known)
    labels = [_label(prompt, known) for prompt in prompts]
    answers = [(row, line) for row, line in rows if "step" in row]
    *_, previous, last = [-1, -1, *sorted({row["step"] for row, _ in answers})]
    answered = [row["row"] for row, _ in answers if row["step"] == last]
    # Compared with the step before: an attempt may have had fewer prompts, or ended before it answered its new ones.
    due = [row["row"] for row, _ in answers if row["step"] == previous] or in_file
    if answered and set(labels).intersection(due).difference(answered):
        print(f"{path.name}: removes the answers of step {last}, which lack some of its prompts", flush=True)
        answers, last, answered = [(row, line) for row, line in answers if row["step"] != last], -1, []
    _replace(path, [_line(vars(prompt)) for prompt in known.values()] + [line for _, line in answers])
    return labels, last, answered


def add_answers(path: Path, step: int, answers: Iterable[tuple[str, str, bool]]) -> None:
    """Appends the answers of a step.

    Args:
        path: the file.
        step: steps that are trained.
        answers: of each prompt its `row` in the file, the answer, and whether that came to its end.
    """
    rows = [{"step": step, "row": row, "answer": answer, "ended": ended} for row, answer, ended in answers]
    with open(path, "ab") as file:
        file.write(b"".join(map(_line, rows)))


def _label(prompt: PromptLine, known: dict[str, PromptLine]) -> str:
    """`row` of a prompt in the file, which is added to the known ones if it is new."""
    line, number = prompt, 1
    while known.setdefault(line.row, line) != line:  # of other data, or of a file of the same name
        number += 1
        line = replace(prompt, row=f"{prompt.row} ({number})")
    return line.row


def _replace(path: Path, lines: list[bytes]) -> None:
    """Writes the lines of a file, unless it has them."""
    content = b"".join(lines)
    if not path.exists() or path.read_bytes() != content:
        write_atomic(path, content.decode())


def _rows(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """The prompts and answers of a file, each with its line."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [(row, line) for line in lines if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """A prompt or an answer; None if a kill has cut it."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else {}
        if "step" in row:
            return {"step": int(row["step"]), "row": str(row["row"])}
        return {name: str(row[name]) for name in ("row", "prompt", "expected")}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
