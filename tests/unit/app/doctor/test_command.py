"""The verb as a user meets it; what it finds is tested beside this, and with ranks in tests/faults/test_doctor.py."""

from __future__ import annotations

import json
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.cli import run_verb
from app.doctor import examine as examining
from app.doctor.check import Check
from app.doctor.command import read_request
from app.doctor.examine import Request, examine
from app.doctor.ranks import rank_argv
from app.hardware import Devices, Gpu
from app.services.doctor import Doctor
from trainers.config.mistakes import ConfigError
from trainers.run.device_locks import Holder, Need, take_now
from trainers.strategy.strategy import load_strategy, resolve
from ui.pages.system import render_check

pytestmark = pytest.mark.usefixtures("elsewhere")


def request(**launch: str) -> Request:
    return read_request(launch, Path("runs"))


def test_every_mistake_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb(["doctor", "--strategy", "dpp", "--timeout", "0", "--machine_rank", "1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "did you mean pp?" in lines[0]
    assert "without num_machines" in lines[1]
    assert "timeout=0 is not a whole number from 5 to 3600" in lines[2]


def test_the_layout_is_that_of_the_run() -> None:
    asked = request(strategy="hsdp", num_processes="8")
    assert asked.strategy.sizes.by_axis == resolve(load_strategy("hsdp"), 8, "no").sizes.by_axis
    assert request().strategy.name == "ddp"
    assert request(num_processes="1").strategy.name == "single"
    with pytest.raises(ConfigError, match="num_processes"):
        request(strategy="3d", num_processes="3")


def test_the_ranks_meet_where_those_of_a_run_meet(tmp_path: Path) -> None:
    network = {"num_machines": "2", "machine_rank": "1", "main_process_ip": "10.0.0.1", "main_process_port": "29500"}
    asked = request(num_processes="4", **network)
    argv = rank_argv(asked.devices, asked.strategy.sizes, tmp_path, 60.0, True)
    options = dict(pairwise(argv))
    assert (options["--nproc_per_node"], options["--nnodes"], options["--node_rank"]) == ("2", "2", "1")
    assert (options["--master_addr"], options["--master_port"]) == ("10.0.0.1", "29500")
    assert json.loads(options["--sizes"])["dp_replicate"] == 4
    single = rank_argv(Devices([], 2), asked.strategy.sizes, tmp_path, 60.0, False)
    assert "--rdzv_endpoint" in single
    assert "--quick" not in single


def test_one_process_and_a_fault_in_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_verb(["doctor", "--num_processes", "1"]) == 0
    printed = capsys.readouterr()
    assert "-      all-reduce: one process has nothing to exchange" in printed.out
    assert "0 faulty" in printed.err
    fault = Check("disk speed", False, "slow", "buy a disk")
    monkeypatch.setattr(examining, "disk_checks", lambda folder: [fault])
    assert run_verb(["doctor", "--num_processes", "1", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert fault.as_json() in document["checks"]
    assert {"name", "passed", "value", "remedy"} == set(document["checks"][0])


def test_gpus_that_a_run_holds_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus = [Gpu(index, f"GPU-{index}", "H100", 80 << 30) for index in range(2)]
    monkeypatch.setattr(examining, "find_gpus", lambda: gpus)
    monkeypatch.setattr(examining, "run_ranks", lambda *values: pytest.fail("the ranks were started"))
    asked = Request(resolve(load_strategy("ddp"), 2, "no"), Devices([0, 1], 2), tmp_path)
    with take_now(Need(gpus=("GPU-1",)), Holder("a-run")):
        checks = {check.name: check for check in examine(asked, lambda check: None).checks}
    assert checks["all-reduce"].passed is None
    assert "a-run" in checks["all-reduce"].value


# -- the page ----------------------------------------------------------------------------------------------------------


def wait(doctor: Doctor, event: threading.Event) -> dict[str, Any]:
    """Lets the examination end."""
    event.set()
    for thread in threading.enumerate():
        if getattr(thread, "_target", None) == doctor._run:
            thread.join(100)
    return doctor.state()


def test_the_page_starts_one_examination_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor, go_on, count = Doctor(tmp_path), threading.Event(), []
    fault = {"name": "disk <speed>", "passed": False, "value": "slow", "remedy": "buy <b>one</b>"}

    def examined() -> Any:
        count.append(1)
        assert go_on.wait(20)
        return [{"name": "ranks", "passed": True, "value": "all", "remedy": ""}, fault], ""

    monkeypatch.setattr(doctor, "_examine", examined)
    assert "Looks at versions" in render_check(doctor.state())
    assert [doctor.start(), doctor.start()] == [True, False]
    assert "Checking versions" in render_check(doctor.state())
    page = render_check(wait(doctor, go_on))
    assert count == [1]
    assert "disk &lt;speed&gt;: slow; buy &lt;b&gt;one&lt;/b&gt;" in page
    assert page.index("fault</td>") < page.index("ok</td>")
    assert doctor.start() is True, "and again"
    wait(doctor, go_on)


def test_the_page_says_why_there_is_no_report(tmp_path: Path) -> None:
    doctor = Doctor(tmp_path)
    doctor._argv = [sys.executable, "-c", """print('{"mistakes": ["runs_dir=x is not a folder"]}'); exit(2)"""]
    doctor.start()
    assert "runs_dir=x is not a folder" in render_check(wait(doctor, threading.Event()))
    doctor._argv = [sys.executable, "-c", "import nothing"]
    doctor.start()
    assert "the check failed: ModuleNotFoundError" in wait(doctor, threading.Event())["error"]
    doctor._argv[0] = str(tmp_path / "no-python")
    doctor.start()
    assert "could not be started" in wait(doctor, threading.Event())["error"]
