"""A full disk and folders turned read-only: the last good checkpoint stands, and with room again nothing is lost."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.detached import detached, ended, saved, tunesmith, until
from tests.faults.conftest import Note, Undisturbed
from tests.faults.disk import SmallDisk, allow_writing, forbid_writing, unmount
from tests.faults.oracle import INTERVAL, OPTIONS, clean, exact, told
from tests.parity.runs import mostly_long
from trainers.run.folder import RunFolder
from trainers.run.manifest import verify


@pytest.fixture
def disk(home: Path) -> Iterator[SmallDisk]:
    made = SmallDisk(home / "runs")
    yield made
    unmount(made.folder)


def stands(run: RunFolder) -> None:
    """It failed in order, and what was published before is whole."""
    state = ended(run)
    assert (state["state"], saved(run) >= INTERVAL) == ("failed", True), state
    for path in run.checkpoints.glob("step-" + "[0-9]" * 8):
        verify(path)
    clean(run)


@pytest.mark.parametrize("left", mostly_long([2**20, 0], [2**20]), ids=["less than a checkpoint", "nothing"])
def test_the_disk_is_full(left: int, home: Path, disk: SmallDisk, undisturbed: Undisturbed, noted: Note) -> None:
    name = f"disk full ({left:,} bytes left)" if disk.kind == "tmpfs" else "no file may grow (RLIMIT_FSIZE)"
    whole, fault = undisturbed("ddp"), noted(name, "ddp")
    run = detached(home, "mine", 2, strategy="ddp", **OPTIONS)
    until(lambda: saved(run) >= INTERVAL)
    disk.fill(run, left)
    fault.at()
    stands(run)
    if disk.kind == "limit":
        assert os.strerror(errno.EFBIG) in told(run)
    elif left:
        said = re.search(r"has ([\d,]+) bytes free, a checkpoint needs ([\d,]+); free space", told(run))
        assert said, told(run)
        free, needed = (int(number.replace(",", "")) for number in said.groups())
        assert free <= left
        assert needed > 100_000
    else:
        assert "bytes free" in told(run), "not even its state can be written; a reader tells what it sees"
    disk.make_room()
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0
    exact(run, whole, replays=INTERVAL)
    fault.harmless(run)


@pytest.mark.long
@pytest.mark.parametrize("part", ["checkpoints", ""], ids=["checkpoints", "all of it"])
def test_a_folder_is_turned_read_only(part: str, home: Path, undisturbed: Undisturbed, noted: Note) -> None:
    whole, fault = undisturbed("ddp"), noted("folder read-only", "ddp")
    run = detached(home, "mine", 2, strategy="ddp", **OPTIONS)
    until(lambda: saved(run) >= INTERVAL)
    forbid_writing(run.path / part)
    fault.at()
    try:
        stands(run)
        words = ("Read-only file system", "Operation not permitted", "Permission denied", "nothing can be written")
        assert any(one in told(run) for one in words), told(run)
    finally:
        allow_writing(run.path / part)
    assert tunesmith("resume", "mine", "--detach", home=home).returncode == 0
    exact(run, whole, replays=INTERVAL)
    fault.harmless(run)
