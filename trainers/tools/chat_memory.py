"""Checks before a model is read for a chat whether there is memory for its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainers.config.byte_text import byte_text
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.load import compute_dtype, model_path
from trainers.run import host_memory
from trainers.run.weight_headers import cached_folder, read_headers

_GIB = 2**30
_QUANTIZED_BYTES = 0.7
"""Bytes of a weight in 4 bits, with its scales and what is not quantized."""
_MARGIN = 1.05


def check_memory(config: TrainConfig, request: dict[str, Any]) -> str:
    """What a model takes and what is free, in a few words; empty for a tiny one, or if its files are not here yet.

    Args:
        config: of the model.
        request: see `trainers.tools.chat.Chat.load`.

    Raises:
        ConfigError: if its weights do not fit.
    """
    needed = weights_bytes(config, request)
    if needed is None:
        return ""
    on_gpu = torch.cuda.is_available()
    free = torch.cuda.mem_get_info()[0] if on_gpu else host_memory.available()
    where = "GPU memory" if on_gpu else "memory"
    if needed * _MARGIN > free:
        raise ConfigError(
            f"loading the weights takes {byte_text(needed * _MARGIN)}, and {byte_text(free)} of {where} are free; "
            "free the other model, compare with nothing, or choose another device"
        )
    if needed < _GIB / 10:
        return ""
    return f"{byte_text(needed)} of {byte_text(free)} of free {where}"


def weights_bytes(config: TrainConfig, request: dict[str, Any]) -> int | None:
    """Bytes of the weights as they are loaded; None if the files are not on this machine."""
    folder = Path(model_path(config)).expanduser()
    try:
        known = folder if folder.is_dir() else cached_folder(config)
        headers = read_headers(known) if known else None
    except ConfigError:
        return None
    if not headers:
        return None
    count = sum(torch.Size(shape).numel() for _, shape in headers.values())
    if config.method == "qlora":
        return int(count * _QUANTIZED_BYTES)
    # A fully fine-tuned model is loaded beside its base; an adapter shares the weights of its base.
    copies = 2 if request.get("run_dir") and config.method == "full" else 1
    return int(count * compute_dtype(config).itemsize * copies)
