"""Sources: every kind of file, shards that give the same rows wherever they are cut, names that lead nowhere."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data.test_support import configure, write_jsonl
from trainers.config.mistakes import ConfigError
from trainers.data import files as files_module
from trainers.data import table_rows
from trainers.data.data_file import DataFile
from trainers.data.files import identity, resolve
from trainers.data.json_rows import shard_lines
from trainers.data.prepare import prepare
from trainers.data.shards import BadRow
from trainers.data.sources import plan, read, unread_columns

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def data_file(path: Path, kind: str) -> DataFile:
    return DataFile(str(path), path.name, path.name, kind, path.stat().st_size)


def rows_of(path: Path, kind: str, sample_by: str = "line", shard_bytes: int = 1 << 40):
    """All items of a file, read shard by shard; checks that shards know their rows."""
    items = []
    for shard in plan([data_file(path, kind)], sample_by, shard_bytes):
        assert shard.first_row == len(items)
        got = list(read(shard, sample_by))
        assert len(got) == shard.rows
        items += got
    return items


def values(items):
    return [item for _, item in items]


LINES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"text": WORDS}).map(lambda row: json.dumps(row, ensure_ascii=False).encode()),
        st.sampled_from([b"", b"  ", b"{", b"[1]", b"\xff\xfe", b'{"text": "' + b"x" * 200 + b'"}']),
    ),
    max_size=30,
)


@quick
@given(lines=LINES, ending=st.sampled_from([b"\n", b"\r\n"]), last=st.booleans(), size=st.integers(1, 300))
def test_jsonl_gives_the_same_rows_wherever_it_is_cut(tmp_path, lines, ending, last, size):
    path = tmp_path / "data.jsonl"
    path.write_bytes(ending.join(lines) + (ending if last else b""))
    whole = rows_of(path, "jsonl")
    assert rows_of(path, "jsonl", shard_bytes=size) == whole
    while lines and not lines[-1].strip():
        lines = lines[:-1]
    assert [line for line, _ in whole] == (list(range(1, len(lines) + 1)) or [1])
    for raw, item in zip(lines, values(whole), strict=False):
        assert item == json.loads(raw) if raw.startswith(b'{"') else isinstance(item, BadRow)


@quick
@given(
    rows=st.lists(st.tuples(st.text(max_size=8), st.sampled_from(["", "a", "b\nc", 'd"e', "f\r\ng", ",", "h\ni\nj"]))),
    ending=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    size=st.integers(1, 200),
)
def test_csv_gives_the_same_rows_wherever_it_is_cut(tmp_path, rows, ending, last, size):
    rows = [(a.encode("utf-8", "ignore").decode(), b) for a, b in rows]
    stream = io.StringIO()
    csv.writer(stream, lineterminator=ending, quoting=csv.QUOTE_ALL).writerows([("prompt", "completion"), *rows])
    text = stream.getvalue()
    path = tmp_path / "data.csv"
    path.write_bytes((text if last else text.removesuffix(ending)).encode())
    whole = rows_of(path, "csv")
    assert rows_of(path, "csv", shard_bytes=size) == whole
    if rows:
        assert values(whole) == [{"prompt": a, "completion": b} for a, b in rows]


@quick
@given(
    rows=st.lists(st.one_of(st.fixed_dictionaries({"text": WORDS}), st.integers())),
    wrapped=st.booleans(),
    indent=st.sampled_from([None, 2]),
    size=st.integers(1, 200),
)
def test_a_json_list_gives_the_same_rows_wherever_it_is_cut(tmp_path, rows, wrapped, indent, size):
    path = tmp_path / "data.json"
    beside = {"about": {"data": 1}} if any(isinstance(row, dict) for row in rows) else {}
    value = {**beside, "data": rows} if wrapped else rows
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False), encoding="utf-8")
    whole = rows_of(path, "json")
    assert rows_of(path, "json", shard_bytes=size) == whole
    if rows:
        assert [isinstance(item, BadRow) or item for item in values(whole)] == [
            row if isinstance(row, dict) else True for row in rows
        ]
    if rows and indent and not wrapped:
        text = path.read_text(encoding="utf-8").split("\n")
        assert all(text[line - 1].strip()[0] in "{-0123456789" for line, _ in whole)


CSV_ROWS = st.lists(st.tuples(st.text("abc é", min_size=1), st.text("xyz 1", min_size=1)), min_size=1, max_size=60)


@settings(quick, max_examples=150)
@given(
    rows=CSV_ROWS,
    delimiter=st.sampled_from(",;\t|"),
    at=st.integers(0, 59),
    second=st.booleans(),
    size=st.integers(1, 200),
)
def test_a_csv_quote_that_is_never_closed_costs_its_own_line_alone(tmp_path, rows, delimiter, at, second, size):
    at %= len(rows)
    lines = [delimiter.join(row) for row in [("prompt", "completion"), *rows]]
    prompt, completion = rows[at]
    lines[at + 1] = f'{prompt}{delimiter}"{completion}' if second else f'"{prompt}{delimiter}{completion}'
    path = tmp_path / "data.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    items = rows_of(path, "csv")
    assert rows_of(path, "csv", shard_bytes=size) == items
    assert (items[at][0], items[at][1].kind) == (at + 2, "broken CSV")
    assert values(items[:at] + items[at + 1 :]) == [
        {"prompt": a, "completion": b} for a, b in rows[:at] + rows[at + 1 :]
    ]


@settings(quick, max_examples=150)
@given(rows=CSV_ROWS, place=st.floats(0, 0.999), size=st.integers(1, 200))
def test_a_csv_quote_that_went_missing_is_a_bad_row(tmp_path, rows, place, size):
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    text = stream.getvalue()
    quotes = [index for index, letter in enumerate(text) if letter == '"']
    missing = quotes[int(place * len(quotes))]
    at = text.count("\n", 0, missing)
    path = tmp_path / "data.csv"
    path.write_text("prompt,completion\n" + text[:missing] + text[missing + 1 :], encoding="utf-8")
    items = rows_of(path, "csv")
    assert rows_of(path, "csv", shard_bytes=size) == items
    others = [{"prompt": a, "completion": b} for a, b in rows[:at] + rows[at + 1 :]]
    assert values(items[:at] + items[at + 1 :]) == others
    if text[missing - 1 : missing] not in ("", "\n", ","):  # at its opening, a field is no longer quoted: all the same
        assert isinstance(items[at][1], BadRow)


PROSE = ["It was late, and dark", "", "Nobody came", "one, two, three", "    indented"]


@pytest.mark.parametrize("header", ["text", "prompt,completion", "prompt,completion,source"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_long_csv_field_is_read_and_one_that_is_not_closed_is_not(tmp_path, header, closed):
    path = tmp_path / "data.csv"
    names = header.split(",")
    text = "\n".join(PROSE[number % len(PROSE)] for number in range(20_000))
    before, after = ["a"] * (len(names) - 1), ["b"] * len(names)
    path.write_text("\n".join([header, ",".join([*before, f'"{text}' + '"' * closed]), ",".join(after)]) + "\n")
    items = rows_of(path, "csv")
    assert rows_of(path, "csv", shard_bytes=5000) == items
    assert items[-1][1] == dict(zip(names, after, strict=True))
    if closed:
        assert items[0] == (2, dict(zip(names, [*before, text], strict=True)))
        assert len(items) == 2
    else:
        assert (items[0][0], items[0][1].kind) == (2, "broken CSV")
        assert len(items) == 20_001


@pytest.mark.parametrize(
    ("header", "row", "opened", "closed"),
    [
        ("prompt,completion", "question {0},answer {0}", '"question,answer', 'a screen of 6",tall'),
        ("prompt,completion", "question {0},answer {0}", 'question,"answer', 'a screen of 6",tall'),
        ("prompt;completion", "a, b {0};answer {0}", '"question;answer', 'a screen of 6";tall'),
        ("text", "row {0}", '"opened', 'a screen of 6"'),
    ],
)
def test_rows_that_a_long_csv_field_swallows_are_found(tmp_path, header, row, opened, closed):
    path = tmp_path / "data.csv"
    lines = [row.format(number) for number in range(9_000)]
    lines[100], lines[7_100] = opened, closed
    path.write_text("\n".join([header, *lines]) + "\n")
    control = csv.reader(path.open(), delimiter=";" if ";" in header else ",", strict=True)
    assert len(list(control)) < 2_100  # by the rules of CSV all is well
    items = rows_of(path, "csv")
    assert rows_of(path, "csv", shard_bytes=5000) == items
    assert (len(items), [line for line, item in items if isinstance(item, BadRow)]) == (9_000, [102])


def test_a_csv_field_may_be_a_table_as_wide_as_its_file(tmp_path):
    path = tmp_path / "data.csv"
    table = "\n".join(f"country {number},capital {number}" for number in range(50))
    path.write_text(f'prompt,completion\nAs CSV!,"{table}"\nb,c\n')
    assert values(rows_of(path, "csv")) == [
        {"prompt": "As CSV!", "completion": table},
        {"prompt": "b", "completion": "c"},
    ]


def test_a_broken_first_line_of_a_csv_says_how(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(b"prompt,completion\ra,b\r")
    with pytest.raises(ConfigError, match=r"data.csv: its first line is broken: a carriage return"):
        rows_of(path, "csv")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data.csv", "prompt;completion\na, b, c;d\n"),
        ("data.csv", "prompt;completion;a note, long\na, b, c;d;\na, b, c;d;e\n"),
        ("data.csv", 'prompt|completion\n"a, b, c"|d\n'),
        ("data.csv", "prompt\tcompletion\na, b, c\td\n"),
        ("data.tsv", "prompt,completion\n'a',d\n".replace("'a'", '"a, b, c"')),
    ],
)
def test_the_delimiter_is_found(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    first = rows_of(path, name[-3:])[0][1]
    assert (first["prompt"], first["completion"]) == ("a, b, c", "d")


def test_one_column_needs_no_delimiter(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("text\none; two\nthree|four\n")
    assert values(rows_of(path, "csv")) == [{"text": "one; two"}, {"text": "three|four"}]


def _one_per_line(rows, indent):
    return "\n".join(map(json.dumps, rows)) + "\n"


def _one_after_another(rows, indent):
    return "\n".join(json.dumps(row, indent=indent, ensure_ascii=False) for row in rows)


def _with_commas(rows, indent):
    return ",\n".join(json.dumps(row, indent=indent) for row in rows) + ","


def _without_a_gap(rows, indent):
    return "".join(json.dumps(row, indent=indent) for row in rows)


def _one_list(rows, indent):
    return json.dumps(rows, indent=indent, ensure_ascii=False)


def _two_lists(rows, indent):
    half = len(rows) // 2
    return json.dumps(rows[:half], indent=indent) + "\n" + json.dumps(rows[half:], indent=indent)


def _a_list_then_objects(rows, indent):
    half = len(rows) // 2
    return json.dumps(rows[:half]) + _without_a_gap(rows[half:], indent)


def _a_list_with_a_comma_at_its_end(rows, indent):
    return _one_list(rows, indent).removesuffix("]") + ",]"


def _an_object_around_the_list(rows, indent):
    return json.dumps(
        {"version": [1], "about": {"rows": [{"text": "not this"}]}, "rows": rows, "end": 7}, indent=indent
    )


JSON_STYLES = [
    _one_per_line, _one_after_another, _with_commas, _without_a_gap, _one_list, _two_lists, _a_list_then_objects,
    _a_list_with_a_comma_at_its_end, _an_object_around_the_list,
]  # fmt: skip
JSON_ROWS = st.lists(
    st.fixed_dictionaries({"text": WORDS, "more": st.lists(st.integers()) | st.dictionaries(WORDS, WORDS)}), min_size=1
)


@settings(quick, max_examples=200)
@given(
    rows=JSON_ROWS,
    style=st.sampled_from(JSON_STYLES),
    indent=st.sampled_from([None, 2]),
    ending=st.sampled_from(["\n", "\r\n"]),
    bom=st.booleans(),
    size=st.integers(1, 200),
)
def test_a_json_file_is_read_to_its_end_however_it_is_written(tmp_path, rows, style, indent, ending, bom, size):
    path = tmp_path / "data.json"
    text = style(rows, indent).replace("\n", ending)
    path.write_bytes((("\ufeff" if bom else "") + text).encode())
    items = rows_of(path, "json")
    assert values(items) == rows
    assert rows_of(path, "json", shard_bytes=size) == items
    starts = text.split("\n")
    assert all("{" in starts[line - 1] for line, _ in items)


@settings(quick, max_examples=200)
@given(
    rows=JSON_ROWS,
    style=st.sampled_from(JSON_STYLES),
    indent=st.sampled_from([None, 2]),
    place=st.floats(0, 1),
    noise=st.sampled_from(["}", "]", "{", "[", '"', "x", "\x00", ":", "7"]),
    size=st.integers(1, 200),
)
def test_a_json_file_that_is_damaged_loses_no_row_in_silence(tmp_path, rows, style, indent, place, noise, size):
    """Wherever a letter slips in: every row is there, or an item that is bad says where the loss begins."""
    path = tmp_path / "data.json"
    text = style(rows, indent)
    at = round(place * len(text))
    path.write_text(text[:at] + noise + text[at:], encoding="utf-8")
    items = values(rows_of(path, "json"))
    assert rows_of(path, "json", shard_bytes=size) == list(rows_of(path, "json"))
    assert len(items) >= len(rows) or any(isinstance(item, BadRow) for item in items) or _is_no_row(items)


def _is_no_row(items):
    """The whole of it became one row that no format knows, which is refused."""
    return len(items) == 1 and "text" not in items[0]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_list_that_is_cut_off_is_not_taken_for_whole(tmp_path, count):
    path = tmp_path / "data.json"
    path.write_text("[" + "".join(f'{{"text": "{number}"}},\n' for number in range(count)))
    last, bad = rows_of(path, "json")[-1]
    assert last == count + 1
    assert (bad.kind, "truncated" in bad.detail) == ("broken JSON", True)


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_key_that_stands_twice_is_a_bad_row(tmp_path, kind):
    path = tmp_path / f"data.{kind}"
    rows = ['{"text": "a"}', '{"text": "b", "more": {"x": 1, "y": 2, "x": 3}}', '{"text": "c"}']
    path.write_text("\n".join(rows) if kind == "jsonl" else f"[{','.join(rows)}]")
    first, second, third = values(rows_of(path, kind))
    assert (first, second.kind, third) == ({"text": "a"}, "duplicate key", {"text": "c"})
    assert "'x' appears twice" in second.detail


@pytest.mark.timeout(20)  # each key compared with each other one took hours
def test_a_row_of_many_keys_with_one_twice_is_answered_at_once(tmp_path):
    keys = ",".join(f'"k{number}":1' for number in range(300_000))
    path = tmp_path / "data.jsonl"
    path.write_text(f'{{{keys},"k299999":2}}\n')
    assert [row.kind for row in values(rows_of(path, "jsonl"))] == ["duplicate key"]


@quick
@given(
    lines=st.lists(st.one_of(WORDS, st.just(""))),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    sample_by=st.sampled_from(["line", "paragraph", "document"]),
    size=st.integers(1, 100),
)
def test_text_gives_the_same_rows_wherever_it_is_cut(tmp_path, lines, ending, sample_by, size):
    path = tmp_path / "data.txt"
    path.write_bytes(ending.join(line.encode() for line in lines))
    whole = rows_of(path, "text", sample_by)
    assert rows_of(path, "text", sample_by, size) == whole


def test_text_by_line_paragraph_and_document(tmp_path):
    path = tmp_path / "data.txt"
    path.write_bytes("\ufeffone\r\ntwo\r\n\r\n\r\nthree\r\n".encode())
    assert rows_of(path, "text") == [(1, {"text": "one"}), (2, {"text": "two"}), (5, {"text": "three"})]
    assert rows_of(path, "text", "paragraph") == [(1, {"text": "one\ntwo"}), (5, {"text": "three"})]
    assert values(rows_of(path, "text", "document")) == [{"text": "one\ntwo\n\n\nthree"}]


def test_parquet_by_row_groups(tmp_path):
    path = tmp_path / "data.parquet"
    table = pa.table({"text": [f"row {i}" for i in range(100)], "more": list(range(100))})
    pq.write_table(table, path, row_group_size=7)
    items = rows_of(path, "parquet", shard_bytes=1)
    assert len(plan([data_file(path, "parquet")], "line", 1)) == 15
    assert items == [(i + 1, {"text": f"row {i}", "more": i}) for i in range(100)]
    shard = plan([data_file(path, "parquet")], "line")[0]
    assert next(read(shard, "line", ["text", "prompt"]))[1] == {"text": "row 0"}


def test_json_that_is_jsonl_and_json_that_is_one_row(tmp_path):
    path = tmp_path / "data.json"
    write_jsonl(path, [{"text": "a"}, {"text": "b"}])
    assert rows_of(path, "json") == [(1, {"text": "a"}), (2, {"text": "b"})]
    path.write_text('{"messages": [\n{"role": "user", "content": "a"}]}')
    assert values(rows_of(path, "json")) == [{"messages": [{"role": "user", "content": "a"}]}]


QUESTION = {"q": "Why?", "a": "Because."}


@pytest.mark.parametrize(
    ("value", "columns", "rows"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, {}, None),
        ({"messages": [{"role": "user", "content": "a"}], "sources": [{"url": "x"}]}, {}, None),
        ({"prompt": "a", "tags": ["b", "c"]}, {}, None),
        ({"prompt": "a", "completion": "b", "sources": [{"url": "x"}]}, {}, None),
        ({"question": "a", "tags": ["b", "c"]}, {}, None),
        ({**QUESTION, "sources": [{"url": "x"}]}, {"prompt": "q", "completion": "a"}, None),
        ({**QUESTION, "similar": [QUESTION]}, {"prompt": "q", "completion": "a"}, None),
        ({"chat": [{"role": "user", "content": "a"}]}, {"messages": "chat"}, None),
        ({"chat": [{"role": "user", "content": "a"}]}, {}, "chat"),  # nothing says that it is one conversation
        ({"data": [QUESTION]}, {}, "data"),
        ({"data": [QUESTION], "tags": ["x"]}, {"prompt": "q", "completion": "a"}, "data"),
        ({"text": "about", "rows": [QUESTION]}, {"prompt": "q", "completion": "a"}, "rows"),
        ({"messages": [QUESTION, QUESTION]}, {"prompt": "q", "completion": "a"}, "messages"),
        ({"splits": [{"name": "train"}], "rows": [QUESTION]}, {"prompt": "q", "completion": "a"}, "rows"),
        ({"splits": [{"name": "train"}], "rows": [QUESTION]}, {}, None),
        ({"version": "1", "system": "Be brief", "rows": [{"text": "a"}, {"text": "b"}]}, {}, "rows"),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_is_a_row_or_stands_around_rows(tmp_path, value, columns, rows, indent):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(value, indent=indent))
    (shard,) = plan([data_file(path, "json")], "line", columns=columns)
    assert values(read(shard, "line")) == ([value] if rows is None else value[rows])


def test_tsv_keeps_empty_cells_at_its_end(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("instruction\tinput\toutput\na\tb\t\n\n")
    assert values(rows_of(path, "tsv")) == [{"instruction": "a", "input": "b", "output": ""}]


def test_embedded_by_split(tmp_path):
    config = configure(tmp_path, "embedded", eval_dataset_name="embedded", eval_split="test")
    assert resolve(config, "train")[0].name == "train.jsonl"
    assert resolve(config, "eval")[0].name == "test.jsonl"
    with pytest.raises(ConfigError, match="use one of eval, test, train"):
        resolve(configure(tmp_path, "embedded", dataset_split="dev"), "train")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}/data.jsonn", "did you mean .*data.jsonl"),
        ("{}/nowhere/x.jsonl", "does not exist"),
        ("{}/*.csv", "matches no file"),
        ("{}/link.jsonl", "repair the symlink"),
        ("{}/archive.pt", "'.pt'; convert it"),
        ("{}/empty", "holds no data file"),
        ("{}/pipe.jsonl", "not a regular file"),
        ("/etc/passwd", "ends in 'nothing'"),
        ("datta.jsonl", "does not exist"),
    ],
)
def test_a_name_that_leads_nowhere_says_so(tmp_path, name, said):
    write_jsonl(tmp_path / "data.jsonl", [{"text": "a"}])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "archive.pt").write_bytes(b"PK")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match=said):
        resolve(configure(tmp_path, name.format(tmp_path)), "train")


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "a"}])

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    config = configure(tmp_path, path)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"cannot read .*data.jsonl: Permission denied"):
        resolve(config, "train")


def test_identity_is_the_content_or_for_large_data_path_size_and_time(tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "data.jsonl", [{"text": "a"}])
    one, two = ([data_file(tmp_path / folder / "data.jsonl", "jsonl")] for folder in ("a", "b"))
    assert identity(one) == identity(two)
    monkeypatch.setattr(files_module, "HASHED_BYTES", 1)
    assert identity(one) != identity(two)
    before = identity(one)
    os.utime(one[0].path, ns=(1, 1))
    assert identity(one) != before


def test_a_hub_data_set_is_read_by_row_number(tmp_path, monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"row {i}" for i in range(250)], "n": list(range(250))})
    monkeypatch.setattr(table_rows, "_hub_rows", lambda *names: rows)
    found = resolve(configure(tmp_path, "someone/stories"), "train")
    assert (found[0].kind, found[0].size, found[0].display_name) == ("arrow", 250, "someone/stories[train]")
    assert identity(found)[0][0] == "someone/stories"
    shard = plan(found, "line")[0]
    assert list(read(shard, "line", ["text"])) == [(i + 1, {"text": f"row {i}"}) for i in range(250)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("Dataset 'a/b' is a gated dataset on the Hub."), "HF_TOKEN"),
        (FileNotFoundError("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed."), "check the name"),
        (ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)"), "unreachable"),
        (ValueError('Unknown split "trian". Should be one of ["train"].'), "Unknown split"),
    ],
)
def test_a_hub_data_set_that_cannot_be_had_says_the_way_out(tmp_path, monkeypatch, error, said):
    def fail(*names):
        raise error

    monkeypatch.setattr(table_rows, "_hub_rows", fail)
    with pytest.raises(ConfigError, match=said):
        resolve(configure(tmp_path, "a/b"), "train")


def test_a_json_file_too_large_to_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.data.json_rows.JSON_BYTES", 10)
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"text": "a" * 20}], indent=1))
    with pytest.raises(ConfigError, match="save it as JSONL"):
        plan([data_file(path, "json")], "line")


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(ConfigError, match=r"cannot read data.parquet"):
        plan([data_file(path, "parquet")], "line")


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 3, ["prompt", "completion", "completion"]), path)
    with pytest.raises(ConfigError, match="the column 'completion' appears twice; keep one of them"):
        prepare(configure(tmp_path, path), "train")


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", tz="Mars/Base")])
def test_a_time_that_python_cannot_represent_matters_only_where_it_is_used(tmp_path, kind):
    path, times = tmp_path / "data.parquet", pa.array([2**62], kind)
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["b"], "time": times}), path)
    assert prepare(configure(tmp_path, path), "train").report.unused == {"time": 1}
    pq.write_table(pa.table({"prompt": times, "completion": ["b"]}), path)
    with pytest.raises(ConfigError, match=r"cannot read .*data\.parquet: .*(out of range|Mars)"):
        prepare(configure(tmp_path, path), "train")
    pq.write_table(pa.table({"prompt": ["a"], "time": times}), path)
    with pytest.raises(ConfigError, match="the columns prompt, time match no known format"):
        prepare(configure(tmp_path, path), "train")


@pytest.mark.parametrize("size", [1, 40, 1 << 20])
def test_a_file_that_gets_shorter_while_it_is_read_is_an_error_and_no_endless_loop(tmp_path, size):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 1000)
    before = data_file(path, "jsonl")
    shards = shard_lines(before, size)
    next(shards)
    os.truncate(path, 0)
    if size < before.size:
        with pytest.raises(ConfigError, match=r"data\.jsonl changed while it was read"):
            list(shards)


def test_a_file_that_is_gone_by_the_time_it_is_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a"], "more": ["b"]}), path)
    file = data_file(path, "parquet")
    assert unread_columns(file, ["text"]) == ["more"]
    path.unlink()
    with pytest.raises(ConfigError, match=r"rows\.parquet"):
        unread_columns(file, ["text"])
