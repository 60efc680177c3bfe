"""Restricts which files a request may touch: every path must resolve, links included, into an allowed folder."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from app.console import shortened
from trainers.config.local_paths import INPUT_PATHS, OUTPUT_FOLDERS
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.mix import read_mix
from trainers.config.objective_file import split_objective
from trainers.config.options import EMBEDDED
from trainers.config.remote_data import has_data_suffix
from trainers.config.validation import URL
from trainers.config.yaml_file import read_yaml
from trainers.strategy.strategy import deepspeed_paths, strategy_names

STORES = ("s3", "gs", "az", "abfs", "hf")
"""Object stores that a page may copy checkpoints to; other fsspec URLs reach local files or arbitrary hosts."""
MAX_FILES = 10_000
"""Most entries of a folder to check for links that point outside."""
_HUB = {"model_name_or_path", "teacher", "dataset_name", "eval_dataset_name"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_RUN_ID = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
"""A name without a folder, which only a run can have."""
_ESCAPED = re.compile(r"%(2f|5c|2e|00)", re.IGNORECASE)
_WILDCARD = re.compile(r"[*?\[]")


def path_mistakes(values: Mapping[str, Any], roots: Sequence[Path]) -> list[Mistake]:
    """A mistake for each path option whose value is refused; ignores other options.

    Args:
        values: values by option; None, an empty text and `none` count as not set.
        roots: allowed folders.
    """
    mistakes = []
    for name in (*INPUT_PATHS, *OUTPUT_FOLDERS):
        value = str(values.get(name) or "")
        if value.lower() in ("", "none", "null"):
            continue
        if reason := _refused(name, value, roots):
            mistakes.append(Mistake(name, shortened(value), reason))
        elif name == "mix":
            mistakes += _source_mistakes(value, roots)
    rewards = values.get("reward_funcs") or ""
    listed = rewards if isinstance(rewards, list | tuple) else str(rewards).split(",")
    for name, value in (("objective", values.get("objective") or ""), *(("reward_funcs", reward) for reward in listed)):
        if split_objective(str(value).strip()):
            problem, remedy = "is a file of code, which no page runs", "start the run from a terminal: tunesmith train"
            mistakes.append(Mistake(name, shortened(str(value)), problem, remedy))
    if str(values.get("sampler_url") or "").strip().lower() not in ("", "none", "null"):
        problem = "is an address that the run sends requests to, which no page chooses"
        mistakes.append(Mistake("sampler_url", None, problem, "start the run from a terminal: tunesmith train"))
    url = str(values.get("checkpoint_url") or "")
    if url.lower() not in ("", "none", "null") and url.partition("://")[0].lower() not in STORES:
        mistakes.append(Mistake("checkpoint_url", shortened(url), "is not an object store", f"use {', '.join(STORES)}"))
    return mistakes


def _source_mistakes(mix: str, roots: Sequence[Path]) -> Iterator[Mistake]:
    """A mistake for each path in a mix file that is refused."""
    try:
        sources = read_mix(mix).sources
    except ConfigError as error:
        yield from error.mistakes
        return
    for source in sources:
        for name in ("dataset_name", "chat_template"):
            value = getattr(source, name)
            if value and (reason := _refused(name, value, roots)):
                yield Mistake("mix", shortened(mix), f": its {name}={shortened(value)} {reason}")


def strategy_mistake(name: str, roots: Sequence[Path]) -> Mistake | None:
    """Why a strategy's YAML, or a path in its DeepSpeed JSON, is refused; None when allowed or shipped."""
    if name in strategy_names():
        return None
    if reason := path_refused(name, roots):
        return Mistake("strategy", shortened(name), reason)
    try:
        inline = read_yaml(Path(name)).get("deepspeed_config")
    except ConfigError:
        return None  # reported when the strategy is loaded
    file = inline.get("deepspeed_config_file") if isinstance(inline, dict) else None
    if not file:
        return None
    source, option = f"strategy {shortened(name)}", "deepspeed_config_file"
    if reason := path_refused(str(file), roots):
        return Mistake(option, shortened(str(file)), reason, source=source)
    try:
        paths = deepspeed_paths(str(file))
    except ConfigError:
        return None  # as above
    source = f"{source}: {option}={shortened(str(file))}"
    refused = ((key, path, path_refused(path, roots)) for key, path in paths.items())
    return next((Mistake(key, shortened(path), reason, source=source) for key, path, reason in refused if reason), None)


def path_refused(value: str, roots: Sequence[Path]) -> str | None:
    """Why a path is refused, to follow its name in a message; None when it is allowed.

    Args:
        value: an untrusted path; need not exist.
        roots: allowed folders.
    """
    if URL.match(value):
        return "is a URL; download it and give the file, or give a Hub id"
    if _ESCAPED.search(value) or not value.isprintable():
        return "holds an escaped or invisible character; write the path as it is"
    path = Path(value)
    if ".." in re.split(r"[/\\]", value) or value.startswith("~"):
        return "is refused: `..` and `~` are not allowed here; write the full path"
    return None if _is_inside(path, roots) else _outside(roots)


def _outside(roots: Sequence[Path]) -> str:
    return f"is outside the allowed folders; use a path under {' or '.join(map(str, roots))}"


def _is_inside(path: Path, roots: Sequence[Path]) -> bool:
    """Whether the path is in one of the folders once links are resolved."""
    try:
        resolved = path.resolve()
        is_loop = resolved.is_symlink()  # Python 3.13 returns a loop unresolved, earlier versions raise
        return not is_loop and any(resolved.is_relative_to(root.resolve()) for root in roots)
    except (OSError, ValueError, RuntimeError):  # e.g. a name of 300 characters, or a loop of links
        return False


def _refused(name: str, value: str, roots: Sequence[Path]) -> str | None:
    if value == (EMBEDDED if name in _HUB else "auto" if name == "resume_from_checkpoint" else None):
        return None
    if name in OUTPUT_FOLDERS and URL.match(value):
        return "is a URL; give a local folder"
    try:
        exists = os.path.lexists(value)
    except ValueError:
        exists = False
    if name in _HUB and not exists and _HUB_ID.fullmatch(value) and not has_data_suffix(value):
        return None
    if name == "from_run" and _RUN_ID.fullmatch(value):
        return None
    if reason := path_refused(value, roots):
        return reason
    if name in OUTPUT_FOLDERS:
        return None
    if not exists and _WILDCARD.search(value) and name.endswith("dataset_name"):
        return _glob_refused(value, roots)
    if not exists:
        return "does not exist; check the path"
    return _links_refused(Path(value), roots)


def _glob_refused(pattern: str, roots: Sequence[Path]) -> str | None:
    """Why a glob is refused; only its last part may have wildcards, so that expanding it never walks a whole disk."""
    folder, name = os.path.split(pattern)
    if _WILDCARD.search(folder) or "**" in name:
        return "has a wildcard in a folder name; give one folder, and all data files below it are read"
    matches = list(islice(glob.iglob(pattern), MAX_FILES + 1))
    return _each_refused(matches, roots) if matches else "matches no file; check the pattern"


def _links_refused(path: Path, roots: Sequence[Path]) -> str | None:
    """Why a folder is refused: one of its files is a link that points outside the allowed folders."""
    return _each_refused(list(islice(_links(path), MAX_FILES + 1)), roots) if path.is_dir() else None


def _links(folder: Path) -> Iterator[str]:
    """Every entry below a folder: the path of a link, an empty string for anything else."""
    pending = [str(folder)]
    while pending:
        directory = pending.pop()
        try:
            entries = list(os.scandir(directory))
        except OSError:
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            yield entry.path if entry.is_symlink() else ""


def _each_refused(paths: Sequence[str], roots: Sequence[Path]) -> str | None:
    if len(paths) > MAX_FILES:
        return f"holds more than {MAX_FILES:,} files, too many to check for links; give a smaller folder"
    outside = next((path for path in paths if path and not _is_inside(Path(path), roots)), None)
    return (
        f"holds {shortened(outside)}, a link that points outside the allowed folders; copy the file instead"
        if outside
        else None
    )
