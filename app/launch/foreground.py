"""Runs a job in the foreground: pre-flight check, run folder, supervised launch, summary of the result."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from app.accelerate_launch import bound_argv, check_argv, check_environment, command_line, launch_environment
from app.console import clean, counted, number, report, say
from app.diagnosis.advice import Diagnosis
from app.launch.job import TrainJob, refuse_unresumable, run_attempt
from app.launch.progress import progress_display
from app.launch.restarts import run_to_end
from app.launch.supervisor import Listener
from app.launch.worker_node import join_to_end
from app.runs.machines import remedy_line, resume_line
from app.runs.runs import last_checkpoint, last_values, metrics, true_state
from trainers.config.mistakes import ConfigError
from trainers.config.parse import dump_yaml
from trainers.run.folder import END_STATES, LIVE_STATES, RunFolder, log_line, register_outside, secrets_in, write_atomic

_END_SECONDS = 10.0
"""Seconds in which a program that is interrupted has to end by itself."""
EXIT_CODES = {"done": 0, "failed": 1, "stopped": 130}


class CheckBroke(RuntimeError):
    """The pre-flight check crashed, which is not the user's mistake.

    Args:
        cause: the cause, in one line.
        output: the standard error of the check.
    """

    def __init__(self, cause: str, output: str):
        self.cause, self.output = cause, output
        super().__init__(cause)


def train(job: TrainJob, quiet: bool) -> dict[str, Any]:
    """Trains a job in the foreground.

    Args:
        job: the job.
        quiet: print only warnings and errors.

    Returns:
        The final state.

    Raises:
        ConfigError: if the pre-flight check refuses the job; a new run then leaves no folder.
        CheckBroke: if the check crashes.
    """
    say_choices(job)
    with interruptible():
        reported = preflight(job, quiet)
        return launch(job, _display(job, quiet, reported))


def say_choices(job: TrainJob) -> None:
    """Prints the notes (choices made for the user) and warnings of a job on stderr."""
    for line in [*job.notes, *(f"warning: {warning}" for warning in job.warnings)]:
        say(clean(line))


def launch(
    job: TrainJob, display: AbstractContextManager[Listener], outer: Mapping[str, str] | None = None,
    bound: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Trains a job that has passed the pre-flight check.

    Args:
        job: the job.
        display: shows the run; entered once the run folder is written.
        outer: environment to extend; default: this process's.
        bound: whether the run ends when this process is killed; otherwise it trains on, to its end.

    Returns:
        The final state.

    Raises:
        ConfigError: if another command has started the run meanwhile, or machine 0 trains with other settings.
    """
    env, config = launch_environment(job.devices, outer), job.config
    if job.devices.machine_rank:
        with display as listener:
            return join_to_end(job, env, listener)
    with held(job):
        try:
            write_folder(job)
            with display as listener:
                return run_to_end(
                    job.run, job.devices, env, listener, job.resume_from, config.max_restarts, config.share_gpus, bound
                )
        finally:
            if not job.run.state_file.exists():
                take_back(job.run)


@contextlib.contextmanager
def _display(job: TrainJob, quiet: bool, reported: Sequence[str]) -> Iterator[Listener]:
    if not quiet:
        say(f"run {job.run.id}: {job.strategy.name} on {where(job)}")
    printed = [*reported, *(f"warning: {line}" for line in job.warnings)]
    with progress_display(job.run, quiet, printed) as listener:
        yield listener


@contextlib.contextmanager
def held(job: TrainJob) -> Iterator[TextIO]:
    """Holds the job's run, and checks again whether it may start, as another command may have started it meanwhile.

    Raises:
        ConfigError: if another process holds the run, or has started it since the job was made.
    """
    run = job.run
    if job.attempt is None:
        run.create()
    try:
        lock = _hold(run)
    except OSError as error:
        raise ConfigError.about(
            "output_dir", run.path, f"cannot be written: {error.strerror}", "check its permissions"
        ) from None
    with lock:
        if job.attempt is not None:
            refuse_unresumable(run)
            if run_attempt(run) != job.attempt:
                raise ConfigError(f"run {run.id} was resumed by another command meanwhile; resume it again")
        elif job.resume_from is None:
            run.refuse_used()
        elif run.exists() and true_state(run)["state"] in LIVE_STATES:
            raise ConfigError.about(
                "output_dir", run.path, "holds a run that is still active", "stop it first, or use another"
            )
        yield lock


def _hold(run: RunFolder, timeout: float = 10.0) -> TextIO:
    """Holds the run; waits up to `timeout` seconds for the supervisor of an ended run to release it."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return run.hold()
        except ConfigError:
            if (run.read_state() or {}).get("state") not in END_STATES or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def take_back(run: RunFolder) -> None:
    """Removes the files of `write_folder`, and only those, after a start was interrupted before the run existed."""
    if run.lost():
        return
    for path in (run.config, run.accelerate, run.command, run.log, run.lock, run.record.path):
        path.unlink(missing_ok=True)
    for folder in (run.heartbeats, run.checkpoints, run.path):
        with contextlib.suppress(OSError):
            folder.rmdir()


def where(job: TrainJob) -> str:
    """The devices of a job on this machine as text, such as `GPUs 0, 2` or `2 CPU processes`."""
    ids, count, machines = job.devices.gpu_ids, job.devices.local_processes, job.devices.machines
    gpu_names = f"GPU{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}"
    devices_text = gpu_names if ids else counted(count, "CPU process", "CPU processes")
    return f"{devices_text} of machine {machines.rank} of {machines.count}" if machines else devices_text


def preflight(job: TrainJob, quiet: bool, elsewhere: bool = False) -> list[str]:
    """Runs the training script's check of data, model and batch arithmetic, without a launcher.

    Args:
        job: the job.
        quiet: whether to hide what is being done.
        elsewhere: whether other machines will train, so that what this one lacks is no mistake.

    Returns:
        The lines that it printed, unless `quiet`: what was found, which the run's own log begins with as well.

    Raises:
        ConfigError: with the mistakes that it finds.
        CheckBroke: if it crashes.
    """
    with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
        config, strategy = Path(folder) / "config.yaml", Path(folder) / "accelerate.yaml"
        config.write_text(dump_yaml(job.config), encoding="utf-8")
        strategy.write_text(job.strategy.dump(), encoding="utf-8")
        with spinner("checking data and model", quiet):
            env = {**check_environment(job.devices, strategy), "TUNESMITH_RUN_DIR": str(job.run.path.absolute())}
            if elsewhere:
                env["TUNESMITH_GPUS_ELSEWHERE"] = str(len(job.devices.gpu_ids))
            if job.resume_from:
                env["TUNESMITH_RESUME_FROM"] = job.resume_from
            out = run_checker(check_argv(config), env)
    lines = [] if quiet else [clean(line) for line in out.splitlines()]
    for line in lines:
        say(line)
    return lines


def run_checker(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> str:
    """Runs a program of `trainers` that checks a request; returns its standard output.

    Args:
        argv: the command.
        env: its complete environment.
        cwd: working directory.

    Raises:
        ConfigError: with the mistakes that it finds.
        CheckBroke: if it crashes.
    """
    status, out, errors = run_program(argv, env, cwd)
    lines = [clean(line).strip() for line in errors.splitlines() if line.strip()]
    if status == 2:
        raise refusal_in(out)
    if status != 0:
        raise CheckBroke(_broken(lines, status), errors)
    return out


def refusal_in(printed: str) -> ConfigError:
    """The error that a program with exit status 2 printed as JSON on the last line of its standard output."""
    last = printed.strip().rpartition("\n")[2]
    try:
        return ConfigError.from_json(json.loads(last)["mistakes"])
    except (ValueError, TypeError, KeyError):
        return ConfigError("the training script refused this run without giving a reason")


def _broken(lines: list[str], status: int) -> str:
    """One line for a check that crashed: its last exception, or its exit status or signal."""
    raised = [line for line in lines if re.match(r"^[\w.]*[A-Z]\w*(Error|Exception|Exit|Interrupt)\b", line)]
    why = raised[-1] if raised else f"signal {-status}" if status < 0 else f"exit status {status}"
    return f"the check of this run failed: {why[:400]}"


def run_program(
    argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, show_errors: bool = False,
    pass_fds: Sequence[int] = (),
) -> tuple[int, str, str]:  # fmt: skip
    """Runs a program to its end; on Ctrl-C, SIGTERM or SIGHUP, ends it and raises KeyboardInterrupt.

    It also ends when this process is killed (on Linux). It gets SIGTERM, and some seconds to remove what is unfinished.

    Args:
        argv: the command, beginning with the path of a program.
        env: its complete environment.
        cwd: working directory.
        show_errors: let its standard error through, and return none.
        pass_fds: file descriptors that it inherits, such as those of locks.

    Returns:
        Exit status, standard output and standard error.
    """
    with interruptible():
        program = subprocess.Popen(
            bound_argv(argv), env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=None if show_errors else subprocess.PIPE, text=True, encoding="utf-8", errors="replace",
            start_new_session=True, pass_fds=pass_fds,
        )  # fmt: skip
        try:
            out, errors = program.communicate()
        except BaseException:
            _end(program)
            raise
    return program.returncode, out, errors or ""


def _end(program: subprocess.Popen[str]) -> None:
    """Ends a program and all that it has started."""
    try:
        os.killpg(program.pid, signal.SIGTERM)
        program.communicate(timeout=_END_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        pass
    finally:  # also at a second Ctrl-C
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Makes SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, in shell background jobs too.

    Does nothing outside the main thread.
    """

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    old = {name: signal.signal(name, interrupt) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for name, handler in old.items():
            signal.signal(name, handler)


@contextlib.contextmanager
def spinner(text: str, quiet: bool) -> Iterator[None]:
    """Prints what is being done; on a terminal, with a spinner until it is done."""
    if quiet:
        yield
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
    else:
        say(text)
        yield


def write_folder(job: TrainJob) -> None:
    """Creates the run folder, or updates that of a resumed run.

    Raises:
        ConfigError: if it cannot be created, or another command has taken it meanwhile.
    """
    run = job.run
    run.create()
    run.keep()
    if job.resume_from is None:
        # Claim the folder atomically: of two concurrent starts, only one can create its config.
        try:
            with open(run.config, "x", encoding="utf-8"):
                pass
        except FileExistsError:
            run.refuse_used()
    elif run.state_file.exists():
        run.write_state(scheduler=None)  # a run that a scheduler started may be resumed here
    for file in (run.scheduler, run.ray):
        file.unlink(missing_ok=True)
    write_atomic(run.config, dump_yaml(job.config))
    write_atomic(run.accelerate, job.strategy.dump())
    write_atomic(run.command, command_line(run, job.devices) + "\n")
    if job.notes:  # the ranks read a config in which these choices are made, and cannot log them
        with open(run.log, "a", encoding="utf-8") as log:
            log.writelines(log_line("supervisor", line, secrets_in(os.environ)) for line in job.notes)
    for request in (run.stop_request, run.save_request):
        request.unlink(missing_ok=True)
    register_outside(run, job.config.runs_dir)


def result(job: TrainJob, state: Mapping[str, Any], diagnoses: Sequence[Diagnosis] = ()) -> dict[str, Any]:
    """The JSON document that `train` and `resume` print."""
    values = last_values(job.run)
    return {
        "run_dir": str(job.run.path) if job.run.exists() else None,
        "state": state["state"],
        "cause": state.get("cause"),
        "step": state.get("step"),
        "strategy": job.strategy.name,
        "world_size": job.devices.num_processes,
        "train_loss": values.get("loss"),
        "eval_loss": values.get("eval_loss"),
        "export_dir": state.get("export_dir"),
        "notes": job.notes,
        "warnings": job.warnings,
        "diagnosis": [diagnosis.as_json() for diagnosis in diagnoses],
    }


def speed(run: RunFolder) -> tuple[float | None, float | None]:
    """Seconds of training, and the median of the logged tokens per second; each None if not logged."""
    rates = [row["tokens_per_second"] for row in metrics(run) if row.get("tokens_per_second")]
    seconds = last_values(run).get("elapsed_s")
    return seconds, statistics.median(rates) if rates else None


def how_it_ended(state: Mapping[str, Any]) -> str:
    """State, step and cause in one line, without repeating a state that the cause already names."""
    name, cause = str(state["state"]), clean(str(state.get("cause") or ""))
    start = name if state.get("step") is None else f"{name} at step {state['step']}"
    return cause if cause.startswith(name) else f"{start}: {cause}" if cause else start


def print_summary(run: RunFolder, state: Mapping[str, Any], diagnoses: Sequence[Diagnosis] = ()) -> None:
    """Prints how a run ended: a success on stdout, anything else on stderr, with the command to continue.

    Args:
        run: the run.
        state: its final state.
        diagnoses: why it ended so, or trained badly.
    """
    values = last_values(run)
    measure = "reward" if "reward" in values else "loss"  # of sampled answers the loss says nothing
    train, evaluation = number(values.get(measure)), number(values.get(f"eval_{measure}"))
    measures = f"train {measure} {train}, eval {measure} {evaluation}"
    if state["state"] == "done":
        evaluated = run.evaluation.exists()  # nothing was trained
        report("done: rows evaluated" if evaluated else f"done: {state.get('step')} steps, {measures}")
        report(f"run    {run.path}")
        report(f"rows   {run.evaluation}" if evaluated else f"model  {state.get('export_dir') or run.model}")
        say_diagnoses(run, state, diagnoses)
        return
    say(how_it_ended(state))
    if run.lost():
        return
    say_diagnoses(run, state, diagnoses)
    say(f"last checkpoint: {last_checkpoint(run) or 'none'}; log: {run.log}")
    say(f"continue with: {resume_line(run, state)}")


def say_diagnoses(run: RunFolder, state: Mapping[str, Any], diagnoses: Sequence[Diagnosis]) -> None:
    """Prints each cause with what shows it, the numbered remedies, and the command that applies one."""
    for diagnosis in diagnoses:
        say(f"cause: {diagnosis.cause}")
        for entry in diagnosis.evidence:
            say(f"  {clean(entry.text)}" if entry.rank is None else f"  [rank {entry.rank}] {clean(entry.text)}")
        for change in diagnosis.remedies:
            say(f"  {change.number}. {change.text} ({change.flags})")
        if diagnosis.help:
            say(f"  {diagnosis.help}")
    if any(diagnosis.remedies for diagnosis in diagnoses):
        say(f"apply a remedy: {remedy_line(run, {**(run.read_state() or {}), 'state': state['state']}, 1)}")
