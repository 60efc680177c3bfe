"""What a run's page shows, in every state, of whole and of damaged folders."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from app.commands.runs import show_verb
from app.runs.detail import checkpoints, run_files, run_view
from app.runs.metrics import Curves
from app.runs.rank_curves import MOST_RANKS
from tests.made_runs import add_checkpoint, made_run
from trainers.run.folder import Process, write_json
from trainers.run.lineage import Stage
from ui.pages.run_parts import headline

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_a_live_run_shows_where_its_ranks_are(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a", "running", steps=20, total_steps=50, processes=[Process.of("supervisor").as_json()])
    for rank in (0, 1):
        write_json(run.heartbeats / f"rank-{rank}.json", {"rank": rank, "step": 21, "section": "backward", "time": "x"})
    seen = run_view(run, Curves())
    assert (seen["state"], seen["phase"], seen["step"], seen["total_steps"]) == ("running", "backward", 20, 50)
    assert seen["progress"] == pytest.approx(0.4)
    assert [rank["memory_gib"] for rank in seen["ranks"]] == pytest.approx([1.4, 1.35])
    assert seen["eta_s"] == 0.0
    assert seen["next"] == ""
    assert "stop" in seen["actions"]
    assert "delete" not in seen["actions"]


@pytest.mark.parametrize(
    ("state", "cause", "saved", "words"),
    [
        ("failed", "rank 1: OutOfMemoryError: out of memory", 20, "To continue from step 20: tunesmith resume "),
        ("failed", "rank 1: ValueError: bad", 20, "from step 20: tunesmith resume "),
        ("failed", "rank 1: ValueError: bad", None, "from the start, as no checkpoint was saved"),
        ("stopped", "stopped by a stop request", 20, "To continue from step 20: tunesmith resume "),
        ("done", None, 20, "tunesmith chat "),
    ],
)
def test_an_ended_run_says_what_to_do_next(
    tmp_path: Path, state: str, cause: str | None, saved: int | None, words: str
) -> None:
    run = made_run(tmp_path / "a b", "x", state, cause=cause)
    if saved:
        add_checkpoint(run, saved)
    seen = run_view(run, Curves())
    assert words in seen["next"]
    assert f"'{run.path}'" in seen["next"], "quoted for a shell"
    assert seen["cause"] == (cause or "")
    assert seen["eta_s"] is None


def test_a_queued_run_says_how_to_take_it_out(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a", "queued", steps=0, processes=[Process.of("supervisor").as_json()])
    seen = run_view(run, Curves())
    assert "tunesmith stop" in seen["next"]
    assert "cancel" in seen["actions"]


def test_checkpoints_come_newest_first_with_the_best_marked(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a")
    add_checkpoint(run, 20, files=(100, 50))
    add_checkpoint(run, 40, best=20)
    (run.checkpoints / "step-00000060.tmp-0").mkdir()
    (run.checkpoints / "bad-step-00000050").mkdir()
    found = checkpoints(run)
    assert [(one["name"], one["best"]) for one in found] == [("step-00000040", False), ("step-00000020", True)]
    assert found[1]["bytes"] == 150 + (run.checkpoints / "step-00000020" / "manifest.json").stat().st_size
    assert run_view(run, Curves())["bad_checkpoints"] == ["bad-step-00000050"]
    (run.checkpoints / "step-00000040" / "manifest.json").write_text("{")
    assert [one["best"] for one in checkpoints(run)] == [False, False]


@pytest.mark.parametrize(
    "damage",
    [
        {"step": [1], "total_steps": "many", "cause": {"a": 1}, "started_at": {}, "attempt": None, "export_dir": 7},
        {"step": 10**400, "host": None, "processes": 3},
        {"cause": "x" * 100_000},
    ],
)
def test_a_damaged_folder_still_has_a_page(tmp_path: Path, damage: dict) -> None:
    run = made_run(tmp_path, "a")
    run.state_file.write_text(json.dumps({**(run.read_state() or {}), **damage}))
    (run.heartbeats / "rank-0.json").write_text('{"step": "x", "section": 7}')
    (run.heartbeats / "rank-x.json").write_text("{}")
    run.accelerate.write_text("&a [*a]")
    run.metrics.write_text('{"step": 1, "loss": "x", "memory_gib_by_rank": "abc", "eta_s": 1e999}\n')
    seen = run_view(run, Curves())
    json.dumps(seen, allow_nan=False)
    assert len(seen["cause"]) <= 2000
    assert seen["loss"] is None


def test_the_most_memory_of_a_run_is_its_peak_and_not_what_it_has_now(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a")
    rows = [{"step": step, "loss": 1.0, "memory_gib_by_rank": [1.0, memory]} for step, memory in ((1, 3.5), (2, 0.5))]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = run_view(run, Curves())
    assert [rank["memory_gib"] for rank in seen["ranks"]] == [1.0, 3.5]
    assert "3.5 GiB, rank 1" in str(headline(seen))
    many = [{"step": step, "loss": 1.0, "memory_gib_by_rank": [step] * (MOST_RANKS + 1)} for step in (2, 1)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in many))
    memory = [rank["memory_gib"] for rank in run_view(run, Curves())["ranks"]]
    assert memory == [*[2.0] * MOST_RANKS, 1.0]  # those beyond are not kept


def test_the_settings_are_given_as_text_and_links_are_not_followed(tmp_path: Path) -> None:
    run = made_run(tmp_path / "runs", "a")
    assert "preset: tiny-lora" in run_files(run)["config"]
    assert "num_processes: 2" in run_files(run)["accelerate"]
    secret = tmp_path / "secret"
    secret.write_text("secret")
    run.config.unlink()
    run.config.symlink_to(secret)
    assert run_files(run)["config"] == ""


def test_the_stages_before_a_run_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path, "second")
    assert run_view(run, Curves())["from_run"] == ""
    stages = [Stage("first", "sft", "full", "notes.jsonl", 30), Stage("other", "dpo", "full", "pairs.jsonl")]
    write_json(run.start, {"stages": [asdict(stage) for stage in stages]})
    words = "first (sft on notes.jsonl, method=full, step 30), then other (dpo on pairs.jsonl, method=full)"
    seen = run_view(run, Curves())
    assert seen["from_run"] == words
    assert f"starts from {words}" in str(headline(seen))
    show_verb("second", False, tmp_path, False)
    show_verb("second", False, tmp_path, True)
    table, _, document = capsys.readouterr().out.partition("{")
    assert "first (sft on notes.jsonl" in " ".join(table.split())
    assert json.loads("{" + document)["from_run"] == [asdict(stage) for stage in stages]
