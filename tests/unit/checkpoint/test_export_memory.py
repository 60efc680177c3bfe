"""An export takes the memory of a few tensors, not of the model; in a process of its own, which measures it."""

from __future__ import annotations

import json
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
from trainers.config.validation import build
from trainers.embedded import BASE_DIR

BOUND = (108 + 300) * MIB
"""The largest tensor in fp32, and what libraries and the forward pass take. The model has 513 MiB in fp32."""


@pytest.mark.parametrize(("method", "kind"), [("lora", "merged"), pytest.param("full", "full", marks=pytest.mark.slow)])
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
