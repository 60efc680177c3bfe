"""Near-duplicates: rows that share most of their words in a row, within a set and between two. Imports no torch.

MinHash sketches of all rows (rensa) give the pairs that are probably alike; each of these is then compared exactly, so
that no pair below the threshold is reported. A pair at the threshold is seen with a probability of at least `_SEEN`.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import product
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.config.mistakes import ConfigError
from trainers.data.contents import RowAsRead
from trainers.data.held_out import content_of, text_hash
from trainers.data.progress import Progress
from trainers.data.report import Report
from trainers.data.shards import BadRow

SHINGLE_WORDS = 3
"""Words in a shingle; a row's similarity to another is the share of shingles that both have (Jaccard)."""
LEAST_THRESHOLD = 0.3
_WORD = re.compile(r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")  # scripts without spaces by letter
_HASHES = 128
_SEED = 1
_SEEN = 0.999
_BATCH = 1024
_LEADERS = 50  # rows of each side that are compared in one bucket, so that a set of very many alike rows ends too
LISTED = 20
_MEMBERS = 4  # of a group that are listed
_CHARACTERS = 300  # of a text that are listed
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)


@lru_cache(maxsize=1 << 20)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=8).digest(), "little")


def shingles(text: str) -> npt.NDArray[np.uint64]:
    """`[shingles]` hashes of the different runs of `SHINGLE_WORDS` words, in order; case and signs do not count."""
    terms = _WORD.findall(text.lower()) or [text]
    hashes = np.array([_word_hash(word) for word in terms], dtype=np.uint64)
    count = min(SHINGLE_WORDS, len(terms))
    with np.errstate(over="ignore"):
        mixed = np.zeros(len(terms) - count + 1, dtype=np.uint64)
        for index in range(count):
            mixed = (mixed ^ hashes[index : len(terms) - count + 1 + index]) * _FACTORS[index]
            mixed ^= mixed >> np.uint64(29)
    return np.unique(mixed)


def similarity(first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64]) -> float:
    """The Jaccard similarity of two sets of shingles: what both have, as a share of what either has."""
    both = len(np.intersect1d(first, second, assume_unique=True))
    return both / (len(first) + len(second) - both)


def bands_of(threshold: float) -> tuple[int, int]:
    """Bands and hashes of each, of `_HASHES` in all: the fewest candidates that still show pairs at the threshold."""
    for size in range(_HASHES, 1, -1):
        bands = _HASHES // size
        if 1 - (1 - threshold**size) ** bands >= _SEEN:
            return bands, size
    return _HASHES, 1


class TextSet:
    """The texts of some rows with their sketches; use it in a `with` block.

    Texts and shingles lie in temporary files; memory holds about a kilobyte for each row, four while rows are compared.

    Args:
        rows: the rows; of a pair, the chosen answer counts.
        name: name of the data.

    `wheres` are the places; `digests` `[rows]` uint64 hashes of the texts; `sketches` `[rows, _HASHES]` uint32;
    `report` counts the bad rows, which are left out.
    """

    def __init__(self, rows: Iterable[RowAsRead], name: str):
        self.wheres: list[str] = []
        self.report = Report(name)
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._ends: tuple[list[int], list[int]] = [0], [0]
        digests, sketches = list[int](), [np.empty((0, _HASHES), dtype=np.uint32)]
        batch = list[npt.NDArray[np.uint64]]()
        with Progress(f"reading {name}", 0) as progress:
            for where, row in rows:
                self.report.rows += 1
                progress.add(1)
                if isinstance(row, BadRow):
                    self.report.add_bad(where, row)
                    continue
                text = content_of(row[0]).encode("utf-8", "replace")
                batch.append(shingles(text.decode()))
                self.wheres.append(where)
                digests.append(text_hash(text.decode()))
                for stream, ends, content in zip(self._files, self._ends, (text, batch[-1].tobytes()), strict=True):
                    stream.write(content)
                    ends.append(ends[-1] + len(content))
                if len(batch) == _BATCH:
                    sketches.append(_sketches(batch))
                    batch = []
        self.sketches = np.concatenate([*sketches, _sketches(batch)] if batch else sketches)
        self.digests = np.array(digests, dtype=np.uint64)

    def __enter__(self) -> TextSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in self._files:
            stream.close()

    def __len__(self) -> int:
        return len(self.wheres)

    def text(self, index: int) -> str:
        """The text of a row, cut."""
        text = self._read(0, index).decode()
        return text if len(text) <= _CHARACTERS else text[:_CHARACTERS] + "…"

    def shingles(self, index: int) -> npt.NDArray[np.uint64]:
        """The shingles of a row."""
        return np.frombuffer(self._read(1, index), dtype=np.uint64)

    def _read(self, number: int, index: int) -> bytes:
        stream, ends = self._files[number], self._ends[number]
        stream.seek(ends[index])
        return stream.read(ends[index + 1] - ends[index])

    def listed(self, index: int, alike: float) -> dict[str, Any]:
        """A row as it is listed: its place, its text, and its similarity to the row beside it."""
        return {"where": self.wheres[index], "text": self.text(index), "similarity": round(alike, 4)}


def _sketches(batch: list[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint32]:
    try:
        from rensa import RMinHash
    except ImportError:
        raise ConfigError("near-duplicates are sought with rensa; run `pip install 'tunesmith[data]'`") from None
    offsets = np.cumsum([0, *map(len, batch)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(batch), offsets, _HASHES, _SEED)
    return np.array(matrix.to_rows(), dtype=np.uint32)


def _buckets(sketches: npt.NDArray[np.uint32], threshold: float) -> Iterator[npt.NDArray[np.int64]]:
    """The rows that agree in all hashes of a band, band by band; those that agree with none are left out."""
    bands, size = bands_of(threshold)
    for band in range(bands):
        keys = np.zeros(len(sketches), dtype=np.uint64)
        with np.errstate(over="ignore"):
            for column in range(band * size, (band + 1) * size):
                keys = (keys ^ sketches[:, column]) * _FACTORS[0]
                keys ^= keys >> np.uint64(29)
        _, inverse = np.unique(keys, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        starts = np.flatnonzero(np.diff(inverse[order], prepend=-1))
        for bucket in np.split(order, starts[1:]):
            if len(bucket) > 1:
                yield bucket


def within(texts: TextSet, threshold: float) -> dict[str, Any]:
    """The rows of a set that say almost the same as an earlier one.

    Returns:
        `rows`; `exact`, rows whose text equals an earlier one's; `near`, further rows that are alike; their `share`
        of the rows together; `groups`, how many there are of the latter; `listed`, the largest of these: `rows`, and
        `members` with `where`, `text` and `similarity` to another of the group.
    """
    _, firsts = np.unique(texts.digests, return_index=True)
    distinct = np.sort(firsts)
    leader = {int(row): int(row) for row in distinct}
    alike, refused = dict[int, float](), set[tuple[int, int]]()

    def group_of(row: int) -> int:
        while leader[row] != row:
            leader[row] = row = leader[leader[row]]
        return row

    for bucket in _buckets(texts.sketches[distinct], threshold):
        compared = list[int]()
        for row in distinct[bucket].tolist():
            for other in compared:
                pair = (other, row)
                if group_of(other) == group_of(row) or pair in refused:
                    continue
                value = similarity(texts.shingles(other), texts.shingles(row))
                if value >= threshold:
                    first, second = sorted((group_of(other), group_of(row)))
                    leader[second] = first
                    alike.setdefault(row, value)
                    alike.setdefault(other, value)
                else:
                    refused.add(pair)
            if len(compared) < _LEADERS and group_of(row) not in map(group_of, compared):
                compared.append(row)
    groups = defaultdict[int, list[int]](list)
    for row in leader:
        groups[group_of(row)].append(row)
    several = sorted((rows for rows in groups.values() if len(rows) > 1), key=lambda rows: (-len(rows), rows[0]))
    exact, near = len(texts) - len(distinct), sum(len(rows) - 1 for rows in several)
    listed = [{"rows": len(rows), "members": [texts.listed(row, alike[row]) for row in rows[:_MEMBERS]]}
              for rows in several[:LISTED]]  # fmt: skip
    share = (exact + near) / max(len(texts), 1)
    return {"rows": len(texts), "exact": exact, "near": near, "share": share, "groups": len(several), "listed": listed}


def between(first: TextSet, second: TextSet, threshold: float) -> dict[str, Any]:
    """The rows of one set that are in another, exactly or nearly.

    Returns:
        Of each side (`first`, `second`) its `rows`, those of them that are in the other set, `exact` and `near`, and
        their `share`; `listed`, pairs of a row of each with `where`, `text` and `similarity`, exact ones first.
    """
    sides = (first, second)
    exact = [np.isin(one_side.digests, other.digests) for one_side, other in (sides, sides[::-1])]
    near = [np.zeros(len(texts), dtype=np.bool_) for texts in sides]
    pairs = list[tuple[float, int, int]]()
    order = {int(digest): index for index, digest in reversed(list(enumerate(second.digests.tolist())))}
    pairs += [(1.0, row, order[int(first.digests[row])]) for row in np.flatnonzero(exact[0])[:LISTED].tolist()]
    left = [np.flatnonzero(~has) for has in exact]  # an exact copy is not counted as near too
    rows = np.concatenate([left[0], np.flatnonzero(exact[0]), len(first) + np.arange(len(second))])
    refused = set[tuple[int, int]]()
    sketches = np.concatenate([first.sketches, second.sketches])[rows]
    for bucket in _buckets(sketches, threshold):
        members = rows[bucket]
        of_first, of_second = members[members < len(first)].tolist(), (members[members >= len(first)] - len(first))
        for row, other in product(of_first[:_LEADERS], of_second[:_LEADERS].tolist()):
            settled = (exact[0][row] or near[0][row]) and (exact[1][other] or near[1][other])
            if settled or (row, other) in refused:
                continue
            value = similarity(first.shingles(row), second.shingles(other))
            if value < threshold:
                refused.add((row, other))
                continue
            if not (exact[0][row] or near[0][row]):
                pairs.append((value, row, other))
            near[0][row] |= not exact[0][row]
            near[1][other] |= not exact[1][other]
    pairs.sort(key=lambda pair: (-pair[0], pair[1], pair[2]))
    listed = [[first.listed(row, value), second.listed(other, value)] for value, row, other in pairs[:LISTED]]
    counts = [
        {"rows": len(texts), "exact": int(has.sum()), "near": int(alike.sum()),
         "share": float((has | alike).sum() / max(len(texts), 1))}
        for texts, has, alike in zip(sides, exact, near, strict=True)
    ]  # fmt: skip
    return {"first": counts[0], "second": counts[1], "listed": listed}
