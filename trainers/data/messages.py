"""Parses and checks the messages of a conversation: roles, contents, tool calls, what is trained. Imports no torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainers.config.objectives import MEDIA
from trainers.config.strict_json import STRICT, DuplicateKey
from trainers.data.shards import BadRow

ROLES = ("system", "developer", "user", "assistant", "tool")
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")  # of an assistant's message; the first that is present
_RENAMED = dict.fromkeys(("function", "function_response", "observation", "tool_response"), "tool")
# The last is ms-swift's; a number there is one that was measured.
_WEIGHTS = ("weight", "train", "training", "loss_mask", "loss")
_PARTLY = ("train_detail", "training_detail")  # in Axolotl, the parts of a message that are trained
_OLD_CALL = "function_call"  # OpenAI's key before tool_calls, and the role of a call in ShareGPT data
_CALL_ROLES = (_OLD_CALL, "tool_call")
MOST_LEVELS = 100
"""Levels of lists and objects in a value that a template or a reward reads."""

Message = dict[str, Any]
"""`role`, `content`, and, if the row has them, `tool_calls`, `tool_call_id`, `name` and `reasoning_content`."""


class RowError(ValueError):
    """A row that cannot be used."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.bad = BadRow(kind, detail)


@dataclass
class Fields:
    """How the fields of a row that no format needs are used.

    Attributes:
        unused: Paths of unused fields, such as `messages[].id`.
        optional: Path to key within a message, for fields that only some templates write.
    """

    unused: set[str] = field(default_factory=set)
    optional: dict[str, str] = field(default_factory=dict)

    def add_unused(self, values: Mapping[str, Any], used: Collection[str] = (), prefix: str = "") -> None:
        """Adds the keys that are not in `used`; a key whose value is null counts as absent."""
        self.unused.update(f"{prefix}{key}" for key, value in values.items() if key not in used and value is not None)


def near(name: str, names: Sequence[str]) -> str:
    """`; did you mean ...?` if a similar name exists, otherwise an empty string."""
    matches = difflib.get_close_matches(name, list(names)[:100], n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def text_of(value: Any, location: str, fields: Fields | None = None) -> str:
    """Text from a string or a list of text parts.

    Raises:
        RowError: for any other value.
    """
    if isinstance(value, list | tuple) and value:
        value = "".join(_texts_of_parts(value, location, fields or Fields()))
    if not isinstance(value, str):
        actual = "null" if value is None else "an empty list" if value in ([], ()) else type(value).__name__
        raise RowError("wrong type", f"{location} is {actual}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError("invalid UTF-8", f"{location} has an unpaired surrogate at {error.start + 1}") from None
    return value


def _texts_of_parts(parts: Sequence[Any], location: str, fields: Fields) -> Iterator[str]:
    for index, part in enumerate(parts):
        if isinstance(part, str):  # templates skip bare strings in a list of parts
            raise RowError(
                "wrong type", f'{location}[{index}] is a bare string; make it {{"type": "text", "text": ...}}'
            )
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RowError("wrong type", f"{location}[{index}] is a part of type {str(kind)[:40]!r}, not text")
        fields.add_unused(part, ("type", "text"), f"{_path(location)}[].")
        yield part["text"]


def is_text_part(part: Any) -> bool:
    """Whether this is a text part, as in `[{"type": "text", "text": ...}]`."""
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def is_conversation(value: Any) -> bool:
    """Whether this is a message or a list of messages, not text."""
    if isinstance(value, dict):
        return not is_text_part(value)
    return isinstance(value, list | tuple) and not all(map(is_text_part, value))


def parsed_messages(value: Any) -> Any:
    """Messages that a table holds as JSON text; any other value as it is."""
    text = value.strip() if isinstance(value, str) else ""
    if not (text.startswith("[{") and text.endswith("}]")):
        return value
    try:
        parsed = STRICT.decode(text)
    except (ValueError, RecursionError):
        return value
    are_messages = all(isinstance(message, dict) and ("role" in message or "from" in message) for message in parsed)
    return parsed if are_messages else value


def parse_json_value(value: Any, kind: type, location: str) -> Any:
    """A list or an object, parsed if it is given as JSON text.

    Raises:
        RowError: if the value is neither of type `kind` nor JSON text of it.
    """
    original = value
    if isinstance(value, str):
        try:
            value = STRICT.decode(value)
        except DuplicateKey as error:
            problem = f"the key {error.key[:100]!r} appears twice in one object; keep one of them"
            raise RowError("duplicate key", f"{location}: {problem}") from None
        except (ValueError, RecursionError) as error:
            raise RowError("wrong type", f"{location} is text but not valid JSON: {str(error)[:80]}") from None
    if not isinstance(value, kind):
        name = "a list" if kind is list else "an object"
        raise RowError("wrong type", f"{location} is {type(original).__name__} and not {name}, nor JSON text of one")
    return value


def json_value(value: Any, location: str, level: int = 0) -> Any:
    """The value, if JSON has it exactly.

    Args:
        value: A value as JSON, a table or a Parquet file gives it.
        location: Where it stands, for messages.
        level: Lists and objects around it.

    Raises:
        RowError: for a date, bytes, NaN and whatever else JSON lacks, and for more than `MOST_LEVELS` levels.
    """
    if level >= MOST_LEVELS and isinstance(value, list | dict):
        raise RowError("nested too deeply", f"{location[:60]} has over {MOST_LEVELS} levels of lists and objects")
    if isinstance(value, list):
        for index, item in enumerate(value):
            json_value(item, f"{location}[{index}]", level + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            json_value(text_of(key, f"a key of {location}"), location, level)
            json_value(item, f"{location}.{key}", level + 1)
    elif isinstance(value, str):
        text_of(value, location)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RowError("no JSON", f"{location} is {value}, which JSON does not have; make it null or text")
    elif value is not None and not isinstance(value, bool | int | float):
        kind = type(value).__name__
        raise RowError("no JSON", f"{location} is of type {kind}, which JSON does not have; make it text or a number")
    return value


def refuse_media(values: Mapping[str, Any], prefix: str = "") -> None:
    """Refuses images, audio and video.

    Raises:
        RowError: naming the field.
    """
    for name in MEDIA:
        if values.get(name):
            raise RowError("not text", f"{prefix}{name} holds images, audio or video; only text can be trained on")


def parse_messages(
    value: Any, location: str, keys: tuple[str, str], role_names: Mapping[str, str], fields: Fields
) -> tuple[list[Message], list[bool]]:
    """Parses the messages of a row.

    Args:
        value: A list, or JSON text of one.
        location: Name of the column.
        keys: Names of the role and content keys.
        role_names: Standard name of each role that this format names differently.
        fields: Collects the unused and optional fields.

    Returns:
        The messages, and for each whether it may be trained (if it is the assistant's).

    Raises:
        RowError: if they do not form a conversation.
    """
    if isinstance(value, str):  # a column of CSV, say
        value = parse_json_value(value, list, location)
    if not isinstance(value, list | tuple):
        raise RowError(
            "wrong type", f"{location} is {'null' if value is None else type(value).__name__} and not a list"
        )
    if not value:
        raise RowError("no trained token", f"{location} is empty")
    messages, trained = [], []
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            kind = type(message).__name__
            hint = "; write a row for each example, not a list for each column" if kind == "str" else ""
            raise RowError("wrong type", f"{location}[{index}] is {kind} and not an object{hint}")
        parsed_message, is_trained = _parse_message(message, f"{location}[{index}]", keys, role_names, fields)
        messages.append(parsed_message)
        trained.append(is_trained)
    return messages, trained


def _parse_message(
    message: Mapping[str, Any], location: str, keys: tuple[str, str], role_names: Mapping[str, str], fields: Fields
) -> tuple[Message, bool]:
    role_key, content_key = keys
    if role_key not in message:
        role_key = "from" if "from" in message and "role" not in message else "role"
    if content_key not in message:
        content_key = "value" if "value" in message and "content" not in message else "content"
    if role_key not in message:
        raise RowError(
            "missing key", f"{location} has no {role_key!r}{near(role_key, [str(name) for name in message])}"
        )
    # Role, content and tool calls, also in OpenAI's older `function_call` form.
    role = text_of(message[role_key], f"{location}.{role_key}")
    content = message.get(content_key)
    calls = message.get("tool_calls") or None
    if calls and (role in _CALL_ROLES or message.get(_OLD_CALL)):
        raise RowError("wrong type", f"{location} has a call in {_OLD_CALL} and others in tool_calls; keep one of them")
    if role in _CALL_ROLES:
        role, calls, content = "assistant", _listed(parse_list_or_object(content, f"{location}.{content_key}")), None
    elif message.get(_OLD_CALL):
        calls = [parse_json_value(message[_OLD_CALL], dict, f"{location}.{_OLD_CALL}")]
    role = role_names.get(role, _RENAMED.get(role, role))
    if role not in ROLES:
        raise RowError("unknown role", f"{location} has role {role[:40]!r}; use {', '.join(ROLES)}")
    if content_key not in message and not calls:
        names = [str(name) for name in message]
        raise RowError("missing key", f"{location} has no {content_key!r}{near(content_key, names)}")
    text = "" if calls and content in (None, []) else text_of(content, f"{location}.{content_key}", fields)
    checked: Message = {"role": role, "content": text}
    if len(message) == 2 and not calls:
        return checked, True
    refuse_media(message, f"{location}.")
    if calls:
        if role != "assistant":
            raise RowError("wrong type", f"{location} of the {role} has tool_calls, which only the assistant can have")
        checked["tool_calls"] = _tool_calls(calls, f"{location}.tool_calls", fields)
    # Optional fields; what is left is reported as unused.
    path, used = _path(location), {role_key, content_key, "tool_calls", _OLD_CALL}
    for key in ("tool_call_id", "name"):
        if message.get(key) is not None:
            checked[key] = text_of(message[key], f"{location}.{key}")
            fields.optional[f"{path}.{key}"] = key
            used.add(key)
    thought = next((key for key in THOUGHT_KEYS if role == "assistant" and message.get(key)), None)
    if thought:
        checked["reasoning_content"] = text_of(message[thought], f"{location}.{thought}")
        used.add(thought)
    trained = True
    for key in _WEIGHTS:
        if key == "loss" and message.get(key) not in (0, 1):
            continue
        if message.get(key) is not None and (role == "assistant" or not message[key]):
            trained = _is_trained(message[key], f"{location}.{key}") and trained
            used.add(key)
    for key in _PARTLY:
        if role == "assistant" and message.get(key) is not None:
            if trained:
                problem = f"{location}.{key} trains parts of a message, which is not supported"
                raise RowError("wrong type", f'{problem}; leave it out, or train the message or not ("train": false)')
            used.add(key)
    fields.add_unused(message, used, f"{path}.")
    return checked, trained


def parse_list_or_object(value: Any, location: str) -> Any:
    """An object or a list, parsed if it is given as JSON text."""
    return parse_json_value(value, dict if not isinstance(value, str) or value.lstrip()[:1] == "{" else list, location)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_trained(value: Any, location: str) -> bool:
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise RowError("wrong type", f"{location} is {str(value)[:40]!r}; a message is trained (1) or not (0)")


def _path(location: str) -> str:
    """The name of a field without list indices: `messages[3].name` becomes `messages[].name`."""
    parts = location.split("[")
    return parts[0] + "".join("[" + part[part.index("]") :] for part in parts[1:])


def _tool_calls(value: Any, location: str, fields: Fields) -> list[dict[str, Any]]:
    """Calls in the form that templates expect: `{"type": "function", "function": {"name", "arguments"}}`."""
    return [
        _tool_call(call, f"{location}[{index}]", fields)
        for index, call in enumerate(parse_json_value(value, list, location))
    ]


def _tool_call(call: Any, location: str, fields: Fields) -> dict[str, Any]:
    call = parse_json_value(call, dict, location)
    if call.get("type") not in (None, "function"):
        raise RowError(
            "wrong type", f"{location} is of type {str(call['type'])[:40]!r}; only function calls are supported"
        )
    path, function = _path(location), call.get("function")
    if function is None:
        function = {key: call[key] for key in call if key not in ("type", "id")}
    else:
        fields.add_unused(call, ("id", "type", "function"), f"{path}.")
        path, function = f"{path}.function", parse_json_value(function, dict, f"{location}.function")
    fields.add_unused(function, ("name", "arguments"), f"{path}.")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError("missing key", f"{location} names no function")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    arguments = parse_json_value(arguments, dict, f"{location}.arguments")
    json_value(arguments, f"{location}.arguments")
    checked = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id") is not None:
        checked["id"] = text_of(call["id"], f"{location}.id")
        fields.optional[f"{_path(location)}.id"] = "tool_calls[].id"
    return checked
