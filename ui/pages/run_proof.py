"""The proof on the Run page: whether the run's strategy trains the same model as one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from app.prove.plan import STEPS
from app.services import proofs
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder
from ui.parts import (
    Html,
    Kind,
    alert_list,
    data_table,
    duration_text,
    element,
    join,
    meter,
    note,
    number_text,
    section,
)

_BUTTONS = {"prove": "Prove this strategy", "control": "Prove with a known fault", "stop": "Stop the proof"}
_KINDS: dict[str | None, Kind] = {
    "agrees": "good", "fault seen": "good", "differs": "error", "failed": "error", "fault not seen": "error",
}  # fmt: skip


class ProofPart:
    """The components and their event handlers; holds no state of a visitor.

    Args:
        requested_run: the run in a request's URL; raises ConfigError if there is none.
    """

    def __init__(self, requested_run: Callable[[gr.Request], RunFolder]):
        self._requested_run = requested_run

    def lay_out(self) -> None:
        """Adds the components to the page."""
        self.status = gr.HTML(apply_default_css=False, elem_id="run-proof", padding=False)
        with gr.Row(elem_classes="ts-actions"):
            self.buttons = {
                name: gr.Button(label, visible=False, size="sm", scale=0, min_width=200, elem_id=f"run-proof-{name}")
                for name, label in _BUTTONS.items()
            }
        self.message = gr.HTML(apply_default_css=False, padding=False)
        self.results = gr.HTML(apply_default_css=False, elem_id="run-proof-results", padding=False)
        self.outputs = [self.status, *self.buttons.values(), self.message, self.results]
        actions: dict[str, Callable[[RunFolder], Any]] = {
            "prove": proofs.start,
            "control": lambda run: proofs.start(run, control=True),
            "stop": proofs.stop,
        }
        for name, action in actions.items():
            self.buttons[name].click(self._handler(action), None, self.message, api_visibility="private")

    def _handler(self, action: Callable[[RunFolder], Any]) -> Callable[[gr.Request], str]:
        def handler(request: gr.Request) -> str:
            try:
                action(self._requested_run(request))
            except ConfigError as error:
                return alert_list(error.lines)
            return ""

        return handler

    def updates(self, parts: Sequence[str], changed: Sequence[bool]) -> list[Any]:
        """Values for `outputs`; a message about an earlier state is removed.

        Args:
            parts: from `proof_parts`.
            changed: which of them the page does not show yet.
        """
        status, results = (part if new else gr.skip() for part, new in zip(parts, changed, strict=True))
        if not changed[0]:
            return [*[gr.skip()] * (len(self.outputs) - 1), results]
        names = parts[0].rpartition("<!--")[2].removesuffix("-->").split(" ")
        return [status, *(gr.update(visible=name in names) for name in self.buttons), "", results]


def proof_parts(run: RunFolder) -> tuple[Html, Html]:
    """What a proof is, with the progress of one that runs; and the verdicts of the last ones.

    The first ends in a comment that names the buttons.
    """
    entries = proofs.newest(run)
    running, ended = ([entry for entry in entries if entry["running"] is state] for state in (True, False))
    refusal = "" if running else proofs.refusal(run)
    lead = note(f"This run cannot be proved: {refusal}.") if refusal else _lead(run)
    names = "stop" if running else "" if refusal else "prove control"
    status = join([section("Proof", join([lead, *map(_progress, running)])), Html(f"<!--{names}-->")])
    kinds = [_KINDS.get(entry["verdict"], "warning") for entry in ended]
    verdicts = [alert_list([entry["sentence"], _facts(entry)], kind) for entry, kind in zip(ended, kinds, strict=True)]
    results = [*verdicts, _numbers(ended), _files(run, ended)]
    return status, element("div", join(results), class_="ts-section") if ended else Html("")


def _lead(run: RunFolder) -> Html:
    return note(
        f"Does {proofs.subject(run)} train the same model as one process? A proof trains {STEPS} steps of this run "
        "both ways, on its devices, and compares loss and gradient norm of every step. With a known fault in the "
        "strategy, it has to find a difference."
    )


def _progress(entry: dict[str, Any]) -> Html:
    kind = "With a known fault: " if entry["control"] else ""
    return meter(entry["progress"], "proof", kind + ("stopping" if entry["stopping"] else entry["doing"]))


def _numbers(entries: list[dict[str, Any]]) -> Html:
    """The largest differences of the proofs that have a verdict, beside what is allowed."""
    judged = [entry for entry in entries if entry["verdict"]]
    if not judged:
        return Html("")
    allowed = judged[0]["tolerance"]
    rows = [
        [label, *(number_text(entry[name], 2) for entry in judged), number_text(allowed[limit], 2)]
        for label, name, limit in (
            ("Loss", "max_loss_difference", "loss"),
            ("Gradient norm", "max_grad_norm_difference", "grad_norm"),
        )
    ]
    headers = ["Difference", *("Fault" if entry["control"] else "Proof" for entry in judged), "Allowed"]
    return data_table(headers, rows, "Largest differences", numeric=range(1, len(headers)))


def _facts(entry: dict[str, Any]) -> str:
    started = f"{entry['started_at'][:16].replace('T', ' ')} UTC" if entry["started_at"] else "at an unknown time"
    facts = [f"Proof {entry['number']}", started]
    if entry["verdict"]:
        facts.append(f"took {duration_text(entry['seconds'])}")
        facts.append(f"{number_text(entry['bit_equal_steps'])} of {number_text(entry['steps'])} steps identical")
    return ", ".join(facts)


def _files(run: RunFolder, entries: list[dict[str, Any]]) -> Html:
    """The report and the output of each proof, folded, and the command for a terminal."""
    texts = {"The same from a terminal": proofs.command(run)}
    for entry in entries:
        kind = ", with a known fault" if entry["control"] else ""
        texts |= {f"{name} of proof {entry['number']}{kind}": content
                  for name, content in proofs.files(run, entry["number"]).items()}  # fmt: skip
    folds = [
        element("details", join([
            element("summary", label),
            element("pre", content, class_="ts-file", tabindex=0, role="region", aria_label=label),
        ]))
        for label, content in texts.items() if content
    ]  # fmt: skip
    return join([note(join(["Folder: ", element("code", run.path / "proofs")])), *folds])
