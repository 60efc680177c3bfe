"""Rows of an objective that samples: a prompt, the answer that rewards compare with, and the columns that they read.

A row may have an answer of its own (a completion, a last message of the assistant), which is not part of the prompt.
Otherwise it ends with the prompt, and the answer may stand in the column `answer`. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainers.config.objectives import ANSWER, PROMPT
from trainers.data.formats import (
    OF_CHATS,
    SHAREGPT_ROLES,
    Document,
    chat_messages,
    conversation,
    from_alpaca,
    from_prompt_completion,
    optional_text,
    refuse_too_large,
    values_by_role,
)
from trainers.data.messages import (
    Fields,
    Message,
    RowError,
    is_conversation,
    json_value,
    near,
    parse_messages,
    parsed_messages,
    text_of,
)

_EMPTY: tuple[Any, ...] = (None, "", [])
_STAND_IN: Message = {"role": "assistant", "content": "Answer"}
"""The answer before which a prompt ends: the template writes what it writes before any answer."""
_CHATS = {"chat": "messages", "sharegpt": "conversations"}


def prompt_document(
    row: Mapping[str, Any], format_name: str | None, columns: Mapping[str, str], chat: bool, rewards: Mapping[str, bool]
) -> Document:
    """Converts a row to a document with an answer, or one that ends with its prompt.

    Args:
        row: Columns and values.
        format_name: A format of the objective; None if the columns of the row match none.
        columns: `config.columns`.
        chat: Whether there is a chat template.
        rewards: Columns that rewards read, and whether a row may lack each.

    Raises:
        RowError: if the row does not fit the format, or lacks what a reward needs.
    """
    name = PROMPT if format_name == "prompt_completion" else format_name  # a completion is not needed
    values, fields = values_by_role(row, name, columns, (ANSWER, *rewards))
    document = _document(str(name), values, chat, fields)
    read = _read(row, columns, values, rewards)
    column = columns.get(ANSWER, ANSWER)
    if ANSWER in rewards and document.unanswered:
        if (answer := _answer(values[ANSWER], column)) is not None:
            read = {ANSWER: answer, **read}
        elif not rewards[ANSWER]:
            remedy = f"give it a column {column!r}, or a completion"
            raise RowError("no answer", f"rewards compare with an answer, and the row has none; {remedy}")
    elif values[ANSWER] not in _EMPTY and ANSWER in rewards and ANSWER in columns:
        problem = f"its completion is the answer that rewards compare with, and columns names {column!r} too"
        raise RowError("two answers", f"{problem}; leave one of them out")
    elif column not in {columns.get(role, role) for role in rewards if role != ANSWER}:
        fields.add_unused({column: row.get(column)})
    text = json.dumps(read, ensure_ascii=False) if read else ""
    document = replace(document, columns=text, unused=tuple(fields.unused))
    refuse_too_large([document])
    return document


def _answer(value: Any, column: str) -> str | None:
    """The text of an answer, of a number as JSON writes it; None if it is null or blank."""
    if isinstance(value, str):
        return text_of(value, column) if value.strip() else None
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else json.dumps(json_value(value, column))
    raise RowError("wrong type", f"{column} is {type(value).__name__}; the answer is a text or a number")


def _document(name: str, values: dict[str, Any], chat: bool, fields: Fields) -> Document:
    """The document of a row, without its columns."""
    if name == "alpaca":
        return from_alpaca(values, chat, fields)
    if name in _CHATS:
        messages, trained = chat_messages(values, _CHATS[name], fields)
        if messages[-1]["role"] == "assistant":
            return conversation(messages, trained, values, fields)
        return _unanswered(messages, trained, values, fields, 0, _CHATS[name])
    prompt, completion = parsed_messages(values["prompt"]), values["completion"]
    if completion not in _EMPTY:
        if is_conversation(prompt):  # perhaps as text, and so is the completion then
            values = {**values, "prompt": prompt, "completion": parsed_messages(completion)}
        return from_prompt_completion(values, fields)
    if is_conversation(prompt):
        listed = [prompt] if isinstance(prompt, dict) else prompt
        messages, trained = parse_messages(listed, "prompt", ("from", "value"), SHAREGPT_ROLES, fields)
        return _unanswered(messages, trained, values, fields, len(messages), "prompt")
    fields.add_unused({role: values[role] for role in OF_CHATS if role != "system"})
    system = optional_text(values["system"], "system")
    text = (f"{system}\n\n" if system else "") + text_of(prompt, "prompt", fields)
    if not text.strip():
        raise RowError("no prompt", "prompt is empty")
    return Document(prompt=text, unanswered=True)


def _unanswered(
    messages: list[Message], trained: list[bool], values: dict[str, Any], fields: Fields, untrained: int, column: str
) -> Document:
    """A conversation that the model is to answer: that of a row with an answer, which ends before it."""
    role = messages[-1]["role"]
    if role not in ("user", "tool"):
        raise RowError("no prompt", f"{column} ends with a message of role {role!r}; a prompt ends with user or tool")
    document = conversation([*messages, _STAND_IN], [*trained, True], values, fields, untrained)
    return replace(document, unanswered=True)


def _read(
    row: Mapping[str, Any], columns: Mapping[str, str], values: Mapping[str, Any], rewards: Mapping[str, bool]
) -> dict[str, Any]:
    """The columns that rewards read besides the answer, by role."""
    read: dict[str, Any] = {}
    for role, optional in rewards.items():
        column = columns.get(role, role)
        if role == ANSWER or (optional and column not in row):
            continue
        if column not in row:
            remedy = f"add it, or name another column with --columns {role}=COLUMN"
            problem = f"{column!r} is missing, and a reward reads it{near(column, list(row))}"
            raise RowError("missing key", f"{problem}; {remedy}")
        read[role] = json_value(values[role], column)
    return read
