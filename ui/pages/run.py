"""The Run page: a run's state, charts, log, checkpoints and settings, and the actions its state allows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

import gradio as gr
from starlette.responses import Response

from app.diagnosis.advice import Change, diagnose
from app.eval.view import listed
from app.launch import actions, background
from app.launch.foreground import CheckBroke
from app.runs.answers import answers_view
from app.runs.detail import checkpoints, run_files, run_view
from app.runs.fixed_prompts import prompt_answers
from app.runs.log import find_in_log, log_writers, read_log
from app.runs.metrics import Curves
from app.runs.runs import run_of_id
from app.services.diagnosis import Diagnoses, remedied
from app.services.planned_memory import PlannedMemory
from app.sweep.record import SweepFolder
from app.sweep.report import comparison_of
from trainers.config.byte_text import byte_text
from trainers.config.mistakes import ConfigError
from trainers.run.folder import END_STATES, RunFolder
from ui.context import ServerContext
from ui.live import json_response, live_part
from ui.pages.evaluate_parts import run_evaluations
from ui.pages.run_export import ExportPart, export_part
from ui.pages.run_parts import details, diagnosis_cards, headline, remedies_of, remedy_label, unknown_run
from ui.pages.run_proof import ProofPart, proof_parts
from ui.parts import alert_list, element, loading, section

_POLL_SECONDS = 1.0
"""Seconds between two refreshes."""
_BUTTONS = {
    "stop": "Stop and save", "save": "Save now", "stop_without_saving": "Stop without saving", "cancel": "Cancel",
    "move_up": "Move up", "move_down": "Move down", "clone_live": "Clone", "resume": "Resume",
    "resume_changed": "Resume with changes", "train_further": "Train further", "export": "Export", "clone": "Clone",
    "rename": "Rename", "delete": "Delete",
}  # fmt: skip
_WHILE_LIVE = ("stop", "save", "stop_without_saving", "cancel", "move_up", "move_down", "clone_live")
"""Actions of a run that has not ended, in a row of their own; `clone` has a button in either row."""
_PANELS = ("stop_without_saving", "rename", "delete", "export")
"""Actions that open a panel first."""
_NAVIGATE = "(address) => { if (address) location.assign(address); }"
_WATCH = "(id) => { if (id) Notices.watch(id); }"
_MAX_REMEDIES = 6
"""Most remedies with a button."""
_QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def build(context: ServerContext) -> None:
    """Lays out the page."""
    _Page(context).lay_out()


def _run(context: ServerContext, request: gr.Request) -> RunFolder:
    """The run in the page's URL."""
    return run_of_id(request.query_params.get("run"), context.runs_dir)


def _compared(run: RunFolder, view: dict[str, Any]) -> dict[str, str] | None:
    """The query of the Compare page for the sweep of a run; None if it has none, or that is gone."""
    if not view["sweep"]:
        return None
    folder = SweepFolder(run.path.parent / view["sweep"]["sweep"])
    try:
        return comparison_of(folder, folder.read())
    except ConfigError:
        return None


def _remedy_buttons(changes: Sequence[Change], state: str) -> list[Any]:
    """Updates for the buttons of these remedies. The first is what to do about a failure, not to resume as before."""
    variants = ["primary" if state == "failed" and number == 0 else "secondary" for number in range(len(changes))]
    updates = [
        gr.update(value=remedy_label(change, state), visible=True, variant=variant)
        for change, variant in zip(changes, variants, strict=True)
    ]
    return [*updates, *[gr.update(visible=False)] * (_MAX_REMEDIES - len(updates))]


def _shown_buttons(allowed: Sequence[str], has_ended: bool) -> set[str]:
    """The buttons of the actions that a run allows."""
    return {"clone_live" if name == "clone" and not has_ended else name for name in allowed}


class _Page:
    """The components and their event handlers; holds no state of a visitor."""

    def __init__(self, context: ServerContext):
        self.context = context
        self.curves = Curves()
        self.diagnoses = Diagnoses(self.curves)
        self.memory = PlannedMemory(self.curves)
        self.proof = ProofPart(lambda request: _run(context, request))
        self.export = ExportPart(lambda request: _run(context, request))

    def lay_out(self) -> None:
        self.head = gr.HTML(loading(), apply_default_css=False)
        self.flags = gr.Textbox(visible=False, label="remedies")
        self.address, self.started = gr.Textbox(visible=False), gr.Textbox(visible=False)
        self.message = gr.HTML(apply_default_css=False, render=False)
        self.buttons, self.panels = dict[str, gr.Button](), dict[str, gr.Group]()
        self._lay_out_buttons(_WHILE_LIVE)  # above the diagnosis, which must not move them when it comes
        self._confirm("stop_without_saving", "Stop now", "All progress since the last checkpoint is lost.",
                      lambda run: actions.stop(run, save=False), "stop without saving requested")  # fmt: skip
        self.watch = gr.HTML(
            html_template='<div class="ts-watch"></div>', js_on_load="Notices.control(element)", visible=False,
            apply_default_css=False, padding=False,
        )  # fmt: skip
        self._lay_out_diagnosis()
        self._lay_out_buttons([name for name in _BUTTONS if name not in _WHILE_LIVE])
        self.message.render()
        self._lay_out_panels()
        self.export.lay_out_status()
        with gr.Column() as self.body:
            self._lay_out_body()
        self.digest = gr.Textbox(visible=False)
        outputs = [self.head, self.details, self.body, self.message, self.watch, *self.buttons.values(),
                   self.diagnosis, *self.remedies, self.flags, *self.proof.outputs, self.evaluations,
                   *self.export.outputs, self.digest]  # fmt: skip
        gr.on(None, self.refresh, self.digest, outputs, **_QUIET)
        gr.Timer(_POLL_SECONDS).tick(self.refresh, self.digest, outputs, **_QUIET)
        self._connect_buttons()

    def _lay_out_buttons(self, names: Sequence[str]) -> None:
        with gr.Row(elem_classes="ts-actions"):
            self.buttons |= {
                name: gr.Button(
                    label, visible=False, size="sm", min_width=100 if len(label) < 14 else 160, scale=0,
                    elem_id=f"run-{name}",
                    variant="primary" if name == "resume" else "secondary",
                )
                for name, label in _BUTTONS.items()
                if name in names
            }  # fmt: skip

    def _lay_out_diagnosis(self) -> None:
        self.diagnosis = gr.HTML(apply_default_css=False, elem_id="run-diagnosis")
        with gr.Row(elem_classes=["ts-actions", "ts-remedies"]):
            self.remedies = [
                gr.Button(visible=False, size="sm", scale=0, min_width=160, elem_id=f"run-remedy-{number}")
                for number in range(1, _MAX_REMEDIES + 1)
            ]

    def _lay_out_body(self) -> None:
        def curves(request: dict[str, Any]) -> Response:
            return json_response(lambda: self.curves.view(self._requested_run(request), request.get("since")))

        def log_lines(request: dict[str, Any]) -> Response:
            return json_response(lambda: read_log(self._requested_run(request), request))

        def log_find(request: dict[str, Any]) -> Response:
            return json_response(lambda: find_in_log(self._requested_run(request), request))

        def log_writers_(request: dict[str, Any]) -> Response:
            return json_response(lambda: {"ranks": log_writers(self._requested_run(request))})

        def rank_curves(request: dict[str, Any]) -> Response:
            metric, every, since = request.get("metric"), request.get("every") is True, request.get("since")
            return json_response(lambda: self.curves.by_rank(self._requested_run(request), metric, every, since))

        def memory(request: dict[str, Any]) -> Response:
            plan = request.get("plan") is True
            return json_response(lambda: self.memory.view(self._requested_run(request), plan))

        def answers(request: dict[str, Any]) -> Response:
            step, prompt, since = request.get("step"), request.get("prompt", 0), request.get("since")
            return json_response(lambda: answers_view(self._requested_run(request), step, prompt, since))

        def fixed_prompts(request: dict[str, Any]) -> Response:
            prompt, since = request.get("prompt", 0), request.get("since")
            return json_response(lambda: prompt_answers(self._requested_run(request), prompt, since))

        log_writers_.__name__ = "log_writers"
        live_part("charts", "run", [curves], "Charts")
        live_part("fixed-prompts", "fixed_prompts", [fixed_prompts], "Answers")
        live_part("answers", "answers", [answers], "Sampled answers")
        live_part("ranks", "ranks", [rank_curves], "Ranks, one process each")
        live_part("memory", "memory", [memory], "Memory by rank")
        self.proof.lay_out()
        self.evaluations = gr.HTML(apply_default_css=False, elem_id="run-evaluations")
        live_part("logs", "log", [log_lines, log_find, log_writers_], "Log")
        self.details = gr.HTML(apply_default_css=False)

    def _requested_run(self, request: Any) -> RunFolder:
        return run_of_id(request.get("run") if isinstance(request, dict) else None, self.context.runs_dir)

    # -- refresh -----------------------------------------------------------------------------------------------------

    def refresh(self, digest: str | None, request: gr.Request) -> list[Any]:
        """Updates all parts from `head` to `digest`; skips what has not changed."""
        try:
            run = _run(self.context, request)
            view = run_view(run, self.curves)
            diagnoses = self.diagnoses.of(run, [view["state"], view["cause"], view["attempt"]])
        except ConfigError as error:
            hidden = [gr.update(visible=False)] * len(self.buttons)
            no_remedies = [gr.update(visible=False)] * _MAX_REMEDIES
            gone, no_proof = gr.update(visible=False), [gr.skip()] * len(self.proof.outputs)  # it is in the body
            parts = [unknown_run(error.lines), "", gone, "", gone, *hidden, "", *no_remedies, ""]
            return [*parts, *no_proof, gr.skip(), "", gr.update(visible=False), "", ""]
        startable = view["state"] in END_STATES
        changes = remedies_of(diagnoses)[:_MAX_REMEDIES] if startable else []
        cards = diagnosis_cards(diagnoses, view["state"], view["cause"])
        parts = [
            headline(view, _compared(run, view), bool(diagnoses)), details(view, run_files(run)),
            " ".join(view["actions"]), f"{cards}<!--{startable}-->",
        ]  # fmt: skip
        parts += [*proof_parts(run), run_evaluations(run, *listed(self.context.runs_dir, run.id)), export_part(run)]
        digests = [hashlib.sha256(part.encode()).hexdigest()[:12] for part in parts]
        old_digests = str(digest or "").split(" ")
        old_digests = old_digests if len(old_digests) == len(digests) else [""] * len(digests)
        if old_digests == digests:
            own = len(self.proof.outputs) + len(self.export.outputs)
            return [gr.skip()] * (len(self.buttons) + _MAX_REMEDIES + own + 9)
        changed = [new != old for new, old in zip(digests, old_digests, strict=True)]
        visible = _shown_buttons(view["actions"], startable)
        buttons = [gr.update(visible=name in visible) if changed[2] else gr.skip() for name in self.buttons]
        if changed[2] or changed[3]:
            plain = "secondary" if changes and view["state"] == "failed" else "primary"
            buttons[list(self.buttons).index("resume")] = gr.update(visible="resume" in view["actions"], variant=plain)
        watch = gr.update(visible=not startable) if changed[2] else gr.skip()
        body = gr.update(visible=True) if not old_digests[0] else gr.skip()
        message = "" if old_digests[2] and changed[2] else gr.skip()  # a message about an earlier state is obsolete
        head, details_html = (panel if new else gr.skip() for panel, new in zip(parts[:2], changed[:2], strict=True))
        remedies = [gr.skip()] * (_MAX_REMEDIES + 2)
        if changed[3]:
            remedies = [cards, *_remedy_buttons(changes, view["state"]), "\n".join(change.flags for change in changes)]
        proof = self.proof.updates(parts[4:6], changed[4:6])
        exported = self.export.updates(parts[7], changed[7])
        last = [parts[6] if changed[6] else gr.skip(), *exported, " ".join(digests)]
        return [head, details_html, body, message, watch, *buttons, *remedies, *proof, *last]

    # -- actions -----------------------------------------------------------------------------------------------------

    def _act(self, action: Callable[[RunFolder], Any], success: str, request: gr.Request) -> str:
        """Performs an action; returns a message of its success or error."""
        try:
            action(_run(self.context, request))
        except ConfigError as error:
            return alert_list(error.lines)
        except CheckBroke as error:
            return alert_list([error.cause, *error.output.strip().splitlines()[-1:]])
        return alert_list([success], "good") if success else ""

    def _connect_buttons(self) -> None:
        handlers: dict[str, tuple[Callable[[RunFolder], Any], str]] = {
            "stop": (actions.stop, "stop requested; the run saves and ends after its current step"),
            "save": (actions.save, "checkpoint requested; the run saves it after its current step and continues"),
            "cancel": (actions.stop, "cancelled"),
            "move_up": (lambda run: actions.move(run, -1), ""),
            "move_down": (lambda run: actions.move(run, 1), ""),
        }
        for name, (work, done) in handlers.items():
            self.buttons[name].click(self._handler(work, done), None, self.message, api_visibility="private")

        def resume(run: RunFolder, _: str) -> RunFolder:
            actions.resume(run)
            return run

        self._connect_start(self.buttons["resume"], resume, "resumed; the run continues in the background")
        for index, button in enumerate(self.remedies):
            success = "resumed with this remedy; the run continues in the background"
            self._connect_start(button, self._apply_remedy(index), success)
        self._link_to_form("clone", "clone")
        self._link_to_form("clone_live", "clone")
        self._link_to_form("train_further", "from_run")
        self._link_to_form("resume_changed", "resume")

    def _apply_remedy(self, index: int) -> Callable[[RunFolder, str], RunFolder]:
        """Starts a run with the remedy of this index among the options that the page showed; returns the run."""

        def apply(run: RunFolder, listed: str) -> RunFolder:
            flags = dict(enumerate(listed.splitlines()))
            job = remedied(run, diagnose(run, self.curves), flags.get(index, ""))
            background.start(job)
            return job.run

        return apply

    def _connect_start(self, button: gr.Button, start: Callable[[RunFolder, str], RunFolder], success: str) -> None:
        """Makes the button start a run; the browser then watches it, and opens its page if it is a new one.

        Args:
            button: the button.
            start: takes the run of the page and the remedies that were shown; returns the run that it has started.
            success: the message if that is the run of the page.
        """

        def handler(listed: str, request: gr.Request) -> list[str]:
            id_and_address = ["", ""]

            def work(run: RunFolder) -> None:
                started = start(run, str(listed or ""))
                address = "" if started.path == run.path else f"run?{urlencode({'run': started.id})}"
                id_and_address[:] = [started.id, address]

            return [self._act(work, success, request), *id_and_address]

        outputs = [self.message, self.started, self.address]
        event = button.click(handler, self.flags, outputs, api_visibility="private")
        event.then(None, self.started, None, js=_WATCH).then(None, self.address, None, js=_NAVIGATE)

    def _link_to_form(self, name: str, key: str) -> None:
        """Makes the button open the Train page with this run in the URL."""

        def address(request: gr.Request) -> str:
            return "./?" + urlencode({key: request.query_params.get("run") or ""})

        self.buttons[name].click(address, None, self.address, **_QUIET).then(None, self.address, None, js=_NAVIGATE)

    def _handler(self, action: Callable[[RunFolder], Any], success: str) -> Callable[[gr.Request], str]:
        def handler(request: gr.Request) -> str:
            return self._act(action, success, request)

        return handler

    def _lay_out_panels(self) -> None:
        self._confirm("delete", "Delete permanently", "", actions.delete, "")
        self._rename()
        self._export()

    def _panel(self, name: str) -> tuple[gr.Group, gr.HTML]:
        panel = gr.Group(visible=False, elem_classes="ts-panel", elem_id=f"panel-{name}")
        self.panels[name] = panel
        with panel:
            question = gr.HTML(padding=True, apply_default_css=False)
        return panel, question

    def _open(self, name: str, fill: Callable[..., Any], outputs: list[Any]) -> None:
        """Makes the button open and fill its panel, and close the others."""
        others = [self.panels[other] for other in _PANELS if other != name and other in self.panels]

        def opened(request: gr.Request) -> list[Any]:
            closed = [gr.update(visible=False)] * len(others)
            try:
                return [gr.update(visible=True), "", *closed, *fill(_run(self.context, request))]
            except ConfigError as error:
                return [gr.skip(), alert_list(error.lines), *closed, *[gr.skip()] * len(outputs)]

        self.buttons[name].click(opened, None, [self.panels[name], self.message, *others, *outputs], **_QUIET)

    def _panel_buttons(self, name: str, label: str, danger: bool = False) -> gr.Button:
        """Lays out the buttons at the end of a panel; returns the one that confirms."""
        with gr.Row():
            confirm = gr.Button(label, variant="stop" if danger else "primary", size="sm", elem_id=f"sure-{name}")
            cancel = gr.Button("Cancel", size="sm")
        cancel.click(lambda: gr.update(visible=False), None, self.panels[name], **_QUIET)
        return confirm

    def _confirm(self, name: str, label: str, warning: str, action: Callable[[RunFolder], Any], success: str) -> None:
        panel, question = self._panel(name)
        with panel:
            confirm = self._panel_buttons(name, label, danger=True)

        def fill(run: RunFolder) -> list[str]:
            if name == "delete":
                size = byte_text(actions.size(run))
                text = f"Checkpoints, exports, metrics and log of {run.id} ({size}) will be deleted."
            else:
                saved = checkpoints(run)
                last = f"The last checkpoint is from step {saved[0]['step']}." if saved else "No checkpoint saved yet."
                text = f"{warning} {last}"
            return [section(f"{_BUTTONS[name]}?", element("p", text))]

        def act(request: gr.Request) -> list[Any]:
            message = self._act(action, success, request)
            address = "runs" if name == "delete" and not message else ""
            return [message, address, gr.update(visible=False)]

        self._open(name, fill, [question])
        confirm.click(act, None, [self.message, self.address, panel], api_visibility="private").then(
            None, self.address, None, js=_NAVIGATE
        )

    def _rename(self) -> None:
        panel, question = self._panel("rename")
        with panel:
            name = gr.Textbox(label="New name", info="letters, digits, dots, dashes and underscores", max_lines=1)
            confirm = self._panel_buttons("rename", "Rename")

        def act(new: str, request: gr.Request) -> list[Any]:
            message = self._act(lambda run: actions.rename(run, str(new or "").strip()), "", request)
            return [message, "" if message else f"run?{urlencode({'run': str(new).strip()})}"]

        self._open("rename", lambda run: [section("Rename?", ""), run.id], [question, name])
        gr.on([confirm.click, name.submit], act, name, [self.message, self.address], api_visibility="private").then(
            None, self.address, None, js=_NAVIGATE
        )

    def _export(self) -> None:
        panel, question = self._panel("export")
        with panel:
            self.export.lay_out_form()
            confirm = self._panel_buttons("export", "Export")

        def fill(run: RunFolder) -> list[Any]:
            text = element("p", "Writes a folder that transformers or peft can load, in the background. It replaces "
                           "an earlier export of the same kind once it is complete.")  # fmt: skip
            return [section("Export?", text), *self.export.fill(run)]

        def act(checkpoint: Any, merged: Any, averaged: Any, gguf: Any, request: gr.Request) -> list[Any]:
            message = self._act(lambda run: self.export.start(run, checkpoint, merged, averaged, gguf), "", request)
            return [message, gr.skip() if message else gr.update(visible=False)]

        self._open("export", fill, [question, *self.export.fields])
        chosen = self.export.fields[:-1]
        confirm.click(act, chosen, [self.message, panel], api_visibility="private")
