"""The fault suite's table: what a fault cost is read from the log, and equal faults are one row."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tests.faults.table import Noted, cost, markdown, rows


def log(*starts: tuple[float, list[int]]) -> str:
    """Each start of the run with its first moment; a step takes a second."""
    lines = []
    for begun, steps in starts:
        said = ["run /tmp/mine", *(f"step {step} loss 1" for step in steps)]
        for number, text in enumerate(said):
            lines.append(
                f"{datetime.fromtimestamp(begun + number, UTC).isoformat(timespec='milliseconds')} [rank 0] {text}"
            )
    return "\n".join([*lines, "2026-11-21T00:00:00.000+00:00 [rank 1] step 99 of nothing"]) + "\n"


TWICE = log((1000, [1, 2, 3, 4, 5, 6, 7]), (1020, [6, 7, 8, 9]), (1040, [10, 11]))


def test_it_counts_from_the_fault_to_the_first_step_that_was_not_done() -> None:
    assert cost(TWICE, 1006.5) == (2, pytest.approx(1023 - 1006.5)), "step 7 still ended after the fault"
    assert cost(TWICE, 1024.5) == (0, pytest.approx(1041 - 1024.5))


def test_a_run_that_never_trained_on_has_no_time_of_recovery() -> None:
    with pytest.raises(AssertionError, match="no step beyond 11"):
        cost(TWICE, 1042.5)


def test_equal_faults_are_one_row() -> None:
    one = Noted("a kill", "ddp", [1.0], 1, 2, [10.0])
    other = Noted("a kill", "ddp", [1.0, 2.0], 2, 3, [20.0, 12.0])
    lost = Noted("a kill", "zero3", [1.0])
    assert rows([lost, one, other]) == [
        ("a kill", "ddp", "3", "3", "5", "12.0", "20.0"),
        ("a kill", "zero3", "1", "0", "0", "-", "-"),
    ]
    text = markdown([lost], "pytest tests/faults")
    assert "`pytest tests/faults`" in text
    assert "| a kill | zero3 | 1 | 0 | 0 | - | - |" in text
