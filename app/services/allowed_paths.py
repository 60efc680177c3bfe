"""Which files a request may touch: every path in it must lead, links followed, into one of the allowed folders."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from app.console import shortened
from trainers.config.options import EMBEDDED, ConfigError, TrainConfig
from trainers.config.parse import read_yaml
from trainers.strategy.strategy import deepspeed_paths, strategy_names

INPUTS = ("model_name_or_path", "dataset_name", "eval_dataset_name", "chat_template")
OUTPUTS = ("cache_dir", "runs_dir", "output_dir", "resume_from_checkpoint")
STORES = ("s3", "gs", "az", "abfs", "hf")
"""Where a page may send copies of checkpoints; other URLs of fsspec lead to this machine's files or to any host."""
MOST_FILES = 10_000
"""Entries of a folder that are looked at for links that lead out."""
_HUB = {"model_name_or_path", "dataset_name", "eval_dataset_name"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_DATA = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_ESCAPED = re.compile(r"%(2f|5c|2e|00)", re.IGNORECASE)
_WILD = re.compile(r"[*?\[]")


def check_paths(config: TrainConfig, roots: Sequence[Path]) -> None:
    """Refuses a config with a path outside the allowed folders.

    Raises:
        ConfigError: a line for each option: its name, its value and the allowed folders.
    """
    if mistakes := path_mistakes(config.model_dump(include={*INPUTS, *OUTPUTS, "checkpoint_url"}), roots):
        raise ConfigError(list(mistakes.values()))


def path_mistakes(values: Mapping[str, Any], roots: Sequence[Path]) -> dict[str, str]:
    """A line for each path-like option whose value is refused; other options are passed over.

    Args:
        values: values by option; None, an empty text and `none` name nothing.
        roots: folders in which files may lie.
    """
    found = {}
    for name in (*INPUTS, *OUTPUTS):
        value = str(values.get(name) or "")
        if value.lower() not in ("", "none", "null") and (reason := _refused(name, value, roots)):
            found[name] = f"{name}={shortened(value)} {reason}"
    url = str(values.get("checkpoint_url") or "")
    if url.lower() not in ("", "none", "null") and url.partition("://")[0].lower() not in STORES:
        found["checkpoint_url"] = f"checkpoint_url={shortened(url)} is no object store; use {', '.join(STORES)}"
    return found


def strategy_mistake(name: str, roots: Sequence[Path]) -> str | None:
    """Why a strategy's YAML, or the DeepSpeed JSON that it names, may not be read, or where that may not write.

    None for those that ship.
    """
    if name in strategy_names():
        return None
    if reason := path_refused(name, roots):
        return f"strategy {shortened(name)} {reason}"
    try:
        inline = read_yaml(Path(name)).get("deepspeed_config")
    except ConfigError:
        return None  # whoever reads it next says what is wrong with it
    file = inline.get("deepspeed_config_file") if isinstance(inline, dict) else None
    if not file:
        return None
    shown = f"strategy {shortened(name)}: deepspeed_config_file={shortened(str(file))}"
    if reason := path_refused(str(file), roots):
        return f"{shown} {reason}"
    try:
        paths = deepspeed_paths(str(file))
    except ConfigError:
        return None  # as above
    refused = ((key, path, path_refused(path, roots)) for key, path in paths.items())
    return next((f"{shown}: {key}={shortened(path)} {reason}" for key, path, reason in refused if reason), None)


def path_refused(value: str, roots: Sequence[Path]) -> str | None:
    """Why a path is refused, as the rest of a line that begins with its name; None when it is allowed.

    Args:
        value: a path as a stranger wrote it; need not exist.
        roots: folders in which it may lie.
    """
    if _URL.match(value):
        return "is a URL; download it and give the file, or give a Hub id"
    if _ESCAPED.search(value) or not value.isprintable():
        return "holds an escaped or invisible character; write the path as it is"
    path = Path(value)
    if ".." in re.split(r"[/\\]", value) or value.startswith("~"):
        return "is refused: `..` and `~` are not read here; write the full path"
    return None if _inside(path, roots) else _outside(roots)


def _outside(roots: Sequence[Path]) -> str:
    return f"lies outside the allowed folders; use a path under {' or '.join(map(str, roots))}"


def _inside(path: Path, roots: Sequence[Path]) -> bool:
    """Whether the path, links followed, lies in one of the folders."""
    try:
        real = path.resolve()
        circle = real.is_symlink()  # Python 3.13 leaves it as it is; those before it raise
        return not circle and any(real.is_relative_to(root.resolve()) for root in roots)
    except (OSError, ValueError, RuntimeError):  # such as a name of 300 letters, or links in a circle
        return False


def _refused(name: str, value: str, roots: Sequence[Path]) -> str | None:
    if value == (EMBEDDED if name in _HUB else "auto" if name == "resume_from_checkpoint" else None):
        return None
    try:
        there = os.path.lexists(value)
    except ValueError:
        there = False
    if name in _HUB and not there and _HUB_ID.fullmatch(value) and Path(value).suffix.lower() not in _DATA:
        return None
    if reason := path_refused(value, roots):
        return reason
    if name in OUTPUTS:
        return None
    if not there and _WILD.search(value) and name.endswith("dataset_name"):
        return _glob_refused(value, roots)
    if not there:
        return "does not exist; check the path"
    return _links_refused(Path(value), roots)


def _glob_refused(pattern: str, roots: Sequence[Path]) -> str | None:
    """Why a glob is refused; only its last part may be one, so that no look at it walks a whole disk."""
    folder, name = os.path.split(pattern)
    if _WILD.search(folder) or "**" in name:
        return "has a wildcard in a folder's name; name one folder, all data files below it are read"
    matches = list(islice(glob.iglob(pattern), MOST_FILES + 1))
    return _each_refused(matches, roots) if matches else "matches no file; check the pattern"


def _links_refused(path: Path, roots: Sequence[Path]) -> str | None:
    """Why the files of a folder are refused: one of them is a link that leads out."""
    return _each_refused(list(islice(_links(path), MOST_FILES + 1)), roots) if path.is_dir() else None


def _links(folder: Path) -> Iterator[str]:
    """Every entry below a folder: the path of a link, an empty text for anything else."""
    waiting = [str(folder)]
    while waiting:
        here = waiting.pop()
        try:
            entries = list(os.scandir(here))
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            yield entry.path if entry.is_symlink() else ""


def _each_refused(paths: Sequence[str], roots: Sequence[Path]) -> str | None:
    if len(paths) > MOST_FILES:
        return f"holds more than {MOST_FILES:,} files, which are not looked through here; name a smaller folder"
    outside = next((path for path in paths if path and not _inside(Path(path), roots)), None)
    return f"holds {shortened(outside)}, which leads out of the allowed folders; copy that file" if outside else None
