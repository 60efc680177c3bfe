"""Converts rows of every known format to a canonical `Document`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.objectives import (
    COLUMN_ROLES,
    FORMAT_COLUMNS,
    LABELLED,
    MEDIA,
    OBJECTIVES,
    PREFERENCE,
    PROMPT,
    SFT_FORMATS,
)
from trainers.data.messages import (
    Fields,
    Message,
    RowError,
    is_text_part,
    json_value,
    near,
    parse_json_value,
    parse_messages,
    refuse_media,
    text_of,
)
from trainers.data.shards import ROW_BYTES

__all__ = ["Document", "Message", "RowError", "canonical", "recognise", "unrecognised", "wanted_columns"]

OF_CHATS = ("system", "tools", "functions", "chat_template_kwargs")
OF_ALPACA = ("instruction", "input", "history")
"""Alpaca's columns of a question, which LLaMA-Factory's preferences have too."""
OPTIONAL: dict[str, tuple[str, ...]] = {  # columns that a format may have beside `FORMAT_COLUMNS`
    LABELLED: ("prompt", "completion", "messages", "conversations", "output", *OF_ALPACA, *OF_CHATS),
    "chat": OF_CHATS,
    "sharegpt": OF_CHATS,
    "prompt_completion": OF_CHATS,
    "alpaca": ("input", "system", "history"),
    "text": (),
    PREFERENCE: ("prompt", "messages", "conversations", *OF_ALPACA, *OF_CHATS),
    PROMPT: ("completion", *OF_CHATS),
}
OPENAI_SIDES = {"chosen": "preferred_output", "rejected": "non_preferred_output"}
"""OpenAI's columns of a preference, whose question and tools are in `input`."""
_OF_TREES = ("parent_id", "role")
"""Columns of a message of a tree, as in OASST: its `text` is not one by itself."""
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
# Variables that the renderer itself passes to the template.
_RESERVED = {
    "conversations", "messages", "tools", "documents", "chat_template", "return_assistant_tokens_mask",
    "continue_final_message", "add_generation_prompt",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Document:
    """One training example: messages, or a prompt and its completion, or plain text.

    Attributes:
        messages: Messages of a conversation.
        untrained: Number of messages at the start that are context, whatever their role.
        prompt: Text that is not trained.
        completion: Text that is trained; plain text is a completion without a prompt.
        left_out: Indices of further assistant messages that are not trained.
        desirable: The label, of an example that has one.
        numbers: The numeric columns that the objective reads, in its order; None where the example has none.
        unanswered: Whether the document ends where the model would begin its answer: before the last message, which
            stands in for one, or after the prompt.
        columns: The columns that rewards read, as a JSON object; empty without any.
        variables: What the chat template gets besides the messages, such as `tools`.
        unused: Paths of unused fields of the row, such as `messages[].id`.
        optional: Path to key within a message, for fields that only some templates write.
        size: Length in characters.
    """

    messages: tuple[Message, ...] = ()
    untrained: int = 0
    prompt: str = ""
    completion: str = ""
    left_out: frozenset[int] = frozenset()
    desirable: bool = True
    numbers: tuple[float | None, ...] = ()
    unanswered: bool = False
    columns: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = field(default=(), compare=False)
    optional: Mapping[str, str] = field(default_factory=dict, compare=False)
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        texts = len(self.prompt) + len(self.completion) + len(self.columns)
        for message in self.messages:
            texts += len(message["content"])
        object.__setattr__(self, "size", texts)  # read for each of several limits


def recognise(
    names: Iterable[str],
    columns: Mapping[str, str],
    formats: Sequence[str] = SFT_FORMATS,
    numeric: Iterable[str] = (),
) -> str | None:
    """The format whose columns are all present, or None.

    Args:
        names: Columns of the row.
        columns: `config.columns`, the user's column for each role; only formats with these roles are considered.
        formats: The formats of the objective, in the order in which they are tried.
        numeric: The columns of the objective, which belong to no format: numbers, and those that rewards read.
    """
    present = set(names)
    have = _roles(present, columns)
    for name in formats:
        needed = FORMAT_COLUMNS[name]
        if name == "text" and not columns and present.issuperset(_OF_TREES):
            continue
        if set(columns) <= {*needed, *OPTIONAL[name], *numeric} and have.issuperset(needed):
            return name
    return None


def unrecognised(
    where: str, names: Sequence[str], columns: Mapping[str, str], formats: Sequence[str] = SFT_FORMATS
) -> ConfigError:
    """The error for data whose columns belong to no format of the objective."""
    listed = ", ".join(list(names)[:20]) or "none"
    mapped = f" with columns={dict(columns)}" if columns else ""
    mistakes: list[str | Mistake] = [f"{where}: the columns {listed}{mapped} match no known format"]
    if formats != SFT_FORMATS:
        have = _roles(names, columns)
        absent = [[role for role in FORMAT_COLUMNS[name] if role not in have] for name in formats]
        lacking = min(absent, key=lambda roles: (len(roles), roles != ["prompt"]))
        mistakes[0] = f"{where}: the columns {listed}{mapped} lack {' and '.join(lacking)}"
    missing = [column for column in columns.values() if column not in names]
    mistakes += [
        Mistake("columns", None, f"names {column!r}, which does not exist{near(column, names)}") for column in missing
    ]
    if "text" in formats and {"text", *_OF_TREES} <= {*names}:
        mistakes.append(
            "each row is a message of a tree; write a row with `messages` for each conversation in it, or set "
            "dataset_format=text to train on each message as a text"
        )
    known = "; ".join(f"{name}: {', '.join(FORMAT_COLUMNS[name])}" for name in formats)
    others = [name for name in FORMAT_COLUMNS if name not in (*formats, PROMPT)]  # a prompt alone is in many rows
    if other := recognise(names, columns, others):
        *names_of, last = [spec.name for spec in OBJECTIVES.values() if other in spec.formats]
        remedy = f"{', '.join(names_of)} or {last}" if names_of else last
        mistakes.append(f"these are columns of the format {other}, which other objectives take: set objective={remedy}")
    return ConfigError([*mistakes, f"map yours with --columns role=column, such as prompt=question ({known})"])


def wanted_columns(columns: Mapping[str, str], numeric: Iterable[str] = ()) -> list[str]:
    """Every column that some format uses or refuses, and those of the objective."""
    roles = [role for role in (*COLUMN_ROLES, *numeric) if role not in columns]
    return [*columns.values(), *roles, *OPENAI_SIDES.values(), *_OF_TREES, *MEDIA]


def canonical(row: Mapping[str, Any], format_name: str, columns: Mapping[str, str], chat: bool) -> Document:
    """Converts a row with one answer to a `Document`.

    Args:
        row: Columns and values.
        format_name: `chat`, `sharegpt`, `alpaca`, `prompt_completion` or `text`; `auto` goes by the row's columns.
        columns: `config.columns`.
        chat: Whether there is a chat template; without one, instructions become plain prompts.

    Raises:
        RowError: if the row does not fit the format.
    """
    name = recognise(row, columns) if format_name == "auto" else format_name
    values, fields = values_by_role(row, name, columns)
    document = _BUILDERS[str(name)](values, chat, fields)
    refuse_too_large([document])
    return document


def values_by_role(
    row: Mapping[str, Any], format_name: str | None, columns: Mapping[str, str], numeric: Iterable[str] = ()
) -> tuple[dict[str, Any], Fields]:
    """The row's values by role of its format (None if it lacks an optional one), and the fields that are left.

    `numeric` are columns of the objective, which are roles of every format.

    Raises:
        RowError: if the format is None, or the row lacks a column that it needs or holds images, audio or video.
    """
    if format_name is None:
        raise RowError("missing key", f"the columns {', '.join(list(row)[:10]) or 'none'} match no known format")
    needed, sources, used = _layout(format_name, tuple(columns.items()), tuple(numeric))
    values = {role: None if column is None else row.get(column) for role, column in sources}
    for column in needed:
        if column not in row:
            raise RowError("missing key", f"{column!r} is missing{near(column, list(row))}")
    fields = Fields()
    if not used.issuperset(row):
        others = {column: value for column, value in row.items() if column not in used}
        refuse_media(others)
        fields.add_unused(others)
    return values, fields


@lru_cache(maxsize=64)  # the same for all rows of a file
def _layout(
    format_name: str, mapping: tuple[tuple[str, str], ...], numeric: tuple[str, ...]
) -> tuple[list[str], list[tuple[str, str | None]], frozenset[str]]:
    """The columns that a format needs, the column of each role (None if it has none), and all columns of roles."""
    columns = dict(mapping)
    mapped = {column for role, column in mapping if column != role}  # not read under their own names too
    roles = (*FORMAT_COLUMNS[format_name], *OPTIONAL[format_name], *numeric)
    sources = [(role, None if role in mapped and role not in columns else columns.get(role, role)) for role in roles]
    needed = [columns.get(role, role) for role in FORMAT_COLUMNS[format_name]]
    return needed, sources, frozenset(columns.get(role, role) for role in roles)


def refuse_too_large(documents: Iterable[Document]) -> None:
    """Raises RowError if the documents of a row hold more characters than a row may."""
    if sum(document.size for document in documents) > ROW_BYTES:
        raise RowError("row too large", f"over {ROW_BYTES:,} characters; split it into several rows")


def _roles(names: Iterable[str], columns: Mapping[str, str]) -> set[str]:
    """The roles for which there is a column; a column mapped to another role does not count under its own name."""
    have = set(names)
    own = {name for name in have if name in COLUMN_ROLES and name not in columns and name not in columns.values()}
    mapped = {role for role, column in columns.items() if column in have}
    return own | mapped | ({*OPENAI_SIDES} if is_openai_preference(have, columns) else set())


def is_openai_preference(names: Iterable[str], columns: Mapping[str, str]) -> bool:
    """Whether rows with these columns are preferences in OpenAI's form, none of which the user mapped."""
    needed = {"input", *OPENAI_SIDES.values()}
    return needed <= set(names) and needed.isdisjoint(columns.values()) and OPENAI_SIDES.keys().isdisjoint(columns)


def optional_text(value: Any, location: str) -> str:
    """Text, empty if the value is null."""
    return "" if value is None else text_of(value, location)


def conversation(
    messages: list[Message], trained: list[bool], values: dict[str, Any], fields: Fields, untrained: int = 0
) -> Document:
    """A document of the messages and the row's other fields.

    Args:
        messages: Messages of the row.
        trained: Whether each of them may be trained.
        values: The row's values by role.
        fields: Collects the unused and optional fields.
        untrained: Number of messages at the start that are context.
    """
    system = optional_text(values.get("system"), "system")
    if system and messages[0]["role"] in ("system", "developer"):
        fields.unused.add("system")  # the conversation has its own
    elif system:
        messages, trained, untrained = (
            [{"role": "system", "content": system}, *messages],
            [True, *trained],
            untrained + 1,
        )
    replies = [index for index in range(untrained, len(messages)) if messages[index]["role"] == "assistant"]
    if not any(_says_something(messages[index]) for index in replies):
        raise RowError("no trained token", "no message of the assistant has any text")
    left_out = frozenset(index for index in replies if not trained[index])
    if len(left_out) == len(replies):
        raise RowError("no trained token", "every message of the assistant is marked as not trained")
    variables = _variables(values, fields)
    return Document(
        tuple(messages),
        untrained,
        left_out=left_out,
        variables=variables,
        unused=tuple(fields.unused),
        optional=fields.optional,
    )


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _variables(values: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """What a row passes to the chat template besides the messages."""
    variables: dict[str, Any] = {}
    options = values.get("chat_template_kwargs")
    if options is not None:
        options = parse_json_value(options, dict, "chat_template_kwargs")
        json_value(options, "chat_template_kwargs")
        reserved = _RESERVED.intersection(options)
        if reserved:
            raise RowError("wrong type", f"chat_template_kwargs.{min(reserved)} cannot be set by a row; leave it out")
        variables = {name: value for name, value in options.items() if value is not None}
    tools = values.get("tools") and _tools(values["tools"], "tools")
    functions = values.get("functions") and _tools(values["functions"], "functions")
    if tools and functions:
        fields.unused.add("functions")
    tools = [_as_tool(tool) for tool in tools or functions or []]
    if tools:  # some templates write a header even for an empty list
        variables["tools"] = tools
    return variables


def _as_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form that templates expect; a bare function is wrapped."""
    if "function" in tool or "name" not in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tools(value: Any, location: str) -> list[dict[str, Any]]:
    tools = parse_json_value(value, list, location)
    json_value(tools, location)
    return [parse_json_value(tool, dict, f"{location}[{index}]") for index, tool in enumerate(tools)]


def chat_messages(values: dict[str, Any], role: str, fields: Fields) -> tuple[list[Message], list[bool]]:
    """The messages of the column `messages` or `conversations`, and for each whether it may be trained."""
    if role == "messages":
        return parse_messages(values[role], role, ("role", "content"), {}, fields)
    return parse_messages(values[role], role, ("from", "value"), SHAREGPT_ROLES, fields)


def _from_chat(values: dict[str, Any], chat: bool, fields: Fields) -> Document:
    return conversation(*chat_messages(values, "messages", fields), values, fields)


def _from_sharegpt(values: dict[str, Any], chat: bool, fields: Fields) -> Document:
    return conversation(*chat_messages(values, "conversations", fields), values, fields)


def from_alpaca(values: dict[str, Any], chat: bool, fields: Fields) -> Document:
    instruction, input_text = text_of(values["instruction"], "instruction"), optional_text(values["input"], "input")
    answer, system = answer_text(values["output"], "output"), optional_text(values["system"], "system")
    history = _turns(values["history"])
    if chat:
        question = "\n\n".join(text for text in (instruction, input_text) if text.strip()) or instruction
        messages = [*history, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return conversation(messages, [True] * len(messages), values, fields)
    if history:
        raise RowError("wrong type", "history needs a chat template, which the model lacks; give --chat_template FILE")
    parts = [
        system,
        f"### Task\n{instruction}",
        f"### Input\n{input_text}" if input_text.strip() else "",
        "### Answer\n",
    ]
    return plain_text("\n\n".join(part for part in parts if part), answer, fields)


def _turns(value: Any) -> list[Message]:
    """Alpaca's `history`, `[[question, answer], ...]`, as messages."""
    messages = []
    for index, turn in enumerate(parse_json_value(value, list, "history") if value else []):
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise RowError("wrong type", f"history[{index}] is not a pair of a question and its answer")
        messages.append({"role": "user", "content": text_of(turn[0], f"history[{index}][0]")})
        messages.append({"role": "assistant", "content": text_of(turn[1], f"history[{index}][1]")})
    return messages


def from_prompt_completion(values: dict[str, Any], fields: Fields) -> Document:
    """A document of a prompt and its completion, both text or both messages."""
    prompt, completion = values["prompt"], values["completion"]
    if isinstance(prompt, list) and isinstance(completion, list) and not all(map(is_text_part, prompt)):
        prompt_messages, _ = parse_messages(prompt, "prompt", ("role", "content"), {}, fields)
        replies, trained = parse_messages(completion, "completion", ("role", "content"), {}, fields)
        return conversation(
            [*prompt_messages, *replies], [True] * len(prompt_messages) + trained, values, fields, len(prompt_messages)
        )
    listed = prompt if isinstance(prompt, list) else completion
    if {type(prompt), type(completion)} == {str, list} and not all(map(is_text_part, listed)):
        problem = "one of prompt and completion is text, the other a list of messages"
        raise RowError("wrong type", f"{problem}; make both lists of messages")
    fields.add_unused({role: values[role] for role in OF_CHATS if role != "system"})
    system = optional_text(values["system"], "system")
    before = f"{system}\n\n" if system else ""
    return plain_text(before + text_of(prompt, "prompt", fields), answer_text(completion, "completion", fields), fields)


def _from_text(values: dict[str, Any], chat: bool, fields: Fields) -> Document:
    return plain_text("", answer_text(values["text"], "text", fields), fields)


def plain_text(prompt: str, completion: str, fields: Fields) -> Document:
    """A document of plain text, of which the completion is trained."""
    return Document(prompt=prompt, completion=completion, unused=tuple(fields.unused))


def answer_text(value: Any, location: str, fields: Fields | None = None) -> str:
    """Text of an answer; raises RowError if it is empty."""
    text = text_of(value, location, fields)
    if not text.strip():
        raise RowError("no trained token", f"{location} is empty")
    return text


_BUILDERS = {
    "chat": _from_chat,
    "sharegpt": _from_sharegpt,
    "prompt_completion": lambda values, chat, fields: from_prompt_completion(values, fields),
    "alpaca": from_alpaca,
    "text": _from_text,
}
