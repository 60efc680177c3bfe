"""Makes the pictures in docs/images from real runs of the model that ships: `make pictures`.

Takes about two minutes, and needs Chromium, as the browser tests do.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.browser.conftest import Served, open_chromium

IMAGES = Path(__file__).parent / "images"
ROOT = Path(__file__).resolve().parents[1]
SIZE = (1280, 900)
TRAIN = (sys.executable, "-m", "app.cli", "train")
RUNS = {"lora": ["tiny-lora"], "all-weights": ["tiny-full", "--strategy", "fsdp2"]}
PAGES = {
    "train": ("", "#strategy-cards", "Recommended"),
    "run": ("run?run=lora", ".u-wrap", ""),
    "data": ("data", "", ""),
    "compare": ("compare?runs=lora,all-weights", ".u-wrap", ""),
}
"""Address of each page, and what it shows once it is complete: an element, and a text."""


def train(folder: Path) -> None:
    """Trains the runs that the pages show."""
    for name, words in RUNS.items():
        argv = [*TRAIN, *words, "--num_processes", "2", "--max_steps", "60", "--quiet"]
        subprocess.run([*argv, "--output_dir", str(folder / "runs" / name)], cwd=ROOT, check=True)


# Writes other names for the folders of this machine, in texts and in fields.
_HIDE_PATHS = """(names) => {
  const renamed = (text) => Object.entries(names).reduce((all, [path, name]) => all.replaceAll(path, name), text);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const before = texts.currentNode.data, after = renamed(before);
    if (after !== before) texts.currentNode.data = after;
  }
  for (const field of document.querySelectorAll("input, textarea")) field.value = renamed(field.value);
}"""


def take(page: Page, address: str, name: str, folder: Path) -> None:
    """Waits until a page is complete, and saves its picture without paths of this machine."""
    path, element, text = PAGES[name]
    page.goto(f"{address}/{path}")
    if name == "data":
        page.get_by_role("button", name="Show").first.click()
        page.get_by_text("Packing efficiency").wait_for()
        page.mouse.move(0, 0)
    if element:
        page.locator(element).first.wait_for()
    if text:
        page.get_by_text(text).first.wait_for()
    page.wait_for_load_state("networkidle")
    page.wait_for_selector("html[data-shown]", state="attached")
    page.wait_for_function("!document.querySelector('.pending, .generating, .ts-wait')")
    names = {str(folder.resolve()): "~", **{str(path): "~/tunesmith" for path in (ROOT, Path(sys.prefix).parent)}}
    page.evaluate(_HIDE_PATHS, names)
    assert not [path for path in names if path in page.inner_text("body")]
    if name == "train":  # from the choice of a strategy on
        page.get_by_role("heading", name="4. ").scroll_into_view_if_needed()
        page.get_by_role("heading", name="4. ").evaluate("(heading) => heading.scrollIntoView()")
    page.screenshot(path=IMAGES / f"{name}.png")


def main() -> None:
    """Takes every picture."""
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        train(folder)
        served = Served(folder)
        browser = open_chromium(playwright)
        try:
            page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
            for each in PAGES:
                take(page, served.url, each, folder)
        finally:
            browser.close()
            served.stop()


if __name__ == "__main__":
    main()
