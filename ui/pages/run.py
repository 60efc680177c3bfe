"""The Run page: one run's state, charts, log, checkpoints and settings, and the buttons that its state allows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import gradio as gr
from starlette.responses import Response

from app.launch import actions
from app.launch.foreground import CheckBroke
from app.runs.detail import checkpoints, run_files, run_view
from app.runs.log import find_in_log, log_piece, log_writers
from app.runs.metrics import Curves
from app.runs.runs import run_of_id
from trainers.config.options import ConfigError
from trainers.run.folder import RunFolder
from ui.context import Here
from ui.live import answer, live_part
from ui.pages.run_parts import details, headline, unknown
from ui.parts import alert_list, byte_text, element, section

_EVERY = 1.0
"""Seconds between two looks."""
_BUTTONS = {
    "stop": "Stop and save", "save": "Save now", "stop_without_saving": "Stop without saving", "cancel": "Cancel",
    "move_up": "Move up", "move_down": "Move down", "resume": "Resume",
    "resume_changed": "Resume with changes", "export": "Export", "clone": "Clone", "rename": "Rename",
    "delete": "Delete",
}  # fmt: skip
_PANELS = ("stop_without_saving", "rename", "delete", "export")
"""Actions that ask first."""
_GO = "(address) => { if (address) location.assign(address); }"
_QUIET: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}


def build(here: Here) -> None:
    """Lays out the page."""
    _Page(here).lay_out()


def _run(here: Here, request: gr.Request) -> RunFolder:
    """The run that the page's address names."""
    return run_of_id(request.query_params.get("run"), here.runs_dir)


class _Page:
    """The components, and what their events do; nothing of a visitor is kept here."""

    def __init__(self, here: Here):
        self.here, self.curves = here, Curves()

    def lay_out(self) -> None:
        self.head = gr.HTML(element("p", "Looking…", class_="ts-note"), apply_default_css=False)
        with gr.Row(elem_classes="ts-actions"):
            self.buttons = {
                name: gr.Button(
                    words, visible=False, size="sm", min_width=100 if len(words) < 14 else 160, scale=0,
                    elem_id=f"run-{name}",
                    variant="stop" if name == "delete" else "primary" if name in ("resume", "stop") else "secondary",
                )
                for name, words in _BUTTONS.items()
            }  # fmt: skip
        self.said = gr.HTML(apply_default_css=False)
        self.address = gr.Textbox(visible=False)
        self.panels: dict[str, gr.Group] = {}
        self._lay_out_panels()
        with gr.Column() as self.body:
            self._lay_out_body()
        self.digest = gr.Textbox(visible=False)
        outputs = [self.head, self.details, self.body, self.said, *self.buttons.values(), self.digest]
        gr.on(None, self.look, self.digest, outputs, **_QUIET)
        gr.Timer(_EVERY).tick(self.look, self.digest, outputs, **_QUIET)
        self._connect_simple()

    def _lay_out_body(self) -> None:
        def curves(request: dict[str, Any]) -> Response:
            return answer(lambda: self.curves.view(self._asked(request), request.get("since")))

        def log_lines(request: dict[str, Any]) -> Response:
            return answer(lambda: log_piece(self._asked(request), request))

        def log_find(request: dict[str, Any]) -> Response:
            return answer(lambda: find_in_log(self._asked(request), request))

        def log_writers_(request: dict[str, Any]) -> Response:
            return answer(lambda: {"ranks": log_writers(self._asked(request))})

        log_writers_.__name__ = "log_writers"
        live_part("charts", "run", [curves], "Charts")
        live_part("logs", "log", [log_lines, log_find, log_writers_], "Log")
        self.details = gr.HTML(apply_default_css=False)

    def _asked(self, request: Any) -> RunFolder:
        return run_of_id(request.get("run") if isinstance(request, dict) else None, self.here.runs_dir)

    # -- what is shown -----------------------------------------------------------------------------------------------

    def look(self, digest: str | None, request: gr.Request) -> list[Any]:
        """Head, details, body, what was said, buttons and digest; what has not changed is skipped."""
        try:
            run = _run(self.here, request)
            seen = run_view(run, self.curves)
        except ConfigError as error:
            hidden = [gr.update(visible=False)] * len(self.buttons)
            return [unknown(error.mistakes), "", gr.update(visible=False), "", *hidden, ""]
        parts = [headline(seen), details(seen, run_files(run)), " ".join(seen["actions"])]
        digests = [hashlib.sha256(part.encode()).hexdigest()[:12] for part in parts]
        before = str(digest or "").split(" ")
        before = before if len(before) == len(digests) else [""] * len(digests)
        if before == digests:
            return [gr.skip()] * (len(self.buttons) + 5)
        fresh = [new != old for new, old in zip(digests, before, strict=True)]
        shown = [gr.update(visible=name in seen["actions"]) if fresh[2] else gr.skip() for name in self.buttons]
        first = gr.update(visible=True) if not before[0] else gr.skip()
        said = "" if before[2] and fresh[2] else gr.skip()  # of a state that is over
        head, below = (part if new else gr.skip() for part, new in zip(parts[:2], fresh[:2], strict=True))
        return [head, below, first, said, *shown, " ".join(digests)]

    # -- what is done ------------------------------------------------------------------------------------------------

    def _act(self, work: Callable[[RunFolder], Any], done: str, request: gr.Request) -> str:
        """Does it, and says so or why not."""
        try:
            work(_run(self.here, request))
        except ConfigError as error:
            return alert_list(error.mistakes)
        except CheckBroke as error:
            return alert_list([error.cause, *error.output.strip().splitlines()[-1:]])
        except actions.ExportFailed as error:
            return alert_list([f"the export failed: {error}"])
        return alert_list([done], "good") if done else ""

    def _connect_simple(self) -> None:
        simple: dict[str, tuple[Callable[[RunFolder], Any], str]] = {
            "stop": (actions.stop, "asked to save and stop; it ends after its current step"),
            "save": (actions.save, "asked to save; it does so after its current step, and goes on"),
            "cancel": (actions.stop, "cancelled"),
            "resume": (actions.resume, "resumed; it goes on in the background"),
            "move_up": (lambda run: actions.move(run, -1), ""),
            "move_down": (lambda run: actions.move(run, 1), ""),
        }
        for name, (work, done) in simple.items():
            self.buttons[name].click(self._handler(work, done), None, self.said, api_visibility="private")

        self._lead_to_form("clone", "clone")
        self._lead_to_form("resume_changed", "resume")

    def _lead_to_form(self, name: str, key: str) -> None:
        """The button opens the Train page with this run in its address."""

        def address(request: gr.Request) -> str:
            return "./?" + urlencode({key: request.query_params.get("run") or ""})

        self.buttons[name].click(address, None, self.address, **_QUIET).then(None, self.address, None, js=_GO)

    def _handler(self, work: Callable[[RunFolder], Any], done: str) -> Callable[[gr.Request], str]:
        def handler(request: gr.Request) -> str:
            return self._act(work, done, request)

        return handler

    def _lay_out_panels(self) -> None:
        self._confirm("stop_without_saving", "Stop now", "What was trained since the last checkpoint is lost.",
                      lambda run: actions.stop(run, save=False), "asked to stop without saving")  # fmt: skip
        self._confirm("delete", "Delete for good", "", actions.delete, "")
        self._rename()
        self._export()

    def _panel(self, name: str) -> tuple[gr.Group, gr.HTML]:
        panel = gr.Group(visible=False, elem_classes="ts-panel", elem_id=f"panel-{name}")
        self.panels[name] = panel
        with panel:
            question = gr.HTML(padding=True, apply_default_css=False)
        return panel, question

    def _open(self, name: str, fill: Callable[..., Any], outputs: list[Any]) -> None:
        """The button opens its panel, filled, and closes the others."""
        others = [self.panels[one] for one in _PANELS if one != name and one in self.panels]

        def opened(request: gr.Request) -> list[Any]:
            closed = [gr.update(visible=False)] * len(others)
            try:
                return [gr.update(visible=True), "", *closed, *fill(_run(self.here, request))]
            except ConfigError as error:
                return [gr.skip(), alert_list(error.mistakes), *closed, *[gr.skip()] * len(outputs)]

        self.buttons[name].click(opened, None, [self.panels[name], self.said, *others, *outputs], **_QUIET)

    def _closing(self, name: str, words: str, danger: bool = False) -> gr.Button:
        """The buttons at the end of a panel; returns the one that does it."""
        with gr.Row():
            sure = gr.Button(words, variant="stop" if danger else "primary", size="sm", elem_id=f"sure-{name}")
            no = gr.Button("Leave it", size="sm")
        no.click(lambda: gr.update(visible=False), None, self.panels[name], **_QUIET)
        return sure

    def _confirm(self, name: str, words: str, warning: str, work: Callable[[RunFolder], Any], done: str) -> None:
        panel, question = self._panel(name)
        with panel:
            sure = self._closing(name, words, danger=True)

        def fill(run: RunFolder) -> list[str]:
            if name == "delete":
                held = byte_text(actions.size(run))
                text = f"{run.id} holds {held}: its checkpoints, exports, metrics and log. All of it will be removed."
            else:
                saved = checkpoints(run)
                last = f"The last checkpoint is of step {saved[0]['step']}." if saved else "No checkpoint is saved yet."
                text = f"{warning} {last}"
            return [section(f"{_BUTTONS[name]}?", element("p", text))]

        def act(request: gr.Request) -> list[Any]:
            said = self._act(work, done, request)
            gone = "runs" if name == "delete" and not said else ""
            return [said, gone, gr.update(visible=False)]

        self._open(name, fill, [question])
        sure.click(act, None, [self.said, self.address, panel], api_visibility="private").then(
            None, self.address, None, js=_GO
        )

    def _rename(self) -> None:
        panel, question = self._panel("rename")
        with panel:
            name = gr.Textbox(label="New name", info="letters, digits, dots, dashes and underscores", max_lines=1)
            sure = self._closing("rename", "Rename")

        def act(new: str, request: gr.Request) -> list[Any]:
            said = self._act(lambda run: actions.rename(run, str(new or "").strip()), "", request)
            return [said, "" if said else f"run?{urlencode({'run': str(new).strip()})}"]

        self._open("rename", lambda run: [section("Rename?", ""), run.id], [question, name])
        gr.on([sure.click, name.submit], act, name, [self.said, self.address], api_visibility="private").then(
            None, self.address, None, js=_GO
        )

    def _export(self) -> None:
        panel, question = self._panel("export")
        with panel:
            which = gr.Dropdown([], label="Checkpoint", info="the newest one first")
            merged = gr.Checkbox(label="Merge the adapter into the base", value=False)
            sure = self._closing("export", "Export")

        def fill(run: RunFolder) -> list[Any]:
            names = [one["name"] for one in checkpoints(run)]
            text = element("p", "Writes a folder that transformers or peft load. It may take minutes.")
            first = names[0] if names else None
            return [section("Export?", text), gr.update(choices=names, value=first)]

        def act(name: str, merge: bool, request: gr.Request) -> list[Any]:
            made = []

            def work(run: RunFolder) -> None:
                if name not in [one["name"] for one in checkpoints(run)]:
                    raise ConfigError(f"checkpoint={str(name)[:60]!r} is not in this run; choose one from the list")
                made.append(actions.export(run, name, merge is True))

            said = self._act(work, "", request)
            return [
                said or alert_list([f"exported to {made[0].folder}", made[0].check], "good"),
                gr.update(visible=False),
            ]

        which.preprocess = lambda value: value
        self._open("export", fill, [question, which])
        sure.click(act, [which, merged], [self.said, panel], api_visibility="private")
