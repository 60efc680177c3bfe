"""Finds the characters of each reply in a rendered conversation, and their tokens. Imports no torch.

A reply is what the model generates. Its characters are found by the template's own generation markers, or, without
them, by rendering the conversation up to each reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from trainers.data.formats import Message, RowError
from trainers.data.template_probe import Span, TemplateProbe, Variables, missing

WAY_OUT = "give --chat_template FILE with {% generation %} markers, or set assistant_only_loss=false"
_MOST_RENDERED = 5_000_000
"""Limit on the messages rendered for one conversation, over all its prefixes: 2,200 replies, half a minute."""


class ReplySpans:
    """Finds the replies of one conversation.

    Args:
        probe: Facts about the template.
        turn_ends: Texts of the tokens that may end a turn.
        with_empty_thoughts: Whether an empty thought that the template writes belongs to the reply.
        variables: What the template gets besides the messages.
    """

    def __init__(self, probe: TemplateProbe, turn_ends: Sequence[str], with_empty_thoughts: bool, variables: Variables):
        self._probe = probe
        self._turn_ends = tuple(turn_ends)
        self._with_empty_thoughts = with_empty_thoughts
        self._variables = variables

    def marked(self, text: str, spans: list[Span], messages: list[Message]) -> dict[int, list[Span]]:
        """The marked spans of each reply, by the index of its message.

        Raises:
            RowError: if the markers do not enclose the text of each reply.
        """
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans = _not_empty(spans)
        joined = _joined(spans)
        if len(joined) == len(replies):  # one marked span per reply
            grouped = [[span] for span in joined]
        else:
            # A reply may have several spans, such as a thought and an answer. The number of spans in the conversation
            # up to each next reply tells which of them belong together.
            ends = [*replies[1:], len(messages)]
            _refuse_long(ends[:-1])
            counts = [
                len(_not_empty(self._probe.render(messages[:end], marked=True, variables=self._variables)[1]))
                for end in ends[:-1]
            ]
            bounds = [0, *counts, len(spans)]
            grouped = [spans[start:end] for start, end in pairwise(bounds)]
        for index, reply_spans in zip(replies, grouped, strict=True):
            enclosed = "".join(text[start:end] for start, end in reply_spans)
            if not reply_spans or missing([messages[index]], (), enclosed):
                raise RowError(
                    "chat template", "its generation markers do not enclose each reply; repair --chat_template"
                )
        return dict(zip(replies, map(_joined, grouped), strict=True))

    def by_turns(self, text: str, messages: list[Message], trained: Sequence[int]) -> dict[int, list[Span]]:
        """The span of each trained reply, end-of-turn token included, found by rendering the conversation up to it.

        Raises:
            RowError: if the template writes a turn differently once others follow, or if there are too many turns.
        """
        _refuse_long(trained)
        spans: dict[int, list[Span]] = {}
        for index in trained:
            head = self._head(text, messages, index)
            end = self._turn_end(text, head, messages, index)
            if not text.startswith(head) or end is None:
                raise RowError("chat template", self._why_unstable(text, messages, index))
            spans[index] = [(len(head), end)]
        return spans

    def _head(self, text: str, messages: list[Message], index: int) -> str:
        """The text before a reply, generation prompt included."""
        if index:
            return self._probe.render(messages[:index], prompt=True, variables=self._variables)[0]
        # Before the first message there is only what the template itself writes, such as a default system prompt.
        prompt = self._probe.generation_prompt
        at = text.find(prompt) + len(prompt) if prompt in text else -1
        return text[: text.find(messages[0]["content"].strip(), max(0, at))] if at < 0 or not prompt else text[:at]

    def _why_unstable(self, text: str, messages: list[Message], index: int) -> str:
        """Why a reply cannot be separated from the text before it."""
        earlier = self._probe.render(messages[:index], variables=self._variables)[0] if index else ""
        reason = "it writes earlier turns differently later on"
        if not text.startswith(earlier):
            thoughts = any(message.get("reasoning_content") for message in messages[:index])
            reason += " (it leaves the thoughts of earlier replies out)" if thoughts else ""
        elif self._probe.prompt_opens_thought:
            reason = f"its generation prompt opens a thought that it does not write in {name_message(messages, index)}"
        elif self._probe.ends_in_thought(self._probe.generation_prompt):
            reason = f"its generation prompt has an empty thought, but {name_message(messages, index)} does not"
        return f"{reason}; {WAY_OUT}"

    def _turn_end(self, text: str, head: str, messages: list[Message], index: int) -> int | None:
        """Where the reply ends in the text; None if that cannot be determined."""
        last = index == len(messages) - 1
        up_to = text if last else self._probe.render(messages[: index + 1], variables=self._variables)[0]
        if text.startswith(up_to) and len(up_to) > len(head):
            # Leave out whitespace after the end-of-turn token, which the model never generates.
            trimmed = up_to.rstrip()
            return len(trimmed) if trimmed.endswith(self._turn_ends) else len(up_to)
        # The last turn may differ from earlier ones (thoughts kept, a closing token): search for the reply.
        start = len(head) + len(text[len(head) :]) - len(text[len(head) :].lstrip())
        reply = messages[index]["content"].strip()
        if not text.startswith(reply, start):
            return None
        after = text[start + len(reply) :]
        gap = len(after) - len(after.lstrip())
        ends_at = [gap + len(token) for token in self._turn_ends if after.startswith(token, gap)]
        return start + len(reply) + max(ends_at) if ends_at else None

    def generated(self, text: str, reply: list[Span], messages: Sequence[Message], index: int) -> list[Span]:
        """The spans of a reply, without an empty thought written by the template, and with the stop token.

        Raises:
            RowError: if the reply lacks the stop token, or the empty thought, that the template writes for a last one.
        """
        start, end = reply[0]
        if not self._with_empty_thoughts:
            start = self._probe.after_empty_thought(text, start, end)
            self._refuse_thoughtless(text[:start], messages, index)
        spans = [(start, end), *reply[1:]]
        last, stop = spans[-1][0], self._probe.through_stop(text, spans[-1][1])
        if self._probe.knows_stop and not self._probe.stops(text, stop):
            ending = tail(text[last:stop])
            raise RowError("chat template", f"it ends a reply without a stop token ({ending}); repair --chat_template")
        return [*spans[:-1], (last, stop)]

    def _refuse_thoughtless(self, before: str, messages: Sequence[Message], index: int) -> None:
        """Refuses a reply that would teach a model that may think to answer at once.

        Raises:
            RowError: if the template writes an empty thought before a last reply, but not before this one.
        """
        thought = messages[index].get("reasoning_content") or "</think>" in messages[index]["content"]
        if not thought and self._probe.writes_empty_thought and not self._probe.ends_in_thought(before):
            raise RowError(
                "chat template",
                f"it writes an empty thought before a last reply, but not before {name_message(messages, index)}, "
                f"which would teach the model not to think; give --chat_template FILE that writes it, "
                "or set thoughts=train_empty",
            )


def _refuse_long(ends: Sequence[int]) -> None:
    """Raises `RowError` if rendering a conversation up to each of these messages would take minutes."""
    if sum(ends) > _MOST_RENDERED:
        raise RowError(
            "row too large",
            f"{len(ends):,} replies in {max(ends) + 1:,} messages, and the chat template is rendered up to each; "
            f"split it into several rows, or {WAY_OUT}",
        )


def _not_empty(spans: list[Span]) -> list[Span]:
    return [(start, end) for start, end in spans if end > start]


def _joined(spans: list[Span]) -> list[Span]:
    """Joins adjacent spans."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def name_message(messages: Sequence[Message], index: int) -> str:
    """Names a message by its number, from 1, and its role."""
    return f"message {index + 1} ({messages[index]['role']})"


def tail(text: str, characters: int = 160) -> str:
    """The end of a text, with newlines escaped."""
    return repr(text) if len(text) <= characters else "… " + repr(text[-characters:])


def token_span(encoding: Any, start: int, end: int, length: int) -> Span:
    """The tokens of characters `start` to `end`; skips characters without a token (dropped spaces)."""
    token_of = encoding.char_to_token
    first = _first_token(token_of, range(start, end))
    if first is None:
        return 0, 0
    # The span ends at the first token of the next character: one character may consist of several tokens.
    following = _first_token(token_of, range(end, length))
    if following is None:
        return first, len(encoding)
    last = _first_token(token_of, range(end - 1, start - 1, -1))
    assert last is not None
    return first, max(following, last + 1)


def _first_token(token_of: Callable[[int], int | None], characters: range) -> int | None:
    for character in characters:
        token = token_of(character)
        if token is not None:
            return token
    return None
