"""The GPUs and CPU cores of this machine, and which of them a run gets. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainers.config.mistakes import ConfigError, Mistake
from trainers.run.device_locks import holders
from trainers.run.gpus import Gpu, find_gpus, visible
from trainers.strategy.strategy import Machines

__all__ = ["Devices", "Gpu", "choose_devices", "cpu_count", "find_gpus", "visible"]

CPU_PROCESSES = 2
MAX_PROCESSES = 256


@dataclass(frozen=True)
class Devices:
    """What a run is started on: one process per GPU, or processes on the CPU where `gpu_ids` is empty.

    Args:
        gpu_ids: of this machine.
        num_processes: over all machines.
        machines: None for this machine alone.
        left_out: GPUs that other programs use, and that nobody asked for.
    """

    gpu_ids: list[int]
    num_processes: int
    machines: Machines | None = None
    left_out: tuple[int, ...] = field(default=(), compare=False)

    @property
    def local_processes(self) -> int:
        """Processes on this machine."""
        return self.num_processes // self.machines.count if self.machines else self.num_processes

    @property
    def machine_rank(self) -> int:
        """This machine's number among those of the run."""
        return self.machines.rank if self.machines else 0


def cpu_count() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_devices(
    gpus: str | None,
    num_processes: int | str | None,
    machine: Sequence[Gpu] | None = None,
    strategy_processes: int | None = None,
) -> Devices:
    """The devices of one run.

    Args:
        gpus: ids such as `0,2`; None for all GPUs that no other program uses, or all where each is used.
        num_processes: how many processes; needed only without GPUs, where it may exceed the cores.
        machine: the GPUs to choose from; default: `find_gpus()`.
        strategy_processes: processes that the chosen strategy's file carries: the default on a CPU; 1 takes one GPU.

    Raises:
        ConfigError: with every mistake, a line each.
    """
    available = list(find_gpus() if machine is None else machine)
    mistakes: list[Mistake] = []
    left_out: tuple[int, ...] = ()
    count = _count(num_processes, mistakes)
    if gpus is not None:
        ids = _gpu_ids(gpus, available, mistakes)
        if count is not None and ids and count != len(ids):
            mistakes.append(
                Mistake(
                    "num_processes",
                    count,
                    f"with gpus={gpus} ({len(ids)} GPUs)",
                    "leave num_processes out: one process runs on each GPU",
                )
            )
    else:
        foreign = _foreign(available)
        # Those that other programs use come last, and only when as many are asked for.
        ids = [gpu.index for gpu in available if gpu.index not in foreign]
        left_out = foreign if ids and count is None else ()
        ids += [] if left_out else foreign
        if available and count is not None and count > len(available):
            mistakes.append(
                Mistake(
                    "num_processes", count, f", but {len(available)} GPUs are visible", f"use at most {len(available)}"
                )
            )
        elif available:
            ids = ids[: count or (1 if strategy_processes == 1 else len(ids))]
    if not ids and count is None and (strategy_processes or 0) > MAX_PROCESSES:
        mistakes.append(Mistake("num_processes", strategy_processes, "is out of range", f"use 1 to {MAX_PROCESSES}"))
    if mistakes:
        raise ConfigError(mistakes)
    return Devices(ids, len(ids) or count or strategy_processes or CPU_PROCESSES, left_out=left_out)


def _foreign(available: Sequence[Gpu]) -> tuple[int, ...]:
    """The GPUs that processes use which are no run of ours; for those of a run one waits."""
    in_use = [gpu for gpu in available if gpu.in_use]
    held = holders() if in_use else {}
    return tuple(gpu.index for gpu in in_use if gpu.uuid not in held)


def _count(value: int | str | None, mistakes: list[Mistake]) -> int | None:
    if value is None:
        return None
    try:
        count = int(str(value))
    except ValueError:
        mistakes.append(
            Mistake(
                "num_processes", repr(value), "is not a whole number", f"write e.g. --num_processes {CPU_PROCESSES}"
            )
        )
        return None
    if not 1 <= count <= MAX_PROCESSES:
        mistakes.append(Mistake("num_processes", count, "is out of range", f"use 1 to {MAX_PROCESSES}"))
        return None
    return count


def _gpu_ids(gpus: str, available: Sequence[Gpu], mistakes: list[Mistake]) -> list[int]:
    """The ids in `gpus`; what is wrong with them is added to `mistakes`."""
    parts = [part.strip() for part in gpus.split(",")]
    strange = [word for word in parts if not (word.isascii() and word.isdigit())]
    if strange:
        listed = ", ".join(repr(word) for word in strange)
        mistakes.append(
            Mistake("gpus", repr(gpus), f": {listed} is not a GPU id", "separate ids with commas, such as --gpus 0,2")
        )
        return []
    ids = [int(word) for word in parts]
    known = [gpu.index for gpu in available]
    twice = sorted({index for index in ids if ids.count(index) > 1})
    mistakes += [Mistake("gpus", gpus, f"names GPU {index} twice", "list it once") for index in twice]
    unknown = sorted({index for index in ids if index not in known})
    if unknown and not known:
        mistakes.append(
            Mistake("gpus", gpus, ": no GPU is visible here", "leave gpus out; --num_processes N runs on the CPU")
        )
    elif unknown:
        missing, present = ", ".join(map(str, unknown)), ", ".join(map(str, known))
        mistakes.append(Mistake("gpus", gpus, f": there is no GPU {missing} here", f"use {present}"))
    return ids
