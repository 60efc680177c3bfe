"""Data files that are read where they lie: local paths, URLs that fsspec reads, and the files of Hub data sets.

Credentials and endpoints come from the environment only. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.remote_data import is_packed, is_url
from trainers.data.data_file import DataFile
from trainers.data.files import (
    KINDS,
    READ_AT_WILL,
    hub_mistake,
    ignored_files,
    kind_of_content,
    looks_like_hub_id,
    resolve,
)
from trainers.data.folders import files_of_split
from trainers.data.local_copies import VERSIONS, cache_dir, explained, file_system, refuse_other_content
from trainers.data.open_file import open_stored
from trainers.data.packed import contents_of
from trainers.data.shards import unreadable


def files_in_place(config: TrainConfig) -> tuple[list[DataFile], list[str]]:
    """The files of the training data, of which none is downloaded, and those left out, each with the reason.

    A query's answer is a local copy.

    Raises:
        ConfigError: if the data does not exist or cannot be listed.
    """
    name, option = str(config.dataset_name), "dataset_name"
    if config.dataset_query is not None:  # a database has no version and sends no ranges: its answer is copied
        return resolve(config, "train"), []
    if is_url(name):
        return _files_at(name, config.dataset_split, option, cache_dir(config))
    if name != EMBEDDED and not os.path.lexists(Path(name).expanduser()) and looks_like_hub_id(name):
        return _files_on_hub(name, config.dataset_config_name, config.dataset_split, option, cache_dir(config)), []
    return resolve(config, "train"), ignored_files(config, "train")


def _files_on_hub(name: str, config_name: str | None, split: str, option: str, cache: Path) -> list[DataFile]:
    """The files of a Hub data set, each by a URL with its revision."""
    from datasets import load_dataset_builder

    try:
        data_files: Any = load_dataset_builder(name, config_name).config.data_files
        urls = list((data_files or {})[split])
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ConfigError(hub_mistake(name, config_name, split, option, error)) from None
    if elsewhere := [url for url in urls if not url.startswith(f"hf://datasets/{name}@")]:
        raise ConfigError(
            f"{option}={name} has its data elsewhere, such as at {elsewhere[0]}; name that, if you trust it"
        )
    return [_file_at(url, f"{name}/{url.partition('@')[2].partition('/')[2]}", option, cache) for url in urls]


def _files_at(url: str, split: str, option: str, cache: Path) -> tuple[list[DataFile], list[str]]:
    """The file at a URL, or those of a split that match a pattern; and the others."""
    if not any(letter in url for letter in "*?[") or url.startswith(("http://", "https://")):
        return [_file_at(url, url.partition("?")[0], option, cache)], []
    with explained(url, option):
        fs, path = file_system(url)
        matched = fs.glob(path, detail=True).items()
    paths = [name for name, details in matched if details.get("type") != "directory"]
    if not paths:
        raise ConfigError.about(option, url, "matches no file", "check the pattern")
    root = os.path.commonpath([os.path.dirname(name) for name in paths])
    names = {os.path.relpath(name, root): name for name in sorted(paths)}
    listing = files_of_split(list(names), split, url, "dataset_split", explicit=True)
    files = [_file_at(fs.unstrip_protocol(names[name]), names[name], option, cache) for name in listing.names]
    return files, listing.ignored


def _file_at(url: str, label: str, option: str, cache: Path) -> DataFile:
    name = PurePosixPath(url.partition("?")[0]).name
    packed = is_packed(name)
    kind = "" if packed else _kind(name, label, option)
    size, version = _version_at(url, name, option)
    file = DataFile(url, label, name, kind, size, digest=f"{size} {version}")
    if not packed:
        return file
    with explained(url, option):
        contents = contents_of(partial(open_stored, file), name, label, [url, size, version], cache)
    if contents.suffix in READ_AT_WILL:
        problem = f"holds a {contents.suffix} file, which is not read from its beginning on"
        raise ConfigError.about(option, url, problem, "store it without compressing it, or leave out dataset_streaming")
    return replace(file, kind=kind_of_content(contents, label), content_size=contents.size)


def _version_at(url: str, name: str, option: str) -> tuple[int, str]:
    """Size and version of a file at a URL."""
    with explained(url, option):
        fs, path = file_system(url)
        facts = fs.info(path)
    refuse_other_content(url, option, facts, name)
    version = next((str(facts[key]) for key in VERSIONS if facts.get(key)), "")
    if facts.get("size") is None or not version:
        missing = "size" if facts.get("size") is None else "version (ETag or Last-Modified)"
        problem = f"is not read in place: its server does not tell its {missing}"
        raise ConfigError.about(option, url, problem, "leave out dataset_streaming")
    return int(facts["size"]), version


def _kind(path: str, label: str, option: str) -> str:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix not in KINDS or KINDS[suffix] == "arrow":
        known = ", ".join(KINDS)
        raise ConfigError(f"{option}: {label} ends in {suffix or 'nothing'!r}, and files are read in place if they "
                          f"end in one of {known}, compressed or not; name such a file or a pattern, or leave out "
                          "dataset_streaming")  # fmt: skip
    return KINDS[suffix]


def version_of(file: DataFile) -> tuple[int, str]:
    """Size and version of a file as it is now.

    Raises:
        ConfigError: if it cannot be read.
    """
    if is_url(file.path):
        size, version = _version_at(file.path, file.name, "dataset_name")
        return size, f"{size} {version}"
    try:
        status = os.stat(file.path)
    except OSError as error:
        raise unreadable(file.display_name, error) from None
    return status.st_size, str(status.st_mtime_ns)
