"""Tables that sort by value and are filtered, and keep both when the server sends them again."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Tabs, axe, is_whole

SIZES = {"b": "512 MiB", "a": "1.5 GiB", "c": "-"}
BYTES = {"512 MiB": 512 << 20, "1.5 GiB": 1.5 * (1 << 30)}


def _table(rows: list[tuple[str, str]]) -> str:
    def size(text: str) -> str:
        return f'<data value="{BYTES[text]}">{text}</data>' if text in BYTES else text

    lines = "".join(f"<tr><td>{name}</td><td>{size(text)}</td></tr>" for name, text in rows)
    head = "<thead><tr><th scope=col>Name</th><th scope=col>Size</th></tr></thead>"
    table = f"<table>{head}<tbody>{lines}</tbody></table>"
    region = f'<div class="ts-table" data-sort tabindex=0 role=region aria-label="Things">{table}</div>'
    return f"<div id=things>{region}</div>"


def _put(page: Page, rows: list[tuple[str, str]]) -> None:
    """Shows a table, in place of the one before it, as an answer of the server does."""
    page.evaluate(
        """html => {
          document.querySelector('#things')?.remove();
          document.querySelector('h1').insertAdjacentHTML('afterend', html);
        }""",
        _table(rows),
    )


def _names(page: Page) -> list[str]:
    return page.locator("#things tbody tr:visible td:first-child").all_text_contents()


@pytest.fixture
def page(new_page: Tabs) -> Page:
    """The page with the least on it."""
    page = new_page("/compare")
    is_whole(page)
    return page


def test_a_table_sorts_by_value_up_down_and_back(page: Page) -> None:
    _put(page, list(SIZES.items()))
    size = page.locator("#things").get_by_role("button", name="Size")
    size.focus()
    for order, names in (("ascending", "bac"), ("descending", "abc"), (None, "bac")):
        page.keyboard.press("Enter")
        assert "".join(_names(page)) == names  # as text, 1.5 GiB would be before 512 MiB; none is last both ways
        expect(page.locator("#things th[aria-sort]")).to_have_count(1 if order else 0)
        if order:
            expect(page.locator(f"#things th[aria-sort={order}]")).to_contain_text("Size")
    axe(page)


def test_numbers_are_no_texts_and_dates_are_no_numbers(page: Page) -> None:
    _put(page, [("1", "9 steps"), ("2", "10 steps"), ("3", "3,000"), ("4", "2e-4"), ("5", "2026-11-20"), ("6", "ddp")])
    page.locator("#things").get_by_role("button", name="Size").click()
    assert "".join(_names(page)) == "412356"


def test_order_filter_and_focus_outlive_an_answer_of_the_server(page: Page) -> None:
    rows = [(f"row-{number}", str(number)) for number in range(20)]
    _put(page, rows)
    things = page.locator("#things")
    things.get_by_role("button", name="Size").click()
    things.get_by_role("button", name="Size").click()
    things.get_by_label("Filter").fill("row-1")
    expect(things.get_by_role("status")).to_have_text("11 of 20 rows")
    _put(page, [*rows[:15], *rows[17:]])
    assert _names(page) == [f"row-{number}" for number in (19, 18, 17, 14, 13, 12, 11, 10, 1)]
    expect(things.get_by_label("Filter")).to_be_focused()
    expect(things.get_by_role("status")).to_have_text("9 of 18 rows")
    page.keyboard.type("9")
    assert _names(page) == ["row-19"]


def test_a_short_table_has_no_filter_and_a_single_row_no_order(page: Page) -> None:
    _put(page, [("a", "1"), ("b", "2")])
    expect(page.locator("#things button")).to_have_count(2)
    expect(page.locator("#things input")).to_have_count(0)
    _put(page, [("a", "1")])
    expect(page.locator("#things button")).to_have_count(0)


def test_a_live_table_of_a_page_is_sorted(new_page: Tabs) -> None:
    page = new_page("/system")
    is_whole(page)
    table = page.get_by_role("region", name="Versions")
    table.get_by_role("button", name="Name").click()
    names = table.locator("tbody td:first-child")
    first = sorted(names.all_text_contents(), key=str.lower)[0]
    before = page.locator(".ts-columns").inner_html()
    page.wait_for_function("before => document.querySelector('.ts-columns').innerHTML !== before", arg=before)
    expect(names.first).to_have_text(first)
    expect(table.get_by_role("button", name="Name")).to_be_focused()
