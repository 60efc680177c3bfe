"""Streams of data at URLs and on the Hub read what the same files hold on disk, and fetch no more than they read."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from tests.fake_hub import BROKEN, COMMIT, FakeHub, serve_hub
from tests.launching import ROOT
from tests.unit.data.test_stream import config_of, texts, write
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data import remote, remote_file, stream
from trainers.data.open_file import open_file
from trainers.data.stream import Stream, Window
from trainers.data.tokenizer import load_tokenizer

ROWS = 300


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 2000)
    monkeypatch.setattr(remote_file, "_WAITS", (0.0, 0.0))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """Serves the same rows as JSONL, CSV, text and Parquet."""
    folder = tmp_path / "hub" / "rows" / "data"
    folder.mkdir(parents=True)
    rows = texts(ROWS)
    write(folder / "rows.jsonl", rows)
    (folder / "rows.csv").write_text("text\n" + "\n".join(row["text"] for row in rows))
    (folder / "rows.txt").write_text("\n".join(row["text"] for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet", row_group_size=30)
    with serve_hub(tmp_path / "hub") as server:
        yield server


def url_of(hub: FakeHub, name: str) -> str:
    return f"{hub.url}/owner/rows/resolve/main/data/{name}"


def configured(name: str, cache: Path, **changes: Any) -> TrainConfig:
    own = {"dataset_name": name, "cache_dir": str(cache), "max_length": 64, "streaming_window": 60}
    return config_of(Path("unused"), **{**own, **changes})


def first_documents(config: TrainConfig) -> list[list[int]]:
    """The tokens of the first window, sorted: shards of other formats hold other rows."""
    window = Stream(config).open(Window(0, 0))
    return sorted(window.document(number)[0].tolist() for number in range(len(window)))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.txt", "train.parquet"])
def test_a_file_at_a_url_is_read_as_it_is_on_disk(name: str, hub: FakeHub, tmp_path: Path) -> None:
    there = Stream(configured(url_of(hub, name), tmp_path / "there"))
    local = Stream(configured(str(hub.folder / "rows" / "data" / name), tmp_path / "local"))
    assert there.windows(0) == local.windows(0)
    assert len(there.windows(0)) > 1
    for number in range(2):
        window = Window(0, number)
        assert there.open(window).digest == local.open(window).digest
    assert there.open(window).where(0) == f"{url_of(hub, name)}:{local.open(window).where(0).rpartition(':')[2]}"
    assert there.open(Window(0, 0)).digest != local.open(Window(0, 1)).digest, "control"


def test_of_parquet_only_what_is_read_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    path = hub.folder / "rows" / "data" / "train.parquet"
    rows = [{"text": row["text"], "note": os.urandom(15_000).hex()} for row in texts(ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30)
    window = Stream(configured(url_of(hub, path.name), tmp_path / "cache")).open(Window(0, 0))
    assert window.report.rows == 60
    assert 0 < hub.sent[path.name] < path.stat().st_size / 8
    assert window.report.unused["note"] == 60, "the column that is not read is named"


def test_of_other_files_each_byte_is_fetched_once_to_plan_and_once_to_read(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 200_000)
    path = write(hub.folder / "rows" / "data" / "rows.jsonl", texts(40_000))
    reading = Stream(configured(url_of(hub, path.name), tmp_path / "cache", streaming_window=10**6))
    planned, size = hub.sent[path.name], path.stat().st_size
    assert size > 1e6
    assert planned < 2.2 * size, "the format is found in its first block"
    reading.open(Window(0, 0))
    assert hub.sent[path.name] - planned < 1.1 * size


def test_a_file_that_changes_while_it_is_streamed_ends_the_run(hub: FakeHub, tmp_path: Path) -> None:
    for name in (url_of(hub, "rows.jsonl"), str(hub.folder / "rows" / "data" / "rows.jsonl")):
        path = write(hub.folder / "rows" / "data" / "rows.jsonl", texts(ROWS))
        reading = Stream(configured(name, tmp_path / "cache"))
        reading.open(Window(0, 0))
        write(path, [{"text": row["text"].replace("row", "ROW")} for row in texts(ROWS)])
        with pytest.raises(ConfigError, match="changed while it was read"):
            reading.open(Window(0, 1))
        write(path, texts(ROWS))
        again = Stream(configured(name, tmp_path / "cache"))
        assert not any("ROW" in text for text in decoded(again.open(Window(0, 1))))


def decoded(documents: Any) -> list[str]:
    tokenizer = load_tokenizer(configured("unused", Path("unused")))
    return [tokenizer.decode(documents.document(number)[0].tolist()) for number in range(len(documents))]


def test_another_version_of_a_file_is_other_data(hub: FakeHub, tmp_path: Path) -> None:
    config = configured(url_of(hub, "rows.jsonl"), tmp_path / "cache")
    before = Stream(config).fingerprint
    assert Stream(config).fingerprint == before
    write(hub.folder / "rows" / "data" / "rows.jsonl", [{"text": "red"}, *texts(ROWS)[1:]])
    assert Stream(config).fingerprint != before


def test_what_cannot_be_read_is_refused_by_name(hub: FakeHub, tmp_path: Path) -> None:
    def refused(url: str) -> str:
        with pytest.raises(ConfigError) as error:
            Stream(configured(url, tmp_path / "cache")).open(Window(0, 0))
        return str(error.value)

    assert f"dataset_name={url_of(hub, 'other.jsonl')} does not exist" in refused(url_of(hub, "other.jsonl"))
    for name in ("rows.tar", "rows.xlsx"):
        (hub.folder / "rows" / "data" / name).write_text("x")
    assert "rows.tar as a tar" in refused(url_of(hub, "rows.tar"))
    assert "ends in '.xlsx'" in refused(url_of(hub, "rows.xlsx"))
    (hub.folder / "rows" / "data" / "rows.parquet.gz").write_bytes(gzip.compress(b"PAR1"))
    assert "is not read from its beginning on" in refused(url_of(hub, "rows.parquet.gz"))
    assert "cannot be downloaded" in refused("http://127.0.0.1:9/rows.jsonl")
    (hub.folder / "rows" / "data" / "list.json").write_text(json.dumps(texts(3)))
    assert "is a .json file, which is read as a whole" in refused(url_of(hub, "list.json"))
    hub.refusals = {"rows.jsonl": BROKEN}
    assert "cannot be downloaded" in refused(url_of(hub, "rows.jsonl"))


def test_a_request_that_fails_is_sent_again(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,), _ = remote.files_in_place(configured(url_of(hub, "rows.jsonl"), tmp_path / "cache"))
    content = (hub.folder / "rows" / "data" / "rows.jsonl").read_bytes()
    waited = list[float]()

    def repair(seconds: float) -> None:
        waited.append(seconds)
        hub.refusals = {}

    monkeypatch.setattr("trainers.data.remote_file.time.sleep", repair)
    with open_file(file) as opened:
        hub.refusals = {"rows.jsonl": BROKEN}
        assert opened.read() == content
    assert len(waited) == 1
    with open_file(file) as opened:
        monkeypatch.setattr("trainers.data.remote_file.time.sleep", waited.append)
        hub.refusals = {"rows.jsonl": BROKEN}
        with pytest.raises(OSError, match="500"):
            opened.read()


_OPEN_ON_HUB = """
import json, sys
from trainers.config.validation import build
from trainers.data import stream
from trainers.data.stream import Stream, Window
stream.SHARD_BYTES = 2000
opened = Stream(build(json.loads(sys.argv[1])))
print(json.dumps([opened.files[0].path, [opened.open(Window(0, number)).digest for number in range(2)]]))
"""


def test_a_data_set_on_the_hub_is_read_in_place_at_its_revision(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("rows.jsonl", "rows.csv", "rows.txt"):
        (hub.folder / "rows" / "data" / name).unlink()
    config = configured("owner/rows", tmp_path / "there")
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}  # read at the import
    options = json.dumps(config.model_dump(exclude_defaults=True))
    command = [sys.executable, "-c", _OPEN_ON_HUB, options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    url, digests = json.loads(done.stdout)
    assert url == f"hf://datasets/owner/rows@{COMMIT}/data/train.parquet"
    local = Stream(configured(str(hub.folder / "rows" / "data" / "train.parquet"), tmp_path / "local"))
    assert digests == [local.open(Window(0, number)).digest for number in range(2)]
    assert not list((tmp_path / "home").rglob("*.parquet")), "nothing is downloaded"


def test_files_in_a_bucket_are_read_in_place(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        values = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
                  "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        bucket = s3fs.S3FileSystem(skip_instance_cache=True)
        bucket.mkdir("streamed")
        for name in ("train.parquet", "rows.jsonl"):
            bucket.put(str(hub.folder / "rows" / "data" / name), f"streamed/set/{name}")
        bucket.put(str(hub.folder / "rows" / "data" / "rows.jsonl"), "streamed/set/test.jsonl")
        for url, names, others in (
            ("s3://streamed/set/train.parquet", ["train.parquet"], []),
            ("s3://streamed/set/r*.jsonl", ["rows.jsonl"], []),
            ("s3://streamed/s?t/*", ["rows.jsonl", "train.parquet"], ["test.jsonl (split test)"]),
        ):
            files, left_out = remote.files_in_place(configured(url, tmp_path / "cache"))
            assert [file.path for file in files] == [f"s3://streamed/set/{name}" for name in names]
            assert left_out == others
        with pytest.raises(ConfigError, match="name such a file or a pattern"):
            remote.files_in_place(configured("s3://streamed/set", tmp_path / "cache"))
        there = first_documents(configured("s3://streamed/set/train.parquet", tmp_path / "there"))
        assert there == first_documents(configured(str(hub.folder / "rows/data/train.parquet"), tmp_path / "local"))
        with pytest.raises(ConfigError, match="does not exist"):
            remote.files_in_place(configured("s3://streamed/none.jsonl", tmp_path / "cache"))
    finally:
        server.stop()
