"""`tunesmith serve` as clients meet it: the `openai` client against the real server, and requests it never sends."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.launching import ROOT, environment, free_port
from trainers.embedded import BASE_DIR
from trainers.tools.partial_text import PartialText
from trainers.tools.serve_app import MAX_BODY
from trainers.tools.serve_generation import StopTexts

TOKEN = "test-token-of-sixteen-characters"  # noqa: S105
ASKED: list[Any] = [{"role": "user", "content": "title: Sea; city: Rome; author: Bo; year: 1999. Write it as JSON."}]
LONG: dict[str, Any] = {"model": "endless", "max_tokens": 400}
"""An answer of `endless` that goes on for seconds."""
CHAT = "/v1/chat/completions"


@dataclass
class Server:
    """A server that runs, and what it printed while it started."""

    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    @property
    def port(self) -> int:
        return int(self.url.split(":")[2].split("/")[0])

    def client(self, token: str = TOKEN, **more: Any) -> openai.OpenAI:
        """A client that tries once, and reads no proxy of the machine."""
        session = openai.DefaultHttpxClient(trust_env=False, timeout=60)
        return openai.OpenAI(base_url=self.url, api_key=token, max_retries=0, http_client=session, **more)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, Any]:
        """Status, document and headers of a request; names of headers with `_` for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        connection.request(method, path, body, {name: value for name, value in sent.items() if value})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text) if text else None, answer.headers


def start(*words: str, token: str | None = TOKEN, folder: Path | None = None) -> subprocess.Popen[str]:
    """The command, whose output is still to come."""
    command = [sys.executable, "-m", "app.cli", "serve", *words]
    own = {"TUNESMITH_SERVE_TOKEN": token} if token else {}
    env = environment(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", **own)
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=folder or ROOT
    )


def serving(*words: str, token: str | None = TOKEN) -> Server:
    """A server that is ready."""
    process, lines = start(*words, "--port", "0", token=token), list[str]()
    assert process.stdout
    assert process.stderr
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), "".join(lines)
    return Server(process, url, lines)


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The embedded model: two answers at a time, one request may wait."""
    limits = ("--max_concurrent", "2", "--max_waiting", "1", "--max_new_tokens", "900")
    running = serving("embedded", *limits)
    yield running
    ended(running.process)


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Server]:
    """A folder with the embedded model that takes another token for its end, so that no answer has one."""
    folder = Path(shutil.copytree(BASE_DIR, tmp_path / "endless"))
    for name in ("tokenizer_config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token": "<|pad|>", "eos_token_id": 1}))
    running = serving(str(folder), "--max_concurrent", "2", "--max_waiting", "1", token=None)
    yield running
    ended(running.process)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client()


def body(**changes: Any) -> bytes:
    """A request that is fine but for the changes."""
    return json.dumps({"model": "embedded", "messages": ASKED, "max_tokens": 4, "temperature": 0, **changes}).encode()


@cache
def _tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE_DIR)


def plainly(model: Any, seed: int | None = None, **sampling: Any) -> str:
    """What stock transformers answers, greedily without a seed."""
    tokenizer = _tokenizer()
    inputs = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if seed is not None:
        torch.manual_seed(seed)
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=40, do_sample=seed is not None, top_k=0, **sampling)
    return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def ask(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": "embedded", "messages": ASKED, "max_tokens": 40, "temperature": 0}
    return client.chat.completions.create(**{**defaults, **options})


def text_of(client: openai.OpenAI, **options: Any) -> str:
    return str(ask(client, **options).choices[0].message.content)


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- answers ---------------------------------------------------------------------------------------------------------


def test_it_serves_its_model_alone(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["embedded"]
    assert client.models.retrieve("embedded").owned_by == "tunesmith"
    for name in ("gpt-4o", "EMBEDDED", "", "../embedded", str(BASE_DIR)):
        with pytest.raises(openai.NotFoundError, match="this server only serves 'embedded'"):
            ask(client, model=name)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_answers_are_those_of_stock_transformers(client: openai.OpenAI) -> None:
    model = AutoModelForCausalLM.from_pretrained(BASE_DIR).eval()
    greedy = ask(client)
    assert greedy.choices[0].message.content == plainly(model)
    assert greedy.choices[0].finish_reason == "stop"
    assert greedy.usage.total_tokens == greedy.usage.prompt_tokens + greedy.usage.completion_tokens
    drawn = {"temperature": 0.9, "top_p": 0.8}
    texts = {seed: text_of(client, seed=seed, **drawn) for seed in (5, 6)}
    assert texts == {seed: plainly(model, seed, **drawn) for seed in (5, 6)}
    assert texts[5] != texts[6], "the control"


@pytest.mark.long
def test_two_clients_at_once_do_not_change_each_other(client: openai.OpenAI) -> None:
    options = [{"temperature": 1.0, "seed": seed, "max_tokens": 60} for seed in (1, 2)]
    alone = [text_of(client, **each) for each in options]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda each: text_of(client, **each), options))
    assert together == alone
    assert alone[0] != alone[1], "the control"
    assert text_of(client, temperature=2.0) != text_of(client, temperature=2.0), "without a seed"


def test_a_stream_is_the_answer_in_pieces(client: openai.OpenAI) -> None:
    once = ask(client, temperature=1.0, seed=3)
    chunks = list(ask(client, temperature=1.0, seed=3, stream=True, stream_options={"include_usage": True}))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(piece for piece in pieces if piece) == once.choices[0].message.content
    assert len(pieces) > 10
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == once.choices[0].finish_reason
    assert chunks[-1].usage == once.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_limit_of_tokens_ends_an_answer(server: Server, client: openai.OpenAI) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        short = ask(client, **{"max_tokens": None, name: 5})
        assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 5)
    status, answer, _ = server.request("POST", CHAT, body(max_tokens=901))
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    crowded = [{"role": "user", "content": "word " * 250}]
    assert 500 < ask(client, messages=crowded, max_tokens=1).usage.prompt_tokens < 1024
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=crowded, max_tokens=900)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_stop_text_ends_an_answer_and_is_not_in_it(client: openai.OpenAI) -> None:
    full = text_of(client)
    middle = full[len(full) // 2 :][:6]  # of several tokens
    for stop in (middle, ["never in it", middle]):
        stopped = ask(client, stop=stop)
        assert stopped.choices[0].message.content == full[: full.index(middle)]
        assert stopped.choices[0].finish_reason == "stop"
        chunks = list(ask(client, stop=stop, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == full[: full.index(middle)]
    assert stopped.usage.completion_tokens < ask(client).usage.completion_tokens
    assert text_of(client, stop=full[-1] + "and more") == full, "the beginning of a stop text is no stop text"


def test_messages_come_in_each_form_that_clients_send(client: openai.OpenAI) -> None:
    def begin(**options: Any) -> Any:
        return ask(client, **{"max_tokens": 8, **options})

    plain = begin()
    parts = [{"type": "text", "text": ASKED[0]["content"][:9]}, {"type": "text", "text": ASKED[0]["content"][9:]}]
    neutral = {"user": "me", "frequency_penalty": 0, "n": 1, "response_format": {"type": "text"}}
    for options in ({"messages": [{"role": "user", "content": parts}]}, neutral):
        assert begin(**options).choices[0].message.content == plain.choices[0].message.content
    history = [*ASKED, plain.choices[0].message.model_dump(), {"role": "user", "content": "Again."}]
    assert begin(messages=history).usage.prompt_tokens > plain.usage.prompt_tokens
    instructed = [[{"role": role, "content": "Be brief."}, *ASKED] for role in ("system", "developer")]
    assert len({begin(messages=messages).usage.prompt_tokens for messages in instructed}) == 1


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": 5}, "model"), ({"messages": "hi"}, "messages"), ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"), ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}]}]}, "messages"),
        ({"stream": "yes"}, "stream"), ({"stream_options": {}}, "stream_options"), ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"), ({"temperature": "hot"}, "temperature"), ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"), ({"temperature": -1}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"), ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"seed": 2**63}, "seed"), ({"seed": "1"}, "seed"), ({"n": 0}, "n"), ({"n": True}, "n"), ({"n": 4}, "n"),
        ({"tools": {}}, "tools"), ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"), ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"), ({"logit_bias": {"5": 1}}, "logit_bias"), ({"functions": []}, "functions"),
        ({"presence_penalty": 0.5}, "presence_penalty"), ({"temprature": 0}, "temprature"),
        ({"top_k": 5}, "top_k"), ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_by_name(server: Server, changes: dict[str, Any], param: str | None) -> None:
    status, answer, _ = server.request("POST", CHAT, body(**changes))
    error = answer["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    "sent", [b"", b"hello", b"[]", b"\xff", b'{"model":', b"[" * 100_000, b'{"seed": NaN}', b'{"n": 1, "n": 1}',
             b'{"seed": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(server: Server, sent: bytes) -> None:
    status, answer, _ = server.request("POST", CHAT, sent)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("status", "method", "path", "headers"),
    [
        (401, "GET", "/v1/models", {"authorization": ""}), (401, "GET", "/v1/models", {"authorization": "Bearer x"}),
        (401, "POST", CHAT, {"authorization": f"Basic {TOKEN}"}), (401, "POST", CHAT, {"authorization": TOKEN}),
        (401, "GET", "/nowhere", {"authorization": f"Bearer {TOKEN}x"}),
        (401, "GET", "/v1/models", {"authorization": "Bearer é"}),
        (400, "GET", "/v1/models", {"host": "evil.example"}), (400, "POST", CHAT, {"host": "127.0.0.1.evil.example"}),
        (403, "POST", CHAT, {"origin": "https://evil.example"}), (403, "POST", CHAT, {"origin": "null"}),
        (403, "GET", "/v1/models", {"sec_fetch_site": "cross-site"}),
        (415, "POST", CHAT, {"content_type": "text/plain"}), (415, "POST", CHAT, {"content_type": ""}),
        (404, "POST", "/load_model", {}), (404, "GET", "/", {}), (404, "GET", "/docs", {}),
        (404, "POST", "/v1/completions", {}),
        (405, "OPTIONS", CHAT, {}), (405, "GET", CHAT, {}), (405, "POST", "/v1/models", {}),
        (200, "GET", "/v1/models", {"host": "localhost:1"}), (200, "POST", CHAT, {"host": "[::1]:80"}),
    ],
)  # fmt: skip
def test_who_may_ask(server: Server, status: int, method: str, path: str, headers: dict[str, str]) -> None:
    got, answer, seen = server.request(method, path, body() if method == "POST" else None, **headers)
    assert got == status, answer
    assert status == 200 or answer["error"]["message"]
    assert not [name for name in seen if name.lower().startswith("access-control")]
    assert TOKEN not in json.dumps(answer)


def test_a_huge_request_is_refused_and_the_next_is_answered(server: Server) -> None:
    status, answer, _ = server.request("POST", CHAT, body(user="x" * MAX_BODY))
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    chunks = (b"x" * 2**20 for _ in range(12))
    status = 413
    with suppress(OSError):  # the server closes the connection while the body is still sent
        connection.request("POST", CHAT, chunks, headers, encode_chunked=True)  # type: ignore[arg-type]
        status = connection.getresponse().status
    assert status == 413
    assert server.request("POST", CHAT, body())[0] == 200, "the next one is answered"


# -- who waits, and who is gone --------------------------------------------------------------------------------------


@pytest.mark.long
def test_too_many_are_refused_and_those_who_hang_up_stop(endless: Server) -> None:
    """One that reads a stream and one that waits for all of its answer; then a third one waits."""
    client = endless.client("anything")
    stream = ask(client, stream=True, **LONG)
    next(iter(stream))
    connection = http.client.HTTPConnection("127.0.0.1", endless.port)
    connection.request("POST", CHAT, body(**LONG), {"content-type": "application/json"})

    def patiently() -> str:
        while True:
            with suppress(openai.RateLimitError):
                return text_of(client, model="endless", max_tokens=3)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(patiently)
        refused: list[str] = []

        def is_full() -> bool:
            status, answer, headers = endless.request("POST", CHAT, body(model="another"))  # takes no turn
            if status == 429:
                refused.extend([answer["error"]["message"], headers["retry-after"]])
            return status == 429

        wait_for(is_full)
        assert "2 answers are generated and 1 wait" in refused[0]
        assert not waiting.done()
        began = time.monotonic()
        stream.close()
        connection.close()
        waiting.result(timeout=60)
        after = time.monotonic() - began
    began = time.monotonic()
    complete = ask(client, **LONG)
    assert (complete.usage.completion_tokens, complete.choices[0].finish_reason) == (400, "length")
    assert after < (time.monotonic() - began) / 2, "the control: an answer that nobody stops takes as long"


# -- the process -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ctrl_c_ends_it_without_a_trace(endless: Server) -> None:
    """Within an answer, and while it loads; without a token it says so."""
    assert any("no TUNESMITH_SERVE_TOKEN is set" in line for line in endless.lines)
    stream = ask(endless.client("anything"), stream=True, **{**LONG, "max_tokens": 900})
    next(iter(stream))
    endless.process.send_signal(signal.SIGINT)
    assert endless.process.wait(timeout=30) == 130
    assert not any("Traceback" in line for line in endless.lines), endless.lines
    loading = start("embedded", "--port", "0")
    try:
        assert loading.stderr
        assert "reading embedded" in loading.stderr.readline()
        loading.send_signal(signal.SIGINT)
        _, errors = loading.communicate(timeout=30)
        assert (loading.returncode, "Traceback" in errors) == (130, False)
    finally:
        ended(loading)


@pytest.mark.long
def test_a_reader_of_the_address_may_be_gone() -> None:
    port = free_port()
    process = start("embedded", "--port", str(port))
    try:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert any("Ctrl-C ends the server" in line for line in iter(process.stderr.readline, ""))
        alive = Server(process, f"http://127.0.0.1:{port}/v1", [])
        assert alive.request("GET", "/v1/models")[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        assert process.stderr.read() == ""
    finally:
        ended(process)


def test_the_token_is_not_on_the_command_line(server: Server) -> None:
    """Which every user of the machine can read; nor is it printed."""
    command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert TOKEN.encode() not in command
    assert TOKEN not in "".join(server.lines)


# -- text ------------------------------------------------------------------------------------------------------------


@given(st.text(alphabet="abé\n 語🙂", max_size=60), st.data())
def test_pieces_of_tokens_make_the_text(text: str, data: st.DataObject) -> None:
    tokenizer = _tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if data.draw(st.booleans()):  # the end of a character may be missing
        ids = ids[: data.draw(st.integers(0, len(ids)))]
    partial = PartialText(lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)))
    pieces = [partial.add(token) for token in ids]
    assert "".join([*pieces, partial.end()]) == tokenizer.decode(ids, skip_special_tokens=True)
    assert not any("�" in piece for piece in pieces), "no half of a character"


@given(st.lists(st.text(alphabet="ab", max_size=4), max_size=12), st.text(alphabet="ab", min_size=1, max_size=5))
def test_a_stop_text_is_seen_across_pieces(pieces: list[str], stop: str) -> None:
    stops, sent = StopTexts([stop]), ""
    for piece in pieces:
        sent += stops.add(piece)
        assert stop not in sent
        if stops.is_met:
            break
    else:
        sent += stops.end()
    text = "".join(pieces)
    assert sent == re.split(re.escape(stop), text, maxsplit=1)[0]
    assert stops.is_met == (stop in text)
