"""Who may talk to the server: host, origin, size, headers, password; and what `tunesmith ui` refuses to start with."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from app.cli import run_verb
from app.commands.ui import DEFAULT_PORT
from app.services.listening import listen
from trainers.run.web_host import TrustedHosts, bracketed
from ui.security import (
    HEADERS,
    MAX_BODY,
    MAX_LOGIN,
    MAX_UPLOAD,
    UPLOAD_PATH,
    Guard,
    LoggedIn,
    Password,
    Throttle,
    ThrottledLogin,
)

ROOT = Path(__file__).resolve().parents[3]
HOST = "127.0.0.1:7860"
EVENTS = "/gradio_api/queue/join"


class Inner:
    """An app that answers 200, or what it is told to, and counts its requests; like Gradio it lets origins read it."""

    def __init__(self, *statuses: int):
        self.statuses, self.asked = list(statuses), 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        status = self.statuses.pop(0) if self.statuses else 200
        headers = [(b"content-type", b"text/html"), (b"x-frame-options", b"SAMEORIGIN")]
        headers += [(b"Access-Control-Allow-Origin", b"http://evil"), (b"access-control-allow-credentials", b"true")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"inner"})


def ask(app: Any, method: str = "GET", path: str = "/", client: str = "1.2.3.4", **headers: str) -> dict[str, Any]:
    """Status, headers and body of one request; `sec_fetch_site="none"` is the header Sec-Fetch-Site."""
    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in {"host": HOST, **headers}.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": lines, "client": (client, 5)}
    got: dict[str, Any] = {"body": b""}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: MutableMapping[str, Any]) -> None:
        got.update({key: value for key, value in message.items() if key in ("status", "headers")})
        got["body"] += message.get("body", b"")

    asyncio.run(app(scope, receive, send))
    return got


@pytest.fixture
def guard() -> Guard:
    return Guard(Inner(), TrustedHosts("127.0.0.1"), ["/", "/runs"])


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:7860", "[::1]:7860", "[::1]"])
def test_names_of_this_machine_are_trusted(name: str) -> None:
    assert name in TrustedHosts("127.0.0.1")


@pytest.mark.parametrize(
    "name",
    ["", "evil", "localhost.evil", "127.0.0.1.evil", "localhost:x", "evil@localhost", "10.0.0.1", "[::2]", "a b", "\n"],
)
def test_other_names_are_not(name: str) -> None:
    assert name not in TrustedHosts("127.0.0.1")


def test_a_given_host_is_trusted_and_numbers_where_all_are_served() -> None:
    assert "box.lan:80" in TrustedHosts("box.lan")
    assert "[fd00::1]:80" in TrustedHosts("fd00::1")
    everywhere = TrustedHosts("0.0.0.0", ("box",))  # noqa: S104
    assert all(name in everywhere for name in ("192.168.1.7:7860", "[fe80::1]:7860", "box"))
    assert "evil.example" not in everywhere
    assert bracketed("::1") == "[::1]"


# -- requests --------------------------------------------------------------------------------------------------------


def test_every_answer_has_the_headers_once(guard: Guard) -> None:
    for host in (HOST, "evil"):
        names = [name for name, _ in ask(guard, host=host)["headers"]]
        assert [name for name in HEADERS if names.count(name.lower().encode()) != 1] == []


def test_no_other_origin_is_let_in(guard: Guard) -> None:
    for origin in ("http://evil", f"http://{HOST}"):
        for path in ("/runs", EVENTS):
            names = [name.lower() for name, _ in ask(guard, "GET", path, origin=origin)["headers"]]
            assert not [name for name in names if name.startswith(b"access-control-")]


def test_two_hosts_are_refused(guard: Guard) -> None:
    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")] * 2}
    assert guard._refusal(scope) is not None
    assert guard._refusal({**scope, "headers": [(b"host", b"localhost")]}) is None
    assert guard._refusal({**scope, "headers": []}) is not None


@pytest.mark.parametrize(
    ("status", "method", "path", "headers"),
    [
        (200, "GET", "/config", {}),
        (200, "GET", "/config", {"origin": f"http://{HOST}", "sec_fetch_site": "same-origin"}),
        (200, "POST", EVENTS, {"origin": f"http://{HOST}", "content_length": "3"}),
        (200, "POST", EVENTS, {"content_length": "3"}),
        (200, "GET", "/runs", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}),
        (403, "POST", "/runs", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "content_length": "0"}),
        (403, "GET", "/config", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}),
        (403, "GET", "/runs", {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}),
        (403, "GET", EVENTS, {"sec_fetch_site": "same-site"}),
        (403, "POST", EVENTS, {"origin": "null", "content_length": "3"}),
        (403, "POST", EVENTS, {"origin": "http://evil", "content_length": "3"}),
        (403, "POST", EVENTS, {"origin": "http://127.0.0.1:7861", "content_length": "3"}),
        (403, "POST", EVENTS, {"origin": f"file://{HOST}", "content_length": "3"}),
        (403, "OPTIONS", EVENTS, {"origin": "http://evil", "access_control_request_method": "POST"}),
        (411, "POST", EVENTS, {}),
        (411, "POST", EVENTS, {"content_length": "-1"}),
        (413, "POST", EVENTS, {"content_length": str(MAX_BODY + 1)}),
        (400, "POST", EVENTS, {"content_length": "3", "transfer_encoding": "chunked"}),
        (404, "GET", "/nothing", {}),
        (404, "GET", "/gradio_api/file=/etc/passwd", {}),
        (404, "GET", "/gradio_api/file/etc/passwd", {}),
        (404, "GET", "/gradio_api/proxy=http://127.0.0.1", {}),
        (404, "GET", "/gradio_api/deep_link", {"sec_fetch_site": "same-origin"}),
        (404, "POST", "/gradio_api/process_recording", {"content_length": "3"}),
        (404, "GET", "/gradio_api//queue/join", {}),
        (404, "GET", "//runs", {}),
        (404, "GET", "/runs/../etc", {}),
        (200, "GET", "/runs/", {}),
        (200, "GET", "/assets/index.js", {}),
        (413, "POST", "/login", {"content_length": "20000"}),
        (413, "POST", "/login/", {"content_length": "20000"}),
        (413, "POST", "/gradio_api/upload", {"content_length": "9" * 30}),
        (200, "POST", "/gradio_api/upload", {"content_length": str(MAX_BODY + 1)}),
    ],
)
def test_requests(guard: Guard, status: int, method: str, path: str, headers: dict[str, str]) -> None:
    assert ask(guard, method, path, **headers)["status"] == status
    assert guard.app.asked == (status == 200)  # type: ignore[attr-defined]


def test_a_standard_port_may_be_left_out() -> None:
    guard = Guard(Inner(), TrustedHosts("box"), [])
    assert ask(guard, "POST", EVENTS, host="box", origin="https://box:443", content_length="1")["status"] == 200
    assert ask(guard, "POST", EVENTS, host="box", origin="https://box:444", content_length="1")["status"] == 403


class Reader:
    """An app that reads the whole body, and keeps none of it."""

    def __init__(self, read_first: bool = True):
        self.read_first, self.bytes, self.heard = read_first, 0, ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not self.read_first:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            message = await receive()
            self.heard = message["type"]
            self.bytes += len(message.get("body", b""))
            if self.heard == "http.disconnect":
                raise ConnectionError("the client is gone")
            if not message["more_body"]:
                break
        if self.read_first:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"read"})


def pour(guard: Guard, path: str, chunks: int, size: int) -> tuple[list[int], int]:
    """Statuses of the answers to a body that says it has 10 bytes, and how many of its chunks were taken."""
    headers = [(b"host", HOST.encode()), (b"content-length", b"10")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("1.2.3.4", 5)}
    statuses, taken, chunk = [], 0, bytes(size)

    async def receive() -> dict[str, Any]:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": chunk, "more_body": taken < chunks}

    async def send(message: MutableMapping[str, Any]) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    asyncio.run(guard(scope, receive, send))
    return statuses, taken


@pytest.mark.parametrize(
    ("path", "most"), [(EVENTS, MAX_BODY), ("/login", MAX_LOGIN), (UPLOAD_PATH, MAX_UPLOAD + MAX_BODY)]
)
def test_bytes_are_counted_as_they_come(path: str, most: int) -> None:
    """A length that is said may be a lie."""
    size = max(1, most // 64)
    reader = Reader()
    guard = Guard(reader, TrustedHosts("127.0.0.1"), [])
    assert pour(guard, path, 10_000, size) == ([413], 65)
    assert reader.heard == "http.disconnect"
    assert reader.bytes <= most
    assert pour(guard, path, 64, size) == ([200], 64), "all that is allowed goes through"


def test_an_answer_under_way_is_not_followed_by_another() -> None:
    guard = Guard(Reader(read_first=False), TrustedHosts("127.0.0.1"), [])
    assert pour(guard, EVENTS, 10_000, 1 << 20) == ([200], 17)


def test_an_error_of_the_app_is_still_one() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        ask(Guard(broken, TrustedHosts("127.0.0.1"), ["/"]))


def test_nothing_is_read_of_whoever_has_not_logged_in() -> None:
    reader = Reader()
    guard = Guard(LoggedIn(reader, lambda cookies: cookies.get("token") == "right"), TrustedHosts("127.0.0.1"), [])
    for cookie in ({}, {"cookie": "token=wrong"}, {"cookie": "other=right"}, {"cookie": ""}):
        assert ask(guard, "POST", EVENTS, content_length="3", **cookie)["status"] == 401
    assert reader.heard == ""


def test_a_websocket_is_closed(guard: Guard) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    asyncio.run(guard({"type": "websocket", "path": "/", "headers": []}, receive, send))
    assert sent == ["websocket.close"]
    assert guard.app.asked == 0  # type: ignore[attr-defined]


# -- the password ----------------------------------------------------------------------------------------------------


class Clock:
    """Time that stands until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_password() -> None:
    check = Password("ada", "péss wörd")
    assert check("ada", "péss wörd")
    wrong = [("ada", "x"), ("Ada", "péss wörd"), ("", ""), ("ada", ""), ("ada", "péss wörd\0"), ("x", "\ud800")]
    assert not any(check(user, password) for user, password in wrong)


def test_pauses_grow_and_are_forgotten() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    pauses = []
    for _ in range(8):
        assert [throttle.begin("a") for _ in range(5)] == [0.0] * 5
        pauses.append(throttle.begin("a"))
        assert throttle.begin("b") == 0.0  # another address is let in
        throttle.succeed("b")
        clock.now += pauses[-1]
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    clock.now += 3601
    assert [throttle.begin("a") for _ in range(6)] == [0.0] * 5 + [60.0]


def test_slow_mistakes_and_right_passwords_are_no_attack() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    for _ in range(50):
        assert throttle.begin("a") == 0.0
        clock.now += 15.1
    for _ in range(50):
        assert throttle.begin("a") == 0.0
        throttle.succeed("a")


def test_many_addresses_together_are_throttled() -> None:
    clock = Clock()
    throttle = Throttle(clock)
    assert [throttle.begin(f"10.0.0.{number}") for number in range(Throttle.MAX_TOTAL_FAILURES)] == [0.0] * 20
    assert throttle.begin("10.9.9.9") == 60.0
    assert len(throttle._attempts) <= 21


def test_addresses_of_one_network_are_one() -> None:
    throttle = Throttle(Clock())
    assert [throttle.begin(f"2001:db8::{number}") for number in range(6)] == [0.0] * 5 + [60.0]
    assert throttle.begin("2001:db8:0:1::1") == 0.0


def test_the_login_is_refused_during_a_pause() -> None:
    clock = Clock()
    inner = Inner(400, 400, 400, 400, 400, 200)
    login = ThrottledLogin(inner, Throttle(clock))
    assert [ask(login, "POST", "/login/")["status"] for _ in range(7)] == [400] * 5 + [429] * 2
    assert inner.asked == 5
    assert ask(login, "POST", "/login", client="5.6.7.8")["status"] == 200
    assert ask(login, "POST", "/upload")["status"] == 200  # all else goes on
    clock.now += 60
    assert ask(login, "POST", "/login")["status"] == 200


def test_wrong_passwords_at_the_same_time_are_all_counted() -> None:
    """Each request is taken in before its password is looked at, so that none slips in beside another."""
    started = asyncio.Event()
    statuses: list[int] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await started.wait()
        await send({"type": "http.response.start", "status": 400, "headers": []})

    async def send(message: Any) -> None:
        if "status" in message:
            statuses.append(message["status"])

    async def all_at_once() -> None:
        login = ThrottledLogin(slow, Throttle(Clock()))
        scope = {"type": "http", "method": "POST", "path": "/login", "headers": [], "client": ("1.1.1.1", 1)}
        requests = [asyncio.create_task(login(scope, send, send)) for _ in range(50)]
        await asyncio.sleep(0)
        started.set()
        await asyncio.gather(*requests)

    asyncio.run(all_at_once())
    assert (statuses.count(400), statuses.count(429)) == (5, 45)


# -- the request -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "0"], "port='0' is not a port"),
        (["--port", "70000"], "port='70000' is not a port"),
        (["--port", "7860; id"], "is not a port"),
        (["--host", "0.0.0.0"], "add --auth USER"),  # noqa: S104
        (["--host", "a;b"], "is not a host"),
        (["--host", "256.1.1.1", "--auth", "me"], "no password is set"),
        (["--auth", "a\nb"], "is not a user name"),
        (["--auth", "me"], "no password is set; set TUNESMITH_UI_PASSWORD"),
        (["--allow", "nowhere"], "allow='nowhere' is not a folder"),
        (["--runs_dir", "/proc/none"], "runs_dir='/proc/none'"),
    ],
)
def test_a_wrong_request_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", open(os.devnull, encoding="utf-8"))  # noqa: SIM115
    assert run_verb(["ui", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.usefixtures("elsewhere")
def test_a_short_password_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNESMITH_UI_PASSWORD", "seven77")
    assert run_verb(["ui", "--auth", "me"]) == 2
    errors = capsys.readouterr().err
    assert "7 characters" in errors
    assert "seven77" not in errors


def test_the_next_free_port_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with listen("127.0.0.1", None, DEFAULT_PORT) as first, listen("127.0.0.1", None, DEFAULT_PORT) as second:
        ports = [one.getsockname()[1] for one in (first, second)]
        assert DEFAULT_PORT <= ports[0] < ports[1]
        with pytest.raises(ValueError, match=f"port={ports[0]} is in use"):
            listen("127.0.0.1", ports[0], DEFAULT_PORT)
    assert f"using port {ports[1]}" in capsys.readouterr().err


def test_a_missing_gradio_is_said(tmp_path: Path) -> None:
    code = "import sys; sys.modules['gradio'] = None; from app.cli import run_verb; print(run_verb(['ui']))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.stdout.strip() == "2"
    assert 'pip install "tunesmith[ui]"' in done.stderr
