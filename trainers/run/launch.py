"""How a rank determines its launcher, its strategy and its run folder. Imports no torch."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from trainers.config.local_paths import absolute_paths
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.parse import dump_yaml
from trainers.run import torchrun
from trainers.run.folder import Process, RunFolder, new_run_id, write_atomic
from trainers.strategy.strategy import Strategy, from_launcher, resolve

SUPERVISED = "TUNESMITH_SUPERVISED"
SCRIPT = "train.py"
FREE_PORT = ("--main_process_port", "0")
"""Flags of a launch on one machine; also for one process, as FSDP has a process group of it."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Launch:
    """What started this rank.

    Args:
        launcher: The process of `accelerate launch` or torchrun.
        parent: Process id of this rank's parent.
        strategy: Strategy given by the launcher's command line and Accelerate file.
        supervised: Whether Tunesmith's supervisor created the run folder and writes the first and last state.
    """

    launcher: Process
    parent: int
    strategy: Strategy
    supervised: bool


def rank_of_environment() -> int:
    """Returns the global rank that the launcher assigned to this process."""
    return int(os.environ.get("RANK", "0"))


def find_launch(accelerate_config: str | None = None) -> Launch:
    """Finds the launcher among the ancestors of this process, and what it says about the strategy.

    Args:
        accelerate_config: The strategy that the script's own options name, for torchrun; `accelerate launch` has one.

    Raises:
        ConfigError: If there is no launcher, or its strategy is invalid.
    """
    parent = os.getppid()
    end_with_launcher(True)
    for ancestor in psutil.Process().parents()[:3]:
        argv = ancestor.cmdline()
        if _is_accelerate(argv) and any(Path(word).name == SCRIPT for word in argv):
            if accelerate_config is not None:
                raise ConfigError(
                    f"{torchrun.OPTION} is for torchrun; the --config_file of `accelerate launch` decides: leave it out"
                )
            process = Process.of("launcher", pid=ancestor.pid)
            return Launch(process, parent, from_launcher(argv, SCRIPT), os.environ.get(SUPERVISED) == "1")
    if torchrun.is_torchrun(os.environ):
        strategy = torchrun.strategy_of_environment(accelerate_config, os.environ)
        torchrun.set_environment(str(accelerate_config), strategy.num_processes)
        return Launch(Process.of("launcher", pid=parent), parent, strategy, supervised=False)
    raise ConfigError(
        f"{SCRIPT} was started without a launcher; use `accelerate launch --config_file accelerate_configs/ddp.yaml "
        f"trainers/{SCRIPT} ...` or `tunesmith train`"
    )


def _is_accelerate(argv: Sequence[str]) -> bool:
    """Whether a command line is that of `accelerate launch`; `torch.distributed.launch` is torchrun's old name."""
    start = " ".join(Path(word).name for word in argv[:4])  # without folders, which may be named anything
    return "launch" in start and "torch.distributed" not in start


def check_one_root() -> None:
    """Refuses to mix a clone with an installed copy: `app`, `trainers` and `ui` must be imported from one root.

    Raises:
        ConfigError: If they are not; names both roots.
    """
    from importlib.util import find_spec

    for name in ("app", "trainers", "ui"):
        if not (ROOT / name / "__init__.py").exists():
            continue
        spec = find_spec(name)
        places = list(spec.submodule_search_locations or []) if spec else []
        roots = {Path(location).resolve().parent for location in places}
        if roots and ROOT not in roots:
            raise ConfigError(
                f"{name} comes from {roots.pop()} and trainers from {ROOT}; "
                "uninstall one of them or start from the other's folder"
            )


def open_run(config: TrainConfig, launch: Launch) -> RunFolder:
    """Opens the folder of this run; every rank derives the same one without communication.

    Raises:
        ConfigError: If the folder contains another run, which this one does not resume.
    """
    if config.output_dir is None and os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1"):
        raise ConfigError("a run on several machines needs --output_dir, a folder that all of them see")
    run_id = new_run_id(config.label, launch.launcher.started, launch.launcher.pid)
    run = RunFolder(config.output_dir or Path(config.runs_dir) / run_id)
    # Read `used` before the processes: rank 0 may write its first state between the two.
    used = run.exists()
    # Ranks on other machines leave the check to the first machine, which may have written its first state already.
    other = os.environ.get("GROUP_RANK", "0") != "0"
    launchers = [process for process in run.processes() if process.role == "launcher"]
    our_launch = launch.supervised or other or launch.launcher in launchers
    if used and not our_launch and not _resumes(config, run):
        run.refuse_used()
    if mistakes := run.mistakes_in(config):
        raise ConfigError(mistakes)
    run.create()
    return run


def _resumes(config: TrainConfig, run: RunFolder) -> bool:
    """Whether the config resumes the run in this folder."""
    source = config.resume_from_checkpoint
    return source == "auto" or (source is not None and Path(source).resolve().parent == run.checkpoints.resolve())


def end_with_launcher(on: bool) -> None:
    """Sets whether the kernel sends SIGTERM to this rank when its launcher dies (Linux only, see `man 2 prctl`).

    A rank that waits for others at startup would not notice otherwise.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM if on else 0)  # 1: PR_SET_PDEATHSIG


def hear_save_requests_later() -> None:
    """Ignores SIGUSR1, which requests a save and by default ends the process, until there is something to save."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # the supervisor blocks it for its launcher


def write_run_files(run: RunFolder, config: TrainConfig, strategy: Strategy) -> None:
    """Writes config, strategy and command of a run without a supervisor."""
    write_atomic(run.config, dump_yaml(absolute_paths(config)))
    write_atomic(run.accelerate, strategy.dump())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [f"CUDA_VISIBLE_DEVICES={visible}"] if visible is not None else []
    command = [sys.executable, "-P", "-m", "accelerate.commands.launch", "--config_file", str(run.accelerate)]
    command += [*FREE_PORT, str(ROOT / "trainers" / SCRIPT), "--config", str(run.config)]
    write_atomic(run.command, " ".join([*devices, shlex.join(command)]) + "\n")


def asked_strategy(launch: Launch, config: TrainConfig) -> Strategy:
    """Resolves the launcher's strategy with the precision and the pipeline options of the config."""
    strategy = launch.strategy
    return resolve(strategy, strategy.num_processes, config.mixed_precision, config.pp_size, config.pp_schedule)


def wait_for_rank0(seconds: float = 30.0) -> None:
    """Waits until the launcher ends this rank, so that rank 0, which hits the same error, reports it."""
    if rank_of_environment() > 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.sigtimedwait([signal.SIGTERM], seconds)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses the garbage collector for imports, which create half a million objects that stay.

    Collections would take a quarter of the imports' time. Later ones skip these objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def exit_now(status: int) -> NoReturn:
    """Runs the `atexit` handlers and ends this process.

    A regular exit first tears down thousands of modules, which takes one to four seconds.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader is gone
            stream.flush()
    os._exit(status)
