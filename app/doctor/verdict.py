"""What the reports of the ranks mean: collectives that are wrong, ranks that hang, slow ranks and links, bandwidths."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.doctor.check import Check, judged

COLLECTIVES = (
    "all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "scatter", "gather", "all-to-all",
    "send/receive", "barrier",
)  # fmt: skip
TIMED = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "send/receive")
SCOPES = {"inside": "inside a machine", "between": "between machines"}
_LIBRARIES = (
    "run again with NCCL_DEBUG=INFO on GPUs, and with NCCL_P2P_DISABLE=1: if that mends it, peer access is broken; "
    "update the driver and NCCL, and test the memory of the rank that is named"
)


@dataclass(frozen=True, eq=False)
class Rank:
    """What one rank did.

    Args:
        number: its global rank.
        state: `ended`, `alive` or `stopped` when it was last looked at.
        lines: what it wrote.
    """

    number: int
    state: str
    lines: Sequence[Mapping[str, Any]]

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        """Its lines of a kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def is_done(self) -> bool:
        """Whether it came to its end."""
        return bool(self.of("done"))

    @property
    def steps(self) -> list[str]:
        """The steps that it began."""
        return [str(line["at"]) for line in self.of("step")]

    @property
    def step(self) -> str:
        """The last step that it began."""
        return self.steps[-1] if self.steps else "starting"

    def __str__(self) -> str:
        start = next(iter(self.of("start")), None)
        if start is None:
            return f"rank {self.number}"
        return f"rank {self.number} (machine {start['machine']}, {start['host']}, pid {start['pid']})"


def ranks_of(reports: Sequence[Mapping[str, Any]]) -> list[Rank]:
    """The ranks of all machines, in order.

    Args:
        reports: the result of `run_ranks` of each machine.
    """
    entries = [entry for report in reports for entry in report["ranks"]]
    return sorted((Rank(entry["rank"], entry["state"], entry["lines"]) for entry in entries),
                  key=lambda rank: rank.number)  # fmt: skip


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests counts it (its doc/PERFORMANCE.md)."""
    if collective == "all-reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all-gather", "reduce-scatter", "all-to-all"):
        return (ranks - 1) / ranks
    return 1.0


def network_checks(reports: Sequence[Mapping[str, Any]], timeout: float, quick: bool) -> list[Check]:
    """The checks of the ranks.

    Args:
        reports: the result of `run_ranks` of each machine.
        timeout: seconds that a step could take.
        quick: whether nothing was measured.
    """
    ranks = ranks_of(reports)
    output = "\n".join(str(report["output"]) for report in reports)
    checks = [_progress(ranks, output, timeout), *_nccl(ranks), *(_collective(name, ranks) for name in COLLECTIVES)]
    if quick:
        return checks
    checks.append(_slow_ranks(ranks))
    for group, scope in SCOPES.items():
        if not (checks[0].passed or _lines(ranks, "links", group)):
            continue
        checks.append(_slow_links(ranks, group, scope))
        checks += _bandwidths(ranks, group, scope)
    return checks


# -- ranks that do not come to their end -------------------------------------------------------------------------------


def _progress(ranks: Sequence[Rank], output: str, timeout: float) -> Check:
    """Whether all ranks came to their end; else the rank that is to blame, the surest sign first."""
    name, late = "ranks", [rank for rank in ranks if not rank.is_done]
    if not late:
        return Check(name, True, f"all {len(ranks)} joined and came to their end")
    if stopped := [rank for rank in late if rank.state == "stopped"]:
        value = f"{_names(stopped)} is stopped in {stopped[0].step!r} (SIGSTOP, or a debugger)"
        return Check(name, False, value, "continue it with `kill -CONT PID`, or find out what stops processes there")
    if absent := [rank for rank in late if not rank.lines]:
        last = next((line.strip() for line in reversed(output.splitlines()) if "Error" in line), "")
        value = f"{_names(absent)} did not start within {timeout:g} s{': ' if last else ''}{last[:300]}"
        return Check(name, False, value, "see that torch can be imported there, or raise --timeout")
    ended = [rank for rank in late if rank.state == "ended" and not rank.of("error")]
    # The launcher terminates the others.
    if dead := [rank for rank in ended if not rank.of("terminated")] or ended:
        value = f"{_names(dead)} was killed in {dead[0].step!r}"
        return Check(name, False, value, "look for the system's out-of-memory killer in `dmesg`, and for a crash")
    least, most = min(len(rank.steps) for rank in late), max(len(rank.steps) for rank in ranks)
    if least < most and (behind := [rank for rank in late if len(rank.steps) == least and not rank.of("error")]):
        value = f"{_names(behind)} has not left {behind[0].step!r} in {timeout:g} s, and the others have"
        return Check(name, False, value, "see what that process does (`py-spy dump --pid PID`), and its machine's load")
    if errors := [(rank, line) for rank in late for line in rank.of("error")]:
        rank, line = errors[0]
        value = f"{rank} in {line['at']!r}: {line['error'][:400]}"
        return Check(name, False, value.replace("\n", " "), "see the checks above, then NCCL_DEBUG=INFO or "
                     "TORCH_CPP_LOG_LEVEL=INFO for the library's own words")  # fmt: skip
    value = f"all ranks have been in {late[0].step!r} for {timeout:g} s"
    return Check(name, False, value, _LIBRARIES)


def _names(ranks: Sequence[Rank]) -> str:
    return ", ".join(map(str, ranks))


def _nccl(ranks: Sequence[Rank]) -> list[Check]:
    """Whether all ranks have one version of NCCL; nothing on a CPU."""
    by_rank = {rank: str(line["nccl"]) for rank in ranks for line in rank.of("start") if line["nccl"]}
    versions = list(by_rank.values())
    if not versions:
        return []
    usual = max(versions, key=versions.count)
    faults = [f"{rank} has {version}, and others {usual}" for rank, version in by_rank.items() if version != usual]
    return [judged("NCCL", faults, usual, "install the same torch and nvidia-nccl on all machines")]


# -- values ------------------------------------------------------------------------------------------------------------


def _collective(name: str, ranks: Sequence[Rank]) -> Check:
    """Whether a collective was right by value on every rank, in every group."""
    lines = [(rank, line) for rank in ranks for line in rank.of("check") if line["collective"] == name]
    wrong = [(rank, line) for rank, line in lines if line["fault"]]
    if wrong:
        rank, line = wrong[0]
        group = f"{line['group']} of ranks {', '.join(map(str, line['ranks']))}"
        others = sorted({other.number for other, _ in wrong} - {rank.number})
        more = f"; also wrong on ranks {', '.join(map(str, others))}" if others else ""
        size = f", {line['count']} elements" if line["count"] else ""
        return Check(name, False, f"{rank} in {group}{size}: {line['fault']}{more}", _LIBRARIES)
    if any(not rank.is_done for rank in ranks):
        stuck = [rank for rank in ranks if rank.step.startswith(f"{name} in ") and not rank.is_done]
        if stuck:
            return Check(name, False, f"did not return on {_names(stuck)}, in {stuck[0].step!r}", _LIBRARIES)
        return Check(name, None, "the ranks did not come to their end") if not lines else _right(name, lines)
    return _right(name, lines)


def _right(name: str, lines: Sequence[tuple[Rank, Mapping[str, Any]]]) -> Check:
    groups = dict.fromkeys(f"{line['group']} of {len(line['ranks'])}" for _, line in lines)
    outcome = "held every rank back" if name == "barrier" else "every element right"
    return Check(name, True, f"{outcome} in {', '.join(groups)}")


# -- speeds ------------------------------------------------------------------------------------------------------------


def _lines(ranks: Sequence[Rank], kind: str, group: str) -> list[Mapping[str, Any]]:
    return [line for rank in ranks for line in rank.of(kind) if line["group"] == group]


def _slow_ranks(ranks: Sequence[Rank]) -> Check:
    """Ranks that do much less work than the others in the same time."""
    rates = {rank: rank.of("compute")[0] for rank in ranks if rank.of("compute")}
    if not rates:
        return Check("rank speed", None, "the ranks did not come to their end")
    median = statistics.median(line["rate"] for line in rates.values())
    faults = [
        f"{rank} does {line['rate'] / median:.2f} of the median's work" for rank, line in rates.items() if line["slow"]
    ]
    shares = [line["rate"] / median for line in rates.values()]
    remedy = (
        "look there for other programs, a low priority (`ps -o ni`), a CPU limit of the container, or a GPU that is "
        "too hot (`nvidia-smi -q -d PERFORMANCE`)"
    )
    return judged("rank speed", faults, f"{min(shares):.2f} to {max(shares):.2f} of the median's work", remedy)


def _slow_links(ranks: Sequence[Rank], group: str, scope: str) -> Check:
    """Links that are much slower than the median; one rank if all of its links are."""
    name = f"links {scope}"
    lines = _lines(ranks, "links", group)
    links = [link for line in lines for link in line["links"]]
    if not links:
        many = "one machine" if group == "between" else "one rank on each machine"
        return Check(name, None, f"{many}: there is no other")
    slow = [link for link in links if link[3]]
    rates = [link[2] for link in links]
    value = f"{min(rates) / 1e9:.3g} to {max(rates) / 1e9:.3g} GB/s"
    by_number = {rank.number: rank for rank in ranks}
    faults = [f"{by_number[sender]} to {by_number[receiver]}: {rate / 1e9:.3g} GB/s"
              for sender, receiver, rate, _ in slow]  # fmt: skip
    blamed = [rank for rank in ranks if _all_of(rank.number, links, slow)]
    if blamed and len(slow) > 1:
        faults = [f"all links of {_names(blamed)} are slow: {min(link[2] for link in slow) / 1e9:.3g} GB/s"]
    if faults:
        faults.append(f"the median is {statistics.median(rates) / 1e9:.3g} GB/s")
    remedy = (
        "look at cable, switch port and speed of the network card (`ethtool`), at its load, and at GLOO_SOCKET_IFNAME "
        "or NCCL_SOCKET_IFNAME, which choose it; inside a machine at the GPUs' slots (`nvidia-smi topo -m`)"
    )
    return judged(name, faults, value, remedy)


def _all_of(rank: int, links: Sequence[Sequence[Any]], slow: Sequence[Sequence[Any]]) -> bool:
    """Whether a rank's links are slow, all that it sends on or all that it receives on, and no others are."""
    for end in (0, 1):
        own = [link for link in links if link[end] == rank]
        if len(own) > 1 and all(link in slow for link in own) and all(rank in link[:2] for link in slow):
            return True
    return False


def bandwidth_rows(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """Each measured bandwidth, of the slowest group: `scope, collective, ranks, bytes, seconds, algbw, busbw`.

    Bandwidths are in bytes per second.
    """
    slowest: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for rank in ranks:
        for line in rank.of("bandwidth"):
            key = (line["group"], line["collective"], line["bytes"])
            if key not in slowest or line["seconds"] > slowest[key]["seconds"]:
                slowest[key] = line
    rows = []
    for (group, collective, size), line in slowest.items():
        rate = size / line["seconds"]
        rows.append({"scope": SCOPES[group], "collective": collective, "ranks": len(line["ranks"]), "bytes": size,
                     "seconds": line["seconds"], "algbw": rate,
                     "busbw": rate * bus_factor(collective, len(line["ranks"]))})  # fmt: skip
    return rows


def _bandwidths(ranks: Sequence[Rank], group: str, scope: str) -> list[Check]:
    rows = [row for row in bandwidth_rows(ranks) if row["scope"] == scope]
    checks = []
    for name in TIMED:
        cells = [f"{_size(row['bytes'])} {row['busbw'] / 1e9:.3g}" for row in rows if row["collective"] == name]
        if cells:
            checks.append(Check(f"{name} {scope}", True, f"GB/s of bus bandwidth: {', '.join(cells)}"))
    return checks


def _size(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 - 2**10 else f"{size / 2**10:.0f} KiB"
