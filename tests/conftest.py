"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import shared
from tests.detached import processes


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of several processes that test side by side
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    else:
        shared.open_folder()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shared.remove_folder()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unit tests are quick unless they say otherwise; the others launch whole runs, and are slow unless they do."""
    for item in items:
        if "unit" not in item.path.parts and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _own_state_and_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Locks, queue, list of runs and tokenised data of their own: the user and earlier tests change nothing."""
    cache = tmp_path_factory.mktemp("cache")
    compiled = _user_cache() / "torch_extensions"
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "tunesmith").mkdir()
    (cache / "tunesmith" / "torch_extensions").symlink_to(compiled)  # they take a minute to make
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "tunesmith"


@pytest.fixture(scope="module")
def two_cores() -> Iterator[None]:
    """Two CPU slots, whatever the machine has; children inherit it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own folder, with own locks and queue; what is left of its runs at the end is killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path
    for process in processes(tmp_path):
        process.kill()
