"""The Evaluate page: starts evaluations in the background, and shows their progress and what came of them."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gradio as gr
from starlette.responses import Response

from app.eval.background import FIELDS, METRICS, command, model_choices, start, stop
from app.eval.folder import MAX_REPORT_BYTES, EvaluationFolder, evaluation_of_id
from app.eval.plan import ANSWER_TOKENS, BASE
from app.eval.view import entry, listed, result
from app.hardware import CPU_PROCESSES
from app.runs.runs import run_of_id
from app.runs.safe_read import Stamp, read_span, stamp
from app.services.chat import weights_of
from app.services.choices import gpu_choices, strategy_choices
from app.services.uploads import EXTENSIONS, store_upload
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED
from ui.context import ServerContext
from ui.live import json_response, live_part
from ui.pages.evaluate_parts import (
    LABELS,
    command_box,
    evaluations_table,
    files_part,
    headline,
    report_parts,
    unknown_evaluation,
)
from ui.pages.train_parts import PLAIN, cpu_tile, gpu_labels
from ui.parts import alert_list, loading, note, section, title

_POLL_SECONDS = 1.0
"""Seconds between two refreshes."""
_LEAD = "Compare models on the same rows: what they answer, how well they score, and what is more than chance."
_NO_MODEL = note("Choose a model in step 1: what it started from is evaluated beside it.")
_EMPTY = "None yet. Choose models above; the comparison appears here, and stays."
_BASES = [("what the first run started from", BASE), ("the first model of the list", "none")]
_QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
_NAVIGATE = "(address) => { if (address) location.assign(address); }"


def build(context: ServerContext) -> None:
    """Lays out the page."""
    _Page(context).lay_out()


class _Page:
    """The components and their event handlers; holds no state of a visitor.

    Args:
        context: the folders of the server.
    """

    def __init__(self, context: ServerContext):
        self.context = context

    # -- layout ------------------------------------------------------------------------------------------------------

    def lay_out(self) -> None:
        self.head = gr.HTML(loading(), apply_default_css=False, padding=False)
        self.stop = gr.Button("Stop", visible=False, size="sm", scale=0, min_width=100, elem_id="eval-stop")
        with gr.Group(visible=False, elem_classes="ts-panel", elem_id="eval-stop-panel") as self.stop_panel:
            gr.HTML(section("Stop?", note("The models that are done are compared; the others are not evaluated.")))
            with gr.Row():
                sure = gr.Button("Stop now", variant="stop", size="sm", elem_id="eval-sure-stop")
                cancel = gr.Button("Go on", size="sm")
        self.message = gr.HTML(apply_default_css=False, padding=False, elem_id="eval-message")
        with gr.Column(visible=False, elem_id="eval-form") as self.form:
            self._lay_out_form()
        self.result = gr.HTML(apply_default_css=False, padding=False, elem_id="eval-result")
        self.download = live_part("report", "report", [self.report])
        self.files = gr.HTML(apply_default_css=False, padding=False, elem_id="eval-files")
        self.digest, self.address = gr.Textbox(visible=False), gr.Textbox(visible=False)
        self._connect(sure, cancel)

    def _lay_out_form(self) -> None:
        with gr.Row():
            with gr.Column(scale=5, min_width=300, elem_id="eval-fields"):
                self._lay_out_fields()
            with gr.Column(scale=3, min_width=300, elem_id="eval-side"):
                gr.HTML("<h2>5. Start</h2>", padding=False, apply_default_css=False)
                self.start = gr.Button("Evaluate", variant="primary", elem_id="eval-start", size="md")
                self.mistakes = gr.HTML(apply_default_css=False, padding=False, elem_id="eval-mistakes")
                self.command = gr.HTML(_NO_MODEL, apply_default_css=False, padding=False, elem_id="eval-command")
        gr.HTML("<h2>Evaluations</h2>", padding=False, apply_default_css=False)
        self.list = gr.HTML(apply_default_css=False, padding=False, elem_id="eval-list")

    def _lay_out_fields(self) -> None:
        gr.HTML("<h2>1. Models</h2>", padding=False, apply_default_css=False)
        with gr.Row(elem_classes=["ts-fields", "ts-wide"]):
            self.models = gr.Dropdown(
                [], multiselect=True, allow_custom_value=True, label="Runs, checkpoints and other models",
                elem_id="opt-models", min_width=280,
                elem_classes=["ts-field"], info="Runs, with @ their checkpoints and exports; or enter a model folder "
                "or a Hub id.",
            )  # fmt: skip
            self.base = gr.Dropdown(
                _BASES, value=BASE, allow_custom_value=True, label="Compared with", elem_id="opt-base", min_width=280,
                elem_classes=["ts-field"], info="Or enter a run, a model folder or a Hub id.",
            )  # fmt: skip
        gr.HTML("<h2>2. Rows</h2>", padding=False, apply_default_css=False)
        with gr.Row(elem_classes=["ts-fields", "ts-wide"]):
            self.rows = self._text("dataset_name", "File or data set", "A file, or a Hub id of a data set.",
                                   "the first run's evaluation data")  # fmt: skip
            self.most = self._text("max_eval_samples", "Most rows", "The first so many rows are used.", "all")
        self.upload = gr.UploadButton(
            "Upload rows", file_types=list(EXTENSIONS), elem_id="eval-upload", size="md", scale=0, min_width=160
        )
        gr.HTML("<h2>3. Measures</h2>", padding=False, apply_default_css=False)
        self.metrics = gr.CheckboxGroup(
            [(LABELS[name][0], name) for name in METRICS], label="Metrics", elem_id="eval-metrics",
            info="With none ticked, those that fit the rows.",
        )  # fmt: skip
        with gr.Row(elem_classes=["ts-fields", "ts-wide"]):
            self.tokens = self._text("answer_tokens", "Longest answer, in tokens", "0: losses alone, which is fast.",
                                     str(ANSWER_TOKENS))  # fmt: skip
            self.schema = self._text("metric_schema", "JSON Schema", "A file, for the metric of that name.", "none")
        gr.HTML(note("Metrics in files of your own, forgetting, models that judge answers, and tasks of "
                     "lm-evaluation-harness run from the command line only: `tunesmith eval`. Their results are shown "
                     "here too."), padding=False, apply_default_css=False)  # fmt: skip
        gr.HTML("<h2>4. Where to run</h2>", padding=False, apply_default_css=False)
        with gr.Row(elem_classes=["ts-fields", "ts-wide"]):
            able = [choice.name for choice in strategy_choices("lora", None) if choice.reason is None]
            self.strategy = gr.Dropdown(
                [("chosen by the devices", ""), *((name, name) for name in able)], value="", label="Strategy",
                elem_id="opt-strategy", elem_classes=["ts-field"], min_width=280, num_choices_shown=100,
                info="Changes speed and memory. Those that split the model are refused.",
            )  # fmt: skip
            gpus = gpu_choices()
            self.gpus = gr.CheckboxGroup(
                gpu_labels(gpus), label="GPUs", elem_id="opt-gpus", visible=bool(gpus), elem_classes=["ts-field"],
                info="With none ticked, the free ones.", min_width=280,
            )  # fmt: skip
            self.processes = gr.Textbox(
                label="Processes on this computer", info=cpu_tile() if not gpus else "", max_lines=1,
                visible=not gpus, placeholder=str(CPU_PROCESSES), elem_id="opt-num_processes", html_attributes=PLAIN,
                elem_classes=["ts-field"], min_width=280,
            )  # fmt: skip

    def _text(self, name: str, label: str, info: str, placeholder: str) -> gr.Textbox:
        return gr.Textbox(
            label=label, info=info, placeholder=placeholder, max_lines=1, elem_id=f"opt-{name}", min_width=280,
            elem_classes=["ts-field"], html_attributes=PLAIN,
        )  # fmt: skip

    def _connect(self, sure: gr.Button, cancel: gr.Button) -> None:
        fields = [self.models, self.base, self.rows, self.most, self.tokens, self.metrics, self.schema, self.strategy,
                  self.gpus, self.processes]  # fmt: skip
        outputs = [self.head, self.stop, self.stop_panel, self.message, self.form, self.list, self.result,
                   self.download, self.files, self.digest]  # fmt: skip
        gr.on(None, self.prefill, None, [self.models, self.gpus], **_QUIET).then(
            self.preview, fields, self.command, preprocess=False, **_QUIET
        )
        gr.on(None, self.refresh, self.digest, outputs, **_QUIET)
        gr.Timer(_POLL_SECONDS).tick(self.refresh, self.digest, outputs, **_QUIET)
        # Handlers get raw values, which `app.eval.background` checks.
        gr.on([field.change for field in fields], self.preview, fields, self.command, preprocess=False,
              trigger_mode="always_last", **_QUIET)  # fmt: skip
        self.start.click(
            self.begin, fields, [self.mistakes, self.address], preprocess=False, trigger_mode="once",
            concurrency_limit=1, show_progress="minimal", api_visibility="private",
        ).then(None, self.address, None, js=_NAVIGATE)  # fmt: skip
        self.upload.upload(self.take_upload, self.upload, self.rows, show_progress="minimal", api_visibility="private")
        self.stop.click(lambda: gr.update(visible=True), None, self.stop_panel, **_QUIET)
        cancel.click(lambda: gr.update(visible=False), None, self.stop_panel, **_QUIET)
        sure.click(self.end, None, [self.message, self.stop_panel], **_QUIET)

    # -- events ------------------------------------------------------------------------------------------------------

    def prefill(self, request: gr.Request) -> list[Any]:
        """The models to choose from, with the run in the URL or else the newest chosen; and who holds the GPUs."""
        names = model_choices(self.context.runs_dir)
        chosen = [name for name in names[:1] if name != EMBEDDED]
        try:
            run = run_of_id(request.query_params.get("run"), self.context.runs_dir)
            weights = next(iter(weights_of(run)), None)
            chosen = [] if weights is None else [run.id if weights == "model" else f"{run.id}@{weights}"]
        except ConfigError:  # none, or none of that name
            pass
        return [gr.update(choices=list(dict.fromkeys([*names, *chosen])), value=chosen),
                gr.update(choices=gpu_labels(gpu_choices()))]  # fmt: skip

    def preview(self, *raw: Any) -> str:
        """The command that does what the form says."""
        if not raw[0]:
            return _NO_MODEL
        try:
            return command_box(command(dict(zip(FIELDS, raw, strict=True)), self.context.runs_dir))
        except ConfigError:
            return ""

    def begin(self, *raw: Any) -> list[str]:
        """Starts an evaluation; returns the mistakes, or the address of its page."""
        values, context = dict(zip(FIELDS, raw, strict=True)), self.context
        try:
            folder = start(values, context.runs_dir, context.roots, context.remote_code)
        except ConfigError as error:
            return [alert_list(error.lines), ""]
        return ["", f"evaluate?{urlencode({'eval': folder.id})}"]

    def take_upload(self, path: str) -> str:
        """Stores uploaded rows in the uploads folder; returns their path."""
        try:
            return str(store_upload(Path(path), self.context.uploads))
        except ConfigError as error:
            raise gr.Error(str(error)) from None

    def end(self, request: gr.Request) -> list[Any]:
        """Stops the evaluation of the page."""
        try:
            stop(evaluation_of_id(request.query_params.get("eval"), self.context.runs_dir))
        except ConfigError as error:
            return [alert_list(error.lines), gr.update(visible=False)]
        return ["", gr.update(visible=False)]

    def report(self, request: dict[str, Any]) -> Response:
        """The text of a report, if it is not too long to be sent."""

        def document() -> dict[str, str]:
            folder = evaluation_of_id(request.get("eval"), self.context.runs_dir)
            data, size = read_span(folder.report, 0, MAX_REPORT_BYTES)
            if not data:
                raise ConfigError("there is no report yet; it is written at the end")
            if size > MAX_REPORT_BYTES:
                raise ConfigError(f"report.json has {size:,} bytes, too many to be sent; copy it from {folder.path}")
            return {"text": data.decode("utf-8", "replace")}

        return json_response(document)

    # -- refresh -----------------------------------------------------------------------------------------------------

    def refresh(self, digest: str | None, request: gr.Request) -> list[Any]:
        """Updates all parts from `head` to `digest`; skips what has not changed."""
        name = request.query_params.get("eval")
        parts = self._form_parts() if name is None else self._evaluation_parts(name)
        digests = [hashlib.sha256(part.encode()).hexdigest()[:12] for part in parts]
        old = str(digest or "").split(" ")
        changed = [new != before for new, before in zip(digests, old, strict=True)] if len(old) == len(parts) else (
            [True] * len(parts))  # fmt: skip
        if not any(changed):
            return [gr.skip()] * 10
        head, entries, report, files, _ = (part if new else gr.skip()
                                               for part, new in zip(parts, changed, strict=True))  # fmt: skip
        updates = [gr.skip()] * 4
        if changed[4]:
            updates = [gr.update(visible=word in parts[4].split(" ")) for word in ("stop", "panel", "form", "download")]
        stop_button, panel, form, download = updates
        message = "" if changed[4] and digest else gr.skip()  # a message about an earlier state is obsolete
        return [head, stop_button, panel, message, form, entries, report, download, files, " ".join(digests)]

    def _form_parts(self) -> list[str]:
        entries, total = listed(self.context.runs_dir)
        return [title("Evaluate", _LEAD), evaluations_table(entries, total, _EMPTY), "", "", "form"]

    def _evaluation_parts(self, name: str) -> list[str]:
        try:
            folder = evaluation_of_id(name, self.context.runs_dir)
        except ConfigError as error:
            return [unknown_evaluation(error.lines), "", "", "", ""]
        return evaluation_parts(folder)


def evaluation_parts(folder: EvaluationFolder) -> list[str]:
    """Head, list (empty), report, files of an evaluation, and the names of what is visible."""
    state = entry(folder)
    flags = ["stop"] if state["state"] == "running" else []
    flags += ["download"] if state["has_report"] else []
    report = _report(folder.report, stamp(folder.report), state["has_report"])
    return [headline(state), "", report, files_part(state, folder.end_of_output()), " ".join(flags)]


@functools.lru_cache(maxsize=8)
def _report(path: Path, version: Stamp | None, has_report: bool) -> str:
    """A report as a page shows it; it may have a thousand rows, and each open page asks once a second."""
    return str(report_parts(has_report, result(EvaluationFolder(path.parent))))
