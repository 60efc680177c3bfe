"""The cards' panel while looks at the estimate and changes of the form cross each other."""

from __future__ import annotations

from typing import Any

import gradio as gr
import pytest

from app.plan.estimate import Row
from app.services import strategy_cards as service
from app.services.form import preview
from trainers.strategy.mesh import MeshSizes
from ui.pages.strategy_parts import StrategyPicker


@pytest.fixture
def picker(monkeypatch: pytest.MonkeyPatch) -> StrategyPicker:
    """Its form is one field, `max_length`; estimates are there at once."""
    estimates = service._Estimates()
    monkeypatch.setattr(service, "_ESTIMATES", estimates)
    ddp = Row("ddp", MeshSizes(), 8, {"weights": 1.0}, fits=True, seconds=1.0)
    monkeypatch.setattr(estimates, "start", lambda key: estimates._keep(key, [ddp]))
    with gr.Blocks():
        return StrategyPicker(
            lambda length, slurm=None: preview(
                {"max_length": length}, "tiny-lora", None, None, None if slurm else "2", slurm=slurm
            )
        )


def is_active(timer: Any) -> bool:
    return bool(timer.active)


def test_a_look_shows_the_estimate_of_its_job(picker: StrategyPicker) -> None:
    _, key, timer = picker.refresh("", "64")
    assert is_active(timer)
    panel, _, timer = picker.look(key)
    assert 'data-state="estimated"' in panel
    assert not is_active(timer)


def test_a_job_that_is_no_longer_known_says_so(picker: StrategyPicker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MAX_KEPT", 2)
    _, first, _ = picker.refresh("", "64")
    for length in (65, 66):
        picker.refresh("", str(length))
    for key in (first, "", "no such key"):
        panel, _, timer = picker.look(key)
        assert "reload the page" in panel
        assert not is_active(timer)


def test_a_strategy_is_picked_for_nodes_of_which_no_memory_is_known(picker: StrategyPicker) -> None:
    _, local, _ = picker.refresh("", "64")
    panel, key, timer = picker.refresh(local, "64", {"nodes": "2", "gpus_per_node": "4"})
    assert not is_active(timer)
    assert 'value="hsdp"' in panel
    assert "<code>--gpu_memory</code>" in panel
    assert "ts-bar" not in panel, "a bar would show the memory of this machine"
    assert "cannot run there" in panel
    panel, _, _ = picker.look(key)
    assert 'data-state="unknown"' in panel, "no look estimates it"
    panel, _, _ = picker.refresh(key, "64")
    assert "ts-bar" in panel


def test_no_component_keeps_a_connection_open(picker: StrategyPicker) -> None:
    """`gr.State` does, one for each page: with the sixth tab all of them would stop."""
    assert not [block for block in picker.panel.parent.children if isinstance(block, gr.State)]
