"""The step of the Train page that says where to train: on this machine's devices, or as a job of SLURM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from app.hardware import CPU_PROCESSES
from app.services.choices import GpuChoice
from app.services.form import DefaultGpus
from app.services.slurm_form import SLURM_FIELDS, slurm_offered, slurm_texts
from ui.pages.train_parts import PLAIN, cpu_tile, gpu_labels, gpu_selection
from ui.parts import element, note

LOCAL, SLURM = "local", "slurm"
JOB_NAMES = ("on", *SLURM_FIELDS)
"""Names of `DevicesPart.inputs`."""


class DevicesPart:
    """The devices of this machine and, where it is offered, the choice of SLURM with the options of its job.

    Args:
        gpus: the GPUs of this machine.
        default: those that are ticked.
    """

    def __init__(self, gpus: Sequence[GpuChoice], default: DefaultGpus):
        self.offered = slurm_offered()
        title = "6. Where to train" if self.offered else "6. GPUs" if gpus else "6. Processes"
        gr.HTML(element("h2", title), apply_default_css=False)
        self.target = gr.Radio(
            [("This machine", LOCAL), ("SLURM", SLURM)], value=LOCAL, label="Trains on", visible=self.offered,
            elem_id="opt-on", elem_classes=["ts-field"], interactive=True,
        )  # fmt: skip
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
        target = SLURM if self.offered and texts.get("on") == SLURM else LOCAL
        filled = {**slurm_texts(), **texts}
        return [target, *(filled[name] for name in SLURM_FIELDS)]

    @property
    def parts(self) -> list[gr.components.Component | gr.Row | gr.Column]:
        """What `switch` shows and hides."""
        return [self.local_row, self.job_column]

    @property
    def inputs(self) -> list[gr.components.Component]:
        """The choice, and the options of the job."""
        return [self.target, *self.options]

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
        chosen = target == SLURM
        return [gr.update(visible=visible) for visible in (not chosen, chosen)]

    def keep_target(self, resumed: str) -> Any:
        """No choice when a run is resumed."""
        return gr.update(visible=self.offered and not resumed, value=LOCAL)


def chosen_job(raw: Sequence[Any]) -> Mapping[str, Any] | None:
    """The options of SLURM's job; None if this machine trains.

    Args:
        raw: values of `DevicesPart.inputs`; empty for an event that does not send them.
    """
    return dict(zip(SLURM_FIELDS, raw[1:], strict=True)) if raw and raw[0] == SLURM else None
