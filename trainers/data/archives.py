"""Reads compressed files, and tars of WebDataset. Imports no torch."""

from __future__ import annotations

import json
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import IO, Any, Self

from fsspec.compression import compr

from trainers.config.mistakes import ConfigError
from trainers.config.remote_data import COMPRESSED, content_suffix
from trainers.config.strict_json import no_constant, unique_keys
from trainers.data.shards import ROW_BYTES

_PIECE = 1 << 20
_BROKEN = (OSError, EOFError, ValueError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
_TEXT = ("txt", "text", "md")


class Content:
    """What a file holds once decompressed. A context manager.

    Args:
        file: The file, or its path.
        name: Its name, whose suffix says how it is compressed.
        display_name: Its name in messages.

    Attributes:
        suffix: Suffix of the content, such as `.jsonl`.

    Raises:
        ConfigError: If the file is not what its suffix says.
    """

    def __init__(self, file: Path | IO[bytes], name: str, display_name: str):
        self.display_name, self.suffix = display_name, content_suffix(name)
        self._how = PurePath(name.lower()).suffix
        self._open = ExitStack()
        self._stream: IO[bytes]
        try:
            raw = self._open.enter_context(file.open("rb")) if isinstance(file, Path) else file
            self._stream = self._unzipped(raw) if self._how == ".zip" else self._decompressed(raw)
        except _BROKEN as error:
            self._open.close()
            raise self._mistake(error) from None

    def __enter__(self) -> Content:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, size: int = _PIECE) -> bytes:
        """The next bytes, at most `size`; none at the end."""
        try:
            return self._stream.read(size)
        except _BROKEN as error:
            raise self._mistake(error) from None
        except Exception as error:  # zstandard's own, if that is installed
            if type(error).__name__ != "ZstdError":
                raise
            raise self._mistake(error) from None

    def pieces(self) -> Iterator[bytes]:
        """All bytes, a megabyte at a time."""
        while piece := self.read():
            yield piece

    def _decompressed(self, raw: IO[bytes]) -> IO[bytes]:
        if self._how not in (*COMPRESSED, ".tgz"):
            return raw
        if self._how == ".zst" and "zstd" not in compr:
            raise ConfigError(f"{self.display_name} needs a package to decompress it: pip install zstandard")
        how = {".gz": "gzip", ".tgz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}[self._how]
        return self._open.enter_context(compr[how](raw, mode="rb"))

    def _unzipped(self, raw: IO[bytes]) -> IO[bytes]:
        archive = self._open.enter_context(zipfile.ZipFile(raw))
        members = [info for info in archive.infolist() if not info.is_dir() and not _is_hidden(info.filename)]
        if len(members) != 1:
            problem = f"holds {len(members)} files, and not 1"
            raise ConfigError(f"{self.display_name} {problem}; unpack it, and name its folder")
        self.suffix = content_suffix(members[0].filename)
        return self._open.enter_context(archive.open(members[0]))

    def _mistake(self, error: BaseException) -> ConfigError:
        if isinstance(error, ConfigError):
            return error
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        return ConfigError(f"cannot read {self.display_name} as {self._how} file: {reason}; compress the data again")


def _is_hidden(name: str) -> bool:
    return name.startswith("__MACOSX/") or PurePath(name).name.startswith(".")


class _Member(tarfile.TarInfo):
    """A file in a tar; `tarfile` itself takes a header that is cut or damaged for the end of the tar."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> Self:
        """The next file.

        Raises:
            tarfile.ReadError: if the tar ends without its end marker.
        """
        assert isinstance(tar, _Tar)
        at_end, tar.at_end = tar.at_end, False
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            tar.at_end = True
            raise
        except tarfile.HeaderError as error:
            if isinstance(error, tarfile.EmptyHeaderError) and (at_end or not tar.offset):  # type: ignore[attr-defined]
                raise
            problem = f" after {tar.offset:,} bytes: it was cut or damaged" if tar.offset else ""
            raise tarfile.ReadError(f"{error}{problem}") from None


class _Tar(tarfile.TarFile):
    """A tar, and those that follow it in the same file, as `cat` joins them; `at_end` after an end marker."""

    tarinfo, ignore_zeros, at_end = _Member, True, False


def lines_of_tar(content: Content) -> Iterator[bytes]:
    """The rows of a tar of WebDataset as lines of JSON.

    Files beside each other whose names are equal up to the first dot are a row: `7.txt` is its `text`, the keys of the
    object in `7.json` are keys of the row. Other files are keys with their size, so that they are counted as not used.

    Raises:
        ConfigError: If it is no tar, has no text, or a file of it cannot be read.
    """
    row: dict[str, Any] = {}
    current, rows, texts = None, 0, False
    try:
        with _Tar.open(fileobj=content, mode="r|") as tar:  # type: ignore[call-overload]
            for member in tar:
                key, _, field = _key_and_field(member.name)
                if field and (member.islnk() or member.issym()):
                    where, problem = f"{content.display_name}: {member.name}", f"is a link to {member.linkname}"
                    raise ConfigError(f"{where} {problem}; pack the file itself (tar --dereference --hard-dereference)")
                if not member.isfile() or not field:
                    continue
                if key != current and row:
                    yield _line(row)
                    row, rows = {}, rows + 1
                current = key
                texts |= _add(row, field, member, tar, content.display_name)
    except tarfile.TarError as error:
        raise ConfigError(f"cannot read {content.display_name} as a tar: {error}; pack it again") from None
    if row:
        yield _line(row)
    if not texts:
        fields = f"only {', '.join(sorted(row)[:5])}" if row else "no files"
        raise ConfigError(
            f"{content.display_name} holds no text: its rows have {fields}; name the files of a row KEY.txt or KEY.json"
        )


def _key_and_field(name: str) -> tuple[str, str, str]:
    """`dir/7`, `.` and `seg.txt` of `dir/7.seg.txt`, as WebDataset has it; no field for a hidden file."""
    folder, slash, file = name.rpartition("/")
    stem, dot, field = file.partition(".")
    return f"{folder}{slash}{stem}", dot, field.lower() if stem else ""


def _add(row: dict[str, Any], field: str, member: tarfile.TarInfo, tar: tarfile.TarFile, display_name: str) -> bool:
    """Adds a file to its row; returns whether it is text."""
    where, kind = f"{display_name}: {member.name}", field.rpartition(".")[2]
    if kind not in (*_TEXT, "json"):
        values: dict[str, Any] = {field: {"bytes": member.size}}
    elif member.size > ROW_BYTES:
        raise ConfigError(f"{where} has over {ROW_BYTES:,} bytes; split it into several rows")
    else:
        stream = tar.extractfile(member)
        assert stream is not None  # it is a regular file
        try:
            text = stream.read().decode("utf-8-sig")
            value: Any = text.replace("\r\n", "\n").rstrip("\r\n")
            if kind == "json":
                value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=no_constant)
        except ValueError as error:
            raise ConfigError(f"{where} cannot be read: {str(error)[:200]}; repair it, or leave it out") from None
        values = {"text" if field in _TEXT else field: value}
        if field == "json" and isinstance(value, dict):
            values = value
    if repeated := row.keys() & values.keys():
        raise ConfigError(f"{where}: its row has {min(repeated)!r} already; rename one of them")
    row.update(values)
    return kind in (*_TEXT, "json")


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
