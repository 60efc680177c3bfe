"""Files of rewards: one's own, `--reward_funcs path.py:function`, and a JSON Schema. Imports no torch.

Only the process that computes rewards runs a file of one's own (`trainers/rewards/worker.py`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable
from functools import lru_cache

from trainers.config.json_schema import schema_mistakes
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.objective_file import read_file, split_objective
from trainers.config.objectives import ANSWER, MEDIA, PROMPT_ROLES
from trainers.config.options import TrainConfig

SAMPLED_TEXTS = ("prompts", "completions")
"""What every reward can get besides columns of the data."""
_READ = {"exact_match": (ANSWER,), "math_verify": (ANSWER,), "json_schema": ()}
"""Columns that the rewards of `trainers/rewards/functions.py` read."""
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
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
                reward_parameters(name)
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
    if path is None:
        return [Mistake("reward_schema", None, "is not set, and the reward json_schema needs it", "name its file")]
    return schema_mistakes("reward_schema", path)


def columns_of_rewards(config: TrainConfig) -> dict[str, bool] | None:
    """Columns of the data that the rewards of a run read, and whether all rows may be without each.

    None if its objective does not sample.

    Raises:
        ConfigError: if a file cannot be read, or its function cannot be called.
    """
    return reward_columns(config.reward_funcs) if config.objective_spec.samples else None


def reward_columns(names: Iterable[str]) -> dict[str, bool]:
    """Columns of the data that rewards read, and whether all rows may be without each.

    Args:
        names: values of `reward_funcs`.

    Raises:
        ConfigError: if a file cannot be read, or its function cannot be called.
    """
    columns: dict[str, bool] = {}
    for name in names:
        read = reward_parameters(name) if split_objective(name) else dict.fromkeys(_READ[name], False)
        for column, optional in read.items():
            if column not in SAMPLED_TEXTS:
                columns[column] = optional and columns.get(column, True)
    return columns


def reward_parameters(name: str) -> dict[str, bool]:
    """The parameters of a reward of one's own, `path.py:function`, and whether each has a default.

    Read from the syntax tree: the file is not run. Parameters after `*` count, `*args` and `**kwargs` get nothing.

    Raises:
        ConfigError: if the file cannot be read, has no such function, or it has parameters that cannot be filled.
    """
    return dict(_parameters(name, read_file("reward_funcs", name)))


@lru_cache(maxsize=16)
def _parameters(name: str, source: bytes) -> tuple[tuple[str, bool], ...]:
    function = _function(name, source)
    parameters = function.args
    if parameters.posonlyargs:
        raise _refusal(name, "has parameters before /, and it is called with names", "remove the /")
    catch_all = parameters.kwarg and parameters.kwarg.arg
    if catch_all and _reads(function, catch_all):
        remedy = "name each column as a parameter of its own; a catch-all that it does not use may stay"
        raise _refusal(name, f"uses **{catch_all}, which gets nothing", remedy)
    first_default = len(parameters.args) - len(parameters.defaults)
    read = [(parameter.arg, number >= first_default) for number, parameter in enumerate(parameters.args)]
    read += [(parameter.arg, default is not None)
             for parameter, default in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)]  # fmt: skip
    for column, _ in read:
        if column in (*PROMPT_ROLES, *MEDIA):
            problem = f"has the parameter {column!r}, a column that row formats have"
            raise _refusal(name, problem, "rename both; the texts that the model answers are in `prompts`")
    return tuple(read)


def _reads(function: ast.AST, name: str) -> bool:
    """Whether the body of a function reads one of its names."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            return True
        own = (
            [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)] if isinstance(node, _INNER) else []
        )
        if name not in own and _reads(node, name):
            return True
    return False


def _function(name: str, source: bytes) -> ast.FunctionDef:
    """The function of a reward of one's own."""
    try:
        tree = ast.parse(source.decode())
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # ValueError: also if it is not UTF-8
        raise _refusal(name, f"is no Python: {error}", "correct the file") from None
    function = name.rpartition(":")[2]
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if function not in defined:
        listed = ", ".join(defined) or "none"
        raise _refusal(name, f"has no function {function}", f"its functions are {listed}")
    return defined[function]


def _refusal(name: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError.about("reward_funcs", name, problem, remedy)
