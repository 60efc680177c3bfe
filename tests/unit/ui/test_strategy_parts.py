"""The cards' panel while looks at the estimate and changes of the form cross each other."""

from __future__ import annotations

from typing import Any

import gradio as gr
import pytest

from app.plan.estimate import Row
from app.services import strategy_cards as service
from app.services.form import preview
from trainers.strategy.mesh import MeshSizes
from ui.pages import strategy_parts
from ui.pages.strategy_parts import ShownJob, StrategyPicker


@pytest.fixture
def picker(monkeypatch: pytest.MonkeyPatch) -> StrategyPicker:
    """Its form is one field, `max_length`; estimates are there at once."""
    estimates = service._Estimates()
    monkeypatch.setattr(service, "_ESTIMATES", estimates)
    ddp = Row("ddp", MeshSizes(), 8, {"weights": 1.0}, fits=True, seconds=1.0)
    monkeypatch.setattr(estimates, "start", lambda key: estimates._keep(key, [ddp]))
    with gr.Blocks():
        return StrategyPicker(lambda length: preview({"max_length": length}, "tiny-lora", None, None, "2").job)


def is_active(timer: Any) -> bool:
    return bool(timer.active)


def test_a_look_that_a_changed_form_overtook_draws_nothing(
    picker: StrategyPicker, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = ShownJob()
    assert is_active(picker.refresh(shown, "64")[1])
    real = strategy_parts.strategy_cards

    def overtaken(key: str, estimate: bool = False) -> Any:
        cards = real(key, estimate)
        monkeypatch.setattr(strategy_parts, "strategy_cards", real)
        picker.refresh(shown, "65")
        return cards

    monkeypatch.setattr(strategy_parts, "strategy_cards", overtaken)
    assert picker.look(shown) == [gr.skip()] * 2, "the timer stays on"
    panel, timer = picker.look(shown)
    assert 'data-state="estimated"' in panel
    assert not is_active(timer)


def test_a_job_that_others_displaced_is_estimated_all_the_same(
    picker: StrategyPicker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_MAX_KEPT", 2)
    shown = ShownJob()
    picker.refresh(shown, "64")
    for length in (65, 66):
        picker.refresh(ShownJob(), str(length))
    assert service.strategy_cards(shown.key) is None
    panel, timer = picker.look(shown)
    assert 'data-state="estimated"' in panel
    assert not is_active(timer)


def test_a_page_of_a_server_that_is_gone_says_so(picker: StrategyPicker, monkeypatch: pytest.MonkeyPatch) -> None:
    panel, timer = picker.look(ShownJob())
    assert "reload the page" in panel
    assert not is_active(timer)
