"""What the server of `tunesmith serve` does with clients that misbehave and models that fail, in this process."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import uvicorn

from trainers.data import template
from trainers.tools import serve_app, serve_connections, serve_requests
from trainers.tools.serve import Settings, _load
from trainers.tools.serve_app import Limits, ServeApp
from trainers.tools.serve_connections import connection_class
from trainers.tools.serve_generation import ServedModel, _Draw
from trainers.tools.serve_requests import ApiError, Sampling, _first_error, parse_request

ASKED: list[Any] = [{"role": "user", "content": "title: Sea; city: Rome; author: Bo; year: 1999. Write it as JSON."}]
CHAT = "/v1/chat/completions"
Sender = Callable[[Any], Awaitable[None]]


@pytest.fixture(scope="module")
def loaded() -> ServedModel:
    model = _load(Settings("m", {"model": "embedded", "remote_code": False}, "127.0.0.1", -1, None, 0, 200))
    assert isinstance(model, ServedModel)
    return model


def app_of(model: ServedModel, concurrent: int = 1, waiting: int = 1) -> ServeApp:
    return ServeApp(model, "m", Limits(concurrent, waiting), None)


def request(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "messages": ASKED, "max_tokens": 4, "temperature": 0, **changes}


async def call(app: Any, document: Any, send: Sender | None = None, path: str = CHAT) -> tuple[int, Any]:
    """Status and document of a request, or what `send` makes of it: 0 if nothing comes."""
    messages: list[Any] = [{"type": "http.request", "body": json.dumps(document).encode()}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()  # connected

    async def keep(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await app(scope, receive, send or keep)
    body = b"".join(message.get("body", b"") for message in sent)
    return (sent[0]["status"], json.loads(body)) if sent else (0, None)


async def never(message: Any) -> None:
    """How a message goes to a client that reads nothing."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_reads_nothing_holds_no_turn(
    loaded: ServedModel, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def second_answer() -> None:
        app = app_of(loaded)
        deaf = asyncio.ensure_future(call(app, request(stream=stream), never))
        assert (await asyncio.wait_for(call(app, request()), 30))[0] == 200
        assert not deaf.done(), "it waits for its client still"
        deaf.cancel()

    async def end() -> None:
        await asyncio.wait_for(call(app_of(loaded), request(stream=stream), never), 30)

    asyncio.run(second_answer())
    monkeypatch.setattr(serve_app, "SEND_SECONDS", 0.05)
    asyncio.run(end())


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 5e-324])
def test_a_tiny_temperature_is_none(loaded: ServedModel, temperature: float) -> None:
    async def answers() -> list[Any]:
        app = app_of(loaded)
        return [await call(app, request(temperature=each, max_tokens=9)) for each in (0, temperature, 1e-5)]

    greedy, *tiny = asyncio.run(answers())
    assert greedy[0] == 200
    assert [answer["choices"] for _, answer in tiny] == 2 * [greedy[1]["choices"]]


def test_logits_that_are_not_finite_are_named() -> None:
    draw = _Draw(Sampling(4, 1.0, 1.0, 1, ()), torch.device("cpu"))
    assert draw(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 5)).isfinite().sum() == 1, "control"
    with pytest.raises(ApiError, match="logits are not finite"):
        draw(torch.zeros(1, 1, dtype=torch.long), torch.tensor([[0.0, torch.nan]]))


@pytest.mark.parametrize("error", [SystemExit(3), MemoryError("no room")])
def test_a_model_that_fails_in_any_way_is_reported(
    loaded: ServedModel, error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise error

    async def answers() -> list[Any]:
        app = app_of(loaded)
        with monkeypatch.context() as patch:
            patch.setattr(loaded.model, "generate", fail)
            failed = await asyncio.wait_for(call(app, request()), 30)
        return [failed, await call(app, request())]

    failed, fine = asyncio.run(answers())
    assert (failed[0], failed[1]["error"]["type"], fine[0]) == (500, "server_error", 200), "and it holds no turn"
    assert type(error).__name__ in capsys.readouterr().err


def test_a_bug_is_reported_in_the_form_of_openai(
    loaded: ServedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def gone(message: Any) -> None:
        raise RuntimeError("after the response has begun")

    def fail(text: str) -> list[int]:
        raise ZeroDivisionError("by the tokenizer")

    app = app_of(loaded)
    asyncio.run(call(app, request(), gone))
    monkeypatch.setattr(loaded, "tokens", fail)
    status, answer = asyncio.run(call(app, request()))
    assert (status, answer["error"]["type"]) == (500, "server_error")
    errors = capsys.readouterr().err
    assert "ZeroDivisionError: by the tokenizer" in errors
    assert "RuntimeError: after the response has begun" in errors


# -- what is refused early -------------------------------------------------------------------------------------------


def test_a_text_far_above_the_context_is_not_tokenised(loaded: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    tokenizer = loaded.models.tokenizer

    def counting(text: str, **options: Any) -> Any:
        sizes.append(len(text))
        return tokenizer(text, **options)

    monkeypatch.setattr(loaded.models, "tokenizer", counting)
    assert loaded.models.context == 1024
    for text, tokenised in (("x" * 64 * 1024, 1), ("x" * (64 * 1024 + 1), 1), ("é" * 33 * 1024, 1)):
        with pytest.raises(ApiError) as caught:
            loaded.tokens(text)
        assert (caught.value.code, len(sizes)) == ("context_length_exceeded", tokenised)


def test_the_event_loop_goes_on_while_a_text_is_tokenised(loaded: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    other_was_answered, tokens = threading.Event(), loaded.tokens

    def slow(text: str) -> list[int]:
        assert other_was_answered.wait(30)
        return tokens(text)

    async def both() -> tuple[int, Any]:
        app = app_of(loaded)
        chat = asyncio.ensure_future(call(app, request()))
        await call(app, None, path="/nowhere")
        other_was_answered.set()
        return await chat

    monkeypatch.setattr(loaded, "tokens", slow)
    assert asyncio.run(both())[0] == 200


def call_of(arguments: str) -> dict[str, Any]:
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return {"messages": [*ASKED, {"role": "assistant", "tool_calls": calls}]}


def refused(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_request(json.dumps(request(**changes)).encode()).conversation()
    return caught.value


KEYS = {f"key{number}": 1 for number in range(20_000)}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": [{"role": "user", "content": [5] * 100_000}]}, "messages[0].content[0]"),
        ({"messages": [5] * 100_000}, "messages[0]"), ({"stop": [5] * 100_000}, "stop[0]"),
        ({"tools": [5] * 100_000}, "tools[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [5] * 100_000}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "user", "content": "x", **KEYS}]}, "messages[0]"),
        ({"stream_options": KEYS}, "stream_options"),
    ],
)  # fmt: skip
def test_a_request_with_many_mistakes_is_refused_for_the_first(
    changes: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them take seconds, and a gigabyte."""
    counts: list[int] = []

    def count(error: Any) -> ApiError:
        counts.append(error.error_count())
        return _first_error(error)

    monkeypatch.setattr(serve_requests, "_first_error", count)
    assert refused(**changes).param == param
    assert counts[0] <= 3


def test_an_error_repeats_little_of_a_request() -> None:
    long = refused(messages=[{"role": "user", "content": "x", "k" * 100_000: 1}])
    assert (len(long.message) < 300, len(long.param or "")) == (True, 100)
    assert "at most 4 items" in refused(stop=["x"] * 5).message


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": 1e999}', '{"a": NaN}', '{"\\udfff": 1}', "[1]"])
def test_arguments_of_a_call_are_checked_as_the_body_is(arguments: str) -> None:
    assert "arguments of tool call 'a' are not a JSON object" in refused(**call_of(arguments)).message
    assert parse_request(json.dumps(request(**call_of('{"a": 1e99}'))).encode()).conversation(), "control"


def test_an_infinite_number_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"maximum": 5}}}
    body = json.dumps(request(tools=[tool]))
    assert parse_request(body.encode()).offered_tools(), "control"
    with pytest.raises(ApiError, match="infinite"):
        parse_request(body.replace('"maximum": 5', '"maximum": 1e999').encode())


# -- what a chat template leaves out ---------------------------------------------------------------------------------

USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }};{% endfor %}"
CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)
QUESTION: dict[str, Any] = {"role": "user", "content": "Hello"}


def called(*names: str) -> dict[str, Any]:
    calls = [
        {"id": name, "type": "function", "function": {"name": "f" + name, "arguments": {"x": 1}}} for name in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(name: str, **more: str) -> dict[str, Any]:
    return {"role": "tool", "content": f"result {name}", "tool_call_id": name, **more}


@pytest.mark.parametrize(
    ("source", "messages", "says"),
    [
        (USERS, [QUESTION], None),
        (USERS, [{"role": "system", "content": "Be brief."}, QUESTION], "leaves out the content of message 1 .system."),
        (USERS, [QUESTION, {"role": "assistant", "content": "l"}, QUESTION], "content of message 2 .assistant."),
        (CALLS, [{**QUESTION, "name": "Bo"}], "does not support name"),
        (CALLS.replace("{{ m.content }}", "{{ m.name }}{{ m.content }}"), [{**QUESTION, "name": "Bo"}], None),
        (CALLS, [QUESTION, called("a", "b"), result("a"), result("b")], None),
        (CALLS, [QUESTION, called("a", "b"), result("b"), result("a")], "does not support tool_call_id"),
        (CALLS, [QUESTION, result("a")], "does not support tool_call_id"),
        (CALLS + "{{ messages[-1].tool_call_id }}", [QUESTION, called("a", "b"), result("b")], None),
        (CALLS.replace("m.content }}", "m.content if not m.tool_calls }}"),
         [QUESTION, {**called("a"), "content": "I call."}, result("a")], "leaves out the content of message 2"),
        (USERS + "{# tool_calls #}", [QUESTION, called("a")], "leaves out the tool call of message 2"),
        (None, [{**QUESTION, "name": "Bo"}], "does not support name"),
    ],
)  # fmt: skip
def test_what_the_template_leaves_out_is_refused(
    loaded: ServedModel, source: str | None, messages: list[Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(loaded.models.encoder.options, chat_template=source)
    encoder = template.Encoder(loaded.models.tokenizer.backend_tokenizer, options)
    monkeypatch.setattr(loaded.models, "encoder", encoder)
    if says is None:
        text = loaded.text(messages, [])
        assert all(message["content"] in text for message in messages)
    else:
        with pytest.raises(ApiError, match=says):
            loaded.text(messages, [])


# -- connections -----------------------------------------------------------------------------------------------------


def test_connections_that_are_not_used_end(loaded: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a word, one with a part of a header, one that does so after an answer; control: one that waits."""
    began, go_on, tokens = threading.Event(), threading.Event(), loaded.tokens

    def slow(text: str) -> list[int]:
        began.set()
        assert go_on.wait(60)
        return tokens(text)

    monkeypatch.setattr(loaded, "tokens", slow)
    monkeypatch.setattr(serve_connections, "HEADER_SECONDS", 0.3)
    body = json.dumps(request()).encode()
    post = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    models = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"

    async def talk() -> None:
        config = uvicorn.Config(app_of(loaded), http=connection_class(), lifespan="off", log_level="critical", port=0)
        server = uvicorn.Server(config)
        running = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        busy, *idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        busy[1].write(post % (CHAT.encode(), len(body)) + body)
        await asyncio.to_thread(began.wait, 60)
        for (_, writer), sent in zip(idle, (b"", b"GET / HTTP", models + b"GET / HTTP"), strict=True):
            writer.write(sent)
        ends = [await asyncio.wait_for(reader.read(), 30) for reader, _ in idle]
        assert [bool(text) for text in ends] == [False, False, True]
        go_on.set()
        assert (await asyncio.wait_for(busy[0].readline(), 30)).startswith(b"HTTP/1.1 200")
        server.should_exit = True
        await running

    asyncio.run(talk())


def test_a_request_counts_from_its_body_on(loaded: ServedModel) -> None:
    async def statuses() -> list[int]:
        app = app_of(loaded, waiting=0)
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
        arriving = asyncio.ensure_future(app(scope, asyncio.Event().wait, never))
        await asyncio.sleep(0)  # it begins
        full = await call(app, request())
        arriving.cancel()
        await asyncio.wait({arriving})
        return [full[0], (await call(app, request()))[0]]

    assert asyncio.run(statuses()) == [429, 200]
