"""What the unit tests share."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

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
