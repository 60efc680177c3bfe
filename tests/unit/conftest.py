"""What the unit tests share."""

from __future__ import annotations

import multiprocessing
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import forked

# Cores are shared: how long an example takes says nothing.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder and an own list of runs, no GPUs, a wide terminal."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


# Ranks that a test starts by `multiprocessing` are forked from a process that has imported these.
multiprocessing.set_forkserver_preload(
    ["torch.distributed", "transformers.models.llama.modeling_llama", "trainers.build"]
)


# Of each module: a fixture of the session would stay in force for the tests of other folders that come after.
@pytest.fixture(scope="module", autouse=True)
def _programs_without_their_imports() -> Iterator[None]:
    """Checks, counts and exports that a test asks for are forked from a process that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked.Popen)
        yield


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are started as a user starts them."""
    monkeypatch.setenv(forked.BY_HAND, "1")
