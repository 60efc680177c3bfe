"""The Train page's list of GPUs, on a machine that has some (a stand-in: none is here)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from app.form_choices import GpuChoice
from tests.made_runs import made_run
from ui.context import Here
from ui.pages import train


def gpus(*holders: str) -> list[GpuChoice]:
    return [GpuChoice(number, "H100", 80 << 30, 79 << 30, holder) for number, holder in enumerate(holders)]


def opened(page: Any, **query: str) -> Any:
    request: Any = SimpleNamespace(query_params=query)
    return page.prefill(request)[train._DEVICES]


def test_who_holds_a_gpu_is_told_when_the_page_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "gpu_choices", lambda: gpus("", ""))
    here = Here(tmp_path / "runs", (tmp_path,), tmp_path / "uploads", False)
    with gr.Blocks():
        page = train._Form(here)
        page.lay_out()
    assert opened(page)["value"] == ["0", "1"]
    monkeypatch.setattr(train, "gpu_choices", lambda: gpus("", "other-run"))
    shown = opened(page)
    assert shown["value"] == ["0"], "a GPU that is held is not ticked"
    assert shown["choices"][1][0].endswith("held by other-run")
    made_run(tmp_path / "runs", "mine", strategy="single", world=1, gpus="1")
    assert opened(page, clone="mine")["value"] == ["1"], "a clone keeps what its run chose"
