"""Names of data that is compressed, behind a URL or in a database. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePath

from trainers.config.mistakes import Mistake
from trainers.config.options import TrainConfig

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".tar")
SCHEMES = ("https", "http", "hf", "s3", "gs", "az", "abfs")
"""Where files are read from; chained URLs of fsspec, and its other file systems, are not."""
_SECRET = re.compile(r"[?&][^=&]*(token|key|sig|secret|password|credential)[^=&]*=", re.IGNORECASE)
_SQLITE = "sqlite:///"


def content_suffix(name: str) -> str:
    """The lower-case suffix of a file's content: `.jsonl` of `a.jsonl` and of `a.jsonl.gz`; `.tar` of `a.tgz`."""
    path = PurePath(name.lower())
    if path.suffix == ".tgz":
        return ".tar"
    return PurePath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def has_data_suffix(name: str) -> bool:
    """Whether a name ends like a file of data, compressed or not."""
    return content_suffix(name) in DATA_SUFFIXES or PurePath(name.lower()).suffix in COMPRESSED


def is_packed(name: str) -> bool:
    """Whether a name ends like a compressed file or a tar."""
    return content_suffix(name) == ".tar" or PurePath(name.lower()).suffix in COMPRESSED


def is_url(name: str | None) -> bool:
    """Whether data is behind a URL, of a file or a database."""
    return name is not None and "://" in name


def holds_credentials(url: str | None) -> bool:
    """Whether a URL has a user or password before its host, or a signature or token in its query.

    They would end up in argv, the log and the state file.
    """
    if url is None or "://" not in url:
        return False
    return "@" in url.partition("://")[2].partition("/")[0] or bool(_SECRET.search(url))


def sqlite_file(url: str) -> Path | None:
    """The file of a SQLite URL: `sqlite:///data.db`, or `sqlite:////data.db` with an absolute path; otherwise None."""
    return Path(url.removeprefix(_SQLITE)) if url.startswith(_SQLITE) and len(url) > len(_SQLITE) else None


def absolute_url(url: str) -> str:
    """The URL, of a SQLite file with its absolute path, so that it names the same file from any folder."""
    file = sqlite_file(url)
    return url if file is None else f"{_SQLITE}{file.expanduser().absolute()}"


def remote_mistakes(config: TrainConfig) -> Iterator[Mistake]:
    """Yields a mistake for each URL of data that cannot be read, and for a query without a database."""
    query = config.dataset_query
    if query is not None and not is_url(config.dataset_name):
        remedy = "set dataset_name to a database, such as sqlite:///data.db"
        yield Mistake("dataset_query", query[:80], "needs a database to ask", remedy)
    for option, name in (("dataset_name", config.dataset_name), ("eval_dataset_name", config.eval_dataset_name)):
        if name is None or not is_url(name):
            continue
        scheme = name.partition("://")[0].lower()
        if holds_credentials(name):
            yield Mistake(option, None, "holds credentials", "leave them out and set them in the environment")
        elif scheme in SCHEMES:
            streams = config.dataset_streaming and option == "dataset_name"
            yield from _file_mistakes(option, name, query if option == "dataset_name" else None, streams)
        elif option == "eval_dataset_name":
            yield Mistake(option, name, "is no URL of a file", "hold rows of the query out with eval_share")
        elif query is None:
            remedy = f"use {', '.join(SCHEMES)}, or set dataset_query if it is a database"
            yield Mistake(option, name, "is no URL that files are read from", remedy)


def _file_mistakes(option: str, url: str, query: str | None, streams: bool) -> Iterator[Mistake]:
    if query is not None:
        yield Mistake("dataset_query", query[:80], f"with {option}={url}, which is a file", "leave it out")
    elif "::" in url or ("*" in url and not streams):
        yield Mistake(option, url, "is not the URL of one file", "name each file, as sources of a mix")
    elif "\\" in url or not url.isprintable() or " " in url:
        yield Mistake(option, url, "holds a character that URLs do not have", "escape it, such as %20 for a space")
