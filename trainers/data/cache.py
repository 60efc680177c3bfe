"""Tokenised documents on disk: flat arrays in a folder, checksummed, memory-mapped. No torch, no pickle."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trainers.config.mistakes import ConfigError
from trainers.data.report import Report
from trainers.data.tokenise import ARRAYS, TokenizeTask

FORMAT_VERSION = 6  # of the tokens, which checkpoints refer to; a folder that lacks an array is made anew
_BLOCK = 4 << 20  # bytes per checksum
_CHECKED_BLOCKS = 256  # of each array; of a larger array, this many blocks are checked, evenly spaced
_MAPPED = 1 << 16  # bytes from which a file is mapped; a map keeps its file open, and a stream has thousands of files
_META = "meta.json"
_DOCUMENTS = 1 << 14  # whose masks are searched at once


class TokenSet:
    """Tokenised documents, memory-mapped: opening costs the same for any size, and ranks share the pages.

    Attributes:
        folder: The cache folder.
        fingerprint: sha256 of the data, the tokenizer and the options that made this; equal means equal documents.
        report: Counts of rows and tokens.
        lengths: `[documents]` int64, tokens of each.
        trained: `[documents]` int64, trained tokens of each.
        desirable: `[documents]` bool, the label of each; True for data without labels.
        numbers: `[documents, columns]` float32, the numeric columns of the example of each, in the order of
            `ObjectiveSpec.columns`; not a number where the data lacks an optional one.
        digests: `[documents]` uint64, a hash of the tokens of each.
    """

    def __init__(self, folder: Path, meta: dict[str, Any]):
        self.folder = folder
        self.fingerprint: str = meta["fingerprint"]
        self.report = Report.from_json(meta["report"])
        self._names: list[str] = meta["files"]
        arrays = {name: _map(folder / name, dtype) for name, dtype in ARRAYS.items()}
        self.lengths: npt.NDArray[np.int64] = arrays["lengths"]
        self.trained: npt.NDArray[np.int64] = arrays["trained"]
        self.desirable: npt.NDArray[np.bool_] = arrays["desirable"]
        columns = len(arrays["numbers"]) // max(len(self.lengths), 1)
        self.numbers: npt.NDArray[np.float32] = arrays["numbers"].reshape(len(self.lengths), columns)
        self.digests: npt.NDArray[np.uint64] = arrays["digests"]
        self._input_ids = arrays["input_ids"]
        self._mask = arrays["mask"]
        self._files = arrays["files"]
        self._lines = arrays["lines"]
        self._columns: npt.NDArray[np.uint8] = arrays["columns"]
        self._column_bytes: npt.NDArray[np.int64] = arrays["column_bytes"]

    @property
    def reports(self) -> list[Report]:
        """The reports of its sources; it is one itself."""
        return [self.report]

    def largest_token_id(self) -> int:
        """The largest token id of all documents."""
        return int(self._input_ids.max(initial=0))

    @cached_property
    def _starts(self) -> npt.NDArray[np.int64]:
        """`[documents + 1]` starts of the documents, and the end; built after packing, which needs the most memory."""
        starts = np.zeros(len(self.lengths) + 1, dtype=np.int64)
        np.cumsum(self.lengths, out=starts[1:])
        return starts

    def rename_sources(self, dataset: str, names: list[str]) -> None:
        """Sets the current names of the data: the cache identifies it by content, wherever it was stored then.

        Args:
            dataset: Name as the user gave it.
            names: Display names of the files, in order.
        """
        self.report.rename_sources(dataset, dict(zip(self._names, names, strict=True)))
        self._names = names

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids of a document, and the mask of trained tokens; read-only views."""
        start, end = self._starts[index], self._starts[index + 1]
        return self._input_ids[start:end], self._mask[start:end]

    def first_trained(self) -> npt.NDArray[np.int64]:
        """`[documents]` tokens before the first trained one of each document."""
        first = np.empty(len(self), dtype=np.int64)
        for low in range(0, len(self), _DOCUMENTS):
            starts = self._starts[low : low + _DOCUMENTS + 1]
            trained = np.flatnonzero(self._mask[starts[0] : starts[-1]])
            offsets = starts[:-1] - starts[0]
            first[low : low + _DOCUMENTS] = trained[np.searchsorted(trained, offsets)] - offsets
        return first

    def last_tokens(self) -> npt.NDArray[np.int32]:
        """`[documents]` last token of each document."""
        last: npt.NDArray[np.int32] = self._input_ids[self._starts[1:] - 1]
        return last

    def gather(self, indices: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids of several documents, concatenated, and the mask of trained tokens; copies."""
        spans = list(map(slice, self._starts[indices].tolist(), self._starts[indices + 1].tolist()))
        return np.concatenate([self._input_ids[span] for span in spans]), np.concatenate(
            [self._mask[span] for span in spans]
        )

    @cached_property
    def _column_ends(self) -> npt.NDArray[np.int64]:
        """`[documents]` ends of the columns of each document."""
        return np.cumsum(self._column_bytes)

    def columns(self, index: int) -> bytes:
        """The columns of a document that rewards read: a JSON object by role, or nothing."""
        size, end = int(self._column_bytes[index]), int(self._column_ends[index])
        return self._columns[end - size : end].tobytes()

    def where(self, index: int) -> str:
        """`file:line` of the row that a document comes from."""
        return f"{self._names[self._files[index]]}:{self._lines[index]}"


def _map(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Reads a small file, or maps it as a plain array: slicing a `np.memmap` itself costs ten times as much."""
    if path.stat().st_size < _MAPPED:
        array = np.fromfile(path, dtype=dtype)
        array.flags.writeable = False  # as a map's
        return array
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")).view(np.ndarray)


def open_cache(folder: Path, fingerprint: str) -> TokenSet | None:
    """The documents in a folder, or None if it is missing, incomplete or damaged.

    Raises:
        ConfigError: if this process may not open more files.
    """
    try:
        sealed = json.loads((folder / _META).read_text(encoding="utf-8"))
        meta = sealed["meta"]
        if sealed["sha256"] != _seal(meta) or meta["version"] != FORMAT_VERSION or meta["fingerprint"] != fingerprint:
            return None
        intact = all(_intact(folder / name, meta["sizes"][name], meta["checksums"][name]) for name in ARRAYS)
        return TokenSet(folder, meta) if intact else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = "raise the limit (ulimit -n), or use a smaller streaming_window"
            raise ConfigError(f"cannot open tokenized data in {folder}: {error.strerror}; {remedy}") from None
        return None


def _seal(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _intact(path: Path, size: int, checksums: list[int]) -> bool:
    """Whether a file has the expected size and checksums."""
    if path.stat().st_size != size:
        return False
    step = max(1, len(checksums) // _CHECKED_BLOCKS)
    with path.open("rb") as stream:
        for index in range(0, len(checksums), step):
            stream.seek(index * _BLOCK)
            if zlib.crc32(stream.read(_BLOCK)) != checksums[index]:
                return False
    return True


class CacheWriter:
    """Builds a cache folder under a temporary name; `publish` moves it into place atomically."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
        for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):  # of a killed run: the caller holds the lock
            shutil.rmtree(leftover, ignore_errors=True)
        self.temporary.mkdir(parents=True, mode=0o700)  # conversations may be private: readable by the owner only
        self._streams: dict[str, BinaryIO] = {name: (self.temporary / name).open("wb") for name in ARRAYS}

    def append(self, task: TokenizeTask) -> None:
        """Appends the part files of a task, and removes them."""
        for name, path in task.paths().items():
            with path.open("rb") as part:
                shutil.copyfileobj(part, self._streams[name], _BLOCK)
            path.unlink()

    def publish(self, fingerprint: str, report: Report, names: list[str]) -> None:
        """Writes the metadata and renames the folder into place, replacing a damaged one.

        Args:
            fingerprint: Fingerprint of the data, tokenizer and options.
            report: Counts of rows and tokens.
            names: Display names of the files, in order.
        """
        self._close()
        sums = {name: _checksums(self.temporary / name) for name in ARRAYS}
        meta = {
            "version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "report": report.to_json(),
            "files": names,
            "sizes": {name: (self.temporary / name).stat().st_size for name in ARRAYS},
            "checksums": sums,
        }
        for path in self.temporary.iterdir():
            if path.name not in ARRAYS:
                path.unlink()
        sealed = json.dumps({"sha256": _seal(meta), "meta": meta})
        (self.temporary / _META).write_text(sealed, encoding="utf-8")
        shutil.rmtree(self.folder, ignore_errors=True)
        os.replace(self.temporary, self.folder)

    def discard(self) -> None:
        """Removes what has not been published."""
        self._close()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def _checksums(path: Path) -> list[int]:
    with path.open("rb") as stream:
        return [zlib.crc32(block) for block in iter(lambda: stream.read(_BLOCK), b"")]
