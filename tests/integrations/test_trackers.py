"""A real run under Weights & Biases, Trackio and MLflow, each writing to local files."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from tests.e2e.test_commands import tunesmith
from trainers.run.folder import RunFolder

SHORT = ("tiny-lora", "--max_steps", "3", "--logging_steps", "1", "--strategy", "single", "--output_dir", "out")


@pytest.fixture
def local_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return tmp_path


def test_each_tracker_has_the_losses_of_the_metrics_file(local_trackers: Path) -> None:
    done = tunesmith("train", *SHORT, "--report_to", "wandb,trackio,mlflow", cwd=local_trackers, timeout=300)
    assert done.returncode == 0, done.stderr
    run = RunFolder(local_trackers / "out")
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert sorted(losses) == [1, 2, 3]

    with sqlite3.connect(local_trackers / "trackio" / "tunesmith.db") as database:
        logged = [(step, json.loads(values)) for step, values in database.execute("select step, metrics from metrics")]
    assert {step: values["loss"] for step, values in logged if "loss" in values} == losses

    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("tunesmith")
    assert experiment is not None
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert {point.step: point.value for point in client.get_metric_history(tracked.info.run_id, "loss")} == losses
    assert (tracked.info.run_name, tracked.info.status) == ("out", "FINISHED")

    # Weights & Biases prints the last value, and keeps its files with the run, not in the working folder.
    (summary,) = re.findall(r"wandb: +loss ([\d.]+)$", run.log.read_text(), re.MULTILINE)
    assert float(summary) == pytest.approx(losses[3], abs=1e-5)
    assert list((run.path / "wandb").glob("offline-run-*/*.wandb"))
    assert not (local_trackers / "wandb").exists()


def test_a_tracker_that_cannot_be_reached_ends_the_run_at_its_start(
    local_trackers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    done = tunesmith("train", *SHORT, "--report_to", "mlflow", cwd=local_trackers, timeout=300)
    assert done.returncode == 1
    state = RunFolder(local_trackers / "out").read_state() or {}
    assert state["state"] == "failed"
    assert state["cause"].startswith("report_to=mlflow: a tracker did not start (")
    assert state["attempt"] == 0
