"""An export takes the memory of a few tensors, not of the model; in a process of its own, which measures it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launching import ROOT, environment
from tests.shared import once
from tests.unit.checkpoint.exporting_rank import write_checkpoint
from tests.unit.parallel.test_loading import MIB, large
from trainers.checkpoint import scratch
from trainers.checkpoint.scratch import Scratch, map_file
from trainers.config.validation import build
from trainers.embedded import BASE_DIR

BOUND = (108 + 300) * MIB
"""The largest tensor in fp32, and what libraries and the forward pass take. The model has 513 MiB in fp32."""


def test_a_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    file, memory = tmp_path / "large", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with file.open("wb") as opened:
        opened.truncate(4 * memory)
    mapped = map_file(file)
    mapped[-1] = 1
    assert len(mapped) == 4 * memory
    assert mapped[-1] == 1
    with file.open("rb") as opened:
        opened.seek(-1, os.SEEK_END)
        assert opened.read() == b"\0", "the file stays as it is"


@pytest.mark.parametrize("room", [True, False])
def test_a_tensor_that_the_disk_has_no_room_for_is_kept_in_memory(
    room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[str] = []
    real = torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda name, **options: files.append(name) or real(name, **options))
    free = shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(scratch, "SPARE", 0 if room else free)
    values = torch.arange(scratch.SMALL, dtype=torch.float32)
    copy = Scratch(tmp_path).copy(values, torch.float32)
    assert torch.equal(copy, values)
    assert bool(files) is room
    assert not list(tmp_path.iterdir()), "its file has no name"


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "kind"),
    [("lora", "merged"), ("full", "full")],
)
def test_an_export_takes_the_memory_of_a_few_tensors(method: str, kind: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(once("model-134m", large), base)
    for path in [*BASE_DIR.glob("tokenizer*"), BASE_DIR / "chat_template.jinja"]:
        shutil.copy(path, base)
    options = {"model_name_or_path": str(base), "dataset_name": "embedded", "max_train_samples": 20, "method": method}
    torch.manual_seed(0)
    write_checkpoint(tmp_path / "step", build(options))
    peaks, files = [], []
    for extra in ([], ["whole"]):
        folder = tmp_path / f"model{len(peaks)}"
        command = [sys.executable, str(ROOT / "tests/unit/checkpoint/exporting_rank.py"), str(tmp_path / "step")]
        command += [str(folder), json.dumps(options), kind, *extra]
        done = subprocess.run(command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        peaks.append(int(done.stdout.splitlines()[-1]))
        files.append((folder / "model.safetensors").read_bytes())
    assert peaks[0] <= BOUND
    assert peaks[1] > BOUND, "control: tensors in memory"
    assert files[0] == files[1]
