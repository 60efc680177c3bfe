"""Takes a model's answer apart while it is generated: thoughts, calls of tools, and the text for the reader.

Which markers surround them is found in the tokenizer's `response_template`, otherwise in its chat template and tokens.
The parsing is transformers' `ResponseParser`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

from transformers.utils.chat_parsing.response_parser import ResponseParser
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from trainers.config.mistakes import ConfigError
from trainers.data.render_budget import TooLong, cpu_time_limit
from trainers.data.template_probe import TemplateProbe
from trainers.tools.tool_calls import Call, as_call, deepseek_token, read_calls

Kind = Literal["content", "reasoning", "tool_call"]
_Parsed = TypeVar("_Parsed")

_KINDS: dict[str, Kind] = {
    "content": "content", "reasoning_content": "reasoning", "thinking": "reasoning", "reasoning": "reasoning",
    "tool_calls": "tool_call",
}  # fmt: skip
"""Names of the fields of a response template."""
_CALLS = "tool_calls"
_SKIPPED = "skipped"
_NEVER = r"(?!)"
_PARSE_SECONDS = 10.0
"""CPU time of the process, generation included, in which a token's text has to be read; it takes less than 1 ms."""
_ANCHOR = "\x00"
"""Where an answer begins in the prefix that a parser gets; no template writes it."""


class Piece(NamedTuple):
    """A part of an answer that has just become known.

    Attributes:
        kind: what it belongs to.
        text: what to append; may be empty when `opens`.
        opens: whether another thought or call begins with it.
    """

    kind: Kind
    text: str
    opens: bool = False


def _thought(opening: str, closing: str) -> dict[str, Any]:
    """A thought at the start of an answer. Anywhere else its marker is only mentioned."""
    return {"open_pattern": rf"\A\s*{re.escape(opening)}", "close": closing}


def _calls(opening: str, closing: str) -> dict[str, Any]:
    return {"open_pattern": rf"\s*{opening}", "close_pattern": closing, "repeats": True}


@dataclass(frozen=True)
class _Known:
    """Markers of a family.

    Args:
        marks: texts of which one has to be in the chat template, or a token.
        thoughts: opening and closing marker.
        calls: patterns of the opening and the closing marker, if the family has tools.
        more: further fields of the response template.
    """

    marks: tuple[str, ...]
    thoughts: tuple[str, str] | None
    calls: tuple[str, str] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """As in a response template."""
        fields: dict[str, Any] = {"content": {}, **self.more}
        if self.thoughts:
            fields["reasoning"] = _thought(*self.thoughts)
        if self.calls:
            fields["tool_calls"] = _calls(*self.calls)
        return fields


_THINK = ("<think>", "</think>")
_HARMONY_ROLE = r"(?:<\|start\|>assistant)?\s*"
_HARMONY = {
    "reasoning": {
        "open_pattern": rf"{_HARMONY_ROLE}<\|channel\|>analysis<\|message\|>", "close": ["<|end|>"], "repeats": True,
    },
    # `to=functions.NAME` comes before the channel or after it; it is read from the body, so the header stays in it.
    "tool_calls": {
        "open_pattern": rf"{_HARMONY_ROLE}(?:<\|channel\|>commentary\s*)?(?=to=functions\.)", "close": "<|call|>",
        "repeats": True,
    },
    _SKIPPED: {
        "open_pattern": rf"{_HARMONY_ROLE}<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w+)?<\|message\|>"
        r"|<\|(?:end|return)\|>",
        "close_pattern": "(?=)", "repeats": True,
    },
}  # fmt: skip
_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _CALL_END = map(
    deepseek_token, ("tool_calls_begin", "tool_calls_end", "tool_call_begin", "tool_call_end")
)
_FAMILIES = (
    _Known(("<|channel|>",), None, None, _HARMONY),  # GPT-OSS
    _Known(("<|channel>", "<|tool_call>"), None, (r"<\|tool_call>", r"<tool_call\|>"), {
        "reasoning": {"open_pattern": r"\s*<\|channel>thought\n?", "close": "<channel|>", "repeats": True},
    }),  # Gemma 4
    _Known((_CALLS_BEGIN,), _THINK, (rf"(?:{_CALLS_BEGIN}\s*)?{_CALL_BEGIN}", _CALL_END), {
        _SKIPPED: {"open": _CALLS_END, "close_pattern": "(?=)", "repeats": True},
    }),  # DeepSeek
    _Known(("[TOOL_CALLS]", "[THINK]"), ("[THINK]", "[/THINK]"), (r"\[TOOL_CALLS\]", r"(?=\[TOOL_CALLS\])")),  # Mistral
    _Known(("<tool_call>",), _THINK, ("<tool_call>", "</tool_call>")),  # Qwen, Hermes, GLM, Nemotron
    _Known(("<|tool_call_start|>",), _THINK, (r"<\|tool_call_start\|>", r"<\|tool_call_end\|>")),  # LFM
    _Known(("<|python_tag|>",), _THINK, (r"<\|python_tag\|>", _NEVER)),  # Llama 3
)  # fmt: skip
_PLAIN = _Known((), _THINK)


class AnswerFormat:
    """How a model marks its thoughts and calls.

    Args:
        probe: of its chat template; None without one.
        source: the chat template; None without one.
        response_template: the tokenizer's own, if it has one.
        special: text of each special token by its id; those that mark nothing are left out of answers.
    """

    def __init__(
        self, probe: TemplateProbe | None, source: str | None, response_template: Any = None,
        special: Mapping[int, str] | None = None,
    ):  # fmt: skip
        self._source = source or ""
        self._prompt = probe.generation_prompt if probe else ""
        self._own = _loaded(response_template)
        texts = [*(special or {}).values(), self._source]
        known = next((each for each in _FAMILIES if any(mark in text for mark in each.marks for text in texts)), _PLAIN)
        tags = probe.thought_tags if known is _PLAIN and probe else None
        if tags and tags[1] == tags[0].replace("<", "</", 1):  # such as <reason> and </reason>
            known = _Known((), tags)
        self._family = known
        marks = str(response_template) if self._own else str(self._family.fields()).replace("\\", "")
        self.dropped = frozenset(token for token, text in (special or {}).items() if text not in marks)
        self.takes_tools = probe is not None and probe.mentions("tools")

    def parser(
        self, prompt: str = "", tools: Sequence[Mapping[str, Any]] = (), with_calls: bool = True
    ) -> AnswerParser:
        """A parser for one answer.

        Args:
            prompt: the text before the answer, which may have opened a thought.
            tools: that the model was offered, as chat templates read them.
            with_calls: whether to look for calls of tools; their text is content otherwise.
        """
        if self._own:
            fields = {name: each for name, each in self._own.fields.items() if with_calls or name != _CALLS}
            return AnswerParser(replace(self._own, fields=fields), prompt, tools)
        fields = self._family.fields()
        if tools and "<|start_header_id|>" in self._source:  # Llama 3 calls tools in bare JSON
            pattern = r"\A\s*(?=\{)|\s*<\|python_tag\|>"
            fields["tool_calls"] = {"open_pattern": pattern, "close_pattern": _NEVER, "repeats": True}
        if not with_calls:
            fields.pop(_CALLS, None)
        opened = ""
        if self._family.thoughts and prompt.rstrip().endswith(self._family.thoughts[0]):
            opened = self._family.thoughts[0]
        elif self._family is _FAMILIES[0] and prompt.rstrip().endswith("<|message|>"):
            opened = "<|channel|>" + prompt.rpartition("<|channel|>")[2]
        return AnswerParser(
            load_response_template({"start_anchor": _ANCHOR, "fields": fields}), _ANCHOR + opened, tools
        )


def _loaded(response_template: Any) -> ResponseTemplate | None:
    """A response template of a tokenizer; None for one that is wrong, or has no field that is known here."""
    try:
        template = load_response_template(response_template)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    for each in template.fields.values():
        each.optional = True  # an answer that lacks a part of it is still one to show
    return template if _KINDS.keys() & template.fields.keys() else None


class _LenientParser(ResponseParser):
    """One that goes on after a call that cannot be read; its event has no value.

    The event of a region that the end of the answer has cut is marked with `is_cut`.
    """

    _found_marker = False

    def _scan(self, *args: Any) -> Any:
        scanned = super()._scan(*args)
        self._found_marker = scanned[0] is not None
        return scanned

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        before = len(events)
        try:
            super()._close_current(events)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            events.append({"type": "region_close", "field": self._current, "value": None})
            self._reset_to_implicit()
        for event in events[before:]:
            field = self._spec.fields[event["field"]]
            event["is_cut"] = not self._found_marker and field.close_re is not None
            if event["is_cut"] and field.content != "json":  # which cannot be read before its end
                event["value"] = None


class AnswerParser:
    """Takes one answer apart, however its text is cut into chunks.

    Args:
        template: what surrounds its parts.
        prompt: the text before the answer.
        tools: that the model was offered.
    """

    def __init__(self, template: ResponseTemplate, prompt: str, tools: Sequence[Mapping[str, Any]] = ()):
        functions = [tool.get("function", tool) for tool in tools]
        self._tools = {str(each.get("name")): each.get("parameters") for each in functions if isinstance(each, Mapping)}
        self._parser = _LenientParser(template, prefix=prompt, tools=[dict(tool) for tool in tools])
        self._texts: dict[Kind, list[str]] = {"content": [], "reasoning": [], "tool_call": []}
        self._calls: list[Call | None] = []
        self._ended_calls = self._taken_calls = 0
        self._last_is_cut = False
        self._trims = False  # white space at the start of a thought, and between a thought or a call and what follows

        self.initial = list(self._pieces(self._parser.initial_events))

    def feed(self, text: str) -> list[Piece]:
        """What is known after another chunk."""
        return list(self._pieces(self._parser.feed(text)))

    def finish(self) -> list[Piece]:
        """What is known at the end, which may have cut a thought or a call."""
        with_end = self._parser.finalize()[1]
        pieces = list(self._pieces(with_end))
        self._ended_calls = len(self._calls)
        return pieces

    def message(self) -> dict[str, Any]:
        """The answer after `finish`: `content`, and where it has them `reasoning_content` and `tool_calls`.

        A call that cannot be read has `invalid`, its text, in place of `function`.
        """
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts["content"])}
        if reasoning := "".join(self._texts["reasoning"]).strip():
            message["reasoning_content"] = reasoning
        calls = [call for number in range(len(self._calls)) for call in self._read_calls(number)]
        if calls:
            message["tool_calls"] = calls
        return message

    def take_calls(self) -> list[dict[str, Any]]:
        """The calls, as in `message`, that have been finished since the last time; after `finish`, the others."""
        numbers = range(self._taken_calls, self._ended_calls)
        self._taken_calls = self._ended_calls
        return [call for number in numbers for call in self._read_calls(number)]

    def _read_calls(self, number: int) -> list[dict[str, Any]]:
        """The calls between two markers."""
        body, value = self._texts["tool_call"][number], self._calls[number]
        if value is not None:
            return value if isinstance(value, list) else [value]
        is_cut = self._last_is_cut and number == len(self._calls) - 1
        return read_calls(body, self._tools, is_cut) or [{"invalid": body.strip()}]

    def _pieces(self, events: Sequence[dict[str, Any]]) -> Iterator[Piece]:
        for event in events:
            kind = _KINDS.get(event["field"])
            if kind is None:
                continue
            if event["type"] == "region_open" and kind != "content":
                yield from self._open(kind)
            elif event["type"] == "region_chunk":
                yield from self._add(kind, event["text"])
            elif event["type"] == "region_close" and kind != "content":
                self._trims = True
                if kind == "tool_call":
                    self._calls[-1], self._last_is_cut = _read_value(event["value"]), event["is_cut"]
                    self._ended_calls = len(self._calls)

    def _open(self, kind: Kind) -> Iterator[Piece]:
        self._trims = True
        if kind == "tool_call":
            self._texts[kind].append("")
            self._calls.append(None)
        elif any(text.strip() for text in self._texts[kind]):
            self._texts[kind].append("\n\n")
            yield Piece(kind, "\n\n")
            return
        yield Piece(kind, "", opens=True)

    def _add(self, kind: Kind, text: str) -> Iterator[Piece]:
        if kind == "tool_call":
            self._texts[kind][-1] += text
        else:
            text = self._trimmed(text)
            self._texts[kind].append(text)
        if text:
            yield Piece(kind, text)

    def _trimmed(self, text: str) -> str:
        if self._trims:
            text = text.lstrip()
            self._trims = not text
        return text


def _read_value(value: Any) -> Any:
    """A call, or several, as a response template has transformed them; None for what is none, such as plain text."""
    try:
        return [as_call(entry) for entry in value] if isinstance(value, list) else as_call(value)
    except (ValueError, TypeError, RecursionError):
        return None


class PlainParser:
    """Takes an answer in plain text for what it is."""

    def __init__(self) -> None:
        self._text = ""
        self.initial: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """The chunk."""
        self._text += text
        return [Piece("content", text)]

    def finish(self) -> list[Piece]:
        """Nothing."""
        return []

    def take_calls(self) -> list[dict[str, Any]]:
        """None."""
        return []

    def message(self) -> dict[str, Any]:
        """The answer: `content`."""
        return {"role": "assistant", "content": self._text}


class InTime:
    """A parser with a limit of time: the patterns of a `response_template` may take forever on some text.

    To be used in the main thread. Every method raises ConfigError if it takes too long.

    Args:
        parser: the parser.
    """

    def __init__(self, parser: AnswerParser):
        self._parser = parser
        self.initial = parser.initial

    def feed(self, text: str) -> list[Piece]:
        """See `AnswerParser`."""
        return _in_time(self._parser.feed, text)

    def finish(self) -> list[Piece]:
        """See `AnswerParser`."""
        return _in_time(self._parser.finish)

    def take_calls(self) -> list[dict[str, Any]]:
        """See `AnswerParser`."""
        return _in_time(self._parser.take_calls)

    def message(self) -> dict[str, Any]:
        """See `AnswerParser`."""
        return _in_time(self._parser.message)


def _in_time(parse: Callable[..., _Parsed], *text: str) -> _Parsed:
    try:
        with cpu_time_limit(_PARSE_SECONDS):
            return parse(*text)
    except TooLong:
        raise ConfigError(
            "the response_template of this model's tokenizer takes too long to read the answer; complete plain text"
        ) from None
