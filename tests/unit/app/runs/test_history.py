"""The table of runs: what a row says, what is read again, and what is shown of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.runs import history
from app.runs.history import SPARKS, History, page, select, watched_curve
from app.runs.runs import list_runs, run_of_id
from tests.made_runs import made_run, metric_lines
from trainers.config.mistakes import ConfigError
from trainers.run.folder import Process, RunFolder, register_outside, write_json

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def living() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_row_says_what_the_table_shows(tmp_path: Path) -> None:
    made_run(tmp_path, "a", steps=60, strategy="fsdp2", gpus="0,2")
    (row,) = History(tmp_path).rows()
    assert (row["id"], row["state"], row["step"], row["total_steps"], row["progress"]) == ("a", "done", 60, 60, 1.0)
    assert (row["preset"], row["method"], row["strategy"]) == ("tiny-lora", "lora", "fsdp2")
    assert (row["world_size"], row["gpus"], row["duration_s"]) == (2, [0, 2], 120.0)
    last = json.loads([line for line in metric_lines(60) if '"loss"' in line][-1])["loss"]
    assert row["measure"] == "loss"
    assert row["value"] == pytest.approx(last, rel=1e-4)
    assert len(row["sparkline"]) == SPARKS


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path, "a", "stopped", steps=10)
    made_run(tmp_path, "b")
    read: list[str] = []
    row_of = history._read_row
    monkeypatch.setattr(history, "_read_row", lambda run, fixed: read.append(run.id) or row_of(run, fixed))
    table = History(tmp_path)
    table.rows()
    table.rows()
    assert sorted(read) == ["a", "b"]
    write_json(run.state_file, {**(run.read_state() or {}), "step": 11})
    assert {row["id"]: row["step"] for row in table.rows()}["a"] == 11
    assert sorted(read) == ["a", "a", "b"]


def test_a_live_run_that_died_is_seen_though_no_file_changed(tmp_path: Path, living: subprocess.Popen[bytes]) -> None:
    made_run(tmp_path, "a", "running", processes=[Process.of("supervisor", pid=living.pid).as_json()])
    table = History(tmp_path)
    assert [row["state"] for row in table.rows()] == ["running"]
    living.kill()
    living.wait()
    assert [row["state"] for row in table.rows()] == ["failed"]


def test_a_resumed_run_counts_the_time_it_trained(tmp_path: Path) -> None:
    made_run(tmp_path, "a", steps=60, resumed_at=30, updated_at="2027-01-01T00:00:00+00:00")
    assert History(tmp_path).rows()[0]["duration_s"] == pytest.approx(42.0)


@pytest.mark.parametrize("steps", [3, 30, 5000])
def test_the_sparkline_follows_the_loss_and_forgets_what_was_replaced(tmp_path: Path, steps: int) -> None:
    run = made_run(tmp_path, "a", steps=steps, resumed_at=steps // 2)
    measure, losses, _ = watched_curve(run.metrics)
    assert measure == "loss"
    assert len(losses) <= SPARKS
    assert max(losses[len(losses) // 2 :]) < losses[0] + 0.1
    assert len(losses) >= min(steps, 3)


@pytest.mark.parametrize("steps", [4, 5000])
def test_a_run_that_is_rewarded_shows_its_reward_and_is_not_sorted_among_losses(tmp_path: Path, steps: int) -> None:
    run = made_run(tmp_path, "rewarded", steps=1)
    lines = [{"step": step, "attempt": 0, "loss": -0.5, "reward_std": 9.0, "reward": step / steps}
             for step in range(1, steps + 1)]  # fmt: skip
    evaluation = {"step": steps, "attempt": 0, "eval_loss": -7.0, "eval_reward": 7.0}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in [*lines, evaluation]))
    measure, rewards, _ = watched_curve(run.metrics)
    assert (measure, rewards[0] < 0.3, rewards[-1]) == ("reward", True, 1.0)
    made_run(tmp_path, "low", steps=60)
    made_run(tmp_path, "high", steps=1, minutes=1)
    rows = History(tmp_path).rows()
    assert {row["measure"] for row in rows} == {"loss", "reward"}
    losses = {row["id"]: row["value"] for row in rows if row["measure"] == "loss"}
    assert losses["low"] < 1.0
    for descending, order in ((True, ["rewarded", "high", "low"]), (False, ["low", "high", "rewarded"])):
        assert [row["id"] for row in select(rows, sort="value", descending=descending)] == order


@pytest.mark.parametrize("text", ["", "{", "\0" * 100_000, "x" * 100_000, '{"step": 1, "loss": NaN}\n', "[1]\n" * 9])
def test_a_metrics_file_that_is_none_gives_no_sparkline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    assert watched_curve(path) == ("loss", [], None)


@pytest.mark.parametrize(
    "damage",
    [
        {"step": [1], "total_steps": "many", "cause": 7, "started_at": {}, "attempt": None},
        {"step": 10**400, "total_steps": -1, "started_at": "yesterday", "updated_at": 3},
        {"processes": {"a": 1}, "state": "running"},
    ],
)
def test_a_damaged_state_does_not_hide_the_others(tmp_path: Path, damage: dict) -> None:
    made_run(tmp_path, "good")
    bad = made_run(tmp_path, "bad")
    bad.state_file.write_text(json.dumps({**(bad.read_state() or {}), **damage}))
    (tmp_path / "none").mkdir()
    table = History(tmp_path)
    assert {row["id"] for row in table.rows()} == {"good", "bad"}
    assert page(table, {})["total"] == 2
    for sort in history.SORTS:
        assert len(select(table.rows(), sort=sort)) == 2


def test_links_and_pipes_in_a_run_folder_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"step": 1, "loss": 42.0}\n')
    linked, piped = made_run(tmp_path / "runs", "linked"), made_run(tmp_path / "runs", "piped")
    linked.metrics.unlink()
    linked.metrics.symlink_to(secret)
    piped.metrics.unlink()
    os.mkfifo(piped.metrics)
    assert {row["value"] for row in History(tmp_path / "runs").rows()} == {None}
    assert watched_curve(secret)[1] == [42.0]


def test_runs_elsewhere_are_listed_and_one_of_the_same_name_gives_way(tmp_path: Path) -> None:
    made_run(tmp_path / "runs", "a", steps=7)
    for name in ("a", "b"):
        register_outside(made_run(tmp_path / "far", name, steps=9), tmp_path / "runs")
    rows = {row["id"]: row["step"] for row in History(tmp_path / "runs").rows()}
    assert rows == {"a": 7, "b": 9}
    assert run_of_id("a", tmp_path / "runs").path.parent.name == "runs"
    assert run_of_id("b", tmp_path / "runs").path.parent.name == "far"


def test_rows_are_filtered_searched_and_sorted(tmp_path: Path) -> None:
    made_run(tmp_path, "one", "failed", steps=10, total_steps=40, cause="rank 1: Boom", strategy="fsdp2")
    made_run(tmp_path, "two", steps=30, minutes=5)
    made_run(tmp_path, "three", steps=20, minutes=9)
    rows = History(tmp_path).rows()
    assert [row["id"] for row in rows] == ["three", "two", "one"]
    assert [row["id"] for row in select(rows, state="failed")] == ["one"]
    assert [row["id"] for row in select(rows, search="BOOM fsdp")] == ["one"]
    assert [row["id"] for row in select(rows, search="boom zero")] == []
    assert [row["id"] for row in select(rows, sort="duration_s", descending=False)] == ["one", "three", "two"]
    assert select(rows, sort="progress", descending=False)[0]["id"] == "one"


@pytest.mark.parametrize("wrong", [{"state": "broken"}, {"sort": "run_dir"}, {"sort": "__class__"}])
def test_a_wrong_request_is_refused(tmp_path: Path, wrong: dict) -> None:
    made_run(tmp_path, "one")
    with pytest.raises(ConfigError, match="use one of"):
        select(History(tmp_path).rows(), **wrong)
    assert "use one of" in page(History(tmp_path), wrong)["error"]


def test_a_page_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PAGE", 2)
    for name in "abc":
        run = made_run(tmp_path, name)
    table = History(tmp_path)
    first = page(table, {"page": 0})
    assert (len(first["rows"]), first["total"], first["pages"], first["counts"]) == (2, 3, 2, {"done": 3})
    assert page(table, {"digest": first["digest"]}) == {"digest": first["digest"], "same": True}
    assert [row["id"] for row in page(table, {"page": 99})["rows"]] == ["a"]
    write_json(run.state_file, {**(run.read_state() or {}), "state": "failed"})
    assert page(table, {"digest": first["digest"]})["counts"] == {"done": 2, "failed": 1}
    for strange in (None, [], "x", {"page": "1; rm"}, {"words": {"a": 1}}, {"digest": ["x"]}):
        assert page(table, strange)["digest"]


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../far/x", "/etc", "a/../a", "a\0", "a\n", "x" * 300, "é" * 200, "\ud800", None, 7, ["a"], {}, "~",
     "link", "loop"],
)  # fmt: skip
def test_a_page_may_name_ids_only(tmp_path: Path, name: object) -> None:
    run = made_run(tmp_path / "runs", "a")
    outside = made_run(tmp_path / "far", "x")
    (tmp_path / "runs" / "link").symlink_to(outside.path)
    (tmp_path / "runs" / "loop").symlink_to(tmp_path / "runs" / "loop")
    for wrong in (name, str(run.path), str(outside.path)):
        with pytest.raises(ConfigError) as refused:
            run_of_id(wrong, tmp_path / "runs")
        assert len(refused.value.lines) == 1
        assert len(str(refused.value)) < 400
    assert run_of_id("a", tmp_path / "runs").path == run.path
    assert {row["id"] for row in History(tmp_path / "runs").rows()} == {one.id for one in list_runs(tmp_path / "runs")}
    assert RunFolder(tmp_path / "runs" / "link").exists()
