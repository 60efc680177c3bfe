"""The Data page without a browser."""

from __future__ import annotations

from typing import Any

import gradio as gr
import pytest

from ui.pages import data

MIX = "/data/mix.yaml"


@pytest.mark.parametrize(
    ("preset", "mix", "dataset", "field"),
    [
        ("tiny-lora", MIX, "embedded", ""),
        ("tiny-lora", "", "", "embedded"),
        ("tiny-lora", "none", "", "embedded"),
        ("tiny-lora", MIX, "mine.jsonl", None),
        ("tiny-lora", "", "mine.jsonl", None),
        ("", MIX, "mine.jsonl", None),
        ("no-such-preset", MIX, "embedded", None),
        ([], {}, None, None),
        (True, MIX, "embedded", None),
    ],
)
def test_a_mix_takes_the_place_of_the_preset_s_own_data_alone(
    preset: Any, mix: Any, dataset: Any, field: str | None
) -> None:
    assert data._Page.follow_mix(None, preset, mix, dataset) == (gr.skip() if field is None else field)  # type: ignore[arg-type]
