"""Which files of a folder are data, and of which split; what is ignored, and why. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from trainers.config.mistakes import ConfigError
from trainers.config.remote_data import COMPRESSED, DATA_SUFFIXES, content_suffix, is_url
from trainers.data.shards import unreadable

_DOCUMENTS = re.compile(r"^((readme|licen[cs]e|notice)(\.(md|txt))?|dataset_(infos?|dict)\.json)$", re.IGNORECASE)
_SYNONYMS = {
    "train": ("train", "training"),
    "eval": ("eval", "evaluation", "valid", "validation", "val", "dev"),
    "test": ("test", "testing"),
}
_SPLITS = {word: split for split, synonyms in _SYNONYMS.items() for word in synonyms}
_HEADER = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*$", re.DOTALL | re.MULTILINE)
_HEADER_CHARACTERS = 1 << 20
_CONFIGS = re.compile(r"^configs[ \t]*:", re.MULTILINE)
_COUNTING = ("of", "part", "shard")  # train-00001-of-00005
_SEPARATORS = re.compile(r"[\W\d_]+")


class Listing(NamedTuple):
    """File names relative to a folder, in a fixed order.

    Attributes:
        names: Data files.
        ignored: Other files, each with the reason.
    """

    names: list[str]
    ignored: list[str]


def list_folder(folder: Path, suffixes: Iterable[str]) -> Listing:
    """Every data file below a folder.

    Args:
        folder: Folder to search; links to other folders are not followed.
        suffixes: Suffixes of data files; compressed ones have another after it, such as `.jsonl.gz`.
    """
    known, names, ignored = set(suffixes), [], []
    for parent, folders, files in os.walk(folder):
        base = Path(os.path.relpath(parent, folder))
        for name in folders:
            if name.startswith("."):
                ignored.append(f"{base / name}/ (hidden)")
            elif os.path.islink(os.path.join(parent, name)):
                ignored.append(f"{base / name}/ (a link to a folder)")
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        saved = _saved(Path(parent)) if "state.json" in files else None
        for name in files:
            reason = _not_saved(name, saved) if saved is not None else None
            reason = reason or _no_data(name, known)
            if reason:
                ignored.append(f"{base / name} ({reason})")
            else:
                names.append(str(base / name))
    return Listing(sorted(names), sorted(ignored))


def has_configurations(folder: Path) -> bool:
    """Whether the header of a folder's `README.md` lists the files of its configurations, as data sets on the Hub do.

    Raises:
        ConfigError: if that cannot be read.
    """
    readme = folder / "README.md"
    if not readme.is_file():  # a pipe would block
        return False
    try:
        with readme.open(encoding="utf-8-sig", errors="replace") as file:  # the text below may be of any encoding
            text = file.read(_HEADER_CHARACTERS)
    except OSError as error:
        raise unreadable(str(readme), error) from None
    header = _HEADER.match(text)
    if header is None or not _CONFIGS.search(header[1]):
        return False
    try:
        values = yaml.safe_load(header[1])
    except yaml.YAMLError as error:
        raise ConfigError(f"the header of {readme} is not YAML: {' '.join(str(error).split())[:200]}; repair it, or "
                          "name the data files") from None  # fmt: skip
    return isinstance(values, dict) and bool(values.get("configs"))


def files_of_configuration(
    folder: Path, config_name: str | None, split: str, option: str, split_option: str
) -> Listing:
    """The files that the `README.md` of a folder lists for a split of a configuration; see `has_configurations`.

    Args:
        folder: The folder, such as a copy of a data set of the Hub.
        config_name: Name of the configuration; None for the default one.
        split: Name of the split.
        option: Name of the option that chose the folder.
        split_option: Name of the option that chose the split.

    Raises:
        ConfigError: if there is no such configuration or split, or its files are missing or elsewhere.
    """
    from datasets import load_dataset_builder

    readme = folder / "README.md"
    try:
        builder = load_dataset_builder(str(folder.absolute()), config_name)
    except Exception as error:  # the library raises whatever the YAML's values lead to
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        remedy = "set dataset_config_name, repair it, or name the data files"
        raise ConfigError(f"{option}: {readme} lists no such configuration: {reason}; {remedy}") from None
    data_files: dict[str, Any] = builder.config.data_files or {}
    alike = [files for known, files in data_files.items() if _SPLITS.get(known, known) == _SPLITS.get(split, split)]
    files = data_files.get(split) or next(iter(alike), None)
    if files is None:
        problem = f"its configuration {builder.config.name} has the splits {', '.join(map(str, data_files))}"
        raise ConfigError(f"{split_option}={split}: {readme} lists no such split; {problem}; set {split_option}")
    names = [file if is_url(file) else os.path.relpath(file, folder.absolute()) for file in dict.fromkeys(files)]
    if elsewhere := [name for name in names if is_url(name) or name.startswith("..")]:
        raise ConfigError(
            f"{option}: {readme} lists data elsewhere, such as {elsewhere[0]}; name that, if you trust it"
        )
    chosen = set(names)
    others = [name for name in list_folder(folder, DATA_SUFFIXES).names if name not in chosen]
    where = f"not in split {split} of configuration {builder.config.name}"
    return Listing(names, [f"{name} ({where})" for name in others])


def _saved(folder: Path) -> set[str] | None:
    """The files that `save_to_disk` lists in its `state.json`; None if another program wrote that."""
    try:
        return {entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _not_saved(name: str, saved: set[str]) -> str | None:
    """Why a file beside those of `save_to_disk` is no data: it describes them, or was derived from them later."""
    if name == "state.json":
        return "about the data"
    return "not listed in state.json" if name.endswith(".arrow") and name not in saved else None


def _no_data(name: str, suffixes: set[str]) -> str | None:
    if name.startswith("."):
        return "hidden"
    if _DOCUMENTS.match(name):
        return "about the data"
    if content_suffix(name) in suffixes:
        return None
    return f"ends in {''.join(Path(name).suffixes[-1:]).lower() or 'nothing'!r}"


def files_of_split(names: list[str], split: str, display_name: str, option: str, explicit: bool) -> Listing:
    """The files of one split; files named after no split are training data.

    Args:
        names: File names relative to their folder.
        split: Name of the split, such as `train` or `validation`.
        display_name: The folder in messages.
        option: Name of the option that chose the split.
        explicit: Whether the user named each file; files of a single split are then used whatever it is called.

    Raises:
        ConfigError: if there are only files of other splits.
    """
    wanted = _SPLITS.get(split, split)
    splits = {name: split_of(name) for name in names}
    own = {found_split or "train" for found_split in splits.values()}
    if not any(splits.values()) or (explicit and len(own) == 1):
        return Listing(names, [])
    chosen = [name for name in names if (splits[name] or "train") == wanted]
    if not chosen:
        raise ConfigError(
            f"{option}={split}: no file of {display_name} is named after this split, only after "
            f"{', '.join(sorted(own))}; set {option} to one of these"
        )
    return Listing(chosen, [f"{name} (split {splits[name] or 'train'})" for name in names if name not in set(chosen)])


def split_of(name: str) -> str | None:
    """`train`, `eval` or `test` if the name of a file, or else of a parent folder, contains such a word.

    None if it contains no such word, or words of several splits. The name of a text file describes its topic
    (`dev_notes.txt`), so it must contain nothing else.
    """
    path = Path(name.lower())
    path = path.with_suffix("") if path.suffix in COMPRESSED else path
    for component in (path.stem, *reversed(path.parts[:-1])):
        tokens = [word for word in _SEPARATORS.split(component) if word]
        if component == path.stem and path.suffix in (".txt", ".md") and not {*tokens} <= {*_SPLITS, *_COUNTING}:
            continue
        splits = {_SPLITS[word] for word in tokens if word in _SPLITS}
        if splits:
            return splits.pop() if len(splits) == 1 else None
    return None
