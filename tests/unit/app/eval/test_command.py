"""The report of `tunesmith eval`: what is said of a part that the first model lacks, and that a stop loses nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.eval import command
from app.eval.command import _document
from app.eval.comparison import Settings, compare
from app.eval.forgetting import Sample
from tests.unit.app.eval.test_comparison import made
from tests.unit.app.eval.test_forgetting import texts
from tests.unit.app.eval.test_tasks import results


@pytest.mark.parametrize("is_there", [True, False])
def test_a_part_that_is_compared_with_another_model_says_so(is_there: bool) -> None:
    first: dict[str, Any] = {"base": texts(1)} if is_there else {}
    tasks: dict[str, Any] = {"base": results(5, 1.0)} if is_there else {}
    plan: Any = SimpleNamespace(
        candidates=[SimpleNamespace(label="base")], settings=Settings(["loss"]), judge=None, folder="eval-1",
        samples=[Sample("general text", "passages.jsonl")],
    )  # fmt: skip
    study: Any = SimpleNamespace(
        plan=plan, rows={"base": made(20, 1), "a": made(20, 2)}, failed={}, interrupted=False,
        samples={"general text": {**first, "a": texts(1), "b": texts(2, gain=-0.3)}},
        tasks={**tasks, "a": results(5, 1.0), "b": results(6, 1.0)},
    )  # fmt: skip
    document = _document(study, ["tunesmith"])
    line = "base was not evaluated, so the others are compared with a"
    assert (f"general text: {line}" in document["forgetting"]["notes"]) is not is_there
    assert (f"tasks: {line}" in document["notes"]) is not is_there
    assert {entry["a"] for entry in document["forgetting"]["comparisons"]} == {"base" if is_there else "a"}


def test_a_stop_while_the_models_are_compared_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Evaluated:
        """A study that has evaluated its models."""

        def __init__(self, plan: Any, quiet: bool):
            self.plan, self.quiet, self.failed, self.interrupted = plan, quiet, dict[str, str](), False
            self.rows, self.tasks = {"base": made(20, 1), "a": made(20, 2)}, dict[str, Any]()

        def run(self) -> None: ...

    def stopped(*args: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return compare(*args)

    plan = SimpleNamespace(candidates=[SimpleNamespace(label="base")], settings=Settings(["loss"]), judge=None,
                           folder=tmp_path / "eval-1", samples=[])  # fmt: skip
    for name, stub in (("make_plan", lambda args: plan), ("Study", Evaluated), ("compare", stopped)):
        monkeypatch.setattr(command, name, stub)
    ends = []
    old = signal.signal(signal.SIGTERM, lambda signum, frame: ends.append(signum))
    try:
        args = command.EVAL.read(["a"])
        assert args is not None
        status, document = command._evaluate(args, ["a"], True)
        assert (status, {row["model"] for row in document["rows"]}, ends) == (0, {"base", "a"}, [])
        assert (tmp_path / "eval-1" / "report.json").exists()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ends == [signal.SIGTERM], "afterwards a signal is what it was"
    finally:
        signal.signal(signal.SIGTERM, old)
