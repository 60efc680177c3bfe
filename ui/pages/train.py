"""The Train page: preset or own model, data, method, strategy and GPUs, with a live preview, and the launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context

from app.detach import start
from app.form import (
    Choices,
    Preview,
    by_field,
    clone,
    differences,
    load_yaml,
    preview,
    preview_request,
    read_text,
    starting_values,
)
from app.form_choices import GpuChoice, gpu_choices, strategy_choices
from app.form_fields import FormField
from app.hardware import CPU_PROCESSES
from app.training import CheckBroke
from app.uploads import ENDINGS, take
from trainers.config import ConfigError
from trainers.options import preset_names, preset_summary
from trainers.strategies import default_strategy
from ui.context import Here
from ui.pages.train_parts import (
    PLACED,
    by_name,
    common_fields,
    component,
    copied_text,
    gpu_labels,
    other_fields,
    panel,
    shown_value,
    strategy_labels,
    strategy_note,
)
from ui.parts import element, note, title

FIRST_PRESET = "tiny-lora"
_HIDDEN: dict[str, Any] = {"api_visibility": "private"}
_QUICK: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}


def build(here: Here) -> None:
    """Lays out the page."""
    gr.HTML(title("Train", "Pick a preset, bring your data, and start. The form shows at once what would be trained."))
    form = _Form(here)
    with gr.Row(elem_id="train-columns"):
        with gr.Column(scale=5, min_width=300, elem_id="train-form"):
            form.lay_out()
        with gr.Column(scale=3, min_width=300, elem_id="train-side"):
            form.lay_out_preview()
    form.connect()
    form.serve_scripts()


def _heading(words: str) -> None:
    gr.HTML(element("h2", words), apply_default_css=False)


def _free(gpus: Sequence[GpuChoice]) -> list[str]:
    return [str(one.index) for one in gpus if not one.holder]


def _refusal(error: Exception) -> gr.Error:
    """The error as the page, or a script, is told."""
    return gr.Error(str(error), print_exception=False)


_DEVICES = 3
"""Where the devices stand among what `prefill` fills."""


class _Form:
    """The components of the page, and what happens when they change.

    Args:
        here: what the server may touch.
    """

    def __init__(self, here: Here):
        self.here = here
        self.gpus = gpu_choices()  # which there are; `prefill` tells who holds them when the page is opened
        self.fields: list[FormField] = []
        self.options: list[gr.components.Component] = []

    # -- layout ------------------------------------------------------------------------------------------------------

    def _show(self, fields: Sequence[FormField], start: dict[str, str]) -> None:
        for one in fields:
            self.fields.append(one)
            self.options.append(component(one, start[one.name]))

    def lay_out(self) -> None:
        """The form, top to bottom."""
        first = {**starting_values(FIRST_PRESET), "runs_dir": str(self.here.runs_dir)}
        _heading("1. Model")
        with gr.Row(elem_classes=["ts-fields", "ts-wide"]):
            names = [(f"{name}: {preset_summary(name).partition(':')[0]}", name) for name in preset_names()]
            self.preset = gr.Dropdown(
                [("none: a model of your own", ""), *names], value=FIRST_PRESET, label="Preset", elem_id="opt-preset",
                info="A complete, measured set of options to start from.", elem_classes=["ts-field"], min_width=260,
            )  # fmt: skip
            self._show(by_name(PLACED["model"]), first)
        self.before = gr.Textbox(FIRST_PRESET, visible=False, label="preset before")
        _heading("2. Data")
        with gr.Row(elem_classes=["ts-fields"]):
            self._show(by_name(PLACED["data"]), first)
        self.upload = gr.UploadButton(
            "Upload training data", file_types=list(ENDINGS), elem_id="upload-data", size="sm", min_width=160
        )
        _heading("3. Method")
        with gr.Row(elem_classes=["ts-fields"]):
            self._show(by_name(PLACED["method"]), first)
        self._lay_out_strategy()
        _heading("5. Settings")
        with gr.Row(elem_classes=["ts-fields"]):
            self._show(common_fields(), first)
        with gr.Accordion("All options", open=False, elem_id="all-options"):
            for words, fields in other_fields().items():
                with gr.Accordion(words, open=False), gr.Row(elem_classes=["ts-fields"]):
                    self._show(fields, first)

    def _lay_out_strategy(self) -> None:
        _heading("4. Strategy and devices")
        with gr.Row(elem_classes=["ts-fields", "ts-wide"]):
            self.strategy = gr.Dropdown(
                strategy_labels(strategy_choices("lora", None)), value="", label="Strategy", allow_custom_value=True,
                info="How the model is spread; changes speed and memory, never the model.", elem_id="opt-strategy",
                elem_classes=["ts-field"], min_width=260,
            )  # fmt: skip
            if self.gpus:
                self.devices: gr.components.Component = gr.CheckboxGroup(
                    gpu_labels(self.gpus), value=_free(self.gpus), label="GPUs", info="None ticked means all of them.",
                    elem_id="opt-gpus", elem_classes=["ts-field"], min_width=260,
                )  # fmt: skip
            else:
                self.devices = gr.Textbox(
                    str(CPU_PROCESSES), label="Processes", info="There is no GPU here: processes on the CPU.",
                    max_lines=1, elem_id="opt-gpus", elem_classes=["ts-field"], min_width=260,
                )  # fmt: skip
        self.strategy_note = gr.HTML("", elem_id="strategy-note", apply_default_css=False)

    def lay_out_preview(self) -> None:
        """What stands beside the form."""
        _heading("Preview")
        self.panel = gr.HTML(note("Looking at the form ..."), elem_id="train-panel", apply_default_css=False)
        self.launch = gr.Button("Launch", variant="primary", elem_id="launch", interactive=False)
        self.started = gr.Textbox("", visible=False, label="started run")
        self.command = gr.HTML("", elem_id="train-command", apply_default_css=False)
        with gr.Accordion("Resolved config (YAML)", open=False, elem_id="train-yaml-box"):
            self.yaml = gr.HTML("", elem_id="train-yaml", apply_default_css=False)
        self.load = gr.UploadButton("Load YAML", file_types=[".yaml", ".yml"], elem_id="load-yaml", size="sm")

    # -- what happens ------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Every event of the page."""
        inputs = [self.preset, self.strategy, self.devices, *self.options]
        shown = [self.panel, self.strategy_note, self.command, self.yaml, self.launch]
        filled = [self.preset, self.before, self.strategy, self.devices, *self.options]
        look: dict[str, Any] = {"fn": self.refresh, "inputs": inputs, "outputs": shown, **_QUICK}
        changes = [one.change for one in (self.strategy, self.devices, *self.options)]  # `input` misses what is pasted
        gr.on(changes, **look, trigger_mode="always_last")
        switch = self.preset.input(self.switch_preset, [self.before, *inputs], filled, **_QUICK)
        switch.then(**look)
        taken = self.upload.upload(self.take_upload, self.upload, self._component("dataset_name"), **_HIDDEN)
        taken.then(**look)
        read = self.load.upload(self.read_yaml, self.load, filled, **_HIDDEN)
        read.then(**look)
        Context.root_block.load(self.prefill, None, filled, **_QUICK).then(**look)
        launched = self.launch.click(
            self.start, inputs, [self.panel, self.launch, self.started], trigger_mode="once", concurrency_limit=1,
            concurrency_id="launch", show_progress="hidden", **_HIDDEN,
        )  # fmt: skip
        go = "(id) => { if (id) location.assign('run?run=' + encodeURIComponent(id)); }"
        launched.then(None, self.started, None, js=go, **_HIDDEN)

    def serve_scripts(self) -> None:
        """What `gradio_client` may call: `/preview` and `/launch`, each with one JSON object."""

        def script_preview(request: dict) -> dict:
            """What a request {preset, strategy, gpus, num_processes, options} would do; starts nothing."""
            try:
                return self._asked(request).as_json()
            except ConfigError as error:
                raise _refusal(error) from None

        def script_launch(request: dict) -> dict:
            """Starts the run of a request {preset, strategy, gpus, num_processes, options}."""
            try:
                asked = self._asked(request)
                if asked.job is None:
                    raise ConfigError(asked.mistakes)
                start(asked.job)
            except (ConfigError, CheckBroke) as error:
                raise _refusal(error) from None
            return {"run_dir": str(asked.job.run.path), "id": asked.job.run.id}

        gr.api(script_preview, api_name="preview")
        gr.api(script_launch, api_name="launch", concurrency_limit=1, concurrency_id="launch")

    def _asked(self, request: object) -> Preview:
        return preview_request(request, self.here.runs_dir, self.here.roots, self.here.remote_code)

    def _component(self, name: str) -> gr.components.Component:
        return self.options[[one.name for one in self.fields].index(name)]

    def _values(self, raw: Sequence[Any]) -> dict[str, Any]:
        return {one.name: value for one, value in zip(self.fields, raw, strict=True)}

    def _preview(self, preset: str, strategy: str | None, devices: Any, raw: Sequence[Any]) -> Preview:
        device = {"gpus" if self.gpus else "num_processes": devices or None}
        try:
            values = differences(self._values(raw), preset or None)
        except ConfigError as error:
            return Preview(by_field(error.mistakes))
        return preview(
            values, preset or None, strategy or None, **device, roots=self.here.roots, remote_code=self.here.remote_code
        )

    def refresh(self, preset: str, strategy: str | None, devices: Any, *raw: Any) -> list[Any]:
        """The preview of the form as it is filled."""
        shown = self._preview(preset, strategy, devices, raw)
        method = str(self._values(raw)["method"])
        known = strategy_choices(method, shown.job.devices if shown.job else None)
        count = shown.job.devices.num_processes if shown.job else CPU_PROCESSES
        return [
            panel(shown),
            strategy_note(known, str(strategy or ""), default_strategy(count)),
            copied_text("Command", shown.command),
            copied_text("Resolved config", shown.yaml, "config.yaml"),
            gr.Button(interactive=shown.job is not None),
        ]

    def _filled(self, choices: Choices, devices: bool) -> list[Any]:
        """Updates for every component, so that the form shows these choices."""
        start = {**starting_values(choices.preset), "runs_dir": str(self.here.runs_dir), **choices.values}
        options = [gr.update(value=shown_value(one, start[one.name])) for one in self.fields]
        preset = choices.preset or ""
        if not devices:
            return [preset, preset, gr.skip(), gr.skip(), *options]
        chosen: Any = [str(index) for index in choices.gpus] if self.gpus else str(choices.num_processes or 1)
        return [preset, preset, choices.strategy or "", chosen, *options]

    def switch_preset(self, before: str, preset: str, strategy: str, devices: Any, *raw: Any) -> list[Any]:
        """The new preset's values, under those that were changed by hand."""
        try:
            values = differences(self._values(raw), before or None)
            return self._filled(Choices(preset or None, values), devices=False)
        except ConfigError as error:
            raise _refusal(error) from None

    def take_upload(self, path: str) -> str:
        """Puts an uploaded file where data may lie; returns its path."""
        try:
            return str(take(Path(path), Path(path).name, self.here.uploads))
        except ConfigError as error:
            raise _refusal(error) from None
        finally:
            self._forget(Path(path))

    def _forget(self, path: Path) -> None:
        """Removes what the server stored of an upload, in a folder of its own below the uploads."""
        if path.parent.parent == self.here.uploads:
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def read_yaml(self, path: str) -> list[Any]:
        """Fills the form from a saved config."""
        try:
            return self._filled(load_yaml(read_text(Path(path))), devices=False)
        except ConfigError as error:
            raise _refusal(error) from None
        finally:
            self._forget(Path(path))

    def prefill(self, request: gr.Request) -> list[Any]:
        """Fills the form from the address: `?clone=RUN` or `?preset=NAME`."""
        query = dict(request.query_params)
        try:
            if query.get("clone"):
                return self._with_gpus(self._filled(clone(query["clone"], self.here.runs_dir), devices=True))
            if query.get("preset"):
                return self._with_gpus(self._filled(Choices(query["preset"]), devices=False))
        except ConfigError as error:
            raise _refusal(error) from None
        return self._with_gpus([gr.skip()] * (4 + len(self.fields)))

    def _with_gpus(self, updates: list[Any]) -> list[Any]:
        """The same, and the GPUs with who holds each now; those that are free are ticked unless a run chose others."""
        if self.gpus:
            now, chosen = gpu_choices(), updates[_DEVICES]
            ticked = chosen if isinstance(chosen, list) else _free(now)
            updates[_DEVICES] = gr.update(choices=gpu_labels(now), value=ticked)
        return updates

    def start(self, preset: str, strategy: str | None, devices: Any, *raw: Any) -> Iterator[list[Any]]:
        """Starts the run; shows the check's progress, and its mistakes."""
        shown = self._preview(preset, strategy, devices, raw)
        if shown.job is None:
            yield [panel(shown), gr.Button(interactive=False), ""]
            return
        job = shown.job
        waiting = "Checking data and model; this takes some seconds ..."
        yield [panel(shown, waiting), gr.Button("Starting ...", interactive=False), ""]
        try:
            start(job)
        except ConfigError as error:
            refused = Preview(by_field(error.mistakes, strategy or ""), shown.warnings)
            yield [panel(refused), gr.Button("Launch", interactive=True), ""]
        except CheckBroke as error:
            last = error.output.strip().splitlines()[-1:]
            yield [panel(Preview({"": [error.cause, *last]})), gr.Button("Launch", interactive=True), ""]
        else:
            yield [panel(shown, f"Started {job.run.id}; opening its page ..."), gr.Button("Started"), job.run.id]
