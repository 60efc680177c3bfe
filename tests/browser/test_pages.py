"""Every page at both sizes, light and dark; and what an attacker on the network or in another tab may try."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, expect

from tests.browser.conftest import SHAPES, SHIFT_LIMIT, Served, Tabs, axe, is_whole, screenshot, wait_for
from tests.forked import BY_HAND

PAGES = ("/", "/data", "/runs", "/run?run=none", "/compare", "/evaluate", "/chat", "/system")
USER, PASSWORD = "ada", "correct horse battery"


@pytest.mark.parametrize(("size", "scheme"), SHAPES)
@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_whole(new_page: Tabs, path: str, size: str, scheme: str) -> None:
    page = new_page(path, size, scheme)
    expect(page.get_by_text("Loading…", exact=False)).to_have_count(0)  # what is live has been drawn
    name = path.strip("/").partition("?")[0] or "train"
    screenshot(page, f"{name}-{size}-{scheme}")
    assert page.locator("h1").count() == 1
    assert page.title().endswith("Tunesmith")
    is_whole(page)
    axe(page)


def test_axe_sees_a_fault(new_page: Tabs) -> None:
    page = new_page("/system")
    page.evaluate("document.querySelector('h1').insertAdjacentHTML('afterend', '<img src=\"data:,\">')")
    with pytest.raises(AssertionError) as told:
        axe(page)
    assert "image-alt" in str(told.value)


def test_a_shift_is_seen(new_page: Tabs) -> None:
    page = new_page("/runs")
    is_whole(page)
    page.evaluate("document.querySelector('h1').insertAdjacentHTML('beforebegin', '<div style=height:300px></div>')")
    wait_for(lambda: page.evaluate("window.shifts") > SHIFT_LIMIT, "a shift that is seen")


def test_a_theme_is_chosen_kept_and_there_before_the_first_paint(new_page: Tabs) -> None:
    page = new_page("/system")
    assert page.evaluate(_PAINTED) == ["light", "rgb(247, 249, 251)"]
    page.get_by_label("Theme").select_option("Dark")
    assert page.evaluate(_PAINTED) == ["dark", "rgb(12, 19, 30)"]
    page.add_init_script(_FIRST_THEMES)
    page.goto(f"{new_page.server.url}/compare")
    is_whole(page)
    assert page.get_by_label("Theme").input_value() == "dark"
    assert page.evaluate("window.paints") == ["dark", "rgb(12, 19, 30)"]
    curve = "getComputedStyle(document.documentElement).getPropertyValue('--ts-curve-1').trim()"
    before = page.evaluate(curve)
    page.get_by_label("Theme").select_option("High contrast")
    assert page.evaluate(_PAINTED) == ["contrast", "rgb(255, 255, 255)"]
    assert page.evaluate(curve) != before
    page.get_by_label("Theme").select_option("System theme")
    page.emulate_media(color_scheme="dark", contrast="more")
    wait_for(lambda: page.evaluate(_PAINTED) == ["contrast-dark", "rgb(0, 0, 0)"], "what the system asks for")
    page.emulate_media(color_scheme="dark", contrast="no-preference", forced_colors="active")
    is_whole(page)


_PAINTED = "[document.documentElement.dataset.theme, getComputedStyle(document.body).backgroundColor]"
# The themes and grounds of all frames until the page is there; one pair when nothing flashed.
_FIRST_THEMES = f"""window.paints = [];
const look = () => {{
  if (document.querySelector('gradio-app')) window.paints = [...new Set([...window.paints, ...{_PAINTED}])];
  requestAnimationFrame(look);
}};
look();"""


def test_the_skip_link_leads_past_the_header(new_page: Tabs) -> None:
    page = new_page("/system")
    is_whole(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.url.endswith("/system")
    expect(page.get_by_role("region", name="Versions")).to_be_focused()


def test_the_links_lead_to_all_pages_and_the_tab_says_which(new_page: Tabs) -> None:
    page = new_page("/")
    assert page.title() == "Train · Tunesmith"
    for name in ("Data", "Runs", "Compare", "Evaluate", "Chat", "System"):
        page.get_by_role("navigation", name="Pages").get_by_role("link", name=name).click()
        page.wait_for_url(f"**/{name.lower()}")
        page.wait_for_selector(f"nav a[aria-current=page]:text-is('{name}')")
        wait_for(lambda name=name: page.title() == f"{name} · Tunesmith", f"the title of {name}")  # type: ignore[misc]


def test_the_system_page_moves(new_page: Tabs) -> None:
    page = new_page("/system")
    load = page.locator("dt:text-is('All cores') + dd")
    load.wait_for()
    before = page.locator(".ts-columns").inner_html()
    wait_for(lambda: page.locator(".ts-columns").inner_html() != before, "another picture of the machine")
    assert page.locator("td:text-is('gradio') + td").inner_text().startswith("6.")


# -- start and end ---------------------------------------------------------------------------------------------------


def test_it_starts_fast_and_without_torch(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BY_HAND, "1")
    server = serve()
    times = psutil.Process(server.process.pid).cpu_times()
    code = "import gradio, os; print(sum(os.times()[:2]))"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert times.user + times.system < 1.5 * float(plain.stdout)  # of 4 s, on a machine that does nothing else
    mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "pydantic_core" in mapped  # the look sees libraries
    assert "libtorch" not in mapped


@pytest.mark.parametrize(("sig", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_quickly_and_quietly(
    serve: Callable[..., Served], new_page: Tabs, sig: signal.Signals, status: int
) -> None:
    server = serve()
    page = new_page("/system", server=server)
    assert server.stop(sig) == status
    assert "Traceback" not in server.said
    assert "error" not in server.said.lower()
    page.context.close()  # it would ask on
    new_page.errors.clear()


def test_two_servers_start_side_by_side(serve: Callable[..., Served]) -> None:
    first, second = serve(), serve()
    assert first.port != second.port
    assert all(httpx.get(server.url).status_code == 200 for server in (first, second))


def test_a_port_that_is_taken_is_refused(server: Served, tmp_path: Path) -> None:
    status, said = _refused(tmp_path, "--port", str(server.port))
    assert status == 2
    assert f"port={server.port} is in use" in said


def test_other_hosts_need_a_password(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", socket.gethostname(), "127.0.0.2"):  # noqa: S104
        status, said = _refused(tmp_path, "--host", host)
        assert status == 2
        assert "add --auth USER" in said


def _refused(folder: Path, *options: str) -> tuple[int, str]:
    argv = [sys.executable, "-m", "app.cli", "ui", *options]
    done = subprocess.run(argv, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


# -- attacks ---------------------------------------------------------------------------------------------------------

_HEADERS = ("Content-Security-Policy", "X-Frame-Options", "X-Content-Type-Options", "Referrer-Policy")


@pytest.mark.parametrize("path", ["/", "/system", "/config", "/gradio_api/info", "/nothing", "/theme.css"])
def test_every_answer_has_the_headers(server: Served, path: str) -> None:
    answer = httpx.get(server.url + path)
    assert [name for name in _HEADERS if name not in answer.headers] == []
    policy = answer.headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in policy
    assert "http" not in policy and "*" not in policy  # noqa: PT018


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7860", "127.0.0.1.evil.example", "127.0.0.1@evil", ""])
def test_a_rebound_name_is_refused(server: Served, host: str) -> None:
    for origin in ({}, {"Origin": f"http://{host}"}):
        assert httpx.get(server.url, headers={"Host": host, **origin}).status_code == 400
    assert httpx.get(server.url, headers={"Host": f"localhost:{server.port}"}).status_code == 200


def test_another_sites_page_can_send_nothing(server: Served) -> None:
    upload = {"files": ("x.jsonl", b"{}\n", "application/json")}
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Origin": server.url, "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert httpx.post(f"{server.url}/gradio_api/upload", files=upload, headers=headers).status_code == 403
        assert httpx.get(f"{server.url}/config", headers=headers).status_code == 403
    own = httpx.post(f"{server.url}/gradio_api/upload", files=upload, headers={"Origin": server.url})
    assert own.status_code == 200
    assert Path(own.json()[0]).is_relative_to(server.runs_dir / ".uploads")


def test_a_link_from_another_site_opens_a_page_and_nothing_else(server: Served) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert httpx.get(f"{server.url}/runs", headers=link).status_code == 200
    assert httpx.get(f"{server.url}/runs", headers={**link, "Sec-Fetch-Dest": "iframe"}).status_code == 403
    assert httpx.get(f"{server.url}/config", headers=link).status_code == 403


def test_another_sites_page_fails_in_a_real_browser(server: Served, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "evil.html").write_text("<h1>evil</h1>")
    page = browser.new_context().new_page()
    page.goto(f"file://{tmp_path}/evil.html")
    before = set((server.runs_dir / ".uploads").rglob("*"))
    statuses: list[int] = []
    page.on("response", lambda answer: statuses.append(answer.status))
    page.evaluate(
        """async (url) => {
          const form = new FormData();
          form.append("files", new Blob(["{}"]), "evil.jsonl");
          await fetch(url + "/gradio_api/upload", {method: "POST", mode: "no-cors", body: form}).catch(() => 0);
        }""",
        server.url,
    )
    assert set((server.runs_dir / ".uploads").rglob("*")) == before
    assert statuses in ([], [403])
    page.context.close()


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd",
        "/gradio_api/file=file:///etc/passwd",
        "/gradio_api/file=../../../../etc/passwd",
        "/gradio_api/file=..%2f..%2f..%2fetc%2fpasswd",
        "/gradio_api/proxy=http://169.254.169.254/latest/meta-data",
        "/gradio_api/proxy=file:///etc/passwd",
        "/svelte/..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/static/..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/assets/..%2f..%2f..%2f..%2fetc%2fpasswd",
        "/monitoring",
        "/docs",
        "/openapi.json",
        "/gradio_api/runs",
        "/gradio_api/mcp/",
    ],
)
def test_no_file_of_the_machine_is_served(server: Served, path: str) -> None:
    answer = httpx.get(server.url + path, follow_redirects=False)
    assert 400 <= answer.status_code < 500
    assert "root:" not in answer.text


def test_a_file_of_a_run_is_not_served(server: Served) -> None:
    secret = server.runs_dir / "secret.txt"
    secret.write_text("nobody reads this")
    for path in (secret, server.folder / "ui.err"):
        answer = httpx.get(f"{server.url}/gradio_api/file={path}")
        assert answer.status_code == 404
    secret.unlink()


def test_a_request_without_end_is_refused(server: Served) -> None:
    big = {"Content-Length": str(17 << 20), "Content-Type": "application/json"}
    with socket.create_connection(("127.0.0.1", int(server.port or 0)), timeout=30) as raw:
        lines = [f"{name}: {value}" for name, value in {"Host": "localhost", **big}.items()]
        raw.sendall("\r\n".join(["POST /gradio_api/queue/join HTTP/1.1", *lines, "", ""]).encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 413")
    chunked = httpx.post(f"{server.url}/gradio_api/queue/join", content=iter([b"{}"]))
    assert chunked.status_code == 411


def test_a_length_that_is_a_lie_brings_no_more_in(serve: Callable[..., Served]) -> None:
    """400 MB behind `Content-Length: 10`, before a password is given: refused, and never in memory."""
    server = serve("--auth", USER, TUNESMITH_UI_PASSWORD=PASSWORD)
    process = psutil.Process(server.process.pid)
    before, chunk = process.memory_info().rss, b"%x\r\n%s\r\n" % (1 << 20, b"x" * (1 << 20))
    for path in ("/login", "/gradio_api/run/predict", "/gradio_api/upload"):
        for length in ("Content-Length: 10\r\n", ""):
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n{length}\r\n"
            with socket.create_connection(("127.0.0.1", int(server.port or 0)), timeout=60) as raw:
                raw.sendall(head.encode())
                with contextlib.suppress(ConnectionError):  # it hangs up as soon as it has answered
                    for _ in range(400):
                        raw.sendall(chunk)
                with contextlib.suppress(ConnectionError):
                    assert raw.recv(100).startswith(b"HTTP/1.1 4")
            assert process.memory_info().rss - before < 40 << 20
    assert httpx.get(server.url).status_code == 200
    assert "Traceback" not in server.said


# -- the password ----------------------------------------------------------------------------------------------------


def _log_in(server: Served, password: str, address: str = "127.0.0.1") -> httpx.Response:
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address)) as client:
        return client.post(f"{server.url}/login", data={"username": USER, "password": password})


def test_nothing_is_told_without_the_password(serve: Callable[..., Served], new_page: Tabs) -> None:
    server = serve("--auth", USER, TUNESMITH_UI_PASSWORD=PASSWORD)
    for path in ("/config", "/gradio_api/info", "/gradio_api/queue/data"):
        assert httpx.get(server.url + path).status_code == 401
    assert "Check this machine" not in httpx.get(f"{server.url}/system").text
    files = {"files": ("x.jsonl", b"{}")}
    assert httpx.post(f"{server.url}/gradio_api/upload", files=files).status_code == 401
    assert httpx.post(f"{server.url}/gradio_api/component_server", json={}).status_code in (401, 422)
    command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    assert PASSWORD.encode() not in command
    assert PASSWORD not in server.said
    with httpx.Client() as client:
        assert client.post(f"{server.url}/login", data={"username": USER, "password": PASSWORD}).status_code == 200
        assert client.get(f"{server.url}/config").status_code == 200
        assert "Check this machine" in client.get(f"{server.url}/system").text


def test_six_quick_wrong_passwords_close_the_door(serve: Callable[..., Served]) -> None:
    server = serve("--auth", USER, TUNESMITH_UI_PASSWORD=PASSWORD)
    assert [_log_in(server, f"wrong {number}").status_code for number in range(6)] == [400] * 5 + [429]
    refused = _log_in(server, PASSWORD)
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) > 30
    assert "too many wrong passwords" in refused.text
    assert _log_in(server, PASSWORD, address="127.0.0.3").status_code == 200


def test_a_person_logs_in(serve: Callable[..., Served], browser: Browser) -> None:
    server = serve("--auth", USER, TUNESMITH_UI_PASSWORD=PASSWORD)
    page = browser.new_context().new_page()
    page.goto(f"{server.url}/system")
    page.get_by_label("username").fill(USER)
    page.get_by_label("password").fill(PASSWORD)
    page.get_by_role("button", name="Login").click()
    page.wait_for_selector("h1:text-is('System')")
    page.context.close()
