"""Files of rewards: one's own, `--reward_funcs path.py:function`, and a JSON Schema. Imports no torch.

Only the process that computes rewards runs a file of one's own (`trainers/rewards/worker.py`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from typing import Any

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.objective_file import read_file, split_objective
from trainers.config.strict_json import DuplicateKey, no_constant, unique_keys

_PACKAGES = {"math_verify": "math-verify", "json_schema": "jsonschema>=4.23"}
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
        if package and importlib.util.find_spec(name if name == "math_verify" else "referencing") is None:
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
    """Digest of the file of a JSON Schema, as of a package and its version.

    Raises:
        ConfigError: if the file cannot be read.
    """
    digest = hashlib.sha256(read_file("reward_schema", schema)).hexdigest()[:16]
    return {"the reward_schema": digest}  # without the file's name, which may change


def _schema_mistakes(path: str | None) -> list[Mistake]:
    """Why no answer can be compared with a JSON Schema; pages show it, so it quotes no more than a reference."""
    if path is None:
        return [Mistake("reward_schema", None, "is not set, and the reward json_schema needs it", "name its file")]
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    correct = "correct the file"
    try:
        schema = json.loads(read_file("reward_schema", path), object_pairs_hook=unique_keys, parse_constant=no_constant)
        if not isinstance(schema, dict) or not isinstance(schema.get("$schema", ""), str):
            return [Mistake("reward_schema", path, "is no object of JSON that describes an answer", correct)]
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
        return _reference_mistakes(path, schema)
    except ConfigError as error:
        return error.mistakes
    except DuplicateKey:
        return [Mistake("reward_schema", path, "has a key twice in one object", correct)]
    except SchemaError as error:
        problem = f"is no JSON Schema: what stands at {error.json_path} does not fit {error.validator}"
        return [Mistake("reward_schema", path, problem[:300], correct)]
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        why = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        return [Mistake("reward_schema", path, f"is no JSON Schema: {why}", correct)]


def _reference_mistakes(path: str, schema: dict[str, Any]) -> list[Mistake]:
    """A mistake if a schema refers to what it does not hold, or to itself without end."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.jsonschema import DRAFT202012

    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    if (target := _dangling(resource, REGISTRY.resolver_with_root(resource))) is not None:
        problem = f"refers to {target[:80]!r}, which it does not hold, and nothing is fetched"
        return [Mistake("reward_schema", path, problem, "copy it into $defs, and refer to #/$defs/NAME")]
    try:
        validator_for(schema, default=Draft202012Validator)(schema, registry=REGISTRY).is_valid(None)
    except RecursionError:
        return [Mistake("reward_schema", path, "refers to itself without end", "correct the file")]
    return []


def _dangling(resource: Any, resolver: Any) -> str | None:
    """The first reference of a schema that leads nowhere; None without."""
    from referencing.exceptions import Unresolvable

    for name in ("$ref", "$dynamicRef"):
        target = resource.contents.get(name) if isinstance(resource.contents, dict) else None
        try:
            if isinstance(target, str):
                resolver.lookup(target)
        except Unresolvable:
            return target
    inside = (_dangling(part, resolver.in_subresource(part)) for part in resource.subresources())
    return next((target for target in inside if target is not None), None)


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
