"""The verb as a user meets it; what it finds is tested beside this, and with ranks in tests/faults/test_doctor.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from app.cli import run_verb
from app.doctor import examine as examining
from app.doctor.check import Check
from app.doctor.command import read_request
from app.doctor.examine import Request, examine
from app.doctor.ranks import rank_argv
from app.hardware import Devices, Gpu
from app.services.doctor import Doctor, end
from tests.detached import until
from trainers.config.mistakes import ConfigError
from trainers.run.device_locks import Holder, Need, take_now
from trainers.strategy.strategy import load_strategy, resolve
from trainers.tools import bound_launcher
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


def test_the_mesh_is_that_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = {"tp_size": "2", "cp_size": "2", "dp_replicate_size": "2"}
    assert str(request(strategy="fsdp2", num_processes="16", **mesh).strategy.sizes) == (
        "dp_replicate 2 x dp_shard 2 x cp 2 x tp 2"
    )
    assert request(strategy="ddp", num_processes="4", sp_size="1").strategy.sizes.by_axis["dp_replicate"] == 4
    assert request(strategy="pp", num_processes="8", pp_size="4").strategy.sizes.pp == 4
    with pytest.raises(ConfigError, match="tp"):
        request(strategy="fsdp2", num_processes="8", tp_size="3")
    words = ["--tp_size", "x", "--cp_size", "0", "--sp_size", "-1", "--dp_replicate_size", "1.5", "--pp_size", "0"]
    assert run_verb(["doctor", *words]) == 2
    assert [line.split("=")[0].split()[-1] for line in capsys.readouterr().err.splitlines()] == [
        word.removeprefix("--") for word in words[::2]
    ]


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
    monkeypatch.setattr(examining, "disk_checks", lambda folder, quick: [fault])
    assert run_verb(["doctor", "--num_processes", "1", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert fault.as_json() in document["checks"]
    assert {"name", "passed", "value", "remedy"} == set(document["checks"][0])


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_folder_of_a_killed_doctor_is_removed(
    is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher runs until SIGTERM, which the kernel sends when the doctor is killed."""
    parents, folder = [os.getppid(), 1 if is_killed else os.getppid()], tmp_path / "ranks"
    folder.mkdir()
    monkeypatch.setattr(bound_launcher, "end_with_launcher", lambda on: None)
    launcher = SimpleNamespace(main=lambda words: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setitem(sys.modules, "torch.distributed.run", launcher)
    monkeypatch.setattr(sys, "argv", ["", str(os.getppid()), str(folder), "--nproc_per_node", "2"])
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0))
    usual = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            bound_launcher.main()
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert folder.exists() is not is_killed


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
    assert "Disk &lt;speed&gt;: slow; buy &lt;b&gt;one&lt;/b&gt;" in page
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


@pytest.mark.parametrize("is_deaf", [False, True])
def test_the_ranks_of_an_examination_that_is_ended_end(is_deaf: bool) -> None:
    """Of one that ends them itself when it is asked to, and of one that does not hear."""
    trap = "" if is_deaf else "kill $!; exit 7"
    script = f"trap '{trap}' TERM; setsid sh -c 'echo $$; exec sleep 60 > /dev/null 2>&1' & wait"
    program = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with program:
        assert program.stdout
        rank = psutil.Process(int(program.stdout.readline()))
        end(program, 0.2 if is_deaf else 20.0)
    assert program.returncode == (-signal.SIGKILL if is_deaf else 7)
    assert until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE, 20)


def test_an_examination_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doctor = Doctor(tmp_path)
    monkeypatch.setattr("app.services.doctor.LONGEST", 0.1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    doctor._argv = ["sh", "-c", 'mktemp -d "$TMPDIR/ranks-XXX"; exec sleep 60']
    doctor.start()
    assert "did not end within 0.1 s" in wait(doctor, threading.Event())["error"]
    assert list(tmp_path.iterdir()) == [], "nothing is left"
