"""The form that goes on with a run: what differs from the run's config becomes the options of `tunesmith resume`.

Every guard is that of the command line; `force` is its `--force`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.launch.job import Words, refuse_unresumable, resume_job
from app.runs.runs import run_of_id
from app.services.allowed_paths import path_mistakes, strategy_mistake
from app.services.fields import fields, text_of
from app.services.form import Choices, Preview, by_field, device_words, from_run, numbers_of, own_program
from app.services.starting_values import changed_texts
from trainers.config.options import ConfigError, TrainConfig
from trainers.config.parse import Request, dump_yaml
from trainers.run.folder import RunFolder


@dataclass(frozen=True)
class ResumeForm:
    """A run that can go on, and what its form starts from.

    Args:
        run: the run, stopped or failed.
        texts: text of every option, as in its config.
        choices: its preset, strategy and devices.
    """

    run: RunFolder
    texts: dict[str, str]
    choices: Choices


def resume_form(run_id: object, runs_dir: Path) -> ResumeForm:
    """The form of a run by its id.

    Raises:
        ConfigError: for an unknown run, one that is done or lives, or one whose config cannot be read.
    """
    run = run_of_id(run_id, runs_dir)
    refuse_unresumable(run)
    config = Request(config=str(run.config)).resolve()
    return ResumeForm(run, _texts(config), from_run(run))


def _texts(config: TrainConfig) -> dict[str, str]:
    return {one.name: text_of(getattr(config, one.name)) for one in fields()}


def resume_preview(
    form: ResumeForm,
    shown: Mapping[str, Any],
    strategy: str | None = None,
    gpus: Sequence[int | str] | None = None,
    num_processes: str | None = None,
    force: bool = False,
    roots: Sequence[Path] | None = None,
    remote_code: bool = False,
) -> Preview:
    """What going on with changed settings would do, with every mistake at once. Starts and writes nothing.

    Args:
        form: the run's form, read anew.
        shown: text or boolean by option, as the form is filled.
        strategy: name, or path of an Accelerate YAML; empty for the run's own.
        gpus: ids; those of the last attempt are left to the resume.
        num_processes: processes on a machine without GPUs; likewise.
        force: go on although the steps to come are others.
        roots: folders in which files may lie; None allows every path. What the run has already is not asked again.
        remote_code: whether `trust_remote_code` may be turned on.
    """
    try:
        changed = changed_texts(shown, form.texts)
    except ConfigError as error:
        return Preview(by_field(error.mistakes))
    launch = _launch(form.choices, strategy, gpus, num_processes)
    refused = [] if roots is None else _outside(changed, launch, roots)
    if changed.get("trust_remote_code") == "true" and not remote_code:
        refused.append("trust_remote_code=true is refused here; only `tunesmith ui --trust_remote_code` allows it")
    if refused:
        return Preview(by_field(refused, strategy or ""))
    options = [f"--{name}={text}" for name, text in changed.items()]
    switches = {"force"} if force else set()
    try:
        job = resume_job(form.run, Words(values=launch, options=options, switches=switches))
    except ConfigError as error:
        return Preview(by_field(error.mistakes, strategy or ""))
    devices = device_words(job) if {"gpus", "num_processes"} & set(launch) else []
    named = ["--strategy", launch["strategy"]] if "strategy" in launch else []
    argv = [*own_program(), "resume", str(form.run.path), *named, *devices, *options, *["--force"] * force]
    return Preview({}, list(job.warnings), numbers_of(job), dump_yaml(job.config), shlex.join(argv), job, job.notes)


def _launch(
    before: Choices, strategy: str | None, gpus: Sequence[int | str] | None, num_processes: str | None
) -> dict[str, str]:
    """Strategy and devices where they are others than before; the resume keeps the rest as it was."""
    launch = {}
    if strategy and strategy != before.strategy:
        launch["strategy"] = strategy
    if gpus and [str(index) for index in gpus] != [str(index) for index in before.gpus]:
        launch["gpus"] = ",".join(map(str, gpus))
    if num_processes and num_processes.strip() != str(before.num_processes or ""):
        launch["num_processes"] = num_processes.strip()
    return launch


def _outside(changed: Mapping[str, str], launch: Mapping[str, str], roots: Sequence[Path]) -> list[str]:
    lines = [*path_mistakes(changed, roots).values()]
    line = strategy_mistake(launch["strategy"], roots) if "strategy" in launch else None
    return [*lines, line] if line else lines
