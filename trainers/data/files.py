"""Resolves a `dataset_name` to local files or a Hub data set. Imports no torch."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from trainers.config.mistakes import ConfigError
from trainers.config.objectives import PREFERENCE
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.remote_data import DATA_SUFFIXES, has_data_suffix, is_url
from trainers.data.data_file import DataFile
from trainers.data.folders import files_of_configuration, files_of_split, has_configurations, list_folder
from trainers.data.local_copies import Copy, cache_dir, copy_of_file, copy_of_query, copy_of_url
from trainers.data.packed import Contents, contents_of
from trainers.data.shards import unreadable
from trainers.data.table_rows import mapped_rows

KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
    ".arrow": "arrow",
}
"""How the content of a file is read, by its suffix."""
READ_AT_WILL = (".parquet", ".arrow", ".json")
"""Suffixes of files that are not read from their beginning on."""
Unpack = Callable[[Path, str, str], DataFile]
"""The data in a compressed file, of its path, its name in messages, and its name in the data set."""
HASHED_BYTES = 256 << 20  # data up to this size is identified by its content, larger data by path, size and time
_HUB_ID = re.compile(r"^\w[\w.-]*(/\w[\w.-]*)?$")


def resolve(config: TrainConfig, split: str) -> list[DataFile]:
    """The files of the `train` or `eval` data, in a fixed order.

    Raises:
        ConfigError: if the data does not exist or cannot be read.
    """
    return _resolve(config, split)[0]


def ignored_files(config: TrainConfig, split: str) -> list[str]:
    """The files that `resolve` ignores: not data, or of another split; each with the reason.

    Raises:
        ConfigError: as for `resolve`.
    """
    return _resolve(config, split)[1]


def _resolve(config: TrainConfig, split: str) -> tuple[list[DataFile], list[str]]:
    own_eval = split == "eval" and config.eval_dataset_name is not None
    name = str(config.eval_dataset_name if own_eval else config.dataset_name)
    part = config.eval_split if own_eval else config.dataset_split
    option, split_option = ("eval_dataset_name", "eval_split") if own_eval else ("dataset_name", "dataset_split")
    path = Path(name).expanduser()
    is_configured = path.is_dir() and has_configurations(path)
    on_hub = name != EMBEDDED and not os.path.lexists(path) and looks_like_hub_id(name)
    if config.dataset_config_name is not None and not (own_eval or is_configured or on_hub):
        problem = f"has no meaning for {name}, which is neither on the Hub nor a folder whose README.md lists `configs`"
        raise ConfigError.about("dataset_config_name", config.dataset_config_name, problem, "leave it out")
    if name == EMBEDDED:
        return [_embedded(part, split_option, config)], []
    cache = cache_dir(config)
    unpack: Unpack = partial(_in_place if config.dataset_streaming and not own_eval else _unpacked, cache)
    if is_url(name):
        query = None if own_eval else config.dataset_query
        copy = copy_of_url(name, option, cache) if query is None else copy_of_query(name, query, cache)
        display_name = name.partition("?")[0]
        return [_copied(copy, display_name, display_name.rpartition("/")[2])], []
    if is_configured:
        listing = files_of_configuration(path, config.dataset_config_name, part, option, split_option)
        return [_file(path / file, str(path / file), file, option, unpack) for file in listing.names], listing.ignored
    if os.path.lexists(path) and not path.is_dir():
        return [_file(path, str(path), path.name, option, unpack)], []
    if path.is_dir():
        return _folder(path, option, part, split_option, unpack)
    if any(letter in name for letter in "*?["):
        return _glob(str(path), option, part, split_option, unpack)
    if on_hub:
        return [_hub_file(name, config.dataset_config_name, part, option)], []
    _missing(name, path, option)


def identity(files: list[DataFile]) -> list[list[str]]:
    """Identifies the data: name and content hash of each file, or path, size and time if the data is large.

    Raises:
        ConfigError: if a file cannot be read.
    """
    hashed = sum(_bytes(file) for file in files if not file.is_hub) <= HASHED_BYTES
    return [_identity(file, hashed) for file in files]


def _identity(file: DataFile, hashed: bool) -> list[str]:
    if file.is_hub:
        return [file.path, str(file.config_name), file.split, mapped_rows(file)._fingerprint]
    if file.digest:
        return [file.name, file.digest]
    try:
        if not hashed:
            status = os.stat(file.path)
            return [os.path.realpath(file.path), str(status.st_size), str(status.st_mtime_ns)]
        with open(file.path, "rb") as stream:
            return [file.name, hashlib.file_digest(stream, "sha256").hexdigest()]
    except OSError as error:
        raise unreadable(file.display_name, error) from None


def _bytes(file: DataFile) -> int:
    """Bytes of a file that are to be hashed: none of a copy, which was hashed when it was made."""
    if file.digest or file.kind != "arrow":
        return 0 if file.digest else file.size
    try:
        return os.stat(file.path).st_size
    except OSError as error:
        raise unreadable(file.display_name, error) from None


def _embedded(part: str, option: str, config: TrainConfig) -> DataFile:
    from trainers.embedded import DATA_DIR, PREFERENCES_DIR, TEXT_DIR

    preferences = PREFERENCE in config.objective_spec.formats
    folder = PREFERENCES_DIR if preferences else TEXT_DIR if config.dataset_format == "text" else DATA_DIR
    path = folder / f"{part}.jsonl"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.jsonl")))
        raise ConfigError(f"{option}={part} is not a split of the embedded data; use one of {known}")
    return _file(path, f"embedded/{path.name}", path.name, option, partial(_unpacked, path))


def _file(path: Path, display_name: str, name: str, option: str, unpack: Unpack) -> DataFile:
    """One file, checked: it exists, is a regular file, is readable, has a known suffix."""
    if path.is_symlink() and not path.exists():
        raise ConfigError(
            f"{option}: {display_name} links to {os.readlink(path)}, which does not exist; repair the symlink"
        )
    if not has_data_suffix(path.name):
        known = ", ".join(DATA_SUFFIXES)
        raise ConfigError(
            f"{option}: {display_name} ends in {path.suffix or 'nothing'!r}; convert it to one of {known}"
        )
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{option}: {display_name} is not a regular file; copy the data into one")
        with path.open("rb"):
            pass
    except OSError as error:
        raise unreadable(display_name, error) from None
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        return unpack(path, display_name, name)
    file = DataFile(os.path.abspath(path), display_name, name, kind, status.st_size)
    return file if kind != "arrow" else replace(file, size=_row_count(file))


def _unpacked(cache: Path, path: Path, display_name: str, name: str) -> DataFile:
    """A compressed file, or a tar, as a local copy of what it holds."""
    return _copied(copy_of_file(path, display_name, cache), display_name, name)


def _in_place(cache: Path, path: Path, display_name: str, name: str) -> DataFile:
    """The same without a copy, unless its content has to be read from its end."""
    status, absolute = path.stat(), os.path.abspath(path)
    version = [path.name, os.path.realpath(path), status.st_size, status.st_mtime_ns]  # the suffix says how it is read
    try:
        contents = contents_of(lambda: path.open("rb"), path.name, display_name, version, cache)
    except OSError as error:
        raise unreadable(display_name, error) from None
    if contents.suffix in READ_AT_WILL:
        return _unpacked(cache, path, display_name, name)
    kind = kind_of_content(contents, display_name)
    return DataFile(absolute, display_name, name, kind, status.st_size, None, "", contents.digest, contents.size)


def kind_of_content(contents: Contents, display_name: str) -> str:
    """How what a compressed file holds is read; raises `ConfigError` if it is no data."""
    if contents.suffix not in KINDS:
        problem = f"holds a file that ends in {contents.suffix!r}" if contents.suffix else "has no suffix"
        raise ConfigError(f"{display_name} {problem}; it needs one of {', '.join(KINDS)}")
    return KINDS[contents.suffix]


def _copied(copy: Copy, display_name: str, name: str) -> DataFile:
    """The local copy of what is compressed or elsewhere, under the name that the user knows."""
    size, kind = os.stat(copy.path).st_size, KINDS[copy.suffix]
    file = DataFile(copy.path, display_name, name, kind, size, digest=copy.digest)
    return file if kind != "arrow" else replace(file, size=_row_count(file))


def _row_count(file: DataFile) -> int:
    try:
        return len(mapped_rows(file))
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise unreadable(file.display_name, error) from None


def _folder(
    folder: Path, option: str, split: str, split_option: str, unpack: Unpack
) -> tuple[list[DataFile], list[str]]:
    """The data files of a split below a folder, and the ignored files."""
    names, ignored = list_folder(folder, DATA_SUFFIXES)
    if not names:
        there = f" and not {', '.join(ignored[:5])}" if ignored else ""
        known = ", ".join(DATA_SUFFIXES)
        raise ConfigError(f"{option}={folder} holds no data file; it needs files ending in {known}{there}")
    names, others = files_of_split(names, split, str(folder), split_option, explicit=False)
    return [_file(folder / name, str(folder / name), name, option, unpack) for name in names], [*others, *ignored]


def _glob(pattern: str, option: str, split: str, split_option: str, unpack: Unpack) -> tuple[list[DataFile], list[str]]:
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name))
    if not paths:
        raise ConfigError(f"{option}={pattern} matches no file; check the pattern and the current folder")
    root = os.path.commonpath([path.absolute().parent for path in paths])
    by_name = {os.path.relpath(path.absolute(), root): path for path in paths}
    names, others = files_of_split(list(by_name), split, pattern, split_option, explicit=True)
    return [_file(by_name[name], str(by_name[name]), name, option, unpack) for name in names], others


def looks_like_hub_id(name: str) -> bool:
    """`org/name` or `name`, unless it looks like a mistyped path."""
    if not _HUB_ID.match(name) or has_data_suffix(name):
        return False
    return not Path(name).parent.is_dir() if "/" in name else "." not in name


def _missing(name: str, path: Path, option: str) -> NoReturn:
    folder = path.parent if path.parent.is_dir() else Path(".")
    near = difflib.get_close_matches(path.name, sorted(os.listdir(folder)), n=3, cutoff=0.6)
    remedy = f"did you mean {' or '.join(str(folder / match) for match in near)}?" if near else "check the path"
    raise ConfigError(f"{option}={name} does not exist; {remedy}")


def _hub_file(name: str, config_name: str | None, split: str, option: str) -> DataFile:
    file = DataFile(name, f"{name}[{split}]", name, "arrow", 0, config_name, split)
    try:
        return replace(file, size=len(mapped_rows(file)))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(hub_mistake(name, config_name, split, option, error)) from None


def hub_mistake(name: str, config_name: str | None, split: str, option: str, error: Exception) -> str:
    kind, message = type(error).__name__, str(error).partition("\n")[0][:300]
    if "gated" in message.lower():
        return f"{option}={name} is gated; accept its terms on the Hub, then set HF_TOKEN or run `hf auth login`"
    if "offline" in (message + kind).lower() or isinstance(error, ConnectionError):
        return f"{option}={name} cannot be downloaded: the Hub is unreachable; go online once, or pass a local file"
    if "NotFound" in kind or "doesn't exist" in message or "cannot be accessed" in message:
        return (
            f"{option}={name} is neither a local file nor a data set on the Hub that you may read; check the name, "
            "or set HF_TOKEN (or run `hf auth login`) if it is private"
        )
    chosen = f"{name}, configuration {config_name or 'default'}, split {split}"
    return f"{option}: cannot load {chosen}: {message}; set dataset_config_name and dataset_split (or eval_split)"
