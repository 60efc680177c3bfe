"""The objective's step of the Train page follows every objective, and anything else that a page may send."""

from __future__ import annotations

import gradio as gr
import pytest

from trainers.config.objectives import OBJECTIVES, OWN_OPTIONS
from ui.pages.train_objective import ObjectivePart
from ui.pages.train_parts import component


@pytest.fixture(scope="module")
def part() -> ObjectivePart:
    with gr.Blocks():
        return ObjectivePart(lambda fields: [component(field, field.default or "") for field in fields], "sft")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_only_the_options_of_the_objective_are_shown(objective: str, part: ObjectivePart) -> None:
    needs, _, *options = part.switch(objective)
    shown = [name for name, update in zip(OWN_OPTIONS, options, strict=True) if update["visible"]]
    assert sorted(shown) == sorted(OBJECTIVES[objective].options)
    assert OBJECTIVES[objective].summary in str(needs)
    assert ("beside a prompt is what rewards compare with" in str(needs)) is OBJECTIVES[objective].samples


@pytest.mark.parametrize("value", [None, 3, [], {"a": 1}, "no/such.py:Name"])
def test_anything_else_shows_none(value: object, part: ObjectivePart) -> None:
    _, _, *options = part.switch(value)
    assert not any(update["visible"] for update in options)
