"""Which answers are kept in memory, and that what is kept is what the app had answered."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ui import response_cache
from ui.response_cache import ResponseCache


class Files:
    """An app with one file in two encodings, sent in two pieces; counts its requests."""

    def __init__(self, status: int = 200, complete: bool = True):
        self.status, self.complete, self.requests = status, complete, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        encoding = dict(scope["headers"]).get(b"accept-encoding", b"plain")
        headers = [(b"content-type", b"text/css"), (b"x-encoding", encoding)]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": scope["path"].encode(), "more_body": True})
        if self.complete:
            await send({"type": "http.response.body", "body": b" of " + encoding})


def get(app: Any, path: str = "/assets/a-1.css", method: str = "GET", query: bytes = b"", **headers: str) -> list[Any]:
    """The messages of an answer, whose headers are changed as a server in front may do."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append({**message, "headers": list(message["headers"])} if "headers" in message else message)
        message.get("headers", []).append((b"x-added", b"by the server in front"))

    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": pairs}
    asyncio.run(app(scope, None, send))
    return messages


def test_a_file_is_asked_for_once_in_each_encoding_and_comes_back_as_it_was() -> None:
    files = Files()
    cache = ResponseCache(files)
    first, second = get(cache, accept_encoding="br"), get(cache, accept_encoding="br")
    assert first == second
    assert b"".join(message.get("body", b"") for message in second) == b"/assets/a-1.css of br"
    assert files.requests == 1
    assert (b"cache-control", b"public, max-age=31536000, immutable") in second[0]["headers"]
    assert (b"x-added", b"by the server in front") not in second[0]["headers"]
    assert (b"x-encoding", b"plain") in get(cache)[0]["headers"]
    assert get(cache, "/assets/b-2.css")[1]["body"] == b"/assets/b-2.css"
    assert files.requests == 3
    answers = [get(cache, "/static/js/a.js") for _ in range(2)]  # its name says nothing of its content
    assert files.requests == 4
    assert not any(name == b"cache-control" for name, _ in answers[1][0]["headers"])


@pytest.mark.parametrize(
    "request_of",
    [{"path": "/"}, {"path": "/theme.css"}, {"path": "/gradio_api/run/predict"}, {"method": "HEAD"}, {"method": "POST"},
     {"query": b"v=1"}, {"range": "bytes=0-3"}, {"if_none_match": '"a"'}],
)  # fmt: skip
def test_what_is_no_whole_file_is_passed_on(request_of: dict[str, Any]) -> None:
    files = Files()
    cache = ResponseCache(files)
    get(cache)
    for _ in range(2):
        get(cache, **request_of)
    assert files.requests == 3


@pytest.mark.parametrize("files", [Files(404), Files(complete=False)], ids=["missing", "cut"])
def test_a_mistake_is_not_kept(files: Files) -> None:
    cache = ResponseCache(files)
    assert get(cache) == get(cache)
    assert files.requests == 2
    assert not any(name == b"cache-control" for name, _ in get(Files(404))[0]["headers"])


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_cache, "MAX_BYTES", 10_000)
    files = Files()
    cache = ResponseCache(files)
    for number in range(20):
        get(cache, accept_encoding=f"br;q=0.{number}")
    assert cache.bytes <= 10_000
    assert 0 < len(cache.answers) < 20
    get(cache, accept_encoding="br;q=0.19")
    assert files.requests == 21
