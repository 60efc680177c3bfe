"""`make gpu` on a machine without a GPU: the whole program in small, and what it says of what it cannot show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_memory, gpu_proof, gpu_verified
from benchmarks.gpu_proof import FAILED, NOT_RUN, PASSED, Part
from tests.launching import ROOT

MODULES = {"PyYAML": "yaml", "nvidia-ml-py": "pynvml"}
"""Where the name of a package is not that of its module."""
NOT_IMPORTED = {"datasets", "trl", "httpx"}
"""For data and templates from the Hub alone, and for a server that samples."""


def test_without_a_gpu_it_says_so_in_a_line() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = ["make", "--silent", "gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stdout == ""
    first, *more = done.stderr.splitlines()
    assert first.startswith("make gpu: no NVIDIA GPU that torch of")
    assert all("Error 2" in line for line in more), "make's own"


def part_of(code: str, seconds: float = 60, **more: Any) -> Part:
    """A part that runs some Python, told where its results go."""
    return Part("part", seconds, lambda results, limit: ["-c", code, str(results)], gpu_proof.judge_tests, **more)


def test_a_part_that_lacks_a_package_is_not_run(tmp_path: Path) -> None:
    entry = gpu_proof.run_part(part_of("", needs=("no_such_package",)), tmp_path, 60)
    assert (entry["outcome"], entry["reason"]) == (NOT_RUN, "needs no_such_package")
    assert gpu_proof.run_part(part_of(""), tmp_path, 0.5)["reason"] == "no time left"


def test_a_part_that_hangs_is_ended_with_what_it_had_shown(tmp_path: Path) -> None:
    code = """
import json, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
tests = [{"name": "first", "outcome": "passed"}]
pathlib.Path(sys.argv[1]).write_text(json.dumps({"tests": tests, "child": child.pid}))
child.wait()
"""
    entry = gpu_proof.run_part(part_of(code, seconds=5), tmp_path, 60)
    assert entry["outcome"] == FAILED
    assert entry["reason"].startswith("stopped after 5 s")
    assert entry["results"]["tests"][0]["name"] == "first"
    stat = Path(f"/proc/{entry['results']['child']}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_part_that_crashes_shows_its_last_words(tmp_path: Path) -> None:
    entry = gpu_proof.run_part(part_of("raise SystemExit('out of luck')"), tmp_path, 60)
    assert (entry["outcome"], entry["results"]) == (FAILED, None)
    assert "out of luck" in entry["output"]


def test_a_skipped_test_is_no_success() -> None:
    def tests(*outcomes: str) -> dict[str, Any]:
        return {"tests": [{"name": f"test {at}", "outcome": outcome} for at, outcome in enumerate(outcomes)]}

    assert gpu_proof.judge_tests(0, tests(PASSED, NOT_RUN)) == (PASSED, None)
    assert gpu_proof.judge_tests(0, tests(NOT_RUN))[0] == FAILED
    assert gpu_proof.judge_tests(1, tests(PASSED, FAILED)) == (FAILED, "1 of 2 failed: test 1")
    assert gpu_proof.judge_tests(2, None)[0] == FAILED


def test_a_proof_without_a_verdict_is_no_success() -> None:
    def rows(*passed: bool | None) -> dict[str, Any]:
        return {"rows": [{"strategy": "single", "passed": one, "reason": "apart"} for one in passed]}

    assert gpu_proof.judge_prove(0, rows(True, None)) == (PASSED, None)
    assert gpu_proof.judge_prove(1, rows(None))[0] == FAILED
    assert gpu_proof.judge_prove(1, rows(True, False)) == (FAILED, "single: apart")
    assert gpu_proof.judge_prove(2, None)[0] == FAILED


def test_rates_fail_with_tunesmith_alone() -> None:
    def cases(*causes: str | None, **others: str) -> dict[str, Any]:
        tools = [{"tunesmith": {"failed": cause} if cause else {}, **others} for cause in causes]
        return {"cases": [{"name": f"case {at}", "tools": one} for at, one in enumerate(tools)]}

    excused = cases(None, "no time left", "exit status 1: mixed_precision=fp8 needs torchao, which is not installed")
    assert gpu_proof.judge_rates(0, excused) == (PASSED, None)
    assert gpu_proof.judge_rates(0, cases(None, "out of memory")) == (FAILED, "case 1: out of memory")
    assert gpu_proof.judge_rates(0, cases("no time left")) == (FAILED, "nothing was measured")


@pytest.mark.parametrize(("planned", "fits"), [(9.71, True), (9.69, False), (10.69, True), (10.71, False)])
def test_a_plan_is_held_to_what_was_reserved(planned: float, fits: bool) -> None:
    assert (gpu_memory.verdict(planned, 10.0) is None) == fits


def test_what_every_part_needs_is_what_the_project_depends_on() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=]", line)[0] for line in listed} - NOT_IMPORTED
    assert {MODULES.get(name, name) for name in names} == set(gpu_proof.REQUIRED)


# -- docs/verified.md --------------------------------------------------------------------------------------------------


def test_the_page_is_the_newest_result() -> None:
    text, result = gpu_verified.PAGE.read_text(encoding="utf-8"), gpu_verified.newest()
    assert gpu_verified.page(text, result) == text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert ("Nothing has **run on a GPU yet**" in readme) == (result is None)


def test_what_is_claimed_is_tested() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "tests" / "gpu").glob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    parts = {part.name for part in gpu_proof.parts(False)}
    named = [name for names in gpu_verified.CLAIMS.values() for name in names]
    assert set(named) == there | (parts - {"tests"})
    assert len(named) == len(set(named))


def test_what_failed_or_was_not_run_is_no_yes() -> None:
    """Each cell says what the result does; a page that was made without one says so."""
    kernel = "test_kernels.py::test_a_kernel[{}]"

    def cell(*outcomes: str, claimed: tuple[str, ...] = ("test_a_kernel",)) -> str:
        tests = [{"name": kernel.format(at), "outcome": outcome, "reason": "needs torchao"}
                 for at, outcome in enumerate(outcomes)]  # fmt: skip
        parts = [{"name": "tests", "results": {"tests": tests}}, {"name": "prove", "outcome": PASSED}]
        return gpu_verified.cell({"parts": parts}, claimed)

    assert cell(PASSED, PASSED) == "yes"
    assert cell(PASSED, FAILED) == "**failed**: 1 of 2"
    assert cell(PASSED, NOT_RUN) == "in part; not run: needs torchao"
    assert cell(NOT_RUN) == "not run: needs torchao"
    assert cell() == "not yet"
    assert cell(PASSED, claimed=("test_a_kernel", "test_another")) == "in part"
    assert cell(claimed=("prove",)) == "yes"
    assert cell(claimed=("memory",)) == "not yet"
    assert "| `single`, bf16, packed, full: the losses of fp32 within rounding | not yet |" in gpu_verified.section(
        None
    )
