"""Determines the machines of a run, and its devices on them, from command-line options and its Accelerate file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.console import shortened
from app.hardware import Devices, Gpu, choose_devices, find_gpus
from app.launch.network import is_own
from app.runs.machines import MOST_MACHINES, machine_counts
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.options import MACHINE_OPTIONS, TrainConfig
from trainers.config.parse import whole_number
from trainers.config.yaml_file import read_yaml
from trainers.run.folder import RunFolder
from trainers.strategy.strategy import Machines

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def choose_machines(options: Mapping[str, str], file: Mapping[str, Any]) -> Machines | None:
    """The machines of a run; None for a single machine.

    Args:
        options: values of `--num_machines`, `--machine_rank`, `--main_process_ip`, `--main_process_port` and
            `--min_machines`.
        file: values of the Accelerate file, used for options that are not given.

    Raises:
        ConfigError: with all mistakes.
    """
    chosen = {name: options.get(name, file.get(name)) for name in MACHINE_OPTIONS}
    extra = [name for name in (*MACHINE_OPTIONS[1:], "min_machines") if name in options]
    if chosen["num_machines"] is None and extra:
        raise ConfigError.about(
            extra[0], options[extra[0]], "without num_machines", "add --num_machines 2, or leave it out"
        )
    mistakes: list[Mistake] = []
    count = _integer("num_machines", chosen["num_machines"] or 1, 1, MOST_MACHINES, mistakes)
    if count == 1:
        idle = [
            Mistake("num_machines", "1", f"with --{name} {options[name]}", "leave it out, or name more machines")
            for name in extra
        ]
        if idle:
            raise ConfigError(idle)
        return None
    missing = [f"--{name}" for name in MACHINE_OPTIONS[1:] if chosen[name] is None]
    if missing:
        remedy = "run the same command on each machine, with its own --machine_rank, from 0"
        mistakes.append(Mistake("num_machines", chosen["num_machines"], f"also needs {', '.join(missing)}", remedy))
    ranks = (count or MOST_MACHINES) - 1
    rank = _integer("machine_rank", chosen["machine_rank"], 0, ranks, mistakes)
    port = _integer("main_process_port", chosen["main_process_port"], 1, 65535, mistakes)
    minimum = _integer("min_machines", options.get("min_machines"), 1, count or MOST_MACHINES, mistakes)
    ip = str(chosen["main_process_ip"] or "")
    if chosen["main_process_ip"] is not None and not _HOST.fullmatch(ip):
        mistakes.append(
            Mistake("main_process_ip", repr(ip), "is not an address", "write machine 0's IPv4 address or host name")
        )
    if mistakes:
        raise ConfigError(mistakes)
    return Machines(count or 0, rank or 0, ip, port or 0, minimum)


def _integer(name: str, value: Any, least: int, most: int, mistakes: list[Mistake]) -> int | None:
    if value is None:
        return None
    if (number := whole_number(str(value), least, most)) is None:
        mistakes.append(
            Mistake(name, shortened(str(value)), f"is not a whole number from {least} to {most}", "write one")
        )
    return number


def devices_here(
    options: Mapping[str, str],
    machines: Machines | None,
    strategy_processes: int | None,
    machine: Sequence[Gpu] | None = None,
) -> Devices:
    """The devices of a run: the GPUs of this machine, and the number of processes on all machines.

    Args:
        options: values of `--gpus` and `--num_processes`.
        machines: machines of the run; None for a single one.
        strategy_processes: number of processes in the file of the chosen strategy.
        machine: the GPUs to choose from; default: those of this machine.

    Raises:
        ConfigError: with all mistakes.
    """
    gpus, count = options.get("gpus"), options.get("num_processes")
    if machines is None:
        return choose_devices(gpus, count, machine, strategy_processes)
    visible = list(find_gpus() if machine is None else machine)
    if count is None and not visible:
        raise ConfigError.about(
            "num_machines", machines.count, "without GPUs needs --num_processes, the total over all machines"
        )
    local = count
    if count is not None and count.isascii() and count.isdigit() and len(count) < 9 and int(count) > 0:
        each, remainder = divmod(int(count), machines.count)
        if remainder:
            raise ConfigError.about(
                "num_processes",
                count,
                f"is not divisible by num_machines={machines.count}",
                f"it is the total over all machines, the same number on each: write {max(each, 1) * machines.count}",
            )
        local = str(each)
    try:
        chosen = choose_devices(gpus, local, visible)
    except ConfigError as error:
        raise ConfigError(error.mistakes, f"on each of {machines.count} machines") from None
    return replace(chosen, num_processes=chosen.num_processes * machines.count, machines=machines)


def as_before(run: RunFolder, devices: Mapping[str, str]) -> dict[str, str]:
    """The machines of a run as option values, without `machine_rank`; empty for a single machine.

    Its Accelerate file has the machines that train now, and its state how many it was started for.

    Args:
        run: the run.
        devices: option values of its devices; those processes are counted over the machines of the Accelerate file.

    Raises:
        ConfigError: if the Accelerate file cannot be read.
    """
    file = read_yaml(run.accelerate)
    count, minimum = machine_counts(run.read_state() or {}) or (None, None)
    now = int(file.get("num_machines") or 1)
    names = [name for name in MACHINE_OPTIONS if name != "machine_rank" and file.get(name) is not None]
    options = {name: str(file[name]) for name in names} if now > 1 else {}
    if minimum is None or count is None:
        return options
    options |= {"num_machines": str(count), "min_machines": str(minimum)}
    if "num_processes" in devices:
        options["num_processes"] = str(int(devices["num_processes"]) // now * count)
    return options


def as_machine_0(run: RunFolder) -> dict[str, str]:
    """The launch option that starts machine 0 of a run here, as no command line says so; empty for a single machine.

    Raises:
        ConfigError: if the run's `main_process_ip` is an address of another machine.
    """
    host = str(read_yaml(run.accelerate).get("main_process_ip") or "")
    if machine_counts(run.read_state() or {}) is None or not host:
        return {}
    if not is_own(host):
        problem = f"is machine 0 of run {run.id}, and this is another machine"
        remedy = (
            f"resume it there, or here with `tunesmith resume {shlex.quote(str(run.path))} --main_process_ip ADDRESS"
        )
        raise ConfigError.about("main_process_ip", host, problem, f"{remedy} --machine_rank 0`")
    return {"machine_rank": "0"}


def folder_mistakes(config: TrainConfig | None, machines: Machines | None) -> list[Mistake]:
    """A mistake if a run on several machines has no `output_dir`, which they need to find its folder."""
    if config and machines and config.output_dir is None:
        return [
            Mistake(
                "num_machines", machines.count, "needs --output_dir, a folder that all machines see at the same path"
            )
        ]
    return []
