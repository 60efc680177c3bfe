"""Starts the process that computes rewards, and asks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainers.run.errors import TrainingError
from trainers.run.function_process import FunctionProcess


class RewardProcess:
    """Computes rewards in a process of its own, which starts with the first request.

    Args:
        names: rewards that ship with Tunesmith, or `path.py:function`.
        timeout: seconds that the answers of a step may take.
        schema: file of the JSON Schema, for the reward `json_schema`.
    """

    def __init__(self, names: Sequence[str], timeout: float, schema: str | None = None):
        too_slow = (
            f"took more than reward_timeout={timeout:g} s for the answers of a step; make them faster, or raise it"
        )
        self._process = FunctionProcess(names, "rewards", timeout, too_slow, schema)

    def compute(
        self, prompts: Sequence[str], answers: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> dict[str, list[float]]:
        """The rewards of each function.

        Args:
            prompts: the text that each answer follows.
            answers: the answers.
            columns: columns of the data that the functions read, such as `answer`: for each answer the JSON value of
                its row.

        Raises:
            TrainingError: if a function fails, gives no numbers, takes too long or too much memory.
        """
        rewards = self._process.ask({"prompts": list(prompts), "completions": list(answers), **columns})
        if "failed" in rewards:
            raise TrainingError(f"the reward {rewards['failed']} failed: {rewards['error']}")
        return rewards

    def close(self) -> None:
        """Ends the process."""
        self._process.close()
