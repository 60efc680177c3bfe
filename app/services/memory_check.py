"""Checks before a launch whether the run is expected to fit into free memory, using the estimates of `plan`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app import hardware
from app.launch.foreground import CheckBroke, where
from app.launch.job import TrainJob
from app.plan.command import count
from app.plan.estimate import plan_row
from app.plan.hardware import GIB, Hardware
from trainers.config.byte_text import byte_text
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.parse import dump_yaml
from trainers.config.teacher import frozen_config
from trainers.embedded import BASE_DIR
from trainers.run import host_memory
from trainers.run.device_locks import holders
from trainers.run.json_file import load_json

_SAFE_SHARE = 0.5
"""If a generous upper bound is below this share of the free memory, the model is not counted."""
_PROCESS_BYTES = 1.5 * GIB
_STATE_FACTOR = 8.0
"""Bytes of weights, gradients and Adam states per byte of a bf16 base model."""
_LAYER_BYTES, _LOGIT_BYTES, _SCORE_BYTES = 100.0, 20.0, 16.0
"""Upper bounds for activation bytes: per token, layer and unit of width; per logit; per attention score."""
_MAX_VERDICTS = 64


@dataclass(frozen=True)
class Verdict:
    """Whether a run is expected to fit.

    Args:
        fits: None when unknown.
        line: message for the user when it does not fit; otherwise empty.
    """

    fits: bool | None
    line: str = ""


class _VerdictCache:
    """Verdicts of recent requests, so that a page does not count a model again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._verdicts = OrderedDict[str, Verdict]()

    def get(self, key: str) -> Verdict | None:
        with self._lock:
            return self._verdicts.get(key)

    def put(self, key: str, verdict: Verdict) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)


_VERDICTS = _VerdictCache()


def known_verdict(job: TrainJob) -> Verdict | None:
    """The verdict if it is available without counting the model; otherwise None."""
    if _surely_fits(job):
        return Verdict(True)
    return _VERDICTS.get(_key(job))


def memory_verdict(job: TrainJob) -> Verdict:
    """The verdict; counts the model if necessary, which takes some seconds.

    If the model cannot be counted, the pre-flight check reports why.
    """
    verdict = known_verdict(job)
    if verdict is None:
        verdict = _count(job)
        _VERDICTS.put(_key(job), verdict)
    return verdict


def _count(job: TrainJob) -> Verdict:
    memory, devices = free_memory(job), job.devices
    kind, machines = "gpu" if devices.gpu_ids else "cpu", devices.machines.count if devices.machines else 1
    host = float(host_memory.available())  # assume that the other machines have as much
    planned = Hardware(kind, devices.num_processes, memory, is_local=False, host=host, machines=machines)
    try:
        counted = count(job.config, planned, [(job.strategy, job.config)])
    except (ConfigError, CheckBroke):
        return Verdict(None)
    row = plan_row(job.strategy, job.config, counted, planned)
    if row.fits is not False:
        return Verdict(row.fits)
    unit = "each GPU" if devices.gpu_ids else "each process"
    return Verdict(
        False,
        f"this run is not expected to fit: {row.strategy} on {where(job)} needs {row.reason} ({byte_text(memory)} "
        f"free for {unit}); `tunesmith plan` shows what would fit",
    )


def free_memory(job: TrainJob) -> float:
    """Bytes free for each process; GPUs held by another run count as empty, since this run waits for it to end."""
    ids = job.devices.gpu_ids
    if not ids:
        return host_memory.available() / job.devices.local_processes
    holder_of = holders()
    return float(
        min(gpu.memory if gpu.uuid in holder_of else gpu.free for gpu in hardware.find_gpus() if gpu.index in ids)
    )


def _surely_fits(job: TrainJob) -> bool:
    """Whether even a generous upper bound fits easily; False when the model is not a local folder."""
    config, bound = job.config, _PROCESS_BYTES
    frozen = frozen_config(config)
    models = [config, *([frozen] if frozen else [])]
    try:
        for model in models:
            folder = BASE_DIR if model.model_name_or_path == EMBEDDED else Path(model.model_name_or_path)
            files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            model_config = load_json(folder / "config.json")
            bound += _STATE_FACTOR * files + _activations(model, model_config.get("text_config", model_config))
            if files == 0:
                return False
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return False
    return bound < _SAFE_SHARE * free_memory(job)


def _activations(config: TrainConfig, model_config: dict[str, Any]) -> float:
    rows = max(config.per_device_train_batch_size, config.per_device_eval_batch_size)
    tokens, layers = rows * config.example_tokens, int(model_config["num_hidden_layers"])
    width = max(int(model_config["hidden_size"]), int(model_config.get("intermediate_size") or 0))
    scores = tokens * config.max_length * int(model_config["num_attention_heads"]) * layers
    return (
        tokens * (layers * width * _LAYER_BYTES + int(model_config["vocab_size"]) * _LOGIT_BYTES)
        + scores * _SCORE_BYTES
    )


def _key(job: TrainJob) -> str:
    """A key of all that determines the verdict, with free memory in steps of 1 GiB."""
    return f"{dump_yaml(job.config)}{job.strategy.dump()}{job.devices}{free_memory(job) // GIB}"
