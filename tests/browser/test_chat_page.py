"""The Chat page: two models side by side, in processes that can be freed; nothing that is written can do anything."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from gradio_client import Client  # type: ignore[import-untyped]
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import SIZES, TIMEOUT, Served, Tabs, axe, screenshot, wait_for
from tests.launching import launch_well
from tests.parrot import make_parrot

expect.set_options(timeout=1000 * TIMEOUT)
RUN, STEP = "five-steps", "step-00000005"
ASKED = "title: Sea; year: 1999. Write it as XML."
HOSTILE = "<img src=x onerror=alert(1)>\n   **bold** [link](http://example.invalid/) ![i](http://example.invalid/i.png)"
TOOLS = '[{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]'
ANSWERS = {
    "markdown": "# Title\n\nSome **bold** text, a [link](https://example.com/), and\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nif a < b:\n    pass\n```\n",
    "think": "<think>\nThe sky first.\n</think>\n\nIt is *blue*.",
    "call": 'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>',
    "sunny": "So it is warm.",
    "long": "<think>" + " ".join(f"thought{number}" for number in range(300)) + "</think>\nAt last, an answer.",
    "*": "Something else.",
}


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with one real run of five steps."""
    folder = tmp_path_factory.mktemp("chat")
    options: dict[str, Any] = {"preset": "tiny-lora", "max_steps": 5, "global_batch_size": 8, "max_train_samples": 100}
    options |= {"eval_dataset_name": "none", "cache_dir": folder / "cache"}
    launch_well(folder / "runs" / RUN, 1, options, XDG_STATE_HOME=str(folder / "state"), CUDA_VISIBLE_DEVICES="")
    make_parrot(folder / "parrot", ANSWERS)
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
    field = page.get_by_label(label, exact=True)

    def filled() -> bool:
        field.fill(value)
        field.press("Tab")
        return field.input_value() == value

    wait_for(filled, f"{label} to keep its value")


def send(page: Page, message: str) -> None:
    """Types a message and sends it."""
    page.get_by_label("Message", exact=True).fill(message)
    page.get_by_role("button", name="Send").click()


def answers(page: Page, pane: str) -> list[str]:
    """The answers of a pane, as they were generated."""
    texts: list[str] = page.locator(f"#chat-{pane} .ts-model .ts-raw").all_text_contents()
    return texts


def wait_for_answers(page: Page, count: int = 1, panes: Sequence[str] = ("first", "second")) -> None:
    """Returns once each pane has so many answers and none is under way."""
    done = '[aria-busy="false"] .ts-turn:last-child .ts-button[data-act="copy"]'
    wait_for(
        lambda: all(
            len(answers(page, pane)) == count and page.locator(f"#chat-{pane} {done}").count() for pane in panes
        ),
        f"{count} answers of {panes}",
    )
    expect(page.locator("#chat-status")).to_contain_text("loaded")


def parrot(tabs: Tabs, chatting: Served, size: str = "wide", scheme: str = "light") -> Page:
    """A page that has chosen the model of `ANSWERS` alone."""
    folder = str(chatting.folder / "parrot")
    return chosen(tabs(f"/chat?run={folder}", size, scheme), folder)


def ask_parrot(page: Page, *messages: str) -> None:
    """Sends messages, and waits for each answer."""
    before = len(answers(page, "first"))
    for number, message in enumerate(messages, before + 1):
        send(page, message)
        wait_for_answers(page, number, ["first"])


@pytest.mark.parametrize(("size", "scheme"), [("wide", "light"), pytest.param("phone", "dark", marks=pytest.mark.long)])
def test_base_and_tuned_answer_side_by_side(tabs: Tabs, chatting: Served, size: str, scheme: str) -> None:
    page = tabs(f"/chat?run={RUN}&checkpoint={STEP}", size, scheme)
    expect(page.get_by_label("Run or base model")).to_have_value(RUN)
    expect(page.get_by_label("Checkpoint", exact=True)).to_have_value(STEP)
    send(page, ASKED)
    wait_for_answers(page)
    request: dict[str, Any] = {"run": RUN, "checkpoint": STEP, "messages": [{"role": "user", "content": ASKED}]}
    by_script = Client(chatting.url, verbose=False).predict(**request, api_name="/chat")
    assert by_script["base"] != by_script["tuned"]
    assert (answers(page, "second"), answers(page, "first")) == ([by_script["base"]], [by_script["tuned"]])
    expect(page.get_by_label("Message", exact=True)).to_have_value("")
    screenshot(page, f"chat-answered-{size}-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    axe(page)
    field = page.get_by_label("Message", exact=True)
    field.fill("and as YAML?")
    field.press("Shift+Enter")
    field.press_sequentially("please")
    expect(field).to_have_value("and as YAML?\nplease")
    field.press("Enter")
    wait_for_answers(page, 2)
    page.on("dialog", lambda dialog: dialog.accept())
    page.locator("#chat-clear").click()
    expect(page.locator("#chat-panes .ts-turn")).to_have_count(0)


def test_the_process_is_freed_on_demand(tabs: Tabs) -> None:
    page = chosen(tabs(f"/chat?run={RUN}"), RUN)
    page.get_by_role("button", name="Load").click()
    status = page.locator("#chat-status")
    told = re.compile(r"process (\d+)")
    expect(status).to_contain_text(told)
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
    page.locator("#chat-first .ts-model").first.wait_for()
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
    page.locator("#chat-first .ts-model").first.wait_for()
    page.context.close()
    other = chosen(tabs("/chat?run=embedded"), "embedded")
    send(other, "hello")
    expect(other.locator("#chat-status")).to_contain_text("loaded")
    wait_for(lambda: len(answers(other, "first")) == 1, "an answer in the other tab")


@pytest.fixture
def counted() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that notes the paths it is asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *parts: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", paths
    server.shutdown()


def test_nothing_that_is_written_can_do_anything(tabs: Tabs, chatting: Served, counted: tuple[str, list[str]]) -> None:
    """An answer in which each known attack stands, and what the same text does where nothing protects."""
    address, paths = counted
    loads = f'<img src="{address}/a"> <iframe src="{address}/b"></iframe> <style>@import url("{address}/c");</style>'
    attack = "\n\n".join([
        loads, f"![i]({address}/d)", f"![i][r]\n\n[r]: {address}/e", "<img src=x onerror=\"window.hit=1\">",
        "<script>window.hit=1</script>", "[x](javascript:window.hit=1)", "<svg onload=window.hit=1>",
        f"<link rel=stylesheet href='{address}/f'>", "${window.hit=1} {{constructor.constructor('window.hit=1')()}}",
        "$$\\href{javascript:window.hit=1}{x}$$", "```mermaid\ngraph TD; A-->B\n```", HOSTILE,
    ])  # fmt: skip
    make_parrot(chatting.folder / "hostile", {"*": f"<think>{attack}</think>{attack}"})
    page = chosen(tabs(f"/chat?run={chatting.folder}/hostile"), f"{chatting.folder}/hostile")
    page.on("dialog", lambda dialog: tabs.errors.append(f"dialog: {dialog.message}"))
    send(page, HOSTILE)
    wait_for_answers(page, 1, ["first"])
    assert page.locator("#chat-first .ts-own").text_content() == HOSTILE
    page.locator("#chat-first summary").click()
    expect(page.locator("#chat-first .ts-thought .ts-markdown")).to_contain_text("<script>")
    conversation = page.locator("#chat-first")
    assert conversation.locator("img, iframe, style, script, svg, link, [onload], [onerror]").count() == 0
    targets = conversation.locator(".ts-markdown a").evaluate_all("links => links.map((link) => link.href)")
    assert targets
    assert all(target.startswith("http") for target in targets)
    assert page.evaluate("window.hit") is None
    assert paths == []
    control = page.context.browser.new_page()  # type: ignore[union-attr]
    control.set_content(loads)
    wait_for(lambda: {"/a", "/b", "/c"} <= {*paths}, "the control to load what it is told")
    control.close()


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "scheme"), [("wide", "light"), ("phone", "dark"), ("wide", "dark"), ("phone", "light")]
)
def test_markdown_thoughts_and_calls_are_drawn(tabs: Tabs, chatting: Served, size: str, scheme: str) -> None:
    page = parrot(tabs, chatting, size, scheme)
    page.get_by_text("Tools", exact=True).click()
    page.get_by_label("Tools (JSON)").fill(TOOLS)
    ask_parrot(page, "please markdown")
    first = page.locator("#chat-first")
    expect(first.get_by_role("heading", name="Title")).to_be_visible()
    expect(first.locator("td")).to_have_text(["1", "2"])
    expect(first.locator(".ts-code code")).to_have_text("if a < b:\n    pass\n")
    screenshot(page, f"chat-markdown-{size}-{scheme}")
    axe(page)
    ask_parrot(page, "now think")
    expect(first.locator("summary")).to_have_text("Thought (3 words)")
    expect(first.get_by_text("The sky first.", exact=True)).to_be_hidden()
    first.locator("summary").click()
    expect(first.locator("details").get_by_text("The sky first.", exact=True)).to_be_visible()
    page.locator("#chat-raw input").check()
    expect(first.locator(".ts-raw").nth(1)).to_have_text(ANSWERS["think"])
    expect(first.locator("summary")).to_be_hidden()
    page.locator("#chat-raw input").uncheck()
    ask_parrot(page, "a call")
    expect(first.locator(".ts-call code").first).to_have_text("get_weather")
    assert first.locator(".ts-message").evaluate_all(
        "all => all.every((each) => each.scrollHeight <= each.clientHeight)"
    )
    screenshot(page, f"chat-call-{size}-{scheme}")
    axe(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    page.get_by_label("Result of get_weather").fill('{"sky": "clear"} and sunny')
    page.get_by_role("button", name="Send results").click()
    wait_for_answers(page, 4, ["first"])
    assert answers(page, "first")[-1] == ANSWERS["sunny"]
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as JSONL").click()
    (row,) = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    saved = json.loads(row)
    assert [message["role"] for message in saved["messages"]][-3:] == ["assistant", "tool", "assistant"]
    assert saved["messages"][-3]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Köln"}}
    assert saved["messages"][3]["reasoning_content"] == "The sky first."
    assert saved["tools"][0]["function"]["name"] == "get_weather"


@pytest.mark.long
def test_messages_are_edited_taken_back_and_answered_again(tabs: Tabs, chatting: Served) -> None:
    """All by keyboard."""
    page = parrot(tabs, chatting)
    ask_parrot(page, "now think", "please markdown")
    page.get_by_role("button", name="Edit message 1").press("Enter")
    field = page.get_by_role("textbox", name="Edit message 1")
    expect(field).to_be_focused()
    expect(page.get_by_role("button", name="Send again, dropping 3 later messages")).to_be_visible()
    field.press("Escape")
    expect(field).to_have_count(0)
    expect(page.get_by_role("button", name="Edit message 1")).to_be_focused()
    page.get_by_role("button", name="Edit message 1").press("Enter")
    field.fill("it is sunny")
    field.press("Enter")
    wait_for_answers(page, 1, ["first"])
    assert answers(page, "first") == [ANSWERS["sunny"]]
    assert page.locator("#chat-first .ts-own").all_text_contents() == ["it is sunny"]
    page.get_by_role("button", name="Undo", exact=True).press("Enter")
    expect(page.locator("#chat-panes .ts-turn")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_have_value("it is sunny")


@pytest.mark.long
def test_another_answer_has_another_seed_and_the_seed_gives_it_again(tabs: Tabs) -> None:
    page = chosen(tabs("/chat?run=embedded"), "embedded")
    page.get_by_text("Instructions and randomness").click()
    set_number(page, "temperature", "3")
    set_number(page, "max_new_tokens", "12")
    send(page, "hello")
    wait_for_answers(page, 1, ["first"])
    first = answers(page, "first")
    page.get_by_role("button", name="Answer again, with another seed").click()
    wait_for(lambda: answers(page, "first") not in (first, []), "another answer")
    wait_for_answers(page, 1, ["first"])
    second = answers(page, "first")
    expect(page.get_by_label("seed", exact=True)).to_have_value("43")
    expect(page.locator("#chat-first .ts-turn:last-child .ts-note")).to_contain_text("seed 43")
    set_number(page, "seed", "42")
    page.get_by_role("button", name="Undo", exact=True).click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("hello")
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_answers(page, 1, ["first"])
    assert answers(page, "first") == first != second


@pytest.mark.long
def test_two_models_stream_at_once_and_a_thought_that_goes_on_is_said(tabs: Tabs, chatting: Served) -> None:
    make_parrot(chatting.folder / "other", {"*": ANSWERS["long"].replace("thought", "idea")})
    page = parrot(tabs, chatting)
    page.get_by_text("Instructions and randomness").click()
    set_number(page, "max_new_tokens", "900")
    page.get_by_label("Compare with").fill(f"{chatting.folder}/other")
    page.get_by_label("Compare with").press("Tab")
    send(page, "very long")
    for pane in ("first", "second"):
        expect(page.locator(f"#chat-{pane} summary")).to_contain_text("Thinking")
    assert page.locator('#chat-panes [aria-busy="true"]').count() == 2
    wait_for_answers(page)
    expect(page.locator("#chat-first summary")).to_have_text("Thought (300 words)")
    expect(page.locator("#chat-second .ts-raw")).to_contain_text("idea299</think>")
    expect(page.locator("#chat-status .ts-badge")).to_have_count(2)
    page.get_by_role("button", name="Free").click()
    expect(page.locator("#chat-status")).to_contain_text("No model is loaded")


@pytest.mark.long
def test_conversations_of_two_tabs_are_apart(tabs: Tabs, chatting: Served) -> None:
    first_model, second_model = parrot(tabs, chatting), parrot(tabs, chatting)
    ask_parrot(first_model, "it is sunny")
    ask_parrot(second_model, "now think")
    ask_parrot(first_model, "please markdown")
    assert answers(first_model, "first") == [ANSWERS["sunny"], ANSWERS["markdown"]]
    assert answers(second_model, "first") == [ANSWERS["think"]]


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


def test_no_stranger_gets_through_with_values_of_other_kinds(chatting: Served) -> None:
    """What is sent in place of a conversation, and in place of a button's event."""
    config = config_of(chatting)
    acts = [entry for entry in config["dependencies"] if any(target[1] == "act" for target in entry["targets"])]
    assert len(acts) == 2
    file = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}
    data = json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])
    fine: list[Any] = ["embedded", None, "auto", "=base", None, "", data, "", "both", False, "", "", 0, 1, 0, 8, 1, 42]
    events: list[Any] = [
        None, 3, [], {}, {"act": "edit"}, {"act": "edit", "index": 1, "text": "x"},
        {"act": "edit", "index": 0, "text": file},
        {"act": "results", "results": ["x"]}, {"act": "x", "deep": [[[[[[[[[[[]]]]]]]]]]]}, file,
    ]  # fmt: skip
    requests = [(fine, event) for event in events]
    requests += [
        ([*fine[:6], wrong, *fine[7:]], {"act": "regenerate"}) for wrong in (file, "[{}]", 3, "{", "[[[[", '["x"]')
    ]
    for values, event in requests:
        answer_events = said_to(chatting, acts[0]["id"], values, event)
        assert "root:" not in answer_events
        assert "refused" in answer_events or "ts-alert-error" in answer_events or "Error" in answer_events, (
            values,
            event,
            answer_events[-500:],
        )
    assert "ts-alert-error" not in said_to(chatting, acts[0]["id"], fine, {"act": "regenerate"}), "the control"


def said_to(chatting: Served, number: int, values: list[Any], event: Any) -> str:
    """All that the server says to a call of a handler."""
    body = {"fn_index": number, "data": values, "event_data": event, "session_hash": f"stranger{number}"}
    httpx.post(f"{chatting.url}/gradio_api/queue/join", json=body).raise_for_status()
    answer_events = ""
    address, parameters = f"{chatting.url}/gradio_api/queue/data", {"session_hash": f"stranger{number}"}
    with httpx.stream("GET", address, params=parameters, timeout=60) as answer:
        for line in answer.iter_lines():
            answer_events += line
            if line.startswith("data:") and json.loads(line[5:])["msg"] == "process_completed":
                break
    return answer_events


def test_an_empty_chat_asks_for_no_message_while_its_model_loads(tabs: Tabs) -> None:
    page = chosen(tabs(f"/chat?run={RUN}&checkpoint={STEP}"), RUN)
    pane = page.locator("#chat-first")
    free = page.get_by_role("button", name="Free memory")
    if free.is_visible():
        free.click()
    expect(page.locator("#chat-status .ts-unloaded")).to_be_visible()
    expect(pane.get_by_text("Write a message below")).to_be_visible()
    expect(pane.get_by_text("The model is loading")).to_be_hidden()
    page.get_by_role("button", name="Load", exact=True).click()
    expect(pane.get_by_text("The model is loading")).to_be_visible()
    expect(pane.get_by_text("Write a message below")).to_be_hidden()
    expect(page.locator("#chat-status")).to_contain_text("loaded")
    expect(pane.get_by_text("Write a message below")).to_be_visible()
