"""Data that is compressed, in a tar or an Arrow file, behind a URL or in a database: the same rows as in JSONL."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import sqlite3
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import datasets
import pyarrow as pa
import pytest
import zstandard
from moto.server import ThreadedMotoServer

from tests.unit.data.test_support import chat, configure, write_jsonl
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.files import identity, resolve
from trainers.data.local_copies import copy_of_query, copy_of_url
from trainers.data.prepare import data_fingerprint, prepare
from trainers.data.sources import plan, read

ROWS: list[dict[str, Any]] = [
    *({**chat(f"{number}+1=", str(number + 1)), "id": number, "of": {"a": [1, 2.5], "b": "x"}} for number in range(6)),
    {**chat("Grüße 🙂\n", "007"), "id": 2**60 + 1, "of": {"a": [], "b": "NA"}},
]
LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def _tar(path: Path, rows: list[dict[str, Any]], mode: str = "w") -> Path:
    members = {f"{number:04d}.json": json.dumps(row).encode() for number, row in enumerate(rows)}
    return _tar_of(path, members, mode)


def _tar_of(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner/data.jsonl", LINES)
        archive.writestr("__MACOSX/inner/._data.jsonl", b"about the file")
    return path


def _saved(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(path, num_shards=2)
    (path / "cache-1234.arrow").write_bytes((path / "data-00000-of-00002.arrow").read_bytes())  # as `map` leaves
    return path


def _saved_splits(path: Path) -> Path:
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(path)
    return path


def _arrow(path: Path, new: Callable[..., Any]) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with new(path, table.schema) as writer:
        writer.write_table(table)
    return path


STORED: dict[str, Callable[[Path], Path]] = {
    "gz": lambda folder: _written(folder / "data.jsonl.gz", gzip.compress(LINES)),
    "bz2": lambda folder: _written(folder / "data.jsonl.bz2", bz2.compress(LINES)),
    "xz": lambda folder: _written(folder / "data.jsonl.xz", lzma.compress(LINES)),
    "zst": lambda folder: _written(folder / "data.jsonl.zst", zstandard.ZstdCompressor().compress(LINES)),
    "json.gz": lambda folder: _written(folder / "DATA.JSON.GZ", gzip.compress(json.dumps(ROWS).encode())),
    "zip": lambda folder: _zip(folder / "data.zip"),
    "tar": lambda folder: _tar(folder / "data.tar", ROWS),
    "tgz": lambda folder: _tar(folder / "data.tgz", ROWS, "w:gz"),
    "tar.xz": lambda folder: _tar(folder / "data.tar.xz", ROWS, "w:xz"),
    "arrow stream": lambda folder: _arrow(folder / "data.arrow", pa.ipc.new_stream),
    "arrow file": lambda folder: _arrow(folder / "data.arrow", pa.ipc.new_file),
    "save_to_disk": lambda folder: _saved(folder / "saved"),
    "save_to_disk, splits": lambda folder: _saved_splits(folder / "saved"),
}


def rows_of(config: TrainConfig) -> list[Any]:
    """All rows in order, with every column."""
    return [item for shard in plan(resolve(config, "train"), "line") for _, item in read(shard, "line")]


def tokens_of(config: TrainConfig) -> tuple[list[int], dict[str, int]]:
    """All tokens, and the unused fields with their rows."""
    found = prepare(config, "train")
    return [token for document in range(len(found)) for token in found.document(document)[0]], found.report.unused


@pytest.mark.parametrize("stored", STORED)
def test_rows_are_the_same_however_they_are_stored(tmp_path: Path, stored: str) -> None:
    (tmp_path / "x").mkdir()
    config = configure(tmp_path, STORED[stored](tmp_path / "x"))
    assert rows_of(config) == ROWS


@pytest.mark.parametrize("stored", ["gz", "tar", "save_to_disk"])
def test_tokens_are_the_same_however_rows_are_stored(tmp_path: Path, stored: str) -> None:
    (tmp_path / "x").mkdir()
    config = configure(tmp_path, STORED[stored](tmp_path / "x"))
    assert tokens_of(config) == tokens_of(configure(tmp_path, write_jsonl(tmp_path / "plain.jsonl", ROWS)))
    assert tokens_of(config)[1] == {"id": 7, "of": 7}
    other = configure(tmp_path, write_jsonl(tmp_path / "other.jsonl", ROWS[::-1]))
    assert tokens_of(config) != tokens_of(other), "control"


def test_csv_keeps_its_text(tmp_path: Path) -> None:
    """Control: the CSV reader of datasets takes `007` for a number, and `NA` for nothing."""
    content = b'prompt,completion\n"007",NA\n1e3,\n'
    config = configure(tmp_path, _written(tmp_path / "data.csv.gz", gzip.compress(content)))
    expected = [{"prompt": "007", "completion": "NA"}, {"prompt": "1e3", "completion": ""}]
    assert rows_of(config) == expected
    theirs = datasets.load_dataset("csv", data_files=str(tmp_path / "data.csv.gz"), cache_dir=str(tmp_path / "theirs"))
    assert list(theirs["train"]) != expected


def test_a_bad_row_of_a_compressed_file_has_its_line(tmp_path: Path) -> None:
    config = configure(tmp_path, _written(tmp_path / "data.jsonl.gz", gzip.compress(LINES + b'{"messages": [\n')))
    with pytest.raises(ConfigError, match=r"data.jsonl.gz:8: broken JSON"):
        prepare(config, "train")


def test_a_folder_may_hold_compressed_files_of_several_splits(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, rows in (("train-1.jsonl.gz", ROWS[:3]), ("train-2.jsonl", ROWS[3:]), ("test.jsonl.gz", ROWS[:1])):
        plain = write_jsonl(tmp_path / "rows", rows).read_bytes()
        _written(tmp_path / "data" / name, gzip.compress(plain) if name.endswith(".gz") else plain)
    _written(tmp_path / "data" / "notes.pdf.gz", b"")
    config = configure(tmp_path, tmp_path / "data")
    assert rows_of(config) == ROWS
    assert prepare(config, "train").report.ignored_files == [
        "test.jsonl.gz (split test)",
        "notes.pdf.gz (ends in '.gz')",
    ]


# -- tars of WebDataset ------------------------------------------------------------------------------------------------


def test_every_key_of_a_tar_is_used_or_named(tmp_path: Path) -> None:
    """Control: datasets takes the keys of the first five rows, and leaves out what only later ones have."""
    members = {}
    for number in range(8):
        members |= {f"d/{number}.txt": f"text {number}".encode(), f"d/{number}.json": b'{"source": "web"}'}
        members |= {f"d/{number}.jpg": b"\xff\xd8 no image"}
    members |= {"d/7.json": b'{"source": "web", "late": 1}', "d/7.cls": b"3"}
    config = configure(tmp_path, _tar_of(tmp_path / "data.tar", members))
    found = prepare(config, "train")
    assert (len(found), found.report.unused) == (8, {"source": 8, "jpg": 8, "late": 1, "cls": 1})
    theirs = datasets.load_dataset(
        "webdataset", data_files=str(tmp_path / "data.tar"), split="train", cache_dir=str(tmp_path / "theirs")
    )
    assert not {"late", "cls"} & {*theirs.column_names, *theirs.features["json"]}


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"1.jpg": b"x", "1.cls": b"3"}, "holds no text: its rows have only cls, jpg; name the files"),
        ({}, "holds no text: its rows have no files"),
        ({"1.txt": b"\xff\xfe"}, r"1.txt cannot be read: 'utf-8' codec"),
        ({"1.json": b'{"a": 1, "a": 2}'}, "1.json cannot be read: duplicate key 'a'"),
        ({"1.txt": b"x", "1.json": b'{"text": "y"}'}, "1.json: its row has 'text' already"),
        ({"1.txt": b"x", "1.text": b"y"}, "1.text: its row has 'text' already"),
    ],
)
def test_a_tar_that_cannot_be_read_is_refused(tmp_path: Path, members: dict[str, bytes], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(configure(tmp_path, _tar_of(tmp_path / "data.tar", members)), "train")


# -- files that are not what their names say ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("data.jsonl.gz", LINES, "as .gz file: Not a gzipped file"),
        ("data.jsonl.gz", gzip.compress(LINES, mtime=0)[:-20], "as .gz file: "),
        ("data.jsonl.bz2", LINES, "as .bz2 file: Invalid data stream"),
        ("data.jsonl.xz", LINES, "as .xz file: "),
        ("data.jsonl.zst", LINES, "as .zst file: "),
        ("data.zip", LINES, "as .zip file: File is not a zip file"),
        ("data.tar", LINES, "as a tar: "),
        ("data.tgz", gzip.compress(LINES, mtime=0), "as a tar: "),
        ("data.arrow", LINES, "cannot read .*data.arrow"),
        ("data.pdf.gz", gzip.compress(b"x", mtime=0), r"holds a file that ends in '.pdf'"),
        ("data.gz", gzip.compress(LINES, mtime=0), "has no suffix; it needs one of"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(configure(tmp_path, _written(tmp_path / name, content)), "train")
    left = [path.name for path in (tmp_path / "cache" / "sources").glob("*") if path.suffix != ".lock"]
    assert left == [], "no half of a copy"


def test_a_zip_of_several_files_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for name in ("a.jsonl", "b.jsonl"):
            archive.writestr(name, LINES)
    with pytest.raises(ConfigError, match="holds 2 files, and not 1; unpack it"):
        resolve(configure(tmp_path, tmp_path / "data.zip"), "train")


def test_the_identity_follows_the_content(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    config = configure(tmp_path, _written(path, gzip.compress(LINES, mtime=1)))
    first = data_fingerprint(config, "train")
    path.write_bytes(gzip.compress(LINES, mtime=2, compresslevel=1))
    assert data_fingerprint(config, "train") == first, "compressed again"
    path.write_bytes(gzip.compress(LINES.replace(b"007", b"008")))
    assert data_fingerprint(config, "train") != first
    assert rows_of(config) != ROWS
    arrow = _arrow(tmp_path / "data.arrow", pa.ipc.new_stream)
    files = resolve(configure(tmp_path, arrow), "train")
    before = identity(files)
    assert before == identity(resolve(configure(tmp_path, arrow), "train"))
    arrow.write_bytes(arrow.read_bytes().replace(b"007", b"008"))
    assert identity(files) != before


def test_columns_of_bytes_and_images_are_refused_or_named(tmp_path: Path) -> None:
    """They are not decoded: the images here are none."""
    picture = {"bytes": b"no image", "path": None}
    columns = {"text": ["a", None], "raw": [b"\xff", None], "figure": [picture] * 2, "figures": [[picture]] * 2}
    features = datasets.Features({
        "text": datasets.Value("string"), "raw": datasets.Value("binary"), "figure": datasets.Image(),
        "figures": datasets.List(datasets.Image()),
    })  # fmt: skip
    data = datasets.Dataset.from_dict(columns, features=features)
    data.save_to_disk(tmp_path / "saved")
    config = configure(tmp_path, tmp_path / "saved", bad_rows="skip")
    found = prepare(config, "train")
    assert (len(found), found.report.bad) == (1, 1), "a null is no text"
    assert found.report.unused == {"raw": 2, "figure": 2, "figures": 2}
    (shard,) = plan(resolve(config, "train"), "line")
    assert next(read(shard, "line"))[1] == {"text": "a", "raw": b"\xff", "figure": {"bytes": b"no image"},
                                            "figures": [{"bytes": b"no image"}]}  # fmt: skip
    for column in ("figure", "figures", "raw"):
        with pytest.raises(ConfigError, match="no document is left"):
            prepare(config.model_copy(update={"columns": {"text": column}}), "train")
    data.rename_column("figure", "image").save_to_disk(tmp_path / "named")
    with pytest.raises(ConfigError, match="image holds images, audio or video; only text"):
        prepare(configure(tmp_path, tmp_path / "named"), "train")


# -- URLs --------------------------------------------------------------------------------------------------------------


class _Handler(BaseHTTPRequestHandler):
    """Answers by path; `server.versions` counts the downloads."""

    server: Any

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        name = self.path.partition("?")[0]
        content: bytes = self.server.files.get(name.removeprefix("/moved"), b"")
        status = {"/secret.jsonl": 403, "/loop.jsonl": 302, "/moved/a.jsonl": 302}.get(name, 200 if content else 404)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", name.removeprefix("/moved"))
        elif name != "/untold.jsonl":
            self.send_header("ETag", f'"{hash(content)}"')
        self.send_header("Content-Type", "text/html" if name == "/page.jsonl" else "application/octet-stream")
        self.send_header("Content-Length", str(len(content) + (9 if name == "/short.jsonl" else 0)))
        self.end_headers()
        if body and status == 200:
            self.server.downloads.append(name)
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[Any]:
    """An HTTP server on this machine, with its `url` and the `downloads` so far."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    names = ("/a.jsonl", "/untold.jsonl", "/short.jsonl", "/page.jsonl", "/secret.jsonl", "/loop.jsonl")
    server.files = {**dict.fromkeys(names, LINES), "/a.jsonl.gz": gzip.compress(LINES), "/a.pdf": b"x"}
    server.downloads, server.url = [], f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    copy_of_url.cache_clear()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "moved/a.jsonl", "untold.jsonl", "a.jsonl?download=true"])
def test_a_url_gives_the_rows_of_the_file(tmp_path: Path, web: Any, name: str) -> None:
    config = configure(tmp_path, f"{web.url}/{name}")
    assert rows_of(config) == ROWS
    assert resolve(config, "train")[0].name == name.partition("?")[0].removeprefix("moved/")


def test_a_url_is_downloaded_anew_only_when_it_has_changed(tmp_path: Path, web: Any) -> None:
    def asked(name: str) -> str:
        copy_of_url.cache_clear()  # as another process
        return data_fingerprint(configure(tmp_path, f"{web.url}/{name}"), "train")

    for name in ("a.jsonl", "untold.jsonl"):
        first = asked(name)
        assert asked(name) == first
        web.files[f"/{name}"] = LINES.replace(b"007", b"008")
        assert asked(name) != first
    assert web.downloads == ["/a.jsonl"] * 2 + ["/untold.jsonl"] * 3


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.jsonl", "does not exist; check the URL"),
        ("secret.jsonl", r"may not be read \(403\)"),
        ("loop.jsonl", "cannot be downloaded: TooManyRedirects"),
        ("page.jsonl", "is a web page; name the URL of the file itself"),
        ("short.jsonl", "short.jsonl (cannot be downloaded: |ended after )"),
        ("a.pdf", "ends in '.pdf'; it needs one of"),
    ],
)
def test_a_url_that_cannot_be_read_says_why(tmp_path: Path, web: Any, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(configure(tmp_path, f"{web.url}/{name}"), "train")


def test_a_server_that_is_not_there_says_so(tmp_path: Path, web: Any) -> None:
    web.shutdown()
    web.server_close()
    with pytest.raises(ConfigError, match=r"cannot be downloaded: .*; check the URL and network"):
        resolve(configure(tmp_path, f"{web.url}/a.jsonl"), "train")


def test_an_object_in_a_store_gives_the_rows_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "me",
                            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="data")
        client.put_object(Bucket="data", Key="x/a.jsonl.gz", Body=gzip.compress(LINES))
        copy_of_url.cache_clear()
        config = configure(tmp_path, "s3://data/x/a.jsonl.gz")
        assert rows_of(config) == ROWS
        first = data_fingerprint(config, "train")
        client.put_object(Bucket="data", Key="x/a.jsonl.gz", Body=gzip.compress(LINES * 2))
        copy_of_url.cache_clear()
        assert data_fingerprint(config, "train") != first
        assert rows_of(config) == ROWS * 2
        for name, says in (("x/none.jsonl", "does not exist"), ("x", "is a folder")):
            with pytest.raises(ConfigError, match=says):
                resolve(configure(tmp_path, f"s3://data/{name}"), "train")
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://me:word@a.b/c.jsonl", "dataset_name holds credentials"),
        ("s3://key@bucket/c.jsonl", "dataset_name holds credentials"),
        ("https://a.b/c.jsonl?X-Amz-Signature=0", "dataset_name holds credentials"),
        ("https://a.b/c.jsonl?v=1&access_token=0", "dataset_name holds credentials"),
        ("postgresql://me:word@a.b/c", "dataset_name holds credentials"),
        ("ftp://a.b/c.jsonl", "is no URL that files are read from"),
        ("file:///etc/passwd", "is no URL that files are read from"),
        ("memory://c.jsonl", "is no URL that files are read from"),
        ("zip://c.jsonl::https://a.b/c.zip", "is no URL that files are read from"),
        ("s3://bucket/*.jsonl", "is not the URL of one file"),
        ("https://a.b/a b.jsonl", "holds a character that URLs do not have"),
        ("sqlite:///data.db", "or set dataset_query if it is a database"),
    ],
)
def test_a_url_that_is_not_to_be_asked_is_refused_before(tmp_path: Path, url: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        configure(tmp_path, url)
    assert "word" not in str(caught.value)
    with pytest.raises(ConfigError):
        configure(tmp_path, tmp_path, eval_dataset_name=url)


# -- databases ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> sqlite3.Connection:
    copy_of_query.cache_clear()
    connection = sqlite3.connect(tmp_path / "data.db")
    connection.execute("create table pairs (number integer, prompt, completion, score real, raw blob)")
    rows = [(2**60 + 1, "a:b", "007", 0.1, b"x"), (None, "c", "NA", None, None)]
    connection.executemany("insert into pairs values (?, ?, ?, ?, ?)", rows)
    connection.commit()
    return connection


def test_a_query_gives_the_values_of_the_database(tmp_path: Path, database: sqlite3.Connection) -> None:
    """Control: datasets makes floats of integers beside a null, which rounds them."""
    query = "select number, prompt, completion, score from pairs where prompt != ':x' order by score is null"
    config = configure(tmp_path, f"sqlite:///{tmp_path}/data.db", dataset_query=query)
    assert rows_of(config) == [
        {"number": 2**60 + 1, "prompt": "a:b", "completion": "007", "score": 0.1},
        {"number": None, "prompt": "c", "completion": "NA", "score": None},
    ]
    assert prepare(config, "train").report.unused == {"number": 1, "score": 1}
    first = data_fingerprint(config, "train")
    database.execute("insert into pairs values (3, 'd', 'e', 1, null)")
    database.commit()
    copy_of_query.cache_clear()
    assert len(rows_of(config)) == 3
    assert data_fingerprint(config, "train") != first
    theirs = datasets.Dataset.from_sql(query, str(config.dataset_name), cache_dir=str(tmp_path / "theirs"))
    assert theirs[0]["number"] != 2**60 + 1


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("select raw from pairs", r"'raw' is of type bytes in row 1, .*CAST\(raw AS TEXT\)"),
        ("select x from missing", "fails: OperationalError: .*no such table"),
        ("select prompt, completion as prompt from pairs", "gives the column 'prompt' twice"),
        ("delete from pairs", "readonly database"),
        ("select 9e999 as x", "'x' is inf in row 1"),
        ("select", "syntax error|incomplete input"),
    ],
)
def test_a_query_that_cannot_be_answered_says_why(
    tmp_path: Path, database: sqlite3.Connection, query: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(configure(tmp_path, f"sqlite:///{tmp_path}/data.db", dataset_query=query), "train")
    assert database.execute("select count(*) from pairs").fetchone() == (2,)


def test_a_query_needs_a_database(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(ConfigError, match="dataset_query=select 1 needs a database to ask"):
        configure(tmp_path, data, dataset_query="select 1")
    with pytest.raises(ConfigError, match="which is a file; leave it out"):
        configure(tmp_path, "https://a.b/c.jsonl", dataset_query="select 1")
    for url, says in ((f"sqlite:///{tmp_path}/none.db", "names no file"), ("none://x", "NoSuchModule")):
        with pytest.raises(ConfigError, match=says):
            resolve(configure(tmp_path, url, dataset_query="select 1"), "train")
    assert not (tmp_path / "none.db").exists()
