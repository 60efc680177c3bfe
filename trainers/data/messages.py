"""The messages of a conversation, checked: roles, contents, tool calls, what is trained. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainers.data.shards import Bad
from trainers.data.strict_json import STRICT

ROLES = ("system", "developer", "user", "assistant", "tool")
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")  # of an assistant's message; the first one that is there
MEDIA = ("images", "image", "audio", "audios", "video", "videos")
_RENAMED = {"function": "tool"}
_WEIGHTS = ("weight", "train", "loss_mask")
_OLD_CALL = "function_call"  # OpenAI's key before tool_calls, and the role of a call in ShareGPT data

Message = dict[str, Any]
"""`role` and `content`, and where the row has them `tool_calls`, `tool_call_id`, `name` and `reasoning_content`."""


class RowError(ValueError):
    """A row that cannot be used."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.bad = Bad(kind, detail)


@dataclass
class Fields:
    """What becomes of the fields of a row that no format needs.

    Attributes:
        unused: Paths of those that nobody reads, such as `messages[].id`.
        optional: Path of each that a template may write or not, by the name that it has for the template.
    """

    unused: set[str] = field(default_factory=set)
    optional: dict[str, str] = field(default_factory=dict)

    def add_unused(self, values: Mapping[str, Any], used: Collection[str] = (), prefix: str = "") -> None:
        """Adds the keys that are not among `used`; a null is a key that is not there."""
        self.unused.update(f"{prefix}{key}" for key, value in values.items() if key not in used and value is not None)


def near(name: str, names: Sequence[str]) -> str:
    """`; did you mean ...?` for a name that is like another."""
    matches = difflib.get_close_matches(name, list(names)[:100], n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def text_of(value: Any, what: str, fields: Fields | None = None) -> str:
    """Text from a string or a list of text parts.

    Raises:
        RowError: for anything else.
    """
    if isinstance(value, list | tuple) and value:
        value = "".join(_texts_of_parts(value, what, fields or Fields()))
    if not isinstance(value, str):
        shown = "null" if value is None else "an empty list" if value in ([], ()) else type(value).__name__
        raise RowError("wrong type", f"{what} is {shown} and not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError("invalid UTF-8", f"{what} has half a surrogate pair at {error.start + 1}") from None
    return value


def _texts_of_parts(parts: Sequence[Any], what: str, fields: Fields) -> Iterator[str]:
    for index, part in enumerate(parts):
        if isinstance(part, str):  # templates read parts, and write nothing of a bare string
            raise RowError("wrong type", f'{what}[{index}] is a bare string; make it {{"type": "text", "text": ...}}')
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError("wrong type", f"{what}[{index}] is a part of type {str(kind)[:40]!r} and not text")
        fields.add_unused(part, ("type", "text"), f"{_path(what)}[].")
        yield part["text"]


def is_text_part(part: Any) -> bool:
    """Whether this is a part of a content, as in `[{"type": "text", "text": ...}]`."""
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def parsed(value: Any, kind: type, what: str) -> Any:
    """A list or an object, which may be written as JSON text.

    Raises:
        RowError: when it is neither.
    """
    shown = value
    if isinstance(value, str):
        try:
            value = STRICT.decode(value)
        except (ValueError, RecursionError) as error:
            raise RowError("wrong type", f"{what} is text that is no JSON: {str(error)[:80]}") from None
    if not isinstance(value, kind):
        name = "a list" if kind is list else "an object"
        raise RowError("wrong type", f"{what} is {type(shown).__name__} and not {name}, nor JSON text of one")
    return value


def refuse_media(values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuses what is no text.

    Raises:
        RowError: with the name of the field.
    """
    for name in MEDIA:
        if values.get(name):
            raise RowError("not text", f"{prefix}{name} holds what only a model of images or sound can be trained on")


def parse_messages(
    value: Any, what: str, keys: tuple[str, str], renamed: Mapping[str, str], fields: Fields
) -> tuple[list[Message], list[bool]]:
    """The messages of a row.

    Args:
        value: As the row has it: a list, or JSON text of one.
        what: The name of the column.
        keys: Those of the role and of the content.
        renamed: Our name for a role of this format.
        fields: Gets the fields that are not used.

    Returns:
        The messages, and of each whether it may be trained (if it is the assistant's).

    Raises:
        RowError: when they do not make a conversation.
    """
    if isinstance(value, str):  # a column of CSV, say
        value = parsed(value, list, what)
    if not isinstance(value, list | tuple):
        raise RowError("wrong type", f"{what} is {'null' if value is None else type(value).__name__} and not a list")
    if not value:
        raise RowError("no trained token", f"{what} is empty")
    messages, trained = [], []
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise RowError("wrong type", f"{what}[{index}] is {type(message).__name__} and not an object")
        parsed_message, is_trained = _parse_message(message, f"{what}[{index}]", keys, renamed, fields)
        messages.append(parsed_message)
        trained.append(is_trained)
    return messages, trained


def _parse_message(
    message: Mapping[str, Any], what: str, keys: tuple[str, str], renamed: Mapping[str, str], fields: Fields
) -> tuple[Message, bool]:
    role_key, content_key = keys if keys[0] in message or keys[1] in message else ("role", "content")
    if role_key not in message:
        raise RowError("missing key", f"{what} has no {role_key!r}{near(role_key, [str(name) for name in message])}")
    role = text_of(message[role_key], f"{what}.{role_key}")
    content = message.get(content_key)
    calls = message.get("tool_calls") or None
    if role == _OLD_CALL:
        role, calls, content = "assistant", _listed(parsed_any(content, f"{what}.{content_key}")), None
    elif message.get(_OLD_CALL):
        calls = [parsed(message[_OLD_CALL], dict, f"{what}.{_OLD_CALL}")]
    role = renamed.get(role, _RENAMED.get(role, role))
    if role not in ROLES:
        raise RowError("unknown role", f"{what} has role {role[:40]!r}; use {', '.join(ROLES)}")
    if content_key not in message and not calls:
        names = [str(name) for name in message]
        raise RowError("missing key", f"{what} has no {content_key!r}{near(content_key, names)}")
    text = "" if calls and content in (None, []) else text_of(content, f"{what}.{content_key}", fields)
    checked: Message = {"role": role, "content": text}
    if len(message) == 2 and not calls:
        return checked, True
    refuse_media(message, f"{what}.")
    if calls:
        if role != "assistant":
            raise RowError("wrong type", f"{what} of the {role} has tool_calls, which only the assistant makes")
        checked["tool_calls"] = _tool_calls(calls, f"{what}.tool_calls", fields)
    path, used = _path(what), {role_key, content_key, "tool_calls", _OLD_CALL}
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            checked[key] = text_of(message[key], f"{what}.{key}")
            fields.optional[key] = f"{path}.{key}"
            used.add(key)
    thought = next((key for key in THOUGHT_KEYS if role == "assistant" and message.get(key)), None)
    if thought:
        checked["reasoning_content"] = text_of(message[thought], f"{what}.{thought}")
        used.add(thought)
    trained = True
    for key in _WEIGHTS:
        if message.get(key) is not None and (role == "assistant" or not message[key]):
            trained = _is_trained(message[key], f"{what}.{key}") and trained
            used.add(key)
    fields.add_unused(message, used, f"{path}.")
    return checked, trained


def parsed_any(value: Any, what: str) -> Any:
    """An object or a list, which may be written as JSON text."""
    return parsed(value, dict if not isinstance(value, str) or value.lstrip()[:1] == "{" else list, what)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_trained(value: Any, what: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise RowError("wrong type", f"{what} is {str(value)[:40]!r}; a message is trained (1) or not (0)")


def _path(what: str) -> str:
    """The name of a field whatever its place in a list: `messages[3].name` is `messages[].name`."""
    parts = what.split("[")
    return parts[0] + "".join("[" + part[part.index("]") :] for part in parts[1:])


def _tool_calls(value: Any, what: str, fields: Fields) -> list[dict[str, Any]]:
    """Calls in the form that templates know: `{"type": "function", "function": {"name", "arguments"}}`."""
    return [_tool_call(call, f"{what}[{index}]", fields) for index, call in enumerate(parsed(value, list, what))]


def _tool_call(call: Any, what: str, fields: Fields) -> dict[str, Any]:
    call = parsed(call, dict, what)
    if call.get("type") not in (None, "function"):
        raise RowError(
            "wrong type", f"{what} is of type {str(call['type'])[:40]!r}; only calls of a function are known"
        )
    path, function = _path(what), call.get("function")
    if function is None:
        function = {key: call[key] for key in call if key not in ("type", "id")}
    else:
        fields.add_unused(call, ("id", "type", "function"), f"{path}.")
        path, function = f"{path}.function", parsed(function, dict, f"{what}.function")
    fields.add_unused(function, ("name", "arguments"), f"{path}.")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError("missing key", f"{what} names no function")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    arguments = parsed(arguments, dict, f"{what}.arguments")
    checked = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id") is not None:
        checked["id"] = text_of(call["id"], f"{what}.id")
        fields.optional["id"] = f"{_path(what)}.id"
    return checked
