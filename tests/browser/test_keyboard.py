"""The pages without a mouse: Tab reaches every control in both directions, and Escape closes what opens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import TIMEOUT, Served, Tabs, wait_for
from tests.made_runs import add_checkpoint, made_run
from tests.parity.runs import mostly_long
from trainers.run.folder import Process

PAGES = (
    *("/", "/data", "/runs", "/run?run=done", "/run?run=failed", "/run?run=live", "/run?run=none", "/compare"),
    *("/compare?runs=done,failed", "/evaluate", "/chat", "/system"),
)
expect.set_options(timeout=1000 * TIMEOUT)

# Marks each control that is seen, of a group of radio buttons the one that Tab stops at, and counts them.
_MARK = """() => {
  const CONTROLS = "a[href], button, input, select, textarea, summary, [tabindex], [contenteditable=true]";
  const group = (radio) => [...document.querySelectorAll(`[type=radio][name="${radio.name}"]`)];
  const isStop = (each) => each.tabIndex >= 0 && !each.matches(":disabled") && !each.closest("[inert]")
    && each.checkVisibility({ visibilityProperty: true }) && each.getClientRects().length > 0
    && (each.type !== "radio" || each === (group(each).find((radio) => radio.checked) || group(each)[0]));
  const stops = [...document.querySelectorAll(CONTROLS)].filter(isStop);
  stops.forEach((each, index) => { each.dataset.stop = index; });
  return stops.length;
}"""
FOCUSED = """() => {
  const each = document.activeElement, style = getComputedStyle(each), box = each.getBoundingClientRect();
  const text = each.outerHTML.slice(0, 120), faults = [];
  if (style.outlineStyle === "none" || !parseFloat(style.outlineWidth)) faults.push(`no outline: ${text}`);
  if (style.opacity === "0" || box.width < 8 || box.height < 8) faults.push(`too small or transparent: ${text}`);
  const isInside = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  if (!isInside) faults.push(`out of sight: ${text}`);
  return [each.dataset.stop === undefined ? text : +each.dataset.stop, faults];
}"""
"""The mark of what has the focus, and why it cannot be seen."""

# Whether as many controls can be used as in the last five looks.
_RESTS = """() => {
  const isUsable = (each) => !each.matches(":disabled") && each.checkVisibility({ visibilityProperty: true });
  const count = [...document.querySelectorAll("input, textarea, select, button")].filter(isUsable).length;
  window.unchanged = count === window.controls ? window.unchanged + 1 : 0;
  window.controls = count;
  return window.unchanged >= 5;
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a finished, a failed and a live run."""
    folder = tmp_path_factory.mktemp("ui")
    saved = add_checkpoint(made_run(folder / "runs", "done"), 60)
    os.utime(saved / "manifest.json", (0, 0))  # days ago: its age is the same while a test looks
    cause = "step 9: loss nan, gradient norm nan, on rank 0, in the batch from data.jsonl:7; no weight was updated"
    made_run(folder / "runs", "failed", "failed", strategy="single", world=1, cause=cause)
    supervisor = Process.of("supervisor", pid=os.getpid()).as_json()
    made_run(folder / "runs", "live", "running", steps=20, total_steps=90, processes=[supervisor])
    served = Served(folder)
    yield served
    served.stop()


def opened(new_page: Tabs, path: str, size: str = "wide") -> Page:
    """A page with everything on it, also what it draws when it is scrolled to."""
    page = new_page(path, size)
    page.wait_for_selector("html[data-shown]", state="attached")
    if path.startswith("/run?") and "none" not in path:
        page.locator(".ts-memory").scroll_into_view_if_needed()
        expect(page.get_by_role("region", name="Memory by rank")).to_be_visible()
        expect(page.locator(".ts-rank")).to_have_count(0 if "failed" in path else 2)
    if path == "/":
        # Once they are estimated, the cards are not drawn again.
        expect(page.locator("#strategy-cards .ts-bar:not(.ts-bar-waiting)").first).to_be_attached()
        while (fold := page.locator(".label-wrap:not(.open):visible")).count():  # all options
            fold.first.click()
    page.wait_for_function(_RESTS, polling=100)  # a page is drawn, and what was opened, bit by bit
    if path in ("/", "/data"):
        page.wait_for_load_state("networkidle")
    return page


def walked(page: Page, key: str) -> tuple[list[object], list[str]]:
    """The marks of the controls that a key leads to, from the first or last on, and what cannot be seen on the way."""
    count = page.evaluate(_MARK)
    first = 0 if key == "Tab" else count - 1
    page.keyboard.press("Tab")  # from now on the focus is shown
    page.locator(f"[data-stop='{first}']").focus()
    stops, faults = [], []
    for number in range(count):
        if number:
            page.keyboard.press(key)
        stop, unseen = page.evaluate(FOCUSED)
        stops.append(stop)
        faults += unseen
    return stops, faults


@pytest.mark.parametrize(
    ("path", "size"),
    mostly_long(
        [*((path, "wide") for path in PAGES), ("/runs", "phone"), ("/run?run=done", "phone")],
        [*((path, "wide") for path in ("/", "/data", "/runs", "/run?run=live", "/chat")), ("/run?run=done", "phone")],
    ),
)
def test_tab_reaches_every_control_and_shows_where_it_is(new_page: Tabs, path: str, size: str) -> None:
    page = opened(new_page, path, size)
    stops, faults = walked(page, "Tab")
    assert len(stops) >= 8  # the header alone
    assert (stops, faults) == (list(range(len(stops))), [])
    # It leads on; past the last control by way of the browser itself, so not at once, and sometimes not at the first.
    last = f"document.activeElement.dataset.stop === '{len(stops) - 1}'"

    def leads_on() -> bool:
        page.keyboard.press("Tab")
        return not page.evaluate(last)

    wait_for(leads_on, "the focus past the last control")
    stops, faults = walked(page, "Shift+Tab")
    assert (stops, faults) == (list(range(len(stops)))[::-1], [])


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("document.getElementById('ts-theme').addEventListener('keydown', (event) => event.preventDefault())", "trap"),
        ("document.getElementById('ts-theme').style.setProperty('outline', 'none', 'important')", "no outline"),
        ("document.getElementById('ts-theme').style.opacity = 0", "transparent"),
        ("document.querySelector('.ts-links').style.cssText = 'position: fixed; top: -900px'", "out of sight"),
    ],
)  # fmt: skip
def test_a_fault_of_the_keyboard_is_seen(new_page: Tabs, fault: str, found: str) -> None:
    page = opened(new_page, "/run?run=none")
    page.evaluate(fault)
    stops, faults = walked(page, "Tab")
    assert (stops != list(range(len(stops)))) == (found == "trap")
    assert found == "trap" or any(found in each for each in faults)


def test_escape_closes_a_panel_and_gives_the_focus_back(new_page: Tabs) -> None:
    page = opened(new_page, "/run?run=done")
    for name in ("rename", "export", "delete"):
        button, panel = page.locator(f"#run-{name}"), page.locator(f"#panel-{name}").first
        for inside in (False, True):
            button.focus()
            page.keyboard.press("Enter")
            expect(panel).to_be_visible()
            if inside:
                panel.get_by_role("button").first.focus()
            page.keyboard.press("Escape")
            expect(panel).to_be_hidden()
            expect(button).to_be_focused()


def test_what_is_drawn_anew_keeps_the_focus_and_what_was_open(new_page: Tabs, server: Served) -> None:
    run = made_run(server.runs_dir, "saves")
    page = opened(new_page, "/run?run=saves")
    settings, link = page.get_by_text("config.yaml: every option"), page.get_by_role("link", name="Chat").last
    settings.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="config", exact=True)).to_be_visible()
    add_checkpoint(run, 30)
    expect(page.get_by_role("region", name="Checkpoints")).to_contain_text("step-00000030")
    expect(settings).to_be_focused()
    expect(page.get_by_role("region", name="config", exact=True)).to_be_visible()
    link.focus()
    address = link.get_attribute("href")
    add_checkpoint(run, 60)
    expect(page.get_by_role("region", name="Checkpoints")).to_contain_text("step-00000060")
    expect(page.locator(f"a[href='{address}']")).to_be_focused()
    page.locator("h1").click()  # the reader has left it
    settings.focus()
    page.keyboard.press("Enter")
    add_checkpoint(run, 90)
    expect(page.get_by_role("region", name="Checkpoints")).to_contain_text("step-00000090")
    expect(page.get_by_role("region", name="config", exact=True)).to_be_hidden()
    shutil.rmtree(run.path)


@pytest.mark.parametrize(("path", "label"), [("/data", "Preset"), ("/data", "Row format"), ("/compare", "Runs")])
def test_a_list_closes_with_escape_and_when_tab_leaves_it(new_page: Tabs, path: str, label: str) -> None:
    page = opened(new_page, path)
    field, lists = page.get_by_role("combobox", name=label), page.get_by_role("listbox")
    field.focus()
    page.keyboard.press("ArrowDown")
    expect(lists).to_be_visible()
    page.keyboard.press("Escape")
    expect(lists).to_have_count(0)
    expect(field).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(lists).to_be_visible()
    page.keyboard.press("Tab")
    expect(field).not_to_be_focused()
    expect(lists).to_have_count(0)
    assert page.evaluate("document.activeElement !== document.body")
