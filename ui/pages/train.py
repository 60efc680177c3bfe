"""The Train page: preset or own model, data, method, strategy and GPUs, with a live preview, and the launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context

from app.hardware import CPU_PROCESSES
from app.launch.background import start
from app.launch.foreground import CheckBroke
from app.services.choices import gpu_choices, strategy_choices
from app.services.draft import read_draft
from app.services.fields import FormField, text_of
from app.services.form import (
    Choices,
    Preview,
    by_field,
    clone,
    default_gpus,
    load_yaml,
    preview,
    preview_request,
    read_text,
)
from app.services.memory_check import known_verdict, memory_verdict
from app.services.resume_form import ResumeForm, resume_form, resume_preview
from app.services.starting_values import NAMING, differences, follow_data, starting_values
from app.services.uploads import ENDINGS, forget, take_sent
from trainers.config.options import ConfigError
from trainers.config.own_data import DESCRIBING
from trainers.config.parse import preset_names, preset_summary
from ui.context import Here
from ui.pages.train_parts import (
    PLACED,
    by_name,
    common_fields,
    component,
    copied_text,
    draft_js,
    gpu_labels,
    other_fields,
    panel,
    resume_banner,
    shown_value,
    strategy_labels,
    strategy_note,
    ticks,
)
from ui.parts import alert_list, element, note, title

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


def _refusal(error: Exception) -> gr.Error:
    """The error as the page, or a script, is told."""
    return gr.Error(str(error), print_exception=False)


_LAUNCH, _ALL_THE_SAME = "Launch", "Launch all the same"
"""What the button says; the second asks whether a run that will hardly fit is meant."""
_DEVICES = 3
"""Where the devices stand among what `prefill` fills."""
_START_OVER = "() => { tunesmithDraft.clear(); location.assign(location.pathname); }"


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
        self._lay_out_resume()
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
        self.named = [gr.Textbox(first[name], visible=False, label=f"{name} before") for name in NAMING]
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

    def _lay_out_resume(self) -> None:
        """What is seen only when the form goes on with a run."""
        self.resumed = gr.Textbox("", visible=False, label="run to go on with")
        self.draft = gr.Textbox("", visible=False, label="draft of this tab")
        self.banner = gr.HTML("", visible=False, elem_id="train-resume", apply_default_css=False)
        self.force = gr.Checkbox(
            False, label="Go on all the same", visible=False, elem_id="resume-force", elem_classes=["ts-field"],
            info="As --force: the steps to come will be others than the run would have taken.", interactive=True,
        )  # fmt: skip

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
                    gpu_labels(self.gpus), **ticks(default_gpus(FIRST_PRESET, self.gpus)), label="GPUs",
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
        with gr.Row():
            self.launch = gr.Button(_LAUNCH, variant="primary", elem_id="launch", interactive=False, min_width=160)
            self.start_over = gr.Button("Start over", elem_id="start-over", size="md", min_width=140, scale=0)
        self.started = gr.Textbox("", visible=False, label="started run")
        self.asked = gr.Textbox("", visible=False, label="asked whether a run that will hardly fit is meant")
        self.command = gr.HTML("", elem_id="train-command", apply_default_css=False)
        with gr.Accordion("Resolved config (YAML)", open=False, elem_id="train-yaml-box"):
            self.yaml = gr.HTML("", elem_id="train-yaml", apply_default_css=False)
        self.load = gr.UploadButton("Load YAML", file_types=[".yaml", ".yml"], elem_id="load-yaml", size="sm")

    # -- what happens ------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Every event of the page."""
        drafted = [self.preset, self.strategy, self.devices, *self.options]
        inputs = [self.resumed, self.force, *drafted]
        shown = [self.panel, self.strategy_note, self.command, self.yaml, self.launch, self.asked]
        filled = [self.preset, self.before, self.strategy, self.devices, *self.options, *self.named]
        look: dict[str, Any] = {"fn": self.refresh, "inputs": inputs, "outputs": shown, **_QUICK}
        changes = [one.change for one in (self.strategy, self.devices, *self.options)]  # `input` misses what is pasted
        gr.on([*changes, self.force.change], **look, trigger_mode="always_last")
        naming = [self._component(name).change for name in NAMING]
        gr.on(
            naming, self.follow_data, [self.resumed, self.preset, *self.named, *self.options],
            [*self.named, *map(self._component, DESCRIBING)], **_QUICK, trigger_mode="always_last",
        )  # fmt: skip
        keep = draft_js([one.name for one in self.fields], {"runs_dir": str(self.here.runs_dir)})
        gr.on([*changes, self.preset.change], None, drafted, None, js=keep, **_HIDDEN)
        self.start_over.click(None, None, None, js=_START_OVER, **_HIDDEN)
        switch = self.preset.input(self.switch_preset, [self.before, *drafted], filled, **_QUICK)
        switch.then(**look)
        taken = self.upload.upload(self.take_upload, self.upload, self._component("dataset_name"), **_HIDDEN)
        taken.then(**look)
        read = self.load.upload(self.read_yaml, self.load, filled, **_HIDDEN)
        read.then(**look)
        opened = [*filled, self.resumed, self.banner, self.force]
        read_draft_js = "() => [tunesmithDraft.read()]"
        loaded = Context.root_block.load(self.prefill, self.draft, opened, js=read_draft_js, **_QUICK)
        loaded.then(None, drafted, None, js=f"(...all) => {{ tunesmithDraft.ready(); ({keep})(...all); }}", **_HIDDEN)
        loaded.then(**look)
        launched = self.launch.click(
            self.start, [self.asked, *inputs], [self.panel, self.launch, self.started, self.asked], trigger_mode="once",
            concurrency_limit=1, concurrency_id="launch", show_progress="hidden", **_HIDDEN,
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
                memory = memory_verdict(asked.job).line  # nobody is there to be asked
                start(asked.job)
            except (ConfigError, CheckBroke) as error:
                raise _refusal(error) from None
            warnings = [*asked.warnings, *([memory] if memory else [])]
            return {"run_dir": str(asked.job.run.path), "id": asked.job.run.id, "warnings": warnings}

        gr.api(script_preview, api_name="preview")
        gr.api(script_launch, api_name="launch", concurrency_limit=1, concurrency_id="launch")

    def _asked(self, request: object) -> Preview:
        return preview_request(request, self.here.runs_dir, self.here.roots, self.here.remote_code)

    def _component(self, name: str) -> gr.components.Component:
        return self.options[[one.name for one in self.fields].index(name)]

    def _values(self, raw: Sequence[Any]) -> dict[str, Any]:
        return {one.name: value for one, value in zip(self.fields, raw, strict=True)}

    def _preview(
        self, resumed: str, force: bool, preset: str, strategy: str | None, devices: Any, raw: Sequence[Any]
    ) -> Preview:
        asked: dict[str, Any] = {
            "strategy": strategy or None, "gpus" if self.gpus else "num_processes": devices or None,
            "roots": self.here.roots, "remote_code": self.here.remote_code,
        }  # fmt: skip
        try:
            if resumed:
                form = resume_form(resumed, self.here.runs_dir)
                return resume_preview(form, self._values(raw), force=force is True, **asked)
            values = differences(self._values(raw), preset or None)
        except ConfigError as error:
            return Preview(by_field(error.mistakes))
        return preview(values, preset or None, **asked)

    def refresh(
        self, resumed: str, force: bool, preset: str, strategy: str | None, devices: Any, *raw: Any
    ) -> list[Any]:
        """The preview of the form as it is filled."""
        shown = self._preview(resumed, force, preset, strategy, devices, raw)
        method = str(self._values(raw)["method"])
        known = strategy_choices(method, shown.job.devices if shown.job else None)
        return [
            panel(shown),
            strategy_note(
                known,
                str(strategy or ""),
                shown.job.strategy.name if shown.job else "",
                shown.errors.get("strategy", []),
            ),
            copied_text("Command", shown.command),
            copied_text("Resolved config", shown.yaml, "config.yaml"),
            gr.Button("Resume" if resumed else _LAUNCH, interactive=shown.job is not None),
            "",
        ]

    def _filled(self, choices: Choices, devices: bool) -> list[Any]:
        """Updates for every component, so that the form shows these choices."""
        texts = starting_values(choices.preset, choices.values)
        start = {**texts, "runs_dir": str(self.here.runs_dir), **choices.values}
        options = [gr.update(value=shown_value(one, start[one.name])) for one in self.fields]
        options += [start[name] for name in NAMING]
        preset = choices.preset or ""
        if not devices:
            return [preset, preset, gr.skip(), gr.skip(), *options]
        return [preset, preset, choices.strategy or "", self._devices(choices), *options]

    def _devices(self, choices: Choices) -> Any:
        """The value of the devices' field; it stays as it is where the choices name none."""
        if self.gpus:
            return [str(index) for index in choices.gpus] if choices.gpus else gr.skip()
        return str(choices.num_processes) if choices.num_processes else gr.skip()

    def switch_preset(self, before: str, preset: str, strategy: str, devices: Any, *raw: Any) -> list[Any]:
        """The new preset's values, under those that were changed by hand."""
        try:
            values = differences(self._values(raw), before or None)
            updates = self._filled(Choices(preset or None, values), devices=False)
            if self.gpus:
                now = gpu_choices()
                if ticks(default_gpus(before, now))["value"] == devices:  # not changed by hand
                    updates[_DEVICES] = gr.update(**ticks(default_gpus(preset, now)))
            return updates
        except ConfigError as error:
            raise _refusal(error) from None

    def follow_data(self, resumed: str, preset: str, *raw: Any) -> list[Any]:
        """Shows what will be used once the form names other data: what described the preset's goes, or comes back."""
        before, shown = dict(zip(NAMING, raw, strict=False)), self._values(raw[len(NAMING) :])
        try:
            texts = {} if resumed else follow_data(preset or None, before, shown)
        except ConfigError:  # the preview tells what is wrong
            return [gr.skip()] * (len(NAMING) + len(DESCRIBING))
        fresh = {one.name: shown_value(one, texts[one.name]) for one in by_name(DESCRIBING) if one.name in texts}
        return [
            *(texts.get(name, text_of(shown[name])) for name in NAMING),
            *(fresh.get(name, gr.skip()) for name in DESCRIBING),
        ]

    def take_upload(self, path: str) -> str:
        """Puts an uploaded file where data may lie; returns its path."""
        try:
            return str(take_sent(Path(path), self.here.uploads))
        except ConfigError as error:
            raise _refusal(error) from None

    def read_yaml(self, path: str) -> list[Any]:
        """Fills the form from a saved config."""
        try:
            return self._filled(load_yaml(read_text(Path(path))), devices=False)
        except ConfigError as error:
            raise _refusal(error) from None
        finally:
            forget(Path(path), self.here.uploads)

    def prefill(self, draft: str, request: gr.Request) -> list[Any]:
        """Fills the form: `?resume=RUN`, `?clone=RUN` or `?preset=NAME` in the address, else the draft of this tab."""
        query = dict(request.query_params)
        kept = read_draft(draft)
        new_run: list[Any] = ["", gr.update(visible=False), gr.update(value=False, visible=False)]
        try:
            if query.get("resume"):
                return self._resuming(resume_form(query["resume"], self.here.runs_dir), kept)
            if kept:
                return [*self._with_gpus(self._filled(kept, devices=True), kept.preset or ""), *new_run]
            if query.get("clone"):
                found = clone(query["clone"], self.here.runs_dir)
                return [*self._with_gpus(self._filled(found, devices=True)), *new_run]
            if query.get("preset"):
                updates = self._filled(Choices(query["preset"]), devices=False)
                return [*self._with_gpus(updates, query["preset"]), *new_run]
        except ConfigError as error:  # the form is as useful as without an address
            new_run[1] = gr.update(value=alert_list(error.mistakes), visible=True)
        return [*self._with_gpus([gr.skip()] * (4 + len(self.fields) + len(NAMING))), *new_run]

    def _resuming(self, form: ResumeForm, kept: Choices | None) -> list[Any]:
        """The form of a run that goes on; its preset stays what it is."""
        choices, texts = (kept or form.choices), {**form.texts, **(kept.values if kept else {})}
        options = [gr.update(value=shown_value(one, texts[one.name])) for one in self.fields]
        options += [texts[name] for name in NAMING]
        preset = form.choices.preset or ""
        locked = gr.update(value=preset, interactive=False)
        filled = [locked, preset, choices.strategy or "", self._devices(choices), *options]
        banner = gr.update(value=resume_banner(form), visible=True)
        return [*self._with_gpus(filled, preset), form.run.id, banner, gr.update(visible=True)]

    def _with_gpus(self, updates: list[Any], preset: str = FIRST_PRESET) -> list[Any]:
        """The same, and the GPUs with who holds each now; the preset's default is ticked unless a run chose others."""
        if self.gpus:
            now, chosen = gpu_choices(), updates[_DEVICES]
            ticked = {"value": chosen} if isinstance(chosen, list) else ticks(default_gpus(preset, now))
            updates[_DEVICES] = gr.update(choices=gpu_labels(now), **ticked)
        return updates

    def start(
        self, asked: str, resumed: str, force: bool, preset: str, strategy: str | None, devices: Any, *raw: Any
    ) -> Iterator[list[Any]]:
        """Starts the run, or goes on with it, and asks first when it will hardly fit; shows the check's progress."""
        label = "Resume" if resumed else _LAUNCH
        shown = self._preview(resumed, force, preset, strategy, devices, raw)
        if shown.job is None:
            yield [panel(shown), gr.Button(interactive=False), "", asked]
            return
        job = shown.job
        if known_verdict(job) is None:
            yield [panel(shown, "Looking at the memory ..."), gr.Button("Looking ...", interactive=False), "", asked]
        if memory_verdict(job).line and not asked:
            yield [panel(shown), gr.Button(_ALL_THE_SAME, interactive=True), "", _ALL_THE_SAME]
            return
        waiting = "Checking data and model; this takes some seconds ..."
        yield [panel(shown, waiting), gr.Button("Starting ...", interactive=False), "", asked]
        try:
            start(job)
        except ConfigError as error:
            refused = Preview(by_field(error.mistakes, strategy or ""), shown.warnings)
            yield [panel(refused), gr.Button(label, interactive=True), "", ""]
        except CheckBroke as error:
            last = error.output.strip().splitlines()[-1:]
            yield [panel(Preview({"": [error.cause, *last]})), gr.Button(label, interactive=True), "", ""]
        else:
            yield [panel(shown, f"Started {job.run.id}; opening its page ..."), gr.Button("Started"), job.run.id, ""]
