"""One tokenising task: some shards in, token files and a report out. Runs in any process. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.config.objectives import ANSWER, SFT_FORMATS
from trainers.data.data_file import DataFile
from trainers.data.formats import Document, RowError, wanted_columns
from trainers.data.held_out import Selection, row_hash
from trainers.data.preferences import example
from trainers.data.report import TOO_LONG, Report
from trainers.data.shards import BadRow, FileShard, changed
from trainers.data.sources import read, unread_columns
from trainers.data.template import Encoded, Encoder

# What a cache folder holds: one value per token, or one per document; of `numbers`, one per numeric column of each.
# `columns` are the bytes of JSON objects, one for each document, of `column_bytes` bytes.
TOKEN_ARRAYS: dict[str, npt.DTypeLike] = {"input_ids": np.int32, "mask": np.bool_}
DOCUMENT_ARRAYS: dict[str, npt.DTypeLike] = {
    "lengths": np.int64,
    "trained": np.int64,
    "files": np.int32,
    "lines": np.int64,
    "desirable": np.bool_,
    "numbers": np.float32,
    "column_bytes": np.int64,
    "digests": np.uint64,
}
ARRAYS = {**TOKEN_ARRAYS, **DOCUMENT_ARRAYS, "columns": np.uint8}
_BATCH = 256  # rows given to the tokenizer at once
_BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Options:
    """How rows become documents: the options that tokenising depends on.

    Attributes:
        sample_by: What makes a document in a text file: `line`, `paragraph` or `document`.
        columns: The user's column for each role.
        max_length: Longest document, in tokens.
        overlong: `truncate`, `drop`, `split` or `refuse`.
        chat: Whether there is a chat template.
        formats: Row formats that the objective takes.
        parts: Names of the documents of an example.
        numeric: Numeric columns that the objective reads, and whether a row may lack each.
        rewards: Columns that rewards read, and whether a row may lack each; None if the objective does not sample.
    """

    sample_by: str
    columns: dict[str, str]
    max_length: int
    overlong: str
    chat: bool
    formats: tuple[str, ...] = SFT_FORMATS
    parts: tuple[str, ...] = ("",)
    numeric: dict[str, bool] = field(default_factory=dict)
    rewards: dict[str, bool] | None = None

    @property
    def wanted(self) -> list[str]:
        """Every column that is used or refused."""
        return wanted_columns(self.columns, (*self.numeric, *extra_columns(self.rewards)))


def extra_columns(rewards: Mapping[str, bool] | None) -> tuple[str, ...]:
    """The roles that an objective that samples has beside those of row formats; none without rewards."""
    return () if rewards is None else tuple(dict.fromkeys((ANSWER, *rewards)))


@dataclass(frozen=True)
class TokenizeTask:
    """Shards for one process, in order, and where its part files go.

    Attributes:
        shards: With the number of their file in the data set, and its format.
        part: Path of the part files, without their suffixes.
        selection: Which rows belong to the split.
        hashes_with: Only hash the rows, with this seed; None tokenises them.
    """

    shards: list[tuple[FileShard, int, str]]
    part: str
    selection: Selection = field(default_factory=Selection)
    hashes_with: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, for another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TokenizeTask:
        """The task that `to_json` wrote."""
        shards = []
        for shard, number, name in values["shards"]:
            file = DataFile(**shard.pop("file"))
            shards.append(
                (
                    FileShard(
                        file, **{**shard, "header": tuple(shard["header"]), "siblings": tuple(shard["siblings"])}
                    ),
                    number,
                    name,
                )
            )
        return cls(shards, values["part"], Selection(**values["selection"]), values["hashes_with"])

    def paths(self) -> dict[str, Path]:
        """The part file of each array."""
        return {name: Path(f"{self.part}.{name}") for name in ARRAYS}

    @property
    def hashes(self) -> Path:
        """The file of the hashes, `[rows]` uint64; see `row_hash`."""
        return Path(f"{self.part}.hashes")


def run_task(
    task: TokenizeTask, encoder: Encoder, options: Options, progress: Callable[[int], None] | None = None
) -> Report:
    """Tokenises the shards of a task into its part files (raw arrays), and reports on the rows.

    Args:
        task: The shards, and where the part files go.
        encoder: Tokenises documents.
        options: How rows become documents.
        progress: Called with the number of rows done since the last call.

    Raises:
        ConfigError: if a file cannot be read, or the chat template cannot be used.
        OSError: if the part files cannot be written.
    """
    report = Report()
    if task.hashes_with is not None:
        _write_hashes(task, task.hashes_with, options, progress)
        return report
    with ExitStack() as stack:
        streams = {name: stack.enter_context(path.open("wb")) for name, path in task.paths().items()}
        for shard, number, format_name in task.shards:
            rows_before = report.rows
            for name in shard.siblings:
                report.add_unused(f"{name} (beside the list of rows)")
            for rows in _batches(shard, format_name, options, task.selection):
                pieces = encode_rows(rows, shard.file.display_name, encoder, options, report)
                for name, values in _arrays(pieces, number).items():
                    streams[name].write(values.tobytes())
                if progress:
                    progress(len(rows))
            for name in unread_columns(shard.file, options.wanted):
                report.add_unused(name, report.rows - rows_before)
    report.template = encoder.proof if encoder.rendered_chat else []
    return report


_Row = tuple[int, tuple[Document, ...] | BadRow]
"""The line of a row, and its documents, or what is wrong with it."""


def _write_hashes(
    task: TokenizeTask, seed: int, options: Options, progress: Callable[[int], None] | None = None
) -> None:
    with task.hashes.open("wb") as stream:
        for shard, _, format_name in task.shards:
            documents = (document for _, document in _documents(shard, format_name, options))
            hashes = (row_hash(row, options.formats, seed) for row in documents)
            stream.write(np.fromiter(hashes, np.uint64, shard.rows).tobytes())
            if progress:
                progress(shard.rows)


def _documents(shard: FileShard, format_name: str, options: Options) -> Iterator[_Row]:
    """The shard's rows with their line numbers."""
    read_rows = 0
    for line, item in read(shard, options.sample_by, options.wanted):
        read_rows += 1
        yield line, item if isinstance(item, BadRow) else example_of(item, format_name, options)
    if read_rows != shard.rows:
        raise changed(shard.file.display_name)


def _batches(shard: FileShard, format_name: str, options: Options, selection: Selection) -> Iterator[list[_Row]]:
    """The rows of the split in a shard, a few hundred at a time."""
    batch: list[_Row] = []
    size = 0
    for line, documents in _documents(shard, format_name, options):
        if not selection.has(documents, options.formats):
            continue
        batch.append((line, documents))
        size += 0 if isinstance(documents, BadRow) else sum(document.size for document in documents)
        if len(batch) == _BATCH or size > _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def example_of(row: dict[str, Any], format_name: str, options: Options) -> tuple[Document, ...] | BadRow:
    """The documents of a row, or what is wrong with it."""
    try:
        return example(
            row, format_name, options.columns, options.chat, options.formats, options.numeric, options.rewards
        )
    except RowError as error:
        return error.bad


_Piece = tuple[int, list[Encoded], Document]
"""The line of a row, the documents of one example of it, and the first of them as read: its label and columns."""


def encode_rows(
    rows: list[_Row], display_name: str, encoder: Encoder, options: Options, report: Report
) -> list[_Piece]:
    """Encodes rows, limits them to `max_length` tokens, and counts the outcome of each in the report."""
    pieces: list[_Piece] = []
    report.rows += len(rows)
    done = iter(encoder.encode([document for _, item in rows if not isinstance(item, BadRow) for document in item]))
    for line, item in rows:
        encoded: list[Encoded | BadRow] = [item] if isinstance(item, BadRow) else [next(done) for _ in item]
        usable = [document for document in encoded if isinstance(document, Encoded)]
        if len(usable) < len(encoded):
            report.add_bad(f"{display_name}:{line}", _first_bad(encoded, options.parts))
            continue
        for path in dict.fromkeys(path for document in usable for path in document.unused):
            report.add_unused(path)
        longest = max(len(document.input_ids) for document in usable)
        report.longest = max(report.longest, longest)
        if options.overlong == "refuse" and longest > options.max_length:
            detail = f"{longest:,} tokens, over max_length={options.max_length}"
            report.add_bad(f"{display_name}:{line}", BadRow(TOO_LONG, detail))
            continue
        assert not isinstance(item, BadRow)
        parts = len(options.parts)
        for documents in fit(usable, options.max_length, options.overlong, report):
            examples = range(0, len(documents), parts)  # two of a pair whose answers are labelled one by one
            pieces += [(line, documents[start : start + parts], item[start]) for start in examples]
    report.documents += sum(len(piece) for _, piece, *_ in pieces)
    return pieces


def _first_bad(encoded: list[Encoded | BadRow], parts: tuple[str, ...]) -> BadRow:
    """The first mistake in a row, with the name of the document that has it."""
    index, bad = next((index, item) for index, item in enumerate(encoded) if isinstance(item, BadRow))
    name = parts[index] if len(encoded) == len(parts) else ""
    return BadRow(bad.kind, f"{name}: {bad.detail}") if name else bad


def fit(documents: list[Encoded], max_length: int, overlong: str, report: Report) -> list[list[Encoded]]:
    """Splits, truncates or drops a row with a document over `max_length`; counts the lost tokens.

    A single document is split into several. Rows with a document without a trained token are dropped, and those whose
    documents are the same once truncated.
    """
    over = any(len(document.input_ids) > max_length for document in documents)
    if not over:
        pieces = [documents]
    elif overlong == "split":
        (document,) = documents
        starts = range(0, len(document.input_ids), max_length)
        pieces = [[_piece(document, start, start + max_length)] for start in starts]
        report.split_rows += 1
    else:
        pieces = [] if overlong == "drop" else [[_piece(document, 0, max_length) for document in documents]]
    trainable = [piece for piece in pieces if all(map(_is_usable, piece)) and _differ(piece)]
    tokens = sum(len(document.input_ids) for piece in trainable for document in piece)
    report.truncated += overlong == "truncate" and over and bool(trainable)
    report.dropped += not trainable
    report.tokens += tokens
    report.trained_tokens += sum(document.trained for piece in trainable for document in piece)
    report.cut_tokens += sum(len(document.input_ids) for document in documents) - tokens
    return trainable


def _is_usable(document: Encoded) -> bool:
    """Whether a document has a trained token, or is to be answered."""
    return document.unanswered or document.trained > 0


def _differ(documents: list[Encoded]) -> bool:
    """Whether no two documents of a row have the same tokens."""
    return len(documents) == 1 or len({document.input_ids.tobytes() for document in documents}) == len(documents)


def _piece(encoded: Encoded, start: int, end: int) -> Encoded:
    mask = encoded.mask[start:end].copy()
    mask[:1] = False  # nothing predicts the first token of a piece
    return Encoded(encoded.input_ids[start:end], mask, unanswered=encoded.unanswered)


def _digest(tokens: npt.NDArray[np.int32]) -> int:
    """64 bits of a hash; among a million documents, two that differ share one once in 40 million data sets."""
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")


def _arrays(pieces: list[_Piece], number: int) -> dict[str, npt.NDArray[Any]]:
    if not pieces:
        return {}
    documents = [document for _, piece, *_ in pieces for document in piece]
    lines = [line for line, piece, *_ in pieces for _ in piece]
    read = [document for _, piece, document in pieces for _ in piece]
    numbers = [[np.nan if number is None else number for number in document.numbers] for document in read]
    columns = [document.columns.encode() for document in read]
    return {
        "input_ids": np.concatenate([piece.input_ids for piece in documents]),
        "mask": np.concatenate([piece.mask for piece in documents]),
        "lengths": np.array([len(piece.input_ids) for piece in documents], dtype=np.int64),
        "trained": np.array([piece.trained for piece in documents], dtype=np.int64),
        "files": np.full(len(documents), number, dtype=np.int32),
        "lines": np.array(lines, dtype=np.int64),
        "desirable": np.array([document.desirable for document in read], dtype=np.bool_),
        "numbers": np.array(numbers, dtype=np.float32),
        "column_bytes": np.array(list(map(len, columns)), dtype=np.int64),
        "columns": np.frombuffer(b"".join(columns), dtype=np.uint8),
        "digests": np.array([_digest(piece.input_ids) for piece in documents], dtype=np.uint64),
    }
