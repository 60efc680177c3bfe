"""The Chat page's conversations: as messages between two events, and as HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.console import clean
from app.services.chat_messages import check_history
from trainers.config.json_schema import parsed_json
from trainers.config.mistakes import ConfigError
from ui.markdown import plain, render
from ui.parts import Html, element, join

Messages = list[dict[str, Any]]
"""See `app.services.chat_messages.check_history`."""

_MAX_BYTES = 2_000_000
_LOADING = "The model is loading: a message that you send now is answered once it is loaded."
"""Shown in place of what an empty conversation says, as long as the status says so (chat.css)."""


def read_messages(data: Any) -> Messages:
    """The messages of a conversation, as the browser keeps them.

    Args:
        data: what `write_messages` wrote; anything that a stranger may send.

    Raises:
        ConfigError: if it is no conversation.
    """
    if not data:
        return []
    try:
        if not isinstance(data, str) or len(data) > _MAX_BYTES:
            raise ValueError
        return check_history(parsed_json(data))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("the conversation is not one of this page; clear the chat") from None


def write_messages(messages: Messages) -> str:
    """The text that `read_messages` reads."""
    return json.dumps(messages, ensure_ascii=False)


class Reply:
    """An answer while it streams in.

    Args:
        seed: what its random numbers come from.
    """

    def __init__(self, seed: Any = None):
        self.seed = seed
        self.is_done = False
        self.thinks = False
        self._texts: dict[str, list[str]] = {"content": [], "reasoning": [], "raw": []}
        self._calls: list[str] = []
        self._message: dict[str, Any] | None = None
        self._facts: dict[str, Any] = {}

    def add(self, document: Mapping[str, Any]) -> None:
        """Takes a document of `Chats.ask`."""
        self._texts["raw"].append(document.get("text", ""))
        for kind, text, opens in document.get("parts", ()):
            self.thinks = kind == "reasoning"
            if kind != "tool_call":
                self._texts[kind].append(text)
            elif opens:
                self._calls.append(text)
            else:
                self._calls[-1] += text
        if "finish" in document:
            self._facts = dict(document)
        self._message = document.get("message", self._message)

    def message(self) -> dict[str, Any]:
        """The message so far."""
        message = dict(self._message or {"role": "assistant", "content": "".join(self._texts["content"])})
        if self._message is None:
            if reasoning := "".join(self._texts["reasoning"]):
                message["reasoning_content"] = reasoning
            if self._calls:
                message["tool_calls"] = [{"invalid": text} for text in self._calls]
        return {**message, "raw": "".join(self._texts["raw"]), "note": self._note() if self.is_done else ""}

    def _note(self) -> str:
        finish = {"length": "cut at the limit of tokens", "cancelled": "stopped", "eos": ""}
        rate = self._facts.get("tokens_per_second")
        parts = [
            finish.get(self._facts.get("finish", "cancelled"), ""),
            f"{self._facts['tokens']:,} tokens" if "tokens" in self._facts else "",
            f"{rate:.1f} tokens/s" if rate else "",
            f"seed {self.seed}" if self.seed is not None else "",
        ]
        return " · ".join(filter(None, parts))


# -- HTML ------------------------------------------------------------------------------------------------------------


def conversation(side: str, heading: str, messages: Messages, reply: Reply | None = None, empty: str = "") -> Html:
    """A conversation as HTML.

    Args:
        side: `first` or `second`.
        heading: which model answers.
        messages: so far.
        reply: the answer that streams in after them.
        empty: what stands in place of no messages.
    """
    streaming = reply is not None and not reply.is_done
    entries = [*messages, *([reply.message()] if reply else [])]
    turns = [
        _turn(side, entries, index, bool(reply and streaming and index == len(messages) and reply.thinks), streaming)
        for index in range(len(entries))
    ]
    waiting = [
        element("p", empty, class_="ts-note ts-ready"),
        element("p", _LOADING, class_="ts-note ts-loading-model"),
    ]
    log = element(
        "div", join(turns or waiting), class_="ts-log", role="log",
        aria_label=f"Conversation with {heading}", aria_busy="true" if streaming else "false", tabindex=0,
    )  # fmt: skip
    head = element("h2", heading, class_="ts-side", title=heading)
    return element("div", join([head, log]), class_="ts-conversation", data_side=side)


def _turn(side: str, messages: Messages, index: int, thinks: bool, streaming: bool) -> Html:
    message, is_last = messages[index], index == len(messages) - 1
    role = message["role"]
    key = f"{side}-{index}"
    if role == "user":
        later = len(messages) - index - 1
        content = [element("div", message["content"], class_="ts-plain ts-own")]
        tools = [] if streaming else [_button("edit", "Edit", index, later=later, label=f"Edit message {index + 1}")]
        return _entry("You", "ts-you", content, tools)
    if role == "tool":
        name = message.get("name") or "a tool"
        content = [element("pre", element("code", _pretty(message["content"])), tabindex=0, class_="ts-result")]
        return _entry(f"Result of {name}", "ts-tool", content, [])
    if role == "system":
        return _entry("Instructions", "ts-you", [plain(message["content"])], [])
    content = [*_thought(message, key, thinks, streaming and is_last)]
    if message["content"]:
        content.append(element("div", render(message["content"]), class_="ts-markdown"))
    calls = message.get("tool_calls") or []
    content += [_call(call, streaming and is_last) for call in calls]
    if not content and not (streaming and is_last):
        content.append(element("p", "An empty answer.", class_="ts-note"))
    raw = "\n" + (message.get("raw") or message["content"])  # HTML drops a newline right after <pre>
    content.append(element("pre", raw, class_="ts-raw", tabindex=0))
    known = [call for call in calls if "function" in call]
    if is_last and known and not streaming:
        content.append(_results(known, index))
    tools = [] if streaming and is_last else [_button("copy", "Copy text", index, label=f"Copy answer {index + 1}")]
    if is_last and not streaming:
        tools.append(_button("regenerate", "Answer again", index, label="Answer again, with another seed"))
    if note := message.get("note"):
        tools.append(element("span", note, class_="ts-note"))
    return _entry("Model", "ts-model", content, tools)


def _entry(author: str, kind: str, content: Sequence[Html], tools: Sequence[Html]) -> Html:
    parts = [element("div", author, class_="ts-author"), element("div", join(content), class_="ts-message")]
    if tools:
        parts.append(element("div", join(tools), class_="ts-tools"))
    return element("div", join(parts), class_=f"ts-turn {kind}")


def _button(act: str, text: str, index: int, later: int | None = None, label: str | None = None) -> Html:
    return element(
        "button", text, type="button", class_="ts-button", data_act=act, data_index=index, data_later=later,
        aria_label=label,
    )  # fmt: skip


def _thought(message: Mapping[str, Any], key: str, thinks: bool, unfinished: bool) -> list[Html]:
    """The folded thought of an answer."""
    thought = message.get("reasoning_content", "")
    if not thought and not thinks:
        return []
    count = len(thought.split())
    cut = not unfinished and not message["content"] and not message.get("tool_calls")
    state = "Thinking …" if thinks else "Thought, without an answer" if cut else "Thought"
    summary = element("summary", f"{state} ({count:,} {'word' if count == 1 else 'words'})")
    body = element("div", render(thought), class_="ts-markdown")
    return [element("details", join([summary, body]), class_="ts-thought", data_fold=f"thought-{key}")]


def _call(call: Mapping[str, Any], unfinished: bool) -> Html:
    """A call of a tool, which is only shown."""
    if "function" not in call:
        head = "Calls a tool …" if unfinished else "Call of a tool that cannot be read"
        body = element("pre", element("code", call["invalid"]), tabindex=0)
        return element("div", join([element("div", head, class_="ts-call-head"), body]), class_="ts-call")
    function = call["function"]
    head = join(["Calls ", element("code", function["name"])])
    arguments = json.dumps(function["arguments"], indent=2, ensure_ascii=False)
    body = element("pre", element("code", arguments), tabindex=0)
    return element("div", join([element("div", head, class_="ts-call-head"), body]), class_="ts-call")


def _results(calls: Sequence[Mapping[str, Any]], index: int) -> Html:
    """Fields for the results of calls, which the reader looks up: nothing is executed."""
    fields = []
    for number, call in enumerate(calls):
        label = f"Result of {call['function']['name']}" + (f" ({number + 1})" if len(calls) > 1 else "")
        area = element("textarea", "", rows=2, data_result=number, aria_label=label, placeholder="JSON or text")
        fields.append(element("label", join([element("span", label), area])))
    note = element("p", "The call is not executed. Enter what the tool would return.", class_="ts-note")
    send = _button("results", "Send results", index)
    return element("div", join([note, *fields, send]), class_="ts-results")


def _pretty(text: str) -> str:
    try:
        return json.dumps(parsed_json(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return clean(text)


# -- changes ---------------------------------------------------------------------------------------------------------


def edited(messages: Messages, index: Any, text: Any) -> Messages:
    """The conversation with another message of the user, and without what followed it.

    Raises:
        ConfigError: if there is no such message.
    """
    is_known = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(messages)
    if not is_known or messages[index]["role"] != "user":
        raise ConfigError("the message to edit does not exist; reload the page")
    return [*messages[:index], {"role": "user", "content": text}]


def before_answer(messages: Messages) -> Messages:
    """The conversation without its last answer.

    Raises:
        ConfigError: if there is none.
    """
    if not messages or messages[-1]["role"] != "assistant":
        raise ConfigError("there is no answer to give again; send a message")
    return messages[:-1]


def with_results(messages: Messages, results: Any) -> Messages:
    """The conversation with the results of the calls of its last message.

    Raises:
        ConfigError: if they are not one text for each call.
    """
    calls = [call for call in (messages[-1].get("tool_calls") or []) if "function" in call] if messages else []
    if not calls or not isinstance(results, list) or len(results) != len(calls):
        raise ConfigError("there is no call of a tool to give results of; send a message")
    if not all(isinstance(result, str) and result.strip() for result in results):
        raise ConfigError("the result of a tool is empty; write what it returns, such as {}")
    answers = [
        {"role": "tool", "content": result, "name": call["function"]["name"], "tool_call_id": call.get("id", "")}
        for call, result in zip(calls, results, strict=True)
    ]
    return [*messages, *answers]


def undone(messages: Messages) -> tuple[Messages, str]:
    """The conversation without its last message of the user and what followed; and the text of that message."""
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=None)
    return (messages[:last], str(messages[last]["content"])) if last is not None else ([], "")


def saved_rows(conversations: Sequence[Messages], system: str, tools: Sequence[Any]) -> str:
    """Conversations as rows of a JSONL file that can be trained on.

    An answer whose only calls cannot be read is its text as it was generated, as in the prompt of the next answer.
    """
    rows = []
    for messages in conversations:
        first = [{"role": "system", "content": system}] if system else []
        if messages:
            rows.append({"messages": [*first, *map(_saved, messages)], **({"tools": list(tools)} if tools else {})})
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _saved(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls", ())
    known = [call for call in calls if "function" in call]
    if calls and not known:
        return {"role": "assistant", "content": message.get("raw") or message["content"]}
    saved = {key: value for key, value in message.items() if key not in ("raw", "note", "tool_calls")}
    return {**saved, "tool_calls": known} if known else saved
