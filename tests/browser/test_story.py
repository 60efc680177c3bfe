"""The whole story, from an empty folder to an exported model, as a person lives it; and by Gradio's client."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from urllib.parse import parse_qs, urlparse

import pytest
from gradio_client import Client  # type: ignore[import-untyped]
from playwright.sync_api import Page, expect

from app.runs.runs import last_checkpoint, processes_in, true_state
from tests.browser.conftest import TIMEOUT, Served, Tabs, choose_strategy, screenshot, wait_for
from trainers.run.folder import RunFolder

LONG = 400.0
"""Seconds for what trains, on a busy machine."""
SMALL = {"max_train_samples": "200", "max_length": "128", "eval_dataset_name": "none"}
STEPS = 200


@pytest.fixture(autouse=True)
def patient() -> None:
    """A busy machine may take its time."""
    expect.set_options(timeout=1000 * TIMEOUT)


def fill(page: Page, name: str, value: str) -> None:
    page.locator(f"#opt-{name} input").fill(value)


def state_of(run: RunFolder) -> str:
    return str(true_state(run)["state"])


def step_of(run: RunFolder) -> int:
    return int((run.read_state() or {}).get("step") or 0)


def alive(run: RunFolder) -> list[int]:
    """Processes that the state names and that live, the supervisor among them."""
    return [process.pid for process in processes_in(run.read_state() or {}) if process.alive()]


def started(page: Page, server: Served) -> RunFolder:
    """The run whose page has opened."""
    page.wait_for_url(re.compile(r"/run\?run="), timeout=1000 * TIMEOUT)
    (run_id,) = parse_qs(urlparse(page.url).query)["run"]
    return RunFolder(server.runs_dir / run_id)


def launch(new_page: Tabs, server: Served) -> tuple[Page, RunFolder]:
    """Fills the form as a person does, looks at the preview, and starts the run."""
    page = new_page("/", server=server)
    expect(page.locator(".ts-verdict-good")).to_be_visible()
    choose_strategy(page, "fsdp2")
    for name, value in {"max_steps": str(STEPS), "max_length": "128", "global_batch_size": "8"}.items():
        fill(page, name, value)
    fill(page, "save_steps", "1000")
    expect(page.locator("#train-command pre")).to_contain_text("--save_steps 1000")
    command = page.locator("#train-command pre").inner_text()
    assert "accelerate_configs/fsdp2.yaml" in command
    assert f"--max_steps {STEPS}" in command
    page.get_by_role("button", name="Start training").click()
    run = started(page, server)
    expect(page.get_by_label("Tell me when it ends")).to_be_checked()
    return page, run


def test_the_whole_story(new_page: Tabs, serve: Callable[..., Served]) -> None:
    server = serve()
    page, run = launch(new_page, server)
    wait_for(lambda: step_of(run) >= 3, "three steps", LONG)

    # The numbers move without a refresh, and stand on a refreshed page and in a second tab as well.
    steps = page.locator(".ts-facts + *, .ts-run-name + *").first
    before = steps.inner_text()
    wait_for(lambda: steps.inner_text() != before, "a step that is shown without a refresh")
    expect(page.locator(".ts-run-name")).to_contain_text("running")
    page.reload()
    expect(page.locator(".ts-run-name")).to_contain_text(run.id)
    second = new_page(f"/run?run={run.id}", "phone", "dark", server)
    expect(second.locator(".ts-run-name")).to_contain_text("running")

    # The server is killed and started again: the run goes on, and the open page finds it.
    reached, ranks = step_of(run), alive(run)
    server.restart(signal.SIGKILL)
    wait_for(lambda: step_of(run) > reached, "a step while the server was away", LONG)
    assert alive(run) == ranks
    before = steps.inner_text()
    wait_for(lambda: steps.inner_text() != before, "a step that the open page shows again")
    expect(page.locator(".ts-run-name")).to_contain_text("running")

    page.locator("#run-stop").click()
    wait_for(lambda: state_of(run) == "stopped", "the stop", LONG)
    wait_for(lambda: not alive(run), "the end of its processes")
    stopped_at = step_of(run)
    assert 0 < stopped_at < STEPS
    assert last_checkpoint(run) == f"step-{stopped_at:08d}"
    expect(page.locator(".ts-run-name")).to_contain_text("stopped")
    expect(page.get_by_text(f"step-{stopped_at:08d}").first).to_be_visible()

    page.locator("#run-resume").click()
    wait_for(lambda: state_of(run) == "done", "the end of the resumed run", LONG)
    assert step_of(run) == STEPS
    expect(page.locator(".ts-run-name")).to_contain_text("done")
    screenshot(page, "story-run-wide-light")

    other = by_client(server)
    compare_and_chat(new_page, server, run, other)
    export(page, run)
    # Killing the server broke connections of open pages, which the browser notes.
    new_page.errors[:] = [line for line in new_page.errors if "ERR_" not in line and "Failed to fetch" not in line]


_COUNT_CLICKS = """addEventListener("click", (event) => {
  if (event.isTrusted) sessionStorage.setItem("clicks", 1 + Number(sessionStorage.getItem("clicks")));
}, true)"""


def test_three_clicks_lead_from_an_empty_folder_to_a_step_of_training(
    new_page: Tabs, serve: Callable[..., Served]
) -> None:
    server = serve()
    assert not list(server.runs_dir.glob("*/config.yaml"))
    page = new_page("/", server=server)
    page.evaluate(_COUNT_CLICKS)
    page.get_by_role("button", name="Start the two-minute demo").click()
    run = started(page, server)
    wait_for(lambda: step_of(run) >= 1, "a step", LONG)
    expect(page.locator(".ts-run-name")).to_contain_text("running")
    expect(page.locator(".ts-facts")).to_contain_text("Loss")
    assert 1 <= page.evaluate("Number(sessionStorage.getItem('clicks'))") <= 3
    page.locator("#run-stop_without_saving").click()
    page.locator("#sure-stop_without_saving").click()
    wait_for(lambda: state_of(run) == "stopped", "the stop", LONG)
    wait_for(lambda: not alive(run), "the end of its processes")


def by_client(server: Served) -> RunFolder:
    """A second run, started by Gradio's client."""
    client = Client(server.url, verbose=False)
    options = {**SMALL, "max_steps": "5", "learning_rate": "1e-3"}
    request = {"preset": "tiny-lora", "strategy": "single", "num_processes": 1, "options": options}
    assert client.predict(request, api_name="/preview")["errors"] == {}
    made = client.predict(request, api_name="/launch")
    run = RunFolder(made["run_dir"])
    wait_for(lambda: state_of(run) == "done", "the run of the client", LONG)
    return run


def compare_and_chat(new_page: Tabs, server: Served, run: RunFolder, other: RunFolder) -> None:
    """Both runs overlaid, what differs between them; and base and tuned answering the same message."""
    page = new_page(f"/compare?runs={run.id},{other.id}", server=server)
    expect(page.get_by_role("row", name=re.compile("learning_rate"))).to_be_visible()
    expect(page.locator("canvas").first).to_be_visible()
    page = new_page(f"/chat?run={run.id}", server=server)
    expect(page.get_by_label("Run or base model")).to_have_value(run.id)  # the address has filled the fields
    page.get_by_label("Message", exact=True).fill("title: Sea; year: 1999. Write it as XML.")
    page.get_by_role("button", name="Send").click()
    for pane in ("first", "second"):
        expect(page.locator(f"#chat-{pane} .ts-model .ts-raw").first).not_to_be_empty(timeout=1000 * LONG)
    expect(page.locator("#chat-status")).to_contain_text("loaded", timeout=1000 * LONG)
    page.get_by_role("button", name="Free").click()
    expect(page.locator("#chat-status")).to_contain_text("No model is loaded")


def export(page: Page, run: RunFolder) -> None:
    """Merged weights, from the run's page."""
    page.locator("#run-export").click()
    page.get_by_label("Merge the adapter into the base").check()
    page.locator("#sure-export").click()
    status = page.locator("#run-export-status")
    expect(status).to_contain_text(f"The model is in {run.path / 'export-merged'}", timeout=1000 * LONG)
    expect(status).to_contain_text(re.compile(r"greedy text of \d+ tokens is the same"))
    assert (run.path / "export-merged" / "model.safetensors").exists()


@pytest.mark.usefixtures("two_cores")
@pytest.mark.long
def test_a_third_run_waits_and_is_cancelled(new_page: Tabs, serve: Callable[..., Served]) -> None:
    server = serve()
    client = Client(server.url, verbose=False)
    options = {**SMALL, "max_steps": "100000", "save_steps": "0"}
    request = {"preset": "tiny-lora", "strategy": "single", "num_processes": 1, "options": options}
    first, second = (RunFolder(client.predict(request, api_name="/launch")["run_dir"]) for _ in range(2))
    wait_for(lambda: state_of(first) == state_of(second) == "running", "two runs at once", LONG)
    third = RunFolder(client.predict(request, api_name="/launch")["run_dir"])
    page = new_page(f"/run?run={third.id}", server=server)
    expect(page.locator(".ts-run-name")).to_contain_text("queued")
    page.locator("#run-cancel").click()
    wait_for(lambda: state_of(third) == "stopped", "the cancelled run")
    assert step_of(third) == 0
    for run in (first, second):
        page = new_page(f"/run?run={run.id}", server=server)
        page.locator("#run-stop_without_saving").click()
        page.locator("#sure-stop_without_saving").click()
        wait_for(lambda run=run: state_of(run) == "stopped", "the stop without saving", LONG)  # type: ignore[misc]
        assert last_checkpoint(run) is None
        wait_for(lambda run=run: not alive(run), "the end of its processes")  # type: ignore[misc]


def test_a_failed_run_says_why_and_what_to_do(new_page: Tabs, serve: Callable[..., Served]) -> None:
    server = serve()
    client = Client(server.url, verbose=False)
    options = {**SMALL, "max_steps": "100000", "max_restarts": "0"}
    request = {"preset": "tiny-full", "strategy": "single", "num_processes": 1, "options": options}
    run = RunFolder(client.predict(request, api_name="/launch")["run_dir"])
    wait_for(lambda: step_of(run) >= 1, "a step", LONG)
    (rank,) = [process for process in processes_in(run.read_state() or {}) if process.role == "rank"]
    os.kill(rank.pid, signal.SIGKILL)
    wait_for(lambda: state_of(run) == "failed", "the failure", LONG)
    page = new_page(f"/run?run={run.id}", server=server)
    expect(page.locator(".ts-run-name")).to_contain_text("failed")
    expect(page.get_by_role("alert").first).to_contain_text("rank 0 was killed by SIGKILL")
    expect(page.locator("#run-resume")).to_be_visible()
    screenshot(page, "story-failed-wide-light")
