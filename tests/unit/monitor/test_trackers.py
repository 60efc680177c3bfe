"""Trackers that fail or hang are given up, and the run goes on; a later attempt goes on in the same tracked run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import PartialState
from accelerate.tracking import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.launch import actions
from trainers.config.validation import build
from trainers.monitor import trackers as module
from trainers.monitor.trackers import Trackers
from trainers.run.folder import RunFolder, read_json, write_json

CONFIG: dict[str, Any] = {"model_name_or_path": "embedded", "dataset_name": "embedded"}


class Service:
    """Stands for the library of a tracker: what it received, until it goes away."""

    def __init__(self, name: str, lives: int = 9, fails: BaseException | None = None, hangs: str = ""):
        self.name, self.lives, self.fails, self.hangs = name, lives, fails, hangs
        self.rows, self.options, self.calls = list[tuple[int, dict[str, float]]](), dict[str, Any](), list[str]()

    def __call__(self, project: str, **options: Any) -> Any:
        self.options = options
        info = SimpleNamespace(run_id="run of mlflow")
        self.tracker = SimpleNamespace(id=f"run of {self.name}", name=options.get("name"), info=info)
        return self

    def _called(self, call: str) -> None:
        self.calls.append(call)
        while call == self.hangs:
            try:
                threading.Event().wait(30)
            except Exception:  # as libraries do, which try again
                self.calls.append("tries again")

    def start(self) -> None:
        self._called("start")
        if self.fails:
            raise self.fails

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._called("configuration")

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._called("log")
        if len(self.rows) == self.lives:
            raise ConnectionError("http://me:secret@host: the service is gone\nwith a long report")
        self.rows.append((step, numbers))

    def finish(self) -> None:
        self._called("finish")
        if self.lives < 2:
            raise RuntimeError("could not upload")


def started(folder: Path, *services: Service, resumed_at: int | None = None, hang_timeout: int = 600) -> Trackers:
    run = RunFolder(folder / "out")
    if not run.path.exists():
        run.create()
    for service in services:
        module._CLASSES[service.name] = service  # type: ignore[assignment]
    names = ",".join(service.name for service in services) or "tensorboard"
    config = build({**CONFIG, "report_to": names, "hang_timeout": hang_timeout})
    return Trackers(config, run, resumed_at)


def ids_in(folder: Path) -> dict[str, str]:
    """The ids in a run folder."""
    return (read_json(RunFolder(folder).trackers) or {})["ids"]


@pytest.fixture(autouse=True)
def _own_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLASSES", dict(module._CLASSES))


def test_a_tracker_that_fails_is_given_up_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@host")
    failing, lasting = Service("mlflow", lives=1), Service("trackio")
    trackers = started(tmp_path, failing, lasting)
    for step in (1, 2, 3):
        trackers.log({"loss": 1.0}, step)
    trackers.finish()
    assert [step for step, _ in failing.rows] == [1]
    assert [step for step, _ in lasting.rows] == [1, 2, 3]
    assert lasting.calls[-1] == "finish"
    assert capsys.readouterr().out == (
        "warning: mlflow gets no more rows (ConnectionError: http://***host: the service is gone); "
        "metrics.jsonl has all of them\n"
    )


def test_a_tracker_that_cannot_be_closed_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started(tmp_path, Service("mlflow", lives=1)).finish()
    assert "RuntimeError: could not upload" in capsys.readouterr().out


@pytest.mark.parametrize("error", [OSError("no route to host"), SystemExit(1)])
def test_one_that_does_not_start_is_named_and_the_others_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    failing, lasting = Service("mlflow", fails=error), Service("trackio")
    trackers = started(tmp_path, failing, lasting)
    trackers.log({"loss": 1.0}, 1)
    assert (failing.rows, failing.calls) == ([], ["start"])
    assert lasting.rows == [(1, {"loss": 1.0})]
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"warning: report_to=mlflow did not start ({type(error).__name__}: {error}); this attempt "
    )
    assert list(ids_in(tmp_path / "out")) == ["trackio"]


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_one_that_hangs_has_half_the_hang_timeout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str
) -> None:
    hanging, lasting = Service("mlflow", hangs=call), Service("trackio")
    began = time.monotonic()
    trackers = started(tmp_path, hanging, lasting, hang_timeout=2)
    trackers.log({"loss": 1.0}, 1)
    trackers.finish()
    assert 0.5 <= time.monotonic() - began < 20
    assert "no answer within 0.5 s" in capsys.readouterr().out
    assert "tries again" not in hanging.calls
    assert lasting.rows == [(1, {"loss": 1.0})]


def test_the_limit_leaves_alarm_and_handler_as_they_were() -> None:
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    with module._within(30):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 29
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


def test_a_later_attempt_goes_on_in_the_same_tracked_run_with_each_value_once(tmp_path: Path) -> None:
    """An evaluation that was killed before it was logged comes at a step that has its loss already."""
    first = [Service(name) for name in ("wandb", "trackio", "mlflow", "swanlab")]
    trackers, run = started(tmp_path, *first), RunFolder(tmp_path / "out")
    rows = [{"step": step, "loss": 1.0 / step} for step in range(1, 6)]
    for row in rows:
        trackers.log({"loss": row["loss"]}, int(row["step"]))
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 6, "lo')
    assert "id" not in first[0].options
    again = [Service(name) for name in ("wandb", "trackio", "mlflow", "swanlab")]
    trackers = started(tmp_path, *again, resumed_at=3)
    for step in range(4, 8):
        trackers.log({"loss": 2.0}, step)
        trackers.log({"eval_loss": 3.0}, step)
    wandb, trackio, mlflow, swanlab = again
    assert (wandb.options["id"], wandb.options["resume"]) == ("run of wandb", "allow")
    assert (swanlab.options["id"], swanlab.options["resume"]) == ("run of swanlab", "allow")
    assert (trackio.options["name"], trackio.options["resume"]) == (first[1].options["name"], "allow")
    assert mlflow.options == {"run_id": "run of mlflow"}
    assert "configuration" not in mlflow.calls, "MLflow refuses other values"
    for service in (trackio, mlflow):
        assert [step for step, numbers in service.rows if "loss" in numbers] == [6, 7]
        assert [step for step, numbers in service.rows if "eval_loss" in numbers] == [4, 5, 6, 7]
    for service in (wandb, swanlab):  # their servers drop repeated steps
        assert [step for step, numbers in service.rows if "loss" in numbers] == [4, 5, 6, 7]


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_one_that_was_given_up_gets_what_it_lacks_from_a_later_attempt(tmp_path: Path, name: str) -> None:
    """Once: the attempt after that one leaves out again what is logged."""
    run, rows = RunFolder(tmp_path / "out"), list[dict[str, Any]]()

    def attempt(service: Service, first: int, last: int) -> list[int]:
        trackers = started(tmp_path, service, resumed_at=first - 1 if first else None)
        for step in range(first, last):
            trackers.log({"loss": 1.0}, step)
            rows.append({"step": step, "loss": 1.0})
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [step for step, _ in service.rows]

    assert attempt(Service(name, lives=3), 0, 8) == [0, 1, 2]
    assert attempt(Service(name, fails=OSError("gone")), 3, 9) == []
    assert attempt(Service(name), 5, 10) == [5, 6, 7, 8, 9]
    assert attempt(Service(name), 7, 12) == [10, 11]


def test_what_trackio_had_not_stored_when_it_was_killed_is_sent_again(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 8))
    started(tmp_path, Service("trackio"))
    RunFolder(tmp_path / "out").metrics.write_text(rows)

    class Stored(Service):
        def start(self) -> None:
            self.tracker._next_step = 5

    service = Stored("trackio")
    trackers = started(tmp_path, service, resumed_at=3)
    for step in range(4, 9):
        trackers.log({"loss": 1.0}, step)
    assert [step for step, _ in service.rows] == [5, 6, 7, 8]


@pytest.mark.parametrize("damage", [3, {"mlflow": 3}, {"mlflow": {"loss": "x", "lr": None}}, {"other": {"loss": 2}}])
def test_a_damaged_note_of_what_was_given_up_ends_nothing(tmp_path: Path, damage: Any) -> None:
    started(tmp_path, Service("mlflow"))
    run, service = RunFolder(tmp_path / "out"), Service("mlflow")
    write_json(run.trackers, {**(read_json(run.trackers) or {}), "given_up": damage})
    started(tmp_path, service, resumed_at=3).log({"loss": 1.0}, 4)
    assert service.rows == [(4, {"loss": 1.0})]


def test_another_folder_is_another_tracked_run(tmp_path: Path) -> None:
    first, other = Service("trackio"), Service("trackio")
    started(tmp_path / "a", first)
    started(tmp_path / "b", other, resumed_at=3)
    assert first.options["name"] != other.options["name"]
    assert other.options["resume"] == "never"


def test_a_copied_folder_is_another_tracked_run_and_a_renamed_one_the_same(tmp_path: Path) -> None:
    started(tmp_path, Service("wandb"), Service("trackio"))
    run = RunFolder(tmp_path / "out")
    run.write_state(state="stopped")
    (tmp_path / "copies").mkdir()
    copied = shutil.copytree(run.path, tmp_path / "copies" / "copy")
    copied.rename(tmp_path / "copies" / "out")
    same_name = Service("wandb")
    started(tmp_path / "copies", same_name, resumed_at=3)
    assert same_name.options["id"] == "run of wandb", "a run that was moved to another machine"

    write_json(run.trackers, {"run": "out", "ids": {**ids_in(run.path), "tensorboard": "tunesmith"}})
    renamed = actions.rename(run, "renamed")
    copy = RunFolder(shutil.copytree(renamed.path, tmp_path / "copy"))
    assert module._known_ids(renamed) == ids_in(renamed.path)
    assert module._known_ids(copy) == {"tensorboard": "tunesmith"}, "whose files were copied too"
    for folder, known in ((renamed, "run of wandb"), (copy, None)):
        service = module._CLASSES["wandb"] = Service("wandb")  # type: ignore[assignment]
        Trackers(build({**CONFIG, "report_to": "wandb"}), folder, 3).finish()
        assert service.options.get("id") == known  # type: ignore[attr-defined]
        assert (read_json(folder.trackers) or {})["run"] == folder.id


def test_one_whose_id_cannot_be_read_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Nameless(Service):
        tracker: Any = property(lambda self: None, lambda self, value: None)

    lasting = Service("trackio")
    started(tmp_path, Nameless("wandb"), lasting).log({"loss": 1.0}, 1)
    assert "report_to=wandb did not start (AttributeError" in capsys.readouterr().out
    assert lasting.rows == [(1, {"loss": 1.0})]


@pytest.mark.parametrize(
    ("options", "limit"),
    [({}, 60), ({"hang_timeout": 0}, 60), ({"hang_timeout": 100}, 25), ({"ddp_timeout": 20}, 5)],
)
def test_trackers_that_never_answer_take_half_the_patience_of_the_other_ranks(
    options: dict[str, int], limit: float
) -> None:
    assert module._limit(build({**CONFIG, "report_to": "wandb,mlflow", **options})) == limit
    assert module._limit(build({**CONFIG, **options})) == min(60, limit * 2)


@pytest.mark.parametrize("damage", ["", "[]", '{"ids": {"wandb": 7}, "run": "out"}', '{"ids": 3}', "{"])
def test_a_damaged_file_of_ids_is_a_new_tracked_run(tmp_path: Path, damage: str) -> None:
    run = RunFolder(tmp_path / "out")
    run.create()
    run.trackers.write_text(damage)
    service = Service("wandb")
    started(tmp_path, service, resumed_at=3).log({"loss": 1.0}, 4)
    assert "id" not in service.options
    assert read_json(run.trackers) == {"run": "out", "ids": {"wandb": "run of wandb"}}
    assert service.rows == [(4, {"loss": 1.0})]


@pytest.mark.parametrize("resumed_at", [4, None])
def test_tensorboard_has_each_step_once_with_its_newest_value(tmp_path: Path, resumed_at: int | None) -> None:
    """Also where the run was killed before its first checkpoint. Control: without `purge_step`, steps stand twice."""
    PartialState(cpu=True)
    folder, first_step = tmp_path / "out" / "tunesmith", 0 if resumed_at is None else resumed_at + 1
    trackers = started(tmp_path)
    for step in range(8):
        trackers.log({"loss": 1.0}, step)
    trackers = started(tmp_path, resumed_at=resumed_at)
    for step in range(first_step, 10):
        trackers.log({"loss": 2.0}, step)
    trackers.finish()
    assert [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars("loss")] == [
        (step, 1.0 if step < first_step else 2.0) for step in range(10)
    ]
    assert len([path for path in folder.iterdir() if path.is_dir()]) <= 2, "its parameters stand there once"
    third = TensorBoardTracker("tunesmith", logging_dir=str(tmp_path / "out"))
    third.start()
    third.log({"loss": 3.0}, step=9)
    third.finish()
    repeated = [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("loss")]
    assert repeated.count(9) == 2


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_weights_and_biases_files_are_with_the_run_unless_the_user_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    monkeypatch.setenv("WANDB_DIR", folder) if folder else monkeypatch.delenv("WANDB_DIR", raising=False)
    service, run = Service("wandb"), RunFolder(tmp_path / "out")
    started(tmp_path, service)
    assert service.options == {"name": "out"} | ({} if folder else {"dir": str(run.path)})
    assert ('"wandb/"' in run.record.path.read_text()) == (folder is None)


def test_output_code_and_error_reports_stay_here_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variables in module._DEFAULTS.values():
        for variable in variables:
            monkeypatch.setenv(variable, "")  # so that it is put back
            monkeypatch.delenv(variable)
    monkeypatch.setenv("WANDB_CONSOLE", "wrap")
    started(tmp_path, Service("wandb"))
    assert (os.environ["WANDB_CONSOLE"], os.environ["WANDB_DISABLE_GIT"]) == ("wrap", "true")
    assert "MLFLOW_DISABLE_TELEMETRY" not in os.environ
