"""Counts the bytes that one rank passes to torch's collectives, in training steps only.

Every collective, from Python or C++ (DDP's reducer, FSDP, DeepSpeed, pipelines), on any thread and backend, is an
operator `c10d::...` of torch's dispatcher. A kernel registered ahead of all backends sees each call.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainers.strategy.traffic import wire_bytes

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
"""The collective of each operator, and the index of the argument with this rank's input; the group comes next."""
SILENT = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "check_for_nan"}
"""Operators without input from the calling rank."""
SITE = (
    "import os\nif 'RANK' in os.environ:\n    from benchmarks.collectives import start\n    start({folder!r}, {warm})\n"
)
"""A `sitecustomize.py` that counts in every rank, after the first `{warm}` steps."""


def payload(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(value, (list, tuple)):
        return sum(payload(item) for item in value)
    return int(value.numel() * value.element_size())


def sent_bytes(operator: str, arguments: Sequence[Any], rank_and_size: Callable[[Any], tuple[int, int]]) -> int:
    """Bytes that this rank passes to one call; zero for a broadcast from another rank, and in a group of one.

    Args:
        operator: name of the operator, without `c10d::`.
        arguments: its arguments.
        rank_and_size: returns this process's rank in a process group (as the operator gets it), and its size.
    """
    index = PAYLOAD[operator][1]
    rank, size = rank_and_size(arguments[index + 1])
    if size == 1 or (operator == "broadcast_" and arguments[2] != rank):
        return 0
    return payload(arguments[index])


class Traffic:
    """The totals of one rank.

    Args:
        folder: folder in which `rank-N.json` is written after each step.
        warm: number of warm-up steps, which are not counted.
    """

    def __init__(self, folder: Path, warm: int):
        self.file = folder / f"rank-{os.environ['RANK']}.json"
        self.warm = warm
        self.sent, self.wire = Counter[str](), Counter[str]()
        self.calls = Counter[str]()
        self.steps: list[list[list[int]]] = []
        self.counting = self.controlling = False

    def register(self) -> None:
        """Registers a counting kernel for every collective.

        Raises:
            RuntimeError: if this version of torch has a collective that is missing in `PAYLOAD`.
        """
        import torch

        library = torch.library.Library("c10d", "IMPL")
        self.library = library  # its kernels are unregistered when it is freed
        every = torch._C._dispatch_get_all_op_names()
        names = {name.removeprefix("c10d::") for name in every if name.startswith("c10d::")}
        if unknown := sorted(names - PAYLOAD.keys() - SILENT):
            raise RuntimeError(f"torch {torch.__version__} has collectives {', '.join(unknown)}; add them to PAYLOAD")
        for name in sorted(names & PAYLOAD.keys()):
            library.impl(name, self._kernel(name), "BackendSelect", with_keyset=True)

    def _kernel(self, name: str) -> Callable[..., Any]:
        import torch
        from torch.distributed import ProcessGroup

        operator = getattr(torch.ops.c10d, name).default
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def rank_and_size(group: Any) -> tuple[int, int]:
            process_group: Any = ProcessGroup.unbox(group)
            return process_group.rank(), process_group.size()

        def counted(keys: Any, *arguments: Any, **kwargs: Any) -> Any:
            if self.counting:
                size = sent_bytes(name, arguments, rank_and_size)
                kind = "control" if self.controlling else PAYLOAD[name][0]
                self.sent[kind] += size
                self.wire[kind] += wire_bytes(kind, size, rank_and_size(arguments[PAYLOAD[name][1] + 1])[1])
                self.calls[kind] += 1
            return operator.redispatch(keys & below, *arguments, **kwargs)

        return counted

    def step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `train_step` to count its traffic."""

        def stepped(job: Any, batch: Any, step: int, requests: Any) -> Any:
            self.steps.append([[micro.input_ids.numel(), len(micro.labels)] for micro in batch.micro_batches])
            self.counting = len(self.steps) > self.warm
            try:
                return inner(job, batch, step, requests)
            finally:
                self.counting = False
                totals = {"sent": self.sent, "wire": self.wire, "calls": self.calls, "steps": self.steps}
                self.file.write_text(json.dumps(totals))

        return stepped

    def control(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `Ranks.sum`, the loop's own communication of loss and requests, to count it separately."""

        def counted_sum(ranks: Any, values: Any) -> Any:
            self.controlling = True
            try:
                return inner(ranks, values)
            finally:
                self.controlling = False

        return counted_sum


def start(folder: str, warm: int) -> None:
    """Starts counting in this rank."""
    from trainers import loop
    from trainers.parallel.ranks import Ranks

    traffic = Traffic(Path(folder), warm)
    traffic.register()
    module: Any = loop
    module.train_step = traffic.step(loop.train_step)
    sums: Any = Ranks
    sums.sum = traffic.control(Ranks.sum)
