"""A stream of compressed files and tars holds the rows of the plain files, without a copy on disk."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import zstandard

from tests.fake_hub import FakeHub
from tests.parity.runs import mostly_long
from tests.unit.data.test_remote import configured, hub, url_of
from tests.unit.data.test_stream import texts
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data import archives, packed, sources, stream
from trainers.data.prepare import prepare
from trainers.data.stream import Stream, Window

__all__ = ["hub"]  # a fixture
ROWS = 300
DAMAGED = ("[]", "{}", '{"size": 1}', '{"size": "1", "suffix": ".jsonl", "digest": ""}', "text",
           '{"size": 1, "suffix": ".jsonl", "digest": "", "more": 1}')  # fmt: skip


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 2000)


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside.jsonl", content)
    return file.getvalue()


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.compress, ".zip": zipped,
}  # fmt: skip


def jsonl(end: str = "\n\n  \n") -> bytes:
    return ("\n".join(map(json.dumps, texts(ROWS))) + end).encode()


def documents(config: TrainConfig) -> list[tuple[str, bytes]]:
    """Line and tokens of every document of the first epoch, sorted."""
    reading, listed = Stream(config), list[tuple[str, bytes]]()
    for number in range(len(reading.windows(0))):
        window = reading.open(Window(0, number))
        listed += [(window.where(index).rpartition(":")[2], window.document(index)[0].tobytes())
                  for index in range(len(window))]  # fmt: skip
    return sorted(listed)


def copies(cache: Path) -> list[Path]:
    return [path for path in (cache / "sources").glob("*") if path.suffix != ".json"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, bytes]]:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "rows.jsonl").write_bytes(jsonl())
    return documents(configured(str(folder / "rows.jsonl"), folder / "cache", streaming_window=10**6))


@pytest.mark.parametrize("suffix", mostly_long(PACK, [".gz", ".zst"]))
def test_a_compressed_file_has_the_rows_of_the_plain_one(
    suffix: str, plain: list[tuple[str, bytes]], tmp_path: Path
) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(PACK[suffix](jsonl()))
    config = configured(str(path), tmp_path / "cache", streaming_window=100)
    assert documents(config) == plain
    assert 3 <= len(Stream(config).shards) <= sources.PACKED_SHARDS
    assert not copies(tmp_path / "cache")


def test_a_large_file_has_few_shards_and_is_read_from_where_they_begin(
    plain: list[tuple[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 100)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(jsonl("")))
    config = configured(str(path), tmp_path / "cache")
    assert len(Stream(config).shards) in (sources.PACKED_SHARDS - 1, sources.PACKED_SHARDS)
    assert documents(config) == plain


def test_a_tar_is_read_as_its_rows(tmp_path: Path) -> None:
    def write(path: Path, mode: str) -> None:
        with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
            for number, row in enumerate(texts(ROWS)):
                member = tarfile.TarInfo(f"{number:04d}.txt")
                member.size = len(row["text"])
                tar.addfile(member, io.BytesIO(row["text"].encode()))

    listed = []
    for name, mode in (("rows.tar", "w"), ("rows.tgz", "w:gz"), ("rows.tar.xz", "w:xz")):
        write(tmp_path / name, mode)
        listed.append(documents(configured(str(tmp_path / name), tmp_path / "cache", streaming_window=10**6)))
    assert not copies(tmp_path / "cache")
    in_full = prepare(configured(str(tmp_path / name), tmp_path / "cache", dataset_streaming=False), "train")
    places = [in_full.where(index).rpartition(":")[2] for index in range(ROWS)]
    assert listed == 3 * [sorted((place, in_full.document(index)[0].tobytes()) for index, place in enumerate(places))]
    assert copies(tmp_path / "cache"), "control: data that is read in full has a copy"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.csv", "text\n" + "\n".join(f'"row {n}\nof two lines {n}"' for n in range(60)) + "\n\n"),
        ("rows.tsv", "prompt\tcompletion\n" + "\n".join(f"say {n}\t{n}" for n in range(60)) + "\n\n"),
        ("rows.txt", "\n".join(f"line {n} über" for n in range(60)) + "\n \n"),
    ],
)
def test_other_kinds_of_rows_are_read_alike(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
    of_both = [documents(configured(str(tmp_path / file), tmp_path / "cache", streaming_window=10**6))
               for file in (name, f"{name}.gz")]  # fmt: skip
    assert of_both[0] == of_both[1]
    assert len(of_both[0]) == 60


def test_a_compressed_file_at_a_url_is_one_shard(hub: FakeHub, plain: list[tuple[str, bytes]], tmp_path: Path) -> None:
    (hub.folder / "rows" / "data" / "packed.jsonl.gz").write_bytes(gzip.compress(jsonl()))
    config = configured(url_of(hub, "packed.jsonl.gz"), tmp_path / "cache")
    assert documents(config) == plain
    assert len(Stream(config).shards) == 1
    assert not copies(tmp_path / "cache")


def test_a_file_that_is_broken_or_changes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    whole_file = gzip.compress(jsonl())
    config = configured(str(path), tmp_path / "cache")
    for content, problem in [
        (whole_file[: len(whole_file) // 2], r"cannot read .*rows.jsonl.gz as \.gz file"),
        (b"not compressed", r"cannot read .*rows.jsonl.gz as \.gz file"),
        (gzip.compress(b""), "empty file: it has no rows"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=problem):
            Stream(config).open(Window(0, 0))
    path.write_bytes(whole_file)
    reading = Stream(config)
    reading.open(Window(0, 0))
    path.write_bytes(gzip.compress(jsonl().replace(b"row", b"ROW")))
    with pytest.raises(ConfigError, match="changed while it was read"):
        reading.open(Window(0, 1))


def test_a_link_is_read_as_its_own_suffix_says(tmp_path: Path) -> None:
    path, link = tmp_path / "rows.jsonl.gz", tmp_path / "rows.txt.gz"
    path.write_bytes(gzip.compress(jsonl()))
    link.symlink_to(path)
    kinds = [Stream(configured(str(file), tmp_path / "cache")).files[0].kind for file in (path, link)]
    assert kinds == ["jsonl", "text"]


def test_what_is_not_read_from_its_beginning_on_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(json.dumps(texts(5)).encode()))
    with pytest.raises(ConfigError, match=r"rows.json.gz is a .json file, which is read as a whole"):
        Stream(configured(str(tmp_path / "rows.json.gz"), tmp_path / "cache"))


def test_what_an_earlier_start_found_is_read_again_if_it_was_damaged(tmp_path: Path) -> None:
    path, times = tmp_path / "rows.jsonl.gz", list[int]()
    path.write_bytes(gzip.compress(jsonl()))

    def open_raw() -> BinaryIO:
        times.append(1)
        return path.open("rb")

    def contents() -> packed.Contents:
        return packed.contents_of(open_raw, path.name, path.name, [1], tmp_path)

    first = contents()
    assert contents() == first
    assert len(times) == 1, "control: it is read once"
    (index,) = (tmp_path / "sources").glob("*.packed.json")
    for number, damaged in enumerate(DAMAGED, 2):
        index.write_text(damaged)
        assert contents() == first
        assert len(times) == number


def test_a_tar_that_was_cut_or_damaged_is_refused(tmp_path: Path) -> None:
    """Wherever it was: none of its rows is lost in silence."""
    path = tmp_path / "rows.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(4):
            for suffix, content in ((".txt", b"a row"), (".png", b"\0" * 700)):
                member = tarfile.TarInfo(f"{number}{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    intact, of_row = path.read_bytes(), 512 + 512 + 512 + 1024

    def read(content: bytes) -> list[bytes]:
        with archives.Content(io.BytesIO(content), path.name, path.name) as opened:
            return list(archives.lines_of_tar(opened))

    assert len(read(intact)) == len(read(intact[: 4 * of_row + 512])) == 4, "control: of the end, a block is enough"
    for end in (2 * of_row, 2 * of_row + 100, 2 * of_row + 512, 2 * of_row + 1024, 2 * of_row + 1600, 4 * of_row):
        with pytest.raises(ConfigError, match=r"rows.tar as a tar: .*; pack it again"):
            read(intact[:end])
    with pytest.raises(ConfigError, match=r"bad checksum.* after 2,560 bytes: it was cut or damaged"):
        read(intact[:of_row] + b"x" + intact[of_row + 1 :])
    assert len(read(intact + intact[:of_row] + intact[4 * of_row :])) == 5, "tars joined by `cat` are read in full"
    with pytest.raises(ConfigError, match="it was cut or damaged"):
        read(intact + intact[:of_row])


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_a_link_in_a_tar_is_refused_as_its_row_would_be_lost(kind: bytes, tmp_path: Path) -> None:
    path, link = tmp_path / "rows.tar", tarfile.TarInfo("1.txt")
    link.type, link.linkname = kind, "0.txt"
    member = tarfile.TarInfo("0.txt")
    member.size = 5
    with tarfile.open(path, "w") as tar:
        tar.addfile(member, io.BytesIO(b"a row"))
        tar.addfile(link)
    with pytest.raises(ConfigError, match=r"rows\.tar: 1\.txt is a link to 0\.txt; pack the file itself"):
        documents(configured(str(path), tmp_path / "cache"))
