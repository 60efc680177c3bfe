"""Where a process under ZeRO 3 keeps its optimizer's state on NVMe: a folder that no other process reads or leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainers.errors import TrainingError
from trainers.parallel.zero import _own_swap_folder

OTHER = """
import sys
from trainers.parallel.zero import _own_swap_folder
place = {"device": "nvme", "nvme_path": sys.argv[1]}
lock = _own_swap_folder({"zero_optimization": {"offload_optimizer": place}})
print(place["nvme_path"], flush=True)
sys.stdin.read()
"""


def settings(device: str, place: Path) -> dict[str, Any]:
    return {"zero_optimization": {"offload_optimizer": {"device": device, "nvme_path": str(place)}}}


def start(place: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process that has made its folder and goes on until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def test_each_process_has_a_folder_of_its_own_that_is_removed(tmp_path: Path) -> None:
    killed, left = start(tmp_path)
    killed.kill()
    killed.communicate()
    assert left.is_dir()
    live, used = start(tmp_path)
    assert not left.exists(), "what a killed process left is removed"
    mine = settings("nvme", tmp_path)
    lock = _own_swap_folder(mine)
    assert lock
    assert lock.is_locked
    own = Path(mine["zero_optimization"]["offload_optimizer"]["nvme_path"])
    assert own.is_dir()
    assert used.is_dir(), "control: a live one's stays"
    assert own != used
    live.communicate()
    assert not used.exists()


def test_without_nvme_nothing_is_made(tmp_path: Path) -> None:
    place = tmp_path / "not"
    assert _own_swap_folder(settings("cpu", place)) is None
    assert not place.exists()


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"nvme_path=.*/file/swap cannot be used: .*; name a folder on that disk"):
        _own_swap_folder(settings("nvme", tmp_path / "file" / "swap"))
