"""Numbers gone wrong: an update is skipped, a spike is rolled back, and what comes out is as if never trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.detached import detached, ended
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import OPTIONS, clean, rows
from tests.launching import Finished
from tests.parity.checks import weights
from tests.parity.runs import mostly_long
from trainers.run.folder import RunFolder
from trainers.run.manifest import verify

STRATEGIES = ["ddp", "fsdp2", "zero3"]


def skipping(home: Path, strategy: str, steps: list[int]) -> RunFolder:
    """A run that meets no fault and is told to skip some steps."""
    told = RunFolder(home / "runs" / "told")
    told.create()
    told.write_skipped_steps(steps)
    run = detached(home, "told", 2, strategy=strategy, **OPTIONS)
    assert ended(run)["state"] == "done"
    return run


def same(one: RunFolder, two: RunFolder, but: list[int]) -> bool:
    """Whether weights, and the numbers of all steps but these, are the same to the last bit."""
    mine, theirs = ([(row["step"], row["loss"], row["grad_norm"]) for row in rows(run)] for run in (one, two))
    equal = [pair for pair in zip(mine, theirs, strict=True) if pair[0][0] not in but]
    first, second = (weights(Finished(run, 0, "")) for run in (one, two))
    return all(a == b for a, b in equal) and all(first[name].equal(second[name]) for name in first)


def skipped_steps(run: RunFolder) -> list[int]:
    return [row["step"] for row in rows(run) if row.get("skipped")]


@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, ["ddp"]))
def test_an_update_that_is_not_finite_is_skipped(
    strategy: str, home: Path, undisturbed: Undisturbed, faulty: dict[str, str], noted: Note
) -> None:
    fault, variables = noted("a loss that is not a number, skipped", strategy), {**faulty, "FAULT": "nan:1:8"}
    fault.at()
    run = detached(home, "mine", 2, variables, strategy=strategy, non_finite="skip", **OPTIONS)
    state = ended(run)
    assert (state["state"], state["attempt"], skipped_steps(run)) == ("done", 0, [8])
    (warning,) = [line for line in run.log.read_text().splitlines() if "its update is skipped" in line]
    assert "step 8: loss nan" in warning
    assert "on rank 1, in the batch from " in warning
    assert same(run, skipping(home, strategy, [8]), but=[8])
    assert not same(run, undisturbed(strategy), but=[8]), "control: with that update it is another model"
    fault.harmless()


def test_a_loss_spike_is_rolled_back_and_its_batch_skipped(home: Path, faulty: dict[str, str], noted: Note) -> None:
    fault, variables = noted("a spike of the loss, gone back from", "ddp"), {**faulty, "FAULT": "spike:0:12"}
    fault.at()
    run = detached(home, "mine", 2, variables, strategy="ddp", loss_spike_factor=20, max_restarts=0, **OPTIONS)
    state = ended(run)
    assert (state["state"], state["attempt"]) == ("done", 1)
    log = run.log.read_text()
    assert "it rolls back to step-00000010 and skips the batches of steps 11 and 12" in log
    assert skipped_steps(run) == [11, 12]
    assert same(run, skipping(home, "ddp", [11, 12]), but=[])
    last = max(run.checkpoints.glob("step-" + "[0-9]" * 8))
    assert verify(last)["progress"]["skipped_steps"] == [11, 12]
    clean(run)
    first = [json.loads(line) for line in run.metrics.read_text().splitlines() if '"loss"' in line]
    assert [row["step"] for row in first if row["attempt"] == 0][-1] == 12, "the spike itself is in the metrics"
    fault.harmless()


def test_a_slow_rank_is_named_and_not_ended(home: Path, faulty: dict[str, str], noted: Note) -> None:
    fault = noted("a rank is slow", "ddp")
    fault.at()
    run = detached(home, "mine", 2, {**faulty, "FAULT": "slow:1:350"}, strategy="ddp", **OPTIONS)
    state = ended(run)
    assert (state["state"], state["attempt"]) == ("done", 0)
    named = [row["slow_ranks"] for row in rows(run) if "slow_ranks" in row]
    assert named
    assert all(ranks == [1] for ranks in named)
    assert "warning: rank 1 is slow: its local work takes" in run.log.read_text()
    fault.harmless()
