"""Reads Accelerate configs, checks them strictly and resolves one for the processes at hand. Imports no torch.

Accelerate ignores much in silence (unknown nested keys, process counts on a CPU); here all of it is refused.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from trainers.config import ConfigError, unknown_option
from trainers.options import read_yaml

HEADER = "# strategy: "  # begins the copy of an Accelerate file that a run keeps
STRATEGIES_DIR = Path(__file__).resolve().parent.parent / "accelerate_configs"

# Accelerate 1.15, ClusterConfig: the keys that this project understands, with the types it accepts.
_KEYS: dict[str, tuple[type, ...]] = {
    "compute_environment": (str,),
    "distributed_type": (str,),
    "num_processes": (int,),
    "num_machines": (int,),
    "machine_rank": (int,),
    "main_process_ip": (str,),
    "main_process_port": (int,),
    "main_training_function": (str,),
    "mixed_precision": (str,),
    "use_cpu": (bool,),
    "debug": (bool,),
    "downcast_bf16": (str, bool),
    "gpu_ids": (str,),
    "rdzv_backend": (str,),
    "same_network": (bool,),
    "enable_cpu_affinity": (bool,),
    "tpu_env": (list,),
    "tpu_use_cluster": (bool,),
    "tpu_use_sudo": (bool,),
}
_FLAGS_ONLY = ("max_restarts", "monitor_interval", "rdzv_conf")
_TYPES = {"NO": "no wrapper", "MULTI_GPU": "DistributedDataParallel"}


@dataclass(frozen=True)
class Strategy:
    """A checked Accelerate config.

    Args:
        name: the file's stem.
        summary: first comment line of the file.
        values: the keys that Accelerate reads.
    """

    name: str
    summary: str
    values: dict[str, Any]

    @property
    def distributed_type(self) -> str:
        """`NO` or `MULTI_GPU`, as Accelerate spells it."""
        return str(self.values["distributed_type"])

    @property
    def num_processes(self) -> int:
        """Processes over all machines."""
        return int(self.values["num_processes"])

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different rows of a global batch."""
        return self.num_processes

    @property
    def wrapped_class(self) -> str | None:
        """Class that must wrap the model, None for none."""
        return None if self.distributed_type == "NO" else _TYPES[self.distributed_type]

    def dump(self) -> str:
        """The YAML that Accelerate gets, the strategy's name in its first line."""
        name = "".join(letter for letter in self.name if letter.isprintable())
        return f"{HEADER}{name}\n{yaml.safe_dump(self.values, sort_keys=False)}"


def strategy_names() -> list[str]:
    """Names of the strategies that ship, the one without parallelism first."""
    return sorted((path.stem for path in STRATEGIES_DIR.glob("*.yaml")), key=lambda name: (name != "single", name))


def default_strategy(num_processes: int) -> str:
    """`single` for one process, else `ddp`."""
    return "single" if num_processes == 1 else "ddp"


def load_strategy(name_or_path: str) -> Strategy:
    """A strategy by its name or the path of an Accelerate YAML, checked.

    Raises:
        ConfigError: with every mistake in it.
    """
    path = STRATEGIES_DIR / f"{name_or_path}.yaml"
    if name_or_path not in strategy_names():
        path = Path(name_or_path).expanduser()
        if path.suffix not in (".yaml", ".yml"):
            way = unknown_option(name_or_path, strategy_names()).partition("; ")[2]
            listed = f"use one of {', '.join(strategy_names())}, or the path of an Accelerate YAML"
            raise ConfigError(f"unknown strategy {name_or_path!r}; {way if way.startswith('did') else listed}")
    values = read_yaml(path)
    mistakes = check(values)
    if mistakes:
        raise ConfigError([f"{path.name}: {mistake}" for mistake in mistakes])
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    if first.startswith(HEADER):
        name = first.removeprefix(HEADER).strip()
        return Strategy(name, f"{name}, from the run in {path.parent}", values)
    summary = first.lstrip("# ").strip() if first.startswith("#") else f"{values['distributed_type']} from {path.name}"
    return Strategy(path.stem, summary, values)


def check(values: dict[str, Any]) -> list[str]:
    """Every mistake in an Accelerate config, a line each."""
    mistakes = []
    for key, value in values.items():
        if key in _FLAGS_ONLY:
            mistakes.append(f"{key} is a flag of `accelerate launch` and no key of its YAML; pass --{key} {value}")
        elif key not in _KEYS:
            mistakes.append(f"{key}: " + unknown_option(key, list(_KEYS)).replace("option", "Accelerate key"))
        elif value is not None and not _has_type(value, _KEYS[key]):
            wanted = " or ".join(kind.__name__ for kind in _KEYS[key])
            mistakes.append(f"{key}={value!r} is a {type(value).__name__}; write a {wanted}")
    return mistakes or _check_values(values)


def _has_type(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)


def _check_values(values: dict[str, Any]) -> list[str]:
    kind, processes = values.get("distributed_type"), values.get("num_processes")
    machines = values.get("num_machines") or 1
    rules = {
        "distributed_type is missing; write 'NO' or MULTI_GPU": kind is None,
        "distributed_type=MULTI_CPU starts one process without mpirun; write MULTI_GPU, which runs on gloo here": (
            kind == "MULTI_CPU"
        ),
        f"distributed_type={kind} is not supported; use {' or '.join(_TYPES)}": (
            kind not in (None, "MULTI_CPU", *_TYPES)
        ),
        "num_processes is missing; write how many processes the run has": processes is None,
        f"num_processes={processes} must be at least 1": processes is not None and processes < 1,
        f"distributed_type='NO' is one process, num_processes={processes}; write MULTI_GPU or num_processes: 1": (
            kind == "NO" and (processes or 1) > 1
        ),
        f"distributed_type=MULTI_GPU with num_processes={processes}; write 'NO', or at least 2 processes": (
            kind == "MULTI_GPU" and processes == 1
        ),
        f"num_processes={processes} does not divide by num_machines={machines}; use as many on each machine": (
            bool(processes) and (machines < 1 or (processes or 1) % max(machines, 1) != 0)
        ),
        f"compute_environment={values.get('compute_environment')} is not supported; write LOCAL_MACHINE": (
            values.get("compute_environment") not in (None, "LOCAL_MACHINE")
        ),
        f"mixed_precision={values.get('mixed_precision')} is no precision; use no, fp16 or bf16": (
            values.get("mixed_precision") not in (None, "no", "fp16", "bf16")
        ),
        "tpu_use_cluster=true is not supported; remove it": bool(values.get("tpu_use_cluster")),
    }
    return [line for line, applies in rules.items() if applies]


def resolve(strategy: Strategy, num_processes: int, mixed_precision: str) -> Strategy:
    """The strategy for these processes: counts set, device choice left to CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: when the strategy cannot have that many, or its precision is not the one asked for.
    """
    values = {key: value for key, value in strategy.values.items() if key not in ("gpu_ids", "mixed_precision")}
    values["num_processes"] = num_processes
    mistakes = [f"strategy {strategy.name}: {mistake}" for mistake in check(values)]
    written = strategy.values.get("mixed_precision")
    if written not in (None, "no", mixed_precision):
        mistakes.append(
            f"strategy {strategy.name} says mixed_precision={written} and the config {mixed_precision}; "
            f"pass --mixed_precision {written} or take it out of the YAML"
        )
    if mistakes:
        raise ConfigError(mistakes)
    return replace(strategy, values={**values, "mixed_precision": mixed_precision})


_LAUNCH_WAY = "start with `accelerate launch --config_file accelerate_configs/ddp.yaml trainers/train.py ...`"
_COUNTS = ("num_processes", "num_machines", "machine_rank", "main_process_port", "main_process_ip")
_OTHER_FLAGS = (
    "num_cpu_threads_per_process",
    "max_restarts",
    "monitor_interval",
    "rdzv_backend",
    "rdzv_conf",
    "gpu_ids",
)
_SWITCHES = ("debug", "quiet", "same_network", "enable_cpu_affinity")


def from_launcher(argv: Sequence[str], script: str) -> Strategy:
    """The strategy that a launcher's own command line asks for.

    Args:
        argv: the command line of the `accelerate launch` process.
        script: file name of the training script, which ends the launcher's own flags.

    Raises:
        ConfigError: without `--config_file`, or with flags that would change the strategy behind the file's back.
    """
    ends = [index for index, word in enumerate(argv) if Path(word).name == script]
    words = [word for word in argv[: ends[0]] if word.startswith("--")] if ends else []
    if not any(word.partition("=")[0] == "--config_file" for word in words):
        raise ConfigError(f"the launcher got no --config_file, so a cached default would decide; {_LAUNCH_WAY}")
    first = next(index for index, word in enumerate(argv) if word.startswith("--"))
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config_file", required=True)
    for name in _COUNTS[:-1]:
        parser.add_argument(f"--{name}", type=int)
    for name in ("main_process_ip", *_OTHER_FLAGS):
        parser.add_argument(f"--{name}")
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    try:
        known, rest = parser.parse_known_args(list(argv[first : ends[0]]))
    except argparse.ArgumentError as error:
        raise ConfigError(f"the launcher's flags cannot be read: {error}; {_LAUNCH_WAY}") from None
    if rest:
        flags = " ".join(rest)
        raise ConfigError(f"the launcher was given {flags}; the Accelerate file alone decides; write it there")
    strategy = load_strategy(known.config_file)
    given = {name: getattr(known, name) for name in _COUNTS if getattr(known, name) is not None}
    return replace(strategy, values={**strategy.values, **given})
