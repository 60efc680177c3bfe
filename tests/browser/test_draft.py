"""What was filled in on Train and Data outlives moving about, Back and reload, in each tab its own."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import TIMEOUT, Served, Tabs, axe, choose_strategy, screenshot, wait_for
from tests.made_runs import add_sealed_checkpoint, made_run, manifest_tensors
from trainers.config.validation import build
from trainers.config.yaml_file import parse_yaml
from trainers.model.load import build_model
from trainers.run.folder import RunFolder

expect.set_options(timeout=1000 * TIMEOUT)


def value(page: Page, option: str) -> str:
    return page.locator(f"#opt-{option} input, #opt-{option} textarea").first.input_value()


def fill(page: Page, option: str, text: str) -> None:
    page.locator(f"#opt-{option} input, #opt-{option} textarea").first.fill(text)


def filled(page: Page) -> None:
    """Waits until the Train page has its first preview: what is typed before is filled over."""
    expect(page.locator("#train-command pre, #train-command .ts-note")).to_be_visible()


def drafted(page: Page, option: str, text: str) -> None:
    """Waits until the tab keeps it."""
    draft = "JSON.parse(sessionStorage.getItem('tunesmith-draft') || '{}')"
    wait_for(lambda: page.evaluate(f"({draft}.options || {{}}).{option}") == text, f"a draft with {option}={text}")


def leave(page: Page, words: str) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name=words, exact=True).click()
    page.wait_for_load_state("load")


def test_the_form_outlives_moving_about_back_and_reload(new_page: Tabs) -> None:
    page = new_page("/")
    filled(page)
    fill(page, "max_steps", "7")
    fill(page, "dataset_name", "me/mine")
    choose_strategy(page, "fsdp2")
    drafted(page, "max_steps", "7")
    drafted(page, "dataset_name", "me/mine")
    expect(page.locator("#train-command")).to_contain_text("fsdp2")
    leave(page, "Data")
    wait_for(lambda: value(page, "dataset_name") == "me/mine", "the draft on the Data page")
    fill(page, "dataset_name", "me/other")
    drafted(page, "dataset_name", "me/other")
    leave(page, "Train")
    filled(page)
    wait_for(lambda: value(page, "max_steps") == "7", "the draft on the Train page")
    assert (value(page, "dataset_name"), value(page, "strategy")) == ("me/other", "fsdp2")
    expect(page.locator("#strategy-cards input:checked")).to_have_value("fsdp2")
    leave(page, "Runs")
    page.go_back()
    wait_for(lambda: value(page, "max_steps") == "7", "the form after Back")
    page.reload()
    filled(page)
    wait_for(lambda: value(page, "max_steps") == "7", "the form after a reload")
    assert value(page, "dataset_name") == "me/other"
    other = new_page("/")
    filled(other)
    assert value(other, "max_steps") != "7", "another tab has a draft of its own"
    page.get_by_role("button", name="Start over").click()
    wait_for(lambda: page.locator("#opt-max_steps input").count() and value(page, "max_steps") == "", "a fresh form")
    assert value(page, "dataset_name") == "embedded"


@pytest.mark.long
def test_a_link_wins_over_the_draft_and_its_form_survives_too(serve: Callable[..., Served], new_page: Tabs) -> None:
    server = serve()
    made_run(server.runs_dir, "mine", config={"max_steps": 60})
    page = new_page("/", server=server)
    filled(page)
    fill(page, "max_steps", "7")
    drafted(page, "max_steps", "7")
    page.goto(f"{server.url}/?clone=mine")
    filled(page)
    wait_for(lambda: value(page, "max_steps") == "60", "the clone's form")
    fill(page, "max_steps", "61")
    drafted(page, "max_steps", "61")
    page.reload()
    filled(page)
    wait_for(lambda: value(page, "max_steps") == "61", "the changed clone")


def test_train_on_this_takes_the_data_along(serve: Callable[..., Served], new_page: Tabs) -> None:
    server = serve()
    made_run(server.runs_dir, "mine", config={"max_length": 96})
    page = new_page("/", server=server)
    filled(page)
    fill(page, "max_steps", "7")
    drafted(page, "max_steps", "7")
    page.goto(f"{server.url}/data?run=mine")
    wait_for(lambda: value(page, "max_length") == "96", "the run's data")
    page.locator("#data-train").click()
    page.wait_for_url(f"{server.url}/")
    filled(page)
    wait_for(lambda: value(page, "max_length") == "96", "the data on the Train page")
    assert value(page, "max_steps") == "7", "what was changed by hand stays"


def stopped(server: Served) -> RunFolder:
    """A stopped run with a checkpoint that passes the check before a launch; its files are not there."""
    run = made_run(server.runs_dir, "mine", "stopped", world=1, strategy="single")
    model = build_model(build(parse_yaml(run.config.read_text(), "config")))
    add_sealed_checkpoint(run, 20, tensors=manifest_tensors(model))
    return run


@pytest.mark.long
def test_a_run_goes_on_with_changed_settings(serve: Callable[..., Served], new_page: Tabs) -> None:
    server = serve()
    run = stopped(server)
    page = new_page("/run?run=mine", server=server)
    page.get_by_role("button", name="Resume with changes").click()
    page.wait_for_url("**/?resume=mine")
    expect(page.locator("#train-resume")).to_contain_text("Resuming mine from step 20")
    expect(page.locator("#train-command")).to_contain_text(f"resume {run.path}")
    fill(page, "learning_rate", "1e-5")
    expect(page.locator("#opt-learning_rate .ts-field-error")).to_contain_text("--force")
    expect(page.locator("#launch")).to_be_disabled()
    page.get_by_label("Resume anyway").check()
    expect(page.locator("#train-command")).to_contain_text("--learning_rate=1e-5 --force")
    expect(page.locator("#launch")).to_have_text("Resume")
    axe(page)
    screenshot(page, "train-resume")
    fill(page, "learning_rate", "")
    expect(page.locator("#opt-learning_rate .ts-field-error")).to_be_visible()
    fill(page, "learning_rate", "1e-5")
    expect(page.locator("#launch")).to_be_enabled()
    page.locator("#launch").click()
    page.wait_for_url("**/run?run=mine")
    state = run.path / "state.json"
    wait_for(
        lambda: json.loads(state.read_text())["state"] == "failed", "the end of the run, whose checkpoint is empty"
    )
    assert "step-00000020" in json.loads(state.read_text())["cause"]
    assert "learning_rate: 1.0e-05" in run.config.read_text()
