"""What the report says of forgetting: of a model that did, of one that did not, and of one with other tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.eval.forgetting import Sample, forgetting
from app.eval.report import print_comparison
from app.eval.rows import Row
from tests.unit.app.eval.test_comparison import entry, made

SAMPLES = [Sample("general text", "passages.jsonl"), Sample("own", "mine.txt")]


def texts(seed: int, gain: float = 0.0) -> list[Row]:
    """Rows without a prompt and an answer."""
    return [replace(row, source=None, answer=None, prompt="") for row in made(60, seed, gain=gain)]


def test_each_model_is_compared_with_the_first_on_each_sample(capsys: pytest.CaptureFixture[str]) -> None:
    by_model = {"base": texts(1), "copy": texts(1), "hard": texts(2, gain=-0.3), "broad": texts(3, gain=0.3)}
    part = forgetting(SAMPLES, {"general text": by_model, "own": {"base": texts(1), "copy": texts(1)}})
    verdicts = {(each["sample"], each["b"]): each["verdict"] for each in part["comparisons"]}
    assert verdicts == {
        ("general text", "copy"): "no difference shown", ("general text", "hard"): "forgot",
        ("general text", "broad"): "better", ("own", "copy"): "no difference shown",
    }  # fmt: skip
    forgotten = entry(part["comparisons"], b="hard")
    assert 0.2 < forgotten["low"] <= forgotten["difference"] <= forgotten["high"] < 0.4
    assert [each["name"] for each in part["samples"]] == ["general text", "own"]
    print_comparison({"metrics": [], "rows": [], "comparisons": [], "changed": [], "notes": [], "forgetting": part})
    printed = capsys.readouterr().out
    assert "Forgetting: loss (lower is better), general text" in printed
    assert "hard against base: forgot (+0.3" in printed
    assert "copy against base: no difference shown" in printed


def test_models_with_other_tokens_are_compared_by_character() -> None:
    other = [replace(row, tokens=row.tokens + 1, loss=row.loss * 1.3) for row in texts(1)]
    part = forgetting(SAMPLES, {"general text": {"base": texts(1), "other": other}})
    (compared,) = part["comparisons"]
    assert (compared["metric"], compared["verdict"]) == ("bits_per_character", "forgot")
    assert any("not compared by loss per token" in note for note in part["notes"])


def test_a_sample_that_no_model_was_evaluated_on_is_left_out() -> None:
    assert forgetting(SAMPLES, {"general text": {}, "own": {"base": texts(1)}})["samples"] == [
        {"name": "own", "dataset": "mine.txt"}
    ]
