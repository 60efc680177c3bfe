"""Who has joined a run on several machines, by the files that they write; those of strangers are only text."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from app.launch.machines import as_machine_0
from app.runs.machines import join_lines, members
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, write_atomic, write_json
from ui.pages.run_machines import machines

NOTICE = {"count": 3, "minimum": None, "participants": None, "absent": {}, "address": "10.0.0.1", "timeout": 600.0}
STATE: dict[str, Any] = {"state": "starting", "launched_at": "2026-01-01T00:00:00+00:00", "machines": NOTICE}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "a run")
    run.create()
    write_json(run.machine_file(0), {"host": "zero", "devices": ["H100", "H100"]})
    return run


def statuses(run: RunFolder, **notice: Any) -> list[str]:
    state = {**STATE, "state": "running" if "participants" in notice else "starting", "machines": {**NOTICE, **notice}}
    return [row["status"] for row in members(run, state)]


def arrive(run: RunFolder, machine: int, age: float = 0, **values: Any) -> None:
    facts = {"address": f"10.0.0.{machine + 1}", "interface": "eth0", "versions": {"torch": "2.13", "python": "3.12"}}
    row = {"host": f"host-{machine}", "launch": STATE["launched_at"], "facts": facts, "devices": ["H100"], **values}
    write_json(run.machine_file(machine), row)
    os.utime(run.machine_file(machine), (time.time() - age,) * 2)


def test_each_machine_is_followed_from_awaited_to_lost(run: RunFolder) -> None:
    assert statuses(run) == ["there", "awaited", "awaited"]
    arrive(run, 1, launch="")
    assert statuses(run) == ["there", "there", "awaited"], "its checks are not done"
    arrive(run, 1)
    arrive(run, 2, refused="torch 2.12, but machine 0 has 2.13")
    assert statuses(run) == ["there", "joined", "refused"]
    arrive(run, 2, unreachable="it cannot reach machine 0")
    row = members(run, STATE)[2]
    assert (row["status"], row["problem"]) == ("unreachable", "it cannot reach machine 0")
    arrive(run, 2)
    assert statuses(run, participants=[0, 1], absent={"2": "late"}) == ["trains", "trains", "left out"]
    arrive(run, 1, age=60)
    assert statuses(run, participants=[0, 1, 2]) == ["trains", "lost", "trains"]
    assert statuses(run) == ["there", "awaited", "joined"], "one that has left is awaited again"
    row = members(run, STATE)[2]
    assert (row["host"], row["address"], row["devices"]) == ("host-2", "10.0.0.3 on eth0", "H100")
    assert row["versions"] == "torch 2.13, python 3.12"
    assert members(run, {**STATE, "state": "done"}) == members(run, {"state": "running"}) == []


def test_the_line_is_quoted_for_a_shell_and_names_the_fewest(run: RunFolder) -> None:
    path = f"'{run.path}'"
    assert join_lines(run, STATE) == [f"tunesmith resume {path} --machine_rank {rank}" for rank in (1, 2)]
    few = {**STATE, "machines": {**NOTICE, "minimum": 2}}
    assert join_lines(run, few)[1] == f"tunesmith resume {path} --machine_rank 2 --min_machines 2"
    assert join_lines(run, {"state": "running"}) == []


@pytest.mark.parametrize("value", [None, 3, "x" * 10**5, [1, {}], {"a": 1}, "<b>x</b>", "\x1b[2J", True])
def test_files_of_strangers_are_only_text(run: RunFolder, value: Any) -> None:
    for name in ("host", "devices", "facts", "refused", "unreachable", "launch"):
        arrive(run, 1, **{name: value})
        rows = members(run, STATE)
        html = machines({"members": rows, "join_lines": join_lines(run, STATE), "join_by": "", "actions": []})
        assert "<b>" not in html
        assert len(html) < 10_000
    arrive(run, 1, facts={"address": value, "interface": value, "versions": value})
    view = {"members": members(run, STATE), "join_lines": join_lines(run, STATE), "join_by": "", "actions": []}
    assert "<b>" not in machines(view)
    for broken in ({"count": value}, {"participants": value}, {"absent": value, "participants": [0]}):
        members(run, {**STATE, "machines": {**NOTICE, **broken}})


def test_a_run_that_has_ended_shows_its_lines_only_if_it_can_go_on(run: RunFolder) -> None:
    for state, actions in (("stopped", ["resume", "clone"]), ("done", ["clone"])):
        ended = {**STATE, "state": state}
        view = {"members": members(run, ended), "join_lines": join_lines(run, ended), "join_by": "", "actions": actions}
        assert ("Resume starts machine 0 here" in machines(view)) is (state == "stopped")
        assert machines(view) or state == "done"


def test_only_machine_0_is_resumed_without_a_rank(run: RunFolder) -> None:
    for host, expected in (("127.0.0.1", {"machine_rank": "0"}), ("192.0.2.7", None)):
        write_atomic(run.accelerate, f"num_machines: 3\nmain_process_ip: {host}\n")
        run.write_state(**STATE)
        if expected is None:
            with pytest.raises(ConfigError, match=r"main_process_ip=192.0.2.7 is machine 0 of run a run, and this is"):
                as_machine_0(run)
        else:
            assert as_machine_0(run) == expected
    run.write_state(machines=None)
    assert as_machine_0(run) == {}, "control: a single machine"
