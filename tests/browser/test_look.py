"""How the pages look at every width and in every theme, and the names of curves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import SIZES, THEMES, TIMEOUT, Served, Tabs, axe, is_too_wide
from tests.made_runs import made_run

CURVES = 8
WIDTHS = (390, 1440, 2560)
PAGES = {
    "/": "#train-command pre",
    "/data?preset=tiny-lora": "#data-statistics svg",
    "/runs": ".ts-cards td",
    "/run?run=failed-run": ".ts-plot canvas",
    "/compare?runs=failed-run,queued-run": ".ts-plot canvas",
    "/compare": ".ts-panel",
    "/evaluate": "#eval-metrics",
    "/chat": "textarea",
    "/system": ".ts-columns dd",
}
"""The pages, and what is there once they are drawn."""
LONG_NAME = "a-name_of_a_run_that_" + "goes_on_" * 9
expect.set_options(timeout=1000 * TIMEOUT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with runs that end close together, one that failed, and one with a long name."""
    folder = tmp_path_factory.mktemp("ui")
    for number in range(CURVES):
        made_run(folder / "runs", f"20261120-09000{number}-rate-{number}", steps=60)
    made_run(folder / "runs", "failed-run", "failed", steps=60, cause=f"ValueError: cannot read /data/{LONG_NAME}")
    made_run(folder / "runs", "queued-run", "queued", config={"run_name": LONG_NAME})
    served = Served(folder)
    yield served
    served.stop()


_SET_THEME = """(name) => {
  localStorage.setItem("tunesmith-theme", name);
  dispatchEvent(new StorageEvent("storage", { key: "tunesmith-theme" }));
}"""


def overflows(page: Page) -> list[tuple[str, int]]:
    """The themes and widths in which a page is wider than its window."""
    wider = []
    for theme, width in itertools.product(THEMES, WIDTHS):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate(_SET_THEME, theme)
        expect(page.locator(f"html[data-theme={theme}]")).to_have_count(1)
        if is_too_wide(page):
            wider.append((theme, width))
    return wider


@pytest.mark.parametrize("path", PAGES)
def test_no_page_is_wider_than_its_window(new_page: Tabs, path: str) -> None:
    page = new_page(path)
    page.wait_for_selector(PAGES[path])
    assert overflows(page) == []


def test_what_is_too_wide_is_seen(new_page: Tabs) -> None:
    page = new_page("/system")
    page.evaluate("document.querySelector('h1').insertAdjacentHTML('afterend', '<div style=width:2000px>.</div>')")
    assert [width for _, width in overflows(page)] == [390, 1440] * len(THEMES)


def test_what_a_page_is_for_is_in_its_first_view(new_page: Tabs) -> None:
    for path, name in (("/", "#launch"), ("/data", "#data-show"), ("/evaluate", "#eval-start"), ("/chat", "textarea")):
        page = new_page(path)
        page.wait_for_selector("html[data-shown]", state="attached")
        expect(page.locator(name).first).to_be_in_viewport(ratio=1)
        below = page.locator("#all-options, #eval-list").filter(visible=True)  # control
        assert below.count() == (path in ("/", "/evaluate"))
        for each in below.all():
            expect(each).not_to_be_in_viewport(ratio=1)


# Whether nothing covers or cuts off the help of an option.
_HELP_IN_SIGHT = """(help) => {
  const box = help.getBoundingClientRect();
  help.style.pointerEvents = "auto";
  const heights = [0.1, 0.5, 0.9].map((share) => box.y + share * box.height);
  const seen = heights.map((height) => document.elementFromPoint(box.x + box.width / 2, height));
  help.style.pointerEvents = "";
  return seen.every((node) => help.contains(node));
}"""


@pytest.mark.parametrize(("path", "option"), [("/", "max_steps"), ("/data", "assistant_only_loss")])
def test_the_help_of_an_option_is_in_sight_and_legible_in_every_theme(new_page: Tabs, path: str, option: str) -> None:
    page = new_page(path)
    page.wait_for_selector("html[data-shown]", state="attached")
    field = page.locator(f"#opt-{option}")
    help_text = field.locator(".info-text")
    for theme in THEMES:
        page.evaluate(_SET_THEME, theme)
        page.get_by_role("heading", level=1).click()
        expect(help_text).to_be_hidden()
        assert help_text.evaluate("(help) => getComputedStyle(help).opacity") == "1", "it is never pale"
        field.locator("input").focus()
        expect(help_text).to_be_visible()
        assert help_text.evaluate(_HELP_IN_SIGHT)
        axe(page)


def test_fields_of_a_row_are_of_one_height_and_a_command_breaks_between_words(new_page: Tabs) -> None:
    page = new_page("/", "phone")
    page.wait_for_selector("#train-command pre")
    heights = page.evaluate("""["#opt-preset .wrap:has(> .wrap-inner)", "#opt-model_name_or_path input"]
      .map((name) => document.querySelector(name).getBoundingClientRect().height)""")
    assert heights[0] == heights[1]
    words = page.locator("#train-command .ts-word").evaluate_all("""(words) => words
      .filter((word) => word.textContent.startsWith("--")).map((word) => word.getBoundingClientRect().height)""")
    assert len(words) > 3
    assert max(words) < 30, "an option takes one line"


_HEAR_WORDS = """() => {
  window.words = {};
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    window.words[text] = [x, x + this.measureText(text).width, y];
    write.call(this, text, x, y);
  };
}"""
_PLOT = """() => {
  const [plot, chart] = [".u-over", ".u-wrap"].map((name) => document.querySelector(name).getBoundingClientRect());
  return [plot.right - chart.left, chart.width];
}"""


@pytest.mark.parametrize("size", SIZES)
def test_curves_are_named_beside_the_plot_each_on_a_row_of_its_own(new_page: Tabs, size: str) -> None:
    """No name covers a curve, a mark or another name, and the plot keeps most of the chart."""
    ids = [f"20261120-09000{number}-rate-{number}" for number in range(CURVES)]
    page = new_page(f"/compare?runs={','.join(ids)}", size)
    expect(page.locator(".u-legend")).to_contain_text("rate-7")
    page.evaluate(_HEAR_WORDS)
    page.get_by_label("Smoothing").fill("0.9")
    expect(page.locator(".u-legend")).to_contain_text("as logged")
    page.wait_for_function("'rate-7' in window.words")
    edge, width = page.evaluate(_PLOT)
    names = {text: at for text, at in page.evaluate("window.words").items() if text.startswith("rate-")}
    assert len(names) == CURVES
    assert all(edge <= left and right <= width for left, right, _ in names.values())
    rows = sorted(row for _, _, row in names.values())
    assert min(below - above for above, below in itertools.pairwise(rows)) > 13
    assert edge > 0.6 * width


def test_a_single_curve_and_names_that_take_too_much_leave_the_plot_its_width(new_page: Tabs) -> None:
    page = new_page("/compare?runs=failed-run")
    page.wait_for_selector(".u-over")
    edge, width = page.evaluate(_PLOT)
    assert width - edge < 30
