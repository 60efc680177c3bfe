"""Parses a DeepSpeed JSON strictly, and checks combinations of keys. Imports no torch.

The values allowed for each key are defined in `trainers/strategy/deepspeed_schema.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.strict_json import unique_keys
from trainers.config.yaml_file import read_text
from trainers.strategy import topics
from trainers.strategy.deepspeed_schema import (
    AS_CONFIGURED,
    ONE_BIT,
    OPTIMIZERS,
    OUTPUT_PATHS,
    UNTRIED,
    WITHOUT_EFFECT,
    DeepSpeedJson,
    OffloadOptimizer,
    OffloadParam,
    Optimizer,
    ZeroOptimization,
)
from trainers.strategy.schema import parse, shortened

SOURCE = "DeepSpeed JSON"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def read_json(name: str) -> dict[str, Any]:
    """Reads the object in a DeepSpeed JSON.

    Args:
        name: Path of the file; relative to the current folder, as in Accelerate.

    Raises:
        ConfigError: If the file is unreadable, too large, not an object, or has a duplicate key, NaN or infinity.
    """
    where = f"deepspeed_config_file={shortened(name)}"
    text = read_text(Path(os.path.expanduser(name)), where, SOURCE, "a relative path counts from the current folder")
    try:
        loaded = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not plain JSON: {str(error)[:300]}; write one object without comments") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where} holds a {type(loaded).__name__}; write one object, {{...}}")
    return loaded


def output_paths(content: dict[str, Any]) -> dict[str, str]:
    """Returns every path that DeepSpeed would write to, by dotted key.

    Args:
        content: Content of a JSON, which need not have been validated.
    """
    paths = {}
    for key in OUTPUT_PATHS:
        value: Any = content
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, str):
            paths[key] = value
    return paths


def parse_json(content: dict[str, Any]) -> DeepSpeedJson:
    """Validates the content of a DeepSpeed JSON.

    Raises:
        ConfigError: Lists every mistake; combinations of keys are only checked once each key is valid.
    """
    # DeepSpeed ignores unknown top-level keys, so a `_comment` is harmless there; within a section it is an error.
    settings = parse(
        DeepSpeedJson, {name: value for name, value in content.items() if not name.startswith("_")}, source=SOURCE
    )
    if mistakes := [*_zero_mistakes(settings.zero_optimization), *_optimizer_mistakes(settings.optimizer)]:
        raise ConfigError(mistakes, SOURCE)
    return settings


def drop_without_effect(settings: dict[str, Any]) -> None:
    """Removes, in place, keys that were accepted because they have no effect, as DeepSpeed rejects some of them anyway.

    Args:
        settings: Validated content of a DeepSpeed JSON, before it is passed to DeepSpeed.
    """
    for name in [name for name, value in settings.items() if value is None or name in WITHOUT_EFFECT]:
        del settings[name]


def _zero_mistakes(zero: ZeroOptimization | None) -> Iterator[Mistake]:
    section = "zero_optimization"
    if zero is None or zero.stage is None:
        yield Mistake(f"{section}.stage", None, "is missing", "write 1, 2 or 3")
        return
    stage, param, state = zero.stage, zero.offload_param or OffloadParam(), zero.offload_optimizer or OffloadOptimizer()
    if stage != 3:
        problem = f"needs stage 3, not {stage}"
        if param.device != "none":
            yield Mistake(f"{section}.offload_param", None, problem, "remove it, or write 3")
        if state.ratio != 1:
            yield Mistake(f"{section}.offload_optimizer.ratio", state.ratio, problem, "remove it")
        for key, value in zero.zero_plus_plus.items():
            yield Mistake(f"{section}.{key}", value, problem, "remove it, or write 3")
    elif param.device != "none":
        if zero.zero_hpz_partition_size > 1:
            yield Mistake(
                f"{section}.zero_hpz_partition_size",
                None,
                ": a second copy of weights that are offloaded",
                "remove it",
            )
        if param.device == "nvme":
            remedy = f"write cpu; {topics.OFFLOAD}"
            yield Mistake(f"{section}.offload_param.device", "nvme", ": it could not be checkpointed", remedy)
    for name, offload in (("offload_param", param), ("offload_optimizer", state)):
        if offload.device != "nvme":
            continue
        option = f"{section}.{name}.device"
        if offload.nvme_path is None:
            yield Mistake(option, "nvme", "needs a folder", "write nvme_path")
        if stage != 3:
            yield Mistake(option, "nvme", f"is treated as cpu under stage {stage}", "write stage 3, or cpu")


def _optimizer_mistakes(optimizer: Optimizer | None) -> list[Mistake]:
    if optimizer is None:
        return []
    use = f"write one of {', '.join(OPTIMIZERS)}"
    if optimizer.type is None:
        return [Mistake("optimizer.type", None, "is missing", use)]
    kind, name = optimizer.type.lower(), shortened(optimizer.type)
    if kind in ONE_BIT:
        return [Mistake("optimizer.type", name, "was removed in DeepSpeed 0.19", f"{use}; {topics.ZERO}")]
    if kind in UNTRIED:
        problem = "is not supported, as checkpoints were never run with its state"
        return [Mistake("optimizer.type", name, problem, f"use AdamW; {topics.ZERO}")]
    if kind not in OPTIMIZERS:
        return [Mistake("optimizer.type", name, "is not one of DeepSpeed's own optimizers", use)]
    params = optimizer.params or {}
    try:
        parse(OPTIMIZERS[kind], params, "optimizer.params")
    except ConfigError as error:
        return error.mistakes
    # The training loop sets lr, and the parameter groups set weight_decay; only these two would silently differ.
    problem = "is missing, and DeepSpeed would use its own default"
    return [
        Mistake(f"optimizer.params.{key}", None, problem, 'write "auto"')
        for key in ("betas", "eps")
        if kind in AS_CONFIGURED and key not in params
    ]


def leaves_parity(content: dict[str, Any]) -> list[str]:
    """Returns the choices in a DeepSpeed JSON that void the promise that the strategy never changes the model.

    Args:
        content: Validated content of a JSON; empty if there is none.
    """
    settings = parse_json(content) if content else DeepSpeedJson()
    zero, optimizer = settings.zero_optimization or ZeroOptimization(), settings.optimizer
    choices = [f"{key}=true" for key in zero.quantized]
    if settings.communication_data_type != "fp32":
        choices.append(f"communication_data_type={settings.communication_data_type}")
    if optimizer and optimizer.type and optimizer.type.lower() not in AS_CONFIGURED:
        choices.append(f"DeepSpeed's optimizer {optimizer.type}")
    return choices
