"""Runs side by side: what differs, and which ended better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.runs.compare import MAX_RUNS, chosen_runs, compare
from app.runs.metrics import Curves
from tests.made_runs import made_run

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_settings_that_differ_are_told(tmp_path: Path) -> None:
    runs = [
        made_run(tmp_path, "a", strategy="ddp"),
        made_run(tmp_path, "b", strategy="fsdp2", config={"learning_rate": 1e-3, "seed": 7}),
    ]
    seen = compare(runs, Curves())
    different = {row["name"]: row["values"] for row in seen["settings"] if row["differs"]}
    assert set(different) == {"strategy", "learning_rate", "seed"}
    assert different["strategy"] == ["ddp", "fsdp2"]
    assert len(seen["settings"]) > 30
    assert not any(row["differs"] for row in compare(runs[:1] * 2, Curves())["settings"])


def test_the_better_end_is_marked(tmp_path: Path) -> None:
    runs = [made_run(tmp_path, name, steps=steps) for name, steps in (("a", 60), ("b", 30), ("c", 30))]
    metrics = {row["name"]: row for row in compare(runs, Curves())["metrics"]}
    assert metrics["step"]["values"] == [60, 30, 30]
    assert metrics["step"]["best"] is None
    losses = metrics["loss"]["values"]
    assert metrics["loss"]["best"] == losses.index(min(losses))
    assert {row["name"]: row["best"] for row in compare(runs[1:], Curves())["metrics"]}["loss"] is None


def test_runs_without_metrics_have_none(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a")
    run.metrics.unlink()
    seen = compare([run, made_run(tmp_path, "b")], Curves())
    assert {row["name"]: row["values"][0] for row in seen["metrics"]}["loss"] is None
    json.dumps(seen, allow_nan=False)


def test_ids_are_taken_once_and_strange_ones_are_refused(tmp_path: Path) -> None:
    made_run(tmp_path, "a")
    made_run(tmp_path, "b")
    runs, refused = chosen_runs("b,a,b,,../a,/etc/passwd,gone", tmp_path)
    assert [run.id for run in runs] == ["b", "a"]
    assert len(refused) == 3
    assert chosen_runs(None, tmp_path) == ([], [])
    assert chosen_runs({"a": 1}, tmp_path) == ([], [])
    many = [made_run(tmp_path, f"r{number}", steps=1).id for number in range(MAX_RUNS + 1)]
    runs, refused = chosen_runs(",".join(many), tmp_path)
    assert (len(runs), len(refused)) == (MAX_RUNS, 1)
