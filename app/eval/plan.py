"""Plans what `tunesmith eval` evaluates: each model on the same rows, as a run that trains nothing.

A run stands for what it exported: that is what others will use.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from app.command_line import Args, Verb
from app.console import shortened
from app.eval.comparison import Settings
from app.eval.folder import PREFIX
from app.eval.forgetting import Sample, samples_of
from app.eval.judge import OPTIONS as JUDGE_OPTIONS
from app.eval.judge import WIN, Judge, judge_of
from app.eval.metrics import LOSS_METRICS
from app.eval.tasks import OPTIONS as TASK_OPTIONS
from app.eval.tasks import Tasks, tasks_of
from app.launch.job import TrainJob, train_job
from app.runs.runs import config_values
from app.services.model_names import named_model
from trainers.config.command_line import option, switch
from trainers.config.fields import sections
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.objectives import LABELLED, OBJECTIVES
from trainers.config.options import TrainConfig
from trainers.config.parse import Request, whole_number
from trainers.run.folder import RunFolder, new_run_id
from trainers.run.from_run import ADAPTER_CONFIG
from trainers.run.lineage import read_export

ANSWER_TOKENS = 256
BASE = "base"
"""Label of the model that the first run started from."""
_MOST = 100_000
_FROZEN = {"method": "lora", "lora_r": 1}
_LAUNCH = frozenset({"strategy", "gpus", "num_processes"})
_HOW = frozenset({
    "mixed_precision", "max_length", "overlong", "packing", "attn_implementation", "per_device_eval_batch_size", "seed",
    "assistant_only_loss", "thoughts", "template_date",
})  # fmt: skip
"""Options of the first run with which all models are evaluated, on other rows too."""
_NOT_OF_BASE = frozenset({"preset", "from_run", "trust_remote_code", "attn_implementation"})
"""Options of a model that its base does not have too. Code of a repository runs only if the command line says so."""
_OF_TRAINING = frozenset({"dataset_streaming", "streaming_window", "streaming_cache", "max_train_samples"})
_SET_BY_EVAL = frozenset({
    "model_name_or_path", "from_run", "method", "eval_only", "eval_answer_tokens", "objective", "preset",
    "resume_from_checkpoint",
})  # fmt: skip
_CHOSEN = _HOW | {
    "dataset_name", "dataset_config_name", "dataset_query", "dataset_format", "eval_split", "max_eval_samples",
    "columns", "sample_by", "bad_rows", "chat_template", "trust_remote_code", "runs_dir", "cache_dir",
    "output_dir",
}  # fmt: skip
"""The options of `train` that an evaluation takes."""
_NOT_OF_SAMPLES = frozenset(sections()["data"]) - _HOW - {"bad_rows", "cache_dir", "chat_template", "dataset_num_proc"}
"""Options that say what the rows of an evaluation are; samples for forgetting are other rows."""
EVAL = Verb(
    "eval",
    "Compare models on the same rows: loss, answers and what they score, with intervals and a paired test. The first "
    "run's base comes first unless --base says otherwise, and each other model is compared with the first one. "
    "Exit status: 0 all were evaluated, 1 one failed, 130 interrupted, 2 invalid request.",
    ("models", "Runs, RUN@WEIGHTS (a checkpoint such as step-00000100, or an export), model folders, or Hub ids."),
    own={
        "base": option("base", "<model>", "Model to compare with; default: what the first run started from; none: the "
                       "first model."),
        "metrics": option("metrics", "<a,b,c>", "Names, or path.py:function for your own; default: those that fit the "
                          "rows. docs/evaluation.md lists them."),
        "metric_schema": option("metric_schema", "<file>", "JSON Schema that answers are to fit (metric json_schema)."),
        "answer_tokens": option("answer_tokens", "<int>", "Longest answer, in tokens; 0: losses alone. Default: "
                                f"{ANSWER_TOKENS}."),
        "forgetting": switch("forgetting", "Also measure the loss on general text that ships with Tunesmith: what each "
                             "model has forgotten."),
        "forgetting_dataset": option("forgetting_dataset", "<dataset>", "Also measure it on rows of your own."),
        "output_dir": option("output_dir", "<dir>", "Folder of the report; default: runs_dir/eval-ID."),
        "changed": option("changed", "<int>", "How many of the answers that changed most to show; default: 5."),
        **JUDGE_OPTIONS,
        **TASK_OPTIONS,
    },
    launch=tuple(sorted(_LAUNCH)),
    hidden={*TrainConfig.model_fields, "config"} - _CHOSEN,
)  # fmt: skip


@dataclass
class Candidate:
    """A model to evaluate.

    Args:
        label: its name in the report; no two are the same.
        options: options of the run that evaluates it, but for those that say what to load from a checkpoint.
        devices: where to run.
        checkpoint: the run and the checkpoint to export first; None if its weights can be loaded as they are.
        samples: by the name of each sample for forgetting, the options of its run that are others.
    """

    label: str
    options: Mapping[str, Any]
    devices: Mapping[str, str]
    checkpoint: tuple[RunFolder, str] | None = None
    samples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def job(self, exported: Path | None = None, sample: str | None = None) -> TrainJob:
        """The run that evaluates it.

        Args:
            exported: folder of the exported checkpoint.
            sample: name of the sample for forgetting; None for the rows of the evaluation.

        Raises:
            ConfigError: if it cannot be evaluated.
        """
        weights = {} if exported is None else options_of_folder(exported)
        return self._job(weights if sample is None else {**weights, **self.samples[sample]}, sample)

    def check(self) -> None:
        """Checks the run before anything starts: of a checkpoint, with the model that it was trained from.

        Raises:
            ConfigError: if it cannot be evaluated.
        """
        weights = {}
        if self.checkpoint is not None:
            weights = {"model_name_or_path": config_values(self.checkpoint[0]).get("model_name_or_path"), **_FROZEN}
        self._job(weights)

    def _job(self, changes: Mapping[str, Any], sample: str | None = None) -> TrainJob:
        options = {name: value for name, value in self.options.items() if not (sample and name in _NOT_OF_SAMPLES)}
        return train_job(Args([], dict(self.devices), request=Request(options={**options, **changes})))


@dataclass
class Plan:
    """Everything that `eval` will do.

    Args:
        folder: folder of the report and of all runs; not created yet.
        candidates: the models, the one that others are compared with first.
        settings: what is computed of their rows.
        samples: texts on which forgetting is measured.
        judge: judges the answers; None for no judge.
        tasks: of lm-evaluation-harness; None for none.
    """

    folder: Path
    candidates: list[Candidate]
    settings: Settings
    samples: Sequence[Sample] = ()
    judge: Judge | None = None
    tasks: Tasks | None = None


@dataclass(frozen=True)
class _Model:
    """A model as the user named it.

    Args:
        label: how it is called.
        options: those that say what to load; none for a checkpoint.
        run: the run that it comes from.
        checkpoint: name of a checkpoint that is to be exported first.
    """

    label: str
    options: Mapping[str, Any]
    run: RunFolder | None = None
    checkpoint: str | None = None


def make_plan(args: Args) -> Plan:
    """Makes the plan of a command line.

    Raises:
        ConfigError: with all mistakes at once.
    """
    mistakes, chosen = Mistakes([*args.request.mistakes, *_unread(args)]), dict(args.request.options)
    runs_dir = Path(str(chosen.get("runs_dir", TrainConfig.model_fields["runs_dir"].default))).expanduser()
    if not args.names:
        mistakes.append(Mistake("", None, "there is no model to evaluate", "name a run, a model folder or a Hub id"))
    models: list[_Model] = []
    for name in dict.fromkeys(args.names):
        with mistakes:
            models.append(_model(name, runs_dir))
    with mistakes:
        tokens = _whole_number(args.own, "answer_tokens", ANSWER_TOKENS)
    settings = Settings()
    with mistakes:
        settings = _settings(args.own)
        settings.check()
        _refuse_without_answers(settings, args.own)
    judge = tasks = None
    with mistakes:
        judge = judge_of(args.own)
    with mistakes:
        tasks = tasks_of(args.own)
    mistakes.refuse()
    every = [*models, *_base(str(args.own.get("base", BASE)), models, runs_dir)]
    first = next((model.run for model in every if model.run), None)  # the base's rows only if no other is a run
    models = _distinct([*every[len(models) :], *models])
    shared = {**_rows(first, chosen), "objective": "sft", "eval_only": True, "eval_answer_tokens": tokens}
    if judge is not None and judge.metric == WIN and len(models) < 2:
        raise ConfigError.about("judge_url", None, "has two answers compared, and there is a single model",
                                "name another one, or a --judge_prompt with {answer}")  # fmt: skip
    output = chosen.pop("output_dir", None)
    folder = Path(str(output)).expanduser().absolute() if output else new_folder(runs_dir, f"{len(models)}-models")
    samples = samples_of(args.own)
    plan = Plan(folder, [], settings, samples, judge, tasks)
    labels: set[str] = set()
    for model in models:
        others = (f"{model.label} {number}" for number in count(2))
        label = next(name for name in chain([model.label], others) if name not in labels)
        labels.add(label)
        folder = plan.folder / f"{len(labels)}-{_file_name(label)}"
        options = {**shared, **model.options, **chosen, "output_dir": str(folder)}
        checkpoint = (model.run, model.checkpoint) if model.run and model.checkpoint else None
        of_samples = {sample.name: sample.options(folder) for sample in samples}
        candidate = Candidate(label, options, args.launch, checkpoint, of_samples)
        plan.candidates.append(candidate)
        with mistakes:
            candidate.check()
    mistakes.refuse()
    return plan


def _unread(args: Args) -> list[Mistake]:
    """A mistake for each option or switch that an evaluation sets itself or does not read."""
    chosen, unread = args.request.options, ("has no part in an evaluation", "leave it out")
    return [
        *(Mistake(name, shortened(str(chosen[name])), "is set by eval", "name the models, and --dataset_name")
          for name in sorted(_SET_BY_EVAL & chosen.keys())),
        *(Mistake(name, None, *unread) for name in sorted(chosen.keys() - _CHOSEN - _SET_BY_EVAL)),
        *([Mistake("config", None, *unread)] if args.request.config else []),
        *(Mistake(name, args.launch[name], *unread) for name in sorted(args.launch.keys() - _LAUNCH)),
        *(Mistake(f"--{name}", None, *unread) for name in sorted(args.switches - {"json", "quiet"})),
    ]  # fmt: skip


def _refuse_without_answers(settings: Settings, values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a metric or a judge of answers if there are none."""
    if str(values.get("answer_tokens")) != "0":
        return
    problem, remedy = "with --answer_tokens 0: no answer is generated", "leave it out"
    of_answers = [name for name in settings.metrics or () if name not in LOSS_METRICS]
    if of_answers:
        raise ConfigError.about("metrics", of_answers[0], problem, remedy)
    if "judge_url" in values:
        raise ConfigError.about("judge_url", None, problem, remedy)


def _distinct(models: list[_Model]) -> list[_Model]:
    """The models without those that are listed before."""
    different: dict[str, _Model] = {}
    for model in models:
        checkpoint = (model.run.path, model.checkpoint) if model.run and model.checkpoint else None
        different.setdefault(repr((sorted(model.options.items()), checkpoint)), model)
    return list(different.values())


def options_of_folder(folder: Path) -> dict[str, Any]:
    """The options that load a model folder, with as little beside it as can be trained.

    Full weights get adapters of rank 1 that add nothing, so that the weights are frozen in the dtype of the computation
    and no optimizer states take memory.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        return {"from_run": str(folder), "method": read_export(folder)[0].get("method", "lora")}
    return {"model_name_or_path": str(folder), **_FROZEN}


def _model(text: str, runs_dir: Path) -> _Model:
    """A model as named on the command line."""
    model = named_model(text, runs_dir)
    if model.folder is not None:
        return _Model(model.label, options_of_folder(model.folder), model.run)
    if model.run is None:
        return _Model(model.label, {"model_name_or_path": model.label, **_FROZEN})
    return _Model(model.label, {}, model.run, model.weights)


def _base(name: str, models: list[_Model], runs_dir: Path) -> list[_Model]:
    """The model to compare with; what a run started from has the run's options of a model, and its chat template."""
    first = next((model.run for model in models if model.run), None)
    if name == "none" or (name == BASE and first is None):
        return []
    if name != BASE:
        return [_model(name, runs_dir)]
    assert first is not None
    values = config_values(first)
    if values.get("random_init"):
        return []
    names = {"chat_template", *sections()["model"]} - _NOT_OF_BASE
    settings = {name: values[name] for name in names & values.keys()}
    frozen = _FROZEN | ({"method": "qlora"} if values.get("method") == "qlora" else {})
    if (start := values.get("from_run")) is None:
        return [_Model(BASE, {**settings, **frozen})]
    weights = options_of_folder(Path(str(start)))
    if "from_run" in weights:  # its adapter decides what the model is
        return [_Model(BASE, {"chat_template": values.get("chat_template"), **weights})]
    return [_Model(BASE, {**settings, **weights, **frozen})]


def _rows(run: RunFolder | None, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say which rows are evaluated, and how: those of a run, unless other rows are named.

    Raises:
        ConfigError: if there are none.
    """
    values = config_values(run) if run else {}
    of_data = {name for name in sections()["data"] if name not in _OF_TRAINING}
    if values.get("mixed_precision") == "fp8":
        values = {**values, "mixed_precision": "bf16"}  # only trained layers compute in fp8, and none is here
    if rows := chosen.get("dataset_name"):
        settings = {name: values[name] for name in _HOW & values.keys()}
        return {**settings, "eval_dataset_name": rows, "report_to": ""}
    if run is None:
        raise ConfigError.about("dataset_name", None, "is missing: no run says which rows to evaluate", "name the rows")
    if not (values.get("eval_dataset_name") or values.get("eval_share") or values.get("mix")):
        problem = f"is missing: run {run.id} has no evaluation data"
        raise ConfigError.about("dataset_name", None, problem, "name the rows, such as --dataset_name test.jsonl")
    settings = {name: values[name] for name in (_HOW | of_data) & values.keys()}
    is_labelled = OBJECTIVES[values["objective"]].labelled if values.get("objective") in OBJECTIVES else False
    if is_labelled and settings.get("dataset_format", "auto") == "auto":
        settings["dataset_format"] = LABELLED  # an undesirable answer is nothing to compare with
    return {**settings, "report_to": ""}


def _settings(values: Mapping[str, Any]) -> Settings:
    """What is computed, as the command line says."""
    metrics = [name.strip() for name in str(values["metrics"]).split(",")] if "metrics" in values else None
    schema = str(Path(str(values["metric_schema"])).expanduser().absolute()) if "metric_schema" in values else None
    return Settings(metrics, schema, _whole_number(values, "changed", 5))


def _whole_number(values: Mapping[str, Any], name: str, default: int) -> int:
    value = str(values.get(name, default))
    if (number := whole_number(value, 0, _MOST)) is None:
        raise ConfigError.about(f"--{name}", repr(shortened(value)), "is not a whole number", f"write 0 to {_MOST:,}")
    return number


def new_folder(runs_dir: Path, label: str) -> Path:
    """A folder for a new evaluation; not created."""
    ids = (new_run_id(label, time.time(), number) for number in count(os.getpid()))
    return next(path for run_id in ids if not (path := runs_dir.absolute() / f"{PREFIX}{run_id}").exists())


def _file_name(label: str) -> str:
    return re.sub(r"[^\w.-]+", "-", label).strip(".-") or "model"
