"""The report of `tunesmith eval` where the first model lacks a part of what the others have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.eval.command import _document
from app.eval.comparison import Settings
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
