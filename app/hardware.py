"""The GPUs and CPU cores of this machine, and the choice of a run's devices. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.console import shortened
from trainers.config.mistakes import ConfigError, Mistake
from trainers.run.device_locks import holders
from trainers.run.gpus import Gpu, find_gpus, visible
from trainers.strategy.strategy import Machines

__all__ = ["Devices", "Gpu", "choose_devices", "cpu_count", "find_gpus", "visible"]

CPU_PROCESSES = 2
MAX_PROCESSES = 256


@dataclass(frozen=True)
class Devices:
    """The devices of a run: one process per GPU, or processes on the CPU if `gpu_ids` is empty.

    Args:
        gpu_ids: ids of the GPUs on this machine.
        num_processes: number of processes on all machines.
        machines: machines of the run; None for a single one.
        left_out: ids of GPUs that were not chosen because other programs use them.
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
        """This machine's rank among the machines of the run."""
        return self.machines.rank if self.machines else 0


def cpu_count() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_devices(
    gpus: str | None,
    num_processes: int | str | None,
    machine: Sequence[Gpu] | None = None,
    strategy_processes: int | None = None,
) -> Devices:
    """Chooses the devices of a run on a single machine.

    Args:
        gpus: ids such as `0,2`; None for all GPUs that no other program uses, or all GPUs if every one is in use.
        num_processes: number of processes; needed only without GPUs, where it may exceed the number of cores.
        machine: the GPUs to choose from; default: `find_gpus()`.
        strategy_processes: number of processes in the file of the chosen strategy: the default on a CPU; 1 limits the
            default to one GPU.

    Raises:
        ConfigError: with all mistakes.
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
        # GPUs in use by other programs come last, and are used only if so many are requested or all are in use.
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
    """The GPUs in use by programs other than Tunesmith runs; for a GPU held by a run, a new run waits in the queue."""
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
                "num_processes",
                repr(shortened(str(value))),
                "is not a whole number",
                f"write e.g. --num_processes {CPU_PROCESSES}",
            )
        )
        return None
    if not 1 <= count <= MAX_PROCESSES:
        mistakes.append(Mistake("num_processes", count, "is out of range", f"use 1 to {MAX_PROCESSES}"))
        return None
    return count


def _gpu_ids(gpus: str, available: Sequence[Gpu], mistakes: list[Mistake]) -> list[int]:
    """Parses the ids in `gpus`; adds their mistakes to `mistakes`."""
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
