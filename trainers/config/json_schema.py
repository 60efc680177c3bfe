"""JSON Schemas that answers are compared with, by the package `jsonschema`. Imports no torch.

Nothing that a schema refers to is fetched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.objective_file import read_file
from trainers.config.strict_json import DuplicateKey, no_constant, unique_keys


def parsed_json(text: str | bytes) -> Any:
    """The value of a text that is nothing but JSON, without `NaN` and `Infinity` and with each key once in an object.

    Raises:
        ValueError: if it is none.
        RecursionError: if it is nested too deeply to be read.
    """
    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=no_constant)


def schema_test(schema: Any) -> Callable[[str], bool]:
    """A function that says whether a text is nothing but JSON that fits a schema.

    Args:
        schema: the JSON Schema. It may refer to its own parts; nothing is fetched.
    """
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY

    validator = validator_for(schema, default=Draft202012Validator)(schema, registry=REGISTRY)

    def fits(text: str) -> bool:
        try:
            return bool(validator.is_valid(parsed_json(text)))
        except (ValueError, TypeError, ArithmeticError, RecursionError):  # such as a number too large to divide
            return False

    return fits


def schema_mistakes(option: str, path: str) -> list[Mistake]:
    """Why no answer can be compared with a JSON Schema; pages show it, so it quotes no more than a reference.

    Args:
        option: the option that names the file, for messages.
        path: the file.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    correct = "correct the file"
    try:
        schema = parsed_json(read_file(option, path))
        if not isinstance(schema, dict) or not isinstance(schema.get("$schema", ""), str):
            return [Mistake(option, path, "is no object of JSON that describes an answer", correct)]
        validator_for(schema, default=Draft202012Validator).check_schema(schema)
        return _reference_mistakes(option, path, schema)
    except ConfigError as error:
        return error.mistakes
    except DuplicateKey:
        return [Mistake(option, path, "has a key twice in one object", correct)]
    except SchemaError as error:
        problem = f"is no JSON Schema: what stands at {error.json_path} does not fit {error.validator}"
        return [Mistake(option, path, problem[:300], correct)]
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        why = str(error) if isinstance(error, json.JSONDecodeError) else type(error).__name__
        return [Mistake(option, path, f"is no JSON Schema: {why}", correct)]


def _reference_mistakes(option: str, path: str, schema: dict[str, Any]) -> list[Mistake]:
    """A mistake if a schema refers to what it does not hold, or to itself without end."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from jsonschema_specifications import REGISTRY
    from referencing import Resource
    from referencing.jsonschema import DRAFT202012

    resource = Resource.from_contents(schema, default_specification=DRAFT202012)
    if (target := _dangling(resource, REGISTRY.resolver_with_root(resource))) is not None:
        problem = f"refers to {target[:80]!r}, which it does not hold, and nothing is fetched"
        return [Mistake(option, path, problem, "copy it into $defs, and refer to #/$defs/NAME")]
    try:
        validator_for(schema, default=Draft202012Validator)(schema, registry=REGISTRY).is_valid(None)
    except RecursionError:
        return [Mistake(option, path, "refers to itself without end", "correct the file")]
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
