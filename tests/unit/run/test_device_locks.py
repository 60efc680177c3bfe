"""Locks and queue with real processes on GPUs that exist in name only."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainers.config.mistakes import ConfigError
from trainers.run import device_locks
from trainers.run.device_locks import HeldSlots, Holder, Need, Ticket, cpu_slots, local_need
from trainers.run.folder import Process, read_json, write_json

GPUS = [f"GPU-{number:04}" for number in range(8)]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.unit.run.test_device_locks"])


class Hands:
    """What another process does when a test asks it to."""

    def __init__(self) -> None:
        self.held = HeldSlots({})
        self.ticket: Ticket | None = None

    def take_now(self, name: str, need: Need) -> list[str]:
        self.held = device_locks.take_now(need, Holder(name))
        return self.held.slots

    def enqueue(self, run_dir: str, need: Need) -> int:
        self.ticket = device_locks.enqueue(Path(run_dir), Path(run_dir).name, need)
        return device_locks.place_of(Path(run_dir)) or 0

    def try_take(self) -> list[str] | None:
        assert self.ticket
        held = device_locks.try_take(self.ticket)
        self.held = held or self.held
        return None if held is None else held.slots

    def give_up(self) -> None:
        assert self.ticket
        device_locks.give_up(self.ticket)

    def close(self) -> None:
        self.held.close()

    def launch(self, keeps: bool) -> int:
        """Starts a child that has the locks' descriptors, or has not."""
        descriptors = self.held.descriptors if keeps else []
        code = "import time; time.sleep(120)"
        return subprocess.Popen([sys.executable, "-I", "-c", code], pass_fds=descriptors, start_new_session=True).pid


def _serve(home: str, pipe: Connection) -> None:
    os.environ["XDG_STATE_HOME"] = home
    hands = Hands()
    while True:
        verb, words = pipe.recv()
        try:
            pipe.send((getattr(hands, verb)(*words), ""))
        except ConfigError as error:
            pipe.send((None, str(error)))


class Other:
    """A process that can be asked and killed."""

    def __init__(self, home: Path):
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(str(home), theirs), daemon=True)
        self.process.start()

    def __call__(self, verb: str, *words: object) -> Any:
        self.pipe.send((verb, words))
        assert self.pipe.poll(30), f"{verb} hangs"
        value, refused = self.pipe.recv()
        if refused:
            raise ConfigError(refused)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.join(30)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def other(home: Path) -> Iterator[Callable[[], Other]]:
    """Makes other processes, and ends them."""
    made: list[Other] = []

    def make() -> Other:
        made.append(Other(home))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.01)
    return value


def need(*numbers: int) -> Need:
    return Need(tuple(GPUS[number] for number in numbers))


# -- locks -------------------------------------------------------------------------------------------------------------


def test_a_gpu_has_one_holder_who_is_named(other: Callable[[], Other]) -> None:
    first, second = other(), other()
    assert first("take_now", "run-a", need(0, 2)) == [GPUS[0], GPUS[2]]
    with pytest.raises(ConfigError, match=rf"{GPUS[0]} cannot be taken: {GPUS[0]} held by run-a; wait .* --share_gpus"):
        second("take_now", "run-b", need(0))
    assert second("take_now", "run-b", need(1)) == [GPUS[1]]
    told = {slot: (holder["run"], holder["pid"]) for slot, holder in device_locks.holders().items()}
    assert told == {
        GPUS[0]: ("run-a", first.process.pid),
        GPUS[1]: ("run-b", second.process.pid),
        GPUS[2]: ("run-a", first.process.pid),
    }
    first("close")
    assert set(device_locks.holders()) == {GPUS[1]}
    assert second("take_now", "run-c", need(0)) == [GPUS[0]]


def test_all_are_taken_or_none(other: Callable[[], Other]) -> None:
    first, second = other(), other()
    first("take_now", "a", need(3))
    with pytest.raises(ConfigError, match="held by a"):
        second("take_now", "b", need(1, 2, 3, 4))
    assert set(device_locks.holders()) == {GPUS[3]}
    second("enqueue", "/runs/b", need(1, 2, 3, 4))
    assert second("try_take") is None
    assert set(device_locks.holders()) == {GPUS[3]}


def test_two_takers_in_one_process_exclude_each_other_too(home: Path) -> None:
    with device_locks.take_now(need(0), Holder("a")) as held:
        with pytest.raises(ConfigError, match="held by a"):
            device_locks.take_now(need(0), Holder("b"))
        held.close()
        device_locks.take_now(need(0), Holder("b")).close()


def test_a_lock_never_outlasts_its_holder(other: Callable[[], Other]) -> None:
    first, second = other(), other()
    first("take_now", "a", need(0))
    child = first("launch", False)
    first.kill()
    assert device_locks.holders() == {}
    assert psutil.pid_exists(child)
    assert second("take_now", "b", need(0)) == [GPUS[0]]
    psutil.Process(child).kill()


def test_a_lock_outlasts_a_killed_supervisor_while_its_launcher_lives(other: Callable[[], Other]) -> None:
    first, second = other(), other()
    first("take_now", "a", need(0, 1))
    child = first("launch", True)
    first.kill()
    assert {holder["run"] for holder in device_locks.holders().values()} == {"a"}
    with pytest.raises(ConfigError, match="held by a"):
        second("take_now", "b", need(1))
    psutil.Process(child).kill()
    until(lambda: not device_locks.holders())
    assert second("take_now", "b", need(1)) == [GPUS[1]]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be written: .*; make it writable, or set XDG_STATE_HOME"):
        device_locks.take_now(need(0), Holder("a"))


# -- CPU slots ---------------------------------------------------------------------------------------------------------


def test_cpu_slots_are_a_pool(other: Callable[[], Other], home: Path) -> None:
    every = cpu_slots()
    assert len(every) == len(os.sched_getaffinity(0))
    rest = Need(cpu_slots=len(every) - 1)
    first, second, third = other(), other(), other()
    taken = first("take_now", "a", Need(cpu_slots=1))
    if rest.cpu_slots:
        assert sorted(taken + second("take_now", "b", rest)) == sorted(every), "any slot that is free will do"
    with pytest.raises(ConfigError, match="1 CPU slot cannot be taken: cpu-0"):
        third("take_now", "c", Need(cpu_slots=1))
    first("close")
    assert third("take_now", "c", Need(cpu_slots=1)) == taken


def test_more_processes_than_cores_take_every_slot(other: Callable[[], Other]) -> None:
    first, second = other(), other()
    assert first("take_now", "a", Need(cpu_slots=1000)) == sorted(cpu_slots())
    second("enqueue", "/runs/b", Need(cpu_slots=1000))
    assert second("try_take") is None
    first("close")
    assert second("try_take") == sorted(cpu_slots())


def test_the_ranks_of_a_machine_take_its_first_gpus_or_a_slot_each() -> None:
    assert local_need(2, GPUS) == Need(gpus=(GPUS[0], GPUS[1]))
    assert local_need(3, []) == Need(cpu_slots=3)


# -- the queue ---------------------------------------------------------------------------------------------------------


def test_a_later_ticket_passes_if_it_takes_nothing_that_an_earlier_one_waits_for(other: Callable[[], Other]) -> None:
    holder, first, second, third = (other() for _ in range(4))
    holder("take_now", "busy", need(0))
    assert [first("enqueue", "/runs/a", need(0, 1)), second("enqueue", "/runs/b", need(1, 2))] == [1, 2]
    assert third("enqueue", "/runs/c", need(2, 3)) == 3
    assert first("try_take") is None
    assert second("try_take") is None, "GPU 1 is free, and the first in the queue waits for it"
    assert third("try_take") is None, "GPU 2 is free, and the second in the queue waits for it"
    fourth = other()
    fourth("enqueue", "/runs/d", need(4, 5))
    assert fourth("try_take") == [GPUS[4], GPUS[5]], "nobody waits for these"
    assert device_locks.place_of(Path("/runs/d")) is None
    holder("close")
    assert second("try_take") is None
    assert first("try_take") == [GPUS[0], GPUS[1]]
    assert second("try_take") is None, "now GPU 1 is held"
    first("close")
    assert second("try_take") == [GPUS[1], GPUS[2]]


def test_a_later_ticket_for_cpu_slots_does_not_pass_one_that_needs_more(other: Callable[[], Other]) -> None:
    holder, first, second, third = (other() for _ in range(4))
    holder("take_now", "busy", Need(cpu_slots=1))
    first("enqueue", "/runs/a", Need(cpu_slots=len(cpu_slots())))
    second("enqueue", "/runs/b", Need(cpu_slots=1))
    third("enqueue", "/runs/c", need(0))
    assert (first("try_take"), second("try_take")) == (None, None)
    assert third("try_take") == [GPUS[0]]
    first("give_up")
    if len(cpu_slots()) > 1:
        assert second("try_take")


def test_what_cannot_wait_does_not_take_what_a_ticket_waits_for(other: Callable[[], Other]) -> None:
    holder, first, second = other(), other(), other()
    holder("take_now", "busy", need(0))
    first("enqueue", "/runs/a", need(0, 1))
    with pytest.raises(ConfigError, match="a queued run waits for it"):
        second("take_now", "b", need(1))
    assert second("take_now", "b", need(2)) == [GPUS[2]]
    first("give_up")
    assert second("take_now", "b", need(1)) == [GPUS[1]]


def test_tickets_move(other: Callable[[], Other]) -> None:
    holder, *waiting = (other() for _ in range(4))
    holder("take_now", "busy", need(0))
    for number, one in enumerate(waiting):
        one("enqueue", f"/runs/{number}", need(0))
    assert device_locks.move(Path("/runs/2"), -1) == 2
    assert device_locks.move(Path("/runs/2"), -9) == 1
    assert device_locks.move(Path("/runs/0"), 9) == 3
    assert [device_locks.place_of(Path(f"/runs/{number}")) for number in range(3)] == [3, 2, 1]
    with pytest.raises(ConfigError, match="run 7 is not in the queue"):
        device_locks.move(Path("/runs/7"), 1)
    holder("close")
    assert [waiting[number]("try_take") for number in (0, 1, 2)] == [None, None, [GPUS[0]]]
    with pytest.raises(ConfigError, match="is not in the queue"):
        device_locks.move(Path("/runs/2"), -1)


def _queued(other: Callable[[], Other], count: int) -> list[str]:
    for number in range(count):
        other()("enqueue", f"/runs/{number}", need(number))
    return [ticket.name for ticket in device_locks.queue()]


def test_a_run_is_put_before_or_behind_another(other: Callable[[], Other]) -> None:
    assert _queued(other, 4) == ["0", "1", "2", "3"]

    def order(**target: Any) -> str:
        place = device_locks.move(Path("/runs/2"), **target)
        names = [ticket.name for ticket in device_locks.queue()]
        assert names.index("2") + 1 == place
        return "".join(names)

    assert order(to=1) == "2013"
    assert order(to=99) == "0132"
    assert order(before=Path("/runs/1")) == "0213"
    assert order(before=Path("/runs/1")) == "0213", "again it changes nothing"
    assert order(after=Path("/runs/3")) == "0132"
    assert order(after=Path("/runs/0")) == "0213"
    assert order(after=Path("/runs/2")) == "0213"
    with pytest.raises(ConfigError, match="run 9 is not in the queue; it may have started"):
        order(before=Path("/runs/9"))
    assert [ticket.name for ticket in device_locks.queue()] == list("0213")


@pytest.mark.parametrize("writes", range(5))
def test_a_move_that_is_killed_leaves_the_order_of_the_others(
    writes: int, other: Callable[[], Other], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _queued(other, 6)
    for place, ticket in enumerate(reversed(device_locks.queue()), start=1):
        ticket.write(place)  # in the order opposite to their age, which decides between equals
    written = itertools.count()

    def killed(path: Path, value: Any) -> None:
        if next(written) == writes:
            raise KeyboardInterrupt
        write_json(path, value)

    monkeypatch.setattr(device_locks, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        device_locks.move(Path("/runs/1"), to=2)
    names = [ticket.name for ticket in device_locks.queue()]
    assert sorted(names) == list("012345")
    assert [name for name in names if name != "1"] == list("54320")


def test_a_ticket_vanishes_with_its_owner(other: Callable[[], Other]) -> None:
    holder, first, second = other(), other(), other()
    holder("take_now", "busy", need(0))
    first("enqueue", "/runs/a", need(0))
    assert second("enqueue", "/runs/b", need(0)) == 2
    first.kill()
    assert (device_locks.place_of(Path("/runs/a")), device_locks.place_of(Path("/runs/b"))) == (None, 1)
    holder("close")
    assert second("try_take") == [GPUS[0]]


def test_a_broken_ticket_is_passed_over(other: Callable[[], Other], home: Path) -> None:
    first = other()
    first("enqueue", "/runs/a", need(0))
    (path,) = home.rglob("queue/*.json")
    for number, text in enumerate(["", "[]", '{"need": 1}', json.dumps((read_json(path) or {}) | {"owner": {}})]):
        path.with_name(f"{number}.json").write_text(text)
    assert first("try_take") == [GPUS[0]]


def test_a_ticket_whose_file_was_cleared_away_goes_to_the_end(other: Callable[[], Other], home: Path) -> None:
    holder, first, second = other(), other(), other()
    holder("take_now", "busy", need(1))
    first("enqueue", "/runs/a", need(0, 1))
    for path in home.rglob("queue/*.json"):
        path.unlink()
    second("enqueue", "/runs/b", need(1))
    holder("close")
    assert first("try_take") is None
    assert (device_locks.place_of(Path("/runs/a")), device_locks.place_of(Path("/runs/b"))) == (2, 1)
    second("give_up")
    assert first("try_take") == [GPUS[0], GPUS[1]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems tell the start of a process otherwise")
def test_a_clock_that_is_set_ends_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    me = Process.of("supervisor")
    by_clock = Process(me.role, me.rank, me.pid, me.started)
    assert me.alive()
    assert by_clock.alive()
    booted = psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: booted + 3600)
    assert me.alive()
    assert not by_clock.alive(), "control: by the clock alone it would count as dead"


# -- many at once ------------------------------------------------------------------------------------------------------

WORKERS, ROUNDS = 32, 2


def _work(home: str, number: int, variant: str, log: str, start: Any) -> None:
    """Takes random sets of GPUs, round after round, and logs when it waits, has and frees them."""
    os.environ["XDG_STATE_HOME"] = home
    if variant == "unfair":
        device_locks._clash = lambda one, two: False
    if variant == "unsafe":
        device_locks._is_held = lambda slot: False
        device_locks._try_lock = lambda slot, holder: device_locks._open(slot)
    dice = random.Random(number)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    start.wait(60)
    for turn in range(ROUNDS):
        gpus = tuple(sorted(dice.sample(GPUS, dice.randint(1, 4))))
        asked = time.monotonic()
        ticket = device_locks.enqueue(Path(f"/runs/{number}-{turn}"), f"{number}-{turn}", Need(gpus))
        queued = time.monotonic()
        while (held := device_locks.try_take(ticket)) is None:
            time.sleep(0.02)
        taken = time.monotonic()
        time.sleep(dice.uniform(0.005, 0.02))
        freed = time.monotonic()
        held.close()
        row = {"who": f"{number}-{turn}", "gpus": gpus, "asked": asked, "queued": queued, "had": [taken, freed]}
        os.write(handle, (json.dumps(row) + "\n").encode())


def _shuffle(home: str, number: int) -> None:
    """Moves queued runs about until it is killed."""
    os.environ["XDG_STATE_HOME"] = home
    dice = random.Random(number)
    while True:
        names = [Path(ticket.run_dir) for ticket in device_locks.queue()]
        if len(names) > 1:
            moved, anchor = dice.sample(names, 2)
            with contextlib.suppress(ConfigError):  # one of them has started
                device_locks.move(moved, **{dice.choice(["before", "after"]): anchor})


def _kill_movers(home: str, until_over: threading.Event) -> None:
    """Two at a time move runs, and each is killed after a while."""
    dice, number = random.Random(7), 0
    while not until_over.is_set():
        movers = [CONTEXT.Process(target=_shuffle, args=(home, number + one), daemon=True) for one in range(2)]
        for mover in movers:
            mover.start()
        until_over.wait(dice.uniform(0.05, 0.25))
        for mover in movers:
            mover.kill()
            mover.join()
        number += 2


def _crowd(tmp_path: Path, variant: str) -> list[dict[str, Any]]:
    """What happened to each ticket of many workers; all of them have ended."""
    log, start = tmp_path / "log", CONTEXT.Barrier(WORKERS)
    words = (str(tmp_path / "state"), variant, str(log), start)
    workers = [
        CONTEXT.Process(target=_work, args=(words[0], number, *words[1:]), daemon=True) for number in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    over = threading.Event()
    killer = threading.Thread(target=_kill_movers, args=(words[0], over))
    if variant == "moved":
        killer.start()
    deadline = time.monotonic() + 120
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    over.set()
    if variant == "moved":
        killer.join()
    stuck = [worker for worker in workers if worker.exitcode is None]
    for worker in stuck:
        worker.kill()
    assert not stuck, f"{len(stuck)} workers wait for ever"
    assert {worker.exitcode for worker in workers} == {0}
    return [json.loads(line) for line in log.read_text().splitlines()]


def _pairs(rows: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The pairs that share a GPU."""
    return ((a, b) for a, b in itertools.combinations(rows, 2) if set(a["gpus"]) & set(b["gpus"]))


def _at_once(rows: list[dict[str, Any]]) -> int:
    """Pairs that held a GPU at the same time."""
    return sum(a["had"][0] < b["had"][1] and b["had"][0] < a["had"][1] for a, b in _pairs(rows))


def _overtaken(rows: list[dict[str, Any]]) -> int:
    """Pairs of which the one that came later had the GPU earlier."""
    both = [pair for one, two in _pairs(rows) for pair in ((one, two), (two, one))]
    return sum(later["asked"] > early["queued"] and later["had"][1] < early["had"][0] for early, later in both)


def test_many_runs_on_overlapping_gpus_end_in_turn_and_alone(tmp_path: Path) -> None:
    rows = _crowd(tmp_path, "")
    assert len(rows) == WORKERS * ROUNDS
    assert (_at_once(rows), _overtaken(rows)) == (0, 0)


def test_many_runs_are_moved_by_users_that_are_killed_and_none_is_lost_or_started_twice(tmp_path: Path) -> None:
    rows = _crowd(tmp_path, "moved")
    names = [row["who"] for row in rows]
    assert sorted(names) == sorted({f"{number}-{turn}" for number in range(WORKERS) for turn in range(ROUNDS)})
    assert _at_once(rows) == 0
    assert _overtaken(rows) > 0, "control: nothing was moved"


@pytest.mark.parametrize("variant", ["unfair", "unsafe"])
def test_the_same_checks_see_a_queue_that_is_not_fair_or_not_safe(variant: str, tmp_path: Path) -> None:
    """Control: without reservations later tickets overtake, without locks GPUs have two holders."""
    rows = _crowd(tmp_path, variant)
    assert len(rows) == WORKERS * ROUNDS
    assert (_overtaken if variant == "unfair" else _at_once)(rows) > 0
