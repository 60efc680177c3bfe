"""Actions on a run: stop, save, resume, clone, rename, delete, move in the queue, export.

Shared by the command line and the pages. Each action checks the run and its arguments as untrusted input.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO, get_args

from app.accelerate_launch import ROOT, module_argv, module_environment
from app.command_line import Args
from app.console import shortened
from app.launch import background
from app.launch.foreground import refusal_in, run_program
from app.launch.job import TrainJob, clone_job, resume_job, writable_parent
from app.launch.machines import as_machine_0
from app.launch.schedulers import SCHEDULERS
from app.runs.exports import EXPORTS
from app.runs.proofs import PROOFS
from app.runs.runs import config_values, list_runs, run_of_id, true_state
from app.runs.scheduled import cancel_waiting, submission
from app.runs.state import queue
from trainers.config.gguf_types import gguf_request
from trainers.config.mistakes import ConfigError
from trainers.config.optimizer_options import SCHEDULE_FREE
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.run import device_locks
from trainers.run.folder import (
    END_STATES,
    RunFolder,
    export_name,
    read_json,
    register,
    unregister,
    write_atomic,
    write_json,
)
from trainers.run.record import RECORD

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class ExportRequest:
    """What to export of a run, and where to; see `check_export`.

    Args:
        checkpoint: name of the checkpoint, such as `step-00000120`; default: the newest.
        merged: whether to merge the adapters into the base model.
        output: a new folder; default: `export-KIND` in the run folder.
        dtype: dtype of the weights, such as `bfloat16`; default: the run's `export_dtype`.
        averaged: whether to export the moving average of the weights.
        gguf: types of GGUF files to write beside it, with commas between them.
        llama_cpp: folder of the source of llama.cpp, whose converter writes them.
        replace: whether to replace what the run exported to its own folder before.
    """

    checkpoint: str | None = None
    merged: bool = False
    output: Path | None = None
    dtype: str | None = None
    averaged: bool = False
    gguf: str | None = None
    llama_cpp: Path | None = None
    replace: bool = False


class Exported(NamedTuple):
    """A finished export.

    Attributes:
        folder: the export's folder.
        kind: `full`, `adapter` or `merged`.
        dtype: dtype of the weights.
        loss_difference: difference between the loss of the reloaded export and the trainer's; None if not compared.
        check: a line about this comparison.
        gguf: the GGUF files: `name`, `type`, `loss`, `difference` from the trainer's, and a line of `text` about each.
    """

    folder: Path
    kind: str
    dtype: str
    loss_difference: float | None
    check: str
    gguf: list[dict[str, Any]]


class ExportFailed(RuntimeError):
    """The export program crashed; the message is one line that says how."""


def stop(run: RunFolder, save: bool = True) -> None:
    """Asks a run to stop, and returns immediately; does nothing if it has ended.

    Args:
        run: the run; a queued one is cancelled.
        save: whether to save a checkpoint first.
    """
    if true_state(run)["state"] not in END_STATES and not cancel_waiting(run):
        run.ask_stop(save)


def save(run: RunFolder) -> None:
    """Asks a run to save after its current step and continue, and returns immediately.

    Does nothing if the run is queued or has ended.
    """
    if true_state(run)["state"] not in (*END_STATES, "queued"):
        run.ask_save()


def resume(run: RunFolder, args: Args | None = None) -> dict[str, Any]:
    """Resumes a stopped or failed run in the background, or by the scheduler that started it; returns its state.

    Raises:
        ConfigError: if the run is done or still live, or with the mistakes in the request.
    """
    if submitted := submission(run):
        scheduler = SCHEDULERS[submitted["kind"]]
        return scheduler.start(*scheduler.job(args or Args(), run), True)
    args = args or Args()
    args.launch = {**as_machine_0(run), **args.launch}
    return background.start(resume_job(run, args))


def clone(run: RunFolder, args: Args | None = None) -> TrainJob:
    """The job of a new run with the settings, strategy and devices of `run`; values in `args` override them.

    Raises:
        ConfigError: with all mistakes at once.
    """
    return clone_job(run, args or Args())


def rename(run: RunFolder, new_id: str) -> RunFolder:
    """Renames the folder of a run that has ended.

    Raises:
        ConfigError: if the name is taken or has other than the allowed characters, or the run is still live.
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
    """Updates the files that contain the path or the id of the run."""
    state = new.read_state() or {}
    exported = state.get("export_dir")
    new.write_state(id=new.id, export_dir=_moved(str(exported), old, new) if exported else None)
    with contextlib.suppress(OSError, ValueError):
        argv = shlex.split(new.command.read_text(encoding="utf-8"))
        write_atomic(new.command, shlex.join(_moved(word, old, new) for word in argv) + "\n")
    if (tracked := read_json(new.trackers)) and tracked.get("run") == old.id:
        with contextlib.suppress(OSError):
            write_json(new.trackers, {**tracked, "run": new.id})
    if unregister(old):
        register(new)


def _moved(word: str, old: RunFolder, new: RunFolder) -> str:
    """A path inside the old folder, moved to the new one; any other argument unchanged."""
    path = Path(word)
    return str(new.path / path.relative_to(old.path)) if path.is_relative_to(old.path) else word


@contextlib.contextmanager
def _ended(run: RunFolder, verb: str) -> Iterator[TextIO]:
    """Holds a run that has ended.

    Args:
        run: the run.
        verb: the action, for error messages, such as `delete`.

    Raises:
        ConfigError: if the run is still live, being proved or exported, another one that is not done starts from its
            result, or its folder is a link or has no record of what the run wrote.
    """
    state = true_state(run)["state"]
    if state not in END_STATES:
        raise ConfigError(f"run {run.id} is {state}; stop it before you {verb} it")
    if run.path.is_symlink():
        raise ConfigError(f"{run.path} is a link; {verb} the folder it points to")
    if not run.record.exists():
        raise ConfigError(f"{run.path} has no {RECORD}, so which files the run wrote is unknown; {verb} it by hand")
    for other, verb_of_other in _second_stages(run):
        other_state = true_state(other)["state"]
        problem = f"run {other.id} {verb_of_other} from run {run.id}, and is {other_state}"
        raise ConfigError(f"{problem}; finish or delete it first")
    with contextlib.ExitStack() as stack:
        lock = stack.enter_context(run.hold())
        if run.checkpoints.is_dir():
            stack.enter_context(run.record.exported_alone())
        for work in (PROOFS, EXPORTS):
            if work.of(run):
                stack.enter_context(work.lock(run))
        yield lock


def _second_stages(run: RunFolder) -> Iterator[tuple[RunFolder, str]]:
    """Runs that could not be resumed without this one, and whether each `starts` or `learns` from its result."""
    for other in list_runs(run.path.parent):
        values = config_values(other)
        for option, verb in (("from_run", "starts"), ("teacher", "learns")):
            source = values.get(option)
            is_ours = isinstance(source, str) and Path(source).is_relative_to(run.path)
            if is_ours and true_state(other)["state"] != "done":
                yield other, verb


def size(run: RunFolder) -> int:
    """Size of all files in the run folder in bytes; links are not followed."""
    total = 0
    for folder, _, files in os.walk(run.path):
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def delete(run: RunFolder) -> int:
    """Deletes all files that an ended run wrote, including checkpoints and exports; other files are kept.

    Returns:
        Bytes freed.

    Raises:
        ConfigError: if the run is still live, or a file cannot be removed.
    """
    with _ended(run, "delete"):
        before = size(run)
        try:
            run.record.remove_all()
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be deleted: {error.strerror}; check its permissions") from None
        unregister(run)
        return before - (size(run) if run.path.exists() else 0)


def move(
    run: RunFolder,
    places: int = 0,
    *,
    to: int | None = None,
    before: RunFolder | None = None,
    after: RunFolder | None = None,
) -> int:
    """Moves a queued run; returns its new place, counted from 1.

    Args:
        run: the run.
        places: places to move towards the end; negative: towards the front.
        to: in place of `places`: its new place, from 1.
        before: in place of `places`: the queued run to be right in front of.
        after: in place of `places`: the queued run to be right behind.

    Raises:
        ConfigError: if a run is not queued, or the queue cannot be written.
    """
    try:
        return device_locks.move(
            run.path, places, to=to, before=before.path if before else None, after=after.path if after else None
        )
    except OSError as error:
        raise ConfigError(f"run {run.id} was not moved: {error.strerror}; make room in the state folder") from None


def move_beside(query: Any, runs_dir: Path) -> dict[str, Any]:
    """Moves a queued run next to another one.

    Args:
        query: untrusted input: `run`, an id, and `before` or `after`, the `run_dir` of another run in the queue.
        runs_dir: folder of run folders.

    Returns:
        Its new `place`, from 1, and the number of queued runs, `of`.

    Raises:
        ConfigError: if a run is not queued; nothing has moved then.
    """
    side = next((name for name in ("before", "after") if isinstance(query, dict) and query.get(name)), None)
    if side is None:
        raise ConfigError("no run was named to move in front of or behind; reload the page")
    rows = queue(runs_dir)
    other = next((row for row in rows if row["run_dir"] == query[side]), None)
    run = run_of_id(query.get("run"), runs_dir)
    if other is None:
        raise ConfigError("the other run is no longer in the queue; look at the new order, and move it again")
    neighbour = RunFolder(Path(other["run_dir"]))
    position = move(run, before=neighbour) if side == "before" else move(run, after=neighbour)
    return {"place": position, "of": len(rows)}


def keeps_average(run: RunFolder) -> bool:
    """Whether a run keeps a moving average of its weights.

    Raises:
        ConfigError: if its options cannot be read.
    """
    return Request(config=str(run.config)).resolve().ema_decay is not None


def has_adapter(run: RunFolder) -> bool:
    """Whether a run trains an adapter, not all weights.

    Raises:
        ConfigError: if its options cannot be read.
    """
    return Request(config=str(run.config)).resolve().method != "full"


def export(run: RunFolder, wanted: ExportRequest, pass_fds: Sequence[int] = ()) -> Exported:
    """Exports a checkpoint to a folder that transformers or peft can load, and waits until it is done.

    Args:
        run: the run.
        wanted: what to export, and where to.
        pass_fds: file descriptors that the export program inherits, such as those of locks.

    Raises:
        ConfigError: for an invalid request.
        ExportFailed: if the export program crashes, or the export does not match the trained model.
    """
    target, kind, args = check_export(run, wanted)
    argv = module_argv("trainers.checkpoint.export", args)
    status, printed, errors = run_program(argv, module_environment(), cwd=ROOT, pass_fds=pass_fds)
    lines = [line for line in errors.splitlines() if line.strip()]
    if status == 2:
        raise refusal_in(printed)
    if status != 0:
        raise ExportFailed(lines[-1] if lines else f"exit status {status}")
    facts = json.loads(printed.splitlines()[-1])
    return Exported(target, kind, facts["dtype"], facts["loss_difference"], facts["check"], facts["gguf"])


def check_export(run: RunFolder, wanted: ExportRequest) -> tuple[Path, str, list[str]]:
    """Checks a request, before anything runs.

    Returns:
        The folder to write, the kind (`full`, `adapter` or `merged`), and the arguments of the export program.

    Raises:
        ConfigError: for an invalid request.
    """
    output, dtype, merged, averaged = wanted.output, wanted.dtype, wanted.merged, wanted.averaged
    known = get_args(TrainConfig.model_fields["export_dtype"].annotation)
    if dtype is not None and dtype not in known:
        raise ConfigError(f"--dtype {dtype} is not a valid value; use {', '.join(known)}")
    config = Request(config=str(run.config)).resolve()
    method = config.method
    if averaged and config.optim == SCHEDULE_FREE:
        raise ConfigError(f"--ema: run {run.id} exports an average of its weights already; leave --ema out")
    if averaged and config.ema_decay is None:
        raise ConfigError(f"--ema: run {run.id} keeps no moving average of its weights; train with ema_decay=0.999")
    if merged and method == "full":
        raise ConfigError(f"--merged: run {run.id} has method=full, so it has no adapter to merge; leave --merged out")
    kind = "full" if method == "full" else "merged" if merged else "adapter"
    if kind == "adapter" and config.init_lora_weights == "pissa" and dtype not in (None, "float32"):
        problem = "would round away the difference from the base, with init_lora_weights=pissa"
        raise ConfigError.about("--dtype", dtype, problem, "leave it out, or export it --merged")
    request = gguf_request(wanted.gguf, wanted.llama_cpp)
    if request and kind == "adapter":
        problem = f"needs full weights, and run {run.id} trained an adapter"
        raise ConfigError.about("--gguf", wanted.gguf, problem, "add --merged, which merges it into the base model")
    target = (Path(os.path.expanduser(output)) if output else run.path / export_name(kind, averaged)).absolute()
    if output and wanted.replace:
        problem, remedy = "is for the run's own folder", "leave out --output, or --replace"
        raise ConfigError.about("--replace", None, problem, remedy)
    if output:
        refuse_target(target, "output")
    args = ["--run", str(run.path), "--output", str(target), "--kind", kind]
    args += [*(["--checkpoint", wanted.checkpoint] if wanted.checkpoint else []), *(["--ema"] if averaged else [])]
    args += [*(["--replace"] if wanted.replace else []), *(["--dtype", dtype] if dtype else [])]
    args += ["--gguf", ",".join(request.types), "--llama_cpp", str(request.llama_cpp)] if request else []
    return target, kind, args


def refuse_target(target: Path, option: str) -> None:
    """Raises ConfigError for a folder to write, of an option, that already has files, or that cannot be created."""
    try:
        used = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError:
        used = False  # the next check says why
    if used:
        raise ConfigError(f"{option}={target} holds other files, which an export would replace; name a new folder")
    writable_parent(target, option, "name a folder that can be created")
