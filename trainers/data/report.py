"""Counts what happened to the rows of a data set, and lists where the bad rows are. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from trainers.data.shards import BadRow

EXAMPLES = 20  # bad rows that are listed, per reason
TOO_LONG = "too long"
LONGER = "raise max_length, or set overlong=truncate, drop or split"
UNUSED_NAMES = 1000  # fields counted by name; further ones are counted together
_FURTHER = "further fields"
_SHOWN_UNUSED = 20
_SHOWN_FILES = 10
MOST_DROPPED = 0.1  # fraction of dropped rows above which the report starts with it


@dataclass
class Report:
    """Counts of rows and tokens; its size does not grow with the data.

    Attributes:
        dataset: Name as the user gave it.
        split: `train` or `eval`.
        formats: Formats found, such as `chat`.
        files: Files read.
        rows: Rows read, bad ones included.
        documents: Documents kept (a split row makes several).
        bad_rows: Rows that cannot be used, by reason.
        bad_listed: `[file:line, reason, detail]` in the order of the data, at most `EXAMPLES` per reason.
        unused: Number of rows that have each unused field, such as `messages[].id`.
        truncated: Rows cut at `max_length`.
        dropped: Rows dropped: too long, or nothing trained left after the cut.
        split_rows: Rows cut into several documents.
        tokens: Tokens kept.
        trained_tokens: Tokens trained on, out of those kept.
        cut_tokens: Tokens lost by truncating, dropping and splitting.
        longest: Tokens of the longest row before any cut.
        ignored_files: Files of the folder that are not data or belong to another split, with the reason.
        held_out: Rows that `eval_share` takes from the training data for evaluation.
        left_out: Rows of the split that `max_train_samples` or `max_eval_samples` leaves out; they are not read.
        limit: Name of the option that leaves these out.
        template: The chat template that rendered conversations, and what it trains in a short one.
    """

    dataset: str = ""
    split: str = ""
    formats: list[str] = field(default_factory=list)
    files: int = 0
    rows: int = 0
    documents: int = 0
    bad_rows: dict[str, int] = field(default_factory=dict)
    bad_listed: list[list[str]] = field(default_factory=list)
    unused: dict[str, int] = field(default_factory=dict)
    truncated: int = 0
    dropped: int = 0
    split_rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    cut_tokens: int = 0
    longest: int = 0
    held_out: int = 0
    left_out: int = 0
    limit: str = ""
    ignored_files: list[str] = field(default_factory=list)
    template: list[str] = field(default_factory=list)

    def add_bad(self, where: str, bad: BadRow) -> None:
        """Counts a bad row, and lists it if it is among the first of its kind."""
        count = self.bad_rows.get(bad.kind, 0)
        self.bad_rows[bad.kind] = count + 1
        if count < EXAMPLES:
            self.bad_listed.append([_printable(where), bad.kind, _printable(bad.detail)[:300]])

    def add_unused(self, name: str, rows: int = 1) -> None:
        """Counts rows with an unused field."""
        name = _printable(name)[:100]
        if name not in self.unused and len(self.unused) >= UNUSED_NAMES:
            name = _FURTHER
        self.unused[name] = self.unused.get(name, 0) + rows

    def rename_sources(self, dataset: str, names: dict[str, str]) -> None:
        """Renames the data set, and its files (old name to new) in the list of bad rows."""
        self.dataset = dataset
        now = {_printable(old): _printable(new) for old, new in names.items()}
        for bad in self.bad_listed:
            file, _, line = bad[0].rpartition(":")
            bad[0] = f"{now.get(file, file)}:{line}"

    def merge(self, other: Report) -> None:
        """Adds the report on the rows that follow."""
        listed = Counter(kind for _, kind, _ in self.bad_listed)
        for bad in other.bad_listed:
            if listed[bad[1]] < EXAMPLES:
                self.bad_listed.append(bad)
                listed[bad[1]] += 1
        for kind, count in other.bad_rows.items():
            self.bad_rows[kind] = self.bad_rows.get(kind, 0) + count
        for name, count in other.unused.items():
            self.add_unused(name, count)
        for name in (
            "rows",
            "documents",
            "truncated",
            "dropped",
            "split_rows",
            "tokens",
            "trained_tokens",
            "cut_tokens",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)
        self.template = self.template or other.template

    def examples(self, kind: str | None = None) -> list[str]:
        """The listed bad rows, of one reason or of all, as `file:line: reason: detail`."""
        return [": ".join(bad) for bad in self.bad_listed if kind in (None, bad[1])]

    @property
    def bad(self) -> int:
        """Bad rows of all kinds."""
        return sum(self.bad_rows.values())

    @property
    def too_long(self) -> int:
        """Bad rows that are longer than `max_length`, under `overlong=refuse`."""
        return self.bad_rows.get(TOO_LONG, 0)

    def lines(self) -> list[str]:
        """The lines that a run prints: counts, what was shortened or dropped, and where bad rows are."""
        name = f"{self.split} data {self.dataset}"
        trained = f"{self.trained_tokens:,} trained" if self.trained_tokens else "all of prompts without an answer"
        lines = [
            f"{name}: {self.documents:,} documents from {self.rows:,} rows in {self.files} file{'s'[: self.files != 1]}"
            f" ({', '.join(self.formats) or 'no known format'}), {self.tokens:,} tokens, "
            f"{trained}, longest row {self.longest:,} tokens"
        ]
        shortened = {"truncated": self.truncated, "dropped": self.dropped, "split": self.split_rows}
        if any(shortened.values()):
            summary = ", ".join(f"{count:,} rows {outcome}" for outcome, count in shortened.items() if count)
            lines.append(f"{name}: {summary}; {self.cut_tokens:,} tokens lost")
        if self.held_out:
            lines.append(f"{name}: {self.held_out:,} rows held out for evaluation by eval_share")
        if self.left_out:
            lines.append(f"{name}: {self.left_out:,} rows left out by {self.limit or f'max_{self.split}_samples'}")
        lines += [f"{name}: {note}" for note in self.notes()]
        if self.bad:
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.bad_rows.items()))
            lines.append(f"{name}: {self.bad:,} bad rows skipped ({kinds}), such as")
            lines += [f"  {where}" for where in self.examples()[:5]]
        return [*lines, *self.template]

    def notes(self) -> list[str]:
        """What the user should always be told: many dropped rows, ignored files, unused fields."""
        notes = self.dropped_note()
        if self.ignored_files:
            listed = ", ".join(map(_printable, self.ignored_files[:_SHOWN_FILES]))
            more = len(self.ignored_files) - _SHOWN_FILES
            notes.append(f"files left out: {listed}" + (f", and {more:,} more" if more > 0 else ""))
        if self.unused:
            notes.append(f"unused fields: {_listed(self.unused)}")
        return notes

    def dropped_note(self) -> list[str]:
        """One line, if so many rows are dropped that it is probably a mistake."""
        if self.dropped <= MOST_DROPPED * self.rows:
            return []
        return [
            f"{self.dropped:,} of {self.rows:,} rows are dropped: within max_length they have no trained token (the "
            f"longest has {self.longest:,} tokens); raise max_length, or set overlong=split"
        ]

    def refusal(self) -> list[str]:
        """The lines of the error for bad rows: the first of them, the total, the remedy."""
        lines = self.examples()[:EXAMPLES]
        unlisted = self.bad - len(lines)
        total = f"{self.bad:,} of {self.rows:,} rows of {self.dataset} cannot be used"
        total += f" ({unlisted:,} more than listed)" if unlisted else ""
        remedies = ["repair them, or set bad_rows=skip to leave them out"] if self.bad > self.too_long else []
        remedies += [f"for those {TOO_LONG}, {LONGER}"] if 0 < self.too_long < self.bad else []
        return [*lines, f"{total}; {'; '.join(remedies or [LONGER])}"]

    def to_json(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        """The report that `to_json` wrote."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})


def _listed(unused: Mapping[str, int]) -> str:
    """Formats unused fields as "`foo`, 12,431 rows; `bar`, 3 rows", most frequent first."""
    ordered = sorted(unused.items(), key=lambda item: (-item[1], item[0]))
    listed = [f"`{name}`, {count:,} row{'s'[: count != 1]}" for name, count in ordered[:_SHOWN_UNUSED]]
    more = len(ordered) - len(listed)
    return "; ".join([*listed, f"{more:,} more fields"] if more else listed)


def _printable(text: str) -> str:
    """Replaces control characters, for terminals and logs."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
