"""Tasks of lm-evaluation-harness on a model that this project loads. Run by `app/eval/tasks.py`, one model at a time.

The harness gets the loaded model, so that adapters, precision and tokenizer are those of the other evaluations. Neither
code of a model's or a data set's repository runs, nor is anything downloaded. A task file of the user may name Python
functions beside it, which run.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.config.parse import Request
from trainers.run.folder import RunFolder, write_json
from trainers.run.from_run import resolve_request

OPTION, CHAT_TEMPLATE = "tasks", "tasks_chat_template"


def main(argument: str) -> int:
    """Evaluates tasks, or only checks their names without a `run_dir`.

    Args:
        argument: JSON with `tasks`, and `run_dir` of the model's evaluation, `limit` of examples (null for all),
            `output`, the file for the results, and `tasks_chat_template`, whether prompts are a user's messages.

    Returns:
        The exit status: 2 for mistakes, which are printed as JSON.
    """
    request = json.loads(argument)
    try:
        manager = task_manager(request["tasks"])
        if request.get("run_dir"):
            write_json(Path(request["output"]), evaluate(request, manager))
    except ConfigError as error:
        print(json.dumps({"mistakes": error.as_json()}), flush=True)
        return 2
    return 0


def task_manager(tasks: list[str]) -> Any:
    """The harness's task manager, if it knows all of the tasks, or they are files.

    Raises:
        ConfigError: for a name that it does not know.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=not all(Path(task).is_absolute() for task in tasks))
    for task in tasks:
        if not Path(task).is_absolute() and task not in manager.all_tasks:
            raise ConfigError.about(OPTION, task, "is no task of lm-eval", "list them with `lm_eval ls tasks`")
    return manager


def evaluate(request: Mapping[str, Any], manager: Any) -> dict[str, Any]:
    """Results of the tasks, `{version, tasks: {name: {rows, higher, metrics, stderrs, values}}}`.

    `metrics` and `stderrs` are by the name of the metric, and of its filter where that is not `none`; `values` are
    those of each example by its number, where the metric is their mean. What is not finite is null.

    Raises:
        ConfigError: if a task or its data cannot be read.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, batch_size = _loaded(Path(request["run_dir"]))
    in_chat_template = bool(request.get(CHAT_TEMPLATE))
    if in_chat_template and not tokenizer.chat_template:
        raise ConfigError.about(CHAT_TEMPLATE, None, "needs a chat template, and this model has none",
                                "leave it out, or name one with --chat_template")  # fmt: skip
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:
        results = lm_eval.simple_evaluate(
            harness, tasks=list(request["tasks"]), limit=request.get("limit"), task_manager=manager,
            bootstrap_iters=1000, confirm_run_unsafe_code=False, apply_chat_template=in_chat_template,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, ConnectionError, AttributeError) as error:
        problem = f"could not be evaluated: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        remedy = "see that its data is there (nothing is downloaded here) and that it needs no code of its own"
        raise ConfigError.about(OPTION, ",".join(request["tasks"]), problem, remedy) from error
    names = results["results"].keys() & results["samples"].keys()
    tasks = {name: _task(results, name) for name in results["results"] if name in names}
    return {"version": lm_eval.__version__, "tasks": tasks}


def _loaded(run_dir: Path) -> tuple[Any, Any, int]:
    """Model, tokenizer and batch size of a run of `eval_only`."""
    from trainers.tools.chat import Models, read_models

    config = resolve_request(Request(config=str(RunFolder(run_dir).config)))
    config = config.model_copy(update={"gradient_checkpointing": False, "merge_adapter": False})
    reading = read_models(config, {"adapter": config.from_run} if config.from_run else {})
    while True:
        try:
            next(reading)
        except StopIteration as stopped:
            models = Models(config, *stopped.value)
            model = models.base if models.tuned is None else models.tuned
            return model, models.tokenizer, config.per_device_eval_batch_size


def _task(results: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The results of a task."""
    task: dict[str, Any] = {
        "rows": results["n-samples"][name]["effective"], "higher": results["higher_is_better"].get(name, {}),
        "metrics": {}, "stderrs": {}, "values": {},
    }  # fmt: skip
    for key, value in results["results"][name].items():
        metric, _, filtered = key.partition(",")
        if not filtered or not _is_number(value):
            continue
        label = metric.replace("_stderr", "") + ("" if filtered == "none" else f" ({filtered})")
        finite = float(value) if math.isfinite(value) else None
        task["stderrs" if metric.endswith("_stderr") else "metrics"][label] = finite
        if finite is None or metric.endswith("_stderr"):
            continue
        samples = [entry for entry in results["samples"][name] if entry.get("filter", "none") == filtered]
        if samples and all(_is_number(entry.get(metric)) for entry in samples):
            values = {str(entry["doc_id"]): float(entry[metric]) for entry in samples}
            # Of `perplexity`, for one, examples have the log-likelihood: what is not averaged is not compared.
            if math.isclose(sum(values.values()) / len(values), finite, rel_tol=1e-6, abs_tol=1e-9):
                task["values"][label] = values
    return task


def _is_number(value: Any) -> bool:
    return isinstance(value, Real | np.number | np.bool_)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
