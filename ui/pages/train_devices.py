"""The step of the Train page that says where to train: on this machine, on several, or as a job of SLURM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from app.hardware import CPU_PROCESSES
from app.services.choices import GpuChoice
from app.services.form import DefaultGpus
from app.services.machines_form import MACHINES_FIELDS, SHARED, machines_texts, own_addresses
from app.services.slurm_form import SLURM_FIELDS, slurm_offered, slurm_texts
from ui.pages.train_parts import PLAIN, cpu_tile, gpu_labels, gpu_selection
from ui.parts import element, note

LOCAL, MACHINES, SLURM = "local", "machines", "slurm"
JOB_NAMES = ("on", *SLURM_FIELDS, *MACHINES_FIELDS)
"""Names of `DevicesPart.inputs`."""


_SEVERAL = (
    "This machine becomes machine 0; the devices above are those of each machine. Once it has started, the run's page "
    "shows the line to paste on each of the others, and who has joined."
)


class DevicesPart:
    """The devices of this machine, the options of several machines and, where SLURM is offered, those of its job.

    Args:
        gpus: the GPUs of this machine.
        default: those that are ticked.
        runs_dir: folder of run folders.
    """

    def __init__(self, gpus: Sequence[GpuChoice], default: DefaultGpus, runs_dir: Path):
        self.offered, self.runs_dir = slurm_offered(), runs_dir
        gr.HTML(element("h2", "6. Where to train"), apply_default_css=False)
        choices = [("This machine", LOCAL), ("Several machines", MACHINES), *([("SLURM", SLURM)] * self.offered)]
        self.target = gr.Radio(
            choices, value=LOCAL, label="Trains on", elem_id="opt-on", elem_classes=["ts-field"], interactive=True
        )
        with gr.Row(elem_classes=["ts-fields", "ts-wide"]) as self.local_row:
            common: dict[str, Any] = {"elem_id": "opt-gpus", "elem_classes": ["ts-field"], "min_width": 260}
            if gpus:
                self.devices: gr.components.Component = gr.CheckboxGroup(
                    gpu_labels(gpus), **gpu_selection(default), label="GPUs", **common
                )
            else:
                self.devices = gr.Textbox(
                    str(CPU_PROCESSES), label="Processes on this computer", info=cpu_tile(), max_lines=1,
                    html_attributes=PLAIN, **common,
                )  # fmt: skip
        with gr.Column(visible=False, elem_id="train-machines") as self.machines_column:
            gr.HTML(note(_SEVERAL))
            with gr.Row(elem_classes=["ts-fields"]):
                self.machines = _machines_fields(runs_dir)
        with gr.Column(visible=False, elem_id="train-slurm") as self.job_column:
            gr.HTML(note("The nodes must see the run folder, the data and this Python under the same paths."))
            with gr.Row(elem_classes=["ts-fields"]):
                start = slurm_texts()
                self.options = [
                    gr.Textbox(
                        start[name], label=label, info=help, max_lines=1, placeholder="the site's default",
                        elem_id=f"opt-{name}", elem_classes=["ts-field"], min_width=190, html_attributes=PLAIN,
                        interactive=True,
                    )
                    for name, (label, help) in SLURM_FIELDS.items()
                ]  # fmt: skip

    def values(self, texts: Mapping[str, str]) -> list[str]:
        """The values of `inputs`, with the site's defaults for those that a draft does not have."""
        offered = (MACHINES, SLURM) if self.offered else (MACHINES,)
        target = texts["on"] if texts.get("on") in offered else LOCAL
        filled = {**slurm_texts(), **machines_texts(self.runs_dir), **texts}
        return [target, *(filled[name] for name in JOB_NAMES[1:])]

    @property
    def parts(self) -> list[gr.components.Component | gr.Row | gr.Column]:
        """What `switch` shows and hides."""
        return [self.local_row, self.machines_column, self.job_column]

    @property
    def inputs(self) -> list[gr.components.Component]:
        """The choice, and the options of the job and of several machines."""
        return [self.target, *self.options, *self.machines]

    def connect(self, resumed: gr.components.Component) -> None:
        """Shows the part that was chosen.

        Args:
            resumed: the run that the form resumes, which stays where it was.
        """
        quick: dict[str, Any] = {"show_progress": "hidden", "queue": False, "api_visibility": "private"}
        self.target.change(self.switch, self.target, self.parts, **quick)
        resumed.change(self.keep_target, resumed, self.target, **quick)

    def switch(self, target: Any) -> list[Any]:
        """Which parts are visible."""
        return [gr.update(visible=visible) for visible in (target != SLURM, target == MACHINES, target == SLURM)]

    def keep_target(self, resumed: str) -> Any:
        """No choice when a run is resumed."""
        return gr.update(visible=not resumed, value=LOCAL)


def _machines_fields(runs_dir: Path) -> list[gr.components.Component]:
    """The fields of several machines, in the order of `MACHINES_FIELDS`."""
    start, fields = machines_texts(runs_dir), list[gr.components.Component]()
    for name, (label, help) in MACHINES_FIELDS.items():
        common: dict[str, Any] = {"value": start[name], "label": label, "info": help, "elem_id": f"opt-{name}",
                                  "elem_classes": ["ts-field"], "interactive": True, "min_width": 190}  # fmt: skip
        if name == SHARED:
            fields.append(gr.Radio([("yes", "yes"), ("no", "no")], **common))
        elif name == "main_process_ip":
            fields.append(gr.Dropdown(own_addresses(), allow_custom_value=True, **common))
        else:
            empty = "all of them" if name == "min_machines" else ""
            fields.append(gr.Textbox(**common, max_lines=1, placeholder=empty, html_attributes=PLAIN))
    return fields


def chosen_place(raw: Sequence[Any]) -> dict[str, Mapping[str, Any] | None]:
    """Where the run trains, as `app.services.form.preview` takes it: `slurm` and `machines`, of which one is set.

    Args:
        raw: values of `DevicesPart.inputs`; empty for an event that does not send them: this machine trains.
    """
    values = dict(zip(JOB_NAMES, raw, strict=True)) if raw else {}
    fields = {SLURM: SLURM_FIELDS, MACHINES: MACHINES_FIELDS}
    on = values.get("on")
    return {
        choice: {name: values[name] for name in names} if isinstance(on, str) and on == choice else None
        for choice, names in fields.items()
    }
