"""Which machines take part in a launch, with which settings, and when the others are waited for no longer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from app.command_line import TRAIN
from app.hardware import Devices
from app.launch import nodes as nodes_module
from app.launch.foreground import write_folder
from app.launch.job import TrainJob, resume_job, train_job
from app.launch.layouts import Layouts, choose_participants, part_of
from app.launch.links import Links
from app.launch.nodes import Nodes, NodeStatus, Pulses
from app.launch.restarts import _Members
from app.runs.machines import machines_line
from trainers.config.mistakes import ConfigError
from trainers.run.ending import Ending
from trainers.strategy.strategy import Machines, load_strategy, resolve

Choice = Callable[[Collection[int], int, Callable[[int], bool]], list[int]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)


def typed(*words: str, count: int = 3, each: int = 1, batch: int = 12, micro_batch: int = 4) -> TrainJob:
    network = f"--num_machines={count} --machine_rank=0 --main_process_ip=10.0.0.1 --main_process_port=29500"
    sizes = f"--num_processes={count * each} --global_batch_size={batch} --per_device_train_batch_size={micro_batch}"
    return train_job(TRAIN.read(["tiny-lora", *network.split(), *sizes.split(), "--output_dir=shared", *words]))


# -- the choice --------------------------------------------------------------------------------------------------------


def promised(choose: Choice, count: int, minimum: int, lost: set[int], batch: int) -> None:
    """What holds for any choice of machines."""
    present = set(range(count)) - (lost - {0})
    chosen = choose(present, minimum, lambda number: batch % number == 0)
    possible = [number for number in range(minimum, len(present) + 1) if batch % number == 0]
    assert len(chosen) == max(possible, default=0), "as many as there can be, or none"
    assert set(chosen) <= present
    assert chosen == sorted(set(chosen)), "a rank is an index"
    assert not chosen or (chosen[0] == 0 and batch % len(chosen) == 0)
    spare = present - set(chosen)
    assert not (chosen and spare) or min(spare) > max(chosen)


CASES = some.integers(1, 16).flatmap(
    lambda count: some.tuples(
        some.just(count), some.integers(1, count), some.sets(some.integers(1, 15)), some.integers(1, 256)
    )
)


@given(CASES)
def test_the_choice_of_machines(case: tuple[int, int, set[int], int]) -> None:
    promised(choose_participants, *case)


WRONG: dict[str, Choice] = {
    "all that are there": lambda present, minimum, fits: sorted(present),
    "too few": lambda present, minimum, fits: choose_participants(present, 1, fits),
    "the last ones": lambda present, minimum, fits: sorted(present)[-len(choose_participants(present, minimum, fits)):],
    "the fewest": lambda present, minimum, fits: sorted(present)[
        : next((count for count in range(minimum, len(present) + 1) if fits(count)), 0)
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_choice_is_seen(name: str) -> None:
    def every_case() -> None:
        for count, minimum, gone in itertools.product(range(1, 6), range(1, 6), range(6)):
            if minimum <= count:
                promised(WRONG[name], count, minimum, set(range(1, gone)), 12)

    with pytest.raises(AssertionError):
        every_case()


def test_the_rank_of_a_machine_is_its_place_among_those_that_take_part() -> None:
    machines = Machines(4, 3, "a", 1, 1)
    assert part_of(machines, [0, 1, 3]) == Machines(3, 2, "a", 1, 1)
    assert part_of(Machines(4, 0, "a", 1, 1), [0]) is None


# -- the settings ------------------------------------------------------------------------------------------------------


def test_the_global_batch_is_the_same_on_any_number_of_machines() -> None:
    job = typed("--min_machines=1")
    layouts = Layouts(job.config, job.strategy, job.devices)
    for count, micro_batch, steps in ((3, 4, 1), (2, 3, 2), (1, 4, 3)):
        config, strategy = layouts.on(count)
        assert config.global_batch_size == job.config.global_batch_size == 12
        assert (config.per_device_train_batch_size, strategy.num_processes) == (micro_batch, count)
        assert config.accumulation_steps(strategy.data_parallel_size) == steps
        assert (strategy.values.get("num_machines") or 1) == count
    assert layouts.on(1)[1].name == "single"


def test_what_does_not_divide_is_not_used() -> None:
    job = typed("--min_machines=1", count=4, batch=8, micro_batch=2)
    layouts = Layouts(job.config, job.strategy, job.devices)
    assert [layouts.fits(count) for count in (1, 2, 3, 4)] == [True, True, False, True]
    assert "global_batch_size=8" in layouts.mistakes(3)[0]
    mesh = typed("--strategy=hsdp", "--dp_replicate_size=2", count=4, each=2, batch=24, micro_batch=3)
    layouts = Layouts(mesh.config, mesh.strategy, mesh.devices)
    assert [layouts.fits(count) for count in (1, 2, 3, 4)] == [False, True, True, True]
    assert layouts.on(3)[1].sizes.dp_replicate == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--min_machines=4"], "min_machines=4 is not a whole number from 1 to 3"),
        (["--min_machines=0"], "min_machines=0 is not a whole number from 1 to 3"),
        (["--min_machines=two"], "min_machines=two is not a whole number"),
    ],
)
def test_wrong_words(words: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        typed(*words)
    with pytest.raises(ConfigError, match="min_machines=2 without num_machines"):
        train_job(TRAIN.read(["tiny-lora", "--min_machines=2"]))


def test_a_resume_knows_all_machines_although_fewer_trained() -> None:
    job = typed("--min_machines=2", each=2, batch=24)
    write_folder(job)
    members = _Members(job.run, job.devices, job.devices.machines or Machines(0, 0, "", 0), {})
    members.write_files(2)
    machines = {"count": 3, "minimum": 2, "participants": [0, 2], "absent": {"1": "it is gone"}}
    job.run.write_state(state="failed", machines=machines)
    again = resume_job(job.run, TRAIN.read(["shared", "--machine_rank", "1"]))
    assert again.devices == Devices([], 6, Machines(3, 1, "10.0.0.1", 29500, 2))
    assert again.strategy.values == job.strategy.values
    assert machines_line(job.run.read_state() or {}) == "2 of 3 machines; machine 1: it is gone"


@pytest.mark.parametrize(
    "value",
    [
        *(None, 3, [], "x", {"count": "3"}, {"count": 10**99, "participants": [0]}),
        {"count": 3, "participants": "01"},
        {"count": True, "participants": []},
    ],
)
def test_a_damaged_state_says_nothing_about_machines(value: Any) -> None:
    assert machines_line({"machines": value}) == ""
    assert machines_line({"machines": {"count": 3, "participants": [0], "absent": [1]}}) == "1 of 3 machines"


# -- who is waited for -------------------------------------------------------------------------------------------------


class Gathering:
    """Machine 0 of three, whose members report by the test's own words."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, minimum: int | None, restarted: bool):
        job = typed(*([f"--min_machines={minimum}"] if minimum else []))
        write_folder(job)
        self.clock = 1000.0
        monkeypatch.setattr(nodes_module.time, "monotonic", lambda: self.clock)
        machines = job.devices.machines
        assert machines is not None
        self.run, self.pulses = job.run, Pulses(job.run, [1, 2])
        layouts = Layouts(job.config, job.strategy, job.devices)
        links = Links(machines, {})
        self.nodes = Nodes(job.run, machines, None, 60, restarted, layouts, self.pulses, links, lambda participants: [])
        self.nodes.notice("now")
        self.members = {machine: NodeStatus(job.run, machine) for machine in (1, 2)}

    def after(self, seconds: float, *alive: int) -> tuple[Ending | None, list[int] | None]:
        """What is decided after some seconds, during which some members gave signs of life."""
        for _ in range(int(seconds)):
            self.clock += 1
            for machine in alive:
                self.members[machine]._beat()
            self.pulses.look()
        return self.nodes.gather(self.clock - 1000.0), self.nodes.participants


def test_a_restart_does_not_wait_for_a_silent_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, 2, restarted=True)
    gathering.members[1].write("now")
    assert gathering.after(19, 1) == (None, None)
    assert gathering.after(2, 1) == (None, [0, 1])
    assert gathering.nodes.line() == "goes on with 2 of 3 machines; machine 2: no sign of life for 20 s"
    assert gathering.nodes.lost() == ""
    gathering.after(21)
    assert gathering.nodes.lost() == "machine 1 was lost: no sign of life for 20 s"


def test_a_restart_waits_for_a_machine_that_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, 2, restarted=True)
    gathering.members[1].write("now")
    assert gathering.after(50, 1, 2) == (None, None)
    gathering.members[2].write("now")
    assert gathering.after(1, 1, 2) == (None, [0, 1, 2])
    assert gathering.nodes.line() == ""


def test_a_first_start_gives_everyone_the_time_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, 2, restarted=False)
    gathering.members[1].write("now")
    assert gathering.after(59, 1) == (None, None)
    assert gathering.after(1, 1) == (None, [0, 1])
    assert "machine 2: it did not join within 60 s" in gathering.nodes.line()


def test_a_machine_that_reaches_nobody_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, 2, restarted=True)
    gathering.members[1].write("now")
    gathering.members[2].write("now", unreachable="it cannot reach machine 0")
    assert gathering.after(1, 1, 2) == (None, [0, 1])
    assert "machine 2: it cannot reach machine 0" in gathering.nodes.line()


def test_a_first_start_does_not_wait_long_for_a_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, None, restarted=False)
    gathering.members[1].write("now")
    assert gathering.after(1, 1, 2) == (None, None)
    gathering.members[2].write("now", unreachable="it cannot reach machine 0")
    assert gathering.after(1, 1, 2) == (None, None)
    assert gathering.after(19, 1, 2) == (None, None), "it may be mended"
    ending, _ = gathering.after(2, 1, 2)
    assert ending
    assert (ending.cause, ending.retry) == ("machine 2: it cannot reach machine 0", "never")


@pytest.mark.parametrize("minimum", [None, 2])
def test_a_machine_with_another_torch_takes_no_part(minimum: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, minimum, restarted=False)
    gathering.members[1].write("now")
    gathering.members[2].facts = {"versions": {**gathering.nodes.links.own, "torch": "1.0"}}
    gathering.members[2].write("now")
    ending, participants = gathering.after(1, 1, 2)
    assert participants == (None if minimum is None else [0, 1])
    text = gathering.nodes.line() if ending is None else str(ending.cause)
    assert "machine 2: it has torch 1.0, and machine 0 " in text


def test_a_wrong_interface_of_machine_0_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, 2, restarted=False)
    gathering.nodes.links.env = {"GLOO_SOCKET_IFNAME": "nothing0"}
    ending, _ = gathering.after(1)
    assert str(ending and ending.cause).startswith("machine 0: GLOO_SOCKET_IFNAME=nothing0 names no network interface")


@pytest.mark.parametrize(
    ("minimum", "cause"),
    [
        (None, "machine 2 did not join within 60 s; start the same command there with its --machine_rank, and check "
               "that it sees this folder"),
        (3, "machine 2 did not join within 60 s; start the same command there with its --machine_rank, and check that "
            "it sees this folder; 2 of 3 machines are there, fewer than min_machines=3"),
    ],
)  # fmt: skip
def test_too_few_machines(minimum: int | None, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, minimum, restarted=True)
    gathering.members[1].write("now")
    assert gathering.after(59, 1) == (None, None)
    ending, chosen = gathering.after(2, 1)
    assert (ending, chosen) == (Ending("failed", cause), None)


def test_a_member_with_other_words_does_not_end_a_run_that_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, 2, restarted=True)
    gathering.members[1].write("now")
    gathering.members[2].write("now", refused="seed=1, but")
    assert gathering.after(1, 1, 2) == (None, [0, 1])
    assert gathering.nodes.absent == {2: "seed=1, but"}


def test_an_old_file_is_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering = Gathering(monkeypatch, 2, restarted=True)
    gathering.members[2].write("before")
    gathering.after(30)
    assert (gathering.pulses.seen, gathering.pulses.silent(2)) == (set(), True)
    gathering.after(2, 2)
    assert (gathering.pulses.seen, gathering.pulses.silent(2)) == ({2}, False)


def test_the_strategy_is_found_again_from_the_file_of_fewer_machines() -> None:
    full = resolve(load_strategy("fsdp2"), 6, "no")
    assert resolve(full, 4, "no").num_processes == 4


# -- members that do not reach each other ------------------------------------------------------------------------------


def facts_of(count: int, *blocked: tuple[int, int]) -> dict[int, dict[str, Any]]:
    """What members report of which some do not reach others."""
    ports = {machine: 4000 + machine for machine in range(1, count)}
    return {
        machine: {
            "address": "10.0.0.1", "port": ports[machine],
            "links": {
                str(other): ["10.0.0.1", ports[other], "there" if (machine, other) in blocked else None]
                for other in ports if other != machine
            },
        }
        for machine in ports
    }  # fmt: skip


@pytest.mark.parametrize(
    ("blocked", "left_out"),
    [
        ((), {}),
        (((1, 2),), {2: "machine 1 cannot reach it at there"}),
        (((2, 1),), {2: "it cannot reach machine 1 at there"}),
        (((1, 2), (2, 1)), {2: "machine 1 cannot reach it at there"}),
        (((2, 1), (2, 3)), {2: "it cannot reach machine 1 at there"}),
        (((1, 2), (1, 3), (1, 4)), {1: "it cannot reach machine 2 at there"}),
        (((1, 2), (3, 4)), {2: "machine 1 cannot reach it at there", 4: "machine 3 cannot reach it at there"}),
    ],
)
def test_of_two_that_do_not_reach_each_other_one_is_left_out(
    blocked: tuple[tuple[int, int], ...], left_out: dict[int, str]
) -> None:
    links = Links(Machines(5, 0, "10.0.0.1", 29500), {})
    reasons = links.blocked(facts_of(5, *blocked))
    assert {machine: reason.partition(";")[0] for machine, reason in reasons.items()} == left_out


@given(some.sets(some.tuples(some.integers(1, 7), some.integers(1, 7)).filter(lambda pair: pair[0] != pair[1])))
def test_the_others_all_reach_each_other(blocked: set[tuple[int, int]]) -> None:
    left_out = Links(Machines(8, 0, "10.0.0.1", 29500), {}).blocked(facts_of(8, *blocked))
    assert [pair for pair in blocked if not left_out.keys() & set(pair)] == []
    assert bool(left_out) == bool(blocked)


def test_a_launch_waits_until_every_pair_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering, facts = Gathering(monkeypatch, 2, restarted=False), facts_of(3)
    monkeypatch.setattr(gathering.nodes.links, "look", lambda facts: None)
    for machine in (1, 2):
        gathering.members[machine].facts = {**facts[machine], "links": {}}
        gathering.members[machine].write("now")
    assert gathering.after(30, 1, 2) == (None, None)
    for machine in (1, 2):
        gathering.members[machine].facts = facts[machine]
        gathering.members[machine].write("now")
    moved = {**facts[2], "port": 4999}
    gathering.members[2].facts = moved
    gathering.members[2].write("now")
    assert gathering.after(1, 1, 2) == (None, None), "machine 2 was started again, and answers elsewhere"
    gathering.members[1].facts = {**facts[1], "links": {"2": ["10.0.0.1", 4999, None]}}
    gathering.members[1].write("now")
    assert gathering.after(1, 1, 2) == (None, [0, 1, 2])


@pytest.mark.parametrize("first", [1, 2])
def test_who_reports_first_does_not_matter(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that do not reach each other, each knows it at a time of its own."""
    gathering, facts = Gathering(monkeypatch, 2, restarted=False), facts_of(3, (1, 2), (2, 1))
    monkeypatch.setattr(gathering.nodes.links, "look", lambda facts: None)
    for machine in (1, 2):
        gathering.members[machine].facts = facts[machine] if machine == first else {**facts[machine], "links": {}}
        gathering.members[machine].write("now")
    assert gathering.after(4, 1, 2) == (None, None)
    for machine in (1, 2):
        gathering.members[machine].facts = facts[machine]
        gathering.members[machine].write("now")
    assert gathering.after(1, 1, 2) == (None, [0, 1])
    assert "machine 2: machine 1 cannot reach it at there" in gathering.nodes.line()


def test_a_member_that_reports_on_nobody_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gathering, facts = Gathering(monkeypatch, 2, restarted=False), facts_of(3)
    monkeypatch.setattr(gathering.nodes.links, "look", lambda facts: None)
    for machine, known in ((1, facts[1]), (2, {**facts[2], "links": "damaged"})):
        gathering.members[machine].facts = known
        gathering.members[machine].write("now")
    assert gathering.after(59, 1, 2) == (None, None)
    assert gathering.after(1, 1, 2) == (None, [0, 1])
    assert "machine 2: it did not join within 60 s" in gathering.nodes.line()
