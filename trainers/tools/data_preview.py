"""Shows data as it will be trained: rows as read, packed rows, and statistics of the full data set.

The program behind `app/services/data.py`; it tokenises with the same code, and into the same cache, as training.
Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.config.mistakes import ConfigError
from trainers.config.mix import config_of
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.remote_data import is_url
from trainers.config.validation import build
from trainers.data.batches import TrainPlan
from trainers.data.data_file import DataFile
from trainers.data.fill_cache import formats_of, options_of, refuse_bad, refuse_missing_numbers
from trainers.data.held_out import row_hash, selection_of
from trainers.data.languages import language_table
from trainers.data.mix import MixOrder
from trainers.data.overlap import leak_lines, repeated
from trainers.data.prepare import TokenSet, files_of, load_tokenizer, mix_of, tokenised
from trainers.data.progress import listeners
from trainers.data.report import Report
from trainers.data.rollouts import refuse_missing_columns
from trainers.data.rows import Rows
from trainers.data.shards import SHARD_BYTES, BadRow, FileShard
from trainers.data.sources import iter_shards, read
from trainers.data.stream import stream_lines, streams_of
from trainers.data.tables import length_table, source_table
from trainers.data.template import training_encoder
from trainers.data.tokenise import encode_rows, example_of
from trainers.data.tokenizer import read_chat_template
from trainers.run.process_limits import encoding_bytes, encoding_seconds, expect_death, memory_limit, time_limit
from trainers.tools.data_compare import compare
from trainers.tools.preflight import make_rows, plan_training
from trainers.tools.rpc_server import send, serve

MAPPED_ROW_BYTES = 1000
PAGE_BYTES = 1 << 20  # shard size for reading a page
MOST_ROWS = 50
SHOWN_TOKENS = 4_000
RAW_CHARACTERS = 4_000
BINS = 40
_COUNTED_BYTES = 64 << 20  # which rows are held out is shown for data up to this size, as it requires reading all rows
_MOST_PREVIEWS = 4  # data sets

Segment = dict[str, Any]


class Preview:
    """One data set under one config.

    Args:
        config: its data options and tokenizer are used.
    """

    def __init__(self, config: TrainConfig):
        self.config = config
        self.files = files_of(config, "train")
        self.tokenizer = load_tokenizer(config)
        self.encoder = training_encoder(config, self.tokenizer)
        self.encoder.may_die = True  # this process may end; its parent reports that and starts another
        self.options = options_of(config, self.encoder)
        self._shard_iterator = iter_shards(self.files, config.sample_by, PAGE_BYTES, config.columns)
        self._shards: list[FileShard] = []
        self._all_sharded = False
        self._formats: dict[str, str] = {}
        self._of_training: npt.NDArray[np.bool_] | None = None
        self._packed: Rows | None = None
        self._tokens: TokenSet | None = None

    @cached_property
    def sources(self) -> dict[str, Preview]:
        """The sources of a mix by name; empty for a data set of its own."""
        mix = mix_of(self.config, "train")
        return {} if mix is None else {source.label: Preview(config_of(self.config, source)) for source in mix.sources}

    @property
    def packs(self) -> bool:
        """Whether a row of the batches holds several documents; of prompts, only the sampled answers are packed."""
        return self.config.packing and not self.config.objective_spec.samples

    def rows(self, offset: int, count: int) -> dict[str, Any]:
        """Some rows, as read and as trained; files are scanned only up to them.

        Args:
            offset: number of rows before the first one, over all files.
            count: number of rows, at most `MOST_ROWS`.

        Returns:
            `rows`, `offset`, `total` (None until all files have been scanned), `bytes` of all files (an estimate for
            Arrow and Hub data).
        """
        if self.sources:
            return self._rows_of_sources(offset, count)
        of_training = self._training_side()
        rows = []
        for shard, number, line, item in self._items(offset, min(count, MOST_ROWS)):
            row = self._row(shard, number, line, item)
            if row["status"] != "bad":
                row["use"] = self._use(number, of_training)
            rows.append(row)
        if not rows:
            self._advance(offset + 1)
        total = self._shards[-1].first_row + self._shards[-1].rows if self._all_sharded else None
        size = self._size()
        formats = sorted(set(self._formats.values()))
        return {"rows": rows, "offset": offset, "total": total, "bytes": size, "formats": formats}

    def _rows_of_sources(self, offset: int, count: int) -> dict[str, Any]:
        """Some rows of a mix, source after source; a source is scanned to its end before the next one is."""
        rows, before, formats, total = list[dict[str, Any]](), 0, set[str](), 0
        for name, source in self.sources.items():
            page = source.rows(max(0, offset - before), count - len(rows))
            for row in page["rows"]:
                rows.append({**row, "number": row["number"] + before, "where": f"{name}: {row['where']}"})
            formats |= set(page["formats"])
            if len(rows) == count:
                break
            before += page["total"]
        else:
            total = before
        known = {"total": total or None, "bytes": self._size(), "formats": sorted(formats)}
        return {"rows": rows, "offset": offset, **known}

    def _advance(self, row: int) -> None:
        """Scans files until a row is in one of the shards, or all are scanned."""
        while not self._all_sharded and (not self._shards or self._shards[-1].first_row + self._shards[-1].rows <= row):
            shard = next(self._shard_iterator, None)
            if shard is None:
                self._all_sharded = True
            else:
                self._shards.append(shard)

    def _items(self, offset: int, count: int) -> Iterator[tuple[FileShard, int, int, Any]]:
        """Rows with their shard, their number and their line."""
        self._advance(offset)
        # Start in the shard that contains row `offset`, and go on to the next shards as needed.
        firsts = [shard.first_row for shard in self._shards]
        index = max(0, int(np.searchsorted(firsts, offset, side="right")) - 1)
        number = offset
        while number < offset + count:
            self._advance(number)
            if index >= len(self._shards):
                return
            shard = self._shards[index]
            items = read(shard, self.config.sample_by, self.options.wanted)
            start = number - shard.first_row
            for line, item in islice(items, start, start + offset + count - number):
                yield shard, number, line, item
                number += 1
            if number < min(offset + count, shard.first_row + shard.rows):
                raise ConfigError(f"{shard.file.display_name} changed while it was read; try again when it is complete")
            index += 1

    def _row(self, shard: FileShard, number: int, line: int, item: Any) -> dict[str, Any]:
        options, report = self.options, Report()
        raw = item if isinstance(item, BadRow) else example_of(item, self._format(shard.file), options)
        pieces = encode_rows([(line, raw)], shard.file.display_name, self.encoder, options, report)
        documents = [self.segments(part.input_ids, part.mask) for _, piece, *_ in pieces for part in piece]
        return {
            "number": number,
            "where": f"{shard.file.display_name}:{line}",
            "raw": "" if isinstance(item, BadRow) else _raw(item),
            "status": _status(report),
            "use": "train",
            "unused": sorted(report.unused),
            "mistake": report.bad_listed[0][1:] if report.bad else None,
            "tokens": report.longest,
            "kept_tokens": report.tokens,
            "trained_tokens": report.trained_tokens,
            "unanswered": bool(pieces) and pieces[0][2].unanswered,
            "for_rewards": _cut(pieces[0][2].columns) if pieces else "",
            "documents": documents,
        }

    def _format(self, file: DataFile) -> str:
        if file.path not in self._formats:
            # As large as the shard in which training detects the format.
            first = next(iter_shards([file], self.config.sample_by, SHARD_BYTES, self.config.columns))
            self._formats.update(formats_of(self.config, [first]))
        return self._formats[file.path]

    def _size(self) -> int:
        """Bytes of all files, about."""
        return sum(file.size * (MAPPED_ROW_BYTES if file.kind == "arrow" else 1) for file in self.files)

    def _training_side(self) -> npt.NDArray[np.bool_] | None:
        """`[rows]` whether each row is not held out for evaluation; empty without `eval_share`.

        None if that requires reading large files.
        """
        if not self.config.eval_share:
            return np.empty(0, dtype=np.bool_)
        if self._of_training is None:
            if self._size() > _COUNTED_BYTES:
                return None
            self._advance(2**62)
            formats, seed = self.options.formats, self.config.seed
            rows = (
                item if isinstance(item, BadRow) else example_of(item, self._format(shard.file), self.options)
                for shard, _, _, item in self._items(0, self._shards[-1].first_row + self._shards[-1].rows)
            )
            hashes = np.fromiter((row_hash(row, formats, seed) for row in rows), dtype=np.uint64)
            selection = selection_of(self.config.eval_share, seed, False, lambda: [hashes])
            self._of_training = hashes >= selection.threshold
        return self._of_training

    def _use(self, number: int, of_training: npt.NDArray[np.bool_] | None) -> str:
        """How a row is used: `train`, `eval`, `none` (beyond `max_train_samples`) or `unknown`."""
        if of_training is None:
            return "unknown"
        if len(of_training) and not of_training[number]:
            return "eval"
        limit = self.config.max_train_samples
        if limit is None or number < limit:
            return "train"
        return "train" if len(of_training) and int(of_training[:number].sum()) < limit else "none"

    def segments(self, ids: npt.NDArray[np.int32], mask: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """Splits a document into segments of text that are trained or not.

        Args:
            ids: `[tokens]` token ids.
            mask: `[tokens]` True for trained tokens.

        Returns:
            `segments` with `text`, `trained` and `tokens`; `tokens` of the document; number of `hidden` tokens.
        """
        ends = [*(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        segments: list[Segment] = []
        start, before = 0, ""
        for end in ends:
            stop = min(end, SHOWN_TOKENS)
            if stop > start:
                # Decode with the text before: some tokenizers drop the leading space of the first token.
                text = self._decode(ids[:stop])
                if stop < len(ids):
                    text = text.rstrip("\ufffd")  # a partial character is shown with the next segment
                at = len(before) if text.startswith(before) else _common_prefix(before, text)
                segments.append({"text": text[at:], "trained": bool(mask[start]), "tokens": stop - start})
                start, before = stop, text
        return {"segments": segments, "tokens": len(ids), "hidden": len(ids) - start}

    def _decode(self, ids: npt.NDArray[np.int32], skip_special: bool = False) -> str:
        with memory_limit(encoding_bytes(len(ids))), time_limit(encoding_seconds(len(ids))):
            text = self.tokenizer.decode(
                ids.tolist(), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        return str(text)

    def tokens(self) -> TokenSet:
        """The tokenised training data, from the cache if possible."""
        if self._tokens is None:
            self._tokens = tokenised(self.config, "train")
        return self._tokens

    def training_rows(self) -> Rows:
        """The rows of the batches: packed, or one document each."""
        if self._packed is None:
            unrecorded = self.config.model_copy(update={"teacher_log_probs": None})  # which may be of other data
            self._packed = make_rows(unrecorded, self.tokens())
        return self._packed

    def packed(self, index: int) -> dict[str, Any]:
        """One row of the batches, document by document.

        Raises:
            ConfigError: if there is no such row.
        """
        rows = self.training_rows()
        if not 0 <= index < len(rows):
            raise ConfigError(f"row {index} does not exist; the data has rows 0 to {len(rows) - 1}")
        documents, position = [], 0
        for member in rows.members[rows.offsets[index] : rows.offsets[index + 1]]:
            ids, mask = rows.documents.document(int(member))
            document = self.segments(ids, mask)
            documents.append({"where": rows.documents.where(int(member)), "start": position, **document})
            position += len(ids)
        return {
            "index": index, "total": len(rows), "packing": self.packs, "documents": documents,
            "tokens": position, "room": self.config.row_tokens, "trained_tokens": int(rows.trained[index]),
        }  # fmt: skip

    def languages(self, count: int) -> dict[str, Any]:
        """The languages of `count` documents; see `trainers.data.languages.language_table`."""
        return language_table(self.tokens(), lambda ids: self._decode(ids, True), count, self.config.seed)

    def statistics(self) -> dict[str, Any]:
        """Statistics of the full data set: counts, shares, lengths, packing, bad rows, steps."""
        data, rows = self.tokens(), self.training_rows()
        report = data.report
        slots = len(rows) * self.config.row_tokens
        mistakes = _mistakes(lambda: refuse_bad(report, self.config))
        mistakes += _mistakes(lambda: refuse_missing_numbers(self.config, data))
        mistakes += _mistakes(lambda: refuse_missing_columns(self.config, data))
        leaks = list[str]()
        if self.config.has_evaluation():
            mistakes += _mistakes(lambda: leaks.extend(leak_lines(data, tokenised(self.config, "eval"))))
        epoch_rows = len(rows) if rows.mixed is None else MixOrder(rows.bounds, rows.mixed.mix, 0).epoch_rows
        steps: dict[str, int | None] = {"steps_per_epoch": None, "total_steps": None}
        try:
            plan = plan_training(self.config, data, 1) if streams_of(data) else TrainPlan(rows, self.config, 1)
            epoch_rows = plan.rows_of_epoch()  # of a stream, an estimate by the first window
            steps = {"steps_per_epoch": plan.steps_per_epoch, "total_steps": plan.total_steps}
        except ConfigError as error:
            mistakes += [*report.dropped_note(), *error.lines]
        return {
            **report.to_json(),
            "notes": [*report.notes(), *stream_lines(data), *leaks],
            "bad": report.bad,
            "eval_left_out": max(0, report.held_out - (self.config.max_eval_samples or report.held_out)),
            "trained_share": _share(report.trained_tokens, report.tokens),
            "truncated_share": _share(report.truncated, report.rows),
            "dropped_share": _share(report.dropped, report.rows),
            "bad_share": _share(report.bad, report.rows),
            "repeated": repeated(data),
            "packing": self.packs,
            "max_length": self.config.max_length,
            "training_rows": len(rows),
            "epoch_rows": epoch_rows,
            "sources": [] if rows.mixed is None else source_table(rows.mixed, rows.bounds, rows.lengths),
            "packing_efficiency": _share(report.tokens, slots) if self.packs else None,
            "global_batch_size": self.config.global_batch_size,
            **steps,
            "histogram": histogram(data.lengths),
            "lengths": length_table(data.lengths),
            "mean_length": float(data.lengths.mean()),
            "languages": None,
            "mistakes": mistakes,
        }


def histogram(lengths: npt.NDArray[np.int64]) -> list[dict[str, int]]:
    """Histogram of document lengths: at most `BINS` bins of equal width, each with its bounds and its count.

    Args:
        lengths: `[documents]` tokens of each; not empty.
    """
    shortest = int(lengths.min())
    width = -(-(int(lengths.max()) - shortest + 1) // BINS)
    counts = np.bincount((lengths - shortest) // width)
    return [
        {"from": shortest + number * width, "to": shortest + (number + 1) * width - 1, "count": count}
        for number, count in enumerate(counts.tolist())
    ]


def _share(count: int, total: int) -> float:
    return count / total if total else 0.0


def _mistakes(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return error.lines
    return []


def _common_prefix(first: str, second: str) -> int:
    """Length of the common prefix of two strings."""
    return next((at for at, letter in enumerate(first) if letter != second[at : at + 1]), len(first))


def _status(report: Report) -> str:
    counts = {"bad": report.bad, "dropped": report.dropped, "truncated": report.truncated, "split": report.split_rows}
    return next((name for name, count in counts.items() if count), "whole")


def _raw(row: dict[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False, default=str)
    return _cut(text.encode("utf-8", "replace").decode("utf-8"))  # a lone surrogate cannot be displayed


def _cut(text: str) -> str:
    return text if len(text) <= RAW_CHARACTERS else text[:RAW_CHARACTERS] + "…"


class _Previews:
    """The most recently used previews."""

    def __init__(self) -> None:
        self.previews: OrderedDict[str, Preview] = OrderedDict()

    @contextmanager
    def of(self, values: dict[str, Any]) -> Iterator[Preview]:
        """The preview of a config; rebuilt if its files have changed, or if an earlier answer failed."""
        config = build(values)
        mix = mix_of(config, "train")
        of_files = [_stamps(files_of(config, "train")), read_chat_template(config), mix and mix.model_dump()]
        key = json.dumps([values, *of_files], sort_keys=True)
        if key not in self.previews:
            self.previews[key] = Preview(config)
        self.previews.move_to_end(key)
        while len(self.previews) > _MOST_PREVIEWS:
            self.previews.popitem(last=False)
        try:
            yield self.previews[key]
        except BaseException:
            self.previews.pop(key, None)
            raise


def _stamps(files: Sequence[DataFile]) -> list[list[Any]]:
    """Values that change whenever a file does."""
    local = [not file.is_hub and not is_url(file.path) for file in files]
    times = [os.stat(file.path).st_mtime_ns if is_local else file.digest
             for file, is_local in zip(files, local, strict=True)]  # fmt: skip
    return [[file.path, file.size, time] for file, time in zip(files, times, strict=True)]


def main() -> None:
    """Answers `rows`, `packed`, `statistics` and `comparison` requests until standard input closes."""
    expect_death()
    # Import everything that a tokenizer needs first: a cancel must not interrupt an import.
    load_tokenizer(build({"model_name_or_path": EMBEDDED, "dataset_name": EMBEDDED}))
    previews = _Previews()
    listeners.append(lambda task, done, total: send({"progress": {"what": task, "done": done, "total": total}}))

    def rows(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with previews.of(request["config"]) as preview:
            answer = preview.rows(request["offset"], request["count"])
        yield answer

    def packed(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with previews.of(request["config"]) as preview:
            answer = preview.packed(request["index"])
        yield answer

    def statistics(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"progress": {"what": "reading the data", "done": 0, "total": 0}}
        with previews.of(request["config"]) as preview:
            answer = preview.statistics()
            if count := request.get("languages", 0):
                answer["languages"] = preview.languages(count)
        yield {"statistics": answer}

    def comparison(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        other = request["against"] and build(request["against"])
        yield {"comparison": compare(build(request["config"]), request["threshold"], request["near"], other)}

    serve({"rows": rows, "packed": packed, "statistics": statistics, "comparison": comparison})


if __name__ == "__main__":
    main()
