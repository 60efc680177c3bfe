"""Log-probabilities of the data under the initial model, which some objectives compare with.

They are computed once, before the first step, under the run's own strategy: then the wrapped model is the initial one,
whether all weights are trained or adapters, and no second model is held. Checkpoints contain them, so that a resumed
run goes on with the same values. The cache folder keeps them for later runs that would compute the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainers.data.local_copies import cache_dir
from trainers.data.rows import Rows
from trainers.data.stream import Window
from trainers.data.stream_plan import StreamPlan
from trainers.data.stream_rows import References, StreamedRows
from trainers.evaluation import reference_log_probs
from trainers.monitor.heartbeat import LONG_LIMIT
from trainers.run.compatibility import PLACES, versions
from trainers.run.errors import TrainingError
from trainers.run.folder import read_json, write_json
from trainers.run.from_run import adapter_of
from trainers.run.teacher import files_digest
from trainers.run.weight_headers import base_folder, cached_folder
from trainers.step import TrainContext
from trainers.strategy.strategy import Strategy

_UNRELATED = frozenset({
    *PLACES, "preset", "cache_dir", "loraplus_lr_ratio", "run_name", "beta", "label_smoothing", "desirable_weight",
    "undesirable_weight", "num_train_epochs", "max_steps", "learning_rate", "lr_scaling", "lr_scaling_batch_size",
    "lr_scheduler_type", "min_lr_ratio", "lr_num_cycles", "lr_power", "lr_decay_ratio", "lr_decay_type", "warmup_steps",
    "warmup_ratio", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "eval_steps", "optim",
    "lion_beta1", "lion_beta2", "muon_momentum", "ema_decay", "eval_on_start", "load_best_model_at_end",
    "metric_for_best_model", "early_stopping_patience", "early_stopping_threshold", "logging_steps", "save_steps",
    "save_total_limit", "checkpoint_url", "max_restarts", "hang_timeout", "non_finite", "loss_spike_factor",
    "share_gpus", "report_to", "profile_steps", "profile_ranks", "merge_adapter", "export_dtype",
    "embedding_learning_rate", "eval_only", "eval_answer_tokens", "eval_generate_steps", "eval_generate_prompts",
    "ddp_backend", "ddp_timeout",
})  # fmt: skip
"""Options that cannot change a bit of the values. All others count, so a new option is safe until it is listed."""
_KERNELS = (
    "ATEN_", "CUBLAS", "CUDNN", "DISABLE_ADDMM", "DNNL_", "KMP_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "ONEDNN_",
    "PYTORCH_", "TORCH_", "TORCHINDUCTOR_",
)  # fmt: skip
"""How the names of environment variables begin that choose kernels."""
_OF_MODEL = ("config.json", "adapter_config.json", "*.safetensors", "*.py")
"""Files of a model's folder on which its predictions depend, besides those of the tokenizer."""


def set_reference(context: TrainContext, strategy: Strategy, folder: Path | None) -> None:
    """Sets the `reference` of training and evaluation rows, and hands it to the checkpoints. Collective.

    Args:
        context: the run; its model has the initial weights unless `folder` is given.
        strategy: the run's strategy.
        folder: the checkpoint that the run resumes from; None for a new run.

    Raises:
        TrainingError: on every rank, if the checkpoint lacks the values of this data.
    """
    saved = context.checkpoints.extra_tensors(folder) if folder else {}
    of_splits: list[tuple[Rows | None, str]] = [(rows, "dataset_name") for rows in context.plan.held_rows]
    of_splits += [(context.eval_rows, "eval_dataset_name")]
    of_splits += [(rows.mismatched, option) for rows, option in of_splits if rows is not None]
    for rows, option in of_splits:
        if rows is None:
            continue
        name = f"reference.{rows.documents.fingerprint[:16]}"
        if folder and name not in saved:
            raise _unknown(folder, option)
        values = saved[name] if folder else _computed(context, strategy, rows)
        context.checkpoints.extra[name] = values
        rows.reference = values.numpy()
    if isinstance(context.plan, StreamPlan):
        for stream in context.plan.streamed_rows:
            if stream.stop:  # of a source with a small weight, the run may read no row
                _set_of_stream(context, stream, folder, saved)


def _unknown(folder: Path, option: str) -> TrainingError:
    return TrainingError(
        f"{folder} holds no log-probabilities of this data under the initial model, and its own model is "
        f"trained: {option} must be what the run started with"
    )


def _set_of_stream(
    context: TrainContext, stream: StreamedRows, folder: Path | None, saved: dict[str, torch.Tensor]
) -> None:
    """Sets the values of all rows of a stream that the run reads, window after window.

    A checkpoint holds them as `[documents]`, and as `[shards, 2]` the number of each shard and its documents. Of
    mismatched documents, which each window pairs anew, it is `[windows, 3]`: epoch, number and documents of the window.
    """
    name, began = f"reference.{stream.stream.fingerprint[:16]}", time.perf_counter()
    names = [(name, f"{name}.shards")]
    names += [(f"{name}.mismatched", f"{name}.windows")] * context.config.objective_spec.mismatched
    if folder and not {part for pair in names for part in pair} <= saved.keys():
        raise _unknown(folder, "dataset_name")
    known = saved if folder else context.checkpoints.extra  # two sources of a mix may read the same shards
    parts = _parts_of(known, name, f"{name}.shards")
    mismatched = _parts_of(known, f"{name}.mismatched", f"{name}.windows")
    if not folder:
        beat = partial(context.heartbeat.at, step=0)

        def computed(rows: Rows) -> torch.Tensor:
            size = context.config.per_device_eval_batch_size
            return reference_log_probs(rows, context.backend, context.mesh, context.ranks, size, beat)

        for window, rows in stream.windows(context.ranks, partial(beat, "data")):
            if not {(shard,) for shard in window.shards} <= parts.keys():
                values = computed(rows).split(np.diff(window.bounds).tolist())
                for shard, part in zip(window.shards, values, strict=True):
                    parts.setdefault((shard,), part)  # the first values of a shard stay
            if rows.mismatched is not None and window.window not in mismatched:
                mismatched[window.window] = computed(rows.mismatched)
        if context.ranks.is_main:
            count, seconds = sum(map(len, (*parts.values(), *mismatched.values()))), time.perf_counter() - began
            print(f"log-probabilities of {count:,} streamed documents under the initial model: {seconds:.1f} s")
    for (of_values, of_keys), own in zip(names, (parts, mismatched), strict=False):
        context.checkpoints.extra[of_values] = torch.cat(list(own.values()))
        context.checkpoints.extra[of_keys] = torch.tensor([[*key, len(values)] for key, values in own.items()])
    stream.set_references(
        References(
            {shard: values.numpy() for (shard,), values in parts.items()},
            {Window(*key): values.numpy() for key, values in mismatched.items()},
        )
    )


def _parts_of(tensors: dict[str, torch.Tensor], of_values: str, of_keys: str) -> dict[tuple[int, ...], torch.Tensor]:
    """`[documents]` values by what a checkpoint has them of; none if it has none."""
    if of_values not in tensors:
        return {}
    *keys, documents = tensors[of_keys].T.tolist()
    return dict(zip(zip(*keys, strict=True), tensors[of_values].split(documents), strict=True))


def _computed(context: TrainContext, strategy: Strategy, rows: Rows) -> torch.Tensor:
    """`[documents]` from the cache folder, or computed and kept there. Collective."""
    began, config, main = time.perf_counter(), context.config, context.ranks.is_main
    file = _cache_file(context, strategy, rows)
    count = len(rows.documents.lengths)
    known: torch.Tensor | None = context.ranks.broadcast(_read(file, count) if file else None)
    if known is not None:
        if main:
            print(f"log-probabilities of {count:,} documents under the initial model: of an earlier run", flush=True)
        return known
    beat = partial(context.heartbeat.at, step=0)
    values = reference_log_probs(
        rows, context.backend, context.mesh, context.ranks, config.per_device_eval_batch_size, beat
    )
    if main:
        seconds = time.perf_counter() - began
        print(f"log-probabilities of {count:,} documents under the initial model: {seconds:.1f} s", flush=True)
    if file:
        _write(file, values)
    return values


def _cache_file(context: TrainContext, strategy: Strategy, rows: Rows) -> Path | None:
    """Where the values are kept, under a digest of all that determines their bits; None but on rank 0. Collective.

    Runs that differ in the strategy, the size of a micro-batch or the machine agree up to rounding alone; each has
    values of its own, so that a run is the same whether the cache is empty or not.
    """
    config, ranks = context.config, context.ranks
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else ranks.device.type
    kernels = {name: value for name, value in os.environ.items() if name.startswith(_KERNELS)}
    builds = [torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), torch.__config__.show()]
    processor = [device, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    machines = ranks.gather([*processor, *builds, kernels])
    if not ranks.is_main:
        return None
    base = base_folder(config)
    folder = base if base.is_dir() else cached_folder(config)
    if folder is None:
        return None
    sources = [folder, *filter(None, [adapter_of(config)])]
    context.heartbeat.at("reference", step=0, allowed=LONG_LIMIT)  # reads all weights once
    try:
        weights = [files_digest(sorted(path for name in _OF_MODEL for path in source.glob(name))) for source in sources]
    except OSError:  # such as a cache folder of another user: it is only computed anew
        return None
    ingredients: dict[str, Any] = {
        "options": {name: value for name, value in config.model_dump().items() if name not in _UNRELATED},
        "weights": weights,
        "data": rows.documents.fingerprint,
        "strategy": [strategy.dump(), strategy.deepspeed_json],
        "versions": versions(),
        "machines": machines,
    }
    digest = hashlib.sha256(json.dumps(ingredients, sort_keys=True, default=str).encode()).hexdigest()
    return cache_dir(config) / "reference" / f"{digest}.json"


def _read(file: Path, count: int) -> torch.Tensor | None:
    """`[documents]` fp32; None if there is no such file, or it is damaged."""
    document = read_json(file) or {}
    try:
        content = bytes.fromhex(document["values"])
    except (KeyError, TypeError, ValueError):
        return None
    if len(content) != 4 * count or hashlib.sha256(content).hexdigest() != document.get("sha256"):
        return None
    return torch.frombuffer(bytearray(content), dtype=torch.float32)


def _write(file: Path, values: torch.Tensor) -> None:
    content = values.numpy().tobytes()
    with contextlib.suppress(OSError):  # the next run computes them again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"sha256": hashlib.sha256(content).hexdigest(), "values": content.hex()})
