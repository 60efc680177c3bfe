"""What the reports of ranks mean, and who is named; reports of real ranks are in tests/faults/test_doctor.py."""

from __future__ import annotations

from typing import Any

import pytest

from app.doctor.check import Check
from app.doctor.verdict import COLLECTIVES, bandwidth_rows, bus_factor, network_checks, ranks_of


def start(rank: int) -> dict[str, Any]:
    return {"kind": "start", "host": f"node{rank}", "pid": 100 + rank, "machine": rank, "local_rank": 0, "nccl": None}


def right(rank: int, *names: str) -> list[dict[str, Any]]:
    lines = [start(rank)]
    for name in names or COLLECTIVES:
        lines.append({"kind": "step", "at": f"{name} in world"})
        lines.append(
            {"kind": "check", "collective": name, "group": "world", "ranks": [0, 1, 2], "count": 9, "fault": None}
        )
    return lines


def done(rank: int, *more: dict[str, Any]) -> list[dict[str, Any]]:
    return [*right(rank), {"kind": "compute", "rate": 100.0, "slow": False}, *more, {"kind": "done"}]


def judge(*lines: list[dict[str, Any]], states: dict[int, str] | None = None, output: str = "") -> dict[str, Check]:
    reports = [
        {"ranks": [{"rank": rank, "lines": written, "state": (states or {}).get(rank, "ended")}], "output": output}
        for rank, written in enumerate(lines)
    ]
    checks = network_checks(reports, timeout=30, quick=False)
    assert all(bool(check.remedy) == (check.passed is False) for check in checks)
    return {check.name: check for check in checks}


def test_sound_ranks() -> None:
    checks = judge(done(0), done(1), done(2))
    assert [checks[name].passed for name in ("ranks", *COLLECTIVES, "rank speed")] == [True] * 12


@pytest.mark.parametrize(
    ("last", "state", "sentence"),
    [
        (right(1, "all-reduce"), "stopped", "rank 1 (machine 1, node1, pid 101) is stopped in 'all-reduce in world'"),
        ([], "ended", "rank 1 did not start within 30 s: ImportError: no torch"),
        (right(1, "all-reduce"), "ended", "rank 1 (machine 1, node1, pid 101) was killed in 'all-reduce in world'"),
        (right(1, "all-reduce"), "alive", "rank 1 (machine 1, node1, pid 101) has not left 'all-reduce in world'"),
    ],
)
def test_the_rank_that_hangs_is_named(last: list[dict[str, Any]], state: str, sentence: str) -> None:
    waiting = right(0, "all-reduce", "all-gather")
    checks = judge(waiting, last, right(2, "all-reduce", "all-gather"),
                   states={0: "alive", 1: state, 2: "alive"}, output="x\nImportError: no torch\n")  # fmt: skip
    assert checks["ranks"].passed is False
    assert checks["ranks"].value.startswith(sentence)
    assert checks["barrier"].passed is None


def test_ranks_that_the_launcher_terminated_are_not_to_blame() -> None:
    last, terminated = right(1, "all-reduce"), [*right(0, "all-reduce"), {"kind": "terminated"}]
    assert (
        judge(terminated, last)["ranks"].value
        == "rank 1 (machine 1, node1, pid 101) was killed in 'all-reduce in world'"
    )
    assert judge(terminated, terminated)["ranks"].value.startswith("rank 0 (machine 0, node0, pid 100), rank 1 (")


def test_all_ranks_in_one_step_and_the_words_of_a_library() -> None:
    lines = [right(rank, "reduce") for rank in range(3)]
    alive = {0: "alive", 1: "alive", 2: "alive"}
    checks = judge(*lines, states=alive)
    assert checks["ranks"].value == "all ranks have been in 'reduce in world' for 30 s"
    assert checks["reduce"].passed is False
    lines[0].append({"kind": "error", "at": "reduce in world", "error": "DistBackendError: NCCL error\nsystem error"})
    assert judge(*lines, states=alive)["ranks"].value == (
        "rank 0 (machine 0, node0, pid 100) in 'reduce in world': DistBackendError: NCCL error system error"
    )


def test_another_nccl_is_named() -> None:
    lines = [done(rank) for rank in range(3)]
    assert "NCCL" not in judge(*lines)
    for rank in range(3):
        lines[rank][0] = {**start(rank), "nccl": "2.27.5" if rank else "2.26.2"}
    assert judge(*lines)["NCCL"].value == "rank 0 (machine 0, node0, pid 100) has 2.26.2, and others 2.27.5"


def test_a_wrong_element_is_named_with_rank_and_group() -> None:
    wrong = done(2)
    wrong[2] = {**wrong[2], "fault": "element 3 is 1 and should be 2; 1 of 9 are wrong"}
    check = judge(done(0), done(1), wrong)["all-reduce"]
    assert check.value == (
        "rank 2 (machine 2, node2, pid 102) in world of ranks 0, 1, 2, 9 elements: "
        "element 3 is 1 and should be 2; 1 of 9 are wrong"
    )


def links(*slow: tuple[int, int]) -> dict[str, Any]:
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    entries = [[a, b, 1e8 if (a, b) in slow else 1e10, (a, b) in slow] for a, b in pairs]
    return {"kind": "links", "group": "between", "ranks": [0, 1, 2], "links": entries}


def test_one_slow_link_and_a_rank_whose_links_are_all_slow() -> None:
    assert judge(done(0, links()), done(1), done(2))["links between machines"].passed is True
    one = judge(done(0, links((0, 2))), done(1), done(2))["links between machines"].value
    assert one.startswith("rank 0 (machine 0, node0, pid 100) to rank 2 (machine 2, node2, pid 102): 0.1 GB/s")
    every = judge(done(0, links((2, 0), (2, 1))), done(1), done(2))["links between machines"].value
    assert every.startswith("all links of rank 2 (machine 2, node2, pid 102) are slow: 0.1 GB/s")


def test_a_slow_rank_is_named() -> None:
    slow = [{**line, "rate": 10.0, "slow": True} if line["kind"] == "compute" else line for line in done(1)]
    check = judge(done(0), slow, done(2))["rank speed"]
    assert check.value == "rank 1 (machine 1, node1, pid 101) does 0.10 of the median's work"


def test_bandwidth_is_counted_as_nccl_tests_count_it() -> None:
    """Its doc/PERFORMANCE.md: 1 MiB in 1 ms on 4 ranks; of two groups the slower counts."""
    expected = {"all-reduce": 1.5, "all-gather": 0.75, "reduce-scatter": 0.75, "all-to-all": 0.75, "broadcast": 1,
                "reduce": 1, "send/receive": 1}  # fmt: skip
    assert {name: bus_factor(name, 4) for name in expected} == expected
    line = {"kind": "bandwidth", "group": "inside", "ranks": [0, 1, 2, 3], "collective": "all-reduce", "bytes": 2**20}
    written = [done(0, {**line, "seconds": 1e-3}), done(1, {**line, "seconds": 5e-4}), done(2)]
    (row,) = bandwidth_rows(ranks_of([{"ranks": [{"rank": number, "state": "ended", "lines": lines}]}
                                      for number, lines in enumerate(written)]))  # fmt: skip
    assert row["algbw"] == pytest.approx(2**20 / 1e-3)
    assert row["busbw"] == pytest.approx(1.5 * 2**20 / 1e-3)
    value = judge(*written)["all-reduce inside a machine"].value
    assert value == "GB/s of bus bandwidth: 1 MiB 1.57"
