"""The step of the Train page that says what is trained for, with the options that only this objective reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from trainers.config.fields import OptionField
from trainers.config.objectives import FORMAT_COLUMNS, LABELLED, OBJECTIVES, OWN_OPTIONS, ObjectiveSpec
from ui.pages.train_parts import by_name, component_value
from ui.parts import Html, element, join, note

_PLACEHOLDERS = {
    "teacher": "Hub id, folder or run",
    "teacher_log_probs": "Folder of tunesmith record",
    "reward_weights": "1 each",
    "reward_schema": "schema.json",
    "epsilon_high": "the same",
    "recorded_answers": "folder rollouts of a run",
    "sampler_url": "from a terminal only",
}
"""What stands in an empty field whose default is no number."""


class ObjectivePart:
    """The objective, what it needs, and its own options.

    Args:
        add_fields: adds the components of fields to the form.
        start: the objective that the form starts with.
    """

    def __init__(self, add_fields: Callable[[Sequence[OptionField]], list[gr.components.Component]], start: str):
        with gr.Row(elem_classes=["ts-fields", "ts-wide"]):
            (self.objective,) = add_fields(by_name(["objective"]))
        self.needs = gr.HTML(objective_needs(start), elem_id="objective-needs", apply_default_css=False)
        self.own = by_name(OWN_OPTIONS)
        read = OBJECTIVES[start].options
        with gr.Row(elem_classes=["ts-fields"], visible=bool(read)) as self.row:
            self.options = add_fields(self.own)
        for name, option in zip(OWN_OPTIONS, self.options, strict=True):
            option.visible = name in read

    def connect(self) -> None:
        """Follows the objective, also one that a preset or a draft fills in."""
        self.objective.change(
            self.switch, self.objective, [self.needs, self.row, *self.options],
            show_progress="hidden", queue=False, api_visibility="private",
        )  # fmt: skip

    def switch(self, objective: Any) -> list[Any]:
        """What the objective needs, and its own options; the others are hidden and back at their defaults."""
        spec = OBJECTIVES.get(objective) if isinstance(objective, str) else None
        read = spec.options if spec else ()
        options = [_update(option, spec) if spec and option.name in read else _hidden(option) for option in self.own]
        return [objective_needs(spec.name if spec else "sft"), gr.update(visible=bool(read)), *options]


def objective_needs(objective: str) -> Html:
    """One line: what the objective does, and the columns that the data must have.

    Args:
        objective: a name in `OBJECTIVES`.
    """
    spec = OBJECTIVES[objective]
    answer = {LABELLED: ("prompt", "completion")}
    forms = [" and ".join((*answer.get(name, ()), *FORMAT_COLUMNS[name])) for name in spec.formats]
    columns = [element("code", form) for form in forms]
    separated = [part for column in columns for part in (", or ", column)][1:]
    answers = ["; ", element("code", "answer"), " beside a prompt is what rewards compare with"] if spec.samples else []
    return note(join([f"{spec.summary} The data needs the columns ", *separated, *answers, "."]))


def _update(option: OptionField, spec: ObjectiveSpec) -> Any:
    """Shows an option, with the choices and the default of the objective."""
    if option.name == "loss_type":
        default = (f"default: {spec.loss_types[0]}", "none")
        return gr.update(visible=True, choices=[default, *((name, name) for name in spec.loss_types)])
    default = spec.defaults[option.name]
    if isinstance(default, bool):
        return gr.update(visible=True)
    return gr.update(visible=True, placeholder=_PLACEHOLDERS.get(option.name) or _text(default))


def _text(default: Any) -> str:
    return ", ".join(default) if isinstance(default, list) else f"{default:g}"


def _hidden(option: OptionField) -> Any:
    return gr.update(visible=False, value=component_value(option, option.default or ""))
