"""Rows in the forms in which others publish them: each means what it says, or is refused with a way out."""

from __future__ import annotations

import pytest

from tests.unit.data.test_support import configure, write_jsonl
from trainers.config.mistakes import ConfigError
from trainers.data.formats import RowError, canonical
from trainers.data.json_rows import parse_object
from trainers.data.prepare import prepare


@pytest.mark.parametrize("key", ["train_detail", "training_detail"])
def test_a_message_that_is_trained_in_part_is_refused(key):
    """As in Axolotl. Controls: of a message that is not trained, and of the user's, it says nothing."""
    part = {key: [{"begin_offset": 0, "end_offset": 0, "train": False}]}
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc", **part}]}
    with pytest.raises(RowError, match=rf"messages\[1\].{key} trains parts of a message, which is not supported"):
        canonical(row, "chat", {}, True)
    row["messages"][1]["train"] = False
    row["messages"] += [{"role": "user", "content": "d", **part}, {"role": "assistant", "content": "e", key: None}]
    document = canonical(row, "chat", {}, True)
    assert document.left_out == {1}
    assert document.unused == (f"messages[].{key}",)


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("keys", [("role", "content"), ("from", "value"), ("role", "value"), ("from", "content")])
def test_messages_have_their_keys_by_either_name(column, keys):
    turns = [("user" if keys[0] == "role" or column == "messages" else "human", "a"), ("assistant", "b")]
    row = {column: [dict(zip(keys, turn, strict=True)) for turn in turns]}
    document = canonical(row, "auto", {}, True)
    read = [(message["role"], message["content"]) for message in document.messages]
    assert read == [("user", "a"), ("assistant", "b")]
    assert document.unused == ()


def test_a_message_of_a_tree_is_no_text_by_itself(tmp_path):
    """As in OpenAssistant/oasst1. Control: it is, if the format says so."""
    row = {"message_id": "2", "parent_id": "1", "role": "assistant", "text": "An answer"}
    path = write_jsonl(tmp_path / "data.jsonl", [row])
    with pytest.raises(ConfigError, match="each row is a message of a tree"):
        prepare(configure(tmp_path, path), "train")
    report = prepare(configure(tmp_path, path, dataset_format="text"), "train").report
    assert (report.rows, report.bad) == (1, 0)


def test_rows_that_are_all_bad_are_not_blamed_on_their_length(tmp_path):
    """Control: rows that are too long are."""
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a", "completion": ""}])
    with pytest.raises(ConfigError, match=r"repair the data$"):
        prepare(configure(tmp_path, path), "train")
    path = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "a " * 99, "completion": "b"}])
    with pytest.raises(ConfigError, match="repair the data or raise max_length"):
        prepare(configure(tmp_path, path, max_length=8, overlong="drop"), "train")


def test_broken_lines_say_what_a_line_is():
    for line in (b"{", b'{"a": 1},'):
        assert parse_object(line).detail.endswith("; a row is a JSON object on one line")
    number = parse_object(b'{"a": ' + b"9" * 5000 + b"}")
    assert number.detail == "a number has over 4,300 digits; make it text"
