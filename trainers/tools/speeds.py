"""Speeds for `tunesmith doctor`: bandwidth of collectives by size, of each link, and work done by each rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist

from trainers.tools.collective_trials import COLLECTIVES, Group, Report

KIB, MIB = 2**10, 2**20
SIZES = {"cpu": (64 * KIB, MIB, 16 * MIB, 64 * MIB), "cuda": (MIB, 16 * MIB, 128 * MIB, 512 * MIB)}
"""Bytes of the messages."""
LINK_SIZE = {"cpu": MIB, "cuda": 64 * MIB}
TIMED = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "send/receive")
SECONDS, MOST_CALLS, TOO_LONG = 0.1, 20, 0.5
"""Time and calls for each size; a size that would take longer than `TOO_LONG` for one call is left out."""
ALL_PAIRS = 8
"""Up to this many ranks every pair is measured; of more, neighbours."""
WORK_SECONDS = 0.5
SLOW_RANK, SLOW_LINK = 3.0, 4.0
"""A rank or link is slow if it is so many times slower than the median of the others, in each of so many looks."""
LOOKS, LINK_LOOKS, FEWEST = 3, 5, 4


def measure(groups: list[Group], device: torch.device, report: Report) -> None:
    """Measures inside and between machines, and how much work each rank does."""
    report.step("measuring the ranks")
    report.write("compute", **_compute(device))
    for group in groups:
        for name in TIMED:
            _bandwidth(name, group, device, report)
        report.step(f"measuring the links {_scope(group)}")
        rates = _link_rates(group, device)
        if group.index == 0:
            slow = [pair for pair in rates if is_slow(rates[pair], _others(rates, pair), SLOW_LINK)]
            links = [[group.ranks[pair[0]], group.ranks[pair[1]], rate, pair in slow] for pair, rate in rates.items()]
            report.write("links", group=group.name, ranks=group.ranks, links=links)


def _scope(group: Group) -> str:
    return "inside a machine" if group.name == "inside" else "between machines"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(call: Callable[[], Any], count: int, device: torch.device) -> float:
    """Mean seconds of a call."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait(device)
    return (time.perf_counter() - start) / count


def _longest(seconds: float, group: Group, device: torch.device) -> float:
    """The time of the slowest rank, known to all."""
    slowest = torch.tensor([seconds], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group.handle)
    return float(slowest)


def _bandwidth(name: str, group: Group, device: torch.device, report: Report) -> None:
    """Times a collective with messages of rising size; the first rank of the group writes the times."""
    per_rank = name in ("all-gather", "reduce-scatter", "all-to-all")
    rate = 0.0
    for size in SIZES[device.type]:
        if rate and size / rate > TOO_LONG:
            break
        report.step(f"measuring {name} {_scope(group)}")
        trial = COLLECTIVES[name](group, size // 4 // (group.size if per_rank else 1), device)
        dist.barrier(group=group.handle)
        first = _longest(_seconds(trial.call, 1, device), group, device)
        calls = max(1, min(MOST_CALLS, int(SECONDS / first)))
        seconds = _longest(_seconds(trial.call, calls, device), group, device)
        rate = trial.size / seconds
        if group.index == 0:
            report.write("bandwidth", group=group.name, ranks=group.ranks, collective=name, bytes=trial.size,
                         seconds=seconds)  # fmt: skip


# -- links -------------------------------------------------------------------------------------------------------------


def pairs_of(count: int) -> list[tuple[int, int]]:
    """Links to measure, as indices of sender and receiver: every pair both ways, or neighbours of many."""
    if count <= ALL_PAIRS:
        return list(permutations(range(count), 2))
    return [pair for index in range(count) for pair in ((index, (index + 1) % count), ((index + 1) % count, index))]


def _link_rates(group: Group, device: torch.device) -> dict[tuple[int, int], float]:
    """Bytes per second by indices of sender and receiver; a link that looks slow is measured again, and its best kept.

    One pair at a time, so that none shares its way with another.
    """
    rates: dict[tuple[int, int], float] = {}
    pairs = pairs_of(group.size)
    for _ in range(LINK_LOOKS):
        again = _measure_pairs(pairs, rates, group, device)
        rates |= {pair: max(rate, rates.get(pair, 0.0)) for pair, rate in again.items()}
        pairs = [pair for pair in rates if is_slow(rates[pair], _others(rates, pair), SLOW_LINK)]
        if not pairs:
            break
    return rates


def _measure_pairs(
    pairs: list[tuple[int, int]], before: dict[tuple[int, int], float], group: Group, device: torch.device
) -> dict[tuple[int, int], float]:
    """The best rate of each pair; one that was measured before gets more messages, as many as a second holds."""
    payload = torch.ones(LINK_SIZE[device.type] // 4, device=device)
    answer = torch.ones(1, device=device)
    times = torch.zeros(len(pairs), dtype=torch.float64, device=device)
    for number, (sender, receiver) in enumerate(pairs):
        dist.barrier(group=group.handle)
        rate = before.get((sender, receiver))
        messages = FEWEST if rate is None else min(MOST_CALLS, max(FEWEST, int(rate / payload.nbytes)))
        if group.index == sender:

            def call(to: int = group.ranks[receiver]) -> None:
                dist.send(payload, to, group=group.handle)
                dist.recv(answer, to, group=group.handle)

            times[number] = min(_seconds(call, 1, device) for _ in range(messages))
        elif group.index == receiver:
            for _ in range(messages):
                dist.recv(payload, group.ranks[sender], group=group.handle)
                dist.send(answer, group.ranks[sender], group=group.handle)
    dist.all_reduce(times, group=group.handle)
    return {pair: payload.nbytes / float(seconds) for pair, seconds in zip(pairs, times, strict=True)}


def _others(rates: dict[tuple[int, int], float], pair: tuple[int, int]) -> list[float]:
    return [rate for other, rate in rates.items() if other != pair]


def is_slow(rate: float, others: list[float], factor: float) -> bool:
    """Whether a rate is below the median of the others by a factor."""
    return bool(others) and rate * factor < statistics.median(others)


# -- ranks -------------------------------------------------------------------------------------------------------------


def _compute(device: torch.device) -> dict[str, Any]:
    """Matrix products per second of this rank, all ranks at work at once, in its best look; `slow` if in each."""
    world, rank = dist.get_world_size(), dist.get_rank()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best, slow = 0.0, True
    for _ in range(LOOKS):
        rates = torch.zeros(world, dtype=torch.float64, device=device)
        rates[rank] = _products_per_second(device)
        dist.all_reduce(rates)
        values = rates.tolist()
        best = max(best, values[rank])
        others = [[*values[:index], *values[index + 1 :]] for index in range(world)]
        slow = slow and is_slow(values[rank], others[rank], SLOW_RANK)
        if not any(is_slow(value, others[index], SLOW_RANK) for index, value in enumerate(values)):
            break
    torch.set_num_threads(threads)
    return {"rate": best, "slow": slow}


def _products_per_second(device: torch.device) -> float:
    on_gpu = device.type == "cuda"
    side, dtype = (4096, torch.bfloat16) if on_gpu else (192, torch.float32)
    matrix = torch.randn(side, side, device=device, dtype=dtype)
    matrix @ matrix
    dist.barrier()
    _wait(device)
    start, count = time.perf_counter(), 0
    while (spent := time.perf_counter() - start) < WORK_SECONDS:
        for _ in range(8):
            matrix @ matrix
        _wait(device)
        count += 8
    return count / spent
