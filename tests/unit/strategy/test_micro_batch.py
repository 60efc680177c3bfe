"""Memory ran out: which micro-batch comes next, and that the global batch stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError

from app.launch.restarts import smaller_batch
from trainers.config.parse import Request, dump_yaml
from trainers.config.validation import build
from trainers.run.compatibility import plain, refusals
from trainers.run.folder import RunFolder, write_json
from trainers.strategy.strategy import load_strategy, resolve
from trainers.train import in_one_line, out_of_memory


def ran_out(folder: Path, section: str = "forward", **options: int | bool | str) -> RunFolder:
    run = RunFolder(folder)
    run.create()
    values = {"model_name_or_path": "embedded", "dataset_name": "embedded", "auto_find_batch_size": True}
    run.config.write_text(dump_yaml(build({**values, **options})))
    run.accelerate.write_text(resolve(load_strategy("ddp"), 2, "no").dump())
    write_json(run.heartbeats / "rank-1.json", {"rank": 1, "section": section})
    run.note_out_of_memory(1)
    return run


@pytest.mark.parametrize(
    ("whole", "before", "after"), [(32, 8, 4), (4, 2, 1), (24, 6, 3), (20, 5, 2), (30, 5, 1), (14, 7, 1)]
)
def test_the_largest_half_that_divides(whole: int, before: int, after: int, tmp_path: Path) -> None:
    run = ran_out(tmp_path, global_batch_size=whole, per_device_train_batch_size=before)
    line = smaller_batch(run)
    config = Request(config=str(run.config)).resolve()
    assert (config.per_device_train_batch_size, config.global_batch_size) == (after, whole)
    assert line == (
        f"out of memory on rank 1 with per_device_train_batch_size={before}: retrying with {after}, "
        f"{whole // after // 2} times a step; the global batch of {whole} stays the same"
    )


def test_an_evaluation_gets_smaller_batches_of_its_own(tmp_path: Path) -> None:
    run = ran_out(tmp_path, "evaluation", per_device_eval_batch_size=9, global_batch_size=16)
    assert "per_device_eval_batch_size=9: retrying with 4; the result stays the same" in str(smaller_batch(run))
    assert Request(config=str(run.config)).resolve().per_device_eval_batch_size == 4


def test_a_run_that_samples_goes_on_in_smaller_batches(tmp_path: Path) -> None:
    run = ran_out(tmp_path, "sampling", objective="grpo", per_device_eval_batch_size=8, max_completion_length=64)
    before = plain(Request(config=str(run.config)).resolve())
    assert "retrying with 4; but for the rounding of what is sampled, the result stays" in str(smaller_batch(run))
    after = plain(Request(config=str(run.config)).resolve())
    assert refusals({"config": before, "versions": {}, "step": 3}, after, {}) == []


@pytest.mark.parametrize("why", ["one row", "not asked for", "another fault"])
def test_nothing_is_tried_where_nothing_helps(why: str, tmp_path: Path) -> None:
    size = 1 if why == "one row" else 2
    run = ran_out(tmp_path, per_device_train_batch_size=size, auto_find_batch_size=why != "not asked for")
    if why == "another fault":
        run.forget_last_attempt()
    before = run.config.read_text()
    assert smaller_batch(run) is None
    assert run.config.read_text() == before


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (torch.AcceleratorError("CUDA error: out of memory", 2), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (DistBackendError("NCCL error in: x\nLast error:\nCuda failure 2 'out of memory'"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of range"), False),
    ],
)
def test_memory_that_ran_out_is_known_by_its_words_too(error: Exception, ran_out: bool) -> None:
    assert out_of_memory(error) is ran_out


def test_what_nccl_says_last_is_told() -> None:
    error = DistBackendError(
        "NCCL error in: x.cpp:3, unhandled cuda error\nncclUnhandledCudaError: a call failed.\n"
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0"
    )
    assert in_one_line(error) == (
        "DistBackendError: NCCL error in: x.cpp:3, unhandled cuda error (Duplicate GPU detected : rank 1 and rank 0)"
    )
    assert in_one_line(ValueError("a\nb")) == "ValueError: a"
