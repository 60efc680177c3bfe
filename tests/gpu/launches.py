"""The runs of the tests on a GPU: real ones through `accelerate launch`, a few at a time as each mostly imports."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.launching import ROOT, Finished, launch
from trainers.embedded import BASE_DIR

STEPS = 8
COMMON: dict[str, Any] = {
    "model_name_or_path": "embedded", "dataset_name": "embedded", "eval_dataset_name": "none", "max_train_samples": 300,
    "method": "full", "packing": True, "max_length": 256, "global_batch_size": 8, "per_device_train_batch_size": 4,
    "max_steps": STEPS, "logging_steps": 1, "save_steps": 3, "learning_rate": 5e-4, "share_gpus": True,
}  # fmt: skip
BF16: dict[str, Any] = {"mixed_precision": "bf16"}
DEEP: dict[str, Any] = {
    "random_init": True, "method": "lora", "merge_adapter": True, "max_length": 1024, "global_batch_size": 8,
    "per_device_train_batch_size": 8, "max_steps": 3, "gradient_checkpointing": True, "save_steps": 0,
    "deterministic": True,
}  # fmt: skip
"""For the `deep` model: what its layers keep for the backward pass, their inputs, is most of its memory."""
EXACT: dict[str, Any] = {**BF16, "deterministic": True}
LONGER: dict[str, Any] = {"strategy": "ddp", "processes": 2, "max_steps": 14}
"""PowerSGD begins after ten steps."""
FSDP1_OFFLOAD = "fsdp1_offload.yaml"
QUANTIZED = "quantized.yaml"
OWN_FILES: dict[str, dict[str, Any]] = {
    FSDP1_OFFLOAD: {
        "distributed_type": "FSDP", "num_processes": 2,
        "fsdp_config": {
            "fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_offload_params": True,
            "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_use_orig_params": True, "fsdp_sync_module_states": True,
            "fsdp_cpu_ram_efficient_loading": False,
        },
    },
    QUANTIZED: {
        "distributed_type": "DEEPSPEED", "num_processes": 2,
        "deepspeed_config": {"deepspeed_config_file": "quantized.json", "zero3_init_flag": False},
    },
    "quantized.json": {"zero_optimization": {
        "stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True,
        "stage3_param_persistence_threshold": 0,
    }},
}  # fmt: skip
"""Accelerate files, and a DeepSpeed JSON, that do not ship."""
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "wrong rate": {"learning_rate": 5e-4 * 1.1},
    "bf16": BF16,
    "fp16": {"mixed_precision": "fp16"},
    "fp8": {"mixed_precision": "fp8"},
    "compiled": {**BF16, "torch_compile": True},
    **{kernel: {**BF16, "attn_implementation": kernel} for kernel in ("varlen", "flex", "documents", "sdpa")},
    "checkpointed": DEEP,
    "offloaded": {**DEEP, "activation_offloading": True},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2_offload": {"strategy": "fsdp2_offload"},
    "two by nccl": {"strategy": "ddp", "processes": 2},
    "two by gloo": {"strategy": "ddp", "processes": 2, "ddp_backend": "gloo"},
    "two by both": {"strategy": "fsdp2", "processes": 2, "ddp_backend": "cpu:gloo,cuda:nccl"},
    "two for longer": LONGER,
    "bf16 hook": {**LONGER, "ddp_comm_hook": "bf16"},
    "power_sgd hook": {**LONGER, "ddp_comm_hook": "power_sgd"},
    "fsdp1 offload": {"strategy": FSDP1_OFFLOAD, "processes": 2},
    "quantized messages": {"strategy": QUANTIZED, "processes": 2},
    "lora": {"method": "lora", "learning_rate": 1e-3},
    "qlora": {"method": "qlora", "learning_rate": 1e-3},
    "exact": EXACT,
    "exact again": EXACT,
    "killed and resumed": EXACT,
}
"""Options by name of the run."""
_KILL = f"""import os, signal
if "ACCELERATE_MIXED_PRECISION" in os.environ:
    from trainers import loop

    take = loop.train_step

    def train_step(context, batch, step, requests):
        if 4 <= step < {STEPS} and context.checkpoints.published():
            os.kill(os.getpid(), signal.SIGKILL)
        return take(context, batch, step, requests)

    loop.train_step = train_step
"""
"""A `sitecustomize.py` by which a rank kills itself in its fifth step or later, once it has a checkpoint."""


class Launches:
    """Runs by name, begun at once and waited for when a test asks.

    Args:
        folder: for the runs.
        names: of `RUNS`.
        at_once: runs at the same time; 0: each when it is first asked for, as a fork wants a process of one thread.
    """

    def __init__(self, folder: Path, names: Iterable[str], at_once: int):
        self.folder = folder
        self.pool = ThreadPoolExecutor(max(at_once, 1))
        self.runs: dict[str, Future[Finished]] = {}
        for name in names if at_once else ():
            self.runs[name] = self.pool.submit(self._run, name)

    def __call__(self, name: str) -> Finished:
        """The run of this name, which must have ended well."""
        if name not in self.runs:
            self.runs[name] = Future()
            self.runs[name].set_result(self._run(name))
        finished = self.runs[name].result()
        assert finished.state.get("state") == "done", f"{name}: {finished.output[-4000:]}"
        return finished

    def close(self) -> None:
        """Waits for the runs that have begun, and begins no others."""
        self.pool.shutdown(cancel_futures=True)

    def _run(self, name: str) -> Finished:
        options = {**COMMON, **RUNS[name], "cache_dir": self.folder / "cache"}
        strategy, processes = options.pop("strategy", None), options.pop("processes", 1)
        if strategy in OWN_FILES:
            strategy = own_file(self.folder / f"files of {name}", strategy)
        if options.get("random_init"):
            options["model_name_or_path"] = deep_model(self.folder / f"model of {name}")
        output = self.folder / name.replace(" ", "-")
        if name != "killed and resumed":
            port = ("--main_process_port", "0") if strategy else ()  # the default would be that of two runs at once
            return launch(output, processes, options, strategy=strategy, launcher_flags=port, by_hand=True)
        killed = launch(output, 1, options, by_hand=True, PYTHONPATH=_killing(self.folder / "kill"))
        assert killed.state.get("state") != "done", killed.output[-2000:]
        assert len(killed.rows()) < STEPS, "it was killed on the way"
        return launch(output, 1, {**options, "resume_from_checkpoint": "auto"}, by_hand=True)


def _killing(folder: Path) -> str:
    """PYTHONPATH of a run whose rank kills itself; packages may be on the path that there is."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_KILL)
    return os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))


def own_file(folder: Path, name: str) -> str:
    """Writes all of `OWN_FILES` as JSON, which is YAML too; returns the path of one."""
    folder.mkdir()
    for each, content in OWN_FILES.items():
        text = json.dumps(content).replace('"quantized.json"', json.dumps(str(folder / "quantized.json")))
        (folder / each).write_text(text)
    return str(folder / name)


def deep_model(folder: Path) -> Path:
    """The folder of a model of 24 layers without weights, with the embedded model's tokenizer."""
    shutil.copytree(BASE_DIR, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 24, "num_attention_heads": 4,
             "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    return folder


def difference(run: Finished, other: Finished, key: str = "loss") -> float:
    """Largest difference over the steps."""
    return max(abs(a - b) for a, b in zip(run.series(key), other.series(key), strict=True))


def curve(run: Finished) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm; of a step that was run twice, the last."""
    rows = {row["step"]: (row["step"], row["loss"], row["grad_norm"]) for row in run.rows()}
    return list(rows.values())


def weights(run: Finished) -> str:
    """SHA-256 of the exported weights."""
    digest = hashlib.sha256()
    for file in sorted(run.run.model.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
