"""The Chat page's conversations: what strangers send, what changes them, how they are drawn and saved."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainers.config.mistakes import ConfigError
from ui.pages.chat_parts import (
    Reply,
    before_answer,
    conversation,
    edited,
    read_messages,
    saved_rows,
    undone,
    with_results,
    write_messages,
)

CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"a": "é"}}}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1", "reasoning_content": "hm", "raw": "<think>hm</think>1", "note": "seed 1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "raw": "call"},
]


def test_a_conversation_comes_back_as_it_was_written() -> None:
    assert read_messages(write_messages(TALK)) == TALK
    assert read_messages("") == read_messages(None) == []


@pytest.mark.parametrize(
    "data",
    [
        3,
        [],
        {"a": 1},
        "x",
        "{}",
        "[1]",
        '[{"role": "evil", "content": "x"}]',
        '[{"role": "user"}]',
        "[" * 100_000,
        '[{"role": "tool", "content": "x"}]',
        '[{"role": "user", "content": "\\ud800"}]',
        '[{"role": "user", "content": {}}]',
        '[{"role": "assistant", "content": "", "tool_calls": [{}]}]',
        '[{"role": "assistant", "content": "", "raw": 3}]',
        '[{"role": "assistant", "content": "", "tool_calls": 3}]',
        "[" + '{"role": "user", "content": ""},' * 300 + "null]",
        " " * 3_000_000,
        '[{"role": "user", "content": "x", "content": "y"}]',
    ],
)
def test_what_is_no_conversation_is_refused(data: Any) -> None:
    if not data:
        assert read_messages(data) == []
        return
    with pytest.raises(ConfigError):
        read_messages(data)


def test_an_edit_drops_what_followed() -> None:
    assert edited(TALK, 2, "three") == [*TALK[:2], {"role": "user", "content": "three"}]
    for index in (1, 4, -1, None, "0", True, 1.0):
        with pytest.raises(ConfigError, match="does not exist"):
            edited(TALK, index, "x")


def test_the_last_answer_is_given_again_and_the_last_message_taken_back() -> None:
    assert before_answer(TALK) == TALK[:3]
    with pytest.raises(ConfigError, match="no answer"):
        before_answer(TALK[:3])
    assert undone(TALK) == (TALK[:2], "two")
    assert undone([]) == ([], "")


def test_results_follow_the_calls() -> None:
    assert with_results(TALK, ["{}"])[-1] == {"role": "tool", "content": "{}", "name": "f", "tool_call_id": "call00000"}
    assert read_messages(write_messages(with_results(TALK, ["{}"])))
    for results in ([], ["a", "b"], "x", None, [1], [" "]):
        with pytest.raises(ConfigError):
            with_results(TALK, results)
    with pytest.raises(ConfigError, match="no call"):
        with_results(TALK[:2], ["{}"])


def test_what_is_drawn_is_escaped() -> None:
    bad = "<img src=x onerror=alert(1)>"
    call = {"type": "function", "function": {"name": bad, "arguments": {bad: bad}}}
    talk = [
        {"role": "user", "content": bad},
        {
            "role": "assistant",
            "content": bad,
            "reasoning_content": bad,
            "tool_calls": [call, {"invalid": bad}],
            "raw": bad,
            "note": bad,
        },
        {"role": "tool", "content": bad, "name": bad},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    html = conversation("first", bad, talk)
    assert "<img" not in html
    assert html.count("&lt;img") >= 12


def test_a_reply_shows_a_thought_that_goes_on() -> None:
    reply = Reply(seed=7)
    reply.add({"text": "<think>hm", "parts": [["reasoning", "", True], ["reasoning", "hm", False]]})
    assert "Thinking … (1 word)" in conversation("first", "m", TALK[:1], reply)
    reply.add({"text": "</think>ok", "parts": [["content", "ok", False]]})
    assert "Thinking" not in conversation("first", "m", TALK[:1], reply)
    reply.add({"finish": "length", "tokens": 3, "tokens_per_second": 2.0,
               "message": {"role": "assistant", "content": "ok", "reasoning_content": "hm"}})  # fmt: skip
    reply.is_done = True
    assert reply.message() == {
        "role": "assistant", "content": "ok", "reasoning_content": "hm", "raw": "<think>hm</think>ok",
        "note": "cut at the limit of tokens · 3 tokens · 2.0 tokens/s · seed 7",
    }  # fmt: skip


def test_a_stopped_reply_keeps_what_it_had() -> None:
    reply = Reply()
    reply.add({"text": "half", "parts": [["content", "half", False]]})
    reply.add({"text": "<tool_call>{", "parts": [["tool_call", "", True], ["tool_call", "{", False]]})
    reply.add({"finish": "cancelled"})
    reply.is_done = True
    message = reply.message()
    assert (message["content"], message["tool_calls"], message["note"]) == ("half", [{"invalid": "{"}], "stopped")


def test_saved_rows_have_what_is_trained_and_no_more() -> None:
    (row,) = saved_rows([TALK, []], "Be brief.", [{"type": "function", "function": {"name": "f"}}]).splitlines()
    saved = json.loads(row)
    assert saved["messages"][0] == {"role": "system", "content": "Be brief."}
    assert saved["messages"][2] == {"role": "assistant", "content": "1", "reasoning_content": "hm"}
    assert saved["messages"][4]["tool_calls"] == [CALL]
    assert saved["tools"][0]["function"]["name"] == "f"


def test_the_newline_that_an_answer_starts_with_is_kept() -> None:
    """HTML drops one right after `<pre>`: there have to be two."""
    for text in ("\nYes", "Yes"):
        html = conversation("first", "m", [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}])
        assert f'tabindex="0">\n{text}</pre>' in html


def test_an_answer_with_a_call_that_cannot_be_read_is_saved_as_it_was_written() -> None:
    broken = {"role": "assistant", "content": "", "tool_calls": [{"invalid": "{"}], "raw": "<tool_call>{</tool_call>"}
    mixed = {**broken, "tool_calls": [{"invalid": "{"}, CALL]}
    saved = json.loads(saved_rows([[TALK[0], broken, TALK[2], mixed]], "", []))["messages"]
    assert saved[1] == {"role": "assistant", "content": "<tool_call>{</tool_call>"}
    assert saved[3] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
