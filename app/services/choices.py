"""The choices of a form besides the options: strategies that can run here, and GPUs with their holders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from app.hardware import Devices, find_gpus
from trainers.config.mistakes import ConfigError
from trainers.run.device_locks import holders
from trainers.strategy.strategy import Strategy, cannot_run, load_strategy, resolve, strategy_names


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy that ships.

    Args:
        name: its name.
        summary: what it does, in a sentence.
        reason: why it cannot run here; None when it can.
    """

    name: str
    summary: str
    reason: str | None


@dataclass(frozen=True)
class GpuChoice:
    """A GPU that a run may use.

    Args:
        index: its id.
        name: the vendor's name.
        memory: bytes.
        free: bytes not in use; None when unknown.
        holder: name of the run that holds its lock; empty for none.
        foreign: whether processes that are not Tunesmith runs use it.
        busy: recent utilization in percent.
    """

    index: int
    name: str
    memory: int
    free: int | None
    holder: str
    foreign: bool = False
    busy: int = 0


def strategy_choices(method: str, devices: Devices | None) -> list[StrategyChoice]:
    """Every shipped strategy, with the reason if it cannot run.

    Args:
        method: `full`, `lora` or `qlora`.
        devices: what it would run on; None checks only whether this machine has GPUs.
    """
    has_gpu = bool(devices.gpu_ids if devices else find_gpus())
    return [
        StrategyChoice(
            strategy.name, strategy.summary, cannot_run(strategy, method, has_gpu) or _misfit(strategy, devices)
        )
        for strategy in _shipped()
    ]


@cache
def _shipped() -> tuple[Strategy, ...]:
    return tuple(load_strategy(name) for name in strategy_names())


def _misfit(strategy: Strategy, devices: Devices | None) -> str | None:
    """Why the strategy cannot run with this number of processes; None when it can."""
    try:
        if devices:
            resolve(strategy, devices.num_processes, "no")
    except ConfigError as error:
        return str(replace(error.mistakes[0], source=""))
    return None


def gpu_choices() -> list[GpuChoice]:
    """The GPUs of this machine."""
    gpus = find_gpus()
    locks = holders() if gpus else {}
    return [
        GpuChoice(
            gpu.index, gpu.name, gpu.memory, gpu.free, str(locks.get(gpu.uuid, {}).get("run", "")),
            gpu.in_use and gpu.uuid not in locks, gpu.busy,
        )
        for gpu in gpus
    ]  # fmt: skip
