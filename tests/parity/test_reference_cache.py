"""The log-probabilities of the initial model are kept for runs that would compute the same bits, and for no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.launching import Finished, launch_well
from tests.parity.runs import options
from trainers.embedded import BASE_DIR

PAIRS = {"objective": "dpo", "dataset_name": "embedded", "max_steps": 2, "save_steps": 2, "max_train_samples": 40}
SAYS = "under the initial model: of an earlier run"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(BASE_DIR, tmp_path / "base"))


def train(folder: Path, base: Path, strategy: str = "ddp", cache: str = "cache", **changes: Any) -> Finished:
    """Two steps of DPO on two processes, with the tokens and references that `cache` has."""
    settings = {**options("full", True, **PAIRS), "model_name_or_path": base, "cache_dir": folder.parent / cache}
    return launch_well(folder, 2, {**settings, **changes}, strategy=strategy)


def tensors(finished: Finished) -> dict[str, torch.Tensor]:
    """Weights, state and references of the last checkpoint."""
    files = finished.checkpoints[-1].glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_run_with_known_references_has_the_bits_of_one_that_computes_them(tmp_path: Path, base: Path) -> None:
    train(tmp_path / "first", base)
    known = train(tmp_path / "known", base, learning_rate=1e-3, beta=0.3)
    computed = train(tmp_path / "computed", base, cache="empty", learning_rate=1e-3, beta=0.3)
    assert known.output.count(SAYS) == 2  # of the training data and of the evaluation data
    assert SAYS not in computed.output
    expected = tensors(computed)
    assert any("reference." in name for name in expected)
    found = tensors(known)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_can_change_a_bit_is_computed_anew(tmp_path: Path, base: Path) -> None:
    first = train(tmp_path / "first", base)
    assert SAYS not in first.output
    others: dict[str, dict[str, Any]] = {
        "micro": {"per_device_eval_batch_size": 2},
        "sharded": {"strategy": "fsdp2"},
        "shorter": {"max_length": 150},
    }
    for name, changes in others.items():
        assert SAYS not in train(tmp_path / name, base, **changes).output, name

    weights = load_file(base / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] + 1e-3}, base / "model.safetensors", {"format": "pt"})
    assert SAYS not in train(tmp_path / "weights", base).output


def test_a_damaged_file_is_computed_anew(tmp_path: Path, base: Path) -> None:
    first = tensors(train(tmp_path / "first", base))
    files = sorted((tmp_path / "cache" / "reference").glob("*.json"))
    assert len(files) == 2
    document = json.loads(files[0].read_text())
    files[0].write_text(json.dumps(document | {"values": "0" * len(document["values"])}))
    files[1].write_text(files[1].read_text()[:-9])
    again = train(tmp_path / "again", base)
    assert SAYS not in again.output
    assert all(torch.equal(first[name], tensor) for name, tensor in tensors(again).items())
    assert train(tmp_path / "third", base).output.count(SAYS) == 2  # it has written them again
