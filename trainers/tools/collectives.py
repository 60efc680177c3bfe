"""One rank of `tunesmith doctor`: checks every collective by value in every group of a mesh, then measures speeds.

    python -m torch.distributed.run ... -m trainers.tools.collectives --out DIR --sizes '{"tp": 2}' --timeout 120

The rank appends JSON lines to `DIR/rank-N.jsonl`, each with a `kind`: `step` before whatever may hang, `check` for a
collective in a group, `bandwidth`, `links`, `compute`, `error`, and `done` at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers.run.launch import end_with_launcher, exit_now
from trainers.strategy.mesh import AXES, Mesh, MeshSizes

COUNTS = (1_031, 262_147)
"""Elements per rank: primes, which no chunk size divides; a small and a large message, as libraries switch between."""


@dataclass(frozen=True)
class Group:
    """A group of ranks that exchange data.

    Args:
        name: `world`, an axis of the mesh, `inside` a machine or `between` machines.
        ranks: global ranks in order.
        handle: the process group; None where this rank is no member.
    """

    name: str
    ranks: list[int]
    handle: Any

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def index(self) -> int:
        """Index of this rank in the group."""
        return self.ranks.index(dist.get_rank())


@dataclass(frozen=True)
class Trial:
    """A collective on prepared tensors.

    Args:
        call: runs it once.
        output: the tensor that it writes.
        expected: makes what the first call must leave there.
        size: bytes, as nccl-tests counts them.
    """

    call: Callable[[], Any]
    output: torch.Tensor
    expected: Callable[[], torch.Tensor]
    size: int


Maker = Callable[[Group, int, torch.device], Trial]


class Report:
    """This rank's file of JSON lines.

    Args:
        path: the file.
    """

    def __init__(self, path: Path):
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.at = ""

    def write(self, kind: str, **values: Any) -> None:
        """Adds a line."""
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def step(self, text: str) -> None:
        """Says what is about to run; the last such line names what hangs."""
        self.at = text
        self.write("step", at=text)


def fill(group: Group, rank: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """Values that no other rank or position nearby has: whole numbers, whose sums float32 holds exactly."""
    modulus = max(1, min(997, 2**23 // group.size**2))
    return (torch.arange(start, start + count, device=device) % modulus * group.size + rank + 1).float()


def _total(group: Group, start: int, count: int, device: torch.device) -> torch.Tensor:
    return torch.stack([fill(group, rank, start, count, device) for rank in range(group.size)]).sum(0)


def _bytes(count: int) -> int:
    return 4 * count


def _without_output(call: Callable[[], Any], size: int) -> Trial:
    """The trial of a rank that only sends."""
    return Trial(call, torch.empty(0), lambda: torch.empty(0), size)


def _all_reduce(group: Group, count: int, device: torch.device) -> Trial:
    tensor = fill(group, group.index, 0, count, device)
    call = lambda: dist.all_reduce(tensor, group=group.handle)  # noqa: E731
    return Trial(call, tensor, lambda: _total(group, 0, count, device), _bytes(count))


def _all_gather(group: Group, count: int, device: torch.device) -> Trial:
    tensor, output = fill(group, group.index, 0, count, device), torch.empty(count * group.size, device=device)
    expected = lambda: torch.cat([fill(group, rank, 0, count, device) for rank in range(group.size)])  # noqa: E731
    call = lambda: dist.all_gather_into_tensor(output, tensor, group=group.handle)  # noqa: E731
    return Trial(call, output, expected, _bytes(count * group.size))


def _reduce_scatter(group: Group, count: int, device: torch.device) -> Trial:
    tensor, output = fill(group, group.index, 0, count * group.size, device), torch.empty(count, device=device)
    call = lambda: dist.reduce_scatter_tensor(output, tensor, group=group.handle)  # noqa: E731
    expected = lambda: _total(group, group.index * count, count, device)  # noqa: E731
    return Trial(call, output, expected, _bytes(count * group.size))


def _broadcast(group: Group, count: int, device: torch.device) -> Trial:
    root = group.size - 1
    tensor = fill(group, group.index, 0, count, device)
    call = lambda: dist.broadcast(tensor, group.ranks[root], group=group.handle)  # noqa: E731
    return Trial(call, tensor, lambda: fill(group, root, 0, count, device), _bytes(count))


def _reduce(group: Group, count: int, device: torch.device) -> Trial:
    root = group.size - 1
    tensor = fill(group, group.index, 0, count, device)
    call = lambda: dist.reduce(tensor, group.ranks[root], group=group.handle)  # noqa: E731
    if group.index != root:
        return _without_output(call, _bytes(count))
    return Trial(call, tensor, lambda: _total(group, 0, count, device), _bytes(count))


def _scatter(group: Group, count: int, device: torch.device) -> Trial:
    root, output = group.size - 1, torch.empty(count, device=device)
    chunks = [fill(group, root, rank * count, count, device) for rank in range(group.size)]
    source = chunks if group.index == root else None
    call = lambda: dist.scatter(output, source, group.ranks[root], group=group.handle)  # noqa: E731
    return Trial(call, output, lambda: chunks[group.index], _bytes(count * group.size))


def _gather(group: Group, count: int, device: torch.device) -> Trial:
    root, tensor = group.size - 1, fill(group, group.index, 0, count, device)
    if group.index != root:
        call = lambda: dist.gather(tensor, None, group.ranks[root], group=group.handle)  # noqa: E731
        return _without_output(call, _bytes(count * group.size))
    output = torch.empty(group.size, count, device=device)
    expected = lambda: torch.stack([fill(group, rank, 0, count, device) for rank in range(group.size)])  # noqa: E731
    call = lambda: dist.gather(tensor, list(output), group.ranks[root], group=group.handle)  # noqa: E731
    return Trial(call, output, expected, _bytes(count * group.size))


def _all_to_all(group: Group, count: int, device: torch.device) -> Trial:
    tensor = fill(group, group.index, 0, count * group.size, device)
    output = torch.empty(count * group.size, device=device)

    def expected() -> torch.Tensor:
        return torch.cat([fill(group, rank, group.index * count, count, device) for rank in range(group.size)])

    call = lambda: dist.all_to_all_single(output, tensor, group=group.handle)  # noqa: E731
    return Trial(call, output, expected, _bytes(count * group.size))


def _send_receive(group: Group, count: int, device: torch.device) -> Trial:
    """Each rank sends to the next and receives from the one before, as the stages of a pipeline do."""
    after, before = (group.index + 1) % group.size, (group.index - 1) % group.size
    tensor, output = fill(group, group.index, 0, count, device), torch.empty(count, device=device)

    def call() -> None:
        operations = [
            dist.P2POp(dist.isend, tensor, group.ranks[after], group.handle),
            dist.P2POp(dist.irecv, output, group.ranks[before], group.handle),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return Trial(call, output, lambda: fill(group, before, 0, count, device), _bytes(count))


COLLECTIVES: dict[str, Maker] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "scatter": _scatter,
    "gather": _gather,
    "all-to-all": _all_to_all,
    "send/receive": _send_receive,
}


def fault_of(trial: Trial) -> str | None:
    """Runs a collective; returns the first wrong element, or None if every element is right."""
    expected = trial.expected()
    trial.call()
    wrong = (trial.output != expected).flatten().nonzero()
    if not len(wrong):
        return None
    place = int(wrong[0])
    value, should = trial.output.flatten()[place].item(), expected.flatten()[place].item()
    return f"element {place} is {value:g} and should be {should:g}; {len(wrong)} of {trial.output.numel()} are wrong"


def barrier_fault(group: Group, store: Any, device: torch.device) -> str | None:
    """Returns why a barrier let this rank through before the last rank arrived; None if it did not.

    The first rank arrives last: after the others have announced themselves, and some work.
    """
    key = f"barrier/{group.name}/{group.ranks[0]}"
    if group.index == 0:
        for rank in group.ranks[1:]:
            store.wait([f"{key}/{rank}"])
        matrix = torch.randn(512, 512)
        for _ in range(20):
            matrix @ matrix
        store.add(f"{key}/arrived", 1)
    else:
        store.set(f"{key}/{dist.get_rank()}", "1")
    dist.barrier(group=group.handle)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return None if store.add(f"{key}/arrived", 0) else f"left before rank {group.ranks[0]} arrived"


def check_group(group: Group, store: Any, device: torch.device, report: Report) -> None:
    """Checks every collective in a group."""
    for name, make in COLLECTIVES.items():
        for count in COUNTS:
            report.step(f"{name} in {group.name}")
            fault = fault_of(make(group, count, device))
            report.write("check", collective=name, group=group.name, ranks=group.ranks, count=count, fault=fault)
    report.step(f"barrier in {group.name}")
    fault = barrier_fault(group, store, device)
    report.write("check", collective="barrier", group=group.name, ranks=group.ranks, count=0, fault=fault)


def mesh_groups(sizes: MeshSizes, device: torch.device) -> list[Group]:
    """The groups of the mesh that this rank is in, the world first; groups of the same ranks once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = Mesh(sizes, rank, device.type)
    groups = [Group("world", list(range(world)), dist.group.WORLD)]
    for name in (*AXES, "grad_group"):
        handle = mesh.group(name)
        ranks = sorted(dist.get_process_group_ranks(handle)) if handle is not None else []
        if len(ranks) > 1 and ranks not in [group.ranks for group in groups]:
            groups.append(Group(name, ranks, handle))
    return groups


def machine_groups() -> list[Group]:
    """The ranks of this machine, and one rank of each machine; groups of one rank are left out."""
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    layout = {"inside": [list(range(first, first + local)) for first in range(0, world, local)],
              "between": [list(range(0, world, local))]}  # fmt: skip
    groups = []
    for name, members in layout.items():
        for ranks in members:
            handle = dist.new_group(ranks) if len(ranks) > 1 else None  # every rank takes part in making every group
            if handle is not None and rank in ranks:
                groups.append(Group(name, ranks, handle))
    return groups


@contextlib.contextmanager
def joined(timeout: float, device: torch.device) -> Iterator[Any]:
    """Joins the process group; yields a store that all ranks share."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    limit = timedelta(seconds=timeout)
    store, rank, world = next(dist.rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=world,
                            timeout=limit, device_id=device if device.type == "cuda" else None)  # fmt: skip
    yield dist.PrefixStore("doctor", store)


def describe() -> dict[str, Any]:
    """Where this rank runs, and the libraries that it talks through."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {"host": platform.node(), "pid": os.getpid(), "machine": int(os.environ["GROUP_RANK"]),
            "local_rank": int(os.environ["LOCAL_RANK"]), "nccl": nccl}  # fmt: skip


def examine(args: argparse.Namespace, report: Report) -> None:
    """Everything that this rank does."""
    from trainers.tools.speeds import measure

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    report.step("joining the process group")
    with joined(args.timeout, device) as store:
        report.step("making the groups of the mesh")
        groups = mesh_groups(MeshSizes(**json.loads(args.sizes)), device)
        for group in groups:
            check_group(group, store, device, report)
        if not args.quick:
            report.step("making a group of each machine")
            measure(machine_groups(), device, report)
        report.step("waiting for the other ranks to end")
        dist.barrier()
    report.write("done")


def main() -> None:
    """Runs one rank; a fault is reported in its file, and the exit status is always 0."""
    end_with_launcher(True)
    warnings.filterwarnings("ignore", category=FutureWarning)
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    report = Report(args.out / f"rank-{int(os.environ['RANK'])}.jsonl")
    report.write("start", **describe())
    try:
        examine(args, report)
    except Exception as error:  # whatever a communication library raises
        report.write("error", at=report.at, error=f"{type(error).__name__}: {error}"[:2000])
    exit_now(0)  # tearing down gloo may abort the process after its work is done


if __name__ == "__main__":
    main()
