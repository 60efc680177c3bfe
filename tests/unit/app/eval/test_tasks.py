"""What the report says of tasks of lm-evaluation-harness, and what is refused; that they run, an integration test."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from app.eval.report import print_comparison
from app.eval.tasks import compare_tasks, tasks_of
from tests.unit.app.eval.test_comparison import entry
from trainers.config.mistakes import ConfigError


def results(right: int, perplexity: float) -> dict[str, Any]:
    """Of a task of 40 examples, of which some are right, and of one without values of examples."""
    values = {str(number): float(number < right) for number in range(40)}
    return {"version": "0.4.13", "tasks": {
        "quiz": {"rows": 40, "higher": {"acc": True}, "metrics": {"acc": right / 40}, "stderrs": {"acc": 0.07},
                 "values": {"acc": values}},
        "texts": {"rows": 9, "higher": {"word_perplexity": False}, "metrics": {"word_perplexity": perplexity},
                  "stderrs": {}, "values": {}},
    }}  # fmt: skip


def test_tasks_stand_side_by_side_and_are_compared_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    part = compare_tasks({"base": results(10, 9.5), "tuned": results(30, 7.5), "copy": results(10, 9.5)})
    row = entry(part["rows"], model="base", task="quiz")
    assert (row["value"], row["stderr"], row["rows"], row["higher_is_better"]) == (0.25, 0.07, 40, True)
    assert entry(part["rows"], model="tuned", task="texts")["stderr"] is None
    tuned, copied = part["comparisons"]
    assert (tuned["b"], tuned["difference"], tuned["significant"], tuned["rows"]) == ("tuned", 0.5, True, 40)
    assert (copied["b"], copied["difference"], copied["significant"]) == ("copy", 0.0, False)
    assert (tuned["verdict"], copied["verdict"]) == ("better", "no difference shown")
    print_comparison({"metrics": [], "rows": [], "comparisons": [], "changed": [], "notes": [], "tasks": part})
    printed = capsys.readouterr().out
    assert "tuned against base on quiz, acc: better (+0.5" in printed
    assert "copy against base on quiz, acc: no difference shown" in printed


@pytest.mark.parametrize(("higher", "verdict"), [(True, "better"), (False, "worse"), (None, "differs")])
def test_the_verdict_is_by_what_the_harness_says_is_better(higher: bool | None, verdict: str) -> None:
    models = {name: results(right, 1.0) for name, right in (("base", 10), ("tuned", 30))}
    models["base"]["tasks"]["quiz"]["higher"] = {} if higher is None else {"acc": higher}
    assert compare_tasks(models)["comparisons"][0]["verdict"] == verdict


def test_a_limit_without_tasks_and_a_missing_package_are_refused() -> None:
    assert tasks_of({}) is None
    with pytest.raises(ConfigError, match="tasks_limit=3 is for tasks, and there are none"):
        tasks_of({"tasks_limit": "3"})
    if importlib.util.find_spec("lm_eval") is None:
        with pytest.raises(ConfigError, match="needs the package lm-eval; pip install"):
            tasks_of({"tasks": "hellaswag"})
