"""Where a process under ZeRO 3 keeps its optimizer's state on NVMe: a folder that no other process reads or leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainers.parallel.zero import _own_swap_folder, _use_new_profile_file, build_extensions
from trainers.run.errors import TrainingError

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


def test_a_folder_of_the_users_beside_it_is_left(tmp_path: Path) -> None:
    (tmp_path / "tunesmith-notes").mkdir()
    (tmp_path / "tunesmith-notes" / "thesis.txt").write_text("all of it")
    killed, left = start(tmp_path)
    killed.kill()
    killed.communicate()
    assert _own_swap_folder(settings("nvme", tmp_path))
    assert (tmp_path / "tunesmith-notes" / "thesis.txt").read_text() == "all of it"
    assert not left.exists(), "control: what a process of ours left is removed"


def test_a_profile_is_not_written_over_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        profile = {"flops_profiler": {"enabled": True, "output_file": str(tmp_path / "deep" / "thesis.txt")}}
        _use_new_profile_file(profile)
        written = Path(profile["flops_profiler"]["output_file"])  # type: ignore[arg-type]
        assert written.name == ("thesis.txt", "thesis-1.txt", "thesis-2.txt")[number]
        assert written.read_text() == ""
        written.write_text(f"profile {number}")
    assert capsys.readouterr().out.count("already exists; the profile goes to") == 2
    assert sorted(path.read_text() for path in (tmp_path / "deep").iterdir()) == [f"profile {n}" for n in range(3)]
    with pytest.raises(TrainingError, match="cannot be created: File exists; name a new file"):
        _use_new_profile_file({"flops_profiler": {"enabled": True, "output_file": str(written / "x")}})
    off = {"flops_profiler": {"enabled": False, "output_file": str(tmp_path / "off.txt")}}
    for nothing in ({}, {"flops_profiler": {"enabled": True}}, {"flops_profiler": {"output_file": ""}}, off):
        _use_new_profile_file(nothing)
    assert not (tmp_path / "off.txt").exists()


def test_without_nvme_nothing_is_made(tmp_path: Path) -> None:
    place = tmp_path / "not"
    assert _own_swap_folder(settings("cpu", place)) is None
    assert not place.exists()


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"nvme_path=.*/file/swap cannot be used: .*; name a folder on that disk"):
        _own_swap_folder(settings("nvme", tmp_path / "file" / "swap"))


def test_minutes_of_compiling_are_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first start of an installation waits for them; control: the second one has nothing to say."""
    from deepspeed import accelerator

    class Builder:
        name = "deepspeed_shm_comm"

        def load(self, verbose: bool) -> None:
            (tmp_path / self.name).mkdir(exist_ok=True)
            (tmp_path / self.name / f"{self.name}.so").touch()

    device = SimpleNamespace(create_op_builder=lambda name: Builder())
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: device)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    build_extensions(["ShareMemCommBuilder"])
    assert "compiling DeepSpeed's deepspeed_shm_comm, once" in capsys.readouterr().out
    build_extensions(["ShareMemCommBuilder"])
    assert not capsys.readouterr().out
