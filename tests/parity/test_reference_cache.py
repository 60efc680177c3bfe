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
from trainers.run.folder import RunFolder

PAIRS = {"objective": "dpo", "dataset_name": "embedded", "max_steps": 2, "save_steps": 2, "max_train_samples": 40}
SAYS = "under the initial model: of an earlier run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the embedded model, `base`, and the run `first` with it."""
    folder = tmp_path_factory.mktemp("references")
    shutil.copytree(BASE_DIR, folder / "base")
    assert SAYS not in train(folder, "first").output
    return folder


def train(folder: Path, name: str, base: str = "base", strategy: str = "ddp", **changes: Any) -> Finished:
    """Two steps of DPO on two processes."""
    settings = {**options("full", True, **PAIRS), "model_name_or_path": folder / base, "cache_dir": folder / "cache"}
    variables = {key: changes.pop(key) for key in [*changes] if key.isupper()}
    return launch_well(folder / name, 2, {**settings, **changes}, strategy=strategy, **variables)


def tensors(finished: Finished) -> dict[str, torch.Tensor]:
    """Weights, state and references of the last checkpoint."""
    files = finished.checkpoints[-1].glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def equal(run: Finished, other: Finished) -> bool:
    computed, expected = tensors(run), tensors(other)
    assert computed.keys() == expected.keys()
    assert any("reference." in name for name in expected)
    return all(torch.equal(computed[name], expected[name]) for name in expected)


def test_a_run_with_known_references_has_the_bits_of_one_that_computes_them(folder: Path) -> None:
    other = {"learning_rate": 1e-3, "beta": 0.3}
    known = train(folder, "known", **other)
    assert known.output.count(SAYS) == 2  # of the training data and of the evaluation data
    computed = train(folder, "computed", **other, cache_dir=folder / "empty")
    assert SAYS not in computed.output
    assert equal(known, computed)


def test_what_can_change_a_bit_is_computed_anew(folder: Path) -> None:
    assert SAYS not in train(folder, "sharded", strategy="fsdp2").output
    weights = load_file(folder / "base" / "model.safetensors")
    name = next(iter(weights))
    shutil.copytree(folder / "base", folder / "other")
    save_file(weights | {name: weights[name] + 1e-3}, folder / "other" / "model.safetensors", {"format": "pt"})
    assert SAYS not in train(folder, "weights", base="other").output


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [{"per_device_eval_batch_size": 2}, {"max_length": 150}, {"seed": 7}, {"ATEN_CPU_CAPABILITY": "default"}],
    ids=str,
)
def test_other_options_are_computed_anew(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    assert SAYS not in train(folder, tmp_path.name, **changes).output


def test_a_damaged_file_is_computed_anew(folder: Path) -> None:
    cache = shutil.copytree(folder / "cache", folder / "damaged")
    for number, file in enumerate(sorted((cache / "reference").glob("*.json"))):
        document = json.loads(file.read_text())
        wrong = json.dumps(document | {"values": "0" * len(document["values"])})
        file.write_text(wrong if number % 2 else wrong[:-9])
    again = train(folder, "again", cache_dir=cache)
    assert SAYS not in again.output
    assert equal(again, Finished(RunFolder(folder / "first"), 0, ""))
