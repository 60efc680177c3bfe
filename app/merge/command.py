"""The verb `merge`: makes the plan, exports checkpoints, starts the program that merges, and publishes its result."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from app.accelerate_launch import ROOT, module_argv, module_environment
from app.console import clean, report, report_json, say
from app.eval.command import evaluate
from app.eval.plan import EVAL
from app.eval.plan import make_plan as make_eval_plan
from app.launch.actions import ExportFailed, ExportRequest, export
from app.launch.foreground import interruptible, refusal_in, run_program
from app.merge.plan import MERGE, Plan, make_plan
from trainers.config.mistakes import ConfigError
from trainers.run.manifest import sync
from trainers.run.merging import REQUEST, RESULT


class MergeFailed(RuntimeError):
    """The program that merges crashed, or its result is not the merged model; the message is one line."""


def merge_verb(argv: Sequence[str]) -> int:
    """`tunesmith merge`.

    Returns:
        The exit status: 0 if the result is written (and all models are evaluated), 1 if it failed, 130 if interrupted.

    Raises:
        ConfigError: for an invalid request, or models that cannot be merged.
    """
    args = MERGE.read(argv)
    if args is None:
        return 0
    plan, quiet, as_json = make_plan(args, argv), "quiet" in args.switches, "json" in args.switches
    if plan.evaluates and (before := EVAL.read(plan.eval_argv(result=False))) is not None:
        make_eval_plan(before)  # mistakes are told before anything is written
    try:
        facts = _merge(plan, quiet)
    except (MergeFailed, ExportFailed) as error:
        say(clean(f"the merge failed: {error}"))
        if as_json:
            report_json({"output_dir": None, "cause": str(error)})
        return 1
    document = {"output_dir": str(plan.target), "kind": plan.kind, "models": [model.label for model in plan.models],
                "weights": plan.weights, "base": str(plan.base) if plan.base else None,
                **{name: plan.options[name] for name in ("method", "density", "seed", "rank")}, **facts}  # fmt: skip
    if not quiet:
        say(clean(facts["check"]))
        _say_deviation(document)
    if not as_json:
        report(str(plan.target))
    status = 0
    if plan.evaluates:
        status, document["eval"] = evaluate(plan.eval_argv(result=True), quiet, show=not as_json)
    if as_json:
        report_json(document)
    return status


def _say_deviation(document: dict[str, Any]) -> None:
    """Says how far an adapter is from the sum that was meant, where the method approximates it."""
    deviation = document["deviation"]
    if deviation is not None and document["method"] != "cat":
        say(f"the updates of the result differ from the weighted sum by {deviation:.2g} of its norm; "
            "--method cat is exact, with a larger rank")  # fmt: skip


def _merge(plan: Plan, quiet: bool) -> dict[str, Any]:
    """Merges in a work folder beside the target, and renames the result; returns facts about it.

    Raises:
        ConfigError: if the models cannot be merged.
        ExportFailed: if a checkpoint cannot be exported.
        MergeFailed: if the program crashes.
    """
    with interruptible(), _work_folder(plan.target) as (work, lock):
        folders = []
        for number, model in enumerate(plan.models, 1):
            folder = model.folder
            if folder is None:
                assert model.run is not None
                if not quiet:
                    say(clean(f"[{number}/{len(plan.models)}] exporting {model.weights} of run {model.run.id}"))
                folder = work / f"export-{number}"
                export(model.run, ExportRequest(model.weights, output=folder, dtype="float32"), pass_fds=[lock])
            folders.append(folder)
        request = plan.request(folders)
        request.write(work / REQUEST)
        if not quiet:
            say(clean(f"merging {len(plan.models)} models by {request.method}"))
        argv = module_argv("trainers.tools.merge", [str(work)])
        status, printed, errors = run_program(argv, module_environment(), cwd=ROOT, pass_fds=[lock])
        if status == 2:
            raise refusal_in(printed)
        if status != 0:
            lines = [line for line in errors.splitlines() if line.strip()]
            raise MergeFailed(lines[-1] if lines else f"exit status {status}")
        try:
            os.replace(work / RESULT, plan.target)
        except OSError as error:
            problem = f"has got files meanwhile ({error.strerror})"
            raise ConfigError.about("output_dir", plan.target, problem, "name a new folder") from None
        sync(plan.target.parent)
        facts: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return facts


@contextlib.contextmanager
def _work_folder(target: Path) -> Iterator[tuple[Path, int]]:
    """An empty folder beside the target, and the descriptor of its lock; removed at the end.

    What a killed merge has left there is removed first.

    Raises:
        ConfigError: if another merge into this target is running. Its programs hold the lock as well, so that it counts
            as running if only this process of it was killed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.with_name(f".{target.name}.merging")
    work.mkdir(exist_ok=True)
    with open(work / "lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = os.stat(work / "lock").st_ino == os.fstat(lock.fileno()).st_ino
        except OSError:
            is_current = False  # held, or removed by the merge that has just ended
        if not is_current:
            raise ConfigError.about("output_dir", target, "is being written by another merge",
                                    "wait until it is done, or name another folder")  # fmt: skip
        try:
            for path in work.iterdir():
                if path.name != "lock":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield work, lock.fileno()
        finally:
            shutil.rmtree(work, ignore_errors=True)
