"""A distillation gives the same loss and gradients if tensor parallelism has split both vocabularies, in fp64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.unit.parallel.split_heads_ranks import CONTROL, LOSS_TYPES, ROWS, TEACHERS
from tests.unit.parallel.tensor_parallel_ranks import whole_loss
from trainers.config.mistakes import ConfigError
from trainers.parallel.tensor import split_model

ROOT = Path(__file__).resolve().parents[3]
Results = dict[str, dict[str, float]]


@pytest.fixture(scope="module", params=[2, 3])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Differences that so many ranks see, by case."""
    folder, world = tmp_path_factory.mktemp("ranks"), request.param
    ranks, alone = [], {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for rank in range(world):
        arguments = [str(folder / "store"), str(rank), str(world), str(folder / "results.json")]
        command = [sys.executable, "-m", "tests.unit.parallel.split_heads_ranks", *arguments]
        with (folder / f"log-{rank}.txt").open("wb") as log:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=alone, stdout=log, stderr=subprocess.STDOUT))
    failed = [number for number, rank in enumerate(ranks) if rank.wait(timeout=300)]
    assert not failed, (folder / f"log-{failed[0]}.txt").read_text(encoding="utf-8")
    result: Results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return result


def test_split_heads_give_the_loss_and_gradients_of_full_ones(results: Results) -> None:
    """Of a loaded teacher and of recorded ones, with rows that pad either head; the metrics too."""
    cases = [f"{rows}, {teacher}, {loss}" for rows, teacher, loss in product(ROWS, TEACHERS, LOSS_TYPES)]
    assert sorted(results) == sorted([*cases, CONTROL])
    wrong = {case: results[case] for case in cases if not max(results[case].values()) < 1e-11}
    assert not wrong
    assert results[cases[0]].keys() == {"loss", "again", "metrics", "hidden", "weight", "bias"}


def test_sums_that_are_left_out_would_be_seen(results: Results) -> None:
    """Control: each rank takes its part for all of the vocabulary."""
    assert min(results[CONTROL][name] for name in ("loss", "again", "metrics", "hidden", "weight", "bias")) > 1e-2


def test_a_teacher_is_cut_where_its_student_is() -> None:
    """Control: by itself, into even parts."""
    for like, starts in ((101, [0, 25, 50, 75]), (89, [0, 22, 44, 66]), (None, [0, 24, 48, 72])):
        parts = [split_model(whole_loss("llama"), None, rank, 4, first=True, like=like) for rank in range(4)]
        rows = [part["lm_head.weight"].slices[0] for part in parts]
        assert [part.start for part in rows] == starts
        assert [part.stop for part in rows] == [*starts[1:], 97]


def test_a_teacher_that_leaves_the_last_rank_nothing_is_refused() -> None:
    problem = "has 97 tokens, and the model that learns from it 194, of which the last rank holds those from 97 on"
    with pytest.raises(ConfigError, match=problem):
        split_model(whole_loss("llama"), None, 0, 2, first=True, like=194)
    split_model(whole_loss("llama"), None, 0, 2, first=True, like=193)
