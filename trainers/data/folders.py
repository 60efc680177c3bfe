"""Which files of a folder are data, and of which split; what is passed over, with the reason. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from trainers.config.options import ConfigError

_DOCUMENTS = re.compile(r"^((readme|licen[cs]e|notice)(\.(md|txt))?|dataset_infos?\.json)$", re.IGNORECASE)
_WORDS = {
    "train": ("train", "training"),
    "eval": ("eval", "evaluation", "valid", "validation", "val", "dev"),
    "test": ("test", "testing"),
}
_SPLITS = {word: split for split, words in _WORDS.items() for word in words}
_COUNTING = ("of", "part", "shard")  # train-00001-of-00005
_SEPARATORS = re.compile(r"[\W\d_]+")


class Listing(NamedTuple):
    """Names of files relative to a folder, in a fixed order.

    Attributes:
        names: Of data files.
        ignored: Others, each with the reason.
    """

    names: list[str]
    ignored: list[str]


def list_folder(folder: Path, suffixes: Iterable[str]) -> Listing:
    """Every data file below a folder.

    Args:
        folder: Where to look; links to other folders are not followed.
        suffixes: Endings of data files.
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
        for name in files:
            reason = _no_data(name, known)
            if reason:
                ignored.append(f"{base / name} ({reason})")
            else:
                names.append(str(base / name))
    return Listing(sorted(names), sorted(ignored))


def _no_data(name: str, suffixes: set[str]) -> str | None:
    if name.startswith("."):
        return "hidden"
    if _DOCUMENTS.match(name):
        return "about the data"
    suffix = Path(name).suffix.lower()
    return None if suffix in suffixes else f"ends in {suffix or 'nothing'!r}"


def of_split(names: list[str], split: str, shown: str, option: str, explicit: bool) -> Listing:
    """The files of one split; files that are named after none are training data.

    Args:
        names: Relative to their folder.
        split: Such as `train`; every name that `split_of` knows, or another.
        shown: The folder in messages.
        option: The one that chose the split.
        explicit: Whether each file was named, so that those of a single split are meant whatever it is called.

    Raises:
        ConfigError: when there are files of other splits alone.
    """
    wanted = _SPLITS.get(split, split)
    splits = {name: split_of(name) for name in names}
    own = {found or "train" for found in splits.values()}
    if not any(splits.values()) or (explicit and len(own) == 1):
        return Listing(names, [])
    chosen = [name for name in names if (splits[name] or "train") == wanted]
    if not chosen:
        raise ConfigError(
            f"{option}={split}: no file of {shown} is named after this split, only after {', '.join(sorted(own))}; "
            f"set {option} to one of these"
        )
    return Listing(chosen, [f"{name} (split {splits[name] or 'train'})" for name in names if name not in set(chosen)])


def split_of(name: str) -> str | None:
    """`train`, `eval` or `test` where the name of a file, or else of a folder around it, holds such a word.

    None where it holds none, or words of several splits. A text's name says what it is about (`dev_notes.txt`), so it
    must hold nothing else.
    """
    path = Path(name.lower())
    for part in (path.stem, *reversed(path.parts[:-1])):
        words = [word for word in _SEPARATORS.split(part) if word]
        if part == path.stem and path.suffix in (".txt", ".md") and not {*words} <= {*_SPLITS, *_COUNTING}:
            continue
        splits = {_SPLITS[word] for word in words if word in _SPLITS}
        if splits:
            return splits.pop() if len(splits) == 1 else None
    return None
