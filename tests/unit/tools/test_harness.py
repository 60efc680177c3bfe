"""What is taken over of the results of lm-evaluation-harness; that it runs, an integration test."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from trainers.tools.harness import _task


def results(metrics: dict[str, Any], examples: dict[str, list[Any]]) -> dict[str, Any]:
    """Results of a task in the shape of the harness."""
    rows = [dict(zip(examples, values, strict=True)) for values in zip(*examples.values(), strict=True)]
    samples = [{"doc_id": number, "filter": "none", **row} for number, row in enumerate(rows)]
    return {
        "n-samples": {"quiz": {"effective": len(rows)}}, "higher_is_better": {"quiz": {"acc": True}},
        "results": {"quiz": {"alias": "quiz", **metrics}}, "samples": {"quiz": samples},
    }  # fmt: skip


def test_values_of_examples_are_those_whose_mean_the_metric_is() -> None:
    """Of a perplexity the examples have log-likelihoods: higher is better there, and lower for the perplexity."""
    metrics = {"acc,none": 0.5, "acc_stderr,none": 0.25, "perplexity,none": 7.4, "f1,none": 0.3, "many,none": 2.0}
    examples = {"acc": [np.float64(1), 0.0], "perplexity": [-1.0, -3.0], "f1": [(1, 0), (1, 1)],
                "many": [np.ones(3), np.ones(3)]}  # fmt: skip
    task = _task(results(metrics, examples), "quiz")
    assert task["values"] == {"acc": {"0": 1.0, "1": 0.0}}
    assert task["metrics"] == {"acc": 0.5, "perplexity": 7.4, "f1": 0.3, "many": 2.0}
    assert (task["stderrs"], task["rows"]) == ({"acc": 0.25}, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("inf")])
def test_what_is_not_finite_is_null(value: Any) -> None:
    task = _task(results({"acc,none": value, "acc_stderr,none": "N/A"}, {"acc": [value, value]}), "quiz")
    assert (task["metrics"], task["values"], task["stderrs"]) == ({"acc": None}, {}, {})
    json.dumps(task, allow_nan=False)
