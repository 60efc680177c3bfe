"""Runs in which nothing is wrong, of many shapes: none may be given a cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.faults.failures import chat, lines

TALK = [
    "CUDA out of memory. Tried to allocate 2.00 GiB.", "torch.OutOfMemoryError: CUDA out of memory",
    "warning: no stop token is trained, so the model will not learn to end its reply",
    "[rank1]: Traceback (most recent call last):", "RuntimeError: Connection refused",
    "rank 1 was killed by SIGKILL", "OSError: [Errno 28] No space left on device",
    "step 7: loss nan, gradient norm nan, on rank 0", "Watchdog caught collective operation timeout",
]  # fmt: skip


def talking(home: Path) -> dict[str, Any]:
    """Data that talks of failures, which its user prints."""
    rows = [chat(f"What does {TALK[number % len(TALK)]} mean?", TALK[number % len(TALK)]) for number in range(60)]
    return {"dataset_name": lines(home / "talk.jsonl", rows)}


def in_unicode(home: Path) -> dict[str, Any]:
    rows = [chat(f"{number}? ☃", "ünï") for number in range(60)]
    return {"dataset_name": lines(home / "ünï ☃.jsonl", rows)}


NO_PROXY = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:1")
ASCII = {"LC_ALL": "C", "LANG": "C"}
ALL: dict[str, Any] = {"max_train_samples": "none", "global_batch_size": 16, "per_device_train_batch_size": 8}
EVAL: dict[str, Any] = {"eval_dataset_name": "embedded", "max_eval_samples": 32}
HEALTHY: dict[str, dict[str, Any]] = {
    "short": {"max_steps": 2},
    "one step": {"max_steps": 1},
    "adapters": {**ALL, "max_steps": 60},
    "all weights": {**ALL, "preset": "tiny-full", "max_steps": 50},
    "noisy": {"global_batch_size": 1, "per_device_train_batch_size": 1, "max_steps": 80, "max_train_samples": "none",
              "packing": False},
    "small batches": {"global_batch_size": 2, "per_device_train_batch_size": 1, "max_steps": 60},
    "long warm-up": {**ALL, "warmup_steps": 30, "max_steps": 60},
    "constant rate": {**ALL, "lr_scheduler_type": "constant", "max_steps": 50},
    "evaluated": {**ALL, **EVAL, "eval_steps": 10, "max_steps": 50},
    "evaluated often": {**ALL, **EVAL, "eval_steps": 2, "eval_on_start": True, "max_steps": 20},
    "the best is exported": {**EVAL, "preset": "tiny-full", "max_train_samples": 8, "max_steps": 60, "eval_steps": 6,
                             "learning_rate": 2e-3, "load_best_model_at_end": True, "early_stopping_patience": 3},
    "learned already": {"max_train_samples": 4, "global_batch_size": 4, "max_steps": 80, "packing": False},
    "padded": {**ALL, "packing": False, "max_steps": 45},
    "rarely logged": {**ALL, "logging_steps": 7, "max_steps": 50},
    "a low rate that learns": {**ALL, "learning_rate": 3e-4, "max_steps": 60},
    "checkpoints": {"save_steps": 2, "max_steps": 12},
    "recomputed": {"gradient_checkpointing": True, "max_steps": 8},
    "two ranks": {**ALL, "max_steps": 12, "processes": 2},
    "two ranks, sharded": {"strategy": "fsdp2", "max_steps": 8, "processes": 2},
    "a pipeline": {"strategy": "pp", "processes": 2, "per_device_train_batch_size": 1, "global_batch_size": 8},
    "data that talks of failures": {"make": talking, "print_rows": True, "max_steps": 8},
    "the clock is set back": {"max_steps": 8, "provoke": "clock_set_back"},
    "a proxy that does not answer": {"max_steps": 4, "processes": 2, "variables": NO_PROXY},
    "a locale without unicode": {"max_steps": 4, "make_data": in_unicode, "variables": ASCII},
    "stopped and resumed": {**ALL, "max_steps": 40, "stops": True},
}  # fmt: skip
