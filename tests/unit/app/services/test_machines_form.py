"""Several machines on the Train page: what it refuses, and the processes that it starts."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.launch.network import addresses, is_own, route_to
from app.services import machines_form
from app.services.form import Preview, preview
from app.services.machines_form import free_port, machine_options, machines_texts, own_addresses, port_problem
from tests.launching import free_port as unused_port
from trainers.config.mistakes import Mistake
from trainers.run.folder import Process, RunFolder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def previewed(processes: object = "2", **texts: Any) -> Preview:
    own = {"num_machines": "2", "main_process_ip": "127.0.0.1", "main_process_port": str(unused_port()),
           "min_machines": "", "shared_folder": "yes", **texts}  # fmt: skip
    count: Any = processes
    return preview({"global_batch_size": "48"}, "tiny-lora", "ddp", num_processes=count, machines=own)


def test_the_processes_are_those_of_each_machine() -> None:
    for machines, total in ((2, 4), (3, 6)):
        page = previewed(num_machines=str(machines))
        assert page.mistakes == []
        assert f"--num_processes {total} --num_machines {machines} --machine_rank 0" in page.command


@pytest.mark.parametrize(
    ("processes", "problem"),
    [
        ("300", "on each of 2 machines: num_processes=300 is out of range; use 1 to 256"),
        ("1500", "on each of 2 machines: num_processes=1500 is out of range; use 1 to 256"),
        ("", "num_processes is missing; write how many each machine runs"),
        ("0", "on each of 2 machines: num_processes=0 is out of range; use 1 to 256"),
        ("x", "on each of 2 machines: num_processes='x' is not a whole number"),
    ],
)
def test_processes_that_cannot_be_are_refused_as_they_were_written(processes: str, problem: str) -> None:
    lines = [str(mistake) for mistake in previewed(processes).mistakes]
    assert len(lines) == 1
    assert lines[0].startswith(problem)


ODD = ["a" * 64, "a..b", "a\0b", "ünï", "-x", "a b", "<b>x</b>", "\ud800", "203.0.113.7", "0.0.0.0"]  # noqa: S104


@pytest.mark.parametrize("host", ODD)
def test_what_is_no_address_of_this_machine_is_a_mistake_of_its_field(host: str) -> None:
    mistakes = previewed(main_process_ip=host).mistakes
    assert {mistake.option for mistake in mistakes} == {"main_process_ip"}


@pytest.mark.parametrize("host", ["a" * 64, "a..b"])
def test_a_name_that_no_resolver_takes_leads_nowhere(host: str) -> None:
    assert (addresses(host), is_own(host), route_to(host)) == ([], False, None)
    assert is_own("127.0.0.1"), "control"


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_is_refused_and_another_is_named(busy_port: int) -> None:
    (mistake,) = previewed(main_process_port=str(busy_port)).mistakes
    match = re.search(r"cannot be opened on this machine: Address already in use; use another, such as (\d+)",
                      str(mistake))  # fmt: skip
    assert mistake.option == "main_process_port"
    assert match is not None
    assert port_problem(int(match[1])) is None
    assert free_port(busy_port) != busy_port


def test_the_port_of_a_run_that_waits_is_neither_proposed_nor_accepted(tmp_path: Path) -> None:
    runs_dir, port = tmp_path / "runs", int(machines_texts(tmp_path / "runs")["main_process_port"])
    run = RunFolder(runs_dir / "first")
    run.create()
    run.accelerate.write_text(f"main_process_port: {port}\nnum_machines: 2\n")
    waiting: dict[str, Any] = {"machines": {"count": 2, "minimum": None}, "host": os.uname().nodename}
    run.write_state(state="queued", processes=[Process.of("supervisor").as_json()], **waiting)
    assert machines_texts(runs_dir)["main_process_port"] != str(port)
    own = {"num_machines": "2", "main_process_ip": "127.0.0.1", "main_process_port": str(port), "shared_folder": "yes"}
    options = {"global_batch_size": "48", "runs_dir": str(runs_dir)}
    (mistake,) = preview(options, "tiny-lora", "ddp", num_processes=2, machines=own).mistakes
    assert f"main_process_port={port} is that of run first, which has not ended; use another" in str(mistake)
    run.write_state(state="done")
    assert preview(options, "tiny-lora", "ddp", num_processes=2, machines=own).mistakes == []
    assert machines_texts(runs_dir)["main_process_port"] == str(port)


@pytest.mark.parametrize(
    ("texts", "field"),
    [({"num_machines": "1"}, "num_machines"), ({"num_machines": "129"}, "num_machines"),
     ({"num_machines": " "}, "num_machines"), ({"main_process_port": "0"}, "main_process_port"),
     ({"main_process_port": "1.5"}, "main_process_port"), ({"min_machines": "3"}, "min_machines"),
     ({"shared_folder": "no"}, "shared_folder"), ({"shared_folder": None}, "shared_folder")],
)  # fmt: skip
def test_a_field_that_cannot_be_so_is_named(texts: dict[str, Any], field: str) -> None:
    assert {mistake.option for mistake in previewed(**texts).mistakes} == {field}


def test_loopback_is_offered_only_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines_form, "interfaces", lambda: {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.4"]})
    assert own_addresses() == [("10.0.0.4 on eth0", "10.0.0.4")]
    monkeypatch.setattr(machines_form, "interfaces", lambda: {"lo": ["127.0.0.1", "::1"]})
    assert own_addresses() == [("127.0.0.1 on lo", "127.0.0.1")]


def test_chosen_gpus_need_no_number_of_processes() -> None:
    mistakes: list[Mistake] = []
    texts = {"num_machines": "2", "main_process_ip": "127.0.0.1", "main_process_port": str(unused_port()),
             "shared_folder": "yes"}  # fmt: skip
    options = machine_options(texts, {"gpus": "0,1"}, mistakes, Path("runs"))
    assert (mistakes, options["machine_rank"], "num_processes" in options) == ([], "0", False)
