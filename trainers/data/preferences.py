"""Rows of every objective as examples: one document, or a chosen and a rejected one. Imports no torch.

Preferences come in the columns of TRL: `chosen` and `rejected`, each text, a message or messages, with their `prompt`
in a column of its own or at their start. The conversation before them may also stand in `messages` or `conversations`.
Or they have Alpaca's `instruction` and `input`, as in LLaMA-Factory, or OpenAI's `input` of messages and tools,
`preferred_output` and `non_preferred_output`.
Single answers have a column `label`, true if they are desirable: TRL's `prompt` and `completion`, or a conversation.
An objective may read numeric columns beside these, such as the `margin` of a pair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from trainers.config.objectives import ANSWER, PREFERENCE, SFT_FORMATS
from trainers.data.formats import (
    OF_ALPACA,
    OF_CHATS,
    OPENAI_SIDES,
    SHAREGPT_ROLES,
    Document,
    answer_text,
    canonical,
    conversation,
    from_alpaca,
    from_prompt_completion,
    is_openai_preference,
    optional_text,
    plain_text,
    recognise,
    refuse_too_large,
    values_by_role,
)
from trainers.data.messages import (
    Fields,
    Message,
    RowError,
    is_conversation,
    parse_json_value,
    parse_messages,
    parsed_messages,
    text_of,
)
from trainers.data.prompts import prompt_document

_BEFORE = ("prompt", "messages", "conversations")
_SIDES = ("chosen", "rejected")
_ANSWERED = ("completion", "messages", "conversations")
_EMPTY: tuple[Any, ...] = (None, "", [])
_LARGEST_NUMBER = 1e6
_UNASKED = "and no column holds the question; name it with --columns prompt=COLUMN"
_ALIKE = "chosen and rejected are the same"
_Side = tuple[list[Message], list[bool]]
"""Messages, and whether each may be trained."""


def example(
    row: Mapping[str, Any],
    format_name: str,
    columns: Mapping[str, str],
    chat: bool,
    formats: Sequence[str],
    numeric: Mapping[str, bool] = MappingProxyType({}),
    rewards: Mapping[str, bool] | None = None,
) -> tuple[Document, ...]:
    """Converts a row to its documents: one, or a chosen and a rejected one.

    Args:
        row: Columns and values.
        format_name: One of `formats`, or `auto` to go by the row's columns.
        columns: `config.columns`.
        chat: Whether there is a chat template.
        formats: The formats of the objective, in the order in which they are tried.
        numeric: Numeric columns that the objective reads, and whether a row may lack each.
        rewards: Columns that rewards read, and whether a row may lack each; None if the objective does not sample.

    Raises:
        RowError: if the row does not fit the format.
    """
    others = numeric if rewards is None else (ANSWER, *rewards)
    name = recognise(row, columns, formats, others) if format_name == "auto" else format_name
    if rewards is not None:
        return (prompt_document(row, name, columns, chat, rewards),)
    if name in SFT_FORMATS:
        return (canonical(row, name, columns, chat),)
    if name == PREFERENCE and is_openai_preference(row, columns):
        row = _from_openai(row)
    values, fields = values_by_role(row, name, columns, numeric)
    numbers = tuple(_number(values[role], columns.get(role, role), optional) for role, optional in numeric.items())
    documents = _pair(values, chat, fields) if name == PREFERENCE else (_labelled(values, chat, fields),)
    refuse_too_large(documents)
    return tuple(replace(document, numbers=numbers) for document in documents) if numbers else documents


def _labelled(values: dict[str, Any], chat: bool, fields: Fields) -> Document:
    """A prompt and its completion, or a conversation of which the last message is judged, with their label."""
    desirable = _label(values["label"])
    present = [role for role in _ANSWERED if values[role] is not None]
    if not present and values["output"] is not None and _asks(values, ("prompt",)):
        return replace(_of_alpaca(values, "output", chat, fields), desirable=desirable)
    fields.add_unused({role: values[role] for role in ("output", *OF_ALPACA)})
    if len(present) != 1:
        problem = f"{' and '.join(present)} both hold an answer" if present else "the label judges no answer"
        raise RowError("wrong type", f"{problem}; give completion (with its prompt), messages or conversations")
    (role,) = present
    if role == "completion":
        values |= {name: parsed_messages(values[name]) for name in ("prompt", "completion")}
        return replace(from_prompt_completion(values, fields), desirable=desirable)
    fields.add_unused({"prompt": values["prompt"]})
    messages, trained = _messages(values[role], role, fields)
    if messages[-1]["role"] != "assistant":
        problem = f"ends with a message of role {messages[-1]['role']!r}; the label judges one of the assistant"
        raise RowError("no trained token", f"{role} {problem}")
    document = conversation(messages, trained, values, fields, untrained=len(messages) - 1)
    return replace(document, desirable=desirable)


def _label(value: Any) -> bool:
    """A label as JSON and tables hold it: true or false, 1 or 0, or the text of one of them."""
    text = value.strip().lower() if isinstance(value, str) else value
    if text in (True, "true", "1"):
        return True
    if text in (False, "false", "0"):
        return False
    raise RowError("wrong label", f"label is {str(value)[:40]!r}, not true or false (or 1 or 0)")


def _number(value: Any, column: str, optional: bool) -> float | None:
    """A number as JSON and tables hold it, as such or as text; None if the row has none."""
    if value is None:
        if optional:
            return None
        raise RowError("missing key", f"{column!r} is missing or null, and the objective reads it")
    try:
        plain = not isinstance(value, str) or (value.isascii() and "_" not in value)  # Python also reads 1_000
        number = float(value) if plain and not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST_NUMBER:
        raise RowError("wrong number", f"{column} is {str(value)[:40]!r}, not a number from -1e6 to 1e6")
    return number


def _pair(values: dict[str, Any], chat: bool, fields: Fields) -> tuple[Document, ...]:
    for role in _SIDES:
        if values[role] is None:
            raise RowError("wrong type", f"{role} is null, not text or messages")
        values[role] = parsed_messages(values[role])
    listed = [is_conversation(values[role]) for role in _SIDES]
    if listed[0] != listed[1]:
        raise RowError("wrong type", "one of chosen and rejected is text, the other messages; make both the same")
    if not listed[0] and _asks(values, _BEFORE):
        chosen, rejected = (_of_alpaca(values, role, chat, fields) for role in _SIDES)
        if values["chosen"] == values["rejected"]:
            raise RowError("no preference", _ALIKE)
    else:
        fields.add_unused({role: values[role] for role in OF_ALPACA})
        chosen, rejected = (_conversations if listed[0] else _texts)(values, fields)
    return chosen, replace(rejected, desirable=False)


def _from_openai(row: Mapping[str, Any]) -> dict[str, Any]:
    """A preference in OpenAI's form with the columns of the others; what else is in `input` keeps its path."""
    before = parse_json_value(row["input"], dict, "input")
    if not before.get("messages"):
        raise RowError("missing key", "input has no messages; the answers need the conversation that they continue")
    known = {name: before[name] for name in ("messages", "tools", "functions") if before.get(name) is not None}
    known |= {role: row[column] for role, column in OPENAI_SIDES.items()}
    others = {name: value for name, value in row.items() if name not in ("input", *OPENAI_SIDES.values())}
    if both := [name for name in known if others.get(name) not in _EMPTY]:
        raise RowError("wrong type", f"{both[0]} is a column beside input and its answers; leave it out")
    return others | known | {f"input.{name}": value for name, value in before.items() if name not in known}


def _asks(values: dict[str, Any], before: Sequence[str]) -> bool:
    """Whether Alpaca's columns hold the question: no other column does."""
    return values["instruction"] not in _EMPTY and all(values[role] in _EMPTY for role in before)


def _of_alpaca(values: dict[str, Any], answer: str, chat: bool, fields: Fields) -> Document:
    """The answer in a column to the question in Alpaca's columns; replies of its history are not judged."""
    answer_text(values[answer], answer)
    document = from_alpaca({**values, "output": values[answer]}, chat, fields)
    return replace(document, untrained=max(0, len(document.messages) - 1))


def _messages(value: Any, role: str, fields: Fields) -> _Side:
    listed = [value] if isinstance(value, dict) else value
    return parse_messages(listed, role, ("from", "value"), SHAREGPT_ROLES, fields)


def _conversations(values: dict[str, Any], fields: Fields) -> tuple[Document, ...]:
    """The chosen and the rejected conversation, of which the messages after their common start are trained."""
    chosen, rejected = (_messages(values[role], role, fields) for role in _SIDES)
    if chosen == rejected:
        raise RowError("no preference", _ALIKE)
    before = _messages_before(values, fields, chosen[0])
    shared = 0
    while shared < min(len(chosen[0]), len(rejected[0])) and chosen[0][shared] == rejected[0][shared]:
        shared += 1
    if not before and not shared:
        raise RowError("no prompt", f"chosen and rejected start with different messages, {_UNASKED}")
    return tuple(
        conversation(
            [*before, *messages], [True] * len(before) + trained, values, fields, untrained=len(before) + shared
        )
        for messages, trained in (chosen, rejected)
    )


def _messages_before(values: dict[str, Any], fields: Fields, chosen: list[Message]) -> list[Message]:
    """The conversation that the answers continue, unless they repeat it themselves."""
    present = [role for role in _BEFORE if values[role] not in _EMPTY]
    if len(present) == 2 and present[0] == "prompt":
        role = present[1]
        if _messages(values[role], role, Fields())[0] == chosen:  # the chosen conversation again: UltraFeedback's
            fields.unused.add(present.pop())
    if len(present) > 1:
        raise RowError("wrong type", f"{' and '.join(present)} both hold what comes before the answers; keep one")
    if not present:
        return []
    (role,) = present
    value = values[role]
    if isinstance(value, str) and role == "prompt":
        before: list[Message] = [{"role": "user", "content": text_of(value, role)}]
    else:
        before = _messages(value, role, fields)[0]
    repeated = [message for message in chosen if message["role"] not in ("system", "developer")][: len(before)]
    return [] if repeated == before or chosen[: len(before)] == before else before


def _texts(values: dict[str, Any], fields: Fields) -> tuple[Document, ...]:
    """The chosen and the rejected text after a prompt; without one, after the words at which both start."""
    for role in ("messages", "conversations"):
        if values[role] not in _EMPTY:
            raise RowError("wrong type", f"{role} holds messages, and chosen and rejected text; make them messages too")
    prompt = values["prompt"]
    if prompt is not None and is_conversation(prompt):
        raise RowError("wrong type", "prompt holds messages, and chosen and rejected text; make them messages too")
    fields.add_unused({role: values[role] for role in OF_CHATS if role != "system"})
    system = optional_text(values["system"], "system")
    before = f"{system}\n\n" if system else ""
    answers = [answer_text(values[role], role, fields) for role in _SIDES]
    if answers[0] == answers[1]:
        raise RowError("no preference", _ALIKE)
    if prompt is None:
        shared = _shared_words(answers)
        if not shared:
            raise RowError("no prompt", f"chosen and rejected start with different words, {_UNASKED}")
        prompt, answers = answers[0][:shared], [answer[shared:] for answer in answers]
        for role, answer in zip(_SIDES, answers, strict=True):
            answer_text(answer, f"{role}, without the words at which both start,")
    return tuple(plain_text(before + text_of(prompt, "prompt", fields), answer, fields) for answer in answers)


def _shared_words(texts: list[str]) -> int:
    """Length of the common start of texts, up to the end of a word; the space after it belongs to what follows."""
    alike = takewhile(lambda letters: letters[0] == letters[1], zip(*texts, strict=False))
    length = sum(1 for _ in alike)
    ends = [index for index in range(1, length + 1) if all(text[index : index + 1].isspace() for text in texts)]
    return max(ends, default=0)
