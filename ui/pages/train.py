"""The Train page, in eight steps from the objective to the start, with a live preview beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context

from app.launch import slurm
from app.launch.background import start
from app.launch.foreground import CheckBroke
from app.services.address import choices_of
from app.services.choices import gpu_choices, strategy_choices
from app.services.draft import read_draft
from app.services.form import (
    Choices,
    DefaultGpus,
    Preview,
    by_field,
    default_gpus,
    load_yaml,
    preview,
    preview_request,
    read_text,
)
from app.services.memory_check import known_verdict, memory_verdict
from app.services.resume_form import ResumeForm, resume_form, resume_preview
from app.services.starting_values import NAMING, differences, follow_data, starting_values
from app.services.uploads import EXTENSIONS, remove_received, store_upload
from trainers.config.fields import OptionField, text_of
from trainers.config.mistakes import ConfigError
from trainers.config.own_data import DESCRIBING
from trainers.config.presets import find_preset, preset_names
from ui.context import ServerContext
from ui.pages.strategy_parts import StrategyPicker
from ui.pages.train_devices import JOB_NAMES, DevicesPart, chosen_place
from ui.pages.train_objective import ObjectivePart
from ui.pages.train_parts import (
    PLAIN,
    STEP_FIELDS,
    batch_script,
    by_name,
    common_fields,
    component,
    component_value,
    copied_text,
    draft_js,
    first_rows,
    gpu_labels,
    gpu_selection,
    other_fields,
    panel,
    presets_panel,
    rate_curve,
    resume_banner,
    start_banner,
    strategy_note,
)
from ui.pages.train_scripts import serve_scripts
from ui.pages.train_welcome import Welcome
from ui.parts import Html, alert_list, element, join, loading, note, title

FIRST_PRESET = "tiny-lora"
_HIDDEN: dict[str, Any] = {"api_visibility": "private"}
_QUICK: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}


def build(context: ServerContext) -> None:
    """Lays out the page."""
    gr.HTML(title("Train", "Eight steps to a model of your own, filled in with values that work."))
    form = _Form(context)
    welcome = Welcome(context.runs_dir, form.preview_request, _GO_TO_RUN)
    with gr.Row(elem_id="train-columns"):
        with gr.Column(scale=5, min_width=300, elem_id="train-form"):
            form.lay_out()
        with gr.Column(scale=3, min_width=300, elem_id="train-side"):
            form.lay_out_preview()
    form.connect(welcome)
    serve_scripts(form.preview_request)


def _heading(text: str) -> None:
    gr.HTML(element("h2", text), apply_default_css=False)


def _refusal(error: Exception) -> gr.Error:
    """The error as Gradio shows it on the page or returns it to a script."""
    return gr.Error(str(error), print_exception=False)


_LAUNCH, _LAUNCH_ANYWAY, _SUBMIT = "Start training", "Start anyway", "Submit to SLURM"
"""Labels of the button; the second asks to confirm a run that is not expected to fit."""
_DEVICES = 3
"""Index of the devices among the outputs of `prefill`."""
_GO_TO_RUN = "(id) => { if (id) { Notices.watch(id); location.assign('run?run=' + encodeURIComponent(id)); } }"
_START_OVER = "() => { tunesmithDraft.clear(); location.assign(location.pathname); }"


class _Form:
    """The components of the page and their event handlers.

    Args:
        context: the folders of the server.
    """

    def __init__(self, context: ServerContext):
        self.context = context
        self.gpus = gpu_choices()  # at server start; `prefill` updates their holders when a page is opened
        self.fields: list[OptionField] = []
        self.options: list[gr.components.Component] = []

    # -- layout ------------------------------------------------------------------------------------------------------

    def _add_fields(self, fields: Sequence[OptionField], start: dict[str, str]) -> list[gr.components.Component]:
        added = [component(field, start[field.name]) for field in fields]
        self.fields += fields
        self.options += added
        return added

    def lay_out(self) -> None:
        """The form, top to bottom."""
        first = {**starting_values(FIRST_PRESET), "runs_dir": str(self.context.runs_dir)}
        self._lay_out_resume()
        _heading("1. Objective")
        self.objective = ObjectivePart(lambda fields: self._add_fields(fields, first), first["objective"])
        _heading("2. Model")
        with gr.Row(elem_classes=["ts-fields", "ts-wide"]):
            names = [(f"{name}: {find_preset(name).summary.partition(':')[0]}", name) for name in preset_names()]
            self.preset = gr.Dropdown(
                [("none: a model of your own", ""), *names], value=FIRST_PRESET, label="Preset", elem_id="opt-preset",
                info="A complete set of options to start from.", elem_classes=["ts-field"], min_width=260,
                num_choices_shown=1000,
            )  # fmt: skip
            self._add_fields(by_name(STEP_FIELDS["model"]), first)
        gr.HTML(presets_panel(self.gpus), elem_id="train-presets", apply_default_css=False)
        self.picked = gr.Textbox("", visible="hidden", label="preset of the table", elem_id="picked-preset")
        self.before = gr.Textbox(FIRST_PRESET, visible=False, label="preset before")
        _heading("3. Data")
        with gr.Row(elem_classes=["ts-fields"]):
            self._add_fields(by_name(STEP_FIELDS["data"]), first)
        self.data_before = [gr.Textbox(first[name], visible=False, label=f"{name} before") for name in NAMING]
        self.upload = gr.UploadButton(
            "Drop a data file here, or choose one", file_types=list(EXTENSIONS), elem_id="upload-data", size="md",
            min_width=160,
        )  # fmt: skip
        with gr.Row():
            self.look = gr.Button("Show the first rows", elem_id="look", size="sm", scale=0, min_width=180)
        self.rows = gr.HTML("", elem_id="train-rows", apply_default_css=False)
        _heading("4. Method")
        with gr.Row(elem_classes=["ts-fields"]):
            self._add_fields(by_name(STEP_FIELDS["method"]), first)
        self._lay_out_strategy()
        self.where = DevicesPart(self.gpus, default_gpus(FIRST_PRESET, self.gpus), self.context.runs_dir)
        self.devices = self.where.devices
        _heading("7. Settings")
        self.curve = gr.HTML(rate_curve(None), elem_id="train-curve", apply_default_css=False)
        with gr.Row(elem_classes=["ts-fields"]):
            self._add_fields(common_fields(), first)
        with gr.Accordion("All options", open=False, elem_id="all-options"):
            for section, fields in other_fields().items():
                with gr.Accordion(section, open=False), gr.Row(elem_classes=["ts-fields"]):
                    self._add_fields(fields, first)

    def _lay_out_resume(self) -> None:
        """Components that are visible only when the form resumes a run."""
        self.resumed = gr.Textbox("", visible=False, label="run to resume")
        self.draft = gr.Textbox("", visible=False, label="draft of this tab")
        self.banner = gr.HTML("", visible=False, elem_id="train-resume", apply_default_css=False)
        self.force = gr.Checkbox(
            False, label="Resume anyway", visible=False, elem_id="resume-force", elem_classes=["ts-field"],
            info="Same as --force: the remaining steps will differ from those the run would have taken.",
            interactive=True,
        )  # fmt: skip

    def _lay_out_strategy(self) -> None:
        _heading("5. Strategy")
        gr.HTML(
            note("How the work is shared among GPUs or processes. It changes speed and memory, never the model."),
            apply_default_css=False,
        )
        self.cards = StrategyPicker(self._with_default_strategy)
        with gr.Row(elem_classes=["ts-fields", "ts-wide"]):
            self.strategy = gr.Textbox(
                "", label="Strategy by name, or your own Accelerate file", max_lines=1, elem_id="opt-strategy",
                info="Filled in by the cards above; or type the path of an Accelerate YAML.",
                placeholder="default", elem_classes=["ts-field"], min_width=260, html_attributes=PLAIN,
            )  # fmt: skip
        self.strategy_note = gr.HTML("", elem_id="strategy-note", apply_default_css=False)

    def lay_out_preview(self) -> None:
        """The preview beside the form."""
        _heading("8. Check and start")
        self.panel = gr.HTML(loading(), elem_id="train-panel", apply_default_css=False)
        with gr.Row():
            self.launch = gr.Button(_LAUNCH, variant="primary", elem_id="launch", interactive=False, min_width=160)
            self.start_over = gr.Button("Start over", elem_id="start-over", size="md", min_width=140, scale=0)
        self.started = gr.Textbox("", visible=False, label="started run")
        self.confirmed = gr.Textbox("", visible=False, label="confirmed although memory may not suffice")
        self.command = gr.HTML("", elem_id="train-command", apply_default_css=False)
        with gr.Accordion("All settings (YAML)", open=False, elem_id="train-yaml-box"):
            self.yaml = gr.HTML("", elem_id="train-yaml", apply_default_css=False)
        self.load = gr.UploadButton("Load settings", file_types=[".yaml", ".yml"], elem_id="load-yaml", size="sm")

    # -- events ------------------------------------------------------------------------------------------------------

    def connect(self, welcome: Welcome) -> None:
        """Connects the events of the page."""
        draft_inputs = [self.preset, self.strategy, self.devices, *self.options]
        inputs = [self.resumed, self.force, *draft_inputs, *self.where.inputs]
        preview_outputs = [
            self.panel, self.strategy_note, self.curve, self.command, self.yaml, self.launch, self.confirmed,
        ]  # fmt: skip
        form_outputs = [self.preset, self.before, self.strategy, self.devices, *self.options, *self.data_before]
        refresh_event: dict[str, Any] = {"fn": self.refresh, "inputs": inputs, "outputs": preview_outputs, **_QUICK}
        # `input` misses what is pasted
        changes = [component.change for component in (self.strategy, self.devices, *self.options)]
        job_changes = [component.change for component in self.where.inputs]
        gr.on([*changes, *job_changes, self.force.change], **refresh_event, trigger_mode="always_last")
        data_changes = [self._component(name).change for name in NAMING]
        gr.on(
            data_changes, self.follow_data, [self.resumed, self.preset, *self.data_before, *self.options],
            [*self.data_before, *map(self._component, DESCRIBING)], **_QUICK, trigger_mode="always_last",
        )  # fmt: skip
        keep = draft_js([field.name for field in self.fields], JOB_NAMES, {"runs_dir": str(self.context.runs_dir)})
        draft_parts = [*draft_inputs, *self.where.inputs]
        gr.on([*changes, *job_changes, self.preset.change], None, draft_parts, None, js=keep, **_HIDDEN)
        self.start_over.click(None, None, None, js=_START_OVER, **_HIDDEN)
        self.look.click(self.show_rows, inputs, self.rows, **_HIDDEN, show_progress="hidden", trigger_mode="once")
        switch = self.preset.input(self.switch_preset, [self.before, *draft_inputs], form_outputs, **_QUICK)
        switch.then(**refresh_event)
        picked = [self.resumed, self.before, self.picked, *draft_inputs[1:]]
        picked_outputs = [self.picked, *form_outputs]
        self.picked.change(self.pick_preset, picked, picked_outputs, **_QUICK).then(**refresh_event)
        method: Any = self._component("method")
        method_switch = method.input(self.switch_method, [self.resumed, *draft_inputs], form_outputs, **_QUICK)
        method_switch.then(**refresh_event)
        uploaded = self.upload.upload(self.take_upload, self.upload, self._component("dataset_name"), **_HIDDEN)
        uploaded.then(**refresh_event)
        read = self.load.upload(self.read_yaml, self.load, form_outputs, **_HIDDEN)
        read.then(**refresh_event)
        others = [component.change for component in (self.devices, *self.options)]
        self.cards.connect([*others, *job_changes, self.force.change], inputs)
        self.where.connect(self.resumed)
        self.objective.connect()
        loaded = Context.root_block.load(
            self.open_page(welcome), self.draft,
            [*welcome.outputs, *form_outputs, self.resumed, self.banner, self.force, *self.where.inputs,
             *self.where.parts, *preview_outputs, *self.cards.outputs],
            js="() => [tunesmithDraft.read()]", **_QUICK,
        )  # fmt: skip
        loaded.then(
            None, draft_parts, None, js=f"(...all) => {{ tunesmithDraft.ready(); ({keep})(...all); }}", **_HIDDEN
        )
        launched = self.launch.click(
            self.start, [self.confirmed, *inputs], [self.panel, self.launch, self.started, self.confirmed],
            trigger_mode="once", concurrency_limit=1, concurrency_id="launch", show_progress="hidden", **_HIDDEN,
        )  # fmt: skip
        launched.then(None, self.started, None, js=_GO_TO_RUN, **_HIDDEN)

    def preview_request(self, request: object) -> Preview:
        return preview_request(request, self.context.runs_dir, self.context.roots, self.context.remote_code)

    def _component(self, name: str) -> gr.components.Component:
        return self.options[[field.name for field in self.fields].index(name)]

    def _values(self, raw: Sequence[Any]) -> dict[str, Any]:
        """The values of the options; those of where to train follow them in some events."""
        return {field.name: value for field, value in zip(self.fields, raw[: len(self.fields)], strict=True)}

    def _preset_with(self, preset: str, raw: Sequence[Any]) -> str:
        """The variant of the preset for the form's method; the preset itself if there is none, empty without one."""
        return find_preset(preset, self._values(raw)["method"]).name if preset else ""

    def _preview(
        self, resumed: str, force: bool, preset: str, strategy: str | None, devices: Any, raw: Sequence[Any]
    ) -> Preview:
        launch: dict[str, Any] = {
            "strategy": strategy or None, "gpus" if self.gpus else "num_processes": devices or None,
            "roots": self.context.roots, "remote_code": self.context.remote_code,
        }  # fmt: skip
        try:
            if resumed:
                form = resume_form(resumed, self.context.runs_dir)
                return resume_preview(form, self._values(raw), force=force is True, **launch)
            preset = self._preset_with(preset, raw)
            values = differences(self._values(raw), preset or None)
        except ConfigError as error:
            return Preview(by_field(error.mistakes))
        launch |= chosen_place(raw[len(self.fields) :])
        return preview(values, preset or None, **launch)

    def _with_default_strategy(
        self, resumed: str, force: bool, preset: str, strategy: str | None, devices: Any, *raw: Any
    ) -> Preview:
        return self._preview(resumed, force, preset, None, devices, raw)

    def refresh(
        self, resumed: str, force: bool, preset: str, strategy: str | None, devices: Any, *raw: Any
    ) -> list[Any]:
        """The preview of the form's current values."""
        current = self._preview(resumed, force, preset, strategy, devices, raw)
        method = str(self._values(raw)["method"])
        strategies = strategy_choices(method, current.job.devices if current.job else None)
        return [
            panel(current),
            strategy_note(strategies, str(strategy or ""), current),
            rate_curve(current),
            join([copied_text("Command", current.command), *batch_script(current.script)]),
            copied_text("All settings", current.yaml, "config.yaml"),
            gr.Button(self._label(resumed, raw), interactive=current.job is not None),
            "",
        ]

    def _label(self, resumed: str, raw: Sequence[Any]) -> str:
        """The label of the button that starts the run."""
        submits = chosen_place(raw[len(self.fields) :])["slurm"] is not None
        return "Resume" if resumed else _SUBMIT if submits else _LAUNCH

    def show_rows(
        self, resumed: str, force: bool, preset: str, strategy: str | None, devices: Any, *raw: Any
    ) -> Iterator[Html]:
        """The first rows as they would be trained, and the format that was found."""
        current = self._preview(resumed, force, preset, strategy, devices, raw)
        if current.job is None:
            yield note("Shown once the mistakes are fixed.")
            return
        yield from first_rows(current.job.config)

    def _fill(self, choices: Choices, devices: bool) -> list[Any]:
        """Updates for all components to show these choices."""
        texts = starting_values(choices.preset, choices.values)
        start = {**texts, "runs_dir": str(self.context.runs_dir), **choices.values}
        options = [gr.update(value=component_value(field, start[field.name])) for field in self.fields]
        options += [start[name] for name in NAMING]
        preset = choices.preset or ""
        if not devices:
            return [preset, preset, gr.skip(), gr.skip(), *options]
        return [preset, preset, choices.strategy or "", self._devices(choices), *options]

    def _devices(self, choices: Choices) -> Any:
        """The value of the devices field; unchanged if the choices name no devices."""
        if self.gpus:
            return [str(index) for index in choices.gpus] if choices.gpus else gr.skip()
        return str(choices.num_processes) if choices.num_processes else gr.skip()

    def switch_preset(self, before: str, preset: str, strategy: str, devices: Any, *raw: Any) -> list[Any]:
        """Fills in the new preset's values, keeping those changed by hand."""
        try:
            values = differences(self._values(raw), before or None)
            updates = self._fill(Choices(preset or None, values), devices=False)
            if self.gpus:
                gpus = gpu_choices()
                if gpu_selection(default_gpus(before, gpus))["value"] == devices:  # not changed by hand
                    updates[_DEVICES] = gr.update(**gpu_selection(default_gpus(preset, gpus)))
            return updates
        except ConfigError as error:
            raise _refusal(error) from None

    def pick_preset(self, resumed: str, before: str, picked: str, strategy: str, devices: Any, *raw: Any) -> list[Any]:
        """Switches to a preset of the table, unless a run is resumed, whose preset is fixed; empties the field."""
        if resumed or not picked:
            return ["", *[gr.skip()] * (4 + len(self.fields) + len(NAMING))]
        return ["", *self.switch_preset(before, picked, strategy, devices, *raw)]

    def switch_method(self, resumed: str, preset: str, strategy: str, devices: Any, *raw: Any) -> list[Any]:
        """Switches to the preset's variant for the new method, if there is one; not when resuming."""
        other = preset if resumed else self._preset_with(preset, raw)
        if other == preset:
            return [gr.skip()] * (4 + len(self.fields) + len(NAMING))
        return self.switch_preset(preset, other, strategy, devices, *raw)

    def follow_data(self, resumed: str, preset: str, *raw: Any) -> list[Any]:
        """Clears the options about the preset's own data when other data is chosen, and restores them afterwards."""
        before, form_values = dict(zip(NAMING, raw, strict=False)), self._values(raw[len(NAMING) :])
        try:
            texts = {} if resumed else follow_data(preset or None, before, form_values)
        except ConfigError:  # the preview reports it
            return [gr.skip()] * (len(NAMING) + len(DESCRIBING))
        updates = {
            field.name: component_value(field, texts[field.name])
            for field in by_name(DESCRIBING)
            if field.name in texts
        }
        return [
            *(texts.get(name, text_of(form_values[name])) for name in NAMING),
            *(updates.get(name, gr.skip()) for name in DESCRIBING),
        ]

    def take_upload(self, path: str) -> str:
        """Stores an uploaded file in the uploads folder; returns its path."""
        try:
            return str(store_upload(Path(path), self.context.uploads))
        except ConfigError as error:
            raise _refusal(error) from None

    def read_yaml(self, path: str) -> list[Any]:
        """Fills the form from a saved config."""
        try:
            return self._fill(load_yaml(read_text(Path(path)), self.context.roots), devices=False)
        except ConfigError as error:
            raise _refusal(error) from None
        finally:
            remove_received(Path(path), self.context.uploads)

    def open_page(self, welcome: Welcome) -> Callable[[str, gr.Request], list[Any]]:
        """A handler that answers with all that the page shows at first; one round trip, as the page waits for it."""

        def opened(draft: str, request: gr.Request) -> list[Any]:
            filled, saved = self.prefill(draft, request), read_draft(draft)
            job = self.where.values(saved.job if saved and "resume" not in request.query_params else {})
            form = [*self._values_after(filled), *job]
            fields = [*filled, *job, *self.where.switch(job[0])]
            return [*welcome.greet(), *fields, *self.refresh(*form), *self.cards.refresh("", *form)]

        return opened

    def _values_after(self, filled: Sequence[Any]) -> list[Any]:
        """The inputs of `refresh` once the page has taken the updates of `prefill`."""
        components = [self.preset, self.before, self.strategy, self.devices, *self.options]
        preset, _, strategy, devices, *raw = [
            update.get("value", component.value) if isinstance(update, dict) else update
            for component, update in zip(components, filled, strict=False)
        ]
        return [filled[-3], False, preset, strategy, devices, *raw]

    def prefill(self, draft: str, request: gr.Request) -> list[Any]:
        """Fills the form from `?resume=`, `?clone=` or `?from_run=RUN`, `?preset=NAME`, or from the tab's draft."""
        query = dict(request.query_params)
        saved = read_draft(draft)
        new_run: list[Any] = ["", gr.update(visible=False), gr.update(value=False, visible=False)]
        try:
            if query.get("resume"):
                form = resume_form(query["resume"], self.context.runs_dir)
                return self._fill_resume(form, read_draft(draft, form.texts))
            if choices := saved or choices_of(query, self.context.runs_dir):
                updates = self._fill(choices, devices=bool(saved or query.get("clone")))
                if query.get("from_run") and (start := choices.values.get("from_run")):
                    new_run[1] = gr.update(value=start_banner(start), visible=True)
                return [*self._with_gpus(updates, choices.preset or ""), *new_run]
        except ConfigError as error:  # show the form anyway, as if there were no query
            new_run[1] = gr.update(value=alert_list(error.lines), visible=True)
        return [*self._with_gpus([gr.skip()] * (4 + len(self.fields) + len(NAMING))), *new_run]

    def _fill_resume(self, form: ResumeForm, saved: Choices | None) -> list[Any]:
        """Fills the form to resume a run; its preset is fixed."""
        choices, texts = (saved or form.choices), {**form.texts, **(saved.values if saved else {})}
        options = [gr.update(value=component_value(field, texts[field.name])) for field in self.fields]
        options += [texts[name] for name in NAMING]
        preset = form.choices.preset or ""
        locked = gr.update(value=preset, interactive=False)
        filled = [locked, preset, choices.strategy or "", self._devices(choices), *options]
        banner = gr.update(value=resume_banner(form), visible=True)
        return [*self._with_gpus(filled, preset), form.run.id, banner, gr.update(visible=True)]

    def _with_gpus(self, updates: list[Any], preset: str = FIRST_PRESET) -> list[Any]:
        """Adds the GPUs with their current holders; ticks the preset's default unless the choices name others."""
        if self.gpus:
            gpus, chosen = gpu_choices(), updates[_DEVICES]
            ticked = DefaultGpus(tuple(map(int, chosen))) if isinstance(chosen, list) else default_gpus(preset, gpus)
            updates[_DEVICES] = gr.update(choices=gpu_labels(gpus), **gpu_selection(ticked))
        return updates

    def start(
        self, confirmed: str, resumed: str, force: bool, preset: str, strategy: str | None, devices: Any, *raw: Any
    ) -> Iterator[list[Any]]:
        """Starts or resumes the run; shows progress, and asks for confirmation when it is not expected to fit."""
        label = self._label(resumed, raw)
        current = self._preview(resumed, force, preset, strategy, devices, raw)
        if current.job is None:
            yield [panel(current), gr.Button(interactive=False), "", confirmed]
            return
        job = current.job
        if current.slurm is None and known_verdict(job) is None:
            yield [panel(current, "Checking memory ..."), gr.Button("Checking ...", interactive=False), "", confirmed]
        if current.slurm is None and memory_verdict(job).line and not confirmed:
            yield [panel(current), gr.Button(_LAUNCH_ANYWAY, interactive=True), "", _LAUNCH_ANYWAY]
            return
        waiting = "Checking data and model; this takes some seconds ..."
        yield [panel(current, waiting), gr.Button("Starting ...", interactive=False), "", confirmed]
        try:
            if current.slurm:
                slurm.start(job, current.slurm)
            else:
                start(job)
        except ConfigError as error:
            rejected = Preview(by_field(error.mistakes), current.warnings)
            yield [panel(rejected), gr.Button(label, interactive=True), "", ""]
        except CheckBroke as error:
            lines = [error.cause, *error.output.strip().splitlines()[-1:]]
            yield [panel(Preview(by_field(ConfigError(lines).mistakes))), gr.Button(label, interactive=True), "", ""]
        else:
            done = "Submitted" if current.slurm else "Started"
            yield [panel(current, f"{done} {job.run.id}; opening its page ..."), gr.Button(done), job.run.id, ""]
