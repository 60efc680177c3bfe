"""Rows of every known format as one canonical `Document`. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainers.config import COLUMN_ROLES, ConfigError
from trainers.data.shards import ROW_BYTES, Bad

# What a format needs, and what it may also have; recognised in this order.
NEEDED: dict[str, tuple[str, ...]] = {
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "chat": ("system",),
    "sharegpt": ("system",),
    "prompt_completion": ("system",),
    "alpaca": ("input", "system"),
    "text": (),
}
ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
}

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Document:
    """One training example: messages, or a prompt and its completion, or plain text.

    Attributes:
        messages: Of a conversation, each with `role` and `content`.
        untrained: How many messages at the start are context, whatever their role.
        prompt: Text that is not trained.
        completion: Text that is; plain text is a completion without a prompt.
    """

    messages: tuple[Message, ...] = ()
    untrained: int = 0
    prompt: str = ""
    completion: str = ""

    @property
    def size(self) -> int:
        """Characters."""
        return len(self.prompt) + len(self.completion) + sum(len(message["content"]) for message in self.messages)


class RowError(ValueError):
    """A row that cannot be used."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.bad = Bad(kind, detail)


def recognise(names: Iterable[str], columns: Mapping[str, str]) -> str | None:
    """The format whose columns are all there, or None.

    Args:
        names: The row's columns.
        columns: `config.columns`, the user's column for each role; only formats with these roles are considered.
    """
    have = _roles(names, columns)
    for name, needed in NEEDED.items():
        if set(columns) <= {*needed, *OPTIONAL[name]} and have.issuperset(needed):
            return name
    return None


def unrecognised(where: str, names: Sequence[str], columns: Mapping[str, str]) -> ConfigError:
    """The error for data whose columns belong to no format."""
    shown = ", ".join(list(names)[:20]) or "none"
    mapped = f" with columns={dict(columns)}" if columns else ""
    lines = [f"{where}: the columns {shown}{mapped} belong to no known format"]
    lost = [column for column in columns.values() if column not in names]
    lines += [f"columns names {column!r}, which is not there{_near(column, names)}" for column in lost]
    known = "; ".join(f"{name}: {', '.join(needed)}" for name, needed in NEEDED.items())
    return ConfigError([*lines, f"name yours with --columns role=column, such as prompt=question ({known})"])


def wanted_columns(columns: Mapping[str, str]) -> list[str]:
    """Every column that any format could use."""
    return [*columns.values(), *(role for role in COLUMN_ROLES if role not in columns)]


def canonical(row: Mapping[str, Any], format_name: str, columns: Mapping[str, str], chat: bool) -> Document:
    """A row as a `Document`.

    Args:
        row: Columns and values.
        format_name: `chat`, `sharegpt`, `alpaca`, `prompt_completion` or `text`; `auto` goes by the row's columns.
        columns: `config.columns`.
        chat: Whether there is a chat template; without one, instructions become plain prompts.

    Raises:
        RowError: when the row does not fit the format.
    """
    name = recognise(row, columns) if format_name == "auto" else format_name
    if name is None:
        raise RowError("missing key", f"the columns {', '.join(list(row)[:10]) or 'none'} belong to no known format")
    values = {role: row.get(columns.get(role, role)) for role in (*NEEDED[name], *OPTIONAL[name])}
    for role in NEEDED[name]:
        column = columns.get(role, role)
        if column not in row:
            raise RowError("missing key", f"{column!r} is not there{_near(column, list(row))}")
    document = _BUILDERS[name](values, chat)
    if document.size > ROW_BYTES:
        raise RowError("row too large", f"over {ROW_BYTES:,} characters; cut it into several rows")
    return document


def _roles(names: Iterable[str], columns: Mapping[str, str]) -> set[str]:
    """The roles for which there is a column; a column that was given another role is not counted under its own name."""
    have = set(names)
    own = {name for name in have if name in COLUMN_ROLES and name not in columns and name not in columns.values()}
    return own | {role for role, column in columns.items() if column in have}


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, list(names)[:100], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _text(value: Any, what: str) -> str:
    """Text from a string or a list of text parts.

    Raises:
        RowError: for anything else.
    """
    if isinstance(value, list | tuple) and value and all(_is_text_part(part) for part in value):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        shown = "null" if value is None else type(value).__name__
        raise RowError("wrong type", f"{what} is {shown} and not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError("invalid UTF-8", f"{what} has half a surrogate pair at {error.start + 1}") from None
    return value


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _optional_text(value: Any, what: str) -> str:
    return "" if value is None else _text(value, what)


def _messages(value: Any, what: str, keys: tuple[str, str], renamed: Mapping[str, str]) -> list[Message]:
    """A list of messages, checked. `keys` are those of the role and of the content."""
    if not isinstance(value, list | tuple):
        raise RowError("wrong type", f"{what} is {'null' if value is None else type(value).__name__} and not a list")
    if not value:
        raise RowError("no trained token", f"{what} is empty")
    messages = []
    for index, message in enumerate(value):
        place = f"{what}[{index}]"
        if not isinstance(message, dict):
            raise RowError("wrong type", f"{place} is {type(message).__name__} and not an object")
        role_key, content_key = keys if keys[0] in message or keys[1] in message else ("role", "content")
        for key in (role_key, content_key):
            if key not in message:
                raise RowError("missing key", f"{place} has no {key!r}{_near(key, [str(name) for name in message])}")
        if message.get("tool_calls"):
            raise RowError(
                "wrong type", f"{place} has tool_calls, which are not supported; write them into its content"
            )
        role = _text(message[role_key], f"{place}.{role_key}")
        role = renamed.get(role, role)
        if role not in ROLES:
            raise RowError("unknown role", f"{place} has role {role[:40]!r}; use {', '.join(ROLES)}")
        messages.append({"role": role, "content": _text(message[content_key], f"{place}.{content_key}")})
    return messages


def _conversation(messages: list[Message], system: str, untrained: int = 0) -> Document:
    if system and messages[0]["role"] != "system":
        messages, untrained = [{"role": "system", "content": system}, *messages], untrained + 1
    answers = [message for message in messages[untrained:] if message["role"] == "assistant"]
    if not any(message["content"].strip() for message in answers):
        raise RowError("no trained token", "no message of the assistant has any text")
    return Document(tuple(messages), untrained)


def _from_chat(values: dict[str, Any], chat: bool) -> Document:
    messages = _messages(values["messages"], "messages", ("role", "content"), {})
    return _conversation(messages, _optional_text(values["system"], "system"))


def _from_sharegpt(values: dict[str, Any], chat: bool) -> Document:
    messages = _messages(values["conversations"], "conversations", ("from", "value"), _SHAREGPT_ROLES)
    return _conversation(messages, _optional_text(values["system"], "system"))


def _from_alpaca(values: dict[str, Any], chat: bool) -> Document:
    instruction, given = _text(values["instruction"], "instruction"), _optional_text(values["input"], "input")
    answer, system = _answer(values["output"], "output"), _optional_text(values["system"], "system")
    if chat:
        asked = f"{instruction}\n\n{given}" if given.strip() else instruction
        return _conversation([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], system)
    parts = [system, f"### Task\n{instruction}", f"### Input\n{given}" if given.strip() else "", "### Answer\n"]
    return Document(prompt="\n\n".join(part for part in parts if part), completion=answer)


def _from_prompt_completion(values: dict[str, Any], chat: bool) -> Document:
    prompt, completion = values["prompt"], values["completion"]
    system = _optional_text(values["system"], "system")
    if isinstance(prompt, list) and isinstance(completion, list) and not all(map(_is_text_part, prompt)):
        asked = _messages(prompt, "prompt", ("role", "content"), {})
        return _conversation(
            [*asked, *_messages(completion, "completion", ("role", "content"), {})], system, len(asked)
        )
    before = f"{system}\n\n" if system else ""
    return Document(prompt=before + _text(prompt, "prompt"), completion=_answer(completion, "completion"))


def _from_text(values: dict[str, Any], chat: bool) -> Document:
    return Document(completion=_answer(values["text"], "text"))


def _answer(value: Any, what: str) -> str:
    text = _text(value, what)
    if not text.strip():
        raise RowError("no trained token", f"{what} is empty")
    return text


_BUILDERS = {
    "chat": _from_chat,
    "sharegpt": _from_sharegpt,
    "prompt_completion": _from_prompt_completion,
    "alpaca": _from_alpaca,
    "text": _from_text,
}
