"""Checks that every value sent to a handler is of the kind that its component sends.

Gradio accepts an object that names a file in place of any value, and copies or downloads that file before the handler
sees it. So values are checked before Gradio processes them, for every handler of every page, and a component of
unknown kind cannot be an input.
"""

from __future__ import annotations

import copy
import math
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr
from gradio.components.api_component import Api

Check = Callable[[gr.blocks.Block, Any, set[str]], bool]
"""Whether a component can send a value, given the paths of all uploaded files."""


_SKIP = gr.skip()


class CheckedBlocks(gr.Blocks):
    """A Gradio app whose handlers only receive values of the right kinds."""

    def validate_inputs(self, block_fn: Any, inputs: list[Any]) -> None:
        """Refuses values that no page would send. Gradio calls this before processing any value.

        Raises:
            gr.Error: naming the first component with a wrong value.
        """
        if block_fn.fn is None:
            raise _refusal("refused: this event is handled in the browser")
        if not isinstance(inputs, list) or len(inputs) != len(block_fn.inputs):
            raise _refusal("refused: the event has the wrong number of values; reload the page")
        for block, value in zip(block_fn.inputs, inputs, strict=True):
            check, kind = kind_of(block)
            if not check(block, value, self.upload_file_set):
                label = getattr(block, "label", None) or type(block).__name__
                raise _refusal(f"{label}: refused, the value is not {kind}; reload the page")

    async def postprocess_data(self, block_fn: Any, predictions: Any, state: Any) -> list[Any]:
        """As Gradio's, which builds every output anew, also one that is skipped: half a millisecond each, at each poll
        of every tab.
        """
        outputs = block_fn.outputs
        if not isinstance(predictions, list | tuple) or len(predictions) != len(outputs):
            return await super().postprocess_data(block_fn, predictions, state)
        changed = [index for index, value in enumerate(predictions) if not (isinstance(value, dict) and value == _SKIP)]
        answer: list[Any] = [_SKIP] * len(outputs)
        if not changed:
            return answer
        if len(changed) == 1 and len(outputs) > 1:  # Gradio takes the values of one output to be no list
            changed.append(0 if changed[0] else 1)
        part = copy.copy(block_fn)
        part.outputs = [outputs[index] for index in changed]
        values = await super().postprocess_data(part, [predictions[index] for index in changed], state)
        for index, value in zip(changed, values, strict=True):
            answer[index] = value
        return answer

    def check_kinds(self) -> None:
        """Raises TypeError when a handler has an input of unknown kind."""
        for block_fn in self.fns.values():
            if block_fn.component_prop_inputs:
                raise TypeError(f"{block_fn.name} takes whole components, which cannot be checked")
            for block in block_fn.inputs:
                kind_of(block)


def _refusal(message: str) -> gr.Error:
    return gr.Error(message, print_exception=False)


def kind_of(block: gr.blocks.Block) -> tuple[Check, str]:
    """The check for a component's values, and a description of them.

    Raises:
        TypeError: for an unknown component.
    """
    for base in type(block).__mro__:
        if base in _KINDS:
            return _KINDS[base]
    raise TypeError(f"{type(block).__name__} is not a supported input; add its check to ui/checked_blocks.py")


# -- plain values ----------------------------------------------------------------------------------------------------


def is_text(value: Any) -> bool:
    """Whether it is a string that can be encoded (JSON allows lone surrogates)."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_number(value: Any) -> bool:
    """Whether it is a finite number and not a boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def is_scalar(value: Any) -> bool:
    """Whether it is a string, a number, a boolean or None."""
    return value is None or isinstance(value, bool) or is_text(value) or is_number(value)


def is_plain_json(value: Any, depth: int = 8) -> bool:
    """Whether it is JSON of limited depth without an object that Gradio could treat as a file."""
    if isinstance(value, Mapping):
        is_file = "meta" in value and "path" in value
        entries: Sequence[Any] = [*value, *value.values()]
    elif isinstance(value, list):
        is_file, entries = False, value
    else:
        return is_scalar(value)
    return not is_file and depth > 0 and all(is_plain_json(part, depth - 1) for part in entries)


# -- components ------------------------------------------------------------------------------------------------------


def _text(_: Any, value: Any, __: set[str]) -> bool:
    return value is None or is_text(value)


def _boolean(_: Any, value: Any, __: set[str]) -> bool:
    return value is None or isinstance(value, bool)


def _number(_: Any, value: Any, __: set[str]) -> bool:
    return value is None or is_number(value)


def _choice(_: Any, value: Any, __: set[str]) -> bool:
    return value is None or is_text(value) or is_number(value)


def _choices(_: Any, value: Any, __: set[str]) -> bool:
    return value is None or (isinstance(value, list) and all(is_text(entry) or is_number(entry) for entry in value))


def _dropdown(block: Any, value: Any, uploaded: set[str]) -> bool:
    return (_choices if block.multiselect else _choice)(block, value, uploaded)


def _upload(_: Any, value: Any, uploaded: set[str]) -> bool:
    """A file stored by the upload route: no other path, no link, no stream."""
    if value is None:
        return True
    if not isinstance(value, dict) or value.get("meta") != {"_type": "gradio.FileData"} or value.get("is_stream"):
        return False
    path = value.get("path")
    is_plain = all(is_scalar(part) for name, part in value.items() if name != "meta")
    if not is_plain or not is_text(path) or path not in uploaded:
        return False
    try:
        mode = os.stat(path, follow_symlinks=False).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode)


_JSON_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": is_text,
    "number": is_number,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _parameter(block: Api, value: Any, _: set[str]) -> bool:
    """A parameter of `gr.api`, checked against the schema that Gradio derives from its type."""
    schema: Any = block.api_info()
    schemas = schema.get("oneOf") or schema.get("anyOf") or [schema]
    return is_plain_json(value) and any("type" not in entry or _JSON_TYPES[entry["type"]](value) for entry in schemas)


_KINDS: dict[type, tuple[Check, str]] = {
    gr.Textbox: (_text, "a text"),
    gr.Checkbox: (_boolean, "true or false"),
    gr.Number: (_number, "a number"),
    gr.Radio: (_choice, "one of the choices"),
    gr.Dropdown: (_dropdown, "a choice of the list"),
    gr.CheckboxGroup: (_choices, "a list of choices"),
    gr.UploadButton: (_upload, "a file that was uploaded here"),
    Api: (_parameter, "JSON of the type that the endpoint expects"),
}
