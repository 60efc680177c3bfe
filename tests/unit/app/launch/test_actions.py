"""What can be done to a run, as functions and as verbs, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.accelerate_launch import read_command_line
from app.cli import run_verb
from app.command_line import CLONE, Args
from app.launch import actions
from app.launch.foreground import write_folder
from app.runs.runs import find_run, list_runs, true_state
from app.runs.state import allowed, queue_position
from tests.made_runs import add_checkpoint, made_run
from trainers.config.mistakes import ConfigError
from trainers.config.parse import dump_yaml
from trainers.config.validation import build
from trainers.run import device_locks
from trainers.run.device_locks import Holder, Need, Ticket
from trainers.run.folder import Process, RunFolder, register, registered_runs, write_json

pytestmark = pytest.mark.usefixtures("elsewhere")
RUNS = Path("runs")


@pytest.fixture
def living() -> Iterator[dict[str, Any]]:
    """A process that lives, as a state file names it."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)"])
    yield Process.of("supervisor", pid=process.pid).as_json()
    process.kill()
    process.wait()


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """Exit status, JSON document and standard error of a verb."""
    status = run_verb(list(words))
    out, errors = capsys.readouterr()
    return status, json.loads(out) if out else None, errors


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# -- what is allowed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "alive", "expected"),
    [
        ("queued", True, ["cancel", "clone"]),
        ("starting", True, ["stop", "save", "stop_without_saving", "clone"]),
        ("running", True, ["stop", "save", "stop_without_saving", "clone"]),
        ("stopping", True, ["stop", "stop_without_saving", "clone"]),
        ("running", False, ["resume", "resume_changed", "export", "clone", "rename", "delete"]),
        ("failed", False, ["resume", "resume_changed", "export", "clone", "rename", "delete"]),
        ("stopped", False, ["resume", "resume_changed", "export", "clone", "rename", "delete"]),
        ("done", False, ["export", "clone", "rename", "delete"]),
    ],
)
def test_what_a_state_allows(state: str, alive: bool, expected: list[str], living: dict[str, Any]) -> None:
    run = made_run(RUNS, "a", state, processes=[living] if alive else [])
    add_checkpoint(run, 60)
    assert allowed(run) == expected
    run.write_state(export_dir=str(run.model))
    assert allowed(run) == [*(["train_further"] if state == "done" else []), *expected]


def test_a_queued_run_moves_where_there_is_another(living: dict[str, Any]) -> None:
    def moves(name: str) -> list[str]:
        return [action for action in allowed(RunFolder(RUNS / name)) if action.startswith("move")]

    device_locks.queue()  # makes the folder
    owners = {"a": int(living["pid"]), "b": os.getpid(), "c": os.getppid()}  # a process has one ticket
    for position, (name, pid) in enumerate(owners.items(), start=1):
        run = made_run(RUNS, name, "queued", processes=[living])
        Ticket(name, str(run.path), Need(cpu_slots=1), 0, Process.of("supervisor", pid=pid)).write(position)
    assert [moves(name) for name in owners] == [["move_down"], ["move_up", "move_down"], ["move_up"]]


def test_nothing_is_exported_without_a_checkpoint() -> None:
    assert "export" not in allowed(made_run(RUNS, "a", "stopped"))


# -- stop --------------------------------------------------------------------------------------------------------------


def test_a_stop_is_one_request_and_none_once_it_has_ended(living: dict[str, Any]) -> None:
    run = made_run(RUNS, "a", "running", processes=[living])
    actions.stop(run)
    before = run.stop_request.read_text()
    actions.stop(run)
    assert (run.stop_asked(), run.stop_request.read_text()) == (True, before)
    actions.stop(run, save=False)
    actions.stop(run)
    assert run.stop_asked() is False
    over = made_run(RUNS, "b", "done")
    actions.stop(over)
    assert over.stop_asked() is None


def test_the_verb_says_that_it_had_ended(capsys: pytest.CaptureFixture[str]) -> None:
    made_run(RUNS, "a", "done")
    status, document, _ = answer(capsys, "stop", "a", "--json")
    assert (status, document["already_ended"], document["state"]) == (0, True, "done")


def test_the_verb_says_when_it_does_not_end_in_time(capsys: pytest.CaptureFixture[str], living: dict[str, Any]) -> None:
    run = made_run(RUNS, "a", "running", processes=[living])
    status, document, _ = answer(capsys, "stop", "a", "--json", "--timeout", "0", "--no_save")
    assert (status, document["in_time"], run.stop_asked()) == (1, False, False)
    status, _, errors = answer(capsys, "stop", "a", "--timeout", "soon")
    assert (status, "timeout='soon' is not a number of seconds" in errors) == (2, True)


# -- rename ------------------------------------------------------------------------------------------------------------


def test_a_renamed_run_has_its_new_name_everywhere() -> None:
    run = made_run(RUNS, "old", export_dir=str((RUNS / "old" / "model").absolute()))
    other = "/data/old/old.yaml"
    run.command.write_text(f"CUDA_VISIBLE_DEVICES=0,2 python -m launch --config_file {run.accelerate} {other}\n")
    renamed = actions.rename(run, "New_name-1.0")
    assert renamed.path == RUNS.absolute() / "New_name-1.0"
    assert not run.path.exists()
    state = renamed.read_state() or {}
    assert (state["id"], state["state"], state["export_dir"]) == (renamed.id, "done", str(renamed.model))
    ids, words = read_command_line(renamed.command.read_text())
    assert (ids, words) == ([0, 2], ["python", "-m", "launch", "--config_file", str(renamed.accelerate), other])
    assert [one.id for one in list_runs(RUNS)] == ["New_name-1.0"]


def test_only_paths_in_the_folder_follow_a_new_name(tmp_path: Path) -> None:
    """A folder whose path is the beginning of another's, and one that needs quotes."""
    for name in ("t", "it's mine"):
        run = made_run(tmp_path, name)
        python = f"{tmp_path}/tunesmith/bin/python"
        run.command.write_text(shlex.join([python, str(run.config)]) + "\n")
        renamed = actions.rename(run, "new")
        assert read_command_line(renamed.command.read_text())[1] == [python, str(renamed.config)]
        actions.delete(renamed)


@pytest.mark.parametrize("action", [actions.delete, lambda run: actions.rename(run, "new")])
def test_a_run_that_is_being_exported_stays(action: Any) -> None:
    """By `tunesmith export`, which holds no lock of the exports of its page."""
    run = made_run(RUNS, "a", "done")
    add_checkpoint(run, 60)
    with run.record.exported_alone(), pytest.raises(ConfigError, match="run a is being exported by another process"):
        action(run)
    assert run.config.exists()
    action(run)
    assert not run.path.exists(), "the control"


def test_a_model_exported_elsewhere_stays_where_it_is(tmp_path: Path) -> None:
    renamed = actions.rename(made_run(RUNS, "old", export_dir="/elsewhere/model"), "new")
    assert (renamed.read_state() or {})["export_dir"] == "/elsewhere/model"


def test_a_registered_run_is_found_under_its_new_name(tmp_path: Path) -> None:
    run = made_run(tmp_path / "far", "old")
    register(run)
    renamed = actions.rename(run, "new")
    assert registered_runs() == [renamed.path]
    assert find_run("new", RUNS).path == renamed.path


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", ".hidden", "-x", "--yes", "a/b", "../up", "/etc/x", "a b", "a;b", "$(id)", "a\n", "a\0b",
        "\u202etxt", "\U0001f600", "é", "x" * 101, "x" * 300, None, 7, ["a"],
    ],
)  # fmt: skip
def test_hostile_names_are_refused(name: Any) -> None:
    run = made_run(RUNS, "old")
    with pytest.raises(ConfigError, match="is refused; use up to 100 letters"):
        actions.rename(run, name)
    assert [path.name for path in RUNS.iterdir()] == ["old"]


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    run = made_run(RUNS, "old")
    made_run(RUNS, "other")
    (RUNS / "empty").mkdir()
    (RUNS / "file").touch()
    (RUNS / "dangling").symlink_to("nowhere")
    for name in ("other", "empty", "file", "dangling", "old"):
        with pytest.raises(ConfigError, match=f"the name '{name}' is taken"):
            actions.rename(run, name)


# -- delete ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("option", "verb"), [("from_run", "starts"), ("teacher", "learns")])
def test_a_run_is_kept_while_another_one_needs_it(option: str, verb: str) -> None:
    run, other = made_run(RUNS, "first"), made_run(RUNS, "second", state="stopped")
    other.config.write_text(dump_yaml(build({"model_name_or_path": "embedded", "dataset_name": "embedded",
                                             option: str(run.model)})))  # fmt: skip
    message = f"run second {verb} from run first, and is stopped; finish or delete it first"
    with pytest.raises(ConfigError, match=message):
        actions.delete(run)
    with pytest.raises(ConfigError, match=message):
        actions.rename(run, "renamed")
    write_json(other.state_file, {**(other.read_state() or {}), "state": "done"})
    actions.delete(actions.rename(run, "renamed"))
    assert not run.path.exists()


def test_a_deleted_run_is_gone_with_all_that_is_its_own(tmp_path: Path) -> None:
    run = made_run(tmp_path / "far", "a")
    register(run)
    add_checkpoint(run, 60, files=(5000, 5000))
    for name in ("model", "export-merged"):
        temporary = run.record.temporary(name)
        (temporary / "weights.safetensors").write_bytes(b"\0" * 1000)
        run.record.publish(temporary, name)
    (run.record.temporary("export-full") / "half.safetensors").write_bytes(b"\0" * 1000)
    (run.path / ".state.json.4711.0a1b2c3d").write_text("half")
    run.ask_stop()
    whole = actions.size(run)
    assert whole > 14_000
    assert actions.delete(run) == whole
    assert not run.path.exists()
    assert (registered_runs(), list_runs(RUNS)) == ([], [])


def test_the_users_own_files_are_left() -> None:
    run = made_run(RUNS, "a")
    add_checkpoint(run, 60)
    (run.path / "thesis").mkdir()
    for name in ("thesis/chapter.txt", "bad-idea.txt", "notes.md", ".config.yaml.swp", "checkpoints.zip"):
        (run.path / name).write_text("mine")
    before = actions.size(run)
    freed = actions.delete(run)
    left = {"thesis", "thesis/chapter.txt", "bad-idea.txt", "notes.md", ".config.yaml.swp", "checkpoints.zip"}
    assert (files(run.path), freed) == (left, before - 5 * len("mine"))
    assert list_runs(RUNS) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "precious").write_text("x" * 100_000)
    run = made_run(RUNS, "a")
    (run.checkpoints / "step-00000001").symlink_to(outside / "deep")
    (run.checkpoints / "mine").symlink_to(outside)
    assert actions.size(run) < 50_000
    actions.delete(run)
    assert files(outside) == {"deep", "deep/precious"}
    assert files(run.path) == {"checkpoints", "checkpoints/mine"}


@pytest.mark.parametrize("verb", ["rename", "delete"])
def test_a_folder_that_is_a_link_is_refused(verb: str, tmp_path: Path) -> None:
    run = made_run(tmp_path / "far", "a")
    RUNS.mkdir()
    (RUNS / "link").symlink_to(run.path)
    link = RunFolder(RUNS / "link")
    with pytest.raises(ConfigError, match=f"is a link; {verb} the folder it points to"):
        actions.rename(link, "new") if verb == "rename" else actions.delete(link)
    assert run.state_file.exists()


@pytest.mark.parametrize("verb", ["rename", "delete"])
@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_live_run_is_left_alone(verb: str, state: str, living: dict[str, Any]) -> None:
    run = made_run(RUNS, "a", state, processes=[living])
    before = files(run.path)
    with pytest.raises(ConfigError, match=f"run a is {state}; stop it before you {verb} it"):
        actions.rename(run, "new") if verb == "rename" else actions.delete(run)
    assert files(run.path) == before


@pytest.mark.parametrize("verb", ["rename", "delete"])
def test_a_run_that_is_being_resumed_at_this_moment_is_left_alone(verb: str) -> None:
    run = made_run(RUNS, "a", "stopped")
    with run.hold(), pytest.raises(ConfigError, match="already running"):
        actions.rename(run, "new") if verb == "rename" else actions.delete(run)
    assert run.state_file.exists()


def test_a_resume_does_not_make_the_folder_of_a_run_that_is_gone() -> None:
    from app.launch.foreground import held
    from app.launch.job import resume_job

    run = made_run(RUNS, "a", "stopped", world=1, strategy="single")
    job = resume_job(run, Args())
    actions.rename(run, "new")
    with pytest.raises(ConfigError), held(job):
        pass
    assert [path.name for path in RUNS.iterdir()] == ["new"]


# -- clone -------------------------------------------------------------------------------------------------------------


def test_a_clone_is_a_new_run_with_what_is_changed(capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(RUNS, "a", world=1, strategy="single", config={"seed": 7})
    job = actions.clone(run, CLONE.read(["--learning_rate", "1e-4"]))
    assert (job.config.seed, job.config.learning_rate) == (7, 1e-4)
    assert (job.strategy.name, job.devices.num_processes, job.attempt, job.resume_from) == ("single", 1, None, None)
    assert job.run.path.parent == run.path.parent
    write_folder(job)
    assert job.run.path != run.path
    with pytest.raises(ConfigError, match="leave --preset and --config out"):
        actions.clone(run, CLONE.read(["--preset", "tiny-lora"]))
    with pytest.raises(ConfigError, match="lerning_rate"):
        actions.clone(run, CLONE.read(["--lerning_rate", "1"]))


def test_a_clone_of_a_run_with_a_folder_of_its_own_gets_another(tmp_path: Path) -> None:
    run = made_run(tmp_path / "far", "a", world=1, strategy="single", config={"output_dir": str(tmp_path / "far/a")})
    assert actions.clone(run).run.path != run.path


# -- move --------------------------------------------------------------------------------------------------------------


def test_a_queued_run_moves(living: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(RUNS, "a", "queued", processes=[living])
    with device_locks.take_now(Need(cpu_slots=1000), Holder("busy")):
        ticket = device_locks.enqueue(run.path, run.id, Need(cpu_slots=1))
        assert (queue_position(run), actions.move(run, 5)) == (1, 1)
        assert answer(capsys, "runs", "move", "a", "-1", "--json")[:2] == (0, {"id": "a", "place": 1})
        status, _, errors = answer(capsys, "runs", "move", "a", "up")
        assert (status, "places='up' is not a whole number" in errors) == (2, True)
        assert answer(capsys, "runs", "move", "a", "--to", "1", "--json")[:2] == (0, {"id": "a", "place": 1})
        assert answer(capsys, "runs", "move", "a", "--before", "a", "--json")[1]["place"] == 1
        for wrong in (["a"], ["a", "1", "--to", "1"], ["a", "--to", "0"], ["a", "--after", "b"]):
            assert answer(capsys, "runs", "move", *wrong)[0] == 2, wrong
        row = {"id": "a", "place": 1, "run_dir": str(run.path), "devices": "1 CPU core", "held_by": ["busy"]}
        assert answer(capsys, "runs", "queue", "--json")[:2] == (0, [{**row, "listed": True}])
        device_locks.give_up(ticket)
    assert answer(capsys, "runs", "queue", "--json")[:2] == (0, [])
    assert queue_position(run) is None
    with pytest.raises(ConfigError, match="run a is not in the queue"):
        actions.move(run, -1)


# -- export ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ({"merged": True}, "so it has no adapter to merge"),
        ({"output": Path("full of things")}, "holds other files"),
        ({"output": Path("a file/model")}, "is a file, not a folder"),
    ],
)
def test_a_wrong_export_is_refused_before_anything_starts(words: dict[str, Any], line: str) -> None:
    run = made_run(RUNS, "a", config={"method": "full"})
    Path("full of things").mkdir()
    Path("full of things/thesis.txt").touch()
    Path("a file").touch()
    with pytest.raises(ConfigError, match=line):
        actions.export(run, actions.ExportRequest(**words))


@pytest.mark.parametrize(
    ("checkpoint", "line"),
    [
        (None, "no checkpoint"),
        ("step-00000007", "no checkpoint"),
        ("../../etc", "no checkpoint"),
        ("--kind", "."),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused(checkpoint: str | None, line: str) -> None:
    run = made_run(RUNS, "a")
    with pytest.raises(ConfigError, match=line):
        actions.export(run, actions.ExportRequest(checkpoint))
    assert not (run.path / "export-adapter").exists()


@pytest.mark.parametrize("checkpoint", ["step-00000007", "../../etc", "/etc"])
def test_only_a_checkpoint_of_the_run_is_exported(checkpoint: str) -> None:
    run = made_run(RUNS, "a")
    add_checkpoint(run, 5)
    with pytest.raises(ConfigError, match="does not exist; run a has: step-00000005"):
        actions.export(run, actions.ExportRequest(checkpoint))


# -- the verbs ---------------------------------------------------------------------------------------------------------


def test_the_verbs_answer_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(RUNS, "a")
    path = str(RUNS.absolute() / "b")
    assert answer(capsys, "runs", "rename", "a", "b", "--json")[:2] == (0, {"id": "b", "run_dir": path})
    status, document, errors = answer(capsys, "runs", "delete", "b", "--json")
    assert (status, "run b was not deleted; pass --yes" in errors) == (2, True)
    assert RunFolder(path).exists()
    whole = actions.size(RunFolder(path))
    status, document, _ = answer(capsys, "runs", "delete", "b", "--yes", "--json")
    assert (status, document["id"]) == (0, "b")
    assert whole <= document["bytes"] <= whole + 4096
    assert not Path(path).exists()
    assert answer(capsys, "runs", "delete", "b", "--yes", "--json")[0] == 2
    assert not run.path.exists()


@pytest.mark.parametrize(
    "words",
    [
        ["runs", "rename", "a", "../x"],
        ["runs", "rename", "../a", "x"],
        ["runs", "delete", "..", "--yes"],
        ["runs", "delete", "/etc", "--yes"],
        ["runs", "move", "a", "1"],
        ["runs", "clone", "a", "--max_steps", "-5"],
        ["runs", "clone"],
        ["stop", "../a"],
        ["resume", "a", "--detach"],
        ["export", "a", "--output", "/proc/x"],
    ],
)
def test_a_wrong_verb_changes_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(RUNS, "a", "done")
    before = files(Path())
    assert run_verb(words) == 2
    assert capsys.readouterr().err.strip()
    assert {name for name in files(Path()) if name.partition("/")[0] != "state"} == before
    assert true_state(run)["state"] == "done"
