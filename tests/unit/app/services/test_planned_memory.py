"""Planned beside measured memory: what is compared, and that a model is counted once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from app.cli import run_verb
from app.plan.hardware import GIB
from app.runs.metrics import Curves
from app.services import planned_memory
from app.services.planned_memory import PlannedMemory, compared, planned_ranks
from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

pytestmark = pytest.mark.usefixtures("elsewhere")
USES = {"weights": 2 * GIB, "overhead": 1 * GIB, "runtime": 0.5 * GIB}


def test_only_what_is_comparable_is_compared() -> None:
    gpu = compared([USES], {"memory_gib": [4.0], "memory_reserved_gib": [5.0]}, "gpu")[0]
    assert (gpu["planned_gib"], gpu["reserved_gib"], gpu["ratio"], gpu["runtime_gib"]) == (2.0, 5.0, 0.5, None)
    cpu = compared([USES], {"memory_gib": [3.0]}, "cpu")[0]
    assert (cpu["planned_gib"], cpu["runtime_gib"], cpu["ratio"]) == (3.0, 0.5, 1.0)
    below = compared([USES, USES], {"memory_gib": [0.4]}, "cpu")
    assert [row["ratio"] for row in below] == [None, None]
    assert compared([], {"memory_gib": [1.0]}, "cpu")[0]["planned_gib"] is None


@pytest.mark.slow
def test_each_rank_of_a_real_plan_has_its_memory(tmp_path: Path) -> None:
    planned = planned_ranks(made_run(tmp_path, "a"))
    assert len(planned) == 2
    assert all(0 < uses["runtime"] < sum(uses.values()) - uses["runtime"] for uses in planned)


def test_a_run_is_counted_once_and_a_refusal_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, counts, service = made_run(tmp_path, "a"), list[str](), PlannedMemory(Curves())

    def refused(run: RunFolder) -> planned_memory.Planned:
        counts.append(run.id)
        raise ConfigError("the model is not here; name another")

    monkeypatch.setattr(planned_memory, "planned_ranks", refused)
    assert service.view(run, False)["rows"][0]["planned_gib"] is None
    assert counts == []
    deadline = time.monotonic() + 20
    while (seen := service.view(run, True))["counting"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (seen["counting"], seen["error"]) == (False, "the model is not here; name another")
    assert counts == ["a"]


def test_runs_show_counts_only_when_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(Path("runs"), "a")
    plans: list[planned_memory.Planned | ConfigError] = [[USES] * 2, ConfigError("the model is not here")]

    def planned(run: RunFolder) -> planned_memory.Planned:
        if isinstance(plan := plans.pop(0), ConfigError):
            raise plan
        return plan

    monkeypatch.setattr(planned_memory, "planned_ranks", planned)

    def show(*words: str) -> str:
        assert run_verb(["runs", "show", "a", *words]) == 0
        return capsys.readouterr().out

    memory = json.loads(show("--json"))["memory"]
    assert (memory["planned"], memory["rows"][0]["measured_gib"], memory["rows"][0]["planned_gib"]) == (
        False,
        1.4,
        None,
    )
    assert "0     1.40           3.00" in show("--plan")
    memory = json.loads(show("--plan", "--json"))["memory"]
    assert (memory["error"], memory["rows"][0]["planned_gib"]) == ("the model is not here", None)
