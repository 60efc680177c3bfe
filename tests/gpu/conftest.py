"""`python -m pytest tests/gpu` needs a GPU, and fails where there is none; `--on_cpu` runs what a CPU can.

`--results FILE` writes name, outcome and reason of each test, after each. What lacks a package is skipped by its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.launches import Launches

OUTCOMES = {"passed": "passed", "failed": "failed", "skipped": "not run"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on_cpu", action="store_true", help="run on the CPU the tests that can, to test the tests")
    parser.addoption("--results", type=Path, metavar="FILE", help="write the outcome of each test as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "also_on_cpu: what it tests exists on a CPU too")
    config.addinivalue_line("markers", "needs(package): is skipped without it")
    config.addinivalue_line("markers", "gpus(count): is skipped where there are fewer")
    config.addinivalue_line("markers", "runs(*names): of tests/gpu/launches.py, which it compares")
    if file := config.getoption("--results"):
        config.pluginmanager.register(_Results(file))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuses a machine on which nothing here could be shown."""
    if not session.config.getoption("--on_cpu") and not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu needs an NVIDIA GPU that torch can use, and there is none")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if config.getoption("--on_cpu") and item.get_closest_marker("also_on_cpu") is None:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        for mark in item.iter_markers("needs"):
            if find_spec(mark.args[0]) is None:
                item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]}"))
        for mark in item.iter_markers("gpus"):
            if torch.cuda.device_count() < mark.args[0]:
                item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]} GPUs"))


@pytest.fixture(scope="session", autouse=True)
def launched(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, _own_state_and_cache: None
) -> Iterator[Launches]:
    """The runs of all tests that are not skipped; they go on while other tests use the GPU."""
    mine = [item for item in request.session.items if item.get_closest_marker("skip") is None]
    names = dict.fromkeys(name for item in mine for mark in item.iter_markers("runs") for name in mark.args)
    at_once = 0 if request.config.getoption("--on_cpu") else max(2, min(8, (os.cpu_count() or 2) // 2))
    launches = Launches(tmp_path_factory.mktemp("runs"), names, at_once)
    yield launches
    launches.close()


class _Results:
    """Writes the outcomes so far after each test, so that they are there if the time runs out."""

    def __init__(self, file: Path):
        self.file, self.tests = file, dict[str, dict[str, Any]]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("/")[2]
        test = self.tests.setdefault(name, {"name": name, "outcome": "passed", "reason": None, "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.outcome != "passed":
            test["outcome"] = OUTCOMES[report.outcome]
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-600:]
            test["reason"] = str(reason).removeprefix("Skipped: ")
        self.file.write_text(json.dumps({"tests": list(self.tests.values())}, indent=1), encoding="utf-8")
