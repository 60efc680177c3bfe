"""What a click or a message of the Chat page asks for, before any model answers; with controls that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.services.chat_messages import SAMPLING
from app.services.chat_pair import ChatPair
from trainers.config.mistakes import ConfigError
from ui.pages.chat import Page
from ui.pages.chat_turn import Turn

ONE, TWO = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
YES = {"role": "assistant", "content": "yes"}
CALL = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.fixture
def pair(tmp_path: Path) -> ChatPair:
    return ChatPair(tmp_path / "runs", [tmp_path])


def turn(pair: ChatPair, first: Any = (), second: Any = (), message: str = "", side: str = "both", **more: Any) -> Turn:
    sampling = {**{name: option.default for name, option in SAMPLING.items()}, **more}
    conversations = [json.dumps(list(each)) for each in (first, second)]
    values = ("embedded", None, "auto", "=base", None, message, *conversations, side, False, "", "", *sampling.values())
    return Turn(pair, values)


def test_a_message_goes_to_the_sides_that_answer(pair: ChatPair) -> None:
    assert turn(pair, [ONE, YES], message="two").sent() == {"first": [ONE, YES, TWO], "second": [TWO]}
    assert turn(pair, message="two", side="second").sent() == {"second": [TWO]}
    for wrong in ({"message": " "}, {"message": "x", "side": "third"}):
        with pytest.raises(ConfigError):
            turn(pair, **wrong).sent()


def test_an_edit_is_of_both_if_both_have_the_message(pair: ChatPair) -> None:
    edit = {"act": "edit", "index": 0, "text": "two"}
    assert turn(pair, [ONE, YES], [ONE]).changed("second", edit) == {"first": [TWO], "second": [TWO]}
    assert turn(pair, [ONE, YES], [TWO, YES]).changed("first", edit) == {"first": [TWO]}
    assert turn(pair, [ONE, YES]).changed("first", edit) == {"first": [TWO]}
    for index in (1, 2, -1, True, "0", None, 0.0):
        with pytest.raises(ConfigError, match="does not exist"):
            turn(pair, [ONE, YES]).changed("first", {**edit, "index": index})


def test_results_and_another_answer_are_of_one_side(pair: ChatPair) -> None:
    result = {"role": "tool", "content": "{}", "name": "f", "tool_call_id": "call00000"}
    results = {"act": "results", "results": ["{}"]}
    assert turn(pair, [ONE, CALLING], [ONE]).changed("first", results) == {"first": [ONE, CALLING, result]}
    again = turn(pair, [ONE, YES], [ONE, YES], seed=2**32 - 1)
    assert again.changed("second", {"act": "regenerate"}) == {"second": [ONE]}
    assert again.seed == 0, "the next one, and there is none after the last"
    for event in (
        results,
        {"act": "regenerate"},
        {"act": "x"},
        None,
        {"act": "regenerate", "x": {"path": 1, "meta": 2}},
    ):
        with pytest.raises(ConfigError):
            turn(pair, [ONE]).changed("first", event)


def test_what_was_not_answered_is_not_drawn_as_if_it_were_kept(pair: ChatPair) -> None:
    """Stopped in the first pane, the second never answers: its message is neither in its data nor, at last, in view."""
    stopped = turn(pair, message="two")
    stopped.start(stopped.sent(), {"first": None, "second": None})
    assert "two" in stopped.views()[1], "the control: while it waits"
    stopped.is_over = True
    assert "two" not in stopped.views()[1]
    assert not isinstance(stopped.data()[1], str)


def test_undo_and_clear_leave_a_pane_without_messages_alone(pair: ChatPair) -> None:
    page, target = Page(pair), ("embedded", None, "auto", "=none", None)
    full, empty = json.dumps([ONE, YES, TWO, YES]), ""
    text, first, second, data, other, *_ = page.undo(*target, full, empty)
    assert (text, json.loads(data)) == ("two", [ONE, YES])
    assert "one" in first
    assert "two" not in first
    assert not isinstance(second, str)
    assert not isinstance(other, str)
    assert "ts-alert" in page.undo(*target, "{", empty)[6]
    cleared = page.clear(full, empty, True)
    assert cleared[3:5] == ("", "")
    assert not isinstance(cleared[2], str)
    assert not any(isinstance(each, str) for each in page.clear(full, empty, False)), "the reader said no"


def test_save_says_what_is_missing(pair: ChatPair) -> None:
    page = Page(pair)
    rows, _ = page.save(json.dumps([ONE, YES]), "", "Be brief.", "")
    assert [message["role"] for message in json.loads(rows)["messages"]] == ["system", "user", "assistant"]
    for wrong in (("", "", "", ""), ("{", "", "", ""), (json.dumps([ONE]), "", "", "[{}]")):
        rows, alerts = page.save(*wrong)
        assert rows == ""
        assert "ts-alert" in alerts
