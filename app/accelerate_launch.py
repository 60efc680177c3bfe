"""Builds every command that Tunesmith runs, as a list of arguments: no command goes through a shell."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.hardware import Devices, cpu_count
from trainers.run.folder import RunFolder
from trainers.run.import_path import child_environment
from trainers.run.launch import FREE_PORT
from trainers.strategy.strategy import Machines

ROOT = Path(__file__).resolve().parent.parent
TRAIN_SCRIPT = ROOT / "trainers" / "train.py"
_BOUND = ROOT / "app" / "launch" / "bound_program.py"
_GPUS = "CUDA_VISIBLE_DEVICES"
# NVML and `--gpus` number GPUs in PCI order, whereas CUDA by default starts with the fastest.
_ORDER = "CUDA_DEVICE_ORDER"
COMPACT_HEAP = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""For runs on a CPU: glibc's heap without its cache of small objects per thread.

Without it, the peak of a rank was 18 to 38 % lower under FSDP and context parallelism, and 1 to 6 % under others (24M
model, glibc 2.36); why is not proven. CPU time, losses and gradient norms did not differ on one process, measured with
`mxfast=0` as well; the speed of several ranks was not compared.
"""


def launch_argv(
    run: RunFolder,
    num_processes: int,
    resume_from: str | None = None,
    machines: Machines | None = None,
    timeout: float = 0,
) -> list[str]:
    """The `accelerate launch` command that trains into the folder of `run`.

    Args:
        run: a run folder with `config.yaml` and `accelerate.yaml`.
        num_processes: number of ranks on all machines.
        resume_from: `auto` for the newest good checkpoint of `run`, or the path of a checkpoint.
        machines: machines of the run; None for a single one.
        timeout: seconds that all machines have to join.
    """
    argv = [*_new_run_argv(run, num_processes, machines), "--output_dir", str(run.path)]
    if machines:
        script = argv.index(str(TRAIN_SCRIPT))
        argv[script:script] = ["--rdzv_conf", f"timeout={timeout:.0f}"]
    return [*argv, "--resume_from_checkpoint", resume_from] if resume_from else argv


def _new_run_argv(run: RunFolder, num_processes: int, machines: Machines | None) -> list[str]:
    if machines:
        network = ["--num_machines", str(machines.count), "--machine_rank", str(machines.rank)]
        network += ["--main_process_ip", machines.ip, "--main_process_port", str(machines.port)]
    else:
        network = [*FREE_PORT]
    launcher = [sys.executable, "-P", "-m", "accelerate.commands.launch", "--config_file", str(run.accelerate)]
    return [*launcher, "--num_processes", str(num_processes), *network, str(TRAIN_SCRIPT), "--config", str(run.config)]


def bound_argv(argv: Sequence[str]) -> list[str]:
    """The command of a program that the kernel ends when this process dies, killed or not (Linux only).

    Args:
        argv: its own command, beginning with the path of a program.
    """
    return [sys.executable, "-IS", str(_BOUND), str(os.getpid()), *argv]


def command_line(run: RunFolder, devices: Devices) -> str:
    """The line of `command.txt`: pasted into a terminal, it starts a new run with the same resolved config."""
    gpus = _device_variables(devices)
    variables = [f"{name}={value}" for name, value in gpus.items()]
    return " ".join([*variables, shlex.join(_new_run_argv(run, devices.num_processes, devices.machines))])


def by_hand_line(strategy_file: Path, devices: Devices, options: Sequence[str]) -> str:
    """The `accelerate launch` command, quoted for a shell, that starts a new run from any folder.

    Args:
        strategy_file: absolute path of an Accelerate YAML.
        devices: GPUs and processes.
        options: arguments for the training script, such as `--preset NAME`.
    """
    script = Path(sys.executable).with_name("accelerate")
    program = [str(script)] if script.exists() else [sys.executable, "-P", "-m", "accelerate.commands.accelerate_cli"]
    launcher = [*program, "launch", "--config_file", str(strategy_file), "--num_processes", str(devices.num_processes)]
    variables = [f"{name}={value}" for name, value in _device_variables(devices).items()]
    return " ".join([*variables, shlex.join([*launcher, *FREE_PORT, str(TRAIN_SCRIPT), *options])])


def read_command_line(line: str) -> tuple[list[int], list[str]]:
    """Parses a line written by `command_line` into GPU ids, empty on CPU, and arguments."""
    try:
        argv = shlex.split(line)
    except ValueError:
        return [], []
    variables: dict[str, str] = {}
    while argv and argv[0].partition("=")[0] in (_GPUS, _ORDER):
        name, _, value = argv.pop(0).partition("=")
        variables[name] = value
    ids = [int(word) for word in variables.get(_GPUS, "").split(",") if word.isascii() and word.isdigit()]
    return ids, argv


def _device_variables(devices: Devices) -> dict[str, str]:
    if not devices.gpu_ids:
        return {}
    return {_GPUS: ",".join(map(str, devices.gpu_ids)), _ORDER: "PCI_BUS_ID"}


def launch_environment(devices: Devices, outer: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a supervised launch.

    Args:
        devices: devices of the run.
        outer: environment to extend; default: this process's.
    """
    outer = os.environ if outer is None else outer
    threads = max(1, cpu_count() // devices.local_processes)
    # Unbuffered output, so that the last lines of a killed rank reach the log.
    fixed = {**_device_variables(devices), "TUNESMITH_SUPERVISED": "1", "PYTHONUNBUFFERED": "1"}
    heap = {} if devices.gpu_ids else COMPACT_HEAP
    return {"OMP_NUM_THREADS": str(threads), **heap, **child_environment(outer), **fixed}


def check_argv(config: Path) -> list[str]:
    """The command that checks a config (data, model, batch arithmetic) with the training script, without a launcher."""
    return [sys.executable, str(TRAIN_SCRIPT), "--check", "--config", str(config)]


def check_environment(devices: Devices, strategy: Path, outer: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of `check_argv` for a run.

    Args:
        devices: devices of the run.
        strategy: its Accelerate YAML.
        outer: environment to extend; default: this process's.
    """
    outer = os.environ if outer is None else outer
    return {**child_environment(outer), **_device_variables(devices), "TUNESMITH_STRATEGY": str(strategy)}


def module_argv(module: str, arguments: Sequence[str]) -> list[str]:
    """The command of a module such as `trainers.checkpoint.export`; needs `cwd=ROOT` and `module_environment()`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment(outer: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment in which `trainers` is imported from beside this package, in a clone as in an installed wheel."""
    return child_environment(os.environ if outer is None else outer, str(ROOT))
