"""Objectives in a file of one's own, `--objective path.py:Name`. Imports no torch, and never the file.

What a page or a check must know of such an objective is a literal in its class, which is read from the source:

    class Margin(PairLoss):
        spec = {
            "like": "dpo", "summary": "Wants a margin between the answers.",
            "columns": ["weight"], "metrics": ["gap"],
        }

`like` names the objective whose data, reference, options and metrics it has, `columns` numeric columns of the data
that its loss gets too, and `metrics` what it reports too. Only the ranks of a run import the file
(`trainers/objectives/objective.py`).
"""

from __future__ import annotations

import ast
import hashlib
import re
import stat
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainers.config.mistakes import ConfigError
from trainers.config.objectives import (
    COLUMN_ROLES,
    MEDIA,
    MOST_NAMES,
    OBJECTIVES,
    ObjectiveSpec,
    is_free_metric,
    is_name,
)

_PATTERN = re.compile(r"(.+\.py):([A-Za-z_]\w*)")
_MOST_BYTES = 1 << 20
_LIKE = [name for name, spec in OBJECTIVES.items() if spec.loss_of == "documents" and not spec.samples]
_EXAMPLE = 'such as spec = {"like": "dpo"}'
_NAMES = {"columns": 'such as "columns": ["weight"]', "metrics": 'such as "metrics": ["gap"]'}
_KEYS = ("like", "summary", *_NAMES)


def split_objective(objective: str) -> tuple[Path, str] | None:
    """The file and the class of `path.py:Name`; None for an objective of Tunesmith's."""
    match = _PATTERN.fullmatch(objective)
    return (Path(match[1]).expanduser(), match[2]) if match else None


def short_name(objective: str) -> str:
    """The name of an objective without the path of its file, which a model card should not tell."""
    return objective.rpartition(":")[2]


def read_file(option: str, value: str) -> bytes:
    """The content of a small file: a path, or `path.py:Name`.

    Args:
        option: the option whose value it is, for messages.
        value: the value.

    Raises:
        ConfigError: if the file cannot be read.
    """
    parts = split_objective(value)
    path = parts[0] if parts else Path(value).expanduser()
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe would block
            raise ConfigError.about(option, value, "is not a regular file", "check the path")
        if about.st_size > _MOST_BYTES:
            raise ConfigError.about(
                option, value, f"has a file of more than {_MOST_BYTES:,} bytes", "use a smaller one"
            )
        return path.read_bytes()
    except OSError as error:
        raise ConfigError.about(option, value, f"cannot be read: {error.strerror or error}", "check the path") from None


def file_version(option: str, value: str) -> dict[str, str]:
    """Name and digest of the file of `path.py:Name`, as of a package and its version; empty for other values.

    Args:
        option: the option whose value it is, for messages.
        value: the value.

    Raises:
        ConfigError: if the file cannot be read.
    """
    parts = split_objective(value)
    if parts is None:
        return {}
    return {f"the {option} {parts[1]} of {parts[0].name}": hashlib.sha256(read_file(option, value)).hexdigest()[:16]}


def file_spec(objective: str) -> ObjectiveSpec:
    """What the objective `path.py:Name` needs and reports.

    Raises:
        ConfigError: if the file cannot be read, has no such class, or the class no valid `spec`.
    """
    return _spec_in(objective, read_file("objective", objective))


@lru_cache(maxsize=16)
def _spec_in(objective: str, source: bytes) -> ObjectiveSpec:
    try:
        tree = ast.parse(source.decode())
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # ValueError: also if it is not UTF-8
        raise _refusal(objective, f"is no Python: {error}", "correct the file") from None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    name = objective.rpartition(":")[2]
    if name not in classes:
        raise _refusal(objective, f"has no class {name}", f"its classes are {', '.join(classes) or 'none'}")
    values = _literal(objective, classes[name])
    if unknown := [key for key in values if key not in _KEYS]:
        raise _refusal(
            objective, f"has a spec with {_quoted(unknown[0])}, which is no key of it", f"use {', '.join(_KEYS)}"
        )
    like = values.get("like")
    if like not in _LIKE:
        raise _refusal(objective, f"has a spec with like={_quoted(like)}", f"use one of {', '.join(_LIKE)}")
    summary = values.get("summary", f"Like {like}.")
    if not isinstance(summary, str) or not summary.isprintable() or not 0 < len(summary) <= 200:
        raise _refusal(objective, "has a spec whose summary is not one line of text", "write one sentence")
    base, columns, metrics = OBJECTIVES[like], _columns(objective, values), _metrics(objective, values)
    # A class may derive from that of `like`, which needs a type.
    more: dict[str, Any] = {"loss_types": base.loss_types[:1], "variants": {}, "source": ""}
    more |= {"columns": tuple(dict.fromkeys((*base.columns, *columns))), "metrics": (*base.metrics, *metrics)}
    more |= {"optional_columns": tuple(column for column in base.optional_columns if column not in columns)}
    return replace(base, name=objective, label=name, title=name, summary=summary, **more)


def _columns(objective: str, values: dict[Any, Any]) -> list[str]:
    """The numeric columns that a spec names."""
    columns = _names(objective, values, "columns")
    for column in columns:
        if column in (*COLUMN_ROLES, *MEDIA):
            raise _refusal(objective, f"has a spec with the column {column!r}, which row formats have", "rename it")
    return columns


def _metrics(objective: str, values: dict[Any, Any]) -> tuple[str, ...]:
    """The metrics that a spec names."""
    metrics = _names(objective, values, "metrics")
    for metric in metrics:
        if not is_free_metric(metric):
            remedy = "rename it; eval_, reward_ at the start and _by_rank at the end are taken too"
            raise _refusal(
                objective, f"has a spec with the metric {metric!r}, a name that rows of metrics have", remedy
            )
    return tuple(metrics)


def _names(objective: str, values: dict[Any, Any], key: str) -> list[str]:
    """The list of names under a key of a spec."""
    names = values.get(key, [])
    if not isinstance(names, list | tuple) or len(names) > MOST_NAMES:
        raise _refusal(objective, f"has a spec whose {key} are no list of at most {MOST_NAMES} names", _NAMES[key])
    for name in names:
        if not is_name(name):
            remedy = "use letters, digits and underscores, 40 at most"
            raise _refusal(objective, f"has a spec with {_quoted(name)} among its {key}, which is no name", remedy)
    if len({*names}) < len(names):
        raise _refusal(objective, f"has a spec that names one of its {key} twice", _NAMES[key])
    return list(names)


def _literal(objective: str, node: ast.ClassDef) -> dict[Any, Any]:
    """The value of `spec` in a class."""
    assigned = [
        statement.value
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name) and target.id == "spec" and statement.value is not None
    ]
    if not assigned:
        raise _refusal(objective, f"has no spec in its class {node.name}", _EXAMPLE)
    try:
        value = ast.literal_eval(assigned[-1])
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise _refusal(
            objective, "has a spec that is no literal; it is read without running the file", _EXAMPLE
        ) from None
    if not isinstance(value, dict):
        raise _refusal(objective, "has a spec that is not a dict", _EXAMPLE)
    return value


def _quoted(value: Any) -> str:
    """A value of a spec, as far as a line of an error has room for it."""
    try:
        text = repr(value)
    except ValueError:  # of more digits than Python writes
        text = "a number"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refusal(objective: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError.about("objective", objective, problem, remedy)
