"""Files of rewards: one's own, `--reward_funcs path.py:function`, and a JSON Schema. Imports no torch.

Only the process that computes rewards runs a file of one's own (`trainers/rewards/worker.py`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.objective_file import read_file, split_objective
from trainers.config.strict_json import unique_keys

_PACKAGES = {"math_verify": "math-verify", "json_schema": "jsonschema"}
"""The package that a reward needs."""


def reward_mistakes(names: list[str], schema: str | None) -> list[Mistake]:
    """A mistake for each reward that cannot be computed here.

    Args:
        names: values of `reward_funcs`.
        schema: value of `reward_schema`.
    """
    mistakes = []
    for name in names:
        package = _PACKAGES.get(name)
        if package and importlib.util.find_spec(package.replace("-", "_")) is None:
            remedy = f"pip install {package}"
            mistakes.append(Mistake("reward_funcs", name, f"needs the package {package}", remedy))
        elif name == "json_schema":
            mistakes += _schema_mistakes(schema)
        elif split_objective(name):
            try:
                mistakes += _problem(name)
            except ConfigError as error:
                mistakes += error.mistakes
    return mistakes


def schema_version(schema: str) -> dict[str, str]:
    """Name and digest of the file of a JSON Schema, as of a package and its version.

    Raises:
        ConfigError: if the file cannot be read.
    """
    digest = hashlib.sha256(read_file("reward_schema", schema)).hexdigest()[:16]
    return {f"the reward_schema {Path(schema).name}": digest}


def _schema_mistakes(schema: str | None) -> list[Mistake]:
    """Why no answer can be compared with a JSON Schema."""
    if schema is None:
        return [Mistake("reward_schema", None, "is not set, and the reward json_schema needs it", "name its file")]
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    try:
        values = json.loads(read_file("reward_schema", schema), object_pairs_hook=unique_keys)
        validator_for(values, default=Draft202012Validator).check_schema(values)
    except ConfigError as error:
        return error.mistakes
    except (ValueError, RecursionError) as error:
        return [Mistake("reward_schema", schema, f"is no JSON: {error}", "correct the file")]
    except SchemaError as error:
        return [Mistake("reward_schema", schema, f"is no JSON Schema: {error.json_path}: {error.message}"[:300],
                        "correct the file")]  # fmt: skip
    if not isinstance(values, dict):
        return [Mistake("reward_schema", schema, f"is {json.dumps(values)[:40]}, which fits all answers or none",
                        "describe what an answer holds")]  # fmt: skip
    for target in _references(values):
        try:
            Registry().resolver_with_root(DRAFT202012.create_resource(values)).lookup(target)
        except Unresolvable:
            return [Mistake("reward_schema", schema, f"refers to {target[:80]!r}, which it does not hold, and nothing "
                            "is fetched", "copy it into $defs, and refer to #/$defs/NAME")]  # fmt: skip
    return []


def _references(schema: Any) -> Iterator[str]:
    """The targets of all references in a schema."""
    for name, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if name in ("$ref", "$dynamicRef") and isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            yield from _references(value)


def _problem(name: str) -> list[Mistake]:
    """Whether a file lacks its function, read from the syntax tree."""
    source = read_file("reward_funcs", name)
    try:
        tree = ast.parse(source.decode())
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # ValueError: also if it is not UTF-8
        return [Mistake("reward_funcs", name, f"is no Python: {error}", "correct the file")]
    function = name.rpartition(":")[2]
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if function in defined:
        return []
    listed = ", ".join(defined) or "none"
    return [Mistake("reward_funcs", name, f"has no function {function}", f"its functions are {listed}")]
