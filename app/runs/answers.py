"""The sampled answers of a run (`rollouts/step-N.json`) by prompt, as the Run page shows them."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

from app.runs.safe_read import Stamp, read_span, stamp
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

MOST_ANSWERS = 64
"""Answers to one prompt that are listed: the best of them."""
MOST_TEXT = 4000
"""Characters of a text."""
MOST_BYTES = 1 << 26
"""Bytes of a file that is read; one has tokens and log-probabilities too, so about 40 bytes a token."""
_NAME = re.compile(r"step-([1-9]\d{0,14})\.json")

View = dict[str, Any]


def answers_view(run: RunFolder, step: Any = None, prompt: Any = 0, since: Any = None) -> View:
    """The answers to a prompt of a step, the best reward first.

    Args:
        run: the run.
        step: number of the step; None for the newest that has answers.
        prompt: which of its prompts, from 0; beyond them, the last.
        since: `token` of what the page shows already.

    Returns:
        `same` if that has not changed; else `token`, `steps` (those that have answers, oldest first), `step` (None if
        there are none), `prompts` (how many), `prompt` (which), `functions` (names of several rewards), `text` (of the
        prompt), `expected` (the answer in the data, or ""), `answers` (how many), `mean` (their reward), `equal`
        (whether all got the same), and `listed`: `text`, `reward`, `rewards` (by function), `tokens`, `ended`.

    Raises:
        ConfigError: if the step is not a number, or its file is too large or no record of answers.
    """
    steps = _steps(run.rollouts)
    number = whole_number("step", step) if step is not None else steps[-1] if steps else None
    if number is None:
        return {"token": "none", "steps": [], "step": None}
    index, path = whole_number("prompt", prompt), run.rollouts / f"step-{number}.json"
    version = stamp(path)
    token = f"{number}/{index}/{steps[0] if steps else 0}-{len(steps)}/{version}"
    if since == token:
        return {"same": True}
    if version is None:
        raise ConfigError.about("step", number, "has no answers in this run", f"the newest {len(steps)} steps are kept")
    if version[2] > MOST_BYTES:
        problem = f"has {version[2]:,} bytes of answers, and a page reads {MOST_BYTES:,}"
        raise ConfigError.about("step", number, problem, f"open {path}")
    groups, functions = _groups(path, version)
    index = min(index, len(groups) - 1)
    counts = {"prompts": len(groups), "prompt": index, "functions": functions}
    return {"token": token, "steps": steps, "step": number, **counts, **groups[index]}


def whole_number(name: str, value: Any) -> int:
    """A number of a request or file from 0; raises `ConfigError` for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 10**15:
        raise ConfigError.about(name, str(value)[:80], "is not a whole number from 0", "reload the page")
    return value


def _steps(folder: Path) -> list[int]:
    try:
        return sorted(int(match[1]) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name)))
    except OSError:
        return []


@functools.lru_cache(maxsize=8)
def _groups(path: Path, version: Stamp) -> tuple[list[View], list[str]]:
    """The answers by prompt, and the names of the rewards if there are several."""
    content, _ = read_span(path, 0, MOST_BYTES)
    try:
        values = json.loads(content)
        functions = [str(name)[:200] for name in values["by_function"]]
        by_prompt: dict[int, list[int]] = {}
        for index, prompt in enumerate(values["prompts"]):
            by_prompt.setdefault(int(prompt), []).append(index)
        groups = [_group(values, members) for members in by_prompt.values()]
        if not groups:
            raise ValueError("it has none")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError.about("step", path.stem.removeprefix("step-"), f"has answers that cannot be read: {error}",
                                f"see {path}") from None  # fmt: skip
    return groups, functions if len(functions) > 1 else []


def _group(values: View, members: list[int]) -> View:
    rewards = {index: _number(values["rewards"][index]) for index in members}
    ranked = sorted(members, key=lambda index: -rewards[index])
    prompt, _, *expected = values["texts"][members[0]]
    return {
        "text": cut_text(str(prompt), keep_end=True),
        "expected": cut_text(str(expected[0])) if expected else "",
        "answers": len(members),
        "mean": sum(rewards.values()) / len(members),
        "equal": len(set(rewards.values())) == 1,
        "listed": [
            {"text": cut_text(str(values["texts"][index][1])), "reward": rewards[index],
             "rewards": [_number(each[index]) for each in values["by_function"].values()],
             "tokens": len(values["answers"][index]), "ended": bool(values["ended"][index])}
            for index in ranked[:MOST_ANSWERS]
        ],
    }  # fmt: skip


def cut_text(text: str, keep_end: bool = False) -> str:
    """A text of about `MOST_TEXT` characters, marked where it was cut; the end of a prompt says what is asked."""
    if len(text) <= MOST_TEXT:
        return text
    return f"[…] {text[-MOST_TEXT:]}" if keep_end else f"{text[:MOST_TEXT]} […]"


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a reward is not a finite number")
    return number
