"""The rewards that ship with Tunesmith; each maps texts to numbers, as a reward of one's own does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Reward = Callable[..., Sequence[float]]
"""Called with the lists `prompts`, `completions` and `answer` by name, as far as it has such parameters."""


def exact_match(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 for an answer that is the one in the data, but for space around it; otherwise 0."""
    return [float(text.strip() == wanted.strip()) for text, wanted in zip(completions, answer, strict=True)]


def math_verify(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 for an answer whose last expression equals that of the one in the data, by the package `math-verify`."""
    from math_verify import parse, verify

    # Without its own time limits, which need signals of the main thread; the process has one for all of a step.
    parsed = [(parse(wanted, parsing_timeout=None), parse(text, parsing_timeout=None))
              for text, wanted in zip(completions, answer, strict=True)]  # fmt: skip
    return [float(bool(gold) and verify(gold, text, timeout_seconds=None)) for gold, text in parsed]


FUNCTIONS: dict[str, Reward] = {"exact_match": exact_match, "math_verify": math_verify}
