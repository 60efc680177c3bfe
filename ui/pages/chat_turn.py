"""One event of the Chat page that asks for answers, and the conversations while these stream in."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import gradio as gr

from app.services.chat_messages import SAMPLING
from app.services.chat_pair import PANES, ChatPair
from trainers.config.mistakes import ConfigError
from ui.checked_blocks import is_plain_json
from ui.pages.chat_parts import (
    Messages,
    Reply,
    before_answer,
    conversation,
    edited,
    read_messages,
    with_results,
    write_messages,
)
from ui.parts import Html

BASE, NOTHING = ("Its base model", "=base"), ("Nothing", "=none")
"""Labels and values of what the second pane may be compared with besides models."""
EMPTY_HEADING = {"first": "Model", "second": "Compared with"}

_UPDATE_SECONDS = 0.1
"""Least seconds between two updates of an answer; each sends the full text so far."""
_RENDER_SHARE = 5
"""Seconds between two updates for each second that drawing one takes."""


class Turn:
    """One event that asks for answers, and the conversations while these come.

    Args:
        pair: the model processes.
        values: of the inputs, as the browser sends them.
    """

    def __init__(self, pair: ChatPair, values: tuple[Any, ...]):
        self.pair = pair
        self.target = values[:5]
        self.message, first, second = values[5:8]
        self._stored = {"first": first, "second": second}
        self.side, self.plain, self.system, self.tools = values[8:12]
        self.sampling = dict(zip(SAMPLING, values[12:], strict=True))
        self.message_box: Any = gr.skip()
        self.is_over = False
        self._messages: dict[str, Messages] = {}
        self._replies: dict[str, Reply] = {}
        self._sources: Mapping[str, Any] = {}

    @property
    def seed(self) -> Any:
        """The seed of the answers."""
        return self.sampling["seed"]

    @property
    def has_answers(self) -> bool:
        """Whether any answer has begun."""
        return any(reply.message()["raw"] for reply in self._replies.values())

    def _conversations(self) -> dict[str, Messages]:
        return {pane: read_messages(data) for pane, data in self._stored.items()}

    def sent(self) -> dict[str, Messages]:
        """The conversations with the message of the field."""
        if not isinstance(self.message, str) or not self.message.strip():
            raise ConfigError("there is no message to answer; write one")
        self.message_box = ""
        panes = [pane for pane in PANES if self.side in ("both", None, pane)]
        if not panes:
            raise ConfigError("who answers is none of both, first and second; choose one")
        conversations = self._conversations()
        return {pane: [*conversations[pane], {"role": "user", "content": self.message}] for pane in panes}

    def changed(self, pane: str, event: Any) -> dict[str, Messages]:
        """The conversations after an edit, tools' results, or a wish for another answer.

        An edit applies to both conversations if both have the message.
        """
        conversations = self._conversations()
        if not isinstance(event, dict) or not is_plain_json(event):
            raise ConfigError("the event is none of this page; reload the page")
        messages, act = conversations[pane], event.get("act")
        if act == "edit":
            index, text = event.get("index"), event.get("text")
            if not isinstance(text, str) or not text.strip():
                raise ConfigError("there is no message to answer; write one")
            result = {pane: edited(messages, index, text)}
            other = next(each for each in PANES if each != pane)
            same = [each[: int(str(index)) + 1][-1:] for each in (messages, conversations[other])]
            if same[0] == same[1]:
                result[other] = edited(conversations[other], index, text)
            return {each: result[each] for each in PANES if each in result}
        if act == "results":
            return {pane: with_results(messages, event.get("results"))}
        if act == "regenerate":
            if isinstance(self.seed, int | float) and not isinstance(self.seed, bool):
                self.sampling["seed"] = (int(self.seed) + 1) % 2**32
            return {pane: before_answer(messages)}
        raise ConfigError("the event is none of this page; reload the page")

    def start(self, messages: Mapping[str, Messages], sources: Mapping[str, Any]) -> None:
        """Takes the conversations to answer, in the panes that have a model."""
        self._sources = sources
        self._messages = {pane: each for pane, each in messages.items() if pane in sources}
        if not self._messages:
            raise ConfigError("no model is loaded for this side; choose one under Compare with")

    def answers(self) -> Iterator[None]:
        """Streams the answers; yields when there is something new to draw."""
        options = {"sampling": self.sampling, "system": self.system, "plain": bool(self.plain), "tools": self.tools}
        updated_at, pause = 0.0, _UPDATE_SECONDS
        conversations = {pane: list(messages) for pane, messages in self._messages.items()}
        for pane, document in self.pair.ask(conversations, self._sources, **options):
            reply = self._replies.setdefault(pane, Reply(self.seed if self.sampling["temperature"] else None))
            reply.add(document)
            reply.is_done = "finish" in document
            began = time.monotonic()
            if began - updated_at >= pause:
                yield
                updated_at = time.monotonic()
                pause = max(_UPDATE_SECONDS, _RENDER_SHARE * (updated_at - began))

    def views(self) -> list[Any]:
        """Both conversations as HTML, as far as they are part of this event."""
        views = []
        name, weights, _, other, other_weights = self.target
        for pane in PANES:
            if pane == "second" and self._sources and pane not in self._sources:
                views.append(Html(""))
            elif pane not in self._messages:
                views.append(gr.skip())
            else:
                title = heading(pane, name, weights, other, other_weights)
                reply = self._replies.get(pane)
                is_lost = self.is_over and reply is None  # nothing was answered, and nothing is kept
                messages = read_messages(self._stored[pane]) if is_lost else self._messages[pane]
                views.append(conversation(pane, title, messages, reply, empty="Write a message below."))
        return views

    def data(self) -> list[Any]:
        """Both conversations as the browser keeps them, with the answers."""
        data: list[Any] = []
        for pane in PANES:
            reply = self._replies.get(pane)
            if reply is None:
                data.append(gr.skip())
                continue
            reply.is_done = True
            data.append(write_messages([*self._messages[pane], reply.message()]))
        return data


def heading(pane: str, name: Any, weights: Any = None, other: Any = None, other_weights: Any = None) -> str:
    """Which model answers in a pane."""
    if pane == "first":
        return " ".join(filter(None, [str(name or ""), str(weights or "")]))[:200] or EMPTY_HEADING[pane]
    if other in (BASE[1], None, ""):
        return BASE[0]
    if other == NOTHING[1]:
        return EMPTY_HEADING[pane]
    return " ".join(filter(None, [str(other), str(other_weights or "")]))[:200]
