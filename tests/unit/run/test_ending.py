"""How a run ends: the value, what the state file says of it, and which error ends a run in which way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.run.ending import Ending
from trainers.run.errors import Interrupted, RollBack, TrainingError
from trainers.run.folder import Process, RunFolder
from trainers.run.manifest import Progress
from trainers.train import ending_of

ENDINGS = [
    Ending("done", step=9, export_dir="model"),
    Ending("stopped", "stopped by a stop request", step=4),
    Ending("failed", "step 3: loss nan", retry="never"),
    Ending("failed", "a spike", retry="roll_back"),
    Ending("failed", "ValueError: row 7", retry="again"),
]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: f"{ending.state}-{ending.retry}")
def test_a_supervisor_reads_what_rank_0_wrote(ending: Ending, tmp_path: Path) -> None:
    run = made_run(tmp_path, "a", "running", processes=[Process.of("supervisor").as_json()])
    run.end(ending, by_supervisor=True)
    state = run.read_state() or {}
    assert Ending.from_json({**state["ending"], "of_another_version": 1}) == ending
    assert state["state"] == ("running" if ending.state == "done" else "stopping")


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: f"{ending.state}-{ending.retry}")
def test_without_a_supervisor_rank_0_publishes_it(ending: Ending, tmp_path: Path) -> None:
    run = made_run(tmp_path, "a", "running", step=2)
    run.end(ending, by_supervisor=True)  # which is dead
    state = run.read_state() or {}
    assert (state["state"], state["cause"], state["export_dir"]) == (ending.state, ending.cause, ending.export_dir)
    assert state["step"] == (2 if ending.step is None else ending.step)
    assert not {"ending", "retry"} & state.keys()


def test_a_cause_is_written_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdefgh-secret")
    run = made_run(tmp_path, "a", "running")
    run.note_failure(1, "no such token: abcdefgh-secret")
    run.end(Ending("failed", "no such token: abcdefgh-secret"), by_supervisor=False)
    assert run.noted_failure() == "rank 1: no such token: ***"
    assert (run.read_state() or {})["cause"] == "no such token: ***"


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (ConfigError(["seed=x", "lora_r=0"]), Ending("failed", "seed=x; lora_r=0", retry="never")),
        (TrainingError("step 3: loss nan"), Ending("failed", "step 3: loss nan", retry="never")),
        (RollBack("step 3: a spike"), Ending("failed", "step 3: a spike", retry="roll_back")),
        (Interrupted("no answer"), Ending("failed", "no answer", retry="again")),
        (ValueError("row 7"), Ending("failed", "ValueError: row 7", retry="again")),
        (KeyboardInterrupt(), Ending("failed", "KeyboardInterrupt: ", retry="again")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_a_crash_a_spike_and_what_is_outside_are_tried_again(error: BaseException, ending: Ending) -> None:
    assert ending_of(error) == ending


def test_a_run_made_before_is_read(tmp_path: Path) -> None:
    """Flags of older state files mean nothing now; older manifests have another name for the skipped steps."""
    run: RunFolder = made_run(tmp_path, "a", "failed", permanent=True, goes_back=True)
    run.write_state(state="starting", cause=None)
    run.end(Ending("done", step=3), by_supervisor=False)
    assert (run.read_state() or {})["state"] == "done"
    (run.path / "passed_over.json").write_text('{"steps": [11, 12]}')
    assert run.read_skipped_steps() == [11, 12]
    old = {"step": 5, "best_step": None, "passed_over": [3]}
    assert Progress.from_json(old) == Progress(step=5, skipped_steps=[3])
