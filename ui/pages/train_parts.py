"""What the Train page is made of: a component for every option, and the preview beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import gradio as gr

from app.form import Numbers, Preview
from app.form_choices import GpuChoice, StrategyChoice
from app.form_fields import COMMON, TITLES, FormField, fields
from app.request import Job
from app.training import where
from ui.parts import Html, alert_list, byte_text, element, join, key_values, note, number_text

PLACED = {
    "model": ("model_name_or_path",),
    "data": ("dataset_name", "eval_dataset_name", "eval_share"),
    "method": ("method", "lora_r", "lora_alpha"),
}
"""Options that stand in a step of their own, above the common ones."""
LABELS = {
    "model_name_or_path": "Base model",
    "dataset_name": "Training data",
    "eval_dataset_name": "Evaluation data",
    "eval_share": "Share held out for evaluation",
    "method": "Method",
}
HINTS = {
    "model_name_or_path": "Hub id or local folder",
    "dataset_name": "file, folder, glob or Hub id",
}
_PLAIN = gr.InputHTMLAttributes(autocomplete="off", autocorrect="off", autocapitalize="off", spellcheck=False)
_PLACED = {name for options in PLACED.values() for name in options}


def common_fields() -> list[FormField]:
    """The options that are in sight."""
    return by_name([name for name in COMMON if name not in _PLACED])


def other_fields() -> dict[str, list[FormField]]:
    """All other options, by the title of their section."""
    grouped: dict[str, list[FormField]] = {}
    for one in fields():
        if not one.common:
            grouped.setdefault(TITLES.get(one.section, one.section), []).append(one)
    return grouped


def by_name(names: Sequence[str]) -> list[FormField]:
    """The fields of these options, in this order."""
    known = {one.name: one for one in fields()}
    return [known[name] for name in names]


def shown_value(one: FormField, text: str) -> str | bool:
    """A value's text as its component shows it: blank for none where one writes, true or false for a check box."""
    if one.kind == "bool":
        return text == "true"
    return "" if one.optional and text == "none" and one.kind != "choice" else text


def component(one: FormField, text: str) -> gr.components.Component:
    """The component of an option, its docstring under its name."""
    limits = f" ({one.limits})" if one.limits and one.kind in ("int", "float") else ""
    own: dict[str, Any] = {
        "label": LABELS.get(one.name, one.name), "info": f"{one.help.removesuffix('.')}{limits}.",
        "value": shown_value(one, text), "elem_id": f"opt-{one.name}", "elem_classes": ["ts-field"], "min_width": 190,
        "interactive": True,
    }  # fmt: skip
    if one.kind == "bool":
        return gr.Checkbox(**own)
    if one.name == "method":
        return gr.Radio(list(one.choices), **own)
    if one.kind == "choice":
        return gr.Dropdown(list(one.choices), filterable=False, **own)
    hint = HINTS.get(one.name, "none" if one.optional else one.default or "")
    return gr.Textbox(max_lines=1, placeholder=hint, html_attributes=_PLAIN, **own)


# -- the preview -----------------------------------------------------------------------------------------------------


def panel(shown: Preview, waiting: str = "") -> Html:
    """Whether the run can start, what is wrong, and the numbers that follow.

    Args:
        shown: the preview.
        waiting: what is done at the moment, in place of whether it can start.
    """
    mistakes = [_jump(name, line) for name, lines in shown.errors.items() for line in lines]
    head: list[Html] = []
    if waiting:
        head = [alert_list([waiting], "info")]
    elif mistakes:
        count = f"{len(mistakes)} mistakes" if len(mistakes) > 1 else "1 mistake"
        head = [element("p", f"{count} to mend before it can start", class_="ts-verdict ts-verdict-bad")]
    elif shown.job:
        words = f"Ready to start: {shown.job.strategy.name} on {where(shown.job)}"
        head = [element("p", words, class_="ts-verdict ts-verdict-good")]
    parts = [*head, alert_list(mistakes), alert_list(shown.warnings, "warning")]
    if shown.numbers and shown.job:
        parts.append(key_values(numbers(shown.numbers, shown.job)))
    return element("div", join(parts), id="train-preview", data_errors=json.dumps(shown.errors))


def _jump(name: str, line: str) -> Html:
    """A mistake; pressing it leads to its field."""
    if not name:
        return element("span", line)
    section = next((TITLES.get(one.section) for one in fields() if one.name == name), None)
    return element("button", line, type="button", class_="ts-jump", data_field=name, data_section=section)


def numbers(derived: Numbers, job: Job) -> list[tuple[str, str]]:
    """The derived numbers, for people."""
    batch = (
        f"{derived.global_batch_size:,} rows = {derived.micro_batch} per micro-batch x {derived.accumulation_steps} "
        f"accumulated x {derived.data_parallel_size} data-parallel rank{'s' * (derived.data_parallel_size > 1)}"
    )
    packed = "" if job.config.packing else ", less where rows are shorter"
    rows = [
        ("Global batch", batch),
        ("Tokens per step", f"at most {derived.tokens_per_step:,}{packed}"),
        ("Length", _length(derived)),
    ]
    if derived.learning_rate != job.config.learning_rate:
        rows.append(("Learning rate", f"{number_text(derived.learning_rate)} after scaling"))
    return [*rows, ("Evaluation", _evaluation(job)), ("Run folder in", str(job.run.path.parent))]


def _evaluation(job: Job) -> str:
    config = job.config
    if not config.has_evaluation():
        return "none"
    data = config.eval_dataset_name or f"{config.eval_share:g} of the training rows"
    return f"{data}, {f'every {config.eval_steps} steps' if config.eval_steps else 'at the end'}"


def _length(derived: Numbers) -> str:
    if derived.epochs is None:
        return f"{derived.total_steps:,} steps"
    epochs = f"{derived.epochs:g} epoch{'s' * (derived.epochs != 1)}"
    return f"{epochs} = {derived.total_steps:,} steps" if derived.total_steps else f"{epochs}; steps: see Data"


def copied_text(name: str, words: str, file: str | None = None) -> Html:
    """A text in a box, with a button that copies it, and one that saves it where `file` names a file."""
    if not words:
        return note(f"{name}: shown when the mistakes are mended.")
    buttons = [element("button", "Copy", type="button", class_="ts-small", data_copy=True, aria_label=f"Copy: {name}")]
    if file:
        buttons.append(element("button", "Save", type="button", class_="ts-small", data_save=file))
    head = element("div", join([element("h2", name), *buttons]), class_="ts-box-head")
    box = element("pre", words, class_="ts-box-text", tabindex=0, role="region", aria_label=name)
    return element("div", join([head, box]), class_="ts-box")


def strategy_note(choices: Sequence[StrategyChoice], name: str, default: str) -> Html:
    """The summary of the chosen strategy, and why it cannot run where that is so."""
    chosen = next((one for one in choices if one.name == (name or default)), None)
    if chosen is None:
        return note("An Accelerate YAML of your own.")
    able = element("strong", "Cannot run here: ") if chosen.reason else element("strong", "Can run here. ")
    words = join([able, f"{chosen.reason}. " if chosen.reason else "", chosen.summary])
    return element("p", words, class_=f"ts-note{' ts-unable' if chosen.reason else ''}")


def strategy_labels(choices: Sequence[StrategyChoice]) -> list[tuple[str, str]]:
    """Labels and values for a list of strategies."""
    return [
        ("default: single for one process, else ddp", ""),
        *((f"{one.name}{' (cannot run here)' if one.reason else ''}", one.name) for one in choices),
    ]


def gpu_labels(choices: Sequence[GpuChoice]) -> list[tuple[str, str]]:
    """Labels and values for a list of GPUs."""
    return [(_gpu_label(one), str(one.index)) for one in choices]


def _gpu_label(one: GpuChoice) -> str:
    free = f"{byte_text(one.free)} free of " if one.free is not None else ""
    held = f", held by {one.holder}" if one.holder else ", nobody holds it"
    return f"{one.index}: {one.name}, {free}{byte_text(one.memory)}{held}"
