"""The whole story by keyboard alone: from an empty folder to a chat with the exported model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import TIMEOUT, Served, Tabs, screenshot, wait_for
from tests.browser.test_keyboard import FOCUSED
from tests.browser.test_story import LONG, alive, started, state_of, step_of

MOST_KEYS = 120
"""Presses of Tab that lead from one end of a page to the other."""
STEPS = 30


@pytest.fixture(autouse=True)
def patient() -> None:
    """A busy machine may take its time."""
    expect.set_options(timeout=1000 * TIMEOUT)


def tab_to(page: Page, selector: str, key: str = "Tab") -> None:
    """Presses Tab until what `selector` names has the focus, which must be seen wherever it stops on the way."""
    page.locator(selector).first.wait_for()
    stops: list[object] = []
    for _ in range(MOST_KEYS):
        page.keyboard.press(key)
        stop, faults = page.evaluate(FOCUSED)
        if not str(stop).startswith("<body"):  # past the last control is the browser itself
            assert faults == []
        stops.append(stop)
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
        assert stops[-4:] != [stop] * 4, f"a trap: {stop}"
    pytest.fail(f"{MOST_KEYS} presses of {key} do not lead to {selector}: {stops}")


def type_into(page: Page, name: str, value: str) -> None:
    """Replaces the value of an option's field, which is reached by Tab."""
    tab_to(page, f"#opt-{name} input")
    page.keyboard.press("Control+A")
    page.keyboard.type(value)


def has_focus(page: Page) -> bool:
    """Whether some control has the focus, rather than the page as a whole."""
    return bool(page.evaluate("document.activeElement !== document.body"))


@pytest.mark.long
def test_the_whole_story_by_keyboard(new_page: Tabs, serve: Callable[..., Served]) -> None:
    server = serve()
    page = new_page("/", server=server)
    page.wait_for_selector("html[data-shown]", state="attached")
    expect(page.locator(".ts-verdict-good")).to_be_visible()
    type_into(page, "max_steps", str(STEPS))
    expect(page.locator("#train-command pre")).to_contain_text(f"--max_steps {STEPS}")
    tab_to(page, "#launch")
    page.keyboard.press("Enter")
    run = started(page, server)

    wait_for(lambda: step_of(run) >= 2, "two steps", LONG)
    tab_to(page, "#run-stop")
    page.keyboard.press("Enter")
    wait_for(lambda: state_of(run) == "stopped", "the stop", LONG)
    assert 0 < step_of(run) < STEPS
    wait_for(lambda: not alive(run), "the end of its processes")
    expect(page.locator("#run-stop")).to_be_hidden()
    wait_for(lambda: has_focus(page), "the focus, whose button is gone")

    expect(page.locator("#run-resume")).to_be_visible()
    if not page.evaluate("document.activeElement.matches('#run-resume')"):
        tab_to(page, "#run-resume")
    page.keyboard.press("Enter")
    wait_for(lambda: state_of(run) == "done", "the end of the resumed run", LONG)
    expect(page.locator(".ts-run-name")).to_contain_text("done")
    wait_for(lambda: has_focus(page), "the focus, whose button is gone")

    tab_to(page, "#run-export", "Shift+Tab")
    page.keyboard.press("Enter")
    tab_to(page, "#export-merged input")
    page.keyboard.press("Space")
    tab_to(page, "#sure-export")
    page.keyboard.press("Enter")
    expect(page.locator("#run-export-status")).to_contain_text(
        f"The model is in {run.path / 'export-merged'}", timeout=1000 * LONG
    )
    wait_for(lambda: has_focus(page), "the focus, whose button is gone")
    screenshot(page, "keyboard-story-exported")

    tab_to(page, "a[href*='chat']", "Shift+Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/chat?**")
    page.wait_for_selector("html[data-shown]", state="attached")
    expect(page.get_by_label("Run or base model")).to_have_value(run.id)
    tab_to(page, "#chat-message textarea")
    page.keyboard.type("title: Sea; year: 1999. Write it as XML.")
    page.keyboard.press("Enter")
    answer = page.locator("#chat-first .ts-model .ts-raw")
    expect(answer).to_have_count(1, timeout=1000 * LONG)
    expect(page.locator("#chat-first [aria-busy='false']")).to_have_count(1, timeout=1000 * LONG)
    assert answer.text_content()
    assert has_focus(page)
