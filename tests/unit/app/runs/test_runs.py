"""Finding, listing and stopping runs, with processes that really live and really end."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from app.commands.runs import list_verb
from app.launch.process_tree import Descendants
from app.runs import runs
from app.runs.runs import Tail, find_run, list_runs, log_lines, metrics, stop_run, strategy_name, summary, true_state
from trainers.config.mistakes import ConfigError
from trainers.run.ending import Ending
from trainers.run.folder import Process, RunFolder, register_outside, write_json
from trainers.strategy.strategy import load_strategy, resolve

Maker = Callable[..., RunFolder]
SYS_EXIT = {"x86_64": 60, "aarch64": 93}.get(platform.machine(), 0)
"""Number of the system call that ends one thread."""


@pytest.fixture(autouse=True)
def _own_state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """Makes a run; below `tmp_path/runs` unless told otherwise."""

    def maker(name: str, state: str = "done", where: Path | None = None, **more: object) -> RunFolder:
        run = RunFolder((where or tmp_path / "runs") / name)
        run.create()
        run.config.write_text("preset: tiny-lora\n")
        run.write_state(state=state, **more)
        return run

    return maker


@pytest.fixture
def living() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def entry(pid: int) -> dict:
    return Process.of("launcher", pid=pid).as_json()


def test_a_live_state_whose_processes_are_gone_is_a_failure(make: Maker, living: subprocess.Popen[bytes]) -> None:
    run = make("a", "running", processes=[entry(living.pid)], step=5)
    assert true_state(run)["state"] == "running"
    living.kill()
    living.wait()
    assert true_state(run)["state"] == "failed"
    assert true_state(run)["cause"] == runs.DIED
    assert (run.read_state() or {})["state"] == "running", "a reader never writes the state"


def test_a_run_is_over_when_its_last_rank_is_gone(make: Maker, living: subprocess.Popen[bytes]) -> None:
    """Rank 0 says so itself where no supervisor does, with its GPU still in hand."""
    rank = Process.of("rank", 0, pid=living.pid).as_json()
    assert true_state(make("a", "done", processes=[rank], step=5))["state"] == "running", "nobody has stopped it"
    run = make("d", "stopped", processes=[rank], step=5)
    assert true_state(run)["state"] == "stopping"
    assert true_state(make("b", "done", processes=[{**rank, "role": "launcher"}]))["state"] == "done", "it holds none"
    assert true_state(make("c", "done", host="elsewhere", processes=[rank]))["state"] == "done"
    living.kill()
    living.wait()
    assert true_state(run)["state"] == "stopped"


def test_a_run_that_came_to_its_end_is_not_said_to_be_stopping(make: Maker) -> None:
    """Its supervisor has yet to see its processes go, which may take a while."""
    run = make("a", "running", processes=[Process.of("supervisor").as_json()])
    for end, state in (("done", "running"), ("stopped", "stopping"), ("failed", "stopping")):
        run.end(Ending(end), True)
        assert (run.read_state() or {})["state"] == state
        assert (run.read_state() or {})["ending"]["state"] == end


def test_a_zombie_is_no_living_process(make: Maker, living: subprocess.Popen[bytes]) -> None:
    run = make("a", "running", processes=[entry(living.pid)])
    living.kill()
    deadline = time.monotonic() + 10
    while true_state(run)["state"] == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert true_state(run)["state"] == "failed"


@pytest.fixture
def leaderless() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose main thread has ended and whose other one has not, as a killed one may be for a moment."""
    if sys.platform != "linux" or not SYS_EXIT:
        pytest.skip("a thread ends alone by Linux's own call")
    other = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    process = subprocess.Popen([sys.executable, "-c", f"{other}; ctypes.CDLL(None).syscall({SYS_EXIT}, 0)"])
    deadline = time.monotonic() + 10
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield process
    process.kill()
    process.wait()


def test_a_process_lives_as_long_as_its_last_thread(make: Maker, leaderless: subprocess.Popen[bytes]) -> None:
    """It holds its locks and its GPU as long."""
    run = make("a", "running", processes=[entry(leaderless.pid)])
    assert true_state(run)["state"] == "running"
    leaderless.kill()
    leaderless.wait()
    assert true_state(run)["state"] == "failed"


def test_the_last_thread_of_a_run_is_ended_too(leaderless: subprocess.Popen[bytes]) -> None:
    mine = Descendants()
    mine.before.discard(psutil.Process(leaderless.pid))
    mine.collect()
    assert psutil.Process(leaderless.pid) in mine.alive()
    mine.end(5.0)
    assert mine.alive() == []
    assert not psutil.pid_exists(leaderless.pid)


def test_another_process_with_the_same_pid_does_not_count(make: Maker, living: subprocess.Popen[bytes]) -> None:
    now = entry(living.pid)
    old = now | {"started": now["started"] - 1000, "since_boot": now["since_boot"] - 1000}
    assert true_state(make("a", "running", processes=[old]))["cause"] == runs.DIED


def test_what_a_rank_noted_is_the_cause_where_rank_0_had_no_time_to_say_it(make: Maker) -> None:
    """Under NCCL it waits for that rank until its launcher kills it."""
    run = make("a", "running", processes=[])
    write_json(run.heartbeats / "rank-1.json", {"rank": 1, "section": "failed", "cause": "no space left"})
    assert true_state(run)["cause"] == "rank 1: no space left"


def test_a_full_disk_is_named_where_a_run_ended_without_a_word(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not write why."""
    run = make("a", "running", processes=[])
    monkeypatch.setattr(runs, "MIN_FREE_BYTES", 1 << 62)
    assert "bytes free" in true_state(run)["cause"]
    assert true_state(run)["cause"].startswith(runs.DIED)


def test_an_old_state_alone_is_no_death(make: Maker, living: subprocess.Popen[bytes]) -> None:
    run = make("a", "running", processes=[entry(living.pid)])
    write_json(run.state_file, {**(run.read_state() or {}), "updated_at": "2001-01-01T00:00:00+00:00"})
    os.utime(run.state_file, (0, 0))
    assert true_state(run)["state"] == "running"


def test_a_run_of_another_host_is_believed(make: Maker) -> None:
    run = make("a", "running", host="elsewhere", processes=[{"role": "rank", "rank": 0, "pid": 1, "started": 1.0}])
    assert true_state(run)["state"] == "running"


@pytest.mark.parametrize(
    "processes", [[{}], ["x"], [{"role": "rank", "rank": 0, "pid": "no", "started": None}], 7 * [None]]
)
def test_strange_process_entries_are_no_processes(make: Maker, processes: list) -> None:
    assert true_state(make("a", "running", processes=processes))["cause"] == runs.DIED


def test_the_list_is_newest_first_and_holds_runs_only(make: Maker, tmp_path: Path) -> None:
    make("old", started_at="2026-01-01T00:00:00")
    make("new", started_at="2026-02-01T00:00:00")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "file.txt").write_text("x")
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "state.json").write_text('{"state": ')
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "state.json").write_text('{"state": "nonsense"}')
    assert [run.id for run in list_runs(tmp_path / "runs")] == ["new", "old"]
    assert list_runs(tmp_path / "nowhere") == []


def test_a_run_elsewhere_is_listed_once_it_is_registered(make: Maker, tmp_path: Path) -> None:
    inside, outside = make("inside"), make("outside", where=tmp_path / "far")
    for run in (inside, outside, outside):
        register_outside(run, tmp_path / "runs")
    assert len(list((tmp_path / "state" / "tunesmith" / "runs").iterdir())) == 1
    assert {run.id for run in list_runs(tmp_path / "runs")} == {"inside", "outside"}
    assert find_run("outside", tmp_path / "runs").path == outside.path.resolve()


def test_a_summary_has_the_keys_of_the_design(make: Maker) -> None:
    run = make("a", step=3, total_steps=9)
    run.accelerate.write_text(resolve(load_strategy("ddp"), 4, "bf16").dump())
    run.command.write_text("CUDA_VISIBLE_DEVICES=0,1,2,3 python -m accelerate.commands.launch\n")
    row = summary(run)
    keys = ["id", "state", "cause", "step", "total_steps", "preset", "strategy", "world_size", "gpus", "started_at"]
    assert list(row) == [*keys, "run_dir"]
    assert (row["strategy"], row["world_size"], row["gpus"], row["preset"]) == ("ddp", 4, [0, 1, 2, 3], "tiny-lora")
    assert summary(make("bare"))["world_size"] is None


def test_a_strategy_keeps_its_name_in_the_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert strategy_name(run) == ""
    run.accelerate.write_text(resolve(load_strategy("single"), 1, "no").dump())
    assert strategy_name(run) == "single"
    run.accelerate.write_text(replace(load_strategy("ddp"), name="my\nddp: x").dump())
    assert strategy_name(run) == "myddp: x"


@pytest.mark.parametrize(
    "name",
    ["..", "../outside", "runs/../outside", "/etc", "/etc/passwd", ".", "..%2foutside", "", " ", "a\0b", "a\nb",
     "x" * 5000, "\u202egnp", "inside/checkpoints", "~", "$(id)", "inside; touch x"],
)  # fmt: skip
def test_what_is_no_run_is_refused_in_one_line(name: str, make: Maker, tmp_path: Path) -> None:
    make("inside")
    make("outside", where=tmp_path)
    with pytest.raises(ConfigError) as refused:
        find_run(name, tmp_path / "runs")
    assert len(refused.value.lines) == 1
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_link_that_leads_out_is_neither_found_nor_listed(make: Maker, tmp_path: Path) -> None:
    outside = make("outside", where=tmp_path)
    make("inside")
    (tmp_path / "runs" / "link").symlink_to(outside.path)
    for name in ("link", str(tmp_path / "runs" / "link")):
        with pytest.raises(ConfigError, match="points outside"):
            find_run(name, tmp_path / "runs")
    assert [run.id for run in list_runs(tmp_path / "runs")] == ["inside"]


def test_a_run_is_found_by_id_and_by_path_and_a_slip_gets_a_hint(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("20261121-101530-tiny-lora-2s1")
    monkeypatch.chdir(tmp_path)
    for name in (run.id, str(run.path), f"runs/{run.id}", f"runs/{run.id}/"):
        assert find_run(name, Path("runs")).path == run.path
    with pytest.raises(ConfigError, match=f"did you mean {run.id}"):
        find_run(run.id[:-1], Path("runs"))


def test_stopping_asks_and_waits(make: Maker, living: subprocess.Popen[bytes]) -> None:
    run = make("a", "running", processes=[entry(living.pid)])

    def answer() -> None:
        while not run.stop_request.exists():
            time.sleep(0.02)
        run.write_state(state="stopped", cause="stopped by request")
        living.kill()

    thread = threading.Thread(target=answer)
    thread.start()
    stopped = stop_run(run, timeout=20, poll=0.05)
    thread.join()
    assert (stopped.state["state"], stopped.already, stopped.in_time) == ("stopped", False, True)


def test_stopping_gives_up_in_time_and_says_so(make: Maker, living: subprocess.Popen[bytes]) -> None:
    stopped = stop_run(make("a", "running", processes=[entry(living.pid)]), timeout=0.2, poll=0.05)
    assert (stopped.state["state"], stopped.in_time) == ("running", False)


@pytest.mark.parametrize("state", ["done", "failed", "running"])
def test_a_run_that_has_ended_is_not_asked(make: Maker, state: str) -> None:
    run = make("a", state, processes=[])
    stopped = stop_run(run, timeout=1)
    assert (stopped.already, stopped.in_time) == (True, True)
    assert not run.stop_request.exists()


def test_a_tail_gives_whole_lines_once(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_text("one\ntw")
    assert tail.lines() == ["one"]
    with open(path, "a") as file:
        file.write("o\nthree\n")
    assert tail.lines() == ["two", "three"]
    assert tail.lines() == []


def test_a_tail_survives_an_endless_line(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("x" * (2 * Tail.MAX_BYTES + 5) + "\nend\n")
    tail, seen = Tail(path), []
    while lines := tail.lines():
        seen += lines
    assert seen[-1] == "end"
    assert sum(line.count("x") for line in seen) == 2 * Tail.MAX_BYTES + 5


def test_following_a_log_ends_with_the_run(make: Maker, living: subprocess.Popen[bytes]) -> None:
    run = make("a", "running", processes=[entry(living.pid)])
    run.log.write_text("first\n")
    seen = []
    for line in log_lines(run, follow=True, poll=0.05):
        seen.append(line)
        if line == "first":
            with open(run.log, "a") as file:
                file.write("last\n")
            run.write_state(state="done")
    assert seen == ["first", "last"]


def test_half_a_metrics_row_is_left_out(make: Maker) -> None:
    run = make("a")
    run.metrics.write_text('{"step": 1, "loss": 2.0}\n[1]\n{"step": 2, "lo')
    assert list(metrics(run)) == [{"step": 1, "loss": 2.0}]
    assert runs.last_values(run) == {"step": 1, "loss": 2.0}


def test_the_last_checkpoint_is_a_published_one(make: Maker) -> None:
    run = make("a")
    assert runs.last_checkpoint(run) is None
    for name in ("step-00000002", "step-00000010", "step-00000020.tmp-1", "bad-step-00000030"):
        (run.checkpoints / name).mkdir()
    assert runs.last_checkpoint(run) == "step-00000010"


def test_two_runs_of_one_name_are_not_guessed(make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    far, further = make("out", where=tmp_path / "far"), make("out", where=tmp_path / "further")
    for run in (far, further):
        register_outside(run, tmp_path / "runs")
    with pytest.raises(ConfigError, match="is the name of 2 runs") as refused:
        find_run("out", tmp_path / "runs")
    assert str(far.path) in str(refused.value)
    assert str(further.path) in str(refused.value)
    monkeypatch.chdir(tmp_path / "further")
    for name in ("./out", "out/", str(further.path)):
        assert find_run(name, tmp_path / "runs").path == further.path


@pytest.mark.parametrize(
    "damage",
    [
        {"processes": 7},
        {"processes": {"a": 1}},
        {"processes": [{"role": "rank", "rank": 0, "pid": -5, "started": 1.0}]},
        {"processes": [{"role": "rank", "rank": 0, "pid": 10**30, "started": 1.0}]},
        {"processes": [{"role": "rank", "rank": 0, "pid": float("inf"), "started": 1.0}]},
        {"step": [1], "total_steps": "many", "cause": 7, "started_at": {}, "attempt": None},
    ],
)
def test_one_damaged_state_does_not_hide_the_other_runs(
    make: Maker, tmp_path: Path, damage: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    make("good")
    bad = make("bad", "running", processes=[])
    write_json(bad.state_file, {**(bad.read_state() or {}), **damage})
    for as_json in (True, False):
        assert list_verb(tmp_path / "runs", as_json) == 0
        shown = capsys.readouterr().out
        assert "good" in shown
        assert "bad" in shown


def test_the_last_line_of_a_log_needs_no_end(make: Maker) -> None:
    run = make("a")
    run.log.write_text("one\nkilled in the mid")
    assert list(log_lines(run)) == ["one", "killed in the mid"]
    assert list(log_lines(run, follow=True)) == ["one", "killed in the mid"]
