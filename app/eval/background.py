"""Starts `tunesmith eval` in the background from untrusted values, and stops it.

An evaluation outlives the server and the browser; all that is told of it comes from its folder (`app/eval/view.py`).
Files of one's own code are for the command line only.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.console import shortened
from app.eval.folder import EvaluationFolder
from app.eval.metrics import ANSWER_METRICS, LOSS_METRICS, SCHEMA_OPTION
from app.eval.plan import BASE, EVAL, Plan, make_plan, new_folder
from app.launch.background_work import start_work, stop_work
from app.runs.runs import run_of_id
from app.services.allowed_paths import path_mistakes, path_refused
from app.services.chat import Chats
from trainers.config.local_paths import INPUT_PATHS
from trainers.config.mistakes import ConfigError, Mistake, Mistakes, errors_about
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.strategy.strategy import strategy_names

METRICS = (*LOSS_METRICS, *ANSWER_METRICS)
"""The metrics that a page may choose."""
FIELDS = (
    "models", "base", "dataset_name", "max_eval_samples", "answer_tokens", "metrics", "metric_schema", "strategy",
    "gpus", "num_processes",
)  # fmt: skip
"""Names of the values of a request."""
MOST_MODELS = 32
_MAX_LENGTH = 4096
_LISTS = ("models", "metrics", "gpus")
_OF_MODELS = frozenset({"model_name_or_path", "from_run"})

Values = Mapping[str, Any]


def arguments(values: Values, runs_dir: Path) -> list[str]:
    """The arguments of `tunesmith eval` for a request, without the folder of the report; nothing is looked up.

    Args:
        values: untrusted values by the names in `FIELDS`; None and blanks count as not set.
        runs_dir: folder of runs.

    Raises:
        ConfigError: for a value that is no text, too long, or would be taken for an option.
    """
    mistakes, texts = Mistakes(), dict[str, list[str]]()
    for name in FIELDS:
        value = values.get(name)
        entries = (value or []) if name in _LISTS else [value]
        with mistakes:
            texts[name] = _texts(name, entries)
    mistakes.refuse()
    listed = {**texts, "models": [], "metrics": [",".join(texts["metrics"])], "gpus": [",".join(texts["gpus"])]}
    default = Path(str(TrainConfig.model_fields["runs_dir"].default)).absolute()
    flags = {**{name: "".join(value) for name, value in listed.items()}, "runs_dir": str(runs_dir.absolute())}
    if runs_dir.absolute() == default:
        del flags["runs_dir"]
    if flags["base"] == BASE:
        flags["base"] = ""
    chosen = [word for name, value in flags.items() if value for word in (f"--{name}", value)]
    return [*dict.fromkeys(texts["models"]), *chosen]


def _texts(name: str, entries: Any) -> list[str]:
    """The texts of a value that are not blank."""
    problem, remedy = "is not a value of this form", "reload the page"
    if not isinstance(entries, list) or len(entries) > _MAX_LENGTH:
        raise ConfigError.about(name, None, problem, remedy)
    texts = []
    for entry in entries:
        text = "" if entry is None else str(entry).strip() if isinstance(entry, str | int) else None
        if text is None or isinstance(entry, bool) or len(text) > _MAX_LENGTH or not text.isprintable():
            raise ConfigError.about(name, shortened(repr(entry)), problem, remedy)
        if text.startswith("-"):
            raise ConfigError.about(name, shortened(text), "begins with a dash, as options do", "write it without")
        if text:
            texts.append(text)
    return texts


def command(values: Values, runs_dir: Path) -> str:
    """The command that does the same in a terminal.

    Raises:
        ConfigError: as `arguments`.
    """
    return shlex.join(["tunesmith", "eval", *arguments(values, runs_dir)])


def start(
    values: Values, runs_dir: Path, roots: Sequence[Path] | None = None, remote_code: bool = False
) -> EvaluationFolder:
    """Starts an evaluation in the background.

    Args:
        values: untrusted values by the names in `FIELDS`.
        runs_dir: folder of runs.
        roots: folders that files may be in; None allows every path.
        remote_code: whether the code of models' repositories may run.

    Raises:
        ConfigError: with all mistakes at once; nothing is left then.
    """
    argv = [*arguments(values, runs_dir), *(["--trust_remote_code", "true"] if remote_code else [])]
    if roots is not None:
        _refuse(values, runs_dir, roots)
    folder = EvaluationFolder(new_folder(runs_dir, "models"))
    argv += ["--output_dir", str(folder.path)]
    args = EVAL.read(argv)
    if args is None:
        raise AssertionError("no help was requested")
    plan = make_plan(args)
    if roots is not None:
        _refuse_rows(plan, roots)
    try:
        folder.path.mkdir(parents=True)
        line = ["tunesmith", "eval", *argv[: argv.index("--output_dir")]]
        models = [candidate.label for candidate in plan.candidates]
        start_work(folder, ["eval", *argv], {"models": models, "command": line})  # it locks the folder itself
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError.about("runs_dir", runs_dir, problem, "check its permissions, and free some space") from None
    return folder


def _refuse(values: Values, runs_dir: Path, roots: Sequence[Path]) -> None:
    """Raises ConfigError for what only a command line may name: paths elsewhere, and code."""
    mistakes = Mistakes()
    models = _texts("models", values.get("models") or [])
    if not models:
        mistakes.append(Mistake("models", None, "are missing", "choose a run, or enter a model folder or a Hub id"))
    if len(models) > MOST_MODELS:
        problem, remedy = f"are more than {MOST_MODELS}", "choose fewer, or use a terminal"
        mistakes.append(Mistake("models", len(models), problem, remedy))
    base = "".join(_texts("base", [values.get("base")]))
    for option, names in (("models", models[:MOST_MODELS]), ("base", [base] if base not in ("", BASE, "none") else [])):
        for name in names:
            with mistakes:
                refuse_model(option, name, runs_dir, roots)
    for name in _texts("metrics", values.get("metrics") or []):
        if name not in METRICS:
            remedy = f"use {', '.join(METRICS)}; others from a terminal: tunesmith eval --metrics"
            mistakes.append(Mistake("metrics", shortened(name), "is not a metric of this page", remedy))
    mistakes += path_mistakes({"dataset_name": values.get("dataset_name")}, roots)
    schema = "".join(_texts(SCHEMA_OPTION, [values.get(SCHEMA_OPTION)]))
    if schema and (reason := path_refused(schema, roots)):
        mistakes.append(Mistake(SCHEMA_OPTION, shortened(schema), reason))
    strategy = "".join(_texts("strategy", [values.get("strategy")]))
    if strategy and strategy not in strategy_names():
        problem, remedy = "is no strategy that ships", "choose one of the list, or use a terminal"
        mistakes.append(Mistake("strategy", shortened(strategy), problem, remedy))
    mistakes.refuse()


def refuse_model(option: str, name: str, runs_dir: Path, roots: Sequence[Path]) -> None:
    """Refuses a model that is neither a run of the list, nor a Hub id, nor a folder in the allowed ones.

    Raises:
        ConfigError: with what it is.
    """
    run_id, at, _ = name.rpartition("@")
    with contextlib.suppress(ConfigError):
        run_of_id(run_id if at else name, runs_dir)
        if not os.path.lexists(name):  # otherwise the path comes first
            return
    if name == EMBEDDED and not os.path.lexists(name):
        return
    if "/" not in name and not os.path.lexists(name):
        remedy = "choose one of the list, or enter a model folder or a Hub id with its owner"
        raise ConfigError.about(option, shortened(name), "is not a run of this folder", remedy)
    with errors_about("model_name_or_path", option):
        Mistakes(path_mistakes({"model_name_or_path": name}, roots)).refuse()


def _refuse_rows(plan: Plan, roots: Sequence[Path]) -> None:
    """Raises ConfigError if the rows of the first run are outside the allowed folders."""
    mistakes: list[Mistake] = []
    for candidate in plan.candidates:
        of_rows = {name: candidate.options.get(name) for name in INPUT_PATHS if name not in _OF_MODELS}
        mistakes += path_mistakes({**of_rows, "cache_dir": candidate.options.get("cache_dir")}, roots)
    if mistakes:
        raise ConfigError(list({str(mistake): mistake for mistake in mistakes}.values()))


def stop(folder: EvaluationFolder) -> None:
    """Asks a running evaluation to end, and returns immediately; the models that are done are compared.

    Raises:
        ConfigError: if it is not running, or this machine cannot stop it.
    """
    if not folder.is_running():
        raise ConfigError("this evaluation is not running; it has ended")
    stop_work(folder, "evaluation", to_group=False)


def model_choices(runs_dir: Path, most: int = 500) -> list[str]:
    """Names of models to choose from: the newest runs, each as its export and its checkpoints, and `embedded`."""
    names: list[str] = []
    for row in Chats(runs_dir).choices():
        own = [f"{row['name']}@{name}" for name in row["weights"] if name != "model"]
        names += [str(row["name"]), *own] if "model" in row["weights"] else own
    return [*names[:most], EMBEDDED]
