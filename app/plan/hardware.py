"""The hardware that a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.config.mistakes import ConfigError

GIB = 2**30
ROOM = {"gpu": 0.92, "cpu": 0.65}
"""Fraction of memory that a plan may fill; the rest is lost to allocators, most on a CPU (`benchmarks/plan.py`)."""
CUDA_GIB, NCCL_GIB = 1.0, 0.5
"""GiB that CUDA's context and libraries take on a GPU, and that NCCL takes if there are several GPUs."""
LINKS = {"gpu": 25.0, "cpu": 1.0}
"""GB/s that a rank sends: PCIe 4 with 16 lanes, and gloo over loopback."""
NOMINAL = 3e14
"""FLOP/s assumed for GPUs that are not on this machine; only used to order the rows."""
ASSUMED = (
    "every row is max_length long; {free:.0%} of the memory is reserved for allocator overhead; {cuda}a rank sends "
    "{link:g} GB/s (--link), overlapping computation except under ZeRO 1, ZeRO 2 and pipelines; tokens/s is an upper "
    "bound from matrix products and communication only: `tunesmith bench` measures it"
)


@dataclass(frozen=True)
class Hardware:
    """The hardware that a plan is made for.

    Args:
        kind: `gpu` or `cpu`.
        processes: number of processes; one per GPU.
        memory: bytes of memory per process.
        gpu_ids: GPU ids of this machine; empty for a CPU, and for GPUs elsewhere.
        is_local: whether it is this machine, whose speed can be measured.
        host: bytes of host memory of a machine; None if unknown.
        disk: free bytes on the disk of the runs; None if unknown.
        link: GB/s that a rank sends; None for the defaults in `LINKS`.
    """

    kind: str
    processes: int
    memory: float
    gpu_ids: tuple[int, ...] = ()
    is_local: bool = True
    host: float | None = None
    disk: float | None = None
    link: float | None = None

    @property
    def speed(self) -> float:
        """GB/s that a rank sends."""
        return self.link or LINKS[self.kind]

    def assumed(self) -> str:
        """The assumptions of a plan."""
        cuda = f"CUDA takes {CUDA_GIB} GiB per GPU and NCCL {NCCL_GIB} GiB more; " if self.kind == "gpu" else ""
        return ASSUMED.format(free=1 - ROOM[self.kind], cuda=cuda, link=self.speed)


def parse_size(text: str, option: str, unit: str, example: int) -> float:
    """Parses a size from the command line.

    Raises:
        ConfigError: if it is not a positive number.
    """
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size <= 10_000:
        raise ConfigError(f"{option}={text[:40]!r} is not a size in {unit}; use e.g. --{option} {example}")
    return size
