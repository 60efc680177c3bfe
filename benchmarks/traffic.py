"""Counts what one rank hands to torch's collectives, in the training steps alone.

Every collective of torch, of Python or of C++ (DDP's reducer, FSDP, DeepSpeed, pipelines), on whatever thread and
backend, is an operator `c10d::...` of torch's dispatcher. A kernel put before those of all devices sees each call.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PAYLOAD = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "allgather_": ("all-gather", 1),
    "_allgather_base_": ("all-gather", 1),
    "allgather_coalesced_": ("all-gather", 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "gather_into_tensor_": ("gather", 1),  # since torch 2.15
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
}
"""What each operator is, and which of its arguments holds what this rank gives; the process group is the next."""
SILENT = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "check_for_nan"}
"""Operators to which a rank gives nothing."""
SITE = "import os\nif 'RANK' in os.environ:\n    from benchmarks.traffic import start\n    start({folder!r}, {warm})\n"
"""A `sitecustomize.py` that counts in every rank. `{warm}`: the first steps, which are not counted."""


def payload(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in lists of them."""
    if isinstance(value, (list, tuple)):
        return sum(payload(one) for one in value)
    return int(value.numel() * value.element_size())


def given(operator: str, arguments: Sequence[Any], look: Callable[[Any], tuple[int, int]]) -> int:
    """Bytes that this rank gives to one call: to a broadcast only its source gives any, in a group of one nobody does.

    Args:
        look: this process's rank in a process group, the operator's argument, and the size of that.
    """
    place = PAYLOAD[operator][1]
    rank, size = look(arguments[place + 1])
    if size == 1 or (operator == "broadcast_" and arguments[2] != rank):
        return 0
    return payload(arguments[place])


class Traffic:
    """The sums of one rank, and where they are written.

    Args:
        folder: gets `rank-N.json` after each step.
        warm: steps that are not counted.
    """

    def __init__(self, folder: Path, warm: int):
        self.file, self.warm = folder / f"rank-{os.environ['RANK']}.json", warm
        self.sent, self.calls = Counter[str](), Counter[str]()
        self.steps: list[list[list[int]]] = []
        self.counting = self.controlling = False

    def hear(self) -> None:
        """Puts a kernel before those of every collective.

        Raises:
            RuntimeError: when this torch has a collective that `PAYLOAD` does not know.
        """
        import torch

        ours = torch.library.Library("c10d", "IMPL")
        self.kept = ours  # with it its kernels would go
        every = torch._C._dispatch_get_all_op_names()
        names = {name.removeprefix("c10d::") for name in every if name.startswith("c10d::")}
        if unknown := sorted(names - PAYLOAD.keys() - SILENT):
            raise RuntimeError(f"torch {torch.__version__} has collectives {', '.join(unknown)}; add them to PAYLOAD")
        for name in sorted(names & PAYLOAD.keys()):
            ours.impl(name, self._kernel(name), "BackendSelect", with_keyset=True)

    def _kernel(self, name: str) -> Callable[..., Any]:
        import torch
        from torch.distributed import ProcessGroup

        operator = getattr(torch.ops.c10d, name).default
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def look(group: Any) -> tuple[int, int]:
            found: Any = ProcessGroup.unbox(group)
            return found.rank(), found.size()

        def counted(keys: Any, *arguments: Any, **named: Any) -> Any:
            if self.counting:
                size = given(name, arguments, look)
                kind = "control" if self.controlling else PAYLOAD[name][0]
                self.sent[kind] += size
                self.calls[kind] += 1
            return operator.redispatch(keys & below, *arguments, **named)

        return counted

    def step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """`train_step`, counted."""

        def stepped(job: Any, batch: Any, step: int, requests: Any) -> Any:
            self.steps.append([[micro.input_ids.numel(), len(micro.labels)] for micro in batch.micro])
            self.counting = len(self.steps) > self.warm
            try:
                return inner(job, batch, step, requests)
            finally:
                self.counting = False
                found = {"sent": self.sent, "calls": self.calls, "steps": self.steps}
                self.file.write_text(json.dumps(found))

        return stepped

    def control(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """`Ranks.sum`: the loop's own words, of loss and requests."""

        def told(ranks: Any, values: Any) -> Any:
            self.controlling = True
            try:
                return inner(ranks, values)
            finally:
                self.controlling = False

        return told


def start(folder: str, warm: int) -> None:
    """Counts in this rank from now on."""
    from trainers import loop
    from trainers.parallel.ranks import Ranks

    traffic = Traffic(Path(folder), warm)
    traffic.hear()
    ways: Any = loop
    ways.train_step = traffic.step(loop.train_step)
    sums: Any = Ranks
    sums.sum = traffic.control(Ranks.sum)
