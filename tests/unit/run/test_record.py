"""A user's files are never replaced nor removed: not by a start, not by an export, not by `runs delete`."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from app.command_line import TRAIN
from app.launch import actions
from app.launch.foreground import held, write_folder
from app.launch.job import TrainJob, clone_job, resume_job, train_job
from tests.made_runs import add_checkpoint, made_run
from trainers.config.mistakes import ConfigError
from trainers.embedded import BASE_DIR
from trainers.run.folder import RunFolder
from trainers.run.record import FILES

pytestmark = pytest.mark.usefixtures("elsewhere")
NAMES = sorted(FILES - {".written.jsonl"})
"""Names that a run uses too; users have files of these names."""
USERS = [
    *NAMES, "model/model.safetensors", "model/deep/notes.md", "checkpoints/step-00000001/rank-00000.safetensors",
    "checkpoints/mine.txt", "heartbeat/rank-0.json", "export-full/config.json", "export-mine/x", ".model.tmp/x",
    ".model.old/x", ".export-full.tmp/x", "thesis.txt", "data/train.jsonl", ".git/HEAD", "step-00000001/x",
]  # fmt: skip
# Of these not one is a run's, whatever the run does later.
BESIDE = [
    "model/notes.md", "checkpoints/mine.txt", "checkpoints/step-00000001/notes.txt", "heartbeat/mine.json",
    "export-mine/x", "export-full/mine.txt", ".model.tmp/x", ".model.0123456789abcdef/x", ".model.old/x", "thesis.txt",
    "data/train.jsonl", "log.txt.bak", "metrics.csv", "heartbeat/deep/rank-0.json", "empty/deep/x", "sampler/notes.md",
    "sampler/0123456789abcdef/notes.md",
]  # fmt: skip


def put(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # Other programs write such states too.
        (folder / name).write_text('{"state": "done"}' if name == "state.json" else f"mine: {name}")


def contents(folder: Path) -> dict[str, bytes]:
    files = [Path(base, name) for base, _, names in os.walk(folder) for name in names]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def start(run: RunFolder, *more: str) -> TrainJob:
    """What a start does, up to the launch."""
    job = train_job(TRAIN.read(["tiny-lora", "--output_dir", str(run.path), *more]))
    with held(job):
        write_folder(job)
        job.run.write_state(state="starting")
    return job


def export_to(run: RunFolder, name: str, files: list[str]) -> None:
    temporary = run.record.temporary(name)
    put(temporary, files)
    run.record.publish(temporary, name)


# -- a folder of the user's own ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", USERS)
def test_a_folder_with_one_file_of_the_users_is_refused(name: str) -> None:
    run = RunFolder("mine")
    put(run.path, [name])
    before = contents(run.path)
    for words in ([], ["--resume_from_checkpoint", "auto"], ["--resume_from_checkpoint", str(run.checkpoints / "x")]):
        with pytest.raises(ConfigError, match="choose a new or empty folder"):
            start(run, *words)
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        run.create()  # which a rank that was launched by hand calls, and another machine of a run
    assert contents(run.path) == before


@given(names=some.sets(some.sampled_from(USERS), min_size=1), seed=some.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_nothing_that_is_asked_of_a_users_folder_changes_it(names: set[str], seed: int) -> None:
    run = RunFolder(f"mine-{len(os.listdir())}")
    put(run.path, sorted(names))
    before = contents(run.path)
    asked = [
        lambda: start(run), lambda: start(run, "--resume_from_checkpoint", "auto"), run.create, run.refuse_used,
        lambda: resume_job(run, TRAIN.read([run.id])), lambda: clone_job(run, TRAIN.read([])),
        lambda: actions.export(run, actions.ExportRequest(output=run.model)), lambda: actions.delete(run),
        lambda: actions.rename(run, "other"),
    ]  # fmt: skip
    random.Random(seed).shuffle(asked)
    for ask in asked:
        with contextlib.suppress(ConfigError):
            ask()
    assert contents(run.path) == before


def test_the_working_folder_is_a_folder_like_any_other() -> None:
    put(Path("mine"), ["train.jsonl"])
    os.chdir("mine")
    with pytest.raises(ConfigError, match=r"is not empty and holds no run: train\.jsonl"):
        start(RunFolder("."))
    os.mkdir("empty")
    os.chdir("empty")
    assert start(RunFolder(".")).run.exists()


def test_a_folder_of_another_program_with_a_config_is_no_run() -> None:
    """Many programs write a `config.yaml`, and a run of theirs cannot be resumed here."""
    put(Path("theirs"), ["config.yaml", "state.json"])
    assert not RunFolder("theirs").exists()
    with pytest.raises(ConfigError, match=r"is not empty and holds no run: config\.yaml, state\.json;"):
        start(RunFolder("theirs"))


def test_a_run_without_its_record_is_neither_deleted_nor_resumed() -> None:
    """Such as a copy without hidden files: which files are the run's is not known, and is not made up later."""
    run = made_run(Path("runs"), "copied", "stopped")
    add_checkpoint(run, 1)
    run.record.path.unlink()
    before = contents(run.path)
    for change, verb in ((actions.delete, "delete"), (lambda run: actions.rename(run, "b"), "rename")):
        with pytest.raises(ConfigError, match=rf"copied has no \.written\.jsonl, so which .*; {verb} it by hand"):
            change(run)
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        resume_job(run, TRAIN.read([run.id]))
    with pytest.raises(FileNotFoundError):
        run.record.enter(["export-full/config.json"])
    assert contents(run.path) == before


def test_an_empty_folder_and_a_run_of_ours_are_taken() -> None:
    """The control: a refusal of everything would pass all of the above."""
    Path("empty").mkdir()
    run = start(RunFolder("empty")).run
    run.write_state(state="stopped", processes=[])
    assert resume_job(run, TRAIN.read([run.id])).run.path == run.path
    with pytest.raises(ConfigError, match="holds a run; resume it"):
        start(RunFolder("empty"))


def test_the_base_model_is_not_replaced_by_its_own_export() -> None:
    run = start(RunFolder("mine")).run
    export_to(run, "model", ["config.json"])
    run.write_state(state="failed", processes=[])
    Path("link").symlink_to(run.model)
    for base in (str(run.model), "link", "mine/model", "mine/../mine/model"):
        with pytest.raises(ConfigError, match=r"model_name_or_path=\S+ is inside output_dir=\S+mine, to which"):
            resume_job(run, TRAIN.read([run.id, "--model_name_or_path", base, "--force"]))
    assert resume_job(run, TRAIN.read([run.id, "--model_name_or_path", str(BASE_DIR), "--force"]))  # the control


# -- files of the user's in a run's folder -----------------------------------------------------------------------------


@given(names=some.sets(some.sampled_from(BESIDE)), seed=some.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_files_put_into_a_runs_folder_outlive_it(names: set[str], seed: int) -> None:
    run = made_run(Path(f"runs-{len(os.listdir())}"), "a", "stopped")
    add_checkpoint(run, 1)
    todo = [
        lambda: export_to(run, "model", ["config.json", "deep/weights.safetensors"]),
        lambda: export_to(run, "model", ["adapter.json"]),
        lambda: export_to(run, "export-full", ["config.json"]),
        lambda: run.record.temporary("model"),
        lambda: resume_job(run, TRAIN.read([run.id])),
        lambda: put(run.path, sorted(names)),
    ]
    random.Random(seed).shuffle(todo)
    for action in todo:
        with contextlib.suppress(ConfigError):
            action()
    actions.delete(run)
    assert contents(run.path) == {name: f"mine: {name}".encode() for name in names}
    assert run.path.exists() == bool(names)


@pytest.mark.parametrize("mine", ["model/model.safetensors", "model"])
def test_an_export_does_not_replace_what_the_run_did_not_write(mine: str) -> None:
    run = made_run(Path("runs"), "a", "stopped")
    put(run.path, [mine])
    with pytest.raises(ConfigError, match=f"{mine} was not written by this run, which exports to model; move it to"):
        export_to(run, "model", ["config.json"])
    with pytest.raises(ConfigError, match="was not written by this run"):
        resume_job(run, TRAIN.read(["a"]))  # before it trains for what it could not export
    assert (run.path / mine).read_text() == f"mine: {mine}"


def test_a_later_export_replaces_an_earlier_one_and_what_a_killed_one_left() -> None:
    run = made_run(Path("runs"), "a", "done")
    killed = run.record.temporary("model")
    put(killed, ["half.safetensors"])
    export_to(run, "model", ["old.json"])
    export_to(run, "model", ["new.json"])
    assert [path.name for path in run.model.iterdir()] == ["new.json"]
    assert not killed.exists()
    assert not list(run.path.glob(".model.*"))


def test_a_damaged_record_gives_nothing_away() -> None:
    run = made_run(Path("runs"), "a", "done")
    put(run.path, ["model/mine.txt"])
    lines = ['"../../outside/"', '"/"', '"./"', "7", "[" * 100_000, '"mod', "\udc80", '{"a": 1}']
    run.record.path.write_text("\n".join(lines), errors="surrogateescape")
    put(Path("outside"), ["x"])
    actions.delete(run)
    assert contents(run.path) == {"model/mine.txt": b"mine: model/mine.txt"}
    assert contents(Path("outside")) == {"x": b"mine: x"}


@pytest.mark.parametrize("name", [*sorted(FILES - {"state.json", ".written.jsonl"}), "checkpoints", "heartbeat"])
@pytest.mark.parametrize("put_there", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_pipe_in_place_of_a_file_is_named(name: str, put_there: Callable[[Path], None]) -> None:
    run = made_run(Path("runs"), "a", "stopped")
    path = run.path / name
    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    put_there(path)
    for change in (RunFolder.create, RunFolder.hold, actions.delete, lambda run: actions.rename(run, "b")):
        with pytest.raises(ConfigError, match=f"{name} is not a regular file or folder; remove it"):
            change(run)


def test_what_a_tracker_writes_into_the_folder_is_the_runs(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a", "done")
    run.own_folder("tunesmith")
    put(run.path, ["tunesmith/events.out.tfevents.1", "tunesmith/17/events.out.tfevents.2"])
    run.own_folder("tunesmith")  # a resume
    actions.delete(run)
    assert not run.path.exists()
    other = made_run(tmp_path, "b", "done")
    put(other.path, ["tunesmith/mine.txt"])
    other.own_folder("tunesmith")
    actions.delete(other)
    assert contents(other.path) == {"tunesmith/mine.txt": b"mine: tunesmith/mine.txt"}


def test_a_folder_that_is_removed_does_not_come_back(tmp_path: Path) -> None:
    """What a rank leaves behind would make it one, and the run would go on in a folder without its files."""
    run = made_run(tmp_path, "a", "running")
    shutil.rmtree(run.path)
    run.note_failure(1, "Connection closed by peer")
    run.note_out_of_memory(1)
    assert not run.path.exists()


def test_a_held_run_empties_no_file_behind_a_link(tmp_path: Path) -> None:
    run, other = RunFolder(tmp_path / "run"), tmp_path / "other"
    run.create()
    other.write_text("kept")
    run.lock.symlink_to(other)
    with run.hold():
        assert other.read_text() == "kept"


def test_a_stop_says_what_has_asked_for_it(tmp_path: Path) -> None:
    """The cause of the run names it; the first request counts, and a file of anything else is a plain request."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.ask_stop(source="the death of its Ray driver")
    run.ask_stop()
    assert (run.stop_asked(), run.stop_source()) == (True, "the death of its Ray driver")
    run.ask_stop(save=False)
    assert (run.stop_asked(), run.stop_source()) == (False, "a stop request")
    for text in ("", "[]", '{"source": 3}', '{"source": ["x"]}'):
        run.stop_request.write_text(text)
        assert (run.stop_asked(), run.stop_source()) == (True, "a stop request")
