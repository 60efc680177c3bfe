"""Rows: formats by their columns, and every kind of bad row with its file, line and reason."""

from __future__ import annotations

import pytest

from tests.unit.data.test_support import chat, configure, write_jsonl
from trainers.config.mistakes import ConfigError
from trainers.data.formats import Document, RowError, canonical, recognise
from trainers.data.prepare import prepare

GOOD = chat("question", "answer")
DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"

BAD_LINES = {
    "empty line": b"",
    "broken JSON": b'{"messages": [',
    "not an object": b"[1, 2]",
    "invalid UTF-8": b'{"messages": "\xff"}',
    "missing key": {"mesages": []},
    "wrong type": {"messages": [{"role": "user", "content": 7}]},
    "unknown role": {"messages": [{"role": "narrator", "content": "x"}, {"role": "assistant", "content": "y"}]},
    "row too large": b'{"messages": "' + b"x" * 10_000_001 + b'"}',
    "nested too deeply": DEEP,
    "no trained token": {"messages": [{"role": "user", "content": "only a question"}]},
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_row_is_refused_with_file_line_and_reason(tmp_path, kind):
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, GOOD, BAD_LINES[kind], GOOD])
    with pytest.raises(ConfigError) as caught:
        prepare(configure(tmp_path, path), "train")
    assert caught.value.lines[0].startswith(f"{path}:3: {kind}: ")
    assert "1 of 4 rows" in caught.value.lines[-1]
    assert "bad_rows=skip" in caught.value.lines[-1]


def test_lists_for_columns_in_place_of_rows_say_so(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('{"prompt": ["a", "b"], "completion": ["c", "d"]}')
    with pytest.raises(ConfigError, match="write a row for each example, not a list for each column"):
        prepare(configure(tmp_path, path), "train")


def test_bad_rows_are_skipped_counted_and_listed(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, *BAD_LINES.values(), GOOD])
    done = prepare(configure(tmp_path, path, bad_rows="skip"), "train")
    assert (len(done), done.report.rows, done.report.bad) == (2, len(BAD_LINES) + 2, len(BAD_LINES))
    assert done.report.bad_rows == dict.fromkeys(BAD_LINES, 1)
    listed = [example.split(": ")[:2] for example in done.report.examples()]
    assert listed == [[f"{path}:{line}", kind] for line, kind in enumerate(BAD_LINES, 2)]
    assert done.where(1) == f"{path}:{len(BAD_LINES) + 2}"
    assert any("10 bad rows skipped" in line for line in done.report.lines())


def test_only_the_first_twenty_of_a_kind_are_listed(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, *[b"{"] * 30, b"[]"])
    config = configure(tmp_path, path)
    with pytest.raises(ConfigError) as caught:
        prepare(config, "train")
    assert len(caught.value.lines) == 21
    assert "31 of 32 rows" in caught.value.lines[-1]
    assert "11 more than listed" in caught.value.lines[-1]
    report = prepare(config.model_copy(update={"bad_rows": "skip"}), "train").report
    assert len(report.examples()) == 21


def test_refusing_again_finds_them_in_the_cache(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, b"{"])
    prepare(configure(tmp_path, path, bad_rows="skip"), "train")
    with pytest.raises(ConfigError, match=r"data.jsonl:2: broken JSON"):
        prepare(configure(tmp_path, path), "train")


def test_an_empty_file_is_a_bad_row(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [GOOD])
    (folder / "b.jsonl").write_text("\n\n")
    (folder / "c.csv").write_text("prompt,completion\n")
    done = prepare(configure(tmp_path, folder, bad_rows="skip"), "train")
    assert done.report.bad_rows == {"empty file": 2}
    assert [line.split(": ")[0] for line in done.report.examples()] == [f"{folder}/b.jsonl:1", f"{folder}/c.csv:1"]


def test_blank_lines_at_the_end_are_fine(tmp_path):
    path = tmp_path / "data.jsonl"
    write_jsonl(path, [GOOD, GOOD, b"", b"  ", b"\r"])
    assert len(prepare(configure(tmp_path, path), "train")) == 2


def test_bad_csv_rows(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(b'prompt,completion\na,b\nc\n\n"d\ne",f\ng,\xff\nh,\ni,j\n\n')
    with pytest.raises(ConfigError) as caught:
        prepare(configure(tmp_path, path), "train")
    kinds = [line.removeprefix(f"{path}:").split(": ")[:2] for line in caught.value.lines[:-1]]
    assert kinds == [
        ["3", "wrong number of columns"],
        ["4", "empty line"],
        ["7", "invalid UTF-8"],
        ["8", "no trained token"],
    ]


@pytest.mark.parametrize("header", ["prompt,completion", "prompt,completion,größe"])
def test_the_header_of_a_second_file_is_no_row(tmp_path, header):
    path = tmp_path / "data.csv"
    row = ",".join("abc"[: header.count(",") + 1])
    path.write_text(f"{header}\n{row}\n{header}\n{row}\n")
    with pytest.raises(ConfigError, match=r"data\.csv:3: repeated header: the column names again"):
        prepare(configure(tmp_path, path), "train")
    path.write_text("text\ntext\n")
    assert len(prepare(configure(tmp_path, path), "train")) == 1, "of one column, it may be a row"


def test_a_broken_json_list_says_where(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('[\n{"text": "a"},\n7,\n{"text": "b"\n')
    with pytest.raises(ConfigError) as caught:
        prepare(configure(tmp_path, path), "train")
    assert caught.value.lines[0].startswith(f"{path}:3: not an object")
    assert caught.value.lines[1].startswith(f"{path}:4: broken JSON")


def test_markup_and_control_characters_in_bad_rows_are_harmless(tmp_path):
    row = {"messages": [{"role": "\x1b[31mred\u202e", "content": "x"}]}
    path = write_jsonl(tmp_path / "data.jsonl", [GOOD, row])
    with pytest.raises(ConfigError) as caught:
        prepare(configure(tmp_path, path), "train")
    assert all(line.isprintable() for line in caught.value.lines)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (GOOD, "chat"),
        ({"conversations": []}, "sharegpt"),
        ({"instruction": "", "input": "", "output": ""}, "alpaca"),
        ({"prompt": "", "completion": "", "text": ""}, "prompt_completion"),
        ({"text": "", "id": 1}, "text"),
        ({"question": "", "answer": ""}, None),
        ({"prompt": ""}, None),
    ],
)
def test_formats_are_recognised_by_their_columns(row, name):
    assert recognise(row, {}) == name


def test_columns_name_the_users_own():
    columns = {"prompt": "question", "completion": "answer"}
    row = {"question": "1+1?", "answer": "2", "text": "other", "prompt": "not this"}
    assert recognise(row, columns) == "prompt_completion"
    assert canonical(row, "auto", columns, False) == Document(prompt="1+1?", completion="2")
    with pytest.raises(RowError, match="'answer' is missing; did you mean 'answr'"):
        canonical({"question": "", "answr": ""}, "prompt_completion", columns, False)


def test_unknown_columns_are_refused_with_a_way_out(tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(ConfigError) as caught:
        prepare(configure(tmp_path, path), "train")
    assert f"{path}:1: the columns question, answer match no known format" in caught.value.lines
    assert "--columns role=column" in caught.value.lines[-1]
    with pytest.raises(ConfigError, match="did you mean 'answer'"):
        prepare(configure(tmp_path, path, columns="prompt=question,completion=anser"), "train")
    assert len(prepare(configure(tmp_path, path, columns="prompt=question,completion=answer"), "train")) == 1


def test_a_format_may_be_forced(tmp_path):
    row = {"text": "plain", "prompt": "a", "completion": "b"}
    path = write_jsonl(tmp_path / "data.jsonl", [row])
    assert prepare(configure(tmp_path, path, dataset_format="text"), "train").report.formats == ["text"]
    with pytest.raises(ConfigError, match=r"columns.prompt is not a role of dataset_format=text"):
        prepare(configure(tmp_path, path, dataset_format="text", columns="prompt=a"), "train")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]}
    assert canonical(row, "chat", {}, True).messages[0]["content"] == "ab"


def test_half_a_surrogate_pair_is_no_text():
    with pytest.raises(RowError, match="surrogate"):
        canonical({"text": "a\ud800"}, "text", {}, False)
