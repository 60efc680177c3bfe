"""The form to resume a run: values that differ from the run's config become the options of `tunesmith resume`.

All checks are those of the command line; `force` is its `--force`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.command_line import Args
from app.launch.job import refuse_unresumable, resume_job
from app.launch.machines import as_machine_0
from app.runs.runs import run_of_id
from app.services.allowed_paths import path_mistakes, strategy_mistake
from app.services.form import (
    REMOTE_CODE,
    Choices,
    Preview,
    by_field,
    device_args,
    from_run,
    numbers_of,
    tunesmith_program,
)
from app.services.starting_values import changed_texts
from trainers.config.fields import fields, text_of
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.options import TrainConfig
from trainers.config.parse import Request, dump_yaml
from trainers.run.folder import RunFolder


@dataclass(frozen=True)
class ResumeForm:
    """A run that can be resumed, and the initial values of its form.

    Args:
        run: the run, stopped or failed.
        texts: text of every option in its config.
        choices: its preset, strategy and devices.
    """

    run: RunFolder
    texts: dict[str, str]
    choices: Choices


def resume_form(run_id: object, runs_dir: Path) -> ResumeForm:
    """The form of a run by its id.

    Raises:
        ConfigError: for an unknown run, a run that is done or still live, or an unreadable config.
    """
    run = run_of_id(run_id, runs_dir)
    refuse_unresumable(run)
    config = Request(config=str(run.config)).resolve()
    return ResumeForm(run, _texts(config), from_run(run))


def _texts(config: TrainConfig) -> dict[str, str]:
    return {option.name: text_of(getattr(config, option.name)) for option in fields()}


def resume_preview(
    form: ResumeForm,
    form_values: Mapping[str, Any],
    strategy: str | None = None,
    gpus: Sequence[int | str] | None = None,
    num_processes: str | None = None,
    force: bool = False,
    roots: Sequence[Path] | None = None,
    remote_code: bool = False,
) -> Preview:
    """What resuming with changed settings would do, with all mistakes at once. Starts and writes nothing.

    Args:
        form: the run's form, freshly read.
        form_values: text or boolean by option, as filled in.
        strategy: name, or path of an Accelerate YAML; empty for the run's own.
        gpus: ids; not passed on if equal to those of the last attempt.
        num_processes: processes on a machine without GPUs; likewise.
        force: resume even if the remaining steps would differ.
        roots: folders that files may be in; None allows every path. Unchanged paths of the run are not checked again.
        remote_code: whether `trust_remote_code` may be turned on.
    """
    try:
        changed = changed_texts(form_values, form.texts)
    except ConfigError as error:
        return Preview(by_field(error.mistakes))
    launch = _launch(form.choices, strategy, gpus, num_processes)
    mistakes = [] if roots is None else _outside(changed, launch, roots)
    if changed.get("trust_remote_code") == "true" and not remote_code:
        mistakes.append(REMOTE_CODE)
    if mistakes:
        return Preview(by_field(mistakes))
    switches = {"force"} if force else set()
    try:
        args = Args(
            launch={**as_machine_0(form.run), **launch}, switches=switches, request=Request(options=dict(changed))
        )
        job = resume_job(form.run, args)
    except ConfigError as error:
        return Preview(by_field(error.mistakes))
    devices = ["--machine_rank", "0"] if job.devices.machines else []
    devices = device_args(job) if {"gpus", "num_processes"} & set(launch) else devices
    strategy_args = ["--strategy", launch["strategy"]] if "strategy" in launch else []
    options = [f"--{name}={text or 'none'}" for name, text in changed.items()]
    argv = [
        *tunesmith_program(),
        "resume",
        str(form.run.path),
        *strategy_args,
        *devices,
        *options,
        *["--force"] * force,
    ]
    return Preview({}, list(job.warnings), numbers_of(job), dump_yaml(job.config), shlex.join(argv), job, job.notes)


def _launch(
    before: Choices, strategy: str | None, gpus: Sequence[int | str] | None, num_processes: str | None
) -> dict[str, str]:
    """Strategy and devices, where changed; the resume keeps the others."""
    launch = {}
    if strategy and strategy != before.strategy:
        launch["strategy"] = strategy
    if gpus and [str(index) for index in gpus] != [str(index) for index in before.gpus]:
        launch["gpus"] = ",".join(map(str, gpus))
    if num_processes and num_processes.strip() != str(before.num_processes or ""):
        launch["num_processes"] = num_processes.strip()
    return launch


def _outside(changed: Mapping[str, str], launch: Mapping[str, str], roots: Sequence[Path]) -> list[Mistake]:
    mistakes = path_mistakes(changed, roots)
    outside = strategy_mistake(launch["strategy"], roots) if "strategy" in launch else None
    return [*mistakes, outside] if outside else mistakes
