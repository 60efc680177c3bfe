"""Checks what a chat is asked: conversations, tools and sampling options, from pages, scripts and flags."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.console import shortened
from trainers.config.json_schema import parsed_json
from trainers.config.mistakes import ConfigError

MAX_CHARACTERS = 100_000
"""Characters of a conversation, and of tools."""
MAX_MESSAGES = 200
MAX_CALLS = 50
"""Calls of tools in one message."""
MAX_TOOLS = 64

_ROLES = ("system", "user", "assistant", "tool")
_NAME = re.compile(r"[\w.-]{1,128}", re.ASCII)


@dataclass(frozen=True)
class Option:
    """One sampling option with its inclusive limits."""

    low: float
    high: float
    default: float
    help: str
    integer: bool = False


SAMPLING = {
    "temperature": Option(0.0, 5.0, 0.0, "0 always picks the likeliest token; higher values are more random."),
    "top_p": Option(0.01, 1.0, 1.0, "Sample from the likeliest tokens that together have this probability; 1 for all."),
    "top_k": Option(0, 1000, 0, "Sample from this many of the likeliest tokens; 0 for all.", integer=True),
    "max_new_tokens": Option(1, 8192, 256, "Longest answer, in tokens.", integer=True),
    "repetition_penalty": Option(0.5, 2.0, 1.0, "Above 1 makes repeated tokens less likely."),
    "seed": Option(0, 2**32 - 1, 42, "The same seed gives the same answer.", integer=True),
}


def check_sampling(values: Mapping[str, Any] | None) -> dict[str, float]:
    """Checks sampling options and fills in defaults.

    Raises:
        ConfigError: with a line for each unknown name, non-numeric value or value out of range.
    """
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError("sampling is not a mapping; give values by name, such as {'temperature': 0.7}")
    requested, mistakes, result = dict(values or {}), [], {}
    for name in requested.keys() - SAMPLING.keys():
        mistakes.append(f"sampling has no option {shortened(str(name))!r}; use {', '.join(SAMPLING)}")
    for name, option in SAMPLING.items():
        number = _number(requested.get(name))
        if requested.get(name) is None:
            number = option.default
        if number is None or not option.low <= number <= option.high or (option.integer and number % 1):
            kind = "a whole number" if option.integer else "a number"
            quoted = shortened(repr(requested.get(name)))
            mistakes.append(f"{name}={quoted} is out of range; use {kind} from {option.low:g} to {option.high:.10g}")
            continue
        result[name] = int(number) if option.integer else number
    if mistakes:
        raise ConfigError(mistakes)
    return result


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def check_messages(messages: Any, system: Any = "") -> list[dict[str, Any]]:
    """Checks a conversation; returns it with the system prompt, if any, first.

    Args:
        messages: a list of mappings with `role` and `content`; the last is the user's, or the result of a tool. Those
            of the assistant may have `reasoning_content`, `tool_calls` and `raw`, the text as it was generated; those
            of a tool `tool_call_id` and `name`. Other keys are dropped.
        system: the system prompt; empty for none.

    Raises:
        ConfigError: for anything else, and for more than `MAX_CHARACTERS` or `MAX_MESSAGES`.
    """
    if not messages:
        raise ConfigError(f"messages must be a list of 1 to {MAX_MESSAGES} messages; write one, or clear the chat")
    first = [{"role": "system", "content": _text(system, "system")}] if system else []
    result: list[dict[str, Any]] = [*first, *({**message} for message in check_history(messages, bool(system)))]
    for message in result:
        message.pop("note", None)
    if result[-1]["role"] not in ("user", "tool") or not result[-1]["content"].strip():
        raise ConfigError("there is no message to answer; write one")
    characters = max(sum(map(_size, result)), sum(len(message.get("raw", "")) for message in result))
    if characters > MAX_CHARACTERS:
        raise ConfigError(f"the conversation has {characters:,} characters, more than {MAX_CHARACTERS:,}; clear it")
    return result


def check_history(messages: Any, has_system: bool = False) -> list[dict[str, Any]]:
    """Checks the messages of a conversation so far, as `check_messages`; replies may also have a `note` for the reader.

    Args:
        messages: may be empty, and end with any message.
        has_system: whether there is a system prompt besides.

    Raises:
        ConfigError: for anything else.
    """
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        raise ConfigError(f"messages must be a list of 1 to {MAX_MESSAGES} messages; write one, or clear the chat")
    result: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise ConfigError(f"message {number + 1} has none of the roles {', '.join(_ROLES)}; clear the chat")
        if message["role"] == "system" and (number or has_system):
            raise ConfigError(f"message {number + 1} is a second system prompt, or not the first message; remove it")
        before = result[-1] if result else {}
        if message["role"] == "tool" and not (before.get("role") == "tool" or before.get("tool_calls")):
            raise ConfigError(f"message {number + 1} is the result of a tool that was not called; remove it")
        result.append(_checked(message, f"message {number + 1}"))
    return result


def _size(message: Mapping[str, Any]) -> int:
    calls = json.dumps(message["tool_calls"], ensure_ascii=False) if "tool_calls" in message else ""
    return len(message["content"]) + len(message.get("reasoning_content", "")) + len(calls)


def _checked(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"), name)}
    optional = {"assistant": ("reasoning_content", "raw", "note"), "tool": ("tool_call_id", "name")}.get(
        message["role"], ()
    )
    for key in optional:
        if message.get(key) is not None:
            result[key] = _text(message[key], f"{key} of {name}")
    if message["role"] == "assistant" and message.get("tool_calls"):
        result["tool_calls"] = _calls(message["tool_calls"], name)
    return result


def _calls(calls: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        raise ConfigError(f"tool_calls of {name} is not a list of up to {MAX_CALLS} calls; clear the chat")
    result: list[dict[str, Any]] = []
    for call in calls:
        if isinstance(call, Mapping) and isinstance(call.get("invalid"), str):
            result.append({"invalid": _text(call["invalid"], f"a call of {name}")})
            continue
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if isinstance(arguments, str):
            arguments = _json(arguments, f"the arguments of a call of {name}")
        if not isinstance(function, Mapping) or not isinstance(arguments, Mapping):
            raise ConfigError(f"a call of {name} has no function with arguments; clear the chat")
        function = {"name": _text(function.get("name"), f"a call of {name}"), "arguments": _plain(arguments, name)}
        identity = {"id": _text(call["id"], f"a call of {name}")} if call.get("id") else {}
        result.append({**identity, "type": "function", "function": function})
    return result


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Checks tools; returns them as chat templates read them.

    Args:
        tools: JSON text or its value: a list of functions with `name`, `description` and `parameters` (a JSON schema),
            as such or as `{"type": "function", "function": {…}}`; None or empty for none.

    Raises:
        ConfigError: for anything else.
    """
    if isinstance(tools, str):
        if len(tools) > MAX_CHARACTERS:
            raise ConfigError(f"tools has {len(tools):,} characters, more than {MAX_CHARACTERS:,}; shorten it")
        tools = _json(tools, "tools") if tools.strip() else None
    tools = [tools] if isinstance(tools, Mapping) else tools or []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise ConfigError(f'tools is not a list of up to {MAX_TOOLS} functions; write [{{"name": …}}]')
    result = []
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f"tool {number + 1} has no name of letters, digits, _, - and .; add one")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        description = function.get("description", "")
        if not isinstance(parameters, Mapping) or not isinstance(description, str):
            raise ConfigError(f"tool {name}: its description is not text, or its parameters are not a JSON schema")
        function = {"name": name, "description": description, "parameters": parameters}
        result.append({"type": "function", "function": _plain(function, f"tool {name}")})
    return result


def _json(text: str, name: str) -> Any:
    try:
        return parsed_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not valid JSON: {shortened(str(error))}; correct it") from None


def _plain(value: Any, name: str) -> Any:
    """The value, if it is JSON that can be sent and is not nested too deeply."""
    try:
        return parsed_json(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(f"{name} is not plain JSON, or nested too deeply; enter it again") from None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is not text; write a message")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} is not valid Unicode; enter it again") from None
    return value.replace("\x00", "")
