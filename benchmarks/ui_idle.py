"""Startup time of `tunesmith ui`, what its pages cost at first view and when idle: `python -m benchmarks.ui_idle`.

First views are those of a cold browser. `gradio's own empty page` is that of an app without components: no page of ours
can be whole before it. Needs Chromium and an otherwise idle machine. Percentages are CPU time of the server over wall
time. What a first view transfers is counted without Gradio's own scripts and styles. The run on the pages stands still,
except in the last line: there it logs `STEPS_PER_SECOND` steps per second, so that every tab fetches new numbers,
curves and lines of the log at each poll. A watched run is asked for by one tab of the browser, every five seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from tests.made_runs import BEGUN, made_run
from trainers.run.folder import Process, RunFolder

ROOT = Path(__file__).resolve().parent.parent
RUN = "/run?run=live"
PAGES = ("/", "/data", "/runs", RUN, "/compare?runs=live", "/evaluate", "/chat", "/system")
LIVE_TABS = 8
STEPS = 600
"""Steps of the run before it moves."""
STEPS_PER_SECOND = 2.0
STARTS = 3
SETTLE = 5.0
"""Seconds for a page to render."""
WATCHED = 12.0
"""Seconds over which the idle page is measured."""


def start(folder: Path) -> tuple[subprocess.Popen[str], str, float]:
    """Starts a server in an empty folder; returns it, its address, and the seconds until it printed the address."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state")}
    began = time.monotonic()
    server = subprocess.Popen(
        [sys.executable, "-P", "-m", "app.cli", "ui"], cwd=folder, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert server.stdout is not None
    return server, server.stdout.readline().strip(), time.monotonic() - began


_EMPTY = """import gradio as gr
with gr.Blocks() as app:
    pass
app.launch(ssr_mode=False)"""
_SEE_MAIN = """new MutationObserver((_, observer) => {
  if (!document.querySelector(".gradio-container main")) return;
  performance.mark("ts-shown");
  observer.disconnect();
}).observe(document, { childList: true, subtree: true });"""


def view_empty_page(browser: Browser) -> None:
    """Opens the page of an app without components; it counts as whole once Gradio has drawn its frame."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "GRADIO_ANALYTICS_ENABLED": "False"}
    server = subprocess.Popen([sys.executable, "-P", "-c", _EMPTY], env=env, text=True, stdout=subprocess.PIPE)
    assert server.stdout is not None
    try:
        address = next(line.split()[-1] for line in server.stdout if "http://" in line)
        page = browser.new_page()
        page.add_init_script(_SEE_MAIN)
        page.goto(address)
        page.wait_for_function("performance.getEntriesByName('ts-shown').length")
        _print_view(page, "gradio's own empty page")
        page.close()
    finally:
        server.terminate()
        server.wait()


def percent(process: psutil.Process) -> float:
    """CPU time of a process in percent of a core, over `WATCHED` seconds."""
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(WATCHED)
    after, seconds = process.cpu_times(), time.monotonic() - began
    return 100 * (after.user + after.system - before.user - before.system) / seconds


def add_live_run(folder: Path) -> RunFolder:
    """A run that never ends: its supervisor is this process."""
    supervisor = Process.of("supervisor", pid=os.getpid()).as_json()
    return made_run(folder / "runs", "live", "running", steps=STEPS, total_steps=1000, processes=[supervisor])


@contextmanager
def moving(run: RunFolder) -> Iterator[None]:
    """Adds steps to a run, as a trainer of two ranks would: a row of metrics, a line of the log per rank, the state."""
    row = next(json.loads(line) for line in run.metrics.read_text().splitlines() if "grad_norm" in line)
    over, begun = threading.Event(), BEGUN.isoformat(timespec="milliseconds")

    def move() -> None:
        step = STEPS
        while not over.wait(1 / STEPS_PER_SECOND):
            step += 1
            with open(run.metrics, "a", encoding="utf-8") as metrics:
                metrics.write(json.dumps({**row, "step": step}) + "\n")
            with open(run.log, "a", encoding="utf-8") as log:
                log.writelines(f"{begun} [rank {rank}] step {step} loss 0.4\n" for rank in range(2))
            run.write_state(step=step)

    thread = threading.Thread(target=move)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def view(browser: Browser, address: str) -> Page:
    """Opens a page, and prints when it was whole, and what was transferred for it."""
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector("html[data-shown]", state="attached", timeout=60_000)
    _print_view(page, address.rpartition("/")[2] or "train")
    return page


def _print_view(page: Page, name: str) -> None:
    milliseconds, size = page.evaluate(_FIRST_VIEW)
    print(f"{name:<22} whole after {milliseconds:.0f} ms, {size / 1000:.0f} kB", flush=True)


_FIRST_VIEW = """() => [performance.getEntriesByName("ts-shown")[0].startTime,
  [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
    .filter(entry => !/\\/(assets|static)\\//.test(entry.name)).reduce((sum, entry) => sum + entry.transferSize, 0)]"""


def main() -> None:
    """Prints a line for every figure."""
    with tempfile.TemporaryDirectory() as folder:
        run = add_live_run(Path(folder))
        for number in range(STARTS):
            server, url, seconds = start(Path(folder))
            print(f"ready after {seconds:.2f} s", flush=True)
            if number < STARTS - 1:
                server.terminate()
                server.wait()
        process = psutil.Process(server.pid)
        time.sleep(SETTLE)
        print(f"{'no page':<22} {percent(process):.2f} % of a core", flush=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            view_empty_page(browser)
            for path in PAGES:
                page = view(browser, url + path)
                time.sleep(SETTLE)
                print(f"{path:<22} {percent(process):.2f} % of a core", flush=True)
                if path == PAGES[-1]:
                    page.evaluate("id => Notices.watch(id)", run.id)
                    print(f"{'a watched run':<22} {percent(process):.2f} % of a core", flush=True)
                page.close()
            for _ in range(LIVE_TABS):
                view(browser, url + RUN)
            time.sleep(SETTLE)
            print(f"{f'{LIVE_TABS} live tabs':<22} {percent(process):.2f} % of a core", flush=True)
            with moving(run):
                time.sleep(SETTLE)
                print(f"{f'{LIVE_TABS} tabs, moving run':<22} {percent(process):.2f} % of a core", flush=True)
            browser.close()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
