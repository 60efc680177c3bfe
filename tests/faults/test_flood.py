"""A rank that floods the log: every line is there, the page's reading stays quick and small, the run is exact."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path

from app.runs.log import CHUNK_BYTES, read_log
from tests.detached import detached, ended
from tests.faults.conftest import Note, Undisturbed
from tests.faults.oracle import INTERVAL, OPTIONS, exact
from trainers.run.folder import RunFolder

LINES = 100_000


def texts(run: RunFolder) -> list[bytes]:
    """What rank 1 printed, without time and rank."""
    lines = run.log.read_bytes().split(b"\n")
    assert lines.pop() == b"", "the last line has an end"
    parts = [line.partition(b" [rank 1] ") for line in lines]
    return [text for _, found, text in parts if found]


def test_a_log_flood(home: Path, undisturbed: Undisturbed, faulty: dict[str, str], noted: Note) -> None:
    whole, fault = undisturbed("ddp"), noted("log flood", "ddp")
    run = detached(home, "mine", 2, {**faulty, "FAULT": f"flood:1:{INTERVAL + 2}"}, strategy="ddp", **OPTIONS)
    ended(run)
    fault.at()
    exact(run, whole, replays=0)
    said = texts(run)
    begin, end = said.index(b"the flood begins"), said.index(b"the flood ends")
    flood = said[begin + 1 : end]
    assert [line for line in flood if line.startswith(b"flood line ")] == [b"flood line %d" % n for n in range(LINES)]
    assert sum(line.count(b"x") for line in flood if line and not line.strip(b"x")) == 2**20, "the long line, in pieces"
    assert sum(b"red" in line for line in flood) == 1000
    assert b"100%" in flood, "of a line drawn over itself the last state"
    assert max(map(len, flood)) <= 2**18
    reads_quickly(run)
    fault.harmless()


def reads_quickly(run: RunFolder) -> None:
    size = run.log.stat().st_size
    tracemalloc.start()
    try:
        for asked in ({}, {"who": "1"}, {"after": 0}, {"before": size // 2}, {"after": size // 2, "follow": True}):
            began = time.perf_counter()
            assert read_log(run, asked)["size"] == size
            assert time.perf_counter() - began < 2
        assert tracemalloc.get_traced_memory()[1] < 64 * CHUNK_BYTES < size
    finally:
        tracemalloc.stop()
