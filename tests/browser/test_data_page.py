"""The Data page as a person uses it: rows, trained tokens, packed rows, statistics, mistakes, hostile content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import SHAPES, SIZES, TIMEOUT, Served, Tabs, axe, screenshot

expect.set_options(timeout=1000 * TIMEOUT)
HOSTILE = '</mark><img src=x onerror=alert(1)> ${1+1} {{2+2}} <script>alert(2)</script> & "fine"'


def chat(question: str, answer: str) -> str:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


def a_file(server: Served, name: str, lines: list[str]) -> Path:
    path = server.folder / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def fill(page: Page, option: str, text: str) -> None:
    page.locator(f"#opt-{option} input, #opt-{option} textarea").first.fill(text)


def show(page: Page) -> None:
    page.locator("#data-show").click()


@pytest.mark.parametrize(("size", "scheme"), SHAPES)
def test_it_shows_rows_and_statistics(new_page: Tabs, size: str, scheme: str) -> None:
    page = new_page("/data?preset=tiny-lora", size, scheme)
    expect(page.locator("#data-rows article")).to_have_count(10)
    expect(page.locator("#data-statistics")).to_contain_text("Packing efficiency")
    expect(page.locator("#data-statistics")).to_contain_text("trained: 'A reply<|end|>'")
    told = "Documents by length, 74 to 172 tokens; most: 110 to 112 tokens: 304"
    expect(page.locator("#data-statistics svg[role=img]")).to_have_attribute("aria-label", told)
    trained = page.locator("#data-rows article mark").first
    expect(trained).to_contain_text("<|end|>")
    assert trained.evaluate("mark => getComputedStyle(mark).textDecorationLine") == "underline"
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    screenshot(page, f"data-rows-{size}-{scheme}")
    axe(page)


def test_it_pages(new_page: Tabs) -> None:
    page = new_page("/data?preset=tiny-lora")
    first = page.locator("#data-rows article").first
    expect(first).to_have_attribute("data-number", "0")
    page.locator("#data-next").click()
    expect(first).to_have_attribute("data-number", "10")
    page.locator("#data-previous").click()
    expect(first).to_have_attribute("data-number", "0")
    page.locator("#data-row input, #data-row textarea").fill("3995")
    page.locator("#data-row input, #data-row textarea").press("Enter")
    expect(first).to_have_attribute("data-number", "3995")
    expect(page.locator("#data-rows article")).to_have_count(5)
    page.get_by_label("rows of the batches").check()
    expect(page.locator("#data-rows")).to_contain_text("Packed row 0 of 1,964")
    expect(page.locator("#data-rows")).to_contain_text("positions 0 to")
    assert page.locator("#data-rows .ts-document").count() >= 2
    axe(page)


def test_a_mix_is_counted_source_by_source_with_its_languages(new_page: Tabs, server: Served) -> None:
    a_file(server, "first.jsonl", [chat(f"question {number}", "a few words of an answer") for number in range(12)])
    a_file(
        server, "second.jsonl", [chat(f"Frage {number}", "Das ist die Antwort auf die Frage") for number in range(9)]
    )
    mix = a_file(server, "mix.yaml", ["sources:", "- {dataset_name: first.jsonl, weight: 3}",
                                      "- {dataset_name: second.jsonl}"])  # fmt: skip
    page = new_page("/data")
    expect(page.locator("#opt-dataset_name input")).to_have_value("embedded")
    fill(page, "mix", str(mix))
    expect(page.locator("#opt-dataset_name input")).to_have_value("")  # a mix takes the place of the preset's data
    show(page)
    expect(page.locator("#data-rows article").first).to_contain_text("first: ")
    sources = page.get_by_role("region", name="Sources of the mix")
    expect(sources).to_contain_text("75.0%")
    expect(sources.locator("tbody tr")).to_have_count(3)
    expect(page.locator("#data-statistics")).to_contain_text("median")
    expect(page.get_by_role("region", name="Languages")).to_have_count(0)
    page.get_by_role("checkbox", name="Languages").check()
    page.locator("#data-count").click()
    expect(page.get_by_role("region", name="Languages")).to_contain_text("de")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES["wide"][0]
    axe(page)


def test_hostile_content_is_shown_as_text(new_page: Tabs, server: Served) -> None:
    listed = json.dumps({**json.loads(chat(HOSTILE, "fine")), "<img src=x>": 1})
    data = a_file(server, "hostile.jsonl", [chat(HOSTILE, HOSTILE), listed, '{"messages": [<img>'])
    page = new_page("/data")
    said: list[str] = []
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    fill(page, "dataset_name", str(data))
    show(page)
    expect(page.locator("#data-rows article")).to_have_count(3)
    expect(page.locator("#data-rows article mark").first).to_contain_text(HOSTILE)
    expect(page.locator("#data-statistics")).to_contain_text(f"{data}:3")
    expect(page.locator("#data-statistics")).to_contain_text("Unused fields: <img src=x>, 1 row")
    assert page.locator("#data-rows img, #data-rows script").count() == 0
    assert said == []


def test_a_mistake_stands_beside_its_field(new_page: Tabs) -> None:
    page = new_page("/data")
    fill(page, "max_length", "many")
    fill(page, "dataset_name", "/etc/passwd")
    show(page)
    expect(page.locator("#data-mistakes [role=alert] li")).to_have_count(2)
    expect(page.locator("#opt-max_length .ts-field-error")).to_contain_text("max_length='many'")
    fill(page, "max_length", "64")
    show(page)
    expect(page.locator("#opt-dataset_name .ts-field-error")).to_contain_text("outside the allowed folders")
    axe(page)


def test_a_count_is_cancelled(new_page: Tabs, server: Served) -> None:
    data = a_file(server, "large.jsonl", [chat("why " * 30, "because " * 40)] * 150_000)
    page = new_page("/data")
    expect(page.locator("#data-cancel")).to_be_hidden()
    expect(page.locator("#data-next")).to_be_hidden()
    fill(page, "dataset_name", str(data))
    show(page)
    expect(page.locator("#data-next")).to_be_visible()
    expect(page.locator("#data-statistics")).to_contain_text("press Count everything")
    page.get_by_label("rows of the batches").check()
    expect(page.locator("#data-mistakes")).to_contain_text("start the statistics")
    page.locator("#data-count").click()
    expect(page.locator("#data-statistics [role=meter]")).to_be_visible()
    page.locator("#data-cancel").click()
    expect(page.locator("#data-cancel")).to_be_hidden()
    expect(page.locator("#data-statistics")).to_contain_text("Stopped before the end")


@pytest.mark.parametrize(("size", "scheme"), SHAPES)
def test_near_duplicates_and_rows_of_other_data_are_listed(
    new_page: Tabs, server: Served, size: str, scheme: str
) -> None:
    text = "the quick brown fox jumps over the lazy dog while a patient cat is watching from the old wall " + HOSTILE
    data = a_file(server, "near.jsonl", [chat(text, f"because of reason {number}") for number in range(3)])
    other = a_file(server, "other.jsonl", [chat(text, "because of reason 1"), chat("another question", "an answer")])
    page = new_page("/data", size, scheme)
    fill(page, "dataset_name", str(data))
    found = page.locator("#data-comparison")
    expect(found).to_contain_text("Not looked for yet")
    expect(page.locator("#opt-near_duplicates .ts-option")).to_have_text("near_duplicates")
    page.locator("#opt-near_duplicates input, #opt-near_duplicates textarea").first.fill("2")
    page.locator("#data-compare").click()
    expect(found).to_contain_text("near_duplicates='2' is not a valid similarity; give one from 0.3 to 1, such as 0.7")
    page.locator("#opt-near_duplicates input, #opt-near_duplicates textarea").first.fill("0.6")
    page.locator("#opt-against input, #opt-against textarea").first.fill("/etc/passwd")
    page.locator("#data-compare").click()
    expect(found).to_contain_text("outside the allowed folders")
    page.locator("#opt-against input, #opt-against textarea").first.fill(str(other))
    page.locator("#data-compare").click()
    expect(found).to_contain_text("0 of 3 rows say the same as an earlier one and 2 almost the same")
    expect(found).to_contain_text("3 rows that are almost the same, such as")
    expect(found).to_contain_text("1 the same, 2 almost) of the training data, and 1 of 2 rows")
    expect(page.locator("#data-compare-cancel")).to_be_hidden()
    assert page.locator("#data-comparison img, #data-comparison script").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    found.scroll_into_view_if_needed()
    screenshot(page, f"data-near-{size}-{scheme}")
    axe(page)


def test_an_upload_is_shown(new_page: Tabs, server: Served, tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text(chat("what?", "this") + "\n", encoding="utf-8")
    page = new_page("/data")
    with page.expect_file_chooser() as chosen:
        page.locator("#upload-data").click()
    chosen.value.set_files(data)
    field = page.locator("#opt-dataset_name input, #opt-dataset_name textarea").first
    expect(field).not_to_have_value("embedded")
    show(page)
    expect(page.locator("#data-rows article mark")).to_contain_text("this")
