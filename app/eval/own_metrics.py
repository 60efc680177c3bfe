"""Metrics of one's own: `path.py:function`, called in a process of its own as rewards are.

    def length_ratio(answers, expected):
        return [len(a) / max(len(e), 1) for a, e in zip(answers, expected)]

It gets lists `prompts`, `answers` and `expected` as far as it has such parameters, and returns a number for each row.
The metric is their mean, and more counts as better. Only the command line may name such a file: it runs with the
user's rights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

from app.eval.metrics import OPTION
from app.eval.rows import Row
from trainers.config.mistakes import ConfigError, Mistakes, errors_about
from trainers.config.objective_file import split_objective
from trainers.config.reward_file import reward_parameters
from trainers.run.errors import TrainingError
from trainers.run.function_process import FunctionProcess

PARAMETERS = ("prompts", "answers", "expected")
TIMEOUT = 600.0
"""Seconds that the answers of one model may take."""


def own_metrics(names: Iterable[str]) -> list[str]:
    """Those of some metrics that are `path.py:function`."""
    return [name for name in names if split_objective(name) is not None]


def check_own_metrics(names: Iterable[str]) -> None:
    """Checks the files of metrics without running them.

    Raises:
        ConfigError: if a file cannot be read, has no such function, or the function has other parameters without a
            default than `PARAMETERS`.
    """
    mistakes = Mistakes()
    for name in own_metrics(names):
        with mistakes, errors_about("reward_funcs", OPTION):
            parameters = reward_parameters(name)
            if unknown := [key for key, optional in parameters.items() if key not in PARAMETERS and not optional]:
                problem = f"has the parameter {unknown[0]!r}, which nothing fills"
                raise ConfigError.about(OPTION, name, problem, f"use {', '.join(PARAMETERS)}, or give it a default")
    mistakes.refuse()


class OwnMetrics:
    """Computes metrics of one's own in a process that starts with the first answers and ends with the `with` block.

    Args:
        names: `path.py:function` each.
        timeout: seconds that the answers of one model may take.
    """

    def __init__(self, names: Sequence[str], timeout: float = TIMEOUT):
        self.names = list(names)
        too_slow = (
            f"took more than {timeout:g} s for the answers of one model; make them faster, or evaluate fewer rows"
        )
        self._process = FunctionProcess(self.names, "metrics", timeout, too_slow)

    def __enter__(self) -> OwnMetrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.close()

    def values(self, rows: Sequence[Row]) -> dict[str, list[float]]:
        """The values `[rows]` of each metric.

        Args:
            rows: rows of one model, each with an answer.

        Raises:
            ConfigError: if a function fails, gives anything but a finite number for each row, or takes too long.
        """
        if not self.names or not rows:
            return {name: [] for name in self.names}
        texts = {
            "prompts": [row.prompt for row in rows],
            "answers": [row.answer or "" for row in rows],
            "expected": [row.expected for row in rows],
        }
        try:
            values = self._process.ask(texts)
        except TrainingError as error:
            raise ConfigError.about(OPTION, None, f": {error}") from None
        if "failed" in values:
            remedy = "correct the function; it returns one finite number for each row"
            raise ConfigError.about(OPTION, values["failed"], f"failed: {values['error']}", remedy)
        return values
