"""Controls: the oracle sees a lost step, a changed bit, a repetition without its attempt, and a half-written folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.faults.conftest import Undisturbed
from tests.faults.oracle import exact, rows
from trainers.run.folder import RunFolder


@pytest.fixture
def copy(home: Path, undisturbed: Undisturbed) -> RunFolder:
    """A copy of the run that met no fault, to be damaged."""
    return RunFolder(Path(shutil.copytree(undisturbed("ddp").path, home / "copy")))


def rewrite(run: RunFolder, change: Callable[[list[dict[str, float]]], object]) -> None:
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    change(found)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in found))


def test_an_untouched_copy_passes(copy: RunFolder, undisturbed: Undisturbed) -> None:
    exact(copy, undisturbed("ddp"), replays=0)


def test_one_bit_of_a_loss_is_seen(copy: RunFolder, undisturbed: Undisturbed) -> None:
    rewrite(copy, lambda found: found[6].update(loss=math.nextafter(found[6]["loss"], math.inf)))
    with pytest.raises(AssertionError):
        exact(copy, undisturbed("ddp"), replays=0)


def test_one_bit_of_a_weight_is_seen(copy: RunFolder, undisturbed: Undisturbed) -> None:
    (file,) = copy.model.glob("*.safetensors")
    tensors = load_file(file)
    first = next(iter(tensors.values()))
    first.view(-1)[0] += first.view(-1)[0].abs() * 1e-6 + 1e-12
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(AssertionError):
        exact(copy, undisturbed("ddp"), replays=0)


def test_a_step_that_is_not_logged_is_seen(copy: RunFolder) -> None:
    rewrite(copy, lambda found: found.pop(6))
    with pytest.raises(AssertionError):
        rows(copy)


def test_a_repetition_without_its_attempt_is_seen(copy: RunFolder) -> None:
    rewrite(copy, lambda found: found.append(found[6]))
    with pytest.raises(AssertionError, match="has its own attempt"):
        rows(copy)


@pytest.mark.parametrize("lost", [True, False], ids=["lost checkpoint", "half-written folder"])
def test_what_is_wrong_in_the_checkpoints_is_seen(lost: bool, copy: RunFolder, undisturbed: Undisturbed) -> None:
    if lost:
        shutil.rmtree(copy.checkpoints / "step-00000010")
    else:
        (copy.checkpoints / "step-00000010.tmp-0").mkdir()
    with pytest.raises(AssertionError):
        exact(copy, undisturbed("ddp"), replays=0)
