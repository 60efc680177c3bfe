"""The Chat page: base and tuned side by side, in a process that can be freed; all that is written stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from gradio_client import Client  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import SIZES, TIMEOUT, Served, Tabs, axe, screenshot, wait_for
from tests.launching import launch_well

RUN, STEP = "five-steps", "step-00000005"
ASKED = "title: Sea; year: 1999. Write it as XML."
HOSTILE = "<img src=x onerror=alert(1)>\n   **bold** [link](http://example.invalid/) ![i](http://example.invalid/i.png)"


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with one real run of five steps."""
    folder = tmp_path_factory.mktemp("chat")
    options: dict[str, Any] = {"preset": "tiny-lora", "max_steps": 5, "global_batch_size": 8, "max_train_samples": 100}
    options |= {"eval_dataset_name": "none", "cache_dir": folder / "cache"}
    launch_well(folder / "runs" / RUN, 1, options, XDG_STATE_HOME=str(folder / "state"), CUDA_VISIBLE_DEVICES="")
    served = Served(folder)
    yield served
    served.stop()


@pytest.fixture
def tabs(browser: Browser, chatting: Served) -> Iterator[Tabs]:
    made = Tabs(browser, chatting)
    yield made
    for context in browser.contexts:
        context.close()
    assert made.errors == []
    assert made.outside == []


def chosen(page: Page, run: str) -> Page:
    """The page once the address has filled its fields."""
    expect(page.get_by_label("Run or base model")).to_have_value(run)
    return page


def set_number(page: Page, label: str, value: str) -> None:
    """Fills a field of a panel that has just been opened: Gradio may still put its first value into it."""
    field = page.get_by_label(label)

    def filled() -> bool:
        field.fill(value)
        field.press("Tab")
        return field.input_value() == value

    wait_for(filled, f"{label} to keep its value")


def send(page: Page, message: str) -> None:
    """Types a message and sends it."""
    page.get_by_label("Message", exact=True).fill(message)
    page.get_by_role("button", name="Send").click()


def answers(page: Page, side: str) -> list[str]:
    """The messages of a side that are not the user's."""
    texts: list[str] = page.locator(f"#chat-{side} .bot .md").all_text_contents()
    return texts


def wait_for_answers(page: Page, count: int = 1) -> None:
    """Returns once both sides have so many answers and none is under way."""
    wait_for(lambda: len(answers(page, "tuned")) == len(answers(page, "base")) == count, "an answer of each side")
    expect(page.locator("#chat-status")).to_contain_text("loaded")


@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), pytest.param("phone", "dark", marks=pytest.mark.long)])
def test_base_and_tuned_answer_side_by_side(tabs: Tabs, chatting: Served, size: str, scheme: str) -> None:
    page = tabs(f"/chat?run={RUN}&checkpoint={STEP}", size, scheme)
    expect(page.get_by_label("Run or base model")).to_have_value(RUN)
    expect(page.get_by_label("Checkpoint")).to_have_value(STEP)
    send(page, ASKED)
    wait_for_answers(page)
    request: dict[str, Any] = {"run": RUN, "checkpoint": STEP, "messages": [{"role": "user", "content": ASKED}]}
    by_script = Client(chatting.url, verbose=False).predict(**request, api_name="/chat")
    assert by_script["base"] != by_script["tuned"]
    assert (answers(page, "base"), answers(page, "tuned")) == ([by_script["base"]], [by_script["tuned"]])
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    screenshot(page, f"chat-answered-{size}-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    axe(page)
    send(page, "and as YAML?")
    wait_for_answers(page, 2)
    page.locator("#chat-clear").click()
    expect(page.locator("#chat-tuned .bot .md")).to_have_count(0)


def test_the_process_is_freed_on_demand(tabs: Tabs) -> None:
    page = chosen(tabs(f"/chat?run={RUN}"), RUN)
    page.get_by_role("button", name="Load").click()
    status = page.locator("#chat-status")
    told = re.compile(r"process (\d+)")
    expect(status).to_contain_text(told, timeout=1000 * TIMEOUT)
    found = told.search(status.inner_text())
    assert found
    process = psutil.Process(int(found[1]))
    second = tabs("/chat")
    expect(second.locator("#chat-status")).to_contain_text(f"process {process.pid}")
    page.get_by_role("button", name="Free").click()
    expect(status).to_contain_text("No model is loaded")
    wait_for(lambda: not process.is_running(), "the end of the process")
    expect(second.locator("#chat-status")).to_contain_text("No model is loaded")


def test_an_answer_can_be_stopped(tabs: Tabs) -> None:
    page = chosen(tabs("/chat?run=embedded"), "embedded")
    page.get_by_text("Instructions and randomness").click()
    set_number(page, "temperature", "5")
    set_number(page, "max_new_tokens", "900")
    send(page, "hello")
    page.locator("#chat-base .bot .md").first.wait_for()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#chat-status")).to_contain_text("loaded")
    send(page, "")
    expect(page.get_by_role("alert").first).to_contain_text("There is no message to answer")


def test_a_closed_tab_leaves_the_model_to_others(tabs: Tabs) -> None:
    page = chosen(tabs("/chat?run=embedded"), "embedded")
    page.get_by_text("Instructions and randomness").click()
    set_number(page, "temperature", "5")
    set_number(page, "max_new_tokens", "900")
    send(page, "hello")
    page.locator("#chat-base .bot .md").first.wait_for()
    page.context.close()
    other = chosen(tabs("/chat?run=embedded"), "embedded")
    send(other, "hello")
    expect(other.locator("#chat-status")).to_contain_text("loaded")
    wait_for(lambda: len(answers(other, "base")) == 1, "an answer in the other tab")


def test_what_is_written_is_shown_as_text(tabs: Tabs) -> None:
    page = chosen(tabs(f"/chat?run={RUN}&checkpoint={STEP}"), RUN)
    page.on("dialog", lambda dialog: tabs.errors.append(f"dialog: {dialog.message}"))
    send(page, HOSTILE)
    wait_for_answers(page)
    assert page.locator("#chat-base .user .md").text_content() == HOSTILE
    assert page.locator("#chat-base :is(.md img, .md a, .md b, .md strong)").count() == 0


def test_a_wrong_value_says_what_to_do(tabs: Tabs) -> None:
    page = chosen(tabs(f"/chat?run={RUN}"), RUN)
    page.get_by_text("Instructions and randomness").click()
    set_number(page, "temperature", "99")
    send(page, ASKED)
    expect(page.get_by_role("alert").first).to_contain_text("temperature=99 is out of range; use a number from 0 to 5")
    expect(page.get_by_label("Message", exact=True)).to_have_value(ASKED)
    other = chosen(tabs("/chat?run=../../etc&checkpoint=<script>alert(1)</script>"), "../../etc")
    other.get_by_role("button", name="Load").click()
    expect(other.get_by_role("alert").first).to_contain_text("refused")


def test_scripts_are_refused_as_people_are(chatting: Served) -> None:
    client = Client(chatting.url, verbose=False)
    fine: dict[str, Any] = {"run": "embedded", "messages": [{"role": "user", "content": "hi"}]}
    wrongs: tuple[dict[str, Any], ...] = (
        {"run": "/etc"}, {"run": "nothing"}, {"checkpoint": "../.."}, {"side": "left"}, {"sampling": {"beams": 2}},
        {"messages": [{"role": "evil", "content": "x"}]}, {"messages": []}, {"device": "9; id"},
    )  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(Exception, match=r"run|embedded|side|sampling|message|device"):
            client.predict(**{**fine, **wrong}, api_name="/chat")


def config_of(chatting: Served) -> dict[str, Any]:
    return dict(httpx.get(f"{chatting.url}/config").json())


def test_no_connection_is_kept_open(chatting: Served) -> None:
    assert config_of(chatting)["connect_heartbeat"] is False


def test_a_chat_that_names_a_component_builds_none(chatting: Served) -> None:
    """A Chatbot's own preprocessing would make any component that a stranger names, with any arguments."""
    config = config_of(chatting)
    chats = {part["id"] for part in config["components"] if part["type"] == "chatbot"}
    (event,) = [entry for entry in config["dependencies"] if len(entry["inputs"]) == 15 and chats & {*entry["inputs"]}]
    file = {"type": "component", "component": "file", "value": {"path": "/etc/passwd"}, "props": {}}
    named = {"role": "user", "metadata": None, "content": [{**file, "constructor_args": {"label": "x"}}]}
    values = ["embedded", None, "auto", "hello", [], [named], "both", False, "", 0, 1, 0, 8, 1, 42]
    body = {"fn_index": event["id"], "data": values, "session_hash": "stranger"}
    httpx.post(f"{chatting.url}/gradio_api/queue/join", json=body).raise_for_status()
    said = ""
    with httpx.stream(
        "GET", f"{chatting.url}/gradio_api/queue/data", params={"session_hash": "stranger"}, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            said += line
            if line.startswith("data:") and json.loads(line[5:])["msg"] == "process_completed":
                break
    assert "Base: refused, the value is not a conversation of plain text" in said
    assert "root:" not in said
