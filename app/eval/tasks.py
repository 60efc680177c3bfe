"""Tasks of lm-evaluation-harness: run for each model in a process of its own, and compared example by example."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.accelerate_launch import launch_environment, module_argv, module_environment
from app.console import shortened
from app.eval.folder import tasks_file
from app.eval.statistics import Difference, difference, mean_of
from app.launch.foreground import run_checker
from app.launch.job import TrainJob
from trainers.config.command_line import option, switch
from trainers.config.mistakes import ConfigError
from trainers.config.parse import whole_number
from trainers.run.json_file import load_json

CHAT_TEMPLATE = "tasks_chat_template"
OPTIONS = {
    "tasks": option("tasks", "<a,b,c.yaml>", "Tasks of lm-evaluation-harness: names, or task files of your own; their "
                    "data is not downloaded.", "Tasks"),
    "tasks_limit": option("tasks_limit", "<int>", "Examples of each task at most; default: all.", "Tasks"),
    CHAT_TEMPLATE: switch(CHAT_TEMPLATE, "Ask in each model's chat template, as lm-eval's --apply_chat_template; "
                          "default: the tasks' plain prompts."),
}  # fmt: skip
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_MODULE = "trainers.tools.harness"


@dataclass(frozen=True)
class Tasks:
    """The tasks of an evaluation.

    Args:
        names: names, and absolute paths of task files.
        limit: examples of each task at most; None for all.
        in_chat_template: whether prompts are messages of a user, in each model's chat template.
    """

    names: Sequence[str]
    limit: int | None = None
    in_chat_template: bool = False

    def check(self) -> None:
        """Asks the harness whether it knows the tasks.

        Raises:
            ConfigError: if it does not.
        """
        run_checker(_argv({"tasks": self.names}), {**module_environment(), **_OFFLINE})

    def run(self, job: TrainJob) -> dict[str, Any]:
        """The results of a model, as `trainers/tools/harness.py` describes them.

        Args:
            job: the run of its evaluation, which has ended.

        Raises:
            ConfigError: if a task cannot be evaluated.
            CheckBroke: if the harness crashes.
        """
        output = tasks_file(job.run)
        request = {"tasks": self.names, "run_dir": str(job.run.path), "limit": self.limit, "output": str(output),
                   CHAT_TEMPLATE: self.in_chat_template}  # fmt: skip
        environment = module_environment(launch_environment(job.devices))
        run_checker(_argv(request), {**environment, **_OFFLINE})
        return dict(load_json(output))


def _argv(request: Mapping[str, Any]) -> list[str]:
    return module_argv(_MODULE, [json.dumps(request)])


def tasks_of(values: Mapping[str, Any]) -> Tasks | None:
    """The tasks that a command line asks for; None for none.

    Args:
        values: those of `OPTIONS` that are given.

    Raises:
        ConfigError: for a missing package or file, and a limit that is no number.
    """
    if "tasks" not in values:
        if other := next((name for name in OPTIONS if name in values), None):
            raise ConfigError.about(other, values[other], "is for tasks, and there are none", "name them with --tasks")
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError.about("tasks", None, "needs the package lm-eval", 'pip install -e ".[harness]"')
    names = []
    for name in (part.strip() for part in str(values["tasks"]).split(",")):
        path = Path(name).expanduser()
        if path.suffix in (".yaml", ".yml") and not path.is_file():
            raise ConfigError.about("tasks", shortened(name), "is not a file", "name a task file, or a task of lm-eval")
        if not name:
            raise ConfigError.about("tasks", values["tasks"], "has an empty name", "leave out the comma")
        names.append(str(path.absolute()) if path.suffix in (".yaml", ".yml") else name)
    limit = None
    if "tasks_limit" in values and (limit := whole_number(str(values["tasks_limit"]), 1, 10**9)) is None:
        raise ConfigError.about("tasks_limit", shortened(str(values["tasks_limit"])), "is not a whole number above 0",
                                "write one")  # fmt: skip
    return Tasks(list(dict.fromkeys(names)), limit, CHAT_TEMPLATE in values)


def compare_tasks(models: Mapping[str, Mapping[str, Any]], seed: int = 0) -> dict[str, Any]:
    """The part of the report about tasks.

    Args:
        models: the results of each model by its name; the first is the one that the others are compared with.
        seed: of the resamples.

    Returns:
        `version` of the harness; `rows` `[{model, task, metric, value, stderr, higher_is_better, rows}]`, with the
        harness's standard error; `comparisons` `[{a, b, task, metric, difference, low, high, p_value, significant,
        higher_is_better, rows, verdict}]` of metrics that are means over examples; the verdict is better, worse,
        differs (where the harness does not say which is better), no difference shown, or cannot be compared.
    """
    document: dict[str, Any] = {"version": None, "rows": [], "comparisons": []}
    for model, results in models.items():
        document["version"] = results["version"]
        document["rows"] += [
            {"model": model, "task": name, "metric": metric, "value": value, "stderr": task["stderrs"].get(metric),
             "higher_is_better": task["higher"].get(metric.partition(" (")[0]), "rows": task["rows"]}
            for name, task in results["tasks"].items() for metric, value in task["metrics"].items()
        ]  # fmt: skip
    first, *others = models
    for other in others:
        for name, task in models[first]["tasks"].items():
            of_other = models[other]["tasks"].get(name, {"values": {}})["values"]
            for metric, before in task["values"].items():
                if common := [number for number in before if number in of_other.get(metric, {})]:
                    after = of_other[metric]
                    result = difference(mean_of([before[at] for at in common]), mean_of([after[at] for at in common]),
                                        seed)  # fmt: skip
                    higher = task["higher"].get(metric.partition(" (")[0])
                    document["comparisons"].append({
                        "a": first, "b": other, "task": name, "metric": metric, "difference": result.value,
                        "low": result.low, "high": result.high, "p_value": result.p_value,
                        "significant": result.significant, "rows": len(common),
                        "higher_is_better": higher, "verdict": _verdict(result, higher),
                    })  # fmt: skip
    return document


def _verdict(result: Difference, higher_is_better: bool | None) -> str:
    if result.value is None:
        return "cannot be compared"
    if not result.significant:
        return "no difference shown"
    if higher_is_better is None:
        return "differs"
    return "better" if (result.value > 0) == higher_is_better else "worse"
