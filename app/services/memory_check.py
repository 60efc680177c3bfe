"""Whether a run's memory is free, asked of the plan before anything is launched."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import hardware
from app.launch.foreground import CheckBroke, where
from app.launch.job import Job
from app.plan.command import count
from app.plan.estimate import GIB, Hardware, plan_row
from trainers.config.options import EMBEDDED, ConfigError, TrainConfig
from trainers.config.parse import dump_yaml
from trainers.embedded import BASE_DIR
from trainers.run import host_memory
from trainers.run.device_locks import holders

_SURE = 0.5
"""Share of the free memory below which a generous bound needs no count."""
_PROCESS_BYTES = 1.5 * GIB
_STATE_FACTOR = 8.0
"""Bytes of weights, gradients and Adam's states for each byte of a base model in bf16."""
_LAYER_BYTES, _LOGIT_BYTES, _SCORE_BYTES = 100.0, 20.0, 16.0
"""Bytes of activations, at most: for a token in a layer by its width, for a token by its vocabulary, for a score."""
_KEPT = 64


@dataclass(frozen=True)
class Verdict:
    """What the plan says.

    Args:
        fits: None where it cannot tell.
        line: for the user when it does not fit; else empty.
    """

    fits: bool | None
    line: str = ""


class _Verdicts:
    """Those of the last requests, so that a page need not count a model again."""

    def __init__(self) -> None:
        self._lock, self._kept = threading.Lock(), OrderedDict[str, Verdict]()

    def get(self, key: str) -> Verdict | None:
        with self._lock:
            return self._kept.get(key)

    def put(self, key: str, verdict: Verdict) -> None:
        with self._lock:
            self._kept[key] = verdict
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)


_VERDICTS = _Verdicts()


def known_verdict(job: Job) -> Verdict | None:
    """The verdict as far as it can be told at once; None while the model is not counted."""
    if _surely_fits(job):
        return Verdict(True)
    return _VERDICTS.get(_key(job))


def memory_verdict(job: Job) -> Verdict:
    """The verdict, for which the model is counted where need be: some seconds.

    What keeps the model from being counted is told by the pre-flight check.
    """
    known = known_verdict(job)
    if known is None:
        known = _counted(job)
        _VERDICTS.put(_key(job), known)
    return known


def _counted(job: Job) -> Verdict:
    memory, devices = free_memory(job), job.devices
    kind, machines = "gpu" if devices.gpu_ids else "cpu", devices.machines.count if devices.machines else 1
    host = float(host_memory.available()) * machines  # the others are taken to have as much
    planned = Hardware(kind, devices.num_processes, memory, here=False, host=host)
    try:
        counted = count(job.config, planned, [(job.strategy, job.config)])
    except (ConfigError, CheckBroke):
        return Verdict(None)
    row = plan_row(job.strategy, job.config, counted, planned)
    if row.fits is not False:
        return Verdict(row.fits)
    each = "each GPU" if devices.gpu_ids else "each process"
    return Verdict(
        False,
        f"this run is not expected to fit: {row.strategy} on {where(job)} needs {row.reason} ({memory / GIB:.1f} GiB "
        f"free for {each}); `tunesmith plan` shows what would fit",
    )


def free_memory(job: Job) -> float:
    """Bytes that each process may have now; GPUs that a run of ours holds are counted whole, as it is waited for."""
    ids = job.devices.gpu_ids
    if not ids:
        return host_memory.available() / job.devices.local_processes
    held = holders()
    return float(min(gpu.memory if gpu.uuid in held else gpu.free for gpu in hardware.find_gpus() if gpu.index in ids))


def _surely_fits(job: Job) -> bool:
    """Whether a bound that is too high by far is below what is free; false where the model is not at hand."""
    config = job.config
    folder = BASE_DIR if config.model_name_or_path == EMBEDDED else Path(config.model_name_or_path)
    try:
        files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        bound = _STATE_FACTOR * files + _activations(config, shape.get("text_config", shape)) + _PROCESS_BYTES
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
    return files > 0 and bound < _SURE * free_memory(job)


def _activations(config: TrainConfig, shape: dict[str, Any]) -> float:
    rows = max(config.per_device_train_batch_size, config.per_device_eval_batch_size)
    tokens, layers = rows * config.max_length, int(shape["num_hidden_layers"])
    width = max(int(shape["hidden_size"]), int(shape.get("intermediate_size") or 0))
    scores = tokens * config.max_length * int(shape["num_attention_heads"]) * layers
    return tokens * (layers * width * _LAYER_BYTES + int(shape["vocab_size"]) * _LOGIT_BYTES) + scores * _SCORE_BYTES


def _key(job: Job) -> str:
    """What the verdict hangs on; free memory in steps of a GiB."""
    return f"{dump_yaml(job.config)}{job.strategy.dump()}{job.devices}{free_memory(job) // GIB}"
