"""One rank of `tunesmith doctor`: checks every collective by value in every group of a mesh, then measures speeds.

    python -m torch.distributed.run ... -m trainers.tools.collectives --out DIR --sizes '{"tp": 2}' --timeout 120

The rank appends JSON lines to `DIR/rank-N.jsonl`, each with a `kind`: `step` before whatever may hang, `check` for a
collective in a group, `bandwidth`, `links`, `compute`, `error`, `terminated` by its launcher, and `done` at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import threading
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainers.run.launch import end_with_launcher, exit_now
from trainers.strategy.mesh import AXES, Mesh, MeshSizes
from trainers.tools.collective_trials import COLLECTIVES, Group, Report, fault_of
from trainers.tools.speeds import measure

COUNTS = (1_031, 262_147)
"""Elements per rank: primes, which no chunk size divides; a small and a large message, as libraries switch between."""


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
    for name in (*AXES, "grad_group", "ep", "ep_replicate"):
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


def report_termination(report: Report) -> None:
    """Writes a line at SIGTERM, which the launcher sends to the others when a rank is killed, and ends this process.

    A Python handler would wait for the collective that the main thread is in; the wakeup descriptor does not.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *signalled: None)
    signal.set_wakeup_fd(writer)

    def wait() -> None:
        while os.read(reader, 1) != bytes([signal.SIGTERM]):
            pass
        report.write("terminated")
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def examine(args: argparse.Namespace, report: Report) -> None:
    """Everything that this rank does."""
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
    report_termination(report)
    try:
        examine(args, report)
    except Exception as error:  # whatever a communication library raises
        report.write("error", at=report.at, error=f"{type(error).__name__}: {error}"[:2000])
    exit_now(0)  # tearing down gloo may abort the process after its work is done


if __name__ == "__main__":
    main()
