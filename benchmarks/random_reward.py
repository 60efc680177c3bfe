"""A reward of one's own that says nothing of an answer, from which nothing can be learned: a control."""

from __future__ import annotations

import random
from collections.abc import Sequence


def random_reward(completions: Sequence[str]) -> list[float]:
    """A number from 0 to 1 for each answer, the same whenever it is given."""
    return [random.Random(text).random() for text in completions]
