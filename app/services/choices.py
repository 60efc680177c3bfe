"""What a form offers beside the options: the strategies that can run here, and the GPUs with who holds each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from app.hardware import Devices, find_gpus
from trainers.config.options import ConfigError
from trainers.run.device_locks import holders
from trainers.strategy.strategy import Strategy, cannot_run, load_strategy, resolve, strategy_names


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy that ships.

    Args:
        name: its name.
        summary: what it does, in a sentence.
        reason: why it cannot run so; None when it can.
    """

    name: str
    summary: str
    reason: str | None


@dataclass(frozen=True)
class GpuChoice:
    """A GPU that a run may get.

    Args:
        index: its id.
        name: the maker's name.
        memory: bytes.
        free: bytes that no process uses; None when that is not known.
        holder: name of the run that holds its lock; empty for none.
        foreign: whether processes that are no run of ours use it.
    """

    index: int
    name: str
    memory: int
    free: int | None
    holder: str
    foreign: bool = False


def strategy_choices(method: str, devices: Devices | None) -> list[StrategyChoice]:
    """Every strategy that ships, with why it cannot run where that is so.

    Args:
        method: what is trained.
        devices: what it would run on; None looks at this machine's GPUs and at no number of processes.
    """
    has_gpu = bool(devices.gpu_ids if devices else find_gpus())
    return [
        StrategyChoice(one.name, one.summary, cannot_run(one, method, has_gpu) or _misfit(one, devices))
        for one in _shipped()
    ]


@cache
def _shipped() -> tuple[Strategy, ...]:
    return tuple(load_strategy(name) for name in strategy_names())


def _misfit(strategy: Strategy, devices: Devices | None) -> str | None:
    """Why the number of processes does not fit."""
    try:
        if devices:
            resolve(strategy, devices.num_processes, "no")
    except ConfigError as error:
        return error.mistakes[0].removeprefix(f"strategy {strategy.name}: ")
    return None


def gpu_choices() -> list[GpuChoice]:
    """The GPUs of this machine; empty without any."""
    found = find_gpus()
    held = holders() if found else {}
    return [
        GpuChoice(
            gpu.index, gpu.name, gpu.memory, gpu.free, str(held.get(gpu.uuid, {}).get("run", "")),
            gpu.in_use and gpu.uuid not in held,
        )
        for gpu in found
    ]  # fmt: skip
