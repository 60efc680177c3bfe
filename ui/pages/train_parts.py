"""What the Train page is made of: a component for every option, and the preview beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import gradio as gr

from app.launch.foreground import where
from app.launch.job import Job
from app.runs.detail import checkpoints
from app.services.choices import GpuChoice, StrategyChoice
from app.services.fields import COMMON, TITLES, FormField, fields
from app.services.form import DefaultGpus, Numbers, Preview
from app.services.memory_check import known_verdict
from app.services.resume_form import ResumeForm
from trainers.config.options import precision_lines
from ui.parts import Html, alert_list, byte_text, element, join, key_values, note, number_text, run_link

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


def draft_js(names: Sequence[str], left_out: Mapping[str, str]) -> str:
    """The script that keeps the draft of the Train page whenever a field changes; see `ui/static/draft.js`.

    Args:
        names: the options, in the order of their components, which follow preset, strategy and devices.
        left_out: values that are no choice of the user's.
    """
    return (
        "(preset, strategy, devices, ...values) => { "
        f"tunesmithDraft.keep({{preset, strategy, devices}}, {json.dumps(names)}, values, {json.dumps(left_out)}); }}"
    )


def resume_banner(form: ResumeForm) -> Html:
    """Says which run the form goes on with, and from which step."""
    saved = checkpoints(form.run)
    start = f"from step {saved[0]['step']}" if saved else "from the start, as no checkpoint was saved"
    words = ["Going on with ", run_link(form.run.id), f" {start}. What is changed here replaces the run's settings."]
    return element("p", join(words), class_="ts-alert ts-alert-info", role="status")


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
        head = [_verdict(shown.job)]
    parts = [*head, alert_list(mistakes), alert_list(shown.warnings, "warning"), alert_list(shown.notes, "info")]
    if shown.numbers and shown.job:
        parts.append(key_values(numbers(shown.numbers, shown.job)))
    return element("div", join(parts), id="train-preview", data_errors=json.dumps(shown.errors))


def _verdict(job: Job) -> Html:
    """Green only for what is known to fit; a model that was not counted yet is counted at the launch."""
    what, known = f"{job.strategy.name} on {where(job)}", known_verdict(job)
    if known is None or known.fits is None:
        ask = "its memory is looked at when it is launched" if known is None else "its memory cannot be told"
        return element("p", f"No mistakes: {what}; {ask}", class_="ts-verdict")
    if known.fits:
        return element("p", f"Ready to start: {what}", class_="ts-verdict ts-verdict-good")
    return element("p", known.line, class_="ts-verdict ts-verdict-bad")


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
    rows += [("Precision", line) for line in precision_lines(job.config)]
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


def strategy_note(choices: Sequence[StrategyChoice], name: str, default: str, mistakes: Sequence[str] = ()) -> Html:
    """The summary of the chosen strategy, and why it cannot run where that is so.

    Args:
        choices: all strategies that ship.
        name: the chosen one; empty for the default.
        default: the name of that; empty where there is none yet.
        mistakes: what stands beside the field of the strategy.
    """
    chosen = next((one for one in choices if one.name == (name or default)), None)
    if not (name or default):
        return note("Chosen when the mistakes are mended.")
    if chosen is None:
        return note("An Accelerate YAML of your own.")
    reason = chosen.reason or next((line.removeprefix(f"strategy {chosen.name}: ") for line in mistakes), "")
    able = element("strong", "Cannot run here: ") if reason else element("strong", "Can run here. ")
    words = join([able, f"{reason}. " if reason else "", chosen.summary])
    return element("p", words, class_=f"ts-note{' ts-unable' if reason else ''}")


def strategy_labels(choices: Sequence[StrategyChoice]) -> list[tuple[str, str]]:
    """Labels and values for a list of strategies."""
    return [
        ("default: what the preset names, else single or ddp", ""),
        *((f"{one.name}{' (cannot run here)' if one.reason else ''}", one.name) for one in choices),
    ]


def ticks(default: DefaultGpus) -> dict[str, Any]:
    """What the list of GPUs shows as ticked, and why not all are."""
    why = f" {default.note}." if default.note else ""
    return {"value": [str(index) for index in default.ids], "info": f"None ticked means all of them.{why}"}


def gpu_labels(choices: Sequence[GpuChoice]) -> list[tuple[str, str]]:
    """Labels and values for a list of GPUs."""
    return [(_gpu_label(one), str(one.index)) for one in choices]


def _gpu_label(one: GpuChoice) -> str:
    free = f"{byte_text(one.free)} free of " if one.free is not None else ""
    foreign = ", in use by other programs" if one.foreign else ", nobody holds it"
    held = f", held by {one.holder}" if one.holder else foreign
    return f"{one.index}: {one.name}, {free}{byte_text(one.memory)}{held}"
