"""The hardware that a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.launch.machines import MOST_MACHINES
from trainers.config.mistakes import ConfigError

GIB = 2**30
ROOM = {"gpu": 0.92, "cpu": 0.65}
"""Fraction of memory that a plan may fill; the rest is lost to allocators, most on a CPU (`benchmarks/plan.py`)."""
CUDA_GIB, NCCL_GIB = 1.0, 0.5
"""GiB that CUDA's context and libraries take on a GPU, and that NCCL takes if there are several GPUs."""
LINKS = {"gpu": 25.0, "cpu": 1.0}
"""GB/s that a rank sends inside a machine: PCIe 4 with 16 lanes, and gloo over loopback."""
MACHINE_LINKS = {"gpu": 12.5, "cpu": 0.1}
"""GB/s that a rank sends to other machines: a network card of 100 Gb/s per GPU, and 1 Gb/s Ethernet."""
LATENCIES = {"gpu": 2e-5, "cpu": 2e-4}
"""Seconds that a collective takes however little it sends, assumed: NCCL inside a machine, and gloo over loopback."""
PER_MACHINE = 8
"""Most GPUs assumed in a machine, if there are more and `--num_machines` is not given."""
MOST_GPUS = 1024
NOMINAL = 3e14
"""FLOP/s assumed for GPUs that are not on this machine."""
ASSUMED = (
    "every row is max_length long; {free:.0%} of the memory is reserved for allocator overhead; {cuda}a rank sends "
    "{link:g} GB/s (--link){machines} and needs {latency:.0f} µs per collective, overlapping computation except under "
    "ZeRO 1, ZeRO 2 and pipelines; {flops}"
    "tokens/s, time and cost are bounds from matrix products and communication only: `tunesmith bench` measures them"
)


@dataclass(frozen=True)
class Hardware:
    """The hardware that a plan is made for.

    Args:
        kind: `gpu` or `cpu`.
        processes: number of processes on all machines; one per GPU.
        memory: bytes of memory per process; on a CPU, an equal share of the machine's.
        gpu_ids: GPU ids of this machine; empty for a CPU, and for GPUs elsewhere.
        is_local: whether it is this machine, whose speed can be measured.
        host: bytes of host memory of a machine; None if unknown.
        disk: free bytes on the disk of the runs; None if unknown.
        link: GB/s that a rank sends inside a machine; None for the defaults in `LINKS`.
        machines: number of machines, with equally many processes each.
        machine_link: GB/s that a rank sends to other machines; None for the defaults in `MACHINE_LINKS`.
        flops: FLOP/s of a GPU's matrix products; None to measure this machine's, or assume `NOMINAL`.
        left_out: ids of GPUs of this machine that other programs use.
    """

    kind: str
    processes: int
    memory: float
    gpu_ids: tuple[int, ...] = ()
    is_local: bool = True
    host: float | None = None
    disk: float | None = None
    link: float | None = None
    machines: int = 1
    machine_link: float | None = None
    flops: float | None = None
    left_out: tuple[int, ...] = ()

    @property
    def speed(self) -> float:
        """GB/s that a rank sends inside a machine."""
        return self.link or LINKS[self.kind]

    @property
    def machine_speed(self) -> float:
        """GB/s that a rank sends to other machines."""
        return self.machine_link or MACHINE_LINKS[self.kind]

    @property
    def per_machine(self) -> int:
        """Processes of a machine."""
        return self.processes // self.machines

    @property
    def full_machine(self) -> int:
        """GPUs of a machine, were all of it used."""
        return self.per_machine if self.machines > 1 else max(PER_MACHINE, self.processes)

    def resized(self, processes: int) -> Hardware:
        """The same hardware with another number of processes: whole machines, or a part of one.

        On a CPU, fewer processes share the same memory of a machine.
        """
        shares = self.per_machine / min(processes, self.per_machine) if self.kind == "cpu" else 1
        machines = max(1, processes // self.per_machine)
        return replace(self, processes=processes, machines=machines, memory=self.memory * shares)

    def usable_counts(self) -> list[int]:
        """Numbers of processes that a strategy may use if it cannot use all, most first."""
        local = range(self.per_machine, min(self.processes, 2) - 1, -1)
        machines = [self.per_machine * count for count in range(self.machines, 1, -1) if self.machines % count == 0]
        return [*machines, *local]

    def larger_counts(self) -> list[int]:
        """Larger numbers of GPUs, ascending: powers of two inside a machine, then 1, 2, 4, ... machines."""
        machine = self.full_machine
        doubled = [2**power for power in range(MOST_GPUS.bit_length())]
        counts = [count for count in doubled if count < machine]
        counts += [machine * count for count in doubled if count <= MOST_MACHINES and machine * count <= MOST_GPUS]
        return [count for count in counts if count > self.processes]

    def assumed(self) -> str:
        """The assumptions of a plan."""
        cuda = f"CUDA takes {CUDA_GIB} GiB per GPU and NCCL {NCCL_GIB} GiB more; " if self.kind == "gpu" else ""
        machines = ""
        if self.machines > 1:
            machines = (
                f" inside a machine of {self.per_machine} (--num_machines) and {self.machine_speed:g} GB/s to others "
                "(--machine_link)"
            )
        flops = "" if self.is_local or self.flops else f"a GPU computes {NOMINAL / 1e12:g} TFLOP/s (--tflops); "
        return ASSUMED.format(
            free=1 - ROOM[self.kind], cuda=cuda, link=self.speed, machines=machines, flops=flops,
            latency=LATENCIES[self.kind] * 1e6,
        )  # fmt: skip


def parse_size(text: str, option: str, unit: str, example: float) -> float:
    """Parses a size from the command line.

    Raises:
        ConfigError: if it is not a positive number up to 10,000.
    """
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size <= 10_000:
        raise ConfigError(f"{option}={text[:40]!r} is not a size in {unit}; use e.g. --{option} {example}")
    return size
