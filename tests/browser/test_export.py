"""Exports on the Run page: one that runs is seen and stopped, and its result outlives the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.sync_api import Browser, expect

from app.runs.exports import EXPORTS
from tests.browser.conftest import TIMEOUT, Served, Tabs, axe, is_whole, screenshot, wait_for
from tests.launching import launch_well
from trainers.run.folder import RunFolder

expect.set_options(timeout=1000 * TIMEOUT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a real run of one step."""
    folder = tmp_path_factory.mktemp("export")
    options: dict[str, Any] = {"preset": "tiny-lora", "max_steps": 1, "max_train_samples": 60, "global_batch_size": 4}
    options |= {"eval_dataset_name": "none", "cache_dir": folder / "cache"}
    launch_well(folder / "runs" / "mine", 1, options, XDG_STATE_HOME=str(folder / "state"), CUDA_VISIBLE_DEVICES="")
    served = Served(folder)
    yield served
    served.stop()


def program_of(run: RunFolder) -> psutil.Process | None:
    """The program that exports, once it writes."""
    process = EXPORTS.of(run)[0].process() if EXPORTS.of(run) else None
    children = psutil.Process(process.pid).children() if process and list(run.path.glob(".export-merged.*")) else []
    return children[0] if children else None


@pytest.mark.long
@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), ("phone", "dark")])
def test_an_export_is_stopped_and_started_again(size: str, scheme: str, browser: Browser, server: Served) -> None:
    tabs, run = Tabs(browser, server), RunFolder(server.runs_dir / "mine")
    page = tabs("/run?run=mine", size=size, scheme=scheme)
    status, stop = page.locator("#run-export-status"), page.locator("#run-export-stop")

    def start() -> None:
        page.locator("#run-export").click()
        page.get_by_label("Merge the adapter into the base").check()
        axe(page)
        page.locator("#sure-export").click()

    start()
    wait_for(lambda: program_of(run) is not None, "the program that exports")
    program = program_of(run)
    assert program is not None
    program.suspend()
    expect(status).to_contain_text(re.compile("reading the checkpoint|writing the weights|loading it back"))
    expect(stop).to_be_visible()
    screenshot(page, f"export-running-{size}-{scheme}")
    page = page.context.pages[0]
    page.reload()
    stop.click()
    program.resume()
    expect(status).to_contain_text("The export was stopped; nothing of it was left.")
    assert not [*run.path.glob(".export-merged.*")]
    start()
    expect(status).to_contain_text(f"The model is in {run.path / 'export-merged'}")
    expect(status).to_contain_text("same")
    expect(stop).to_be_hidden()
    axe(page)
    is_whole(tabs("/run?run=mine", size=size, scheme=scheme))
    screenshot(page, f"export-done-{size}-{scheme}")
    assert Path(run.path, "export-merged", "model.safetensors").exists()
    for context in browser.contexts:
        context.close()
    assert tabs.errors == []
