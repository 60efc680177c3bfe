"""Collectives on prepared tensors, each with what it must leave there, for `trainers/tools/collectives.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


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
    first = int(wrong[0])
    value, should = trial.output.flatten()[first].item(), expected.flatten()[first].item()
    return f"element {first} is {value:g} and should be {should:g}; {len(wrong)} of {trial.output.numel()} are wrong"
