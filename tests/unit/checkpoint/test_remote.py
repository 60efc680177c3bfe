"""Copies of checkpoints elsewhere: whole or not counted, pruned like the originals, verified when they come back."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import fsspec
import pytest

from app.services.allowed_paths import path_mistakes
from tests.detached import until
from tests.unit.checkpoint.test_checkpoint import checkpoints, saved
from trainers.build import resume_folder
from trainers.checkpoint.remote import RemoteCopy, split_step
from trainers.config.mistakes import ConfigError
from trainers.config.validation import build
from trainers.run.errors import TrainingError
from trainers.run.manifest import verify


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    place = f"memory://{tmp_path.name}" if request.param == "memory" else f"file://{tmp_path / 'far'}"
    yield place
    if request.param == "memory":
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def mirrored(folder: Path, url: str, *steps: int) -> RemoteCopy:
    mirror = RemoteCopy(url, limit=2)
    mirror.check_writable()
    store = saved(folder, *steps)
    for step in steps:
        copy(mirror, store.path(step))
    return mirror


def copy(mirror: RemoteCopy, folder: Path, best: int | None = None) -> None:
    mirror.copy(folder, best)
    until(mirror.copied, 30)


def test_a_copy_comes_back_on_another_machine(tmp_path: Path, url: str) -> None:
    mirror = mirrored(tmp_path / "here", url, 3, 6)
    assert mirror.steps() == [6, 3]
    there = tmp_path / "there"
    store = checkpoints(there)
    store.remote_copy = RemoteCopy(url, 2)
    assert store.newest() == there / "step-00000006"
    assert verify(there / "step-00000006") == verify(tmp_path / "here" / "step-00000006")
    assert [path.name for path in there.iterdir()] == ["step-00000006"]


def test_a_newer_one_here_is_taken_and_nothing_fetched(tmp_path: Path, url: str) -> None:
    mirrored(tmp_path / "here", url, 3)
    store = saved(tmp_path / "there", 4)
    store.remote_copy = RemoteCopy(url, 2)
    assert store.newest() == tmp_path / "there" / "step-00000004"
    assert not store.path(3).exists()


@pytest.mark.parametrize("fault", ["no manifest", "flip"])
def test_half_a_copy_and_a_damaged_one_do_not_count(
    fault: str, tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = mirrored(tmp_path / "here", url, 3, 6)
    there = f"{mirror.root}/step-00000006"
    if fault == "no manifest":
        mirror.fs.rm_file(f"{there}/manifest.json")
        assert mirror.steps() == [3]
    else:
        content = bytearray(mirror.fs.cat_file(f"{there}/rank-00000.safetensors"))
        content[-9] ^= 1
        mirror.fs.pipe_file(f"{there}/rank-00000.safetensors", bytes(content))
    found = mirror.fetch_newer(-1, tmp_path / "there")
    assert found == tmp_path / "there" / "step-00000003"
    assert ("step-00000006 is bad: rank-00000.safetensors was changed" in capsys.readouterr().out) == (fault == "flip")


def test_as_many_are_kept_as_here_and_the_best(tmp_path: Path, url: str) -> None:
    mirror = RemoteCopy(url, limit=2)
    store = saved(tmp_path / "here", 1, 2, 3, 4)
    for step in (1, 2, 3, 4):
        copy(mirror, store.path(step), best=1)
    assert mirror.steps() == [4, 3, 1]


def test_of_those_that_wait_for_a_slow_place_the_newest_is_copied(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, store, go_on = RemoteCopy(url, limit=2), saved(tmp_path / "here", 1, 2, 3), Event()
    put = mirror.fs.put_file

    def wait_and_put(*words: str) -> None:
        assert go_on.wait(30)
        put(*words)

    monkeypatch.setattr(mirror.fs, "put_file", wait_and_put)
    for step in (1, 2, 3):
        mirror.copy(store.path(step), best=None)
        until(lambda: mirror.copying)
    assert not mirror.copied()
    assert mirror.in_use() == [store.path(1), store.path(3)], "they are not pruned meanwhile"
    go_on.set()
    until(mirror.copied, 30)
    assert mirror.steps() == [3, 1]


def test_copies_that_cannot_be_read_are_left_to_a_person(tmp_path: Path, url: str) -> None:
    mirror = mirrored(tmp_path / "here", url, 5, 6)
    for step in (5, 6):
        mirror.fs.pipe_file(f"{mirror.root}/step-{step:08d}/rank-00000.safetensors", b"no tensors")
    assert mirror.fetch_newer(-1, tmp_path / "there") is None
    mirror.drop_after(0)
    store = saved(tmp_path / "there", 1)
    copy(mirror, store.path(1))
    assert mirror.steps() == [6, 5, 1]


def test_the_best_one_is_fetched_too(tmp_path: Path, url: str) -> None:
    mirrored(tmp_path / "here", url, 3, 6)
    store = checkpoints(tmp_path / "there")
    store.remote_copy = RemoteCopy(url, 2)
    assert store.newest() == tmp_path / "there" / "step-00000006"
    assert store.intact(3)
    assert not store.intact(4), "control: it is nowhere"


def test_a_copy_that_cannot_be_read_outlives_a_resume_from_its_url(tmp_path: Path, url: str) -> None:
    mirror = mirrored(tmp_path / "here", url, 3, 6)
    mirror.fs.pipe_file(f"{mirror.root}/step-00000006/rank-00000.safetensors", b"no tensors")
    store = checkpoints(tmp_path / "there")
    store.remote_copy = RemoteCopy(url, 2)
    config = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "resume_from_checkpoint": url})
    assert resume_folder(config, store) == tmp_path / "there" / "step-00000003"
    store.forget_after(3)
    assert store.remote_copy.steps() == [6, 3]


def test_a_url_is_no_pattern(tmp_path: Path) -> None:
    mirror = mirrored(tmp_path / "here", f"file://{tmp_path}/lr[1e-4]", 3)
    assert mirror.steps() == [3]


def test_steps_of_another_future_are_removed(tmp_path: Path, url: str) -> None:
    mirror = mirrored(tmp_path / "here", url, 3, 6)
    store = checkpoints(tmp_path / "here")
    store.remote_copy = mirror
    store.forget_after(3)
    assert mirror.steps() == [3]
    assert [path.name for path in store.published()] == ["step-00000003"]


def test_a_copy_that_fails_is_told_and_costs_no_checkpoint(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STORE_TOKEN", "very-secret-value")
    mirror = RemoteCopy(url, limit=2)

    def refuse(*_: object) -> None:
        raise PermissionError("denied for very-secret-value")

    monkeypatch.setattr(mirror.fs, "put_file", refuse)
    store = saved(tmp_path / "here", 3)
    copy(mirror, store.path(3))
    assert "warning: step-00000003 could not be copied to" in (told := capsys.readouterr().out)
    assert "very-secret-value" not in told
    verify(store.path(3))


def test_a_full_disk_here_is_not_blamed_on_the_url(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = RemoteCopy(url, limit=2)
    copy(mirror, saved(tmp_path / "here", 3).path(3))

    def refuse(code: int) -> None:
        def get(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(mirror.fs, "get_file", get)

    refuse(errno.ENOSPC)
    with pytest.raises(TrainingError, match=r"there has no room for the copy of step 3: No space left"):
        mirror.fetch(3, tmp_path / "there")
    refuse(errno.EACCES)  # as a store says it
    with pytest.raises(TrainingError, match=r"cannot be used: PermissionError"):
        mirror.fetch(3, tmp_path / "there")


@pytest.mark.parametrize("url", ["nowhere://bucket", "file:///proc/no/such"])
def test_a_place_that_cannot_be_used_is_named_at_once(url: str) -> None:
    with pytest.raises(TrainingError, match=rf"checkpoint_url={url} cannot be used"):
        RemoteCopy(url, 2).check_writable()


@pytest.mark.parametrize(
    ("url", "line"),
    [("bucket/run", "is not a URL such as s3://bucket/run"), ("s3://key:word@bucket/run", "holds credentials")],
)
def test_what_is_no_url_or_holds_a_password_is_refused(url: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line) as refused:
        build({"model_name_or_path": "embedded", "dataset_name": "embedded", "checkpoint_url": url})
    assert "key:word" not in str(refused.value)


@pytest.mark.parametrize(("url", "allowed"), [("ftp://me:word@host/run", False), ("s3://bucket/run@home", True)])
def test_a_password_in_the_url_to_resume_from_is_refused(url: str, allowed: bool) -> None:
    values = {"model_name_or_path": "embedded", "dataset_name": "embedded", "resume_from_checkpoint": url}
    if allowed:
        assert build(values)
        return
    with pytest.raises(ConfigError, match="resume_from_checkpoint holds credentials") as refused:
        build(values)
    assert "word" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("s3://bucket/run", True), ("file:///etc", False), ("memory://x", False), ("http://169.254.169.254/x", False),
        ("simplecache::file:///etc", False), ("none", True),
    ],
)  # fmt: skip
def test_a_page_may_name_object_stores_alone(url: str, allowed: bool) -> None:
    assert (path_mistakes({"checkpoint_url": url}, []) == []) == allowed


def test_a_url_names_a_checkpoint_or_the_folder_of_them() -> None:
    assert split_step("s3://bucket/run/step-00000010/") == ("s3://bucket/run", 10)
    assert split_step("s3://bucket/run") == ("s3://bucket/run", None)


def test_a_fetch_does_not_bring_a_removed_run_folder_back(tmp_path: Path, url: str) -> None:
    mirror = mirrored(tmp_path / "here", url, 3)
    with pytest.raises(FileNotFoundError, match="removed"):
        mirror.fetch(3, tmp_path / "removed" / "checkpoints")
    assert not (tmp_path / "removed").exists()
    (tmp_path / "removed").mkdir()
    assert mirror.fetch(3, tmp_path / "removed" / "checkpoints"), "the folder alone is enough"
