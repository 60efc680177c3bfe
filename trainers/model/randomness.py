"""Keeps random numbers out of a model's forward pass in training: they would differ between strategies.

Only the dropout of LoRA, which is an option of the run, is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.model.probe import probe_rows

_RANDOM = ("dropout", "pdrop", "layerdrop", "drop_path_rate", "jitter_noise", "jitter_eps")
"""Parts of the names of config values that say how random training is."""
_THRESHOLDS = {"phimoe": {"router_jitter_noise"}}
"""Values with such a name that inference uses too, by `model_type`."""


def drop_randomness(model_config: Any) -> list[str]:
    """Sets the model's own dropout, skipped layers and noise of routers to 0; returns a log line for each."""
    thresholds, lines = _THRESHOLDS.get(model_config.model_type, set()), list[str]()
    for name, value in vars(model_config).items():
        if name not in thresholds and any(part in name for part in _RANDOM) and isinstance(value, float) and value > 0:
            setattr(model_config, name, 0.0)
            lines.append(f"the model's own {name}={value} is set to 0 for training")
    return lines


def route_as_in_inference(model: nn.Module) -> None:
    """Has routers that draw experts at random in training (PhiMoE's) choose those of inference."""
    for module in model.modules():
        if type(module).__name__ == "PhimoeTopKRouter":
            module.__class__ = type("PhimoeTopKRouter", (_Inference, type(module)), {})
            module.eval()


class _Inference(nn.Module):
    """A module that stays in inference mode."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)


@torch.no_grad()
def refuse_randomness(model: Any) -> None:
    """Runs a small model on the CPU in training mode, and leaves it in inference mode.

    Raises:
        ConfigError: if its forward pass draws random numbers.
    """
    route_as_in_inference(model)
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch_state, numpy_state = torch.get_rng_state(), np.random.get_state(legacy=False)
        try:
            model(probe_rows(model.config.get_text_config().vocab_size, torch.device("cpu")), use_cache=False)
        except Exception:  # families raise what they like; the probes of computation say it
            return
        finally:
            model.eval()
            drawn = not torch.equal(torch_state, torch.get_rng_state())
            drawn = drawn or repr(numpy_state) != repr(np.random.get_state(legacy=False))
            np.random.set_state(numpy_state)
    if drawn:
        raise ConfigError(
            f"{model.config.model_type} models draw random numbers in training, which would differ between "
            "strategies; use another model"
        )
