"""Startup time of `tunesmith ui`, and the server's CPU time for an idle page: `python -m benchmarks.ui_idle`.

Needs Chromium and an otherwise idle machine: the figures are CPU time of the server over wall time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("/", "/data", "/runs", "/compare", "/chat", "/system")
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


def percent(process: psutil.Process) -> float:
    """CPU time of a process in percent of a core, over `WATCHED` seconds."""
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(WATCHED)
    after, seconds = process.cpu_times(), time.monotonic() - began
    return 100 * (after.user + after.system - before.user - before.system) / seconds


def main() -> None:
    """Prints a line for every figure."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(STARTS):
            server, url, seconds = start(Path(folder))
            print(f"ready after {seconds:.2f} s", flush=True)
            if number < STARTS - 1:
                server.terminate()
                server.wait()
        process = psutil.Process(server.pid)
        time.sleep(SETTLE)
        print(f"{'no page':<10} {percent(process):.2f} % of a core", flush=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for path in PAGES:
                page = browser.new_page()
                page.goto(url + path)
                page.wait_for_selector("h1")
                time.sleep(SETTLE)
                print(f"{path:<10} {percent(process):.2f} % of a core", flush=True)
                page.close()
            browser.close()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
