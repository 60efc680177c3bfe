"""The export on the Run page: what to export, how far it is, and where the model is then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from app.launch import actions
from app.runs.detail import checkpoints
from app.services import exports
from trainers.config.gguf_types import offered_types
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder
from ui.parts import Html, Kind, alert_list, duration_text, element, join, link, meter, note, section

_KINDS: dict[str, Kind] = {"done": "good", "failed": "error", "stopped": "warning"}


class ExportPart:
    """The components and their event handlers; holds no state of a visitor.

    Args:
        requested_run: the run in a request's URL; raises ConfigError if there is none.
    """

    def __init__(self, requested_run: Callable[[gr.Request], RunFolder]):
        self._requested_run = requested_run

    def lay_out_form(self) -> None:
        """Adds the fields of the panel."""
        self.checkpoint = gr.Dropdown([], label="Checkpoint", info="newest first")
        self.checkpoint.preprocess = lambda value: value
        self.merged = gr.Checkbox(label="Merge the adapter into the base", value=False, elem_id="export-merged")
        self.averaged = gr.Checkbox(label="Moving average of the weights", value=False, visible=False)
        self.gguf = gr.Dropdown(
            [], label="GGUF files, for llama.cpp and Ollama", info="written beside the safetensors, of full weights",
            multiselect=True, visible=False, elem_id="export-gguf",
        )  # fmt: skip
        self.gguf.preprocess = lambda value: value
        self.hint = gr.HTML(apply_default_css=False, padding=True)

    @property
    def fields(self) -> list[Any]:
        """The components that `fill` has values for."""
        return [self.checkpoint, self.merged, self.averaged, self.gguf, self.hint]

    def fill(self, run: RunFolder) -> list[Any]:
        """Values for `fields`."""
        names = [checkpoint["name"] for checkpoint in checkpoints(run)]
        types, missing = offered_types()
        return [
            gr.update(choices=names, value=names[0] if names else None),
            gr.update(value=False, visible=actions.has_adapter(run)),
            gr.update(value=False, visible=actions.keeps_average(run)),
            gr.update(choices=types, value=[], visible=bool(types)),
            note(f"GGUF files, for llama.cpp and Ollama: {missing}.") if missing else "",
        ]

    def start(self, run: RunFolder, checkpoint: Any, merged: Any, averaged: Any, gguf: Any) -> None:
        """Starts an export of what the form says; raises ConfigError if it is refused."""
        types = ",".join(map(str, gguf)) if isinstance(gguf, list) else ""
        wanted = actions.ExportRequest(
            checkpoint, merged=merged is True, averaged=averaged is True, gguf=types or None, replace=True
        )
        exports.start(run, wanted)

    def lay_out_status(self) -> None:
        """Adds what is shown of an export."""
        self.status = gr.HTML(apply_default_css=False, elem_id="run-export-status", padding=False)
        with gr.Row(elem_classes="ts-actions"):
            self.stop = gr.Button(
                "Stop the export", visible=False, size="sm", scale=0, min_width=160, elem_id="run-export-stop"
            )
        self.message = gr.HTML(apply_default_css=False, padding=False)
        self.outputs = [self.status, self.stop, self.message]

        def stop(request: gr.Request) -> str:
            try:
                exports.stop(self._requested_run(request))
            except ConfigError as error:
                return alert_list(error.lines)
            return ""

        self.stop.click(stop, None, self.message, api_visibility="private")

    def updates(self, part: str, is_new: bool) -> list[Any]:
        """Values for `outputs`.

        Args:
            part: from `export_part`.
            is_new: whether the page does not show it yet.
        """
        if not is_new:
            return [gr.skip()] * len(self.outputs)
        return [part, gr.update(visible=part.endswith("<!--stop-->")), ""]


def export_part(run: RunFolder) -> Html:
    """The newest export of a run; ends in a comment if it can be stopped."""
    entry = exports.newest(run)
    if entry is None:
        return Html("")
    if entry["state"] == "running":
        doing = f"{'stopping' if entry['stopping'] else entry['doing']}, {duration_text(entry['seconds'])} in all"
        return join([section("Export", meter(None, "export", doing)), Html("" if entry["stopping"] else "<!--stop-->")])
    folder = element("code", entry["target"])
    where = ["The model is in ", folder] if entry["is_there"] else ["The model was in ", folder, ", which is gone."]
    sentences: dict[str, list[Any]] = {
        "done": [join(where), *entry["lines"]],
        "stopped": ["The export was stopped; nothing of it was left."],
        "failed": entry["lines"] or ["The export ended without a word; it was killed."],
    }
    parts = [alert_list(sentences[entry["state"]], _KINDS[entry["state"]])]
    if entry["state"] == "done" and entry["is_there"]:
        parts.append(
            note(join([link("chat", "Open it in Chat", run=run.id, checkpoint=Path(entry["target"]).name), "."]))
        )
    parts.append(note(join(["The same from a terminal: ", element("code", entry["command"])])))
    return section("Export", join(parts))
