"""The verb `eval`: makes the plan, runs it, and shows the comparison."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.command_line import Args
from app.console import clean, report, report_json, say
from app.eval.comparison import compare
from app.eval.folder import EvaluationFolder, held
from app.eval.forgetting import forgetting
from app.eval.judge import Judge, judge_models
from app.eval.judge_requests import API_KEY
from app.eval.plan import EVAL, make_plan
from app.eval.report import print_comparison
from app.eval.study import Study
from app.eval.tasks import compare_tasks
from app.launch.foreground import interruptible
from trainers.config.mistakes import ConfigError
from trainers.run.folder import write_json

_NOTHING: dict[str, Any] = {"metrics": [], "rows": [], "comparisons": [], "changed": [], "notes": []}


def eval_verb(argv: Sequence[str]) -> int:
    """`tunesmith eval`.

    Returns:
        The exit status: 0 if all models were evaluated, 1 if one failed, 130 if interrupted.

    Raises:
        ConfigError: for an invalid request; nothing was evaluated then.
    """
    args = EVAL.read(argv)
    if args is None:
        return 0
    status, document = _evaluate(args, argv, "quiet" in args.switches)
    if "json" in args.switches:
        report_json(document)
    else:
        _show(document)
    return status


def evaluate(argv: Sequence[str], quiet: bool, show: bool) -> tuple[int, dict[str, Any]]:
    """Evaluates models for another verb.

    Args:
        argv: The command line of `tunesmith eval`.
        quiet: Show only warnings while it runs.
        show: Print the comparison.

    Returns:
        The exit status and the JSON document of `tunesmith eval`.

    Raises:
        ConfigError: See `eval_verb`.
    """
    args = EVAL.read(argv)
    assert args is not None, "asks for help"
    status, document = _evaluate(args, argv, quiet)
    if show:
        _show(document)
    return status, document


def _evaluate(args: Args, argv: Sequence[str], quiet: bool) -> tuple[int, dict[str, Any]]:
    plan = make_plan(args)
    os.environ.pop(API_KEY, None)  # no process that evaluates a model needs it
    study, folder = Study(plan, quiet), EvaluationFolder(plan.folder)
    is_new, command = not plan.folder.exists(), ["tunesmith", "eval", *argv]
    with held(folder, [candidate.label for candidate in plan.candidates], command):
        try:
            study.run()
            with _to_the_end():
                document = _document(study, command)
                write_json(folder.report, document)
        except BaseException:
            if is_new and not folder.runs():
                shutil.rmtree(plan.folder, ignore_errors=True)  # nothing was evaluated
            raise
    return 130 if study.interrupted else 1 if study.failed else 0, document


@contextlib.contextmanager
def _to_the_end() -> Iterator[None]:
    """Keeps SIGTERM, as a page sends it, from losing all that was evaluated while it is compared."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    old = signal.signal(signal.SIGTERM, lambda signum, frame: None)  # unlike SIG_IGN, no child inherits it
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _show(document: dict[str, Any]) -> None:
    print_comparison(document)
    report(f"\nreport {Path(document['report_dir']) / 'report.json'}")


def _document(study: Study, command: Sequence[str]) -> dict[str, Any]:
    """The report of what was evaluated."""
    plan, first = study.plan, study.plan.candidates[0].label
    document = _compared(study) if study.rows else dict(_NOTHING)
    if plan.judge is not None and study.rows and not study.interrupted:
        _judge(plan.judge, study, document)
    if study.tasks:
        document["tasks"] = compare_tasks(study.tasks, plan.settings.seed)
        document["notes"] = [*document["notes"], *_other_first(f"tasks: {first}", first, study.tasks)]
    if plan.samples:
        document["forgetting"] = part = forgetting(plan.samples, study.samples)
        for name, models in study.samples.items():
            part["notes"] += _other_first(f"{name}: {first}", first, models)
    document |= {"failed": study.failed, "interrupted": study.interrupted, "report_dir": str(plan.folder),
                 "command": list(command)}  # fmt: skip
    document["changed"] = document.pop("changed")  # last, as it may be long: readers begin at the front
    return document


def _judge(judge: Judge, study: Study, document: dict[str, Any]) -> None:
    """Adds the judge's verdicts; whether it could be asked to the end is no matter of the models."""
    judge.server.quiet = study.quiet
    try:
        with interruptible():
            document["judge"] = judge_models(judge, study.rows, study.plan.settings.seed)
    except KeyboardInterrupt:  # its replies so far are in the cache
        study.interrupted = True
        return
    if cause := document["judge"]["failed"]:
        study.failed["judge"] = cause
        say(clean(cause))


def _compared(study: Study) -> dict[str, Any]:
    """The comparison of the models that were evaluated; without the metrics of one's own, if one of them fails."""
    settings, first = study.plan.settings, study.plan.candidates[0].label
    try:
        document = compare(study.rows, settings)
    except ConfigError as error:
        study.failed["metrics"] = str(error)
        say(clean(f"metrics: {error}"))
        shipped = [name for name in settings.metrics or () if ":" not in name]
        try:
            document = compare(study.rows, replace(settings, metrics=shipped or None))
        except ConfigError:  # there is nothing to compare
            return dict(_NOTHING)
    document["notes"] = [*_other_first(first, first, study.rows), *document["notes"]]
    return document


def _other_first(subject: str, first: str, models: Mapping[str, object]) -> list[str]:
    """A note if the first model of the plan is missing, and others are compared with the next one."""
    if not models or first in models:
        return []
    return [f"{subject} was not evaluated, so the others are compared with {next(iter(models))}"]
