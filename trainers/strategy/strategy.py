"""Loads Accelerate configs, validates them strictly, and resolves one for the available processes. Imports no torch.

Accelerate silently ignores many mistakes (unknown nested keys, process counts on a CPU); here they are errors.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import yaml

from trainers.config.mistakes import ConfigError, Mistake, nearest
from trainers.config.options import MACHINE_OPTIONS, MESH_OPTIONS, TrainConfig
from trainers.config.presets import find_preset
from trainers.config.yaml_file import read_yaml
from trainers.strategy import topics
from trainers.strategy.accelerate_rules import FP16_UNSCALED, SCALED_TYPES, check, mesh_sizes
from trainers.strategy.accelerate_schema import AccelerateConfig
from trainers.strategy.backend_refusal import backend_refusal
from trainers.strategy.deepspeed_rules import SOURCE, leaves_parity, output_paths, read_json
from trainers.strategy.deepspeed_schema import QUANTIZED, DeepSpeedJson
from trainers.strategy.mesh import MeshSizes, combination_mistakes, data_axis, fitted, size_option
from trainers.strategy.method_refusal import method_refusal
from trainers.strategy.objective_refusal import objective_refusal
from trainers.strategy.optimizer_refusal import optimizer_refusal
from trainers.strategy.pipeline_schedules import SCHEDULES, micro_batch_mistake
from trainers.strategy.schema import MAX_PROCESSES, ignored_keys

HEADER = "# strategy: "  # first line of the copy of an Accelerate file that a run saves
STRATEGIES_DIR = Path(__file__).resolve().parents[2] / "accelerate_configs"


@dataclass(frozen=True)
class Strategy:
    """A validated Accelerate config.

    Args:
        name: Stem of the file name.
        summary: First comment line of the file.
        values: Keys that Accelerate reads.
        deepspeed_json: Content of `deepspeed_config_file`; empty if there is none (Accelerate then builds DeepSpeed's
            config from the inline keys).
        pp_size: Number of pipeline stages; read from a comment, as Accelerate has no key for it.
        pp_schedule: Pipeline schedule, a key of `SCHEDULES`; read from a comment likewise.
        ep_size: Number of ranks that divide the experts of each layer; read from a comment likewise.
    """

    name: str
    summary: str
    values: dict[str, Any]
    deepspeed_json: dict[str, Any] = field(default_factory=dict)
    pp_size: int = 1
    pp_schedule: str = "1f1b"
    ep_size: int = 1

    @property
    def distributed_type(self) -> str:
        """`NO`, `MULTI_GPU`, `FSDP` or `DEEPSPEED`, as Accelerate spells it."""
        return str(self.values["distributed_type"])

    @property
    def num_processes(self) -> int:
        """Number of processes on all machines."""
        return int(self.values["num_processes"])

    @property
    def sizes(self) -> MeshSizes:
        """Sizes of the mesh of all processes; purely data-parallel unless the file defines a mesh."""
        return replace(fitted(_requested_sizes(self.values, self.pp_size), self.num_processes), ep=self.ep_size)

    @property
    def has_mesh(self) -> bool:
        """Whether there is more than the data parallelism of the `distributed_type`."""
        return bool(self.mesh) or self.pp_size > 1 or self.ep_size > 1

    @property
    def splits_model(self) -> bool:
        """Whether the model's modules determine if the strategy can split it; ZeRO shards any model."""
        return self.distributed_type == "FSDP" or self.sizes.tp * self.sizes.pp * self.sizes.ep > 1

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or groups of them, that see different rows of a global batch."""
        return self.sizes.data

    @property
    def fsdp(self) -> dict[str, Any]:
        """The values of `fsdp_config`; empty for other types."""
        return dict(self.values.get("fsdp_config") or {})

    @property
    def fsdp_version(self) -> int:
        """1 or 2; 0 if this is not FSDP."""
        return int(self.fsdp.get("fsdp_version", 0))

    @property
    def deepspeed(self) -> dict[str, Any]:
        """The values of `deepspeed_config`; empty for other types."""
        return dict(self.values.get("deepspeed_config") or {})

    @property
    def zero_stage(self) -> int:
        """1 to 3; 0 if this is not DeepSpeed."""
        stage = self.deepspeed_json.get("zero_optimization", {}).get("stage", self.deepspeed.get("zero_stage", 0))
        return int(stage)

    @property
    def second_copies(self) -> int:
        """Number of ranks that ZeRO++ shards its secondary copy of the weights over; 1 if it keeps none."""
        return int(self.deepspeed_json.get("zero_optimization", {}).get("zero_hpz_partition_size", 1))

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the device mesh by axis, as written in the file; empty without `parallelism_config`."""
        return mesh_sizes(self.values)

    @property
    def offload(self) -> str:
        """Where parameters or optimizer state are offloaded to: `none`, `cpu` or `nvme`."""
        devices = {self.offload_of("optimizer"), self.offload_of("param")}
        return next((device for device in ("nvme", "cpu") if device in devices), "none")

    def offload_of(self, target: str) -> str:
        """Returns where `param` or `optimizer` is offloaded to; gradients go with the optimizer."""
        zero = self.deepspeed_json.get("zero_optimization", {})
        devices = {str(self.deepspeed.get(f"offload_{target}_device", "none")),
                   str((zero.get(f"offload_{target}") or {}).get("device", "none"))}  # fmt: skip
        devices |= {"cpu"} if self.fsdp.get("fsdp_offload_params") else set()
        return next((device for device in ("nvme", "cpu") if device in devices), "none")

    @property
    def sharded(self) -> bool:
        """Whether each rank holds only a shard of the parameters."""
        if self.distributed_type == "FSDP":
            return self.fsdp.get("fsdp_sharding_strategy") != "NO_SHARD"
        return self.zero_stage == 3

    @property
    def wrapped_class(self) -> str | None:
        """Name of the class that must wrap the model; None if it is not wrapped."""
        if self.pp_size > 1:
            return "PipelineStages"
        if self.distributed_type == "FSDP":
            return "FullyShardedDataParallel" if self.fsdp_version == 1 else "FSDPLossModule"
        return {"MULTI_GPU": "DistributedDataParallel", "DEEPSPEED": "DeepSpeedEngine"}.get(self.distributed_type)

    def outside_parity(self) -> list[str]:
        """Returns the choices that void the promise that the strategy never changes the model."""
        return leaves_parity(self.deepspeed_json)

    def cautions(self, config: TrainConfig) -> list[str]:
        """Returns warnings: options without effect, and axes that communicate in every layer across machines."""
        machines, sizes = int(self.values.get("num_machines") or 1), self.sizes
        lines = []
        if config.pp_schedule and sizes.pp == 1:
            lines.append(f"pp_schedule={config.pp_schedule} is ignored: there is one stage")
        if sizes.pp > 1 and config.ddp_bucket_cap_mb != TrainConfig.model_fields["ddp_bucket_cap_mb"].default:
            lines.append("ddp_bucket_cap_mb is ignored: a pipeline sums its gradients itself")
        if sizes.pp > 1 and "fsdp_transformer_layer_cls_to_wrap" in self.fsdp:
            reason = "each layer of a stage is sharded by itself; remove the line"
            lines.append(f"fsdp_config.fsdp_transformer_layer_cls_to_wrap is ignored: {reason}")
        ignored = ignored_keys(AccelerateConfig, self.values)
        ignored += [(f"{SOURCE}: {key}", reason) for key, reason in ignored_keys(DeepSpeedJson, self.deepspeed_json)]
        lines += [f"{key} is ignored: {reason}" for key, reason in ignored]
        local = self.num_processes // machines
        # An axis stays within machines if the processes that it spans, inner axes included, divide those of a machine.
        inner = {"tp": sizes.tp, "sp": sizes.sp * sizes.tp, "cp": sizes.cp * sizes.sp * sizes.tp, "ep": sizes.ep}
        return lines + [
            f"{axis}={getattr(sizes, axis)} spans machines of {local} processes each, and communicates in every layer; "
            "keep it within a machine and let pp or the data-parallel axes span machines"
            for axis, span in inner.items()
            if machines > 1 and getattr(sizes, axis) > 1 and local % span
        ]

    def dump(self) -> str:
        """Returns the YAML that is passed to Accelerate, with the strategy's name in the first line."""
        name = "".join(letter for letter in self.name if letter.isprintable())
        pipeline = f"# pp_size: {self.pp_size}\n# pp_schedule: {self.pp_schedule}\n" if self.pp_size > 1 else ""
        pipeline += f"# ep_size: {self.ep_size}\n" if self.ep_size > 1 else ""
        return f"{HEADER}{name}\n{pipeline}{yaml.safe_dump(self.values, sort_keys=False)}"


@dataclass(frozen=True)
class Machines:
    """A multi-machine run, as seen by one of its machines.

    Args:
        count: Number of machines, at least 2.
        rank: Number of this machine, from 0.
        ip: Address of machine 0, where all machines rendezvous.
        port: Rendezvous port on machine 0.
        minimum: Fewest machines that the run goes on with when others are lost; None: it needs all.
    """

    count: int
    rank: int
    ip: str
    port: int
    minimum: int | None = None


def over_machines(strategy: Strategy, machines: Machines | None) -> Strategy:
    """Returns the strategy for these machines; the same on each, as a machine's rank is passed on the command line.

    Args:
        strategy: A strategy that may name machines itself.
        machines: The machines of the run; None for this machine alone.
    """
    if machines is None and (strategy.values.get("num_machines") or 1) == 1:
        return strategy
    values = {key: value for key, value in strategy.values.items() if key not in (*MACHINE_OPTIONS, "same_network")}
    values["num_machines"] = machines.count if machines else 1
    if machines:
        values |= {"main_process_ip": machines.ip, "main_process_port": machines.port}
    if machines and strategy.distributed_type == "DEEPSPEED":  # else Accelerate would look for pdsh
        values["deepspeed_config"] = {**strategy.deepspeed, "deepspeed_multinode_launcher": "standard"}
    return replace(strategy, values=values)


def strategy_names() -> list[str]:
    """Returns the names of the bundled strategies, `single` first."""
    return sorted((path.stem for path in STRATEGIES_DIR.glob("*.yaml")), key=lambda name: (name != "single", name))


def default_strategy(num_processes: int, preset: str | None = None) -> str:
    """Returns the name of the default strategy.

    Args:
        num_processes: Processes of the run.
        preset: Preset that lists strategies by number of GPUs; None on a CPU, or without a preset.

    Returns:
        `single` for one process. For several, the best strategy of the preset for this number of GPUs, or else for the
        next lower one that it fits on, or else for the lowest; `ddp` without a preset.
    """
    if num_processes == 1:
        return "single"
    gpus = find_preset(preset).gpus if preset else {}
    best = {count: entry.strategies[0] for count, entry in gpus.items() if count > 1 and entry.strategies}
    below = [name for count, name in best.items() if count <= num_processes]
    return below[-1] if below else next(iter(best.values()), "ddp")


def load_strategy(name_or_path: str) -> Strategy:
    """Loads and validates a strategy, given by name or by the path of an Accelerate YAML.

    Raises:
        ConfigError: Lists every mistake in it.
    """
    path = STRATEGIES_DIR / f"{name_or_path}.yaml"
    if name_or_path not in strategy_names():
        path = Path(os.path.expanduser(name_or_path))
        if path.suffix not in (".yaml", ".yml"):
            listed = f"use one of {', '.join(strategy_names())}, or the path of an Accelerate YAML"
            remedy = nearest(name_or_path, strategy_names(), listed)
            raise ConfigError.about("strategy", repr(name_or_path), "is unknown", remedy)
    try:
        values = _absolute_json(read_yaml(path))
    except ConfigError as error:
        raise ConfigError.about("strategy", name_or_path, f": {error}") from None
    text = path.read_text(encoding="utf-8")
    pipeline, mistakes = _pipeline(text)
    mistakes += check(values, int(pipeline.get("pp_size", 1)), int(pipeline.get("ep_size", 1)))
    if mistakes:
        raise ConfigError(mistakes, path.name)
    if isinstance(values.get("main_process_port"), str):  # Accelerate's check for a free port only takes numbers
        values["main_process_port"] = int(values["main_process_port"])
    file = (values.get("deepspeed_config") or {}).get("deepspeed_config_file")
    content = read_json(file) if file else {}
    first = text.partition("\n")[0]
    if first.startswith(HEADER):
        name = first.removeprefix(HEADER).strip()
        return Strategy(name, f"{name}, from the run in {path.parent}", values, content, **pipeline)
    summary = first.lstrip("# ").strip() if first.startswith("#") else f"{values['distributed_type']} from {path.name}"
    return Strategy(path.stem, summary, values, content, **pipeline)


def deepspeed_paths(file: str) -> dict[str, str]:
    """Returns the paths that DeepSpeed would write to according to a DeepSpeed JSON, by dotted key.

    Raises:
        ConfigError: If the file cannot be read.
    """
    return output_paths(read_json(file))


def _pipeline(text: str) -> tuple[dict[str, Any], list[Mistake]]:
    """Parses `pp_size`, `pp_schedule` and `ep_size` from comment lines; also returns the mistakes in them."""
    options, mistakes = dict[str, Any](), []
    for name, value in re.findall(
        r"^[ \t]*#+[ \t]*(pp_size|pp_schedule|ep_size)[ \t]*[:=][ \t]*(.*?)[ \t]*$", text, re.MULTILINE
    ):
        if name == "pp_schedule" and value not in SCHEDULES:
            mistakes.append(Mistake(name, value, "is not a schedule", f"use {', '.join(SCHEDULES)}"))
        elif name != "pp_schedule" and not (re.fullmatch("[0-9]{1,9}", value) and 0 < int(value) <= MAX_PROCESSES):
            counted = "stages" if name == "pp_size" else "ranks"
            mistakes.append(Mistake(name, value[:80], f"is not a number of {counted}", f"write 1 to {MAX_PROCESSES}"))
        else:
            options[name] = value if name == "pp_schedule" else int(value)
    return options, mistakes


def _requested_sizes(values: dict[str, Any], pp_size: int) -> dict[str, int]:
    """Returns the requested mesh sizes; without a mesh in the file, all processes of a stage are data-parallel."""
    return {"pp": pp_size, **(mesh_sizes(values) or {data_axis(str(values["distributed_type"])): -1})}


def _absolute_json(values: dict[str, Any]) -> dict[str, Any]:
    """Makes the path of a DeepSpeed JSON absolute, so that the copy saved by a run works from any folder."""
    inline = values.get("deepspeed_config")
    if not isinstance(inline, dict) or not isinstance(file := inline.get("deepspeed_config_file"), str):
        return values
    path = str(Path(os.path.expanduser(file)).absolute())
    return {**values, "deepspeed_config": {**inline, "deepspeed_config_file": path}}


def cannot_run(strategy: Strategy, method: str, has_gpu: bool) -> str | None:
    """Returns why a strategy cannot run on this machine or with this method; None if it can. Launches nothing.

    Args:
        strategy: The strategy.
        method: `full`, `lora` or `qlora`.
        has_gpu: Whether the run would use GPUs.
    """
    deepspeed, offloads = strategy.distributed_type == "DEEPSPEED", strategy.offload != "none"
    if deepspeed and not _has("deepspeed"):
        return 'DeepSpeed is not installed; `pip install "tunesmith[deepspeed]"`'
    if strategy.fsdp and offloads and not has_gpu:
        problem = "fsdp_offload_params=true uses pinned memory, which needs an accelerator, but there is none"
        return f"{problem}; use fsdp2; {topics.OFFLOAD}"
    if strategy.fsdp_version == 1 and strategy.fsdp.get("fsdp_sync_module_states", True) and not has_gpu:
        return "fsdp_sync_module_states=true needs an accelerator, but there is none; write false, or use fsdp2"
    zero = strategy.deepspeed_json.get("zero_optimization", {})
    quantized = [key for key in QUANTIZED if zero.get(key) is True]
    if quantized and not has_gpu:
        problem = f"{' and '.join(quantized)} of ZeRO++ needs DeepSpeed's CUDA kernels, but there is no GPU"
        return f"{problem}; remove it from the DeepSpeed JSON; {topics.ZERO}"
    if deepspeed and (offloads or not has_gpu) and not (shutil.which("c++") or shutil.which("g++")):
        return "DeepSpeed builds what it needs on a CPU with a C++ compiler, but there is none; install g++"
    remedy = "use --strategy single, ddp, fsdp2, hsdp, zero1 or zero2, or method=lora"
    if method == "qlora" and strategy.fsdp_version == 1:
        return f"method=qlora: FSDP 1 would put 4-bit and fp32 weights into one flat tensor; {remedy}"
    if method == "qlora" and strategy.zero_stage == 3:
        return f"method=qlora: ZeRO 3 would shard and cast 4-bit weights as if they were numbers; {remedy}"
    return None


def refusal(strategy: Strategy, config: TrainConfig, has_gpu: bool) -> str | None:
    """Returns why a strategy cannot train this config on this machine; None if it can.

    Raises:
        ConfigError: If the global batch does not divide evenly.
    """
    if reason := cannot_run(strategy, config.method, has_gpu) or backend_refusal(strategy, config, has_gpu):
        return reason
    own_optimizer, uses_deepspeed = "optimizer" in strategy.deepspeed_json, strategy.distributed_type == "DEEPSPEED"
    uses_fsdp1 = strategy.distributed_type == "FSDP" and strategy.fsdp_version == 1
    states_on = strategy.offload_of("optimizer")
    if reason := optimizer_refusal(config, uses_deepspeed, uses_fsdp1, strategy.offload, own_optimizer, states_on):
        return reason
    divides = strategy.sizes.tp * strategy.sizes.pp * strategy.sizes.ep > 1
    if reason := objective_refusal(strategy.sizes, config) or method_refusal(strategy.sizes, config, uses_deepspeed):
        return reason
    if config.ddp_comm_hook != "none" and divides:
        hook = config.ddp_comm_hook
        return f"ddp_comm_hook={hook} would sum over all ranks, whose weights differ under tp, pp and ep; leave it out"
    micro_batches, sizes = config.accumulation_steps(strategy.data_parallel_size), strategy.sizes
    # With torch 2.11, compiled layers sharded by tp get no gradient at all.
    if config.torch_compile and (divides or sizes.sequence_shards > 1):
        return f"torch_compile=true is not verified with {sizes}; leave it out, or use a strategy without these axes"
    return micro_batch_mistake(strategy.pp_schedule, strategy.pp_size, micro_batches) if strategy.pp_size > 1 else None


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def resolve(
    strategy: Strategy, num_processes: int, mixed_precision: str, pp_size: int | None = None,
    pp_schedule: str | None = None,
) -> Strategy:  # fmt: skip
    """Resolves a strategy for a number of processes: sets counts and mesh; CUDA_VISIBLE_DEVICES selects the devices.

    The result has `mixed_precision: no` even for bf16: the training script applies autocast itself, inside the wrapped
    module and identically for every backend; a backend's own would also cast parameters, outputs or reductions.

    Args:
        strategy: The loaded strategy.
        num_processes: Processes of the run.
        mixed_precision: Precision from the config.
        pp_size: Pipeline stages; None for the value in the file.
        pp_schedule: Pipeline schedule; None for the value in the file.

    Raises:
        ConfigError: If the strategy does not support this number of processes, or specifies another precision.
    """
    values = {key: value for key, value in strategy.values.items() if key not in ("gpu_ids", "mixed_precision")}
    values["num_processes"] = num_processes
    pipeline: dict[str, Any] = {
        "pp_size": pp_size or strategy.pp_size,
        "pp_schedule": pp_schedule or strategy.pp_schedule,
    }
    stages = int(pipeline["pp_size"])
    mistakes = _fit_mesh(values, num_processes, stages) or check(values, stages, strategy.ep_size)
    written = strategy.values.get("mixed_precision")
    if written not in (None, "no", mixed_precision):
        problem = f"and the config {mixed_precision}"
        remedy = f"pass --mixed_precision {written} or take it out of the YAML"
        mistakes.append(Mistake("mixed_precision", written, f"in the file {problem}", remedy))
    cut = mesh_sizes(values).get("tp", 1) * stages * strategy.ep_size > 1  # ranks would not agree which are infinite
    if mixed_precision == "fp16" and (cut or strategy.distributed_type not in SCALED_TYPES):
        mistakes.append(FP16_UNSCALED)
    if mistakes:
        raise ConfigError(mistakes, f"strategy {strategy.name}")
    if not strategy.deepspeed.get("deepspeed_config_file"):  # Accelerate refuses the key together with a DeepSpeed JSON
        values["mixed_precision"] = "fp16" if mixed_precision == "fp16" else "no"
    return replace(strategy, values=values, **pipeline)


def _fit_mesh(values: dict[str, Any], num_processes: int, pp_size: int) -> list[Mistake]:
    """Fits the mesh in `values` to the processes: one axis takes the remaining ones, the others stay as written."""
    requested, kind = _requested_sizes(values, pp_size), str(values["distributed_type"])
    if pp_size > 1 and (mistakes := combination_mistakes(kind, MeshSizes(pp=pp_size))):
        return mistakes
    if requested == {"pp": 1, data_axis(kind): -1}:
        return []  # purely data-parallel: any number of processes fits
    free = next((axis for axis, size in requested.items() if size == -1), data_axis(kind))
    fixed = {axis: size for axis, size in requested.items() if axis != free}
    product, factors = prod(fixed.values()), " x ".join(f"{axis} {size}" for axis, size in fixed.items() if size > 1)
    quotient, remainder = divmod(num_processes, product)
    written = [axis for axis in fixed if axis != "pp"]
    flags = [f"--{axis}_size" for axis in written if f"{axis}_size" in MESH_OPTIONS] or ["--pp_size"]
    own = f"or other sizes with {' and '.join(flags)}"
    if remainder or not quotient:
        problem, remedy = f"/ {factors} leaves {remainder}", f"use a multiple of {product}, {own}"
        return [Mistake("num_processes", num_processes, problem, remedy)]
    if free == "dp_shard" and quotient * requested.get("cp", 1) * requested.get("sp", 1) < 2:
        problem, remedy = f"/ {factors} = {quotient}, nothing to shard over", f"use at least {2 * product}, {own}"
        return [Mistake("num_processes", num_processes, problem, remedy)]
    sizes = {size_option(axis): size for axis, size in {**fixed, free: quotient}.items() if axis != "pp"}
    if "parallelism_config" in values:
        values["parallelism_config"] = {**values["parallelism_config"], **sizes}
    return []


_LAUNCH_WAY = "start with `accelerate launch --config_file accelerate_configs/ddp.yaml trainers/train.py ...`"
_COUNTS = ("num_processes", "num_machines", "machine_rank", "main_process_port", "main_process_ip")
_OTHER_FLAGS = ("num_cpu_threads_per_process", "max_restarts", "monitor_interval", "rdzv_backend", "rdzv_conf",
                "gpu_ids")  # fmt: skip
_SWITCHES = ("debug", "quiet", "same_network", "enable_cpu_affinity")


def from_launcher(argv: Sequence[str], script: str) -> Strategy:
    """Reads the strategy from the launcher's command line.

    Args:
        argv: Command line of the `accelerate launch` process.
        script: File name of the training script, which ends the launcher's own flags.

    Raises:
        ConfigError: If `--config_file` is missing, or flags would override the strategy in the file.
    """
    # Only the words before the script are flags of the launcher.
    ends = [index for index, word in enumerate(argv) if Path(word).name == script]
    given_flags = [word for word in argv[: ends[0]] if word.startswith("--")] if ends else []
    if not any(word.partition("=")[0] == "--config_file" for word in given_flags):
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
        known, unparsed = parser.parse_known_args(list(argv[first : ends[0]]))
    except argparse.ArgumentError as error:
        raise ConfigError(f"the launcher's flags cannot be read: {error}; {_LAUNCH_WAY}") from None
    if unparsed:
        flags = " ".join(unparsed)
        raise ConfigError(f"the launcher was given {flags}; the Accelerate file alone decides; write it there")
    strategy = load_strategy(known.config_file)
    counts = {name: getattr(known, name) for name in _COUNTS if getattr(known, name) is not None}
    values = {**strategy.values, **counts}
    mistakes = check(values, strategy.pp_size, strategy.ep_size)
    if mistakes:
        raise ConfigError(mistakes, "with the launcher's flags")
    return replace(strategy, values=values)
