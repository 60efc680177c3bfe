"""The process that computes rewards and other functions of texts:
`python -P -m trainers.rewards.worker MEMORY_GIB SCHEMA NAME...`

Reads requests as JSON lines from standard input and writes an answer to each. What the functions print goes to standard
error. Its limits and its environment guard against accidents; it is no sandbox.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers.config.objective_file import split_objective
from trainers.config.reward_file import reward_parameters
from trainers.rewards.functions import FUNCTIONS, Reward, json_schema
from trainers.run.process_limits import expect_death


def load(name: str, schema: str) -> tuple[Reward, Collection[str]]:
    """The function of a reward and the names of its parameters; runs its file if it is one of the user's.

    Args:
        name: the reward.
        schema: path of the JSON Schema that `json_schema` compares with.

    Raises:
        ValueError: if the file has no such function.
    """
    parts = split_objective(name)
    if parts is None:
        shipped = json_schema(json.loads(Path(schema).read_bytes())) if name == "json_schema" else FUNCTIONS[name]
        return shipped, inspect.signature(shipped).parameters.keys()
    parameters = reward_parameters(name)
    spec = importlib.util.spec_from_file_location("tunesmith_reward", parts[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, parts[1], None)
    if not callable(function):
        raise ValueError(f"it has no function {parts[1]}")
    return function, parameters.keys()


def computed(function: Reward, parameters: Collection[str], request: Mapping[str, Sequence[Any]]) -> list[float]:
    """The values of a function, such as a reward, for a request.

    Args:
        function: the function.
        parameters: names of what it gets, as far as the request has it.
        request: `prompts`, the answers (`completions` for a reward) and columns of the data, equally long.

    Raises:
        ValueError: if it gives anything but a finite number for each answer.
    """
    values = list(function(**{name: values for name, values in request.items() if name in parameters}))
    count = len(request["prompts"])
    if len(values) != count:
        raise ValueError(f"it gave {len(values)} numbers for {count} answers")
    numbers = []
    for value in values:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"it gave {str(value)[:80]!r}, which is not a finite number")
        numbers.append(number)
    return numbers


def main(memory_gib: float, schema: str, names: Sequence[str]) -> None:
    """Answers requests until standard input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    expect_death()
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        limit = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    functions = dict[str, tuple[Reward, Collection[str]]]()
    for line in requests:
        answer, name = dict[str, Any](), ""
        try:
            for name in names:
                functions[name] = functions.get(name) or load(name, schema)
                answer[name] = computed(*functions[name], json.loads(line))  # a function may change what it gets
        except BaseException as error:  # whatever a function does, such as sys.exit
            answer = {"failed": name, "error": f"{type(error).__name__}: {error}"[:1000]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], sys.argv[3:])
