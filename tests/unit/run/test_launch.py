from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from trainers.run.launch import gc_paused


@pytest.fixture(autouse=True)
def _thaw() -> Iterator[None]:
    yield
    gc.unfreeze()


def collections_in(context: AbstractContextManager[None]) -> tuple[int, bool]:
    """Number of collections while objects are made in a context, and whether later ones go through the objects."""
    phases: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        with context:
            objects: list[list[int]] = [[] for _ in range(10_000)]
    finally:
        gc.callbacks.remove(note)
    return phases.count("start"), any(item is objects for item in gc.get_objects())


def test_the_collector_pauses_and_skips_what_was_made_meanwhile() -> None:
    assert collections_in(gc_paused()) == (0, False)
    assert gc.isenabled()
    collections, later = collections_in(contextlib.nullcontext())  # the control
    assert collections > 0
    assert later


def test_the_collector_runs_again_after_a_failed_import() -> None:
    with pytest.raises(ImportError), gc_paused():
        raise ImportError
    assert gc.isenabled()
