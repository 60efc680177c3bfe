"""What a data set consists of. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataFile:
    """One file of a data set, or a whole Hub data set.

    Attributes:
        path: Absolute path, of a local copy if there is one; the Hub id for a Hub data set.
        display_name: The name in messages.
        name: The name relative to the data set, independent of where the data set is stored.
        kind: `jsonl`, `json`, `csv`, `tsv`, `parquet`, `text`, or `arrow`: an Arrow file or a Hub data set.
        size: Bytes; rows of `arrow`.
        config_name: Configuration of a Hub data set.
        split: Split of a Hub data set.
        digest: sha256 of the content of a local copy, or of a compressed file; size and version of one at a URL;
            otherwise empty.
        content_size: Bytes of its content, if that is decompressed whenever it is read; None for other files.
    """

    path: str
    display_name: str
    name: str
    kind: str
    size: int
    config_name: str | None = None
    split: str = ""
    digest: str = ""
    content_size: int | None = None

    @property
    def is_hub(self) -> bool:
        """Whether it is a Hub data set, which has a split and no path."""
        return bool(self.split)
