"""Trackers that fail: at the first start they end the run, later they are given up and the run goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainers.config.validation import build
from trainers.monitor.trackers import Trackers
from trainers.run.errors import TrainingError
from trainers.run.folder import RunFolder


class Tracker:
    """Stands for a service: what it received, until it goes away."""

    def __init__(self, name: str, lives: int):
        self.name, self.lives, self.rows, self.finished = name, lives, list[dict[str, float]](), False

    def log(self, numbers: dict[str, float], step: int) -> None:
        if len(self.rows) == self.lives:
            raise ConnectionError("the service is gone\nwith a long report")
        self.rows.append(numbers | {"step": step})

    def finish(self) -> None:
        if self.lives < 2:
            raise RuntimeError("could not upload")
        self.finished = True


def started(folder: Path, trackers: list[Tracker], attempt: int = 0, error: Exception | None = None) -> Trackers:
    def init_trackers(project: str, config: dict[str, Any], init_kwargs: dict[str, Any]) -> None:
        accelerator.trackers += trackers
        if error is not None:
            raise error

    accelerator = SimpleNamespace(trackers=[], init_trackers=init_trackers)
    config = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "report_to": "mlflow,trackio"})
    return Trackers(accelerator, config, RunFolder(folder), attempt)  # type: ignore[arg-type]


def test_a_tracker_that_fails_is_given_up_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing, lasting = Tracker("mlflow", lives=1), Tracker("trackio", lives=9)
    trackers = started(tmp_path, [failing, lasting])
    for step in (1, 2, 3):
        trackers.log({"loss": 1.0}, step)
    trackers.finish()
    assert [row["step"] for row in failing.rows] == [1]
    assert [row["step"] for row in lasting.rows] == [1, 2, 3]
    assert capsys.readouterr().out == (
        "warning: mlflow gets no more rows (ConnectionError: the service is gone); metrics.jsonl has all of them\n"
    )


def test_a_tracker_that_cannot_be_closed_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started(tmp_path, [Tracker("mlflow", lives=1)]).finish()
    assert "RuntimeError: could not upload" in capsys.readouterr().out


def test_the_first_start_fails_with_the_option_and_a_later_one_trains_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half_started = [Tracker("mlflow", lives=9)]
    error = OSError("no route to host")
    with pytest.raises(TrainingError, match=r"report_to=mlflow,trackio: .* \(OSError: no route to host\)"):
        started(tmp_path, half_started, error=error)
    trackers = started(tmp_path, half_started, attempt=1, error=error)
    trackers.log({"loss": 1.0}, 1)
    assert half_started[0].rows == []
    assert half_started[0].finished
    assert capsys.readouterr().out.startswith("warning: report_to=mlflow,trackio: no tracker follows this attempt")


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_weights_and_biases_files_are_with_the_run_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    monkeypatch.setenv("WANDB_DIR", folder) if folder else monkeypatch.delenv("WANDB_DIR", raising=False)
    received: dict[str, Any] = {}
    accelerator = SimpleNamespace(trackers=[], init_trackers=lambda project, **options: received.update(options))
    run = RunFolder(tmp_path / "run")
    run.create()
    config = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "report_to": "wandb"})
    Trackers(accelerator, config, run, 0)  # type: ignore[arg-type]
    assert received["init_kwargs"]["wandb"] == {"name": "run"} | ({} if folder else {"dir": str(run.path)})
    assert ('"wandb/"' in run.record.path.read_text()) == (folder is None)
