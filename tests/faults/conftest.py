"""The run that met no fault, once for each strategy, and the table of those that others met."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.detached import detached, ended, inside
from tests.faults.oracle import OPTIONS
from tests.faults.table import Noted, markdown, plain
from trainers.run.folder import RunFolder

Undisturbed = Callable[..., RunFolder]
Note = Callable[[str, str], Noted]
_NOTED = pytest.StashKey[list[Noted]]()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """`undisturbed(strategy, **changes)`: a run on two ranks from its start to its end."""
    home = tmp_path_factory.mktemp("undisturbed")

    @functools.cache
    def made(strategy: str, **changes: Any) -> RunFolder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", inside(home)["XDG_STATE_HOME"])
            name = "-".join([strategy, *(f"{key}-{value}" for key, value in changes.items())])
            run = detached(home, name, 2, strategy=strategy, **{**OPTIONS, **changes})
            assert ended(run)["state"] == "done"
        return run

    return made


@pytest.fixture(autouse=True)
def _as_on_two_cores(two_cores: None) -> None:
    """Every run here has two CPU slots."""


@pytest.fixture
def faulty() -> dict[str, str]:
    """The variables that let ranks read their fault."""
    root = Path(__file__).resolve().parents[2]
    return {"PYTHONPATH": f"{root}:{Path(__file__).resolve().parent / 'inject'}"}


@pytest.fixture
def noted(request: pytest.FixtureRequest) -> Note:
    """`noted(fault, strategy)`: a row of the table."""

    def begin(fault: str, strategy: str) -> Noted:
        one = Noted(fault, strategy)
        request.config.stash.setdefault(_NOTED, []).append(one)
        return one

    return begin


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if injected := [one for one in config.stash.get(_NOTED, []) if one.moments]:
        terminalreporter.section("faults")
        for line in plain(injected):
            terminalreporter.line(line)
        if "FAULT_TABLE" in os.environ:
            command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
            Path(os.environ["FAULT_TABLE"]).write_text(markdown(injected, command))
