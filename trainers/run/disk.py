"""Bytes that a run writes, from the headers of its base model's files, and whether its disk has them. Imports no torch.

A checkpoint holds what is trained and both moments of Adam; the ones that are kept are on the disk while the next is
written, and the export comes beside them.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.run.weight_headers import Headers, base_folder, read_headers

_LOG_BYTES = 2_000_000
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "float32": 4, "float16": 2,
                "bfloat16": 2}  # fmt: skip
_ADAM_BYTES, _ADAM_8BIT_BYTES = 8.0, 2 + 8 / 256


@dataclass(frozen=True)
class Tensor:
    """A weight in a file.

    Args:
        name: in the model.
        shape: of it.
        dtype: as safetensors spells it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_text(self) -> bool:
        """Whether it belongs to the language model, and not to a tower for images."""
        return "vision" not in self.name

    def layer(self) -> int | None:
        """Number of the decoder layer that it is in; None outside of all."""
        parts = self.name.split(".")
        numbers = [int(part) for before, part in pairwise(parts)
                   if before in ("layers", "h", "blocks") and part.isdigit()]  # fmt: skip
        return numbers[0] if numbers else None


def tensors_of(headers: Headers) -> list[Tensor]:
    """The weights that headers tell of."""
    return [Tensor(name, tuple(shape), dtype) for name, (dtype, shape) in headers.items()]


def local_tensors(config: TrainConfig) -> list[Tensor]:
    """The weights in the base model's folder; none where it is not a folder, or cannot be read."""
    folder = base_folder(config)
    try:
        return tensors_of(read_headers(folder)) if folder.is_dir() else []
    except ConfigError:  # the pre-flight check says so
        return []


def bytes_needed(config: TrainConfig, tensors: list[Tensor], steps: int | None) -> int:
    """Bytes of checkpoints, export and logs when there are most of them.

    Args:
        config: of the run.
        tensors: of its base model.
        steps: of the run; None where they are not known yet, so that one checkpoint is counted.
    """
    limit = config.num_hidden_layers
    present = [tensor for tensor in tensors if limit is None or (tensor.layer() or 0) < limit]
    adapters = _adapter_weights(config, present)
    every = sum(math.prod(tensor.shape) for tensor in present if tensor.is_text)
    trained = every if config.method == "full" else adapters
    weight = 4.0 if config.master_weights or config.method != "full" else 2.0
    state = _ADAM_BYTES if config.optim == "adamw" else _ADAM_8BIT_BYTES
    checkpoint = trained * (weight + state)
    full_model = config.method == "full" or config.merge_adapter
    export = (
        sum(math.prod(tensor.shape) * _export_bytes(config, tensor) for tensor in present)
        if full_model
        else 4 * adapters
    )
    return _LOG_BYTES + math.ceil(_checkpoints(config, steps) * checkpoint + export)


def _checkpoints(config: TrainConfig, steps: int | None) -> int:
    """How many lie on the disk at once: those that are kept, the best one, and the one that is written."""
    steps = steps or config.max_steps
    saves = math.ceil(steps / config.save_steps) if steps and config.save_steps else 1
    return min(saves, config.save_total_limit + config.load_best_model_at_end + 1)


def _adapter_weights(config: TrainConfig, tensors: list[Tensor]) -> int:
    """Weights of the adapters on matrices of decoder layers."""
    ends = tuple(f"{name}.weight" for name in config.lora_target_modules)
    everywhere = config.lora_target_modules == ["all-linear"]
    matrices = [
        tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.is_text and tensor.layer() is not None
    ]
    return sum(config.lora_r * sum(matrix.shape) for matrix in matrices if everywhere or matrix.name.endswith(ends))


def _export_bytes(config: TrainConfig, tensor: Tensor) -> int:
    return _DTYPE_BYTES.get(tensor.dtype if config.export_dtype == "auto" else config.export_dtype, 0)


def _written(folder: Path) -> int:
    """Bytes of checkpoints and export that a resumed run has on the disk already."""
    files = [path for name in ("checkpoints", "model") for path in (folder / name).rglob("*.safetensors")]
    return sum(path.stat().st_size for path in files if path.is_file())


def check_room(config: TrainConfig, tensors: list[Tensor], folder: Path, steps: int | None = None) -> None:
    """Refuses a disk that is too small for checkpoints and export.

    Args:
        config: of the run.
        tensors: of its base model.
        folder: the run's; need not exist.
        steps: of the run, where they are known.

    Raises:
        ConfigError: with bytes needed and free.
    """
    near = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    disk = os.statvfs(near)
    free, needed = disk.f_bavail * disk.f_frsize, bytes_needed(config, tensors, steps) - _written(folder)
    if free < needed:
        count = _checkpoints(config, steps)
        raise ConfigError.about(
            "output_dir",
            folder,
            f": this run needs at least {needed:,} bytes, for {count} checkpoint{'s' * (count > 1)} and the "
            f"export, and {free:,} are free",
            "free some, or choose another folder",
        )
