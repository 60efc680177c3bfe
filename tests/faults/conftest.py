"""The run that met no fault, once for each strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.detached import detached, ended, inside
from tests.faults.oracle import OPTIONS
from trainers.run_folder import RunFolder


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunFolder]:
    """`undisturbed(strategy)`: a run on two ranks from its start to its end."""
    home = tmp_path_factory.mktemp("undisturbed")

    @functools.cache
    def made(strategy: str) -> RunFolder:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", inside(home)["XDG_STATE_HOME"])
            run = detached(home, strategy, 2, strategy=strategy, **OPTIONS)
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
