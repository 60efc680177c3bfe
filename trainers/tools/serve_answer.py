"""The answers to one request, as the OpenAI interface sends them: at once, or piece by piece. Imports no torch."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

from trainers.config.mistakes import ConfigError
from trainers.tools.answer_format import Piece
from trainers.tools.host_guard import Send, send_json
from trainers.tools.serve_requests import ApiError, ChatRequest

Delta = dict[str, Any]
Event = tuple[int, Any]
"""The number of an answer, and None when it begins, its next text, or its end (`Finished`)."""


class Parser(Protocol):
    """What takes an answer apart; see `trainers.tools.answer_format.AnswerParser`."""

    def feed(self, text: str) -> list[Piece]:
        """What is known after another chunk."""

    def finish(self) -> list[Piece]:
        """What is known at the end."""

    def take_calls(self) -> list[dict[str, Any]]:
        """The calls that have been finished since the last time."""


class Choice:
    """One of the answers to a request: turns its text into the changes that a stream sends.

    Args:
        index: its number.
        parser: takes its text apart.
    """

    def __init__(self, index: int, parser: Parser):
        self.index = index
        self.tokens = 0
        self.reason: str | None = None
        self._parser = parser
        self._thought_space = ""  # white space of a thought that may be its last
        self._has_thought = False
        self._calls = 0

    def feed(self, text: str) -> list[Delta]:
        """The changes that a text makes."""
        return self._deltas(self._parser.feed, text)

    def finish(self, reason: str, tokens: int) -> list[Delta]:
        """The last changes.

        Args:
            reason: `stop` or `length`.
            tokens: tokens that were generated.
        """
        deltas = self._deltas(self._parser.finish)
        self.tokens = tokens
        self.reason = "tool_calls" if self._calls and reason == "stop" else reason
        return deltas

    def _deltas(self, parse: Callable[..., list[Piece]], *text: str) -> list[Delta]:
        try:
            return list(self._changes(parse(*text)))
        except ConfigError as error:  # it takes too long
            raise ApiError(500, str(error)) from None

    def _changes(self, pieces: Sequence[Piece]) -> Iterator[Delta]:
        for piece in pieces:
            text = self._thought(piece.text) if piece.kind == "reasoning" else piece.text
            if text and piece.kind != "tool_call":
                yield {"reasoning_content" if piece.kind == "reasoning" else "content": text}
        for call in self._parser.take_calls():
            if "invalid" in call:  # no call, so text like any other
                yield {"content": call["invalid"]}
                continue
            yield {"tool_calls": [{"index": self._calls, **_as_sent(call["function"])}]}
            self._calls += 1

    def _thought(self, text: str) -> str:
        """The text of a thought without white space around it."""
        text = self._thought_space + text if self._has_thought else text.lstrip()
        bare = text.rstrip()
        self._thought_space = text[len(bare) :]
        self._has_thought = self._has_thought or bool(bare)
        return bare


def _as_sent(function: dict[str, Any]) -> dict[str, Any]:
    """A call as the OpenAI interface has it. Mistral's templates take an id of nine letters and digits alone."""
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    call = {"name": function["name"], "arguments": arguments}
    return {"id": secrets.token_hex(5)[:9], "type": "function", "function": call}


class Answer:
    """Sends the answers to a request in either form.

    Args:
        name: the model's name.
        request: the request.
        choices: its answers.
        prompt_tokens: tokens of its conversation.
        send: sends messages to the client.
    """

    def __init__(self, name: str, request: ChatRequest, choices: Sequence[Choice], prompt_tokens: int, send: Send):
        self._shared = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": name}
        options = request.stream_options
        self._with_usage = options is not None and options.include_usage
        self._choices = choices
        self._prompt_tokens = prompt_tokens
        self._send = send

    async def complete(self, next_event: Callable[[], Awaitable[Event]]) -> None:
        """Sends the answers at once."""
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        while not self._is_done():
            index, event = await next_event()
            deltas[index] += self._changes(self._choices[index], event)
        choices = [
            {"index": choice.index, "message": _message(changes), "logprobs": None, "finish_reason": choice.reason}
            for choice, changes in zip(self._choices, deltas, strict=True)
        ]
        document = {**self._shared, "object": "chat.completion", "choices": choices, "usage": self._usage()}
        await send_json(self._send, 200, document)

    async def stream(self, next_event: Callable[[], Awaitable[Event]]) -> None:
        """Sends the answers piece by piece, as server-sent events."""
        index, event = await next_event()  # an error before it has a status of its own
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while True:
                choice = self._choices[index]
                if event is None:
                    await self._chunk(index, {"role": "assistant", "content": ""})
                for delta in self._changes(choice, event):
                    await self._chunk(index, delta)
                if choice.reason is not None:
                    await self._chunk(index, {}, choice.reason)
                if self._is_done():
                    break
                index, event = await next_event()
            if self._with_usage:
                await self._event({**self._head(), "choices": [], "usage": self._usage()})
        except ApiError as error:  # the status is sent already
            await self._event(error.document())
        await self._write(b"data: [DONE]\n\n")
        await self._send({"type": "http.response.body", "body": b""})

    def _changes(self, choice: Choice, event: Any) -> list[Delta]:
        if event is None:
            return []
        return choice.feed(event) if isinstance(event, str) else choice.finish(event.reason, event.tokens)

    def _is_done(self) -> bool:
        return all(choice.reason is not None for choice in self._choices)

    def _head(self) -> dict[str, Any]:
        return {**self._shared, "object": "chat.completion.chunk"}

    def _usage(self) -> dict[str, int]:
        tokens = sum(choice.tokens for choice in self._choices)
        total = self._prompt_tokens + tokens
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": tokens, "total_tokens": total}

    async def _chunk(self, index: int, delta: Delta, reason: str | None = None) -> None:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        await self._event({**self._head(), "choices": [choice], **({"usage": None} if self._with_usage else {})})

    async def _event(self, document: dict[str, Any]) -> None:
        await self._write(b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n")

    async def _write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})


def _message(deltas: Sequence[Delta]) -> dict[str, Any]:
    """The message that the changes of an answer make."""
    content, thought = ("".join(delta.get(key, "") for delta in deltas) for key in ("content", "reasoning_content"))
    calls = [
        {key: value for key, value in call.items() if key != "index"}
        for delta in deltas
        for call in delta.get("tool_calls", ())
    ]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message |= {"content": content if content.strip() else None, "tool_calls": calls}
    return message
