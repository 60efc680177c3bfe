"""The answers to the same prompts at several steps (`answers.jsonl`), as the Run page shows them by prompt."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from app.runs.answers import cut_text, whole_number
from app.runs.safe_read import Stamp, read_span, stamp
from trainers.run.folder import RunFolder

MOST_STEPS = 50
"""Steps that are listed: the first, and the newest."""
MOST_PROMPTS = 100
MOST_HEAD = 1 << 22
"""Bytes of the file in which its prompts are read: the first ones."""
MOST_BYTES = 1 << 24
"""Bytes of the file in which its answers are read: the last ones."""
_LABEL = 100
"""Characters of the name of a row."""
_CUT = "[…]"

View = dict[str, Any]
Segment = tuple[str, bool]
"""A part of a text, and whether it differs from the text of the step before."""


def prompt_answers(run: RunFolder, prompt: Any = 0, since: Any = None) -> View:
    """The answers to one prompt by step, and what changed from each step to the next.

    Args:
        run: the run.
        prompt: which of its prompts, from 0; beyond them, the last.
        since: `token` of what the page shows already.

    Returns:
        `same` if that has not changed; else `token`, `full` (whether all follows; otherwise only `listed`, of the steps
        after those that the page has), `prompts` (file and line of each; empty if there are none), `prompt` (which),
        `text` (of the prompt), `expected` (the answer in the data, or ""), `steps` (how many have an answer), and
        `listed`, oldest first: `step`, `ended`, `same` (as at the step before), and `parts` of the answer, pairs of a
        text and whether it is new.

    Raises:
        ConfigError: if the prompt is not a whole number.
    """
    index, version = whole_number("prompt", prompt), stamp(run.answers)
    groups, older = _groups(run.answers, version) if version else ([], False)
    if not groups:
        return {"token": "none", "full": True, "prompts": []}
    index = min(index, len(groups) - 1)
    group = groups[index]
    newest = group["answers"][1 - MOST_STEPS :]
    # A resume replaces the file, and else it only grows: the page keeps what it has, and gets the steps after it.
    identity = hashlib.sha256(json.dumps([group["row"], group["text"]]).encode()).hexdigest()[:16]
    key = f"{version[0] if version else 0}/{identity}/{index}/{len(groups)}/{older:d}"
    token = f"{key}/{newest[-1]['step']}"
    if since == token:
        return {"same": True}
    known_key, _, known_step = str(since or "")[:100].rpartition("/")
    known = known_key == key and known_step.isascii() and known_step.isdigit()
    known = known and newest[0]["step"] <= int(known_step) < newest[-1]["step"]  # no step between is left out
    listed = _listed(group["answers"], int(known_step) if known else -1, older)
    view = {"token": token, "full": not known, "older": older, "steps": len(group["answers"]), "listed": listed}
    if known:
        return view
    names = [each["row"] for each in groups]
    return {**view, "prompts": names, "prompt": index, "text": group["text"], "expected": group["expected"]}


def _listed(answers: list[View], after: int, older: bool) -> list[View]:
    """The answers of the steps after one: the newest, and the first of all unless the file has older ones."""
    listed = []
    for number, answer in enumerate(answers):
        if answer["step"] > after and ((number == 0 and not older) or number > len(answers) - MOST_STEPS):
            text = answer["text"]
            before = answers[number - 1]["text"] if number else None
            parts = [(text, False)] * bool(text) if before is None else changes(before, text)
            listed.append({"step": answer["step"], "ended": answer["ended"], "same": text == before, "parts": parts})
    return listed


@functools.lru_cache(maxsize=4096)
def changes(before: str, after: str) -> list[Segment]:
    """The second text in parts, each with whether it differs from the first; words are compared, and spaces."""
    old, new = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in (before, after))
    parts: list[Segment] = []
    for kind, _, _, start, end in SequenceMatcher(None, old, new).get_opcodes():
        if start < end:
            parts.append(("".join(new[start:end]), kind != "equal"))
    return parts


@functools.lru_cache(maxsize=8)
def _groups(path: Path, version: Stamp) -> tuple[list[View], bool]:
    """The prompts in the order of the file, each with its answers by step, and whether there are older ones.

    Leaves out what is no row, and prompts without answers. The text of a prompt that is not read is a mark.
    """
    start = max(0, version[2] - MOST_BYTES)
    head, _ = read_span(path, 0, MOST_HEAD)
    content, _ = read_span(path, start, MOST_BYTES)
    rows = _answers(content.split(b"\n")[1 if start else 0 : -1])  # without half a row at either end
    if start and rows:  # the first step may lack prompts; unless it is the only one
        rows = [row for row in rows if row[0] != rows[0][0]] or rows
    groups = _prompts(head.split(b"\n")[:-1])
    for step, row, answer, ended in rows:
        if row in groups or len(groups) < MOST_PROMPTS:
            unread = {"row": row[-_LABEL:], "text": _CUT, "expected": "", "answers": []}
            answers = groups.setdefault(row, unread)["answers"]
            if not answers or answers[-1]["step"] < step:
                answers.append({"step": step, "ended": ended, "text": answer})
    return [group for group in groups.values() if group["answers"]], start > 0


def _prompts(lines: list[bytes]) -> dict[str, View]:
    """The prompts that a file begins with, by their row."""
    groups: dict[str, View] = {}
    for line in lines:
        try:
            values = json.loads(line)
            if "step" in values or len(groups) == MOST_PROMPTS:
                break
            row, prompt, expected = (values[name] for name in ("row", "prompt", "expected"))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if all(isinstance(text, str) for text in (row, prompt, expected)):
            view = {"row": row[-_LABEL:], "text": cut_text(prompt, keep_end=True), "expected": cut_text(expected)}
            groups.setdefault(row, {**view, "answers": []})
    return groups


def _answers(lines: list[bytes]) -> list[tuple[int, str, str, bool]]:
    """Step, row, answer and whether it ended, of each line that is an answer."""
    answers = []
    for line in lines:
        try:
            values = json.loads(line)
            step, ended = whole_number("step", values["step"]), values["ended"] is True
            row, answer = values["row"], values["answer"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if isinstance(row, str) and isinstance(answer, str):
            answers.append((step, row, cut_text(answer), ended))
    return answers
