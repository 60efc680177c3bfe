"""Estimates the disk space of a run from the headers of its base model, and checks that it is free. Imports no torch.

A checkpoint holds the trained weights and the optimizer's states. All kept checkpoints are on disk while the next one
is written, and so is the export.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.run.weight_headers import Headers, base_folder, read_headers

_LOG_BYTES = 2_000_000
_EMBEDDINGS = (
    "embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "embeddings", "lm_head", "embed_out",
    "output_projection",
)  # fmt: skip
"""Names that families give to the token embedding and the output head."""
_DTYPE_BYTES = {"F64": 4, "F32": 4, "F16": 2, "BF16": 2, "float32": 4, "float16": 2, "bfloat16": 2}
"""Exported bytes per weight; F64 is exported in fp32."""
_SCALES, _PACKED_BYTES, _PACKED_WEIGHTS = ("_scale_inv", "_scales"), 16, 32
"""Suffixes of the scales of quantised weights; bytes and weights of an mxfp4 block."""


@dataclass(frozen=True)
class Tensor:
    """A weight in a file.

    Args:
        name: Name in the model.
        shape: Its shape.
        dtype: Dtype as named by safetensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_text(self) -> bool:
        """Whether it belongs to the language model rather than a vision tower."""
        return "vision" not in self.name

    def layer(self) -> int | None:
        """Returns the index of its decoder layer; None if it is in no layer."""
        return layer_of(self.name)


def tensors_of(headers: Headers) -> list[Tensor]:
    """Converts headers to weights, with the shapes that quantised ones (fp8, mxfp4) have once they are dequantised."""
    tensors = []
    for name, (dtype, shape) in headers.items():
        if any(name.endswith(end) and _has_scaled(headers, name.removesuffix(end)) for end in _SCALES):
            continue
        if dtype == "U8" and name.endswith("_blocks") and shape[-1:] == [_PACKED_BYTES]:
            name, shape = name.removesuffix("_blocks"), [*shape[:-1], _PACKED_WEIGHTS]
        tensors.append(Tensor(name, tuple(shape), dtype))
    return tensors


def _has_scaled(headers: Headers, name: str) -> bool:
    """Whether there is a quantised weight of this name, to which a tensor of scales belongs."""
    return name in headers or f"{name}_blocks" in headers


def layer_of(name: str) -> int | None:
    """Returns the index of a weight's decoder layer; None if it is in no layer."""
    numbers = [
        int(part)
        for before, part in pairwise(name.split("."))
        if before in ("layers", "layer", "h", "blocks") and part.isdigit()
    ]
    return numbers[0] if numbers else None


def is_embedding(name: str) -> bool:
    """Returns whether a weight is the token embedding or the output head, or a copy trained beside adapters."""
    *_, module, parameter = ("", "", *name.replace(".modules_to_save.default", "").split("."))
    return parameter == "weight" and module in _EMBEDDINGS and layer_of(name) is None


def is_expert(name: str) -> bool:
    """Returns whether a weight belongs to the experts of a mixture, or to their router."""
    return "expert" in name or "router" in name or name.endswith(".gate.weight")


def local_tensors(config: TrainConfig) -> list[Tensor]:
    """Returns the weights in the base model's folder; empty if it is not a folder, or cannot be read."""
    folder = base_folder(config)
    try:
        return tensors_of(read_headers(folder)) if folder.is_dir() else []
    except ConfigError:  # reported by the pre-flight check
        return []


def bytes_needed(
    config: TrainConfig, tensors: list[Tensor], steps: int | None, trained_weights: int | None = None
) -> int:
    """Returns the peak bytes of checkpoints, export and logs.

    Args:
        config: Config of the run.
        tensors: Weights of its base model.
        steps: Steps of the run; if None, `max_steps`, and without that one checkpoint is assumed.
        trained_weights: Number of trained weights, if known; by default they are counted by `tensors`, without adapters
            on experts, whose number depends on how transformers fuses them.
    """
    limit = config.num_hidden_layers
    present = [tensor for tensor in tensors if limit is None or (tensor.layer() or 0) < limit]
    every = sum(math.prod(tensor.shape) for tensor in present if tensor.is_text)
    adapters = _adapter_weights(config, present)
    at_least = 0 if config.freeze else every  # which of the weights are frozen is known once their model is built
    trained = at_least if config.method == "full" else adapters
    trained = trained if trained_weights is None else trained_weights
    layers = sum(math.prod(tensor.shape) for tensor in present if tensor.is_text and tensor.layer() is not None)
    elsewhere = max(0, trained - (layers if config.method == "full" else adapters))  # embeddings, or saved modules
    weight = 4.0 if config.master_weights or config.method != "full" else 2.0
    checkpoint = trained * weight + config.saved_state_bytes(trained - elsewhere, elsewhere)
    is_principal = config.method != "full" and config.init_lora_weights == "pissa"
    if is_principal:
        checkpoint += adapters * 4  # the first adapters
    full_model = config.method == "full" or config.merge_adapter
    exported = sum(math.prod(tensor.shape) for tensor in present) if full_model else trained
    export = exported * _DTYPE_BYTES[_export_dtype(config, present)]
    if is_principal and not full_model:
        export = (trained + adapters) * 4  # of twice the rank, in fp32
    return _LOG_BYTES + math.ceil(_checkpoints(config, steps) * checkpoint + export)


def _checkpoints(config: TrainConfig, steps: int | None) -> int:
    """Returns how many checkpoints are on disk at once: those kept, the best one, and the one being written."""
    steps = steps or config.max_steps
    saves = math.ceil(steps / config.save_steps) if steps and config.save_steps else 1
    return min(saves, config.save_total_limit + config.load_best_model_at_end + 1)


def _adapter_weights(config: TrainConfig, tensors: list[Tensor]) -> int:
    """Returns the number of adapter weights, on the matrices of decoder layers except experts and their router."""
    ends = tuple(f"{name}.weight" for name in config.lora_target_modules)
    everywhere = config.lora_target_modules == ["all-linear"]
    matrices = [
        tensor for tensor in tensors
        if len(tensor.shape) == 2 and tensor.is_text and tensor.layer() is not None and not is_expert(tensor.name)
    ]  # fmt: skip
    adapted = [matrix for matrix in matrices if everywhere or matrix.name.endswith(ends)]
    magnitudes = sum(matrix.shape[0] for matrix in adapted) if config.use_dora else 0
    ranks = {matrix.name: config.adapter_rank(matrix.name.removesuffix(".weight")) for matrix in adapted}
    return magnitudes + sum(ranks[matrix.name] * sum(matrix.shape) for matrix in adapted)


def _export_dtype(config: TrainConfig, tensors: list[Tensor]) -> str:
    """Returns the dtype of the export: by default the most common one of the base's weights that are not quantised."""
    if config.export_dtype != "auto":
        return config.export_dtype
    counts = Counter[str]()
    for tensor in tensors:
        counts[tensor.dtype] += math.prod(tensor.shape) if tensor.dtype in _DTYPE_BYTES else 0
    return max(counts, key=lambda dtype: counts[dtype], default="F32") if counts.total() else "F32"


def _written(folder: Path) -> int:
    """Returns the bytes of checkpoints and export that a resumed run already has on disk."""
    files = [path for name in ("checkpoints", "model") for path in (folder / name).rglob("*.safetensors")]
    return sum(path.stat().st_size for path in files if path.is_file())


def free_bytes(folder: Path) -> int:
    """Returns the free bytes on the disk of a folder, which need not exist yet."""
    near = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    disk = os.statvfs(near)
    return disk.f_bavail * disk.f_frsize


def check_room(
    config: TrainConfig, tensors: list[Tensor], folder: Path, steps: int | None = None,
    trained_weights: int | None = None,
) -> None:  # fmt: skip
    """Checks that the disk has room for checkpoints and export.

    Args:
        config: Config of the run.
        tensors: Weights of its base model.
        folder: The run folder; need not exist.
        steps: Steps of the run, if known.
        trained_weights: Number of trained weights, if known.

    Raises:
        ConfigError: If there is too little room; states the bytes needed and free.
    """
    free = free_bytes(folder)
    needed = bytes_needed(config, tensors, steps, trained_weights)
    needed -= _written(folder)
    if free < needed:
        count = _checkpoints(config, steps)
        raise ConfigError.about(
            "output_dir",
            folder,
            f": this run needs at least {needed:,} bytes, for {count} checkpoint{'s' * (count > 1)} and the "
            f"export, and {free:,} are free",
            "free some, or choose another folder",
        )
