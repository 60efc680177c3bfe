"""Finds out what a chat template does with a conversation, by rendering short ones. Imports no torch.

A template is a program, so reading its source is not enough. Rendering placeholder contents shows what it writes, what
it leaves out, how it opens and closes a thought, and how it ends a reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from trainers.data.formats import Message, RowError

Span = tuple[int, int]
Variables = Mapping[str, Any]
Render = Callable[..., tuple[str, list[Span]]]
"""`render(messages, prompt=False, marked=False, variables=None)`: the text, and the spans that its generation markers
enclose; raises `RowError` if the template refuses the messages."""

_QUESTION, _ANSWER, _THOUGHT, _NEXT = "Qquestionq", "Aanswera", "Tthoughtt", "Nnextn"
_OPENING = re.compile(r"(<[^<>\s]+>\w*)\s*$")
_CLOSING = re.compile(r"^\s*(<[^<>\s]+>)")
_OPEN, _CLOSE = "<think>", "</think>"
_SWITCHES = re.compile(r"(?<!<)/(?:no_)?think")  # some templates obey these switches in user messages, and remove them
_MOST_SHAPES = 10_000
_OPTIONAL_PATHS = ("name", "tool_call_id", "tool_calls[].id")  # of a message; templates may do without them


class TemplateProbe:
    """Facts about one chat template.

    Args:
        render: Renders messages with it.
        source: Its Jinja source.
        special: Texts of the tokenizer's added tokens.
        stops: Texts of the tokens at which the model stops generating.
    """

    def __init__(self, render: Render, source: str, special: Sequence[str], stops: Sequence[str]):
        self.render = render
        self._source = source
        self._special = sorted((text for text in special if text.strip()), key=len, reverse=True)
        self._stops = [text for text in stops if text.strip()]
        self._losses: dict[tuple[Any, ...], Losses] = {}
        self._read_in_tools: frozenset[str] = frozenset()
        self._unread_in_tools: dict[frozenset[str], list[str]] = {}

    def _text(self, *messages: Message, prompt: bool = False, variables: Variables | None = None) -> str:
        """The rendered text, or "" if the template refuses the messages."""
        try:
            return self.render(list(messages), prompt, variables=variables)[0]
        except RowError:
            return ""

    @cached_property
    def generation_prompt(self) -> str:
        """What the template writes to prompt the model's reply."""
        question = {"role": "user", "content": _QUESTION}
        without, text = self._text(question), self._text(question, prompt=True)
        return text[len(without) :] if text.startswith(without) else ""

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        from jinja2 import TemplateError, meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            environment = _compile_jinja_template(self._source).environment
            return frozenset(meta.find_undeclared_variables(environment.parse(self._source)))
        except TemplateError as error:
            raise RowError("chat template", f"it cannot be compiled: {str(error)[:150]}") from None

    def mentions(self, name: str) -> bool:
        """Whether its source has this word, without which it cannot treat it in a way of its own."""
        return re.search(rf"\b{name}\b", self._source) is not None

    @cached_property
    def knows_developers(self) -> bool:
        """Whether it handles the role `developer` by name, and writes such a message."""
        messages = {"role": "developer", "content": _ANSWER}, {"role": "user", "content": _QUESTION}
        return self.mentions("developer") and _ANSWER in self._text(*messages)

    def place_role(self, message: Message) -> Message:
        """The message, with role `developer` as `system` if the template does not know `developer`."""
        known = message["role"] != "developer" or self.knows_developers
        return message if known else {**message, "role": "system"}

    # -- thoughts

    @cached_property
    def _with_thought(self) -> str:
        reply = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
        return self._text({"role": "user", "content": _QUESTION}, reply)

    @cached_property
    def writes_thoughts(self) -> bool:
        """Whether it writes the `reasoning_content` of a reply."""
        return _THOUGHT in self._with_thought

    @cached_property
    def thought_tags(self) -> tuple[str, str] | None:
        """The tags that it writes around the thought of a reply; None if it writes none, or no tags."""
        before, _, after = self._with_thought.partition(_THOUGHT)
        opening, closing = _OPENING.search(before), _CLOSING.search(after)
        return (opening[1], closing[1]) if opening and closing else None

    @property
    def prompt_opens_thought(self) -> bool:
        """Whether the generation prompt begins a thought, which a reply without one would not go on with."""
        return "<think>" in self.generation_prompt and "</think>" not in self.generation_prompt

    @cached_property
    def thinks_in_content(self) -> bool:
        """Whether the model writes its thoughts between `<think>` tags, but the template only reads `content`."""
        return not self.writes_thoughts and ("<think>" in self._source or "<think>" in self._special)

    @cached_property
    def _empty_thought(self) -> re.Pattern[str]:
        """Matches an empty thought at the start of a reply; its opening tag may be part of the generation prompt."""
        # The tags around a placeholder thought are those of the template, whatever they are called.
        tags = {("<think>", "</think>")}
        if self.thought_tags:
            tags.add(self.thought_tags)
        pairs = [f"(?:{re.escape(opening)})?\\s*{re.escape(closing)}" for opening, closing in sorted(tags)]
        self._opening_tags = tuple(opening for opening, _ in tags)
        return re.compile(rf"\s*(?:{'|'.join(pairs)})")

    @cached_property
    def _after_thought(self) -> str:
        """The whitespace between an empty thought and what the model generates next."""
        question = {"role": "user", "content": _QUESTION}
        prompts = [self._text(question, prompt=True, variables={"enable_thinking": False})]
        prompts.append(self._text(question, {"role": "assistant", "content": _ANSWER}).partition(_ANSWER)[0])
        for prompt in prompts:  # the prompt without thinking, or else what precedes a reply
            if self.ends_in_thought(prompt):
                return prompt[len(prompt.rstrip()) :]
        return ""

    @cached_property
    def writes_empty_thought(self) -> bool:
        """Whether it writes an empty thought before a last reply that has none."""
        text = self._text({"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER})
        return self.ends_in_thought(text.partition(_ANSWER)[0])

    def ends_in_thought(self, text: str) -> bool:
        """Whether a thought is closed at the end of a text."""
        bare = text.rstrip()
        return any(match.end() == len(bare) for match in self._empty_thought.finditer(bare, max(0, len(bare) - 200)))

    def after_empty_thought(self, text: str, start: int, end: int) -> int:
        """Where a reply continues after an empty thought at `start`; `start` if there is none."""
        match = self._empty_thought.match(text, start, end)
        if not match:
            return start
        # Without an opening tag in the reply or right before it, a closing tag is ordinary text.
        opened = match[0].lstrip().startswith(self._opening_tags)
        if not opened and not text[:start].rstrip().endswith(self._opening_tags):
            return start
        gap = self._after_thought
        return match.end() + len(gap) if text.startswith(gap, match.end()) else match.end()

    def place_thought(self, message: Message, thoughts: str) -> Message:
        """Moves the thought of a reply to where the template writes it, once; removes it for `thoughts="drop"`.

        Raises:
            RowError: if the reply has two different thoughts.
        """
        if message["role"] != "assistant":
            return message
        content, thought = message["content"], message.get("reasoning_content", "").strip()
        if _CLOSE not in content and "reasoning_content" not in message:
            return message
        # Separate a thought inside the content, and check that it is the only one.
        parts = self.thought_in(content)
        if parts and (self.writes_thoughts or thoughts == "drop" or thought):
            inside, content = parts[0].strip(), parts[1].lstrip()
            if thought and inside and thought != inside:
                raise RowError("two thoughts", "a reply has one in its content and another in its own field; keep one")
            thought = thought or inside
        # Put it where the template reads it: in its own field, or between tags in the content.
        placed = {key: value for key, value in message.items() if key != "reasoning_content"}
        placed["content"] = content
        if _CLOSE in content and not parts and not thought and self.writes_thoughts:
            return {**placed, "reasoning_content": ""}  # otherwise the template searches the content for one
        if not thought or thoughts == "drop":
            return placed
        if self.thinks_in_content:
            return {**placed, "content": f"{_OPEN}\n{thought}\n{_CLOSE}\n\n{content}"}
        return {**placed, "reasoning_content": thought}

    def thought_in(self, content: str) -> tuple[str, str] | None:
        """The thought that a reply starts with, and the text after it; None if the tags are only mentioned.

        The opening tag may be missing, as the generation prompt may contain it. The closing tag must then be on a line
        of its own, or, if the generation prompt does contain it, not be quoted.
        """
        before, closing, after = content.partition(_CLOSE)
        if not closing:
            return None
        if before.lstrip().startswith(_OPEN):
            return before.lstrip().removeprefix(_OPEN), after
        if _OPEN in before:
            return None
        own_line = before.rstrip(" \t")[-1:] in ("", "\n") and after.lstrip(" \t\r")[:1] in ("", "\n")
        prompted = self.generation_prompt.rstrip().endswith(_OPEN) and before[-1:] not in "`'\"("
        return (before, after) if own_line or prompted else None

    # -- the end of a reply

    @cached_property
    def _closings(self) -> list[str]:
        """The text from the end of a reply through its stop token, for a last reply and for an earlier one."""
        question, reply = {"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}
        # Prefer the model's configured stop tokens; a template may end turns with another special token.
        after = self._text(question, reply).partition(_ANSWER)[2]
        last = self._up_to_special(after, self._stops) or self._up_to_special(after, self._special)
        earlier = self._text(question, reply, {"role": "user", "content": _NEXT}).partition(_ANSWER)[2]
        known = [*self._stops, *([self._special_at_end(last)] if last else [])]
        return [closing for closing in (last, self._up_to_special(earlier.partition(_NEXT)[0], known)) if closing]

    def _up_to_special(self, text: str, tokens: Sequence[str]) -> str:
        ends = [(text.find(token), -len(token), token) for token in tokens if token in text]
        if not ends:
            return ""
        at, _, token = min(ends)
        return text[: at + len(token)]

    def _special_at_end(self, text: str) -> str:
        return next((token for token in self._special if text.rstrip().endswith(token)), "")

    @cached_property
    def stop_tokens(self) -> list[str]:
        """Tokens that end a reply: the one after a last reply first, then those of the model's configuration."""
        return list(dict.fromkeys([*map(self._special_at_end, self._closings), *self._stops]))

    @cached_property
    def _stop_texts(self) -> tuple[str, ...]:
        return tuple(self.stop_tokens)

    @cached_property
    def _ending_texts(self) -> tuple[str, ...]:
        return (*self._special, *self.stop_tokens)

    @cached_property
    def _stop(self) -> re.Pattern[str]:
        closings = {closing.strip() for closing in self._closings} | set(self.stop_tokens)
        texts = sorted(filter(None, closings), key=len, reverse=True)
        return re.compile(rf"\s*(?:{'|'.join(map(re.escape, texts))})" if texts else r"(?!)")

    def through_stop(self, text: str, end: int) -> int:
        """The end of a reply, extended through its stop token if that follows."""
        before = text[max(0, end - 200) : end].rstrip()
        if before.endswith(self._stop_texts):
            return end
        match = self._stop.match(text, end)
        return match.end() if match else end

    def stops(self, text: str, end: int) -> bool:
        """Whether the text up to `end` ends with a special token, so that generation can stop there."""
        return text[max(0, end - 200) : end].rstrip().endswith(self._ending_texts)

    @property
    def knows_stop(self) -> bool:
        """Whether the template ends a last reply with a stop token."""
        return bool(self._closings)

    # -- what it leaves out

    def left_out(self, messages: Sequence[Message], variables: Variables) -> Losses:
        """What the template leaves out of a conversation.

        Probed with placeholders, so that a short content does not match by chance elsewhere; cached by the shape of the
        conversation.
        """
        values = (f"{name}={len(value) if name == 'tools' else value!r}" for name, value in variables.items())
        shape = (*(_shape(message) for message in messages), *sorted(values))
        if shape not in self._losses:
            if len(self._losses) >= _MOST_SHAPES:
                self._losses.clear()
            self._losses[shape] = self._find_losses(messages, variables)
        return self._losses[shape]

    def _find_losses(self, messages: Sequence[Message], variables: Variables) -> Losses:
        pairs = [_stand_in(message, index) for index, message in enumerate(messages)]
        conversation = [message for message, _ in pairs]
        tools = [_tool_in(tool, f"Ff{index}f") for index, tool in enumerate(variables.get("tools", ()))]
        values = {**variables, "tools": tools} if tools else variables
        try:
            text = self.render(conversation, variables=values)[0]
        except RowError:  # the row itself was rendered; `missing` searches for its contents
            return Losses([], self._unread_keys(messages, variables))
        lost = [
            (index, element)
            for index, (_, markers) in enumerate(pairs)
            for element, marker in markers
            if marker not in text
        ]
        originals = zip(tools, variables.get("tools", ()), strict=True)
        lost += [
            (index, "tool")
            for index, (tool, own) in enumerate(originals)
            if tool is not own and f"Ff{index}f" not in text
        ]
        return Losses(lost, self._unread_keys(conversation, values))

    def _unread_keys(self, messages: Sequence[Message], variables: Variables) -> frozenset[str]:
        """Keys of the messages without which a role's messages are rendered alike."""
        paths = {(message["role"], path) for message in messages for path in _OPTIONAL_PATHS if _has(message, path)}
        unread = set()
        for role, path in paths:
            without = [_without(message, path) if message["role"] == role else message for message in messages]
            if self._alike(without, variables, messages, variables):
                unread.add(path)
        return frozenset(unread)

    def unread_in_tools(self, tools: Sequence[Any]) -> list[str]:
        """Paths of the keys of tools, such as `tools[].function.strict`, without which they are rendered alike."""
        question = [{"role": "user", "content": _QUESTION}]
        paths = frozenset(_paths(tools, "tools")) - self._read_in_tools
        if paths not in self._unread_in_tools:
            if self._alike(question, {}, question, {"tools": tools}):
                return []  # it writes tools in other conversations
            unread = [
                path
                for path in sorted(paths)
                if self._alike(question, {"tools": _without(tools, path, "tools")}, question, {"tools": tools})
            ]
            self._read_in_tools |= paths.difference(unread)
            paths -= self._read_in_tools
            self._unread_in_tools[paths] = unread
        return self._unread_in_tools[paths]

    def _alike(
        self, messages: Sequence[Message], variables: Variables, other: Sequence[Message], other_variables: Variables
    ) -> bool:
        """Whether two conversations are rendered as the same text; False if the template refuses either."""
        try:
            texts = [
                self.render(list(messages), variables=variables),
                self.render(list(other), variables=other_variables),
            ]
        except RowError:
            return False
        return texts[0] == texts[1]


class Losses(NamedTuple):
    """What a template leaves out of a conversation.

    Attributes:
        elements: Message index with `content`, `thought` or `tool call`; tool index with `tool`.
        keys: Paths of unused keys within a message, such as `name`.
    """

    elements: list[tuple[int, str]]
    keys: frozenset[str]


def _shape(message: Message) -> tuple[Any, ...]:
    plain = (message["role"], bool(message["content"].strip()))
    if len(message) == 2:
        return plain
    return (*plain, tuple("id" in call for call in message.get("tool_calls") or ()), *sorted(message))


def _stand_in(message: Message, index: int) -> tuple[Message, list[tuple[str, str]]]:
    """The message with unique placeholders for its contents, and those placeholders."""
    copy: dict[str, Any] = dict(message)
    markers = []
    if message["content"].strip():
        copy["content"] = f"Cc{index}c"
        markers.append(("content", copy["content"]))
    if message.get("reasoning_content"):
        copy["reasoning_content"] = f"Tt{index}t"
        markers.append(("thought", copy["reasoning_content"]))
    calls: Any = message.get("tool_calls") or []
    if calls:
        copy["tool_calls"] = [_call_in(call, f"{index}n{number}") for number, call in enumerate(calls)]
        markers += [
            ("tool call", f"{letters}{index}n{number}k") for number in range(len(calls)) for letters in ("Kk", "Vv")
        ]
    return copy, markers


def _call_in(call: Any, mark: str) -> Any:
    return {**call, "function": {"name": f"Kk{mark}k", "arguments": {"argument": f"Vv{mark}k"}}}


def _tool_in(tool: Any, name: str) -> Any:
    function = tool.get("function")
    return (
        {**tool, "function": {**function, "name": name}} if isinstance(function, dict) and "name" in function else tool
    )


def _paths(value: Any, prefix: str) -> Iterator[str]:
    """Paths of all keys, with `*` for names of parameters; without those that templates imply."""
    if isinstance(value, list):
        for item in value:
            yield from _paths(item, f"{prefix}[]")
    elif isinstance(value, dict):
        for key, item in value.items():
            path = _member(prefix, key)
            if item is not None and not (key == "type" and item in ("function", "object")):
                yield path
            yield from _paths(item, path)


def _member(prefix: str, key: str) -> str:
    name = "*" if prefix.endswith("properties") else key
    return f"{prefix}.{name}" if prefix else name


def _without(value: Any, path: str, prefix: str = "") -> Any:
    """A copy without the members at this path."""
    if isinstance(value, list):
        return [_without(item, path, f"{prefix}[]") for item in value]
    if not isinstance(value, dict):
        return value
    members = {key: _member(prefix, key) for key in value}
    return {key: _without(item, path, members[key]) for key, item in value.items() if members[key] != path}


def _has(message: Message, path: str) -> bool:
    return path in _paths(message, "")


def missing(messages: Sequence[Message], trained: Collection[int], text: str) -> list[int]:
    """Indices of messages whose content is not in the text, verbatim or escaped as JSON.

    A thought in the content of a reply that is not trained may be left out.
    """
    return [index for index, message in enumerate(messages) if not _stands(message, index in trained, text)]


def _stands(message: Message, is_trained: bool, text: str) -> bool:
    content: str = message["content"]
    if message["role"] == "assistant" and not is_trained:
        content = content.rpartition("</think>")[2]
    content = content.strip()
    if content in text:
        return True
    if message["role"] != "assistant" and _SWITCHES.sub("", content).strip() in text:
        return True
    return any(json.dumps(content, ensure_ascii=ascii_only)[1:-1] in text for ascii_only in (False, True))
