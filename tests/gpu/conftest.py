"""These tests need a GPU, and fail, never skipped, where there is none: `python -m pytest tests/gpu`."""

from __future__ import annotations

import pytest
import torch


def pytest_sessionstart() -> None:
    """Refuses a machine on which nothing here could be shown."""
    if not torch.cuda.is_available():
        raise pytest.UsageError("tests/gpu needs an NVIDIA GPU that torch can use, and there is none")
