"""The Train page as a person uses it: choose, see the preview, mend a mistake, launch, clone; and as a script does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from gradio_client import Client
from playwright.sync_api import Page, expect

from tests.browser.conftest import SHAPES, SHIFT_LIMIT, SIZES, Served, Tabs, axe, choose_strategy, screenshot, wait_for
from trainers.config.objectives import OWN_OPTIONS
from trainers.embedded import DATA_DIR

EXPECT = 60_000
"""Milliseconds."""
TRAINED = 300.0
"""Seconds in which a run of a few steps ends, on a busy machine too."""


@pytest.fixture(autouse=True)
def patient() -> None:
    """A busy machine may take its time."""
    expect.set_options(timeout=EXPECT)


def opened(new_page: Tabs, path: str = "/", size: str = "wide", scheme: str = "light") -> Page:
    """The page, once its first preview is there."""
    page = new_page(path, size, scheme)
    expect(page.locator("#train-preview")).to_be_visible()
    expect(page.locator("#train-command pre, #train-command .ts-note")).to_be_visible()
    return page


def choose(page: Page, name: str, value: str) -> None:
    """Picks a value of a list."""
    page.locator(f"#opt-{name} input").click()
    page.get_by_role("option", name=value).first.click()


def command(page: Page) -> str:
    """The command that is shown."""
    return page.locator("#train-command pre").inner_text()


@pytest.mark.parametrize(("size", "scheme"), SHAPES)
def test_it_is_whole_and_accessible(new_page: Tabs, size: str, scheme: str) -> None:
    page = opened(new_page, "/", size, scheme)
    expect(page.locator(".ts-verdict-good")).to_contain_text("Ready to start: ddp on 2 CPU processes")
    axe(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    screenshot(page, f"train-{size}-{scheme}")


def test_a_wrong_value_is_told_beside_its_field(new_page: Tabs) -> None:
    page = opened(new_page)
    page.locator("#opt-learning_rate input").fill("abc")
    expect(page.locator("#opt-learning_rate .ts-field-error")).to_contain_text("learning_rate='abc' is refused")
    expect(page.locator("#train-panel [role=alert]")).to_contain_text("learning_rate='abc'")
    expect(page.locator("#opt-learning_rate input")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#launch")).to_be_disabled()
    axe(page)
    page.locator("#opt-learning_rate input").fill("1e-3")
    expect(page.locator("#opt-learning_rate .ts-field-error")).to_have_count(0)
    page.locator("#opt-global_batch_size input").fill("31")
    expect(page.locator("#opt-global_batch_size .ts-field-error")).to_contain_text("is not divisible by")
    page.locator("#opt-global_batch_size input").fill("32")
    expect(page.locator(".ts-verdict-good")).to_be_visible()
    expect(page.locator("#launch")).to_be_enabled()
    expect(page.locator("#train-panel")).to_contain_text("32 = 2 processes x 8 at once x 2 times")


def test_a_mistake_in_a_closed_section_leads_to_its_field(new_page: Tabs) -> None:
    page = opened(new_page)
    page.get_by_role("button", name="All options").click()
    page.get_by_role("button", name="Optimizer").click()

    beta, mistake = page.locator("#opt-adam_beta1 input"), page.locator("#train-panel [role=alert] .ts-jump")

    def told() -> bool:
        """A section that is drawn for the first time sets its fields a moment later, over what a script typed."""
        if beta.input_value() != "7":
            beta.fill("7")
        return mistake.is_visible()

    wait_for(told, "the mistake in adam_beta1")
    expect(mistake).to_contain_text("adam_beta1")
    page.get_by_role("button", name="All options").click()
    expect(page.locator("#opt-adam_beta1")).to_be_hidden()
    mistake.click()
    expect(beta).to_be_focused()


def test_preset_and_strategy_change_what_is_shown_and_keep_what_was_typed(new_page: Tabs) -> None:
    page = opened(new_page)
    page.locator("#opt-max_steps input").fill("7")
    expect(page.locator("#train-command")).to_contain_text("--max_steps 7")
    page.get_by_text("All presets by family").click()
    page.get_by_role("button", name=re.compile("^Embedded model, All weights: [0-9.]+ [MG]iB fits$")).click()
    expect(page.locator("#train-command")).to_contain_text("--preset tiny-full --max_steps 7")
    axe(page)
    choose(page, "preset", "tiny-lora")
    expect(page.locator("#train-command")).to_contain_text("--preset tiny-lora --max_steps 7")
    page.get_by_role(
        "button", name=re.compile("^Embedded model, All weights: [0-9.]+ [MG]iB")
    ).click()  # the same one again
    expect(page.locator("#train-command")).to_contain_text("--preset tiny-full --max_steps 7")
    expect(page.locator("#opt-method input:checked")).to_have_value("full")
    page.locator("#opt-method").get_by_label("LoRA adapter", exact=True).check()
    expect(page.locator("#train-command")).to_contain_text("--preset tiny-lora --max_steps 7")
    expect(page.locator("#opt-preset input")).to_have_value(re.compile("^tiny-lora: "))
    choose_strategy(page, "fsdp2")
    expect(page.locator("#train-command")).to_contain_text("accelerate_configs/fsdp2.yaml --num_processes 2")
    expect(page.locator("#strategy-cards input:checked")).to_have_value("fsdp2")
    page.locator("#opt-strategy :is(input, textarea)").fill("hsdp")
    expect(page.locator("#opt-strategy .ts-field-error")).to_contain_text("use at least 4")


@pytest.mark.parametrize("size", ["wide", "phone"])
def test_strategies_are_radio_cards_with_memory_and_speed(new_page: Tabs, size: str) -> None:
    page = opened(new_page, "/", size)
    chosen = page.locator("#strategy-cards input:checked")
    expect(chosen).to_have_value("ddp")  # at once, before anything is estimated
    expect(page.locator("#strategy-cards")).to_have_attribute("data-state", "estimated")
    expect(page.locator(".ts-cards-status")).to_contain_text("Recommended:")
    for card in page.locator(".ts-card").all()[:4]:
        assert card.locator(".ts-bar span").count() >= 3
    facts = page.locator(".ts-card-figures").first
    expect(facts).to_contain_text("GiB")
    expect(facts).to_contain_text("fastest")
    chosen.focus()
    page.keyboard.press("ArrowDown")
    second = page.locator("#strategy-cards input").nth(1).get_attribute("value")
    expect(page.locator("#train-command")).to_contain_text(f"accelerate_configs/{second}.yaml")
    assert page.evaluate("document.activeElement.value") == second
    assert page.evaluate("getComputedStyle(document.activeElement.closest('label')).outlineStyle") == "solid"
    page.locator("#strategy-cards summary").click()
    page.get_by_text(re.compile(r"\d strategies cannot run here")).click()
    expect(page.locator(".ts-unable-list")).to_contain_text("Runs on 4 processes; 2 chosen.")
    page.locator("#opt-gpus input").fill("1")  # the cards are drawn anew: what was unfolded stays, what runs changes
    expect(page.locator("#strategy-cards")).to_have_attribute("data-default", "single")
    expect(page.locator(".ts-unable-list")).to_contain_text("Runs on 2 processes; 1 chosen.")
    axe(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    screenshot(page, f"strategies-{size}")


@pytest.mark.parametrize("size", SIZES)
def test_nothing_moves_while_the_page_fills(new_page: Tabs, size: str) -> None:
    page = new_page("/", size)
    expect(page.locator("#train-preview")).to_be_visible()
    page.locator("#train-cards").scroll_into_view_if_needed()
    expect(page.locator("#strategy-cards")).to_have_attribute("data-state", "estimated")
    expect(page.locator("#train-command pre")).to_be_visible()
    assert page.evaluate("window.shifts") <= SHIFT_LIMIT, page.evaluate("window.moved")


def test_every_field_has_words_and_its_option_beside_them(new_page: Tabs) -> None:
    page = opened(new_page)
    page.get_by_role("button", name="All options").click()
    headings = page.locator("#all-options #all-options button, #all-options .label-wrap")
    wait_for(lambda: headings.count() == 11, "the headings of the form and of its ten sections")
    for heading in headings.all()[1:]:
        heading.click()
    wait_for(lambda: page.locator(".ts-field").count() > 80, "all options")
    read = """boxes => boxes.map(box => {
      const code = box.querySelector("code.ts-option"), label = code?.parentElement;
      return [box.id.slice(4), code?.textContent, label?.textContent.replace(code.textContent, "").trim()];
    })"""
    fields = page.locator(".ts-field").evaluate_all(read)
    assert [name for name, option, words in fields if not words or "_" in words or words == name] == []
    assert {name: option for name, option, _ in fields if name != option} == {"gpus": "num_processes"}


def test_an_objective_shows_its_own_options_and_what_the_data_lacks(new_page: Tabs, server: Served) -> None:
    def own() -> list[str]:
        """The visible options of objectives."""
        return [name for name in OWN_OPTIONS if page.locator(f"#opt-{name}").is_visible()]

    page = opened(new_page)
    assert own() == []
    expect(page.locator("#objective-needs")).to_contain_text("messages")
    choose(page, "objective", "DPO")
    expect(page.locator("#objective-needs")).to_contain_text("needs the columns chosen and rejected")
    expect(page.locator("#opt-beta input")).to_have_attribute("placeholder", "0.1")
    assert own() == ["loss_type", "beta", "label_smoothing", "nll_weight"]
    axe(page)
    choose(page, "loss_type", "ipo")
    page.locator("#opt-beta input").fill("0.3")
    expect(page.locator("#train-command")).to_contain_text("--objective dpo --loss_type ipo --beta 0.3")
    (server.folder / "chats.jsonl").write_text((DATA_DIR / "eval.jsonl").read_text(encoding="utf-8"))
    page.locator("#opt-dataset_name input").fill(str(server.folder / "chats.jsonl"))
    expect(page.locator("#train-command")).to_contain_text("chats.jsonl")
    page.get_by_role("button", name="Show the first rows").click()
    expect(page.locator("#train-rows [role=alert]")).to_contain_text("lack chosen and rejected")
    choose(page, "objective", "ORPO")
    expect(page.locator("#opt-loss_type")).to_be_hidden()
    expect(page.locator("#train-command")).to_contain_text("--objective orpo --beta 0.3")
    expect(page.locator("#train-command")).not_to_contain_text("loss_type")
    choose(page, "objective", "SFT")
    wait_for(lambda: own() == [], "the options of preferences to go")
    expect(page.locator("#train-command")).not_to_contain_text("beta")
    choose(page, "preset", "tiny-dpo")
    expect(page.locator("#opt-objective input")).to_have_value(re.compile("^DPO"))
    wait_for(lambda: len(own()) == 4, "the options of the preset's objective")


def test_the_learning_rate_is_drawn_and_the_first_rows_are_shown(new_page: Tabs) -> None:
    page = opened(new_page)
    curve = page.locator("#train-curve svg")
    expect(curve).to_have_attribute(
        "aria-label", re.compile(r"from .* over a peak of 0.003 to .* at (the end|step \d+)$")
    )
    before = page.locator("#train-curve polyline").get_attribute("points")
    page.locator("#opt-max_steps input").fill("40")
    expect(curve).to_have_attribute("aria-label", re.compile("at step 40$"))
    assert page.locator("#train-curve polyline").get_attribute("points") != before
    page.locator("#look").click()
    expect(page.locator("#train-rows")).to_contain_text("Format found: chat.")
    expect(page.locator("#train-rows mark.ts-trained").nth(1)).to_be_visible()
    axe(page)


def test_from_an_empty_folder_to_a_training_run_in_one_click(serve: Callable[..., Served], new_page: Tabs) -> None:
    server = serve()
    page = new_page("/", server=server)
    page.evaluate("sessionStorage.clicks = 0; addEventListener('click', () => sessionStorage.clicks++, true)")
    page.get_by_role("button", name="Start the two-minute demo").click()
    page.wait_for_url("**/run?run=*", timeout=2 * EXPECT)
    assert page.evaluate("sessionStorage.clicks") == "1"
    state = server.runs_dir / page.url.partition("run=")[2] / "state.json"
    wait_for(lambda: json.loads(state.read_text()).get("step", 0) >= 1, "the first step", TRAINED)
    page = new_page("/", server=server)
    expect(page.locator("#welcome")).to_contain_text("Your last run: ")
    expect(page.get_by_role("button", name="Start the two-minute demo")).to_be_hidden()


_COVERED = """(list) => {
  const box = list.getBoundingClientRect();
  const step = Math.max(4, box.height / 40), covered = [];
  for (let y = Math.max(box.top, 0) + 3; y < Math.min(box.bottom, innerHeight) - 3; y += step)
    for (let x = box.left + 6; x < box.right - 24; x += 20) {
      const top = document.elementFromPoint(x, y);
      if (top !== list && !list.contains(top)) covered.push(top?.outerHTML.slice(0, 120));
    }
  return covered;
}"""


@pytest.mark.parametrize("size", ["wide", "phone"])
@pytest.mark.parametrize("path", ["/", "/data"])
def test_an_open_list_hides_what_lies_below(new_page: Tabs, path: str, size: str) -> None:
    page = opened(new_page, path, size) if path == "/" else new_page(path, size)
    page.locator("#opt-preset input").click()
    page.mouse.move(1, 1)
    shown = page.get_by_role("listbox")
    expect(shown).to_be_visible()
    screenshot(page, f"list-{path.strip('/') or 'train'}-{size}")
    assert shown.evaluate(_COVERED) == []
    if (path, size) == ("/", "wide"):  # the look sees labels that Gradio raises above the list
        page.add_style_tag(content=".ts-fields .ts-field { isolation: auto !important; z-index: auto !important }")
        page.add_style_tag(content=".ts-fields .ts-field:focus-within { z-index: 31 !important }")
        assert shown.evaluate(_COVERED) != []


@pytest.mark.parametrize("query", ["preset=nope", "clone=GONE", "from_run=GONE", "resume=GONE"])
def test_an_address_that_names_nothing_opens_a_working_form(new_page: Tabs, query: str) -> None:
    page = opened(new_page, f"/?{query}")
    expect(page.locator("#train-resume [role=alert]")).to_contain_text(query.partition("=")[2])
    expect(page.locator(".ts-verdict-good")).to_be_visible()
    expect(page.locator("#launch")).to_be_enabled()
    screenshot(page, f"nothing-{query.partition('=')[0]}")


def test_hostile_values_are_text(new_page: Tabs) -> None:
    page = opened(new_page)
    hostile = "<img src=x onerror=alert(1)>; $(touch /tmp/x) `id` 'a'"
    page.locator("#opt-run_name input").fill(hostile)
    expect(page.locator("#train-command pre")).to_contain_text("<img src=x onerror=alert(1)>")
    page.locator("#opt-dataset_name input").fill("<img src=x onerror=alert(1)>")
    expect(page.locator("#opt-dataset_name .ts-field-error")).to_contain_text("<img src=x onerror=alert(1)>")
    assert page.locator("img[src=x]").count() == 0
    for path in ("/etc/passwd", "../../etc", "file:///etc/passwd", "~/x"):
        page.locator("#opt-dataset_name input").fill(path)
        expect(page.locator("#opt-dataset_name .ts-field-error")).to_contain_text(f"dataset_name={path}")


def test_the_command_is_copied_and_the_config_saved_and_loaded(new_page: Tabs, tmp_path: Path) -> None:
    page = opened(new_page)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#opt-max_steps input").fill("9")
    expect(page.locator("#train-command")).to_contain_text("--max_steps 9")
    page.get_by_role("button", name="Copy: Command").click()
    expect(page.get_by_role("button", name="Copy: Command")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == command(page)
    page.get_by_role("button", name="All settings").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save").click()
    saved.value.save_as(tmp_path / "config.yaml")
    assert "max_steps: 9" in (tmp_path / "config.yaml").read_text()
    other = opened(new_page)
    other.locator("#load-yaml input[type=file], input[type=file]").last.set_input_files(tmp_path / "config.yaml")
    expect(other.locator("#train-command")).to_contain_text("--max_steps 9")
    assert command(other) == command(page)


def test_uploaded_data_is_used(new_page: Tabs, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "my data.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    page = opened(new_page)
    expect(page.locator("#opt-eval_dataset_name input")).not_to_have_value("")
    page.locator("input[type=file]").first.set_input_files(tmp_path / "my data.jsonl")
    expect(page.locator("#opt-dataset_name input")).to_have_value(re.compile(r"/\.uploads/my-data.*\.jsonl"))
    expect(page.locator("#train-command")).to_contain_text("my-data")
    expect(page.locator("#opt-eval_dataset_name input")).to_have_value("")
    expect(page.locator("#train-panel")).to_contain_text("its eval_dataset_name left out")
    files = "() => { const all = new DataTransfer(); all.items.add(new File(['a'], 'dropped.txt')); return all; }"
    page.dispatch_event("#upload-data", "drop", {"dataTransfer": page.evaluate_handle(files)})
    expect(page.locator("#opt-dataset_name input")).to_have_value(re.compile(r"/\.uploads/dropped.*\.txt"))


def test_launched_twice_it_is_one_run_that_can_be_cloned_and_trained_further(
    serve: Callable[..., Served], new_page: Tabs
) -> None:
    server = serve()
    page = new_page("/", server=server)
    expect(page.locator("#train-command pre")).to_be_visible()  # what is filled in before is filled over
    page.locator("#opt-max_steps input").fill("4")
    expect(page.locator("#train-command")).to_contain_text("--max_steps 4")
    page.locator("#launch").dblclick()
    expect(page.locator("#train-panel")).to_contain_text("Checking data and model")
    page.wait_for_url("**/run?run=*", timeout=2 * EXPECT)
    run_id = page.url.partition("run=")[2]
    found = [path.name for path in server.runs_dir.iterdir() if not path.name.startswith(".")]
    assert found == [run_id]
    state = server.runs_dir / run_id / "state.json"
    wait_for(lambda: json.loads(state.read_text())["state"] == "done", "the end of the run", TRAINED)
    page = new_page(f"/?clone={run_id}", server=server)
    expect(page.locator("#opt-max_steps input")).to_have_value("4")
    expect(page.locator("#train-command")).to_contain_text("--max_steps 4")
    page = new_page(f"/run?run={run_id}", server=server)
    page.locator("#run-train_further").click()
    page.wait_for_url(f"**/?from_run={run_id}")
    expect(page.locator("#train-resume")).to_contain_text(f"Starts from the result of {run_id}")
    expect(page.locator("#train-command")).to_contain_text(f"{run_id}/model")
    expect(page.locator("#train-command")).not_to_contain_text("--max_steps")
    expect(page.locator(".ts-verdict-good")).to_be_visible()


def test_what_the_check_refuses_is_told_beside_its_field(new_page: Tabs, server: Served) -> None:
    (server.folder / "bad.jsonl").write_text("{broken\n" * 5)
    page = opened(new_page)
    page.locator("#opt-dataset_name input").fill(str(server.folder / "bad.jsonl"))
    expect(page.locator("#train-command")).to_contain_text("bad.jsonl")
    page.locator("#launch").click()
    expect(page.locator("#train-panel [role=alert]")).to_contain_text("bad.jsonl", timeout=2 * EXPECT)
    expect(page.locator("#launch")).to_be_enabled()
    assert not [path for path in server.runs_dir.glob("*") if not path.name.startswith(".")]


def test_a_script_previews_and_launches(serve: Callable[..., Served]) -> None:
    server = serve()
    client = Client(server.url, verbose=False)
    assert set(client.view_api(return_format="dict")["named_endpoints"]) >= {"/preview", "/launch"}
    request = {"preset": "tiny-lora", "num_processes": 1, "options": {"max_steps": 2, "learning_rate": "x"}}
    assert list(client.predict(request, api_name="/preview")["errors"]) == ["learning_rate"]
    for bad in (request, {"x": 1}, [], {"preset": "tiny-lora", "options": {"dataset_name": "/etc/passwd"}}):
        with pytest.raises(Exception, match=r"refused|keys are|JSON object|outside"):
            client.predict(bad, api_name="/launch")
    assert not [path for path in server.runs_dir.glob("*") if not path.name.startswith(".")]
    request["options"] = {"max_steps": 2}
    made = client.predict(request, api_name="/launch")
    assert (server.runs_dir / made["id"]) == Path(made["run_dir"])
    state = Path(made["run_dir"]) / "state.json"
    wait_for(lambda: json.loads(state.read_text())["state"] == "done", "the end of the run", TRAINED)
