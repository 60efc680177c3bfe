"""The benchmarks run, and hold equal work against equal work; what they measure is for docs/LOG.md."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import data, throughput
from benchmarks.contenders import Bench, Broke, Case, Measured
from benchmarks.rows import Batches, batches_of, write_chat
from trainers.config import TrainConfig


def test_all_contenders_do_equal_work(tmp_path: Path) -> None:
    """Tunesmith, a bare loop and TRL have the same losses on the same rows, packed ones apart."""
    bench = Bench(tmp_path)
    for packing in (False, True):
        case = Case("embedded", packing, 1, warm=1, timed=2, global_batch=4, micro=2)
        found = throughput.measure(bench, case, repeats=1)
        assert set(found["tools"]) == ({"tunesmith", "bare"} if packing else {"tunesmith", "bare", "trl"})
        assert all(run["tokens_per_second"] > 0 and run["peak_mib"] > 100 for run in found["tools"].values())
        losses = [run["last_loss"] for run in found["tools"].values()]
        assert max(losses) - min(losses) < 1e-4 * losses[0]


def test_other_work_is_no_comparison() -> None:
    case = Case("embedded", False, 1, warm=1, timed=2)
    own = Measured(100.0, 500.0, first_loss=3.0, last_loss=2.0)
    throughput.check_equal_work(case, {"tunesmith": own, "bare": replace(own, last_loss=2.00001)})
    with pytest.raises(Broke, match=r"bare has loss 2\.001000 where tunesmith has 2\.000000"):
        throughput.check_equal_work(case, {"tunesmith": own, "bare": replace(own, last_loss=2.001)})


def test_the_batches_are_those_of_training(tmp_path: Path) -> None:
    rows = write_chat(tmp_path / "rows.jsonl", 60, seed=3)
    config = TrainConfig(model_name_or_path="embedded", dataset_name=str(rows), max_length=256, global_batch_size=4,
                         max_steps=3, cache_dir=str(tmp_path / "cache"))  # fmt: skip
    made = batches_of(config)
    made.save(tmp_path / "batches.npz")
    found = Batches.load(tmp_path / "batches.npz")
    assert len(found.offsets) == 3 * 4 + 1
    assert found.tokens(0, 3) == len(found.ids) == found.tokens(0, 1) + found.tokens(1, 3)
    documents = []
    for number in range(12):
        ids, trained, places = found.row(number)
        assert 0 < len(ids) <= 256
        starts = np.flatnonzero(places == 0)
        assert starts[0] == 0
        assert not trained[starts].any(), "the first token of a document is predicted by nothing"
        documents.append(len(starts))
    assert max(documents) > 1, "packed rows hold several"


def test_the_data_benchmark_measures(tmp_path: Path) -> None:
    rows = write_chat(tmp_path / "rows.jsonl", 200, seed=3)
    first, again = (data.measured(rows, tmp_path / "cache", workers=1) for _ in range(2))
    assert first["rows"] == again["rows"] == 200
    assert first["prepare_s"] > again["prepare_s"], "the second finds it in the cache"
    assert first["peak_mib"] > 50
