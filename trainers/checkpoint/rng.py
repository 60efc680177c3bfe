"""The random number generator states of a rank as tensors, for checkpoints: torch, CUDA, NumPy, Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, torch.Tensor]:
    """The generator states of this rank as tensors."""
    numpy_state: Any = np.random.get_state()
    _, python_state, python_gauss = random.getstate()
    states = {
        "rng.torch": torch.get_rng_state(),
        "rng.numpy": torch.from_numpy(numpy_state[1].astype(np.int64)),
        "rng.numpy_position": torch.tensor(numpy_state[2]),
        "rng.python": torch.tensor(python_state, dtype=torch.int64),
    }
    if python_gauss is not None:
        states["rng.python_gauss"] = torch.tensor(python_gauss, dtype=torch.float64)
    if torch.cuda.is_available():
        states["rng.cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: dict[str, torch.Tensor]) -> None:
    """Restores what `random_state` returned."""
    torch.set_rng_state(states["rng.torch"])
    numpy_state = states["rng.numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", numpy_state, int(states["rng.numpy_position"]), 0, 0.0))
    gauss = float(states["rng.python_gauss"]) if "rng.python_gauss" in states else None
    random.setstate((3, tuple(int(word) for word in states["rng.python"]), gauss))
    if "rng.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["rng.cuda"])
