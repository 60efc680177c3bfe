"""How a browser is told that a run has ended: on other pages, in other tabs, while hidden, and later."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import TIMEOUT, Served, Tabs, axe, is_whole, screenshot, wait_for
from tests.made_runs import made_run
from trainers.run.folder import Process, RunFolder, write_json

HOSTILE = "<img src=x onerror=alert(1)>"
TICK_MS = 50
expect.set_options(timeout=1000 * TIMEOUT)

# Counts the ticks of the notices, which come faster here; keeps what is asked of the system, and says what it allows.
_STUBS = f"""(() => {{
  window.ticks = 0;
  const plain = window.setInterval;
  window.setInterval = (work, ms, ...more) => ms !== 5000 ? plain(work, ms, ...more)
    : plain(() => {{ window.ticks += 1; work(); }}, {TICK_MS});
  const read = (name) => JSON.parse(localStorage.getItem(name) || "[]");
  const keep = (name, entry) => localStorage.setItem(name, JSON.stringify([...read(name), entry]));
  window.Notification = class {{
    static get permission() {{ return read("stub-asked").at(-1) || "default"; }}
    static async requestPermission() {{ keep("stub-asked", window.answer || "granted"); }}
    constructor(title, options) {{ keep("stub-told", [title, options.body]); }}
    close() {{}}
  }};
  window.isHidden = false;
  Object.defineProperty(document, "hidden", {{ get: () => window.isHidden }});
}})()"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("ui"))
    yield served
    served.stop()


@pytest.fixture
def live(server: Served, request: pytest.FixtureRequest) -> RunFolder:
    """A run that lives until the test ends it."""
    supervisor = Process.of("supervisor", pid=os.getpid()).as_json()
    name = re.sub(r"\W", "-", request.node.name.removeprefix("test_"))[:60]
    return made_run(server.runs_dir, name, "running", steps=20, total_steps=100, processes=[supervisor])


def end(run: RunFolder, state: str = "done", cause: str | None = None) -> None:
    write_json(run.state_file, {**(run.read_state() or {}), "state": state, "cause": cause})


def run_page(new_page: Tabs, run: RunFolder, **more: str) -> Page:
    """The page of a run, in a browser whose notices tick faster."""
    page = new_page("/system", **more)  # type: ignore[arg-type]
    page.context.add_init_script(_STUBS)
    page.goto(f"{new_page.server.url}/run?run={run.id}")
    is_whole(page)
    return page


def watched(new_page: Tabs, run: RunFolder, **more: str) -> Page:
    page = run_page(new_page, run, **more)
    page.get_by_label("Tell me when it ends").check()
    return page


def beside(page: Page, path: str) -> Page:
    """Another tab of the same browser."""
    tab = page.context.new_page()
    tab.goto(page.url.split("/run")[0] + path)
    tab.wait_for_selector("html[data-shown]", state="attached")
    return tab


def kept(page: Page, name: str) -> list[object]:
    found: list[object] = json.loads(page.evaluate(f"localStorage.getItem('stub-{name}') || '[]'"))
    return found


def is_seen(page: Page, run: RunFolder) -> bool:
    return bool(page.evaluate(f"JSON.parse(localStorage.getItem('tunesmith-ended {run.id}')).seen"))


def asked_for_ends(page: Page) -> list[str]:
    """Requests of the notices, as they come."""
    requests: list[str] = []

    def note(text: str | None) -> None:
        if "run_ends" in (text or ""):
            requests.append(text or "")

    page.on("request", lambda request: note(request.post_data))
    return requests


def ticked(page: Page, times: int) -> None:
    aim = page.evaluate("window.ticks") + times
    wait_for(lambda: page.evaluate("window.ticks") >= aim, f"{times} ticks")


@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), ("phone", "dark"), ("wide", "contrast")])
def test_a_failed_run_says_why_on_another_page(
    new_page: Tabs, live: RunFolder, server: Served, size: str, scheme: str
) -> None:
    page = watched(new_page, live, size=size, scheme=scheme)
    screenshot(page, f"watch-{size}-{scheme}")
    axe(page)
    page.goto(f"{server.url}/data")
    is_whole(page)
    before = page.evaluate("window.shifts")
    cause = f"ValueError: {HOSTILE} in the batch of step 20"
    end(live, "failed", f"rank 1: {cause}")
    card = page.get_by_role("status", name="Runs that ended").locator(".ts-notice")
    expect(card).to_contain_text(cause)
    expect(card).to_contain_text("failed")
    assert page.locator("img[src=x]").count() == 0
    assert page.evaluate("window.shifts") == before
    screenshot(page, f"notice-{size}-{scheme}")
    axe(page)
    box = card.bounding_box()
    assert box
    assert box["y"] + box["height"] <= page.evaluate("innerHeight")
    assert box["x"] >= 0 and box["x"] + box["width"] <= page.evaluate("innerWidth")  # noqa: PT018
    card.get_by_role("link").click()
    page.wait_for_url(re.compile("run=" + live.id))


def test_it_is_dismissed_by_mouse_and_by_keyboard_and_the_focus_stays(new_page: Tabs, server: Served) -> None:
    page = new_page("/system")
    for name in ("a", "b", "c", "d"):
        made_run(server.runs_dir, f"ended-{name}")
        page.evaluate(f"Notices.watch('ended-{name}')")
    page.reload()
    cards = page.locator(".ts-notice")
    expect(cards).to_have_count(4)
    page.get_by_role("button", name="Dismiss: ended-a is done").click()
    expect(cards).to_have_count(3)
    expect(cards.get_by_role("button").first).to_be_focused()
    page.keyboard.press("Enter")
    expect(cards).to_have_count(2)
    last = cards.last.get_attribute("data-run")
    page.locator("h1").click()
    page.get_by_label("Theme").focus()
    page.keyboard.press("Escape")  # it belongs to the control
    expect(cards).to_have_count(2)
    page.locator("#content").focus()
    page.keyboard.press("Escape")
    expect(cards).to_have_count(1)
    assert cards.get_attribute("data-run") != last
    page.keyboard.press("Escape")
    expect(cards).to_have_count(0)
    page.reload()
    is_whole(page)
    expect(cards).to_have_count(0)


def test_two_tabs_show_it_and_the_system_is_asked_and_told_once(new_page: Tabs, live: RunFolder) -> None:
    page = watched(new_page, live)
    other = beside(page, "/chat")
    assert kept(page, "asked") == []  # nobody has clicked
    page.get_by_role("button", name="Also outside the browser").click()
    expect(page.get_by_text("here and by a notification of your system")).to_be_visible()
    assert kept(page, "asked") == ["granted"]
    end(live)
    for tab in (page, other):
        expect(tab.locator(".ts-notice")).to_have_text(re.compile(f"done.*{live.id}"))
    assert kept(page, "told") == [[f"{live.id} is done", ""]]
    wait_for(lambda: is_seen(page, live), "the end to be seen")
    third = beside(page, "/runs")
    ticked(third, 5)
    expect(third.locator(".ts-notice")).to_have_count(0)  # it was told
    page.get_by_role("button", name=f"Dismiss: {live.id} is done").click()
    expect(other.locator(".ts-notice")).to_have_count(0)
    assert len(kept(page, "told")) == 1


def test_where_notifications_are_denied_the_card_tells(new_page: Tabs, live: RunFolder) -> None:
    page = watched(new_page, live)
    page.evaluate("window.answer = 'denied'")
    page.get_by_role("button", name="Also outside the browser").click()
    expect(page.get_by_text("this browser blocks notifications")).to_be_visible()
    expect(page.get_by_role("button", name="Also outside the browser")).to_be_hidden()
    end(live, "stopped", "stopped by a stop request")
    expect(page.locator(".ts-notice")).to_contain_text("stopped by a stop request")
    assert kept(page, "told") == []


def test_the_title_of_a_hidden_tab_is_marked_until_it_is_seen(new_page: Tabs, live: RunFolder) -> None:
    page = watched(new_page, live)
    other = beside(page, "/system")
    hide = "hidden => { window.isHidden = hidden; document.dispatchEvent(new Event('visibilitychange')); }"
    for tab in (page, other):
        tab.evaluate(hide, True)
    end(live, "failed", "rank 0: ValueError: no")
    for tab in (page, other):
        wait_for(lambda tab=tab: tab.title() == f"✕ {live.id} · Tunesmith", "the mark")  # type: ignore[misc]
    assert not is_seen(page, live)
    other.evaluate(hide, False)
    assert other.title() == "System · Tunesmith"
    expect(other.locator(".ts-notice")).to_be_visible()
    wait_for(lambda: page.title() == f"{live.id} · Tunesmith", "the title as it was")


def test_nothing_is_asked_for_while_nothing_is_watched(new_page: Tabs, live: RunFolder) -> None:
    page = run_page(new_page, live)
    requests = asked_for_ends(page)
    ticked(page, 20)
    assert requests == []
    began = page.evaluate("performance.now()")
    page.get_by_label("Tell me when it ends").check()
    other = beside(page, "/system")
    theirs = asked_for_ends(other)
    wait_for(lambda: len(requests) + len(theirs) > 0, "a request, once a run is watched")
    ticked(other, 20)
    seconds = (page.evaluate("performance.now()") - began) / 1000
    assert len(requests) + len(theirs) <= 1 + seconds / 4  # of two tabs, with 20 ticks a second
    page.get_by_label("Tell me when it ends").uncheck()
    before = len(requests) + len(theirs)
    ticked(page, 20)
    assert len(requests) + len(theirs) == before


def test_what_ended_while_no_page_was_open_is_told_at_the_next_visit(new_page: Tabs, live: RunFolder) -> None:
    page = watched(new_page, live)
    expect(page.get_by_label("Tell me when it ends")).to_be_checked()
    page.goto("about:blank")
    end(live)
    page.goto(f"{new_page.server.url}/system")
    expect(page.locator(".ts-notice")).to_contain_text(live.id)
    wait_for(lambda: is_seen(page, live), "the end to be seen")
    page.goto(f"{new_page.server.url}/run?run={live.id}")
    is_whole(page)
    ticked(page, 5)
    expect(page.locator(".ts-notice")).to_have_count(0)
    expect(page.get_by_label("Tell me when it ends")).to_have_count(0)  # it has


def test_a_deleted_run_and_foreign_storage_are_no_news(new_page: Tabs) -> None:
    page = new_page("/system")
    page.evaluate(
        """name => {
      Notices.watch(name); Notices.watch("../../etc/passwd");
      localStorage.setItem("tunesmith-ended x", "{"); localStorage.setItem("tunesmith-ended y", "null");
    }""",
        HOSTILE,
    )
    page.reload()
    left = "Object.keys(localStorage).filter(key => /^tunesmith-(watched|ended) /.test(key))"
    wait_for(lambda: page.evaluate(left) == [], "the strange entries to be gone")
    expect(page.locator(".ts-notice")).to_have_count(0)
