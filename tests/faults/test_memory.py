"""Memory runs out on one rank: the micro-batch is halved and the global batch stays, so the model is the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.detached import detached, ended
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import OPTIONS, clean, rows, told
from tests.parity.runs import mostly_long
from trainers.config.parse import Request


@pytest.mark.parametrize("strategy", mostly_long(["ddp", "fsdp2", "zero3"], ["ddp"]))
def test_a_smaller_micro_batch_gives_the_same_model(
    strategy: str, home: Path, undisturbed: Undisturbed, faulty: dict[str, str], noted: Note
) -> None:
    whole, fault = undisturbed(strategy), noted("memory runs out on a rank", strategy)
    fault.at()
    variables = {**faulty, "FAULT": "memory:1:1"}
    run = detached(home, "mine", 2, variables, strategy=strategy, auto_find_batch_size=True, max_restarts=0, **OPTIONS)
    state = ended(run)
    assert (state["state"], state["attempt"]) == ("done", 1), state
    assert "out of memory on rank 1 with per_device_train_batch_size=2: retrying with 1, 2 times a step; " in (
        log := run.log.read_text()
    )
    assert "the global batch of 4 stays" in log
    assert Request(config=str(run.config)).resolve().per_device_train_batch_size == 1
    for mine, theirs in zip(rows(run), rows(whole), strict=True):
        assert abs(mine["loss"] - theirs["loss"]) < 1e-5
        assert abs(mine["grad_norm"] - theirs["grad_norm"]) < 1e-4 * theirs["grad_norm"]
    clean(run)
    fault.harmless()


@pytest.mark.parametrize("finds", mostly_long([True, False], [True]), ids=["nothing smaller is left", "not asked for"])
def test_it_fails_and_says_what_to_do(finds: bool, home: Path, faulty: dict[str, str]) -> None:
    variables = {**faulty, "FAULT": f"memory:1:{0 if finds else 1}"}
    size = {"per_device_train_batch_size": 1} if finds else {}
    run = detached(home, "mine", 2, variables, strategy="ddp", auto_find_batch_size=finds, **{**OPTIONS, **size})
    state = ended(run)
    assert (state["state"], state["attempt"]) == ("failed", 0)
    assert "rank 1: OutOfMemoryError: CUDA out of memory" in told(run)
    clean(run)
