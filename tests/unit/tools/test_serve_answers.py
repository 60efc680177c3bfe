"""What `tunesmith serve` makes of an answer: thoughts, calls of tools, several answers, and errors in one form."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parrot import make_parrot
from tests.unit.tools.test_serve import Server, ended, serving, wait_for
from trainers.tools.answer_format import AnswerFormat, PlainParser
from trainers.tools.serve_answer import Choice, _message

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Z\u00fcrich", "days": 2}}</tool_call>'
BROKEN = "<tool_call>not a call</tool_call>"
ANSWERS = {
    "think": "<think>\nIs it blue?\n</think>\n\nIt is blue.", "call": f"<think>I look.</think>I look. {CALL}",
    "twice": f"{CALL}\n{CALL.replace('weather', 'wind')}", "broken": f"Well {BROKEN}", "*": "Nothing, thanks.",
    "tell": "Between 5 and 15 degrees, with rain in the evening.",
}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "wind")
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model whose answers are planned, one at a time, with room for three more: 32 connections."""
    folder = make_parrot(tmp_path_factory.mktemp("models") / "parrot", ANSWERS)
    running = serving(str(folder), "--max_concurrent", "1", "--max_waiting", "3")
    yield running
    ended(running.process)


def ask(server: Server, *messages: Any, **options: Any) -> Any:
    sent = [
        message if isinstance(message, dict) else {"role": "user", "content": f"now {message}"} for message in messages
    ]
    defaults: dict[str, Any] = {"model": "parrot", "messages": sent, "temperature": 0, "max_tokens": 200}
    return server.client().chat.completions.create(**{**defaults, **options})


def streamed(server: Server, *messages: Any, **options: Any) -> dict[int, dict[str, Any]]:
    """The answers of a stream, each with the keys of a complete one."""
    answers: dict[int, dict[str, Any]] = {}
    for chunk in ask(server, *messages, stream=True, **options):
        (choice,) = chunk.choices
        answer = answers.setdefault(choice.index, {"content": "", "thought": "", "calls": [], "reason": None})
        answer["content"] += choice.delta.content or ""
        answer["thought"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            assert call.index == len(answer["calls"])
            answer["calls"].append((call.function.name, json.loads(call.function.arguments)))
        answer["reason"] = choice.finish_reason or answer["reason"]
    return answers


def complete(choice: Any) -> dict[str, Any]:
    message = choice.message
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
    thought = getattr(message, "reasoning_content", None) or ""
    return {"content": message.content or "", "thought": thought, "calls": calls, "reason": choice.finish_reason}


def answer(content: str = "", thought: str = "", calls: Any = (), reason: str = "stop") -> dict[str, Any]:
    return {"content": content, "thought": thought, "calls": list(calls), "reason": reason}


WEATHER = {"city": "Z\u00fcrich", "days": 2}


@pytest.mark.parametrize(
    ("word", "options", "expected"),
    [
        ("think", {}, answer("It is blue.", "Is it blue?")),
        ("call", {"tools": TOOLS}, answer("I look.", "I look.", [("weather", WEATHER)], "tool_calls")),
        ("twice", {"tools": TOOLS}, answer("", "", [("weather", WEATHER), ("wind", WEATHER)], "tool_calls")),
        ("broken", {"tools": TOOLS}, answer("Wellnot a call")),
        ("call", {}, answer(f"I look. {CALL}", "I look.")),
        ("call", {"tools": TOOLS, "tool_choice": "none"}, answer(f"I look. {CALL}", "I look.")),
        ("call", {"tools": TOOLS, "stop": "look"}, answer("", "I", reason="stop")),
        ("other", {"tools": TOOLS}, answer("Nothing, thanks.")),
    ],
)  # fmt: skip
def test_thoughts_and_calls_are_parts_of_their_own(
    server: Server, word: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    got = ask(server, word, **options)
    assert complete(got.choices[0]) == expected
    assert streamed(server, word, **options) == {0: expected}
    if expected["calls"] and not expected["content"]:
        assert got.choices[0].message.content is None


def test_a_client_sends_calls_back_with_their_results(server: Server) -> None:
    """As the client's own object, with all of its fields."""
    message = ask(server, "call", tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees; now tell"}
    done = ask(server, "call", message.model_dump(), result, tools=TOOLS).choices[0]
    assert complete(done) == answer(ANSWERS["tell"])
    thought = {"role": "user", "content": "x", "reasoning_content": "y"}
    with pytest.raises(openai.BadRequestError, match="only messages of the assistant have reasoning_content"):
        ask(server, thought)


def test_several_answers_are_those_of_the_next_seeds(server: Server) -> None:
    drawn: dict[str, Any] = {"temperature": 1.9, "max_tokens": 12}
    singly = [complete(ask(server, "tell", seed=seed, **drawn).choices[0]) for seed in (7, 8, 9)]
    together = ask(server, "tell", seed=7, n=3, **drawn)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [complete(choice) for choice in together.choices] == singly
    assert len({each["content"] for each in singly}) > 1, "the control"
    assert streamed(server, "tell", seed=7, n=3, **drawn) == dict(enumerate(singly))
    assert together.usage.completion_tokens <= 3 * 12
    one = ask(server, "tell", seed=7, **drawn).usage
    assert one.prompt_tokens == together.usage.prompt_tokens
    assert one.completion_tokens < together.usage.completion_tokens
    with pytest.raises(openai.BadRequestError, match="n=5: this server takes 4 answers at a time"):
        ask(server, "tell", n=5)


def test_too_many_connections_are_told_in_json(server: Server) -> None:
    with ExitStack() as idle:
        for _ in range(32):
            idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        wait_for(lambda: server.request("GET", "/v1/models")[0] == 503)
        status, document, headers = server.request("GET", "/v1/models")
        assert (status, document["error"]["type"], headers["retry-after"]) == (503, "server_error", "1")
        assert "32 connections are open already" in document["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="connections are open already"):
            ask(server, "think")
    wait_for(lambda: server.request("GET", "/v1/models")[0] == 200)


@pytest.mark.parametrize("sent", [b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\nHost\r\n\r\n"])
def test_what_is_no_http_gets_json_too(server: Server, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(sent)
        answered = connection.makefile("rb").read()
    head, _, body = answered.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_model_without_a_template_for_tools_says_so(tmp_path: Path) -> None:
    """And its answers are what it writes."""
    plain = Choice(0, PlainParser())
    assert plain.feed(CALL) == [{"content": CALL}]
    assert (plain.finish("stop", 1), plain.reason) == ([], "stop")


@given(st.sampled_from(sorted(ANSWERS)), st.lists(st.integers(1, 9), max_size=30), st.booleans())
def test_changes_make_the_message(word: str, cuts: list[int], with_calls: bool) -> None:
    text, template = ANSWERS[word], AnswerFormat(None, "<tool_call> tools")
    choice, deltas, start = Choice(0, template.parser("", TOOLS, with_calls)), list[dict[str, Any]](), 0
    for size in cuts:
        deltas += choice.feed(text[start : start + size])
        start += size
    deltas += [*choice.feed(text[start:]), *choice.finish("length", 3)]
    parser = template.parser("", TOOLS, with_calls)
    parser.feed(text)
    parser.finish()
    expected, made = parser.message(), _message(deltas)
    calls = [call["function"] for call in expected.get("tool_calls", ()) if "function" in call]
    assert choice.reason == "length"
    assert made.get("reasoning_content") == expected.get("reasoning_content")
    assert [json.loads(call["function"]["arguments"]) for call in made.get("tool_calls", ())] == [
        call["arguments"] for call in calls
    ]
    if "broken" not in word:
        assert (made["content"] or "").strip() == expected["content"].strip()
    assert bool(calls) == (with_calls and word in ("call", "twice"))
