"""The OpenAI interface of one model, as an ASGI app. Imports no torch.

transformers has a server of its own (`transformers serve`), which is not used: it loads whatever model a request names,
from the Hub too, but no run whose adapters stand on a changed base (`from_run`, RoPE scaling, new tokens) nor a
checkpoint; it has a route that loads models and one that frees them, no token, no check of the host and no limits; it
seeds the one generator of the process, so that answers drawn side by side depend on each other; and it includes the
stop text in the answer. What it would save is this file.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from trainers.run.web_host import Scope, header_values
from trainers.tools.host_guard import Message, Receive, Send, send_json
from trainers.tools.serve_answer import Answer, Choice, Event, Parser
from trainers.tools.serve_requests import ApiError, Sampling, parse_request

MAX_BODY = 8 << 20
"""Most bytes of a request."""
_MOST_READ = 4 * MAX_BODY
"""Bytes up to which a request is read to its end, as a client that still sends may not see why it is refused."""
BODY_SECONDS = 30.0
"""Seconds in which a request must have arrived."""
SEND_SECONDS = 60.0
"""Seconds after which a client that reads nothing is given up."""
_MODELS, _CHAT = "/v1/models", "/v1/chat/completions"


class Answerer(Protocol):
    """What the app asks of a model; see `trainers.tools.serve_generation.ServedModel`."""

    ceiling: int

    def text(self, messages: Sequence[Any], tools: Sequence[Any]) -> str:
        """The text of a conversation; in the main thread."""

    def tokens(self, text: str) -> list[int]:
        """Its token ids; in any thread."""

    def parser(self, text: str, tools: Sequence[Any]) -> Parser:
        """What takes an answer apart; to be used in the main thread."""

    def start(self, prompt: Sequence[int], sampling: Sampling, on_event: Callable[[Any], None]) -> Any:
        """Starts to generate; has `stop`; its last event is no text."""


@dataclass(frozen=True)
class Limits:
    """How much is done at a time.

    Args:
        concurrent: answers that are generated at a time.
        waiting: answers that may wait for their turn, those to requests that still arrive included; more are refused
            with 429.
    """

    concurrent: int
    waiting: int

    @property
    def total(self) -> int:
        """Answers that are generated or wait."""
        return self.concurrent + self.waiting


class ServeApp:
    """Answers `GET /v1/models` and `POST /v1/chat/completions` for one model.

    Args:
        model: the model.
        name: its name; requests for another one are refused.
        limits: how much is done at a time.
        token: what clients must send as `Authorization: Bearer`; None for none.
    """

    def __init__(self, model: Answerer, name: str, limits: Limits, token: str | None):
        self.model = model
        self.name = name
        self.limits = limits
        self._token = None if token is None else _digest(token)
        self._turns = asyncio.Semaphore(limits.concurrent)
        self.running = self.pending = 0
        self._tokenising = asyncio.Semaphore(1)  # it takes many times the memory of the text
        self._created = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_in_time(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            async with asyncio.timeout(SEND_SECONDS):
                await send(message)

        try:
            await self._respond(scope, receive, send_in_time)
        except (TimeoutError, _ClientGone):
            return
        except Exception as error:  # a bug, or a tokenizer that fails: the client gets to know
            _report(error)
            if not has_begun:
                failure = ApiError(500, "the server failed; its terminal says why")
                await send_json(send, failure.status, failure.document())

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check_token(scope)
            path, method = scope["path"].rstrip("/"), scope["method"]
            if path == _CHAT and method == "POST":
                await self._chat(scope, receive, send)
            elif path == _MODELS and method == "GET":
                await send_json(send, 200, {"object": "list", "data": [self._card()]})
            elif path.startswith(_MODELS + "/") and method == "GET":
                self._check_model(path.removeprefix(_MODELS + "/"))
                await send_json(send, 200, self._card())
            elif path in (_CHAT, _MODELS):
                raise ApiError(405, f"{method} is not for {path}")
            else:
                raise ApiError(404, f"there is no {quote(path[:100])}; this server has {_MODELS} and {_CHAT}")
        except ApiError as error:
            await send_json(send, error.status, error.document(), error.headers)

    def _card(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._created, "owned_by": "tunesmith"}

    def _check_token(self, scope: Scope) -> None:
        if self._token is None:
            return
        sent = header_values(scope, b"authorization")
        scheme, _, token = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
        if not hmac.compare_digest(_digest(token.strip()), self._token) or scheme.lower() != "bearer":
            problem = "wrong token; send TUNESMITH_SERVE_TOKEN of the server as the API key"
            raise ApiError(401, problem, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _check_model(self, name: str) -> None:
        if name != self.name:
            problem = f"the model {name[:200]!r} does not exist; this server only serves {self.name!r}"
            raise ApiError(404, problem, "model", "model_not_found")

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        with closing(_Waiting(self)) as waiting:
            waiting.add(1)
            request = parse_request(await _body(scope, receive))
            self._check_model(request.model)
            if request.n > self.limits.total:
                problem = f"n={request.n}: this server takes {self.limits.total} answers at a time; ask for fewer"
                raise ApiError(400, problem, "n", "integer_above_max_value")
            waiting.add(request.n - 1)
            tools = request.offered_tools()
            text = self.model.text(request.conversation(), tools)
            async with self._tokenising:
                prompt = await asyncio.to_thread(self.model.tokens, text)
            choices = [Choice(index, self.model.parser(text, tools)) for index in range(request.n)]
            answer = Answer(self.name, request, choices, len(prompt), send)
            samplings = [request.sampling(self.model.ceiling, index) for index in range(request.n)]

            async def respond() -> None:
                async with self._answers(prompt, samplings, waiting.take) as next_event:
                    await (answer.stream(next_event) if request.stream else answer.complete(next_event))

            await _while_connected(receive, respond())

    @asynccontextmanager
    async def _answers(
        self, prompt: Sequence[int], samplings: Sequence[Sampling], on_turn: Callable[[], None]
    ) -> AsyncIterator[Callable[[], Awaitable[Event]]]:
        """What gives the next event of any of the answers, or raises what ended one of them."""
        queue = asyncio.Queue[tuple[int, Any]]()

        async def generate(index: int, sampling: Sampling) -> None:
            try:
                async with self._events(prompt, sampling, on_turn) as events:
                    queue.put_nowait((index, None))
                    async for event in events:
                        queue.put_nowait((index, event))
            except Exception as error:
                queue.put_nowait((index, error))

        async def next_event() -> Event:
            index, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            return index, event

        tasks = [asyncio.ensure_future(generate(*numbered)) for numbered in enumerate(samplings)]
        try:
            yield next_event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def _events(
        self, prompt: Sequence[int], sampling: Sampling, on_turn: Callable[[], None]
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """The events of an answer, which waits for its turn, and whose generation ends with the block.

        The turn is over when the thread is: earlier, more would run at a time than the limit says; later, a client that
        reads slowly would keep others waiting.
        """
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def end_turn() -> None:
            self.running -= 1
            self._turns.release()

        def take(event: Any) -> None:
            queue.put_nowait(event)
            if not isinstance(event, str):  # the last one
                end_turn()

        def put(event: Any) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(take, event)

        await self._turns.acquire()
        self.running += 1
        on_turn()
        try:
            generation = self.model.start(prompt, sampling, put)
        except BaseException:
            end_turn()
            raise
        try:
            yield _until_last(queue)
        finally:
            generation.stop()


async def _until_last(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    """The events of an answer.

    Raises:
        ApiError: if the generation ended with an error.
    """
    while True:
        event = await queue.get()
        if isinstance(event, ApiError):
            raise event
        if isinstance(event, BaseException):
            _report(event)
            raise ApiError(500, "the model failed; the server's terminal says why")
        yield event
        if not isinstance(event, str):
            return


def _report(error: BaseException) -> None:
    """Prints an error of this program, or of the model."""
    with suppress(OSError):
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _Waiting:
    """The answers to a request that wait for their turn.

    Args:
        app: counts them.
    """

    def __init__(self, app: ServeApp):
        self._app = app
        self._count = 0

    def add(self, count: int) -> None:
        """Adds answers.

        Raises:
            ApiError: with status 429 if too many wait then.
        """
        running, pending = self._app.running, self._app.pending
        if running + pending + count > self._app.limits.total:
            problem = f"{running} answers are generated and {pending - self._count} wait; try again"
            raise ApiError(429, problem, code="rate_limit_exceeded", headers={"retry-after": "1"})
        self._change(count)

    def take(self) -> None:
        """Takes the turn of an answer, if its request still waits."""
        self._change(-min(1, self._count))

    def close(self) -> None:
        """Takes away those that still wait."""
        self._change(-self._count)

    def _change(self, count: int) -> None:
        self._count += count
        self._app.pending += count


class _ClientGone(Exception):
    """The client has closed its connection."""


async def _body(scope: Scope, receive: Receive) -> bytes:
    """The body of a request.

    Raises:
        ApiError: if it is too large, no JSON, or does not arrive.
        _ClientGone: if the client leaves.
    """
    kinds = header_values(scope, b"content-type")
    # A page of another site can send text without asking first, but no JSON.
    if len(kinds) != 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body is not application/json; send that Content-Type")
    too_large = ApiError(413, f"the request is larger than {MAX_BODY:,} bytes", headers={"connection": "close"})
    length = "".join(header_values(scope, b"content-length"))
    if length.isascii() and length.isdigit() and int(length[:20]) > _MOST_READ:
        raise too_large
    body, size, more = bytearray(), 0, True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more and size <= _MOST_READ:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _ClientGone
                size += len(message.get("body", b""))
                if size <= MAX_BODY:
                    body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        raise ApiError(408, f"the request did not arrive within {BODY_SECONDS:g} s", headers={"connection": "close"}) \
            from None  # fmt: skip
    if size > MAX_BODY:
        raise too_large
    return bytes(body)


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Does the work, and cancels it when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _digest(text: str) -> bytes:
    """Of equal length for all tokens, so that comparing takes the same time for all."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
