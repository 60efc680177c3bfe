"""Rewards in a file of one's own, `--reward_funcs path.py:function`. Imports no torch, and never the file.

Only the process that computes rewards runs the file (`trainers/rewards/worker.py`).
"""

from __future__ import annotations

import ast
import importlib.util

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.objective_file import read_file, split_objective


def reward_mistakes(names: list[str]) -> list[Mistake]:
    """A mistake for each reward that cannot be computed here.

    Args:
        names: values of `reward_funcs`.
    """
    mistakes = []
    for name in names:
        if name == "math_verify" and importlib.util.find_spec("math_verify") is None:
            remedy = "pip install math-verify"
            mistakes.append(Mistake("reward_funcs", name, "needs the package math-verify", remedy))
        if split_objective(name):
            try:
                mistakes += _problem(name)
            except ConfigError as error:
                mistakes += error.mistakes
    return mistakes


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
