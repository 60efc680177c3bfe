"""A real server in an empty folder, and a real browser: a test fails, and is never skipped, where there is none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from tests.forked import Popen

WIDE = (1440, 900)
PHONE = (390, 844)
SIZES = {"wide": WIDE, "phone": PHONE}
THEMES = ("light", "dark", "contrast")
SHAPES = [
    pytest.param(size, scheme, marks=[] if (size == "phone") == (scheme == "dark") else pytest.mark.long)
    for size in SIZES
    for scheme in THEMES
]
"""`make check` sees both sizes and all themes once; `make browser` each size in each theme."""
SHIFT_LIMIT = 0.05
"""Largest layout shift of a page, as a browser counts it, from its first paint until it is whole."""
TIMEOUT = 120.0
"""Seconds that anything may take on a busy machine; nothing waits that long when all is well."""

_COUNT_SHIFTS = """window.shifts = 0; window.moved = [];
const place = (rect) => [rect.x, rect.y, rect.width, rect.height].map(Math.round).join(" ");
const name = (node) => node?.id || node?.parentElement?.id || node?.className || node?.nodeName;
new PerformanceObserver((list) => {
  for (const shift of list.getEntries()) if (!shift.hadRecentInput) {
    window.shifts += shift.value;
    const sources = shift.sources.map(
      ({node, previousRect, currentRect}) => [name(node), place(previousRect), place(currentRect)]
    );
    window.moved.push([Math.round(shift.startTime), shift.value, sources]);
  }
}).observe({type: "layout-shift", buffered: true});"""
_STILL = """() => Promise.all(document.getAnimations()
  .filter((one) => one.effect.getComputedTiming().endTime !== Infinity).map((one) => one.finished.catch(() => 0)))"""
_IS_TOO_WIDE = """[document.documentElement, document.querySelector(".gradio-container")]
  .some((box) => box.scrollWidth > box.clientWidth || box.getBoundingClientRect().right > innerWidth)"""
# Gradio's open request of a page that is being left.
_LEFT = ("signal is aborted", "BodyStreamBuffer was aborted", "Connection errored out")


class Served:
    """A running `tunesmith ui`.

    Args:
        folder: where it is started; runs go to `runs` in it, the state folder is `state`.
        options: further words of the command line.
        environment: further variables.
    """

    def __init__(self, folder: Path, *options: str, **environment: str):
        self.folder, self.options, self.environment = folder, options, environment
        folder.mkdir(parents=True, exist_ok=True)
        self.seconds = 0.0
        self.port: str | None = None
        self.start()

    @property
    def runs_dir(self) -> Path:
        return self.folder / "runs"

    @property
    def said(self) -> str:
        """What it has printed on stderr."""
        return (self.folder / "ui.err").read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        """Starts it, on the port it had before, and waits until it says its address."""
        port = ["--port", self.port] if self.port else []
        argv = [sys.executable, "-P", "-m", "app.cli", "ui", *port, *self.options]
        own = {"XDG_STATE_HOME": str(self.folder / "state"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        root = str(Path(__file__).resolve().parents[2])
        began = time.monotonic()
        with open(self.folder / "ui.out", "wb") as out, open(self.folder / "ui.err", "wb") as err:
            self.process = Popen(
                argv, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                env={**os.environ, "PYTHONPATH": root, **own, **self.environment},
            )  # fmt: skip
        try:
            wait_for(lambda: self._address() or self.process.poll() is not None, "the server's address")
        except AssertionError:
            self.process.kill()
            raise
        self.seconds = time.monotonic() - began
        assert self.process.poll() is None, self.said
        self.url = self._address()
        self.port = self.url.rpartition(":")[2]

    def _address(self) -> str:
        text = (self.folder / "ui.out").read_text(encoding="utf-8")
        return text.strip() if text.endswith("\n") else ""

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> int:
        """Sends it a signal, and waits for its exit status."""
        self.process.send_signal(sig)
        return self.process.wait(timeout=TIMEOUT)

    def restart(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """Ends it with a signal and starts it again on the same port."""
        self.stop(sig)
        self.start()


def wait_for(found: Callable[[], object], what: str, timeout: float = TIMEOUT) -> None:
    """Returns once `found()` is true; fails with `what` when that takes too long."""
    deadline = time.monotonic() + timeout
    while not found():
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s in vain for {what}"
        time.sleep(0.05)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts a server: `serve(*options, **environment)`; the folder is the test's own."""
    started: list[Served] = []

    def start(*options: str, **environment: str) -> Served:
        started.append(Served(tmp_path / f"server-{len(started)}", *options, **environment))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server with an empty runs folder, for all tests that only look."""
    served = Served(tmp_path_factory.mktemp("ui"))
    yield served
    served.stop()


def open_chromium(playwright: Playwright) -> Browser:
    """Opens the system's Chromium, else the one that Playwright installed."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-dev-shm-usage"])


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """See `open_chromium`."""
    with sync_playwright() as playwright:
        opened = open_chromium(playwright)
        yield opened
        opened.close()


class Tabs:
    """Opens pages, each in a context of its own, and keeps what goes wrong in them.

    Args:
        browser: where they are opened.
        server: whose pages they are, unless `open` is told another.
    """

    def __init__(self, browser: Browser, server: Served):
        self.browser, self.server = browser, server
        self.errors: list[str] = []
        self.outside: list[str] = []

    def __call__(
        self, path: str = "/", size: str = "wide", scheme: str = "light", server: Served | None = None
    ) -> Page:
        """A new tab with a page, whose heading is there.

        Args:
            path: e.g. `/runs`.
            size: `wide` (1440x900) or `phone` (390x844).
            scheme: `light` or `dark`, which the system asks for, or `contrast`, which this browser has chosen.
            server: default: the shared one.
        """
        width, height = SIZES[size]
        asked = scheme if scheme != "contrast" else "light"
        context = self.browser.new_context(viewport={"width": width, "height": height}, color_scheme=asked)
        context.set_default_timeout(1000 * TIMEOUT)
        page, url = context.new_page(), (server or self.server).url
        page.add_init_script(_COUNT_SHIFTS)
        if scheme == "contrast":
            page.add_init_script("localStorage.setItem('tunesmith-theme', 'contrast')")
        page.on("console", lambda line: self._hear(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: self._hear(str(error)))
        page.on("request", lambda request: self._note(request.url, url))
        page.goto(url + path)
        page.wait_for_selector("h1")
        page.wait_for_load_state("load")
        return page

    def _hear(self, error: str) -> None:
        if not any(sign in error for sign in _LEFT):
            self.errors.append(error)

    def _note(self, address: str, url: str) -> None:
        if not address.startswith((f"{url}/", "data:", "blob:")):
            self.outside.append(address)


@pytest.fixture
def new_page(browser: Browser, server: Served, serve: Callable[..., Served]) -> Iterator[Tabs]:
    """Opens pages; in the end no console may hold an error, and nothing but the server may have been asked.

    A test that expects errors, as when it ends the server, clears `new_page.errors` itself. Pages are closed before
    the servers of `serve` end.
    """
    tabs = Tabs(browser, server)
    yield tabs
    for context in browser.contexts:
        context.close()
    assert tabs.errors == []
    assert tabs.outside == []


def choose_strategy(page: Page, name: str) -> None:
    """Picks the card of a strategy, also one that is folded away."""
    card = page.locator(f"#strategy-cards input[value={name}]")
    card.wait_for(state="attached")
    if not card.is_visible():
        page.locator("#strategy-cards summary").click()
    card.check()


def axe(page: Page) -> None:
    """Fails when axe-core finds a fault of any severity on the page that is there at a second look too.

    A part that the server has just sent is pale for a moment.
    """
    assert (_faults(page) and _faults(page)) == []


def _faults(page: Page) -> list[str]:
    page.evaluate(_STILL)
    found = Axe().run(page).response["violations"]
    return [f"{fault['id']}: {node['target']} {node['html'][:200]}" for fault in found for node in fault["nodes"]]


def is_too_wide(page: Page) -> bool:
    """Whether something lies beyond the right edge of the window: there to scroll to, or cut off by Gradio's box."""
    return bool(page.evaluate(_IS_TOO_WIDE))


def is_whole(page: Page) -> None:
    """Waits until the page is shown; fails when it moved, or is wider than the window."""
    page.wait_for_selector("html[data-shown]", state="attached")
    assert not is_too_wide(page)
    assert page.evaluate("window.shifts") <= SHIFT_LIMIT, page.evaluate("window.moved")


def screenshot(page: Page, name: str) -> None:
    """Keeps a picture in the folder that TUNESMITH_SCREENSHOTS names; without it, nothing."""
    folder = os.environ.get("TUNESMITH_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(folder) / f"{name}.png"))
