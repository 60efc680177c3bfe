"""The rewards that ship with Tunesmith; each maps texts to numbers, as a reward of one's own does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trainers.config.json_schema import schema_test

Reward = Callable[..., Sequence[float]]
"""Called with `prompts`, `completions` and columns of the data by name, as far as it has such parameters."""


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


def json_schema(schema: Any) -> Reward:
    """Rewards an answer with 1 if it is nothing but JSON that fits a schema; otherwise with 0.

    Args:
        schema: the JSON Schema, by the package `jsonschema`. It may refer to its own parts; nothing is fetched.
    """
    fits = schema_test(schema)
    return lambda completions: [float(fits(text)) for text in completions]


FUNCTIONS: dict[str, Reward] = {"exact_match": exact_match, "math_verify": math_verify}
"""Those that need nothing but answers."""
