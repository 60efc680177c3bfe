"""`tunesmith bench --scaling`: what is measured, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from app.cli import run_verb
from app.launch.job import TrainJob
from app.launch.progress import Listener
from tests.unit.app.bench.test_bench import write_rows
from trainers.run.folder import registered_runs

RATES = {("single", 1): 1.0, ("ddp", 2): 0.5, ("ddp", 4): 0.4, ("fsdp2", 2): 0.8, ("fsdp2", 4): 0.25}
"""Seconds of a step."""


class Launcher:
    """Stands in for the launcher: a run whose steps take the seconds of its strategy and processes."""

    def __init__(self, failing: tuple[str, int] | None = None):
        self.ran: list[tuple[str, int]] = []
        self.batches: set[tuple[int, int]] = set()
        self.failing = failing

    def __call__(
        self, job: TrainJob, display: AbstractContextManager[Listener], outer: Mapping[str, str], bound: bool = False
    ) -> dict[str, Any]:
        point = (job.strategy.name, job.devices.num_processes)
        self.ran.append(point)
        self.batches.add((job.config.global_batch_size, job.config.max_steps or 0))
        job.run.create()
        with display as listener:
            if point == self.failing:
                return job.run.write_state(state="failed", cause="ValueError: no")
            write_rows(job.run, 40, RATES[point])
            listener("tick", "")
        return job.run.write_state(state="stopped", cause="stopped without saving")


Scaling = Callable[..., tuple[int, Any]]


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Scaling:
    """Runs the verb with a stand-in for the launcher; gives status and document."""
    monkeypatch.chdir(tmp_path)

    def call(launcher: Launcher, *words: str) -> tuple[int, Any]:
        monkeypatch.setattr("app.bench.runner.launch", launcher)
        monkeypatch.setattr("app.bench.runner.preflight", lambda job, quiet: None)
        status = run_verb(["bench", "tiny-full", *words, "--json"])
        assert registered_runs() == []
        return status, json.loads(capsys.readouterr().out)

    return call


def test_speed_up_is_over_one_process_at_the_same_batch(scaling: Scaling) -> None:
    launcher = Launcher()
    status, document = scaling(launcher, "--scaling", "4,1,2", "--strategies", "ddp,fsdp2", "--steps", "5")
    assert status == 0
    points = [(row["strategy"], row["processes"]) for row in document["rows"]]
    assert points == [("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4)]
    assert launcher.ran == [*points, *reversed(points)], "the points take turns"
    assert len(launcher.batches) == 1
    for row in document["rows"]:
        speedup = 1.0 / RATES[row["strategy"], row["processes"]]
        assert (row["speedup"], row["base_processes"]) == (pytest.approx(speedup), 1)
        assert row["efficiency"] == pytest.approx(speedup / row["processes"])
    assert "cores" in document["note"]


def test_without_one_process_the_fewest_of_the_strategy_are_the_base(scaling: Scaling) -> None:
    _, document = scaling(Launcher(), "--scaling", "2,4", "--strategies", "ddp,fsdp2", "--steps", "5")
    rows = {(row["strategy"], row["processes"]): row for row in document["rows"]}
    assert (rows["ddp", 4]["speedup"], rows["ddp", 4]["efficiency"]) == (pytest.approx(1.25), pytest.approx(0.625))
    assert rows["fsdp2", 4]["efficiency"] == pytest.approx(0.8 / 0.25 / 2), "more than linear is shown as it is"
    assert rows["fsdp2", 2]["speedup"] == 1


def test_a_point_that_fails_is_named_and_the_others_go_on(scaling: Scaling) -> None:
    words = ("--scaling", "1,2,3", "--strategies", "ddp,hsdp", "--steps", "5")
    status, document = scaling(Launcher(failing=("single", 1)), *words)
    outcomes = {(row["strategy"], row["processes"]): row["outcome"] for row in document["rows"]}
    assert outcomes == {
        ("single", 1): "failed", ("ddp", 2): "measured", ("ddp", 3): "not possible",
        ("hsdp", 2): "not possible", ("hsdp", 3): "not possible",
    }  # fmt: skip
    [ddp] = [row for row in document["rows"] if row["outcome"] == "measured"]
    assert (status, ddp["speedup"], ddp["base_processes"]) == (0, 1, 2)
    assert all(row["reason"] for row in document["rows"] if row["outcome"] != "measured")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scaling", "1"], "scaling='1' is not a list of different numbers"),
        (["--scaling", "2,2"], "scaling='2,2' is not a list"),
        (["--scaling", "0,2"], "scaling='0,2' is not a list"),
        (["--scaling", "1,x"], "scaling='1,x' is not a list"),
        (["--scaling", "1,2", "--settings", "packing"], "settings=packing with --scaling"),
        (["--scaling", "1,2", "--num_processes", "2"], "num_processes=2 with --scaling"),
        (["--scaling", "1,2", "--num_machines", "2"], "bench runs on this machine only"),
        (["--scaling", "2,3", "--strategies", "nowhere"], "strategy='nowhere' is unknown"),
        (["--strategies", "ddp"], "strategies=ddp is for --scaling"),
    ],
)
def test_nonsense_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["bench", "tiny-full", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_table_is_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("app.bench.runner.launch", Launcher())
    monkeypatch.setattr("app.bench.runner.preflight", lambda job, quiet: None)
    assert run_verb(["bench", "tiny-full", "--scaling", "1,2", "--steps", "5"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "strategy processes tokens/s speed-up efficiency spread s/step memory GiB" in lines
    assert "ddp 2 200 2.00x 100% 0.0% 0.500 2.00" in lines
