"""What can be done to a run: stop, resume, clone, rename, delete, move in the queue, export.

The command line and the pages call the same functions; each checks its run and values as if a stranger had sent them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO, get_args

from app.accelerate_launch import ROOT, module_argv, module_environment
from app.command_line import Args
from app.console import shortened
from app.launch import background
from app.launch.foreground import refusal_in, run_program
from app.launch.job import TrainJob, clone_job, resume_job, writable_parent
from app.runs.runs import true_state
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.run import device_locks
from trainers.run.folder import END_STATES, RunFolder, register, unregister, write_atomic

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Exported(NamedTuple):
    """An export: its folder, the dtype of its weights, and what came of loading it back.

    Attributes:
        loss_difference: of the export's loss and the trainer's; None where they were not compared.
        check: the line that says so.
    """

    folder: Path
    kind: str
    dtype: str
    loss_difference: float | None
    check: str


class ExportFailed(RuntimeError):
    """The export program broke; the text is one line that says how."""


def stop(run: RunFolder, save: bool = True) -> None:
    """Asks a run to stop, and returns at once; asking again, or when it has ended, does no harm.

    Args:
        run: a queued one is cancelled.
        save: a checkpoint first.
    """
    if true_state(run)["state"] not in END_STATES:
        run.ask_stop(save)


def save(run: RunFolder) -> None:
    """Asks a run to save after its current step and go on, and returns at once; nothing happens when it has ended."""
    if true_state(run)["state"] not in (*END_STATES, "queued"):
        run.ask_save()


def resume(run: RunFolder, args: Args | None = None) -> dict[str, Any]:
    """Goes on with a stopped or failed run, detached; returns its state.

    Raises:
        ConfigError: when it is done or lives, or with what is wrong with the request.
    """
    return background.start(resume_job(run, args or Args()))


def clone(run: RunFolder, args: Args | None = None) -> TrainJob:
    """A new run with the settings, strategy and devices of `run`, and with the values of `args` in their place.

    Raises:
        ConfigError: with every mistake at once.
    """
    return clone_job(run, args or Args())


def rename(run: RunFolder, new_id: str) -> RunFolder:
    """Renames the folder of a run that has ended.

    Raises:
        ConfigError: for a name that is not a plain word or is taken, or a run that lives.
    """
    quoted = repr(shortened(str(new_id)))
    if not isinstance(new_id, str) or not _ID.fullmatch(new_id):
        raise ConfigError(f"the name {quoted} is refused; use up to 100 letters, digits, dots, dashes and underscores")
    target = RunFolder(run.path.with_name(new_id))
    with _ended(run, "rename"):
        if os.path.lexists(target.path):
            raise ConfigError(f"the name {quoted} is taken in {run.path.parent}; choose another")
        try:
            os.rename(run.path, target.path)
        except OSError as error:
            raise ConfigError(f"{run.path} cannot be renamed: {error.strerror}; check its permissions") from None
        _repoint(run, target)
    return target


def _repoint(old: RunFolder, new: RunFolder) -> None:
    """Brings the files that name the folder itself up to date."""
    state = new.read_state() or {}
    exported = state.get("export_dir")
    new.write_state(id=new.id, export_dir=_moved(str(exported), old, new) if exported else None)
    with contextlib.suppress(OSError, ValueError):
        argv = shlex.split(new.command.read_text(encoding="utf-8"))
        write_atomic(new.command, shlex.join(_moved(word, old, new) for word in argv) + "\n")
    if unregister(old):
        register(new)


def _moved(word: str, old: RunFolder, new: RunFolder) -> str:
    """A path in the old folder as one in the new; any other word as it is."""
    path = Path(word)
    return str(new.path / path.relative_to(old.path)) if path.is_relative_to(old.path) else word


@contextlib.contextmanager
def _ended(run: RunFolder, verb: str) -> Iterator[TextIO]:
    """Holds a run that has ended.

    Raises:
        ConfigError: when it lives.
    """
    state = true_state(run)["state"]
    if state not in END_STATES:
        raise ConfigError(f"run {run.id} is {state}; stop it before you {verb} it")
    if run.path.is_symlink():
        raise ConfigError(f"{run.path} is a link; {verb} the folder it points to")
    with run.hold() as lock:
        yield lock


def size(run: RunFolder) -> int:
    """Bytes of all files in the run folder; links are not followed."""
    total = 0
    for folder, _, files in os.walk(run.path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def delete(run: RunFolder) -> int:
    """Deletes what an ended run wrote, its checkpoints and exports too; all other files are left.

    Returns:
        Bytes freed.

    Raises:
        ConfigError: when it lives, or something cannot be removed.
    """
    with _ended(run, "delete"):
        before = size(run)
        try:
            run.record.remove_all()
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be deleted: {error.strerror}; check its permissions") from None
        unregister(run)
        return before - (size(run) if run.path.exists() else 0)


def move(run: RunFolder, places: int) -> int:
    """Moves a queued run; negative goes to the front. Returns its new place, counted from 1.

    Raises:
        ConfigError: when it does not wait.
    """
    return device_locks.move(run.path, places)


def export(
    run: RunFolder,
    checkpoint: str | None = None,
    merged: bool = False,
    output: Path | None = None,
    dtype: str | None = None,
) -> Exported:
    """Exports a checkpoint as a folder that transformers or peft load; waits for it.

    Args:
        run: the run.
        checkpoint: name such as `step-00000120`; default: the newest.
        merged: merge the adapters into the base.
        output: a new folder; default: `export-KIND` in the run folder.
        dtype: of the weights, such as `bfloat16`; default: the run's `export_dtype`.

    Raises:
        ConfigError: for a wrong request.
        ExportFailed: when the export program broke, or the export is not the model that was trained.
    """
    known = get_args(TrainConfig.model_fields["export_dtype"].annotation)
    if dtype is not None and dtype not in known:
        raise ConfigError(f"--dtype {dtype} is not a valid value; use {', '.join(known)}")
    method = Request(config=str(run.config)).resolve().method
    if merged and method == "full":
        raise ConfigError(f"--merged: run {run.id} has method=full, so it has no adapter to merge; leave --merged out")
    kind = "full" if method == "full" else "merged" if merged else "adapter"
    target = (Path(os.path.expanduser(output)) if output else run.path / f"export-{kind}").absolute()
    if output:
        _refuse_target(target)
    args = ["--run", str(run.path), "--output", str(target), "--kind", kind]
    args += ["--checkpoint", checkpoint] if checkpoint else []
    argv = module_argv("trainers.checkpoint.export", [*args, *(["--dtype", dtype] if dtype else [])])
    status, printed, errors = run_program(argv, module_environment(), cwd=ROOT)
    lines = [line for line in errors.splitlines() if line.strip()]
    if status == 2:
        raise refusal_in(printed)
    if status != 0:
        raise ExportFailed(lines[-1] if lines else f"exit status {status}")
    facts = json.loads(printed.splitlines()[-1])
    return Exported(target, kind, facts["dtype"], facts["loss_difference"], facts["check"])


def _refuse_target(target: Path) -> None:
    """Raises ConfigError for a folder that an export would spoil, or that cannot be made."""
    try:
        used = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError:
        used = False  # the next check says why
    if used:
        raise ConfigError(f"output={target} holds other files, which an export would replace; name a new folder")
    writable_parent(target, "output", "name a folder that can be created")
