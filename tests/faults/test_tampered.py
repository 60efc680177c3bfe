"""Controls: the oracle sees a resume with stale generators, a lost optimizer moment, or another order of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.detached import ended, tunesmith
from tests.faults.conftest import Undisturbed
from tests.faults.oracle import INTERVAL, exact, numbers
from tests.faults.tamper import checkpoint, cut, rewrite
from tests.parity.runs import mostly_long
from trainers.run.folder import RunFolder

Change = Callable[[RunFolder], None]
AT = 2 * INTERVAL
DROPOUT = {"lora_dropout": 0.1}  # without it no number of a run comes from a generator


def resumed(whole: RunFolder, home: Path, change: Change) -> RunFolder:
    run = cut(whole, home / "runs" / "mine", AT)
    change(run)
    again = tunesmith("resume", "mine", "--detach", "--force", home=home)
    assert again.returncode == 0, again.stderr
    return run


def stale_generators(run: RunFolder) -> None:
    def take_older(tensors: dict[str, torch.Tensor]) -> None:
        for path in checkpoint(run, INTERVAL).glob("rank-*.safetensors"):
            older = load_file(path)
            tensors |= {name: older[name] for name in tensors if name.startswith("rng.") and name in older}

    rewrite(checkpoint(run, AT), take_older)


def lost_moment(run: RunFolder) -> None:
    def zero(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith(".exp_avg"):
                tensors[name].zero_()

    rewrite(checkpoint(run, AT), zero)


def untouched(run: RunFolder) -> None:
    rewrite(checkpoint(run, AT), lambda tensors: None)


def other_order(run: RunFolder) -> None:
    """It is refused, so it is forced."""
    text = run.config.read_text()
    assert "\nseed: 42\n" in text
    run.config.write_text(text.replace("\nseed: 42\n", "\nseed: 7\n"))


@pytest.mark.parametrize(
    ("change", "options"),
    mostly_long([(stale_generators, DROPOUT), (lost_moment, {}), (other_order, {})], [(lost_moment, {})]),
)
def test_a_resume_that_is_not_the_same_run_is_seen(
    change: Change, options: dict[str, Any], home: Path, undisturbed: Undisturbed
) -> None:
    whole = undisturbed("ddp", **options)
    run = resumed(whole, home, change)
    assert ended(run)["state"] == "done", "it is told by its numbers alone"
    assert numbers(run)[:AT] == numbers(whole)[:AT]
    with pytest.raises(AssertionError):
        exact(run, whole, replays=0)


@pytest.mark.long
def test_a_resume_whose_checkpoint_was_only_written_again_passes(home: Path, undisturbed: Undisturbed) -> None:
    """With dropout, so that it shows that the generators come back."""
    whole = undisturbed("ddp", **DROPOUT)
    exact(resumed(whole, home, untouched), whole, replays=0)
