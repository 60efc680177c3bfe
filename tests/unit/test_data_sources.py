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

from tests.unit.test_data_support import configure, write_jsonl
from trainers.config import ConfigError
from trainers.data import files as files_module
from trainers.data.files import DataFile, identity, resolve
from trainers.data.shards import Bad
from trainers.data.sources import plan, read

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
        assert item == json.loads(raw) if raw.startswith(b'{"') else isinstance(item, Bad)


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
    value = {"about": {"data": 1}, "data": rows} if wrapped else rows
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False), encoding="utf-8")
    whole = rows_of(path, "json")
    assert rows_of(path, "json", shard_bytes=size) == whole
    if rows:
        assert [isinstance(item, Bad) or item for item in values(whole)] == [
            row if isinstance(row, dict) else True for row in rows
        ]
    if rows and indent and not wrapped:
        text = path.read_text(encoding="utf-8").split("\n")
        assert all(text[line - 1].strip()[0] in "{-0123456789" for line, _ in whole)


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


def test_tsv_keeps_empty_cells_at_its_end(tmp_path):
    path = tmp_path / "data.tsv"
    path.write_text("instruction\tinput\toutput\na\tb\t\n\n")
    assert values(rows_of(path, "tsv")) == [{"instruction": "a", "input": "b", "output": ""}]


def test_a_folder_gives_its_data_files_in_order(tmp_path):
    folder = tmp_path / "data"
    (folder / "b").mkdir(parents=True)
    for name in ("z.jsonl", "b/a.txt", "README.md", ".hidden.jsonl", "notes.md", "picture.png"):
        (folder / name).write_text("x")
    names = [file.name for file in resolve(configure(tmp_path, folder), "train")]
    assert names == ["b/a.txt", "notes.md", "z.jsonl"]
    names = [file.name for file in resolve(configure(tmp_path, f"{folder}/**/*.jsonl"), "train")]
    assert names == ["z.jsonl"]


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
        ("{}/archive.zip", "'.zip'; convert it"),
        ("{}/empty", "holds no data file"),
        ("{}/pipe.jsonl", "not a plain file"),
        ("https://example.org/data.jsonl", "is a URL"),
        ("file:///etc/passwd", "is a URL"),
        ("/etc/passwd", "ends in 'nothing'"),
        ("datta.jsonl", "does not exist"),
    ],
)
def test_a_name_that_leads_nowhere_says_so(tmp_path, name, said):
    write_jsonl(tmp_path / "data.jsonl", [{"text": "a"}])
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "archive.zip").write_bytes(b"PK")
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
    monkeypatch.setattr("trainers.data.table_rows.hub_rows", lambda *names: rows)
    monkeypatch.setattr(files_module, "hub_rows", lambda *names: rows)
    found = resolve(configure(tmp_path, "someone/stories"), "train")
    assert (found[0].kind, found[0].size, found[0].shown) == ("hub", 250, "someone/stories[train]")
    assert identity(found)[0][0] == "someone/stories"
    shard = plan(found, "line")[0]
    assert list(read(shard, "line", ["text"])) == [(i + 1, {"text": f"row {i}"}) for i in range(250)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError("Dataset 'a/b' is a gated dataset on the Hub."), "HF_TOKEN"),
        (FileNotFoundError("Dataset 'a/b' doesn't exist on the Hub or cannot be accessed."), "check the name"),
        (ConnectionError("Couldn't reach 'a/b' on the Hub (OfflineModeIsEnabled)"), "out of reach"),
        (ValueError('Unknown split "trian". Should be one of ["train"].'), "Unknown split"),
    ],
)
def test_a_hub_data_set_that_cannot_be_had_says_the_way_out(tmp_path, monkeypatch, error, said):
    def fail(*names):
        raise error

    monkeypatch.setattr(files_module, "hub_rows", fail)
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
