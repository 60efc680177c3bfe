"""The first visit of the Train page: a demo that takes one click; later the way back to the last run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from app.launch.background import start
from app.launch.foreground import CheckBroke
from app.runs.runs import list_runs
from app.services.form import Preview
from trainers.config.mistakes import ConfigError
from ui.parts import Html, element, join, run_link

_PRESET = "tiny-lora"
_PRIVATE: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}


class Welcome:
    """The line below the title.

    Args:
        runs_dir: folder of run folders.
        preview: what a request of a script would do.
        go_to_run: the script that opens the page of a run.
    """

    def __init__(self, runs_dir: Path, preview: Callable[[object], Preview], go_to_run: str):
        self.runs_dir, self.preview = runs_dir, preview
        first = self._last_run() is None
        with gr.Row(elem_id="welcome"):
            self.text = gr.HTML(self._line(), elem_id="welcome-text", apply_default_css=False)
            self.button = gr.Button(
                "Start the two-minute demo", elem_id="demo", size="md", scale=0, min_width=220, visible=first
            )
        self.started = gr.Textbox("", visible=False, label="started demo")
        self.outputs = [self.text, self.button]
        clicked = self.button.click(
            self.start_demo, None, [*self.outputs, self.started], trigger_mode="once", concurrency_limit=1,
            concurrency_id="launch", **_PRIVATE,
        )  # fmt: skip
        clicked.then(None, self.started, None, js=go_to_run, api_visibility="private")

    def _last_run(self) -> str | None:
        return next((run.id for run in list_runs(self.runs_dir)), None)

    def _line(self) -> Html:
        last = self._last_run()
        if last:
            return element("p", join(["Your last run: ", run_link(last)]))
        offer = " A small model that ships with Tunesmith learns to write JSON and XML, on this computer."
        return element("p", join([element("b", "First time here?"), offer]))

    def greet(self) -> list[Any]:
        """The line for the runs that there are now."""
        return [self._line(), gr.Button(visible=self._last_run() is None)]

    def start_demo(self) -> Iterator[list[Any]]:
        """Starts the demo's preset as it is, whatever the form says."""
        checking = "Checking data and model; this takes some seconds ..."
        yield [_progress(checking), gr.Button("Starting ...", interactive=False), ""]
        try:
            preview = self.preview({"preset": _PRESET})
            if preview.job is None:
                raise ConfigError(preview.mistakes)
            start(preview.job)
        except (ConfigError, CheckBroke) as error:
            yield [_progress(str(error)), gr.Button("Start the two-minute demo", interactive=True), ""]
        else:
            run_id = preview.job.run.id
            yield [_progress(f"Started {run_id}; opening its page ..."), gr.Button("Started"), run_id]


def _progress(line: str) -> Html:
    return element("p", line, role="status")
