"""A worker's answers come whole and in turn, can be cancelled, and nothing of it outlives its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.accelerate_launch import ROOT
from app.services.rpc_client import Worker, WorkerDied
from trainers.config.mistakes import ConfigError

PROGRAM = """
import os, subprocess, sys, time
from trainers.config.mistakes import ConfigError
from trainers.tools.rpc_server import serve

def count(request):
    print("a library prints")
    os.write(1, b"and a C library too\\n")
    for number in range(request["to"]):
        yield {"number": number, "who": request["who"]}

def endless(request):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        yield {"child": child.pid}
        while True:
            time.sleep(0.01)
    finally:
        if request.get("leave") is None:
            child.kill()
            child.wait()

def refuse(request):
    raise ConfigError(["max_length=3 is refused", "seed='x' is refused"])
    yield

def crash(request):
    print("about to crash, key", os.environ["MY_TOKEN"], file=sys.stderr)
    os.abort()
    yield

def deaf(request):
    time.sleep(600)
    yield

def argv(request):
    yield {"argv": sys.argv, "environment": os.environ["MY_TOKEN"]}

serve({name: globals()[name] for name in ("count", "endless", "refuse", "crash", "deaf", "argv")})
"""
SECRET = "very-secret-value"  # noqa: S105 - made up


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Worker]]:
    (tmp_path / "small_program.py").write_text(PROGRAM)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    workers: list[Worker] = []

    def make() -> Worker:
        workers.append(Worker("small_program", env={"PYTHONPATH": str(tmp_path)}))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_answers_one_request_after_the_other(start: Callable[[], Worker]) -> None:
    worker = start()
    for who in ("first", "second"):
        answer = list(worker.ask({"ask": "count", "to": 3, "who": who}, 20.0))
        assert answer == [*({"number": number, "who": who} for number in range(3)), {"end": True}]


def test_two_callers_do_not_mix(start: Callable[[], Worker]) -> None:
    worker, heard = start(), {}

    def ask(who: str) -> None:
        heard[who] = [document.get("who") for document in worker.ask({"ask": "count", "to": 300, "who": who}, 20.0)]

    threads = [threading.Thread(target=ask, args=(who,)) for who in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert heard == {who: [who] * 300 + [None] for who in "abc"}


def test_mistakes_are_raised_and_it_goes_on(start: Callable[[], Worker]) -> None:
    worker = start()
    with pytest.raises(ConfigError) as refused:
        list(worker.ask({"ask": "refuse"}, 20.0))
    assert refused.value.lines == ["max_length=3 is refused", "seed='x' is refused"]
    assert list(worker.ask({"ask": "count", "to": 0, "who": ""}, 20.0)) == [{"end": True}]


def test_a_death_is_told_with_the_last_words_but_not_the_secret(start: Callable[[], Worker]) -> None:
    worker = start()
    with pytest.raises(WorkerDied) as died:
        list(worker.ask({"ask": "crash"}, 20.0))
    assert "about to crash" in str(died.value)
    assert "exit status -6" in str(died.value)
    assert SECRET not in str(died.value)
    assert not worker.alive
    with pytest.raises(WorkerDied):
        list(worker.ask({"ask": "argv"}, 20.0))


def test_an_answer_is_cancelled_and_its_cleanup_runs(start: Callable[[], Worker]) -> None:
    worker = start()
    answer = worker.ask({"ask": "endless"}, 20.0)
    child = next(answer)["child"]
    worker.cancel()
    assert list(answer) == [{"end": True, "cancelled": True}]
    assert until(lambda: gone(child))
    worker.cancel()  # nothing is under way: the next answer must not suffer from it
    assert len(list(worker.ask({"ask": "count", "to": 2, "who": ""}, 20.0))) == 3


def test_a_caller_that_leaves_frees_it(start: Callable[[], Worker]) -> None:
    worker = start()
    answer = worker.ask({"ask": "endless"}, 20.0)
    next(answer)
    assert worker.busy
    answer.close()
    assert not worker.busy
    assert len(list(worker.ask({"ask": "count", "to": 2, "who": ""}, 20.0))) == 3


def test_one_that_does_not_answer_is_ended(start: Callable[[], Worker]) -> None:
    worker = start()
    list(worker.ask({"ask": "argv"}, 20.0))
    with pytest.raises(WorkerDied, match=r"did not answer within 0\.2 s"):
        list(worker.ask({"ask": "deaf"}, 0.2))
    assert gone(worker.pid)


def test_close_ends_it_with_its_children(start: Callable[[], Worker]) -> None:
    worker = start()
    answer = worker.ask({"ask": "endless", "leave": True}, 20.0)
    child = next(answer)["child"]
    assert worker.alive
    assert not gone(child)
    worker.close()
    assert not worker.alive
    assert gone(worker.pid)
    assert gone(child)


def test_secrets_go_by_the_environment(start: Callable[[], Worker]) -> None:
    told = next(start().ask({"ask": "argv"}, 20.0))
    assert told["environment"] == SECRET
    assert SECRET not in " ".join(told["argv"])


OWNER = """
import sys, threading, time
from app.services.rpc_client import Worker
box = []
thread = threading.Thread(target=lambda: box.append(Worker("small_program", env={"PYTHONPATH": sys.argv[1]})))
thread.start()
thread.join()  # the thread that made it ends long before its owner
time.sleep(1.0)
print(box[0].pid, next(box[0].ask({"ask": "endless"}, 20.0))["child"] and box[0].alive, flush=True)
time.sleep(600)
"""


def test_it_ends_with_its_owner_and_not_with_the_thread_that_made_it(tmp_path: Path) -> None:
    (tmp_path / "small_program.py").write_text(PROGRAM)
    environment = {**os.environ, "MY_TOKEN": SECRET, "PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    pid, alive = owner.stdout.readline().split()
    assert alive == "True"
    assert not gone(int(pid))
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert until(lambda: gone(int(pid)))
    owner.stdout.close()
