"""Runs over several machines: the words, what is launched on each, and what the supervisors tell each other."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.accelerate_launch import launch_argv, launch_environment
from app.command_line import TRAIN
from app.hardware import Devices, Gpu
from app.launch import restarts, supervisor, worker_node
from app.launch.exit_cause import cause_of
from app.launch.foreground import where, write_folder
from app.launch.job import TrainJob, resume_job, train_job
from app.launch.layouts import Layouts
from app.launch.links import Links
from app.launch.machines import choose_machines, devices_here
from app.launch.nodes import Nodes, NodeStatus, Pulses
from app.launch.restarts import need_of, run_to_end
from app.launch.worker_node import join_to_end, refuse_to_join
from app.runs.machines import SILENT_AFTER
from tests.detached import until
from trainers.config.mistakes import ConfigError
from trainers.run.device_locks import Holder, Need, holders, take_now
from trainers.run.folder import RunFolder, log_line, read_json, write_json
from trainers.strategy.strategy import Machines, from_launcher, load_strategy, over_machines, resolve

WORDS = {"num_machines": "2", "machine_rank": "1", "main_process_ip": "10.0.0.1", "main_process_port": "29500"}
TWO = Machines(2, 1, "10.0.0.1", 29500)
FOUR_GPUS = [Gpu(index, f"GPU-{index}", "Some GPU", 80.0) for index in range(4)]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    for name in ("EXIT_TIMEOUT", "TERM_TIMEOUT"):
        monkeypatch.setattr(supervisor, name, 0.5)
    for module in (supervisor, restarts, worker_node):
        monkeypatch.setattr(module, "POLL", 0.03)


def typed(*words: str, rank: int = 1, folder: str = "shared") -> list[str]:
    named = {**WORDS, "machine_rank": str(rank), "num_processes": "2", "output_dir": folder}
    return ["tiny-lora", *(f"--{name}={value}" for name, value in named.items()), *words]


# -- the words ---------------------------------------------------------------------------------------------------------


def test_the_words_name_the_machines() -> None:
    assert choose_machines(WORDS, {}) == TWO
    assert choose_machines({}, {"num_machines": 1, "main_process_port": 0}) is None
    assert choose_machines({"num_machines": "1"}, {"num_machines": 2, "main_process_ip": "a"}) is None
    stored = {"num_machines": 2, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
    assert choose_machines({"machine_rank": "1"}, stored) == TWO


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"machine_rank": "2"}, "machine_rank=2 is not a whole number from 0 to 1; write one"),
        ({"machine_rank": "-1"}, "machine_rank=-1 is not a whole number from 0 to 1"),
        ({"num_machines": "two"}, "num_machines=two is not a whole number from 1 to 128"),
        ({"num_machines": "0"}, "num_machines=0 is not a whole number from 1 to 128"),
        ({"num_machines": ""}, "machine_rank=1 without num_machines; add --num_machines 2"),
        ({"num_machines": "1"}, "num_machines=1 with --machine_rank 1; leave it out"),
        ({"main_process_port": "65536"}, "main_process_port=65536 is not a whole number from 1 to 65535"),
        ({"main_process_port": "0"}, "main_process_port=0 is not a whole number"),
        ({"main_process_ip": "-x y"}, "main_process_ip='-x y' is not an address"),
        ({"main_process_ip": "", "main_process_port": ""}, "also needs --main_process_ip, --main_process_port;"),
        ({"num_processes": "3"}, "num_processes=3 is not divisible by num_machines=2; .*: write 2"),
        ({"num_processes": ""}, "num_machines=2 without GPUs needs --num_processes, the total over all machines"),
        ({"num_processes": "0"}, "on each of 2 machines: num_processes=0 is out of range"),
        ({"gpus": "7"}, "on each of 2 machines: gpus=7: no GPU is visible here"),
        ({"output_dir": ""}, "num_machines=2 needs --output_dir, a folder that all machines see at the same path"),
        ({"strategy": "single"}, "distributed_type='NO' is one process, num_processes=2"),
    ],
)
def test_wrong_words_are_refused(changes: dict[str, str], line: str) -> None:
    words = {**WORDS, "num_processes": "2", "output_dir": "shared", **changes}
    with pytest.raises(ConfigError, match=line):
        train_job(TRAIN.read(["tiny-lora", *(f"--{name}={value}" for name, value in words.items() if value)]))
    assert not Path("shared").exists()


def test_processes_count_over_all_machines_and_gpus_on_each() -> None:
    four = devices_here({"num_processes": "4"}, TWO, None, [])
    assert (four, four.local_processes, four.machine_rank) == (Devices([], 4, TWO), 2, 1)
    assert need_of(four) == Need(cpu_slots=2)
    assert launch_environment(four, {}) == launch_environment(Devices([], 2), {})
    assert devices_here({"gpus": "1,3"}, TWO, None, FOUR_GPUS) == Devices([1, 3], 4, TWO)
    assert devices_here({"gpus": "1,3", "num_processes": "4"}, TWO, None, FOUR_GPUS) == Devices([1, 3], 4, TWO)
    assert devices_here({}, TWO, None, FOUR_GPUS) == Devices([0, 1, 2, 3], 8, TWO)
    with pytest.raises(ConfigError, match="on each of 2 machines: num_processes=1 with gpus=1,3"):
        devices_here({"gpus": "1,3", "num_processes": "2"}, TWO, None, FOUR_GPUS)


def test_the_same_words_give_each_machine_the_same_files_and_its_own_rank() -> None:
    first, second = (train_job(TRAIN.read(typed(rank=rank, folder=f"m{rank}"))) for rank in (0, 1))
    assert first.strategy == second.strategy
    assert {"num_machines": 2, "main_process_port": 29500}.items() <= first.strategy.values.items()
    assert "machine_rank" not in first.strategy.values
    assert where(second) == "1 CPU process of machine 1 of 2"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero3"])
def test_a_rank_reads_strategy_and_machines_back_from_the_launchers_words(strategy: str) -> None:
    wanted = resolve(over_machines(load_strategy(strategy), TWO), 4, "no")
    run = RunFolder("run")
    run.create()
    run.accelerate.write_text(wanted.dump())
    argv = launch_argv(run, 4, "auto", TWO, 60)
    assert argv[argv.index("--rdzv_conf") + 1] == "timeout=60"
    found = from_launcher(argv, "train.py")
    assert found.values == {**wanted.values, "machine_rank": 1}
    assert resolve(over_machines(found, None), 4, "no").values["num_machines"] == 1


def test_a_resume_needs_the_rank_alone() -> None:
    job = train_job(TRAIN.read(typed(rank=0)))
    write_folder(job)
    job.run.write_state(state="stopped")
    again = resume_job(job.run, TRAIN.read(["shared", "--machine_rank", "1"]))
    assert (again.devices, again.strategy.values) == (Devices([], 2, TWO), job.strategy.values)
    with pytest.raises(ConfigError, match="num_machines=2 also needs --machine_rank; run the same"):
        resume_job(job.run, TRAIN.read(["shared"]))
    alone = resume_job(job.run, TRAIN.read(["shared", "--num_machines", "1"]))
    assert (alone.devices, alone.strategy.values["num_machines"]) == (Devices([], 2), 1)
    job.run.write_state(state="running", host="another")  # machine 0 was quicker
    assert resume_job(job.run, TRAIN.read(["shared", "--machine_rank", "1"])).devices.machine_rank == 1
    for state, rank in (("running", "0"), ("done", "0"), ("done", "1")):
        job.run.write_state(state=state, host="another")
        with pytest.raises(ConfigError, match=f"run shared is {state}"):
            resume_job(job.run, TRAIN.read(["shared", "--machine_rank", rank]))


def test_a_machine_joins_a_folder_that_machine_0_has_made_and_none_whose_run_is_over() -> None:
    job = train_job(TRAIN.read(typed(rank=0)))
    write_folder(job)
    job.run.write_state(state="starting")
    assert train_job(TRAIN.read(typed())).run.path == job.run.path
    with pytest.raises(ConfigError, match="holds a run"):
        train_job(TRAIN.read(typed(rank=0)))
    job.run.write_state(state="done")
    with pytest.raises(ConfigError, match="holds a run that has ended; resume it, or use another"):
        train_job(TRAIN.read(typed()))


# -- machine 0 ---------------------------------------------------------------------------------------------------------


def launcher(run: RunFolder, body: str) -> list[str]:
    run.create()
    script = run.path / f"launcher-{len(list(run.path.glob('launcher-*')))}.py"
    script.write_text(f"import json, os, sys, time\n{body}\n", encoding="utf-8")
    return [sys.executable, "-I", "-S", str(script)]


@pytest.fixture
def run_0(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Machine 0's part of a run, with a launcher of the test's own."""

    def go(body: str, when: Callable[[str], None] = lambda launch: None, timeout: float = 60.0) -> dict[str, Any]:
        job = train_job(TRAIN.read(typed(rank=0)))
        write_folder(job)
        run = job.run
        words = launcher(run, body)
        monkeypatch.setattr(restarts, "launch_argv", lambda *more: words)
        monkeypatch.setattr(restarts, "FIRST_JOIN_TIMEOUT", timeout)

        def listen(kind: str, text: str) -> None:
            state = run.read_state() or {}
            if state.get("state") == "starting":
                when(str(state["launched_at"]))

        return run_to_end(run, job.devices, os.environ, listen, max_restarts=3)

    return go


def status_of_machine_1() -> NodeStatus:
    return NodeStatus(RunFolder("shared"), 1)


def test_a_machine_that_does_not_come_ends_the_run_with_its_name(run_0: Callable[..., dict[str, Any]]) -> None:
    state = run_0("time.sleep(0.5); sys.exit(1)", timeout=0.3)
    assert (state["state"], state["attempt"]) == ("failed", 0)
    assert state["cause"].startswith("machine 1 did not join within 0.3 s; start the same command there with its")


def test_a_crash_is_told_as_it_is(run_0: Callable[..., dict[str, Any]]) -> None:
    assert "exit status 3" in run_0("sys.exit(3)", lambda launch: status_of_machine_1().write(launch, ended=0))["cause"]


def test_a_launcher_that_fell_elsewhere_ends_this_one(run_0: Callable[..., dict[str, Any]]) -> None:
    state = run_0("time.sleep(600)", lambda launch: status_of_machine_1().write(launch, ended=1))
    assert (state["state"], (state["machines"])["over"]) == ("failed", True)
    assert state["machines"]["participants"] == [0, 1]


def test_what_a_machine_refuses_is_the_cause(run_0: Callable[..., dict[str, Any]]) -> None:
    state = run_0("time.sleep(600)", lambda launch: status_of_machine_1().write(launch, refused="seed=1, and"))
    assert (state["state"], state["cause"]) == ("failed", "machine 1: seed=1, and")


def test_a_node_that_cannot_train_ends_the_launch_that_waits_for_it(run_0: Callable[..., dict[str, Any]]) -> None:
    state = run_0("time.sleep(600)", lambda launch: refuse_to_join(RunFolder("shared"), 1, "no GPUs"))
    assert (state["state"], state["cause"]) == ("failed", "machine 1: no GPUs")


def test_a_stop_before_all_have_come_does_not_wait_for_them(run_0: Callable[..., dict[str, Any]]) -> None:
    state = run_0("time.sleep(600)", lambda launch: RunFolder("shared").ask_stop())
    assert (state["state"], state["cause"]) == ("stopped", "stopped before all machines had joined")


def test_a_word_of_an_earlier_launch_does_not_count() -> None:
    job = train_job(TRAIN.read(typed(rank=0)))
    write_folder(job)
    run, machines = job.run, Machines(3, 0, "a", 1)
    layouts = Layouts(job.config, job.strategy, Devices([], 3, machines))
    seen = Nodes(run, machines, "somewhere", 60, False, layouts, Pulses(run, [1, 2]), Links(machines, {}), list)
    assert seen.notice("now")["resume_from"] == str(Path("somewhere").absolute())
    NodeStatus(run, 1).write("before", ended=1)
    assert (seen.gather(59), seen.participants, seen.crashed()) == (None, None, False)
    NodeStatus(run, 2).write("now")
    assert (seen.gather(59), seen.participants, seen.crashed()) == (None, None, False)
    ending = seen.gather(60)
    assert ending
    assert str(ending.cause).startswith("machine 1 did not join within 60 s")
    assert ending.retry == "never"
    NodeStatus(run, 1).write("now", ended=1)
    assert (seen.gather(0), seen.participants, seen.crashed(), seen.ended()) == (None, [0, 1, 2], True, False)


def test_a_rank_of_another_machine_is_told_with_its_machine() -> None:
    run = RunFolder("shared")
    run.create()
    words = "E1121 10:00 api.py:874] failed (exitcode: -9) local_rank: 1 (pid: 77) of binary: python"
    run.log.write_text(log_line("launcher", f"machine 2: {words}"))
    assert cause_of(run, 0, 1).startswith("local rank 1 of machine 2 was killed by SIGKILL")


# -- the other machines ------------------------------------------------------------------------------------------------


class Member:
    """Machine 1's part of a run, in a thread, with a launcher of the test's own; machine 0 is the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.run, self.state, self.errors = RunFolder("shared"), dict[str, Any](), list[str]()
        self.asked = list[tuple[Any, ...]]()
        self.patch = monkeypatch

    def start(self, body: str, *words: str) -> None:
        job = train_job(TRAIN.read(typed(*words)))
        words_0 = launcher(self.run, body)

        def argv(*asked: Any) -> list[str]:
            self.asked.append(asked[1:])
            return words_0

        self.patch.setattr(worker_node, "launch_argv", argv)
        self.patch.setattr(worker_node.Arrival, "check", lambda arrival: None)
        self.thread = threading.Thread(target=self._go, args=(job,), daemon=True)
        self.thread.start()

    def _go(self, job: TrainJob) -> None:
        try:
            self.state = join_to_end(job, os.environ, lambda kind, text: None)
        except ConfigError as error:
            self.errors = error.lines

    def write(self, **changes: Any) -> None:
        self.run.write_state(host="another", **changes)

    def launch(self, launch: str, source: str | None = None) -> None:
        notice = {"resume_from": source, "timeout": 9, "over": False, "minimum": None}
        self.write(state="starting", launched_at=launch, machines={**notice, "participants": None})
        until(lambda: self.word()[0] == launch or not self.thread.is_alive() or self.is_queued(), 30)
        self.write(machines={**notice, "participants": [0, 1]})

    def is_queued(self) -> bool:
        return self.run.log.exists() and "machine 1: queued: " in self.run.log.read_text()

    def word(self) -> tuple[Any, Any]:
        word = read_json(self.run.machine_file(1)) or {}
        return word.get("launch"), word.get("ended")

    def end(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    return Member(monkeypatch)


def test_it_joins_every_launch_and_ends_with_the_run(member: Member) -> None:
    member.start("print('hello'); sys.exit(1)")
    write_folder(train_job(TRAIN.read(typed(rank=0))))
    member.write(state="queued")
    member.launch("one")
    until(lambda: member.word() == ("one", 1), 30)
    member.launch("two", "auto")
    until(lambda: member.word() == ("two", 1), 30)
    assert {holder["run"] for holder in holders().values()} == {"shared"}, "it keeps its slots between them"
    member.write(state="failed", cause="row 7")
    member.end()
    assert (member.state["state"], member.state["cause"]) == ("failed", "row 7")
    assert member.asked == [(2, None, TWO, 9.0), (2, "auto", TWO, 9.0)]
    assert member.run.log.read_text().count("[launcher] machine 1: hello\n") == 2
    assert holders() == {}


@pytest.mark.parametrize("how", ["over", "another launch", "the end"])
def test_a_launcher_that_nobody_waits_for_is_ended(how: str, member: Member) -> None:
    write_folder(train_job(TRAIN.read(typed(rank=0))))
    member.start("time.sleep(600)")
    member.launch("one")
    until(lambda: len((read_json(member.run.machine_file(1)) or {}).get("processes", ())) == 2, 30)
    if how == "over":
        member.write(machines={"over": True})
    else:
        member.write(**({"state": "failed"} if how == "the end" else {"launched_at": "two"}))
    until(lambda: member.word()[1] or member.word()[0] == "two", 30)
    member.write(state="failed")
    member.end()


def test_other_words_than_machine_0s_are_refused_and_told(member: Member) -> None:
    write_folder(train_job(TRAIN.read(typed("--max_steps", "7", rank=0))))
    member.start("sys.exit(0)", "--max_steps", "8", "--strategy", "fsdp2")
    member.launch("one")
    member.end()
    line = "max_steps=8, but machine 0 was started with 7; run the same command on each machine"
    assert member.errors[0] == line
    assert any(one.startswith("distributed_type=FSDP, but machine 0 was started with MULTI") for one in member.errors)
    word = read_json(member.run.machine_file(1)) or {}
    assert word["refused"].startswith(line)
    assert member.asked == []


def test_one_process_a_machine(member: Member) -> None:
    write_folder(train_job(TRAIN.read(typed(rank=0))))
    with member.run.hold(1), member.run.hold():
        member.start("sys.exit(0)")
        member.end()
    assert "is already running on machine 1; give each machine a --machine_rank of its own" in member.errors[0]


def test_it_waits_for_slots_and_leaves_the_queue_when_the_launch_is_over(member: Member) -> None:
    write_folder(train_job(TRAIN.read(typed(rank=0))))
    with take_now(Need(cpu_slots=1000), Holder("busy")):
        member.start("sys.exit(0)")
        member.launch("one")
        until(lambda: "machine 1: queued: " in (member.run.log.read_text() if member.run.log.exists() else ""), 30)
        member.write(state="failed", cause="nobody came")
        member.end()
    assert (member.state["cause"], member.asked) == ("nobody came", [])


def test_it_does_not_wait_for_ever(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_node, "FIRST_JOIN_TIMEOUT", 0.3)
    member.start("sys.exit(0)")
    member.end()
    assert member.state["state"] == "failed"
    assert member.state["cause"].startswith("machine 1 has not heard from machine 0 for 0.3 s; start the same")


@pytest.mark.parametrize("before", ["failed", "running"])
def test_a_resume_waits_for_the_next_start(before: str, member: Member) -> None:
    """Also after machine 0 was lost, which then has not written that the run failed."""
    write_folder(train_job(TRAIN.read(typed(rank=0))))
    member.write(state=before, launched_at="one", cause="old", machines={"count": 2, "minimum": None})
    write_json(member.run.machine_file(0), {})
    long_ago = time.time() - 2 * SILENT_AFTER
    os.utime(member.run.machine_file(0), (long_ago, long_ago))
    member.start("sys.exit(0)", "--resume_from_checkpoint", "auto")
    until(lambda: member.word()[0] == "", 30)
    write_json(member.run.machine_file(0), {})
    member.launch("two", "auto")
    until(lambda: member.word() == ("two", 0), 30)
    member.write(state="done")
    member.end()
    assert (member.state["state"], member.asked) == ("done", [(2, "auto", TWO, 9.0)])


def exchange(first: Path, second: Path) -> None:
    """Swaps two folders at once, so that nobody sees the moment without either."""
    here, at_once = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    assert ctypes.CDLL(None, use_errno=True).renameat2(here, bytes(first), here, bytes(second), at_once) == 0


@pytest.mark.parametrize(("made_anew", "how"), [(False, "removed"), (True, "replaced by another")])
@pytest.mark.parametrize(("phase", "doing"), [("waiting", "waited for machine 0"), ("training", "trained")])
def test_a_lost_run_folder_ends_its_part_and_nothing_is_written_in_its_place(
    phase: str, doing: str, made_anew: bool, how: str, member: Member
) -> None:
    write_folder(train_job(TRAIN.read(typed(rank=0))))
    member.start("time.sleep(600)")
    until((member.run.heartbeats / "machine-1.lock").exists, 30)
    if phase == "training":
        member.launch("one")
        until(lambda: len((read_json(member.run.machine_file(1)) or {}).get("processes", ())) == 2, 30)
    launchers = [one["pid"] for one in (read_json(member.run.machine_file(1)) or {}).get("processes", ())[1:]]
    if made_anew:
        Path("elsewhere").mkdir()
        Path("elsewhere", "mine").write_text("text")
        exchange(member.run.path, Path("elsewhere"))
    else:
        member.run.path.rename("elsewhere")
    member.end()
    assert member.state["cause"] == f"the run folder {member.run.path} was {how} while it {doing}"
    assert (member.state["state"], len(launchers)) == ("failed", phase == "training")
    assert not [pid for pid in launchers if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    found = [path.name for path in member.run.path.iterdir()] if member.run.path.exists() else []
    assert found == ["mine"] * made_anew
    assert holders() == {}
