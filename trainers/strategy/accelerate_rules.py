"""Checks an Accelerate config for keys that are missing, contradict or silently override each other. Imports no torch.

The values allowed for each key are defined in `trainers/strategy/accelerate_schema.py`, and for a DeepSpeed JSON in
`trainers/strategy/deepspeed_schema.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainers.config.mistakes import ConfigError, Mistake
from trainers.strategy import topics
from trainers.strategy.accelerate_schema import (
    MEGATRON_PROBLEM,
    NOT_BESIDE_FILE,
    SECTIONS,
    AccelerateConfig,
    DeepSpeedConfig,
    FsdpConfig,
)
from trainers.strategy.deepspeed_rules import parse_json, read_json
from trainers.strategy.deepspeed_schema import ZeroOptimization
from trainers.strategy.mesh import AXES, MeshSizes, combination_mistakes, data_axis, fitted, size_option
from trainers.strategy.schema import parse, shortened

TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
MESH_TYPES = ("FSDP", "MULTI_GPU", "DEEPSPEED")
_TYPES_OF = {"fsdp_config": ("FSDP",), "deepspeed_config": ("DEEPSPEED",), "parallelism_config": MESH_TYPES}
SCALED_TYPES = ("NO", "MULTI_GPU")  # types under which the training script scales the loss for fp16
FP16_UNSCALED = Mistake(
    "mixed_precision",
    "fp16",
    "needs loss scaling, which is only done under single and ddp",
    f"use bf16; {topics.PRECISION}",
)


def check(values: dict[str, Any], pp_size: int = 1, ep_size: int = 1) -> list[Mistake]:
    """Returns every mistake in an Accelerate config; combinations are only checked once each key is valid.

    Also reads and checks the DeepSpeed JSON that the config names.

    Args:
        values: The parsed YAML.
        pp_size: Pipeline stages, for which Accelerate has no key.
        ep_size: Ranks that divide the experts of each layer, likewise.
    """
    try:
        config = parse(AccelerateConfig, values)
    except ConfigError as error:
        return error.mistakes
    kind = config.distributed_type
    mistakes = [*_type_mistakes(config), *_process_mistakes(config), *_precision_mistakes(config)]
    if kind == "FSDP":
        mistakes += _fsdp_mistakes(config)
    if kind in MESH_TYPES or (kind in TYPES and pp_size * ep_size > 1):
        mistakes += _mesh_mistakes(config, mesh_sizes(values), pp_size, ep_size)
    if kind == "DEEPSPEED":
        mistakes += _deepspeed_mistakes(config)
    return mistakes


def mesh_sizes(values: dict[str, Any]) -> dict[str, int]:
    """Returns the sizes of the device mesh by axis, as written and without pp; empty if the config has none."""
    written = values.get("parallelism_config") or {}
    return {axis: int(written[key]) for axis in AXES if (key := size_option(axis)) in written}


def _type_mistakes(config: AccelerateConfig) -> Iterator[Mistake]:
    option, kind = "distributed_type", config.distributed_type
    if kind is None:
        yield Mistake(option, None, "is missing", f"write 'NO', {', '.join(TYPES[1:])}")
    elif kind == "MULTI_CPU":
        yield Mistake(option, kind, "starts one process without mpirun", "write MULTI_GPU, which runs on gloo here")
    elif kind == "MEGATRON_LM":
        yield Mistake(option, kind, f": {MEGATRON_PROBLEM}", f"use --strategy 3d; {topics.FRAMEWORKS}")
    elif kind not in TYPES:
        yield Mistake(option, shortened(kind), "is not supported", f"use {', '.join(TYPES)}; {topics.FRAMEWORKS}")
    else:
        for name in SECTIONS:
            if getattr(config, name) and kind not in _TYPES_OF[name]:
                remedy = f"write {_TYPES_OF[name][0]}, or remove {name}"
                yield Mistake(name, None, f"under distributed_type={kind} is ignored", remedy)


def _process_mistakes(config: AccelerateConfig) -> Iterator[Mistake]:
    kind, processes = config.distributed_type, config.num_processes
    machines, rank = config.num_machines or 1, config.machine_rank or 0
    if processes is None:
        yield Mistake("num_processes", None, "is missing", "write how many processes the run has")
    elif kind == "NO" and processes > 1:
        problem = f"is one process, num_processes={processes}"
        yield Mistake("distributed_type", "'NO'", problem, "write MULTI_GPU or num_processes: 1")
    elif kind == "MULTI_GPU" and processes == 1:
        yield Mistake("distributed_type", kind, "with num_processes=1", "write 'NO', or at least 2 processes")
    if processes and processes % machines:
        problem = f"is not divisible by num_machines={machines}"
        yield Mistake("num_processes", processes, problem, "use as many on each machine")
    if rank >= machines:
        problem = (
            f"with num_machines={machines}: ranks count from 0, so that the last one is {machines} - 1 = {machines - 1}"
        )
        yield Mistake("machine_rank", rank, problem, f"write 0 to {machines - 1}")


def _precision_mistakes(config: AccelerateConfig) -> Iterator[Mistake]:
    option, precision = "mixed_precision", config.mixed_precision
    if precision == "fp8":
        yield Mistake(option, precision, "is chosen in the config", "remove it and pass --mixed_precision fp8")
    elif precision not in (None, "no", "fp16", "bf16"):
        yield Mistake(option, shortened(precision), "is not a precision", "use no, fp16 or bf16")
    elif precision == "fp16" and config.distributed_type in TYPES and config.distributed_type not in SCALED_TYPES:
        yield FP16_UNSCALED


def _fsdp_mistakes(config: AccelerateConfig) -> Iterator[Mistake]:
    fsdp = config.fsdp_config
    if fsdp is None:
        problem = "without fsdp_config"
        yield Mistake("distributed_type", "FSDP", problem, "write one, as in accelerate_configs/fsdp2.yaml")
        return
    if fsdp.fsdp_version is None:
        problem = "is missing, and Accelerate would use 1"
        yield Mistake("fsdp_config.fsdp_version", None, problem, "write 2 (or 1)")
    yield from _wrap_mistakes(fsdp)
    if fsdp.fsdp_version == 1:
        yield from _fsdp1_mistakes(config, fsdp)
    elif fsdp.fsdp_version == 2:
        yield from _fsdp2_mistakes(fsdp)


def _wrap_mistakes(fsdp: FsdpConfig) -> Iterator[Mistake]:
    option, policy = "fsdp_config.fsdp_auto_wrap_policy", fsdp.fsdp_auto_wrap_policy
    if policy is None:
        problem = "is missing, and the whole model would be gathered at once"
        yield Mistake(option, None, problem, "write TRANSFORMER_BASED_WRAP (or NO_WRAP if that is meant)")
        return
    by_size, by_class = policy == "SIZE_BASED_WRAP", policy == "TRANSFORMER_BASED_WRAP"
    if by_size and fsdp.fsdp_min_num_params is None:
        yield Mistake(option, policy, "needs a size", "write fsdp_min_num_params")
    ignored = f"is ignored under {policy}"
    if not by_size and fsdp.fsdp_min_num_params is not None:
        yield Mistake("fsdp_config.fsdp_min_num_params", None, ignored, "remove it, or write SIZE_BASED_WRAP")
    if not by_class and fsdp.fsdp_transformer_layer_cls_to_wrap is not None:
        option = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
        yield Mistake(option, None, ignored, "remove it, or write TRANSFORMER_BASED_WRAP")


ONLY_FSDP1 = {
    "fsdp_sharding_strategy": "write fsdp_reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
    "fsdp_use_orig_params": "remove the line",
    "fsdp_sync_module_states": "remove the line",
    "fsdp_backward_prefetch": "remove the line",
    "fsdp_forward_prefetch": "remove the line",
}
"""Keys that FSDP version 2 silently ignores, and how to fix them."""


def _fsdp2_mistakes(fsdp: FsdpConfig) -> Iterator[Mistake]:
    for key, remedy in ONLY_FSDP1.items():
        if getattr(fsdp, key) is not None:
            yield Mistake(f"fsdp_config.{key}", None, "is ignored under fsdp_version=2", f"{remedy}; {topics.FSDP}")
    reshard = fsdp.fsdp_reshard_after_forward
    if isinstance(reshard, str):  # Accelerate rejects the values of version 1
        flags = {"FULL_SHARD": "write true", "SHARD_GRAD_OP": "write false"}
        remedy = flags.get(reshard, "write true or false, or use hsdp")
        yield Mistake("fsdp_config.fsdp_reshard_after_forward", reshard, "is an fsdp_version=1 option", remedy)


def _fsdp1_mistakes(config: AccelerateConfig, fsdp: FsdpConfig) -> Iterator[Mistake]:
    sharding, reshard = fsdp.fsdp_sharding_strategy or "FULL_SHARD", fsdp.fsdp_reshard_after_forward
    # Version 1 never reads this key, as the launcher always sets a sharding strategy; the same value is harmless.
    if reshard is not None and reshard != sharding:
        word = reshard if isinstance(reshard, str) else None
        remedy = f"write fsdp_sharding_strategy: {word or 'FULL_SHARD (true) or SHARD_GRAD_OP (false)'}"
        yield Mistake("fsdp_config.fsdp_reshard_after_forward", word, "is ignored under fsdp_version=1", remedy)
    if fsdp.fsdp_use_orig_params is False:
        problem = "cannot mix frozen and trained weights, nor report their names"
        yield Mistake("fsdp_config.fsdp_use_orig_params", False, problem, f"write true; {topics.FSDP}")
    if "HYBRID" in sharding and (config.num_machines or 1) < 2:
        problem = "takes its groups from the machines, and there is only one"
        remedy = f"use the hsdp strategy; {topics.HYBRID}"
        yield Mistake("fsdp_config.fsdp_sharding_strategy", sharding, problem, remedy)
    if config.num_processes == 1 and sharding != "NO_SHARD":
        problem = f"with num_processes=1 turns {sharding} into NO_SHARD"
        yield Mistake("fsdp_config.fsdp_version", 1, problem, "use fsdp_version: 2, or single")


def _mesh_mistakes(config: AccelerateConfig, written: dict[str, int], pp_size: int, ep_size: int) -> Iterator[Mistake]:
    kind, fsdp = str(config.distributed_type), config.fsdp_config or FsdpConfig()
    if (not written and pp_size * ep_size == 1) or config.num_processes is None:
        return
    # Without `parallelism_config`, the data axis of the type takes all processes of a stage.
    stages = {"pp": pp_size} if pp_size > 1 else {}
    try:
        sizes = replace(fitted(stages | (written or {data_axis(kind): -1}), config.num_processes), ep=ep_size)
    except ConfigError as error:
        yield from error.mistakes
        return
    yield from combination_mistakes(kind, sizes)
    # Accelerate's own settings for cp and sp have no effect, because the training script splits the rows.
    for axis in ("cp", "sp"):
        keys = config.parallelism_config.model_fields_set if config.parallelism_config else ()
        for key in sorted(keys):
            if getattr(sizes, axis) > 1 and key.startswith(f"parallelism_config_{axis}_") and key != size_option(axis):
                problem = (
                    ": rows are split by the training script, which keeps packed documents apart, and not by Accelerate"
                )
                yield Mistake(key, None, problem, "remove the line")
    if kind == "FSDP" and fsdp.fsdp_version == 1:
        yield Mistake("parallelism_config", None, "needs fsdp_version: 2", "under 1 Accelerate builds no mesh")
    if pp_size > 1:
        yield from _stage_mistakes(kind, fsdp, sizes)
    if kind in ("FSDP", "DEEPSPEED") and sizes.dp_shard * sizes.sequence_shards < 2:
        yield Mistake(size_option("dp_shard"), sizes.dp_shard, "leaves nothing to shard over", "write at least 2")


def _stage_mistakes(kind: str, fsdp: FsdpConfig, sizes: MeshSizes) -> Iterator[Mistake]:
    required = {
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    for key, value in required.items():
        if getattr(fsdp, key) not in (None, value):
            problem = f"with pp={sizes.pp}: a stage's layers are sharded one by one and stay gathered for a step"
            remedy = f"write {value or 'false'}, as in pp_fsdp2"
            yield Mistake(f"fsdp_config.{key}", getattr(fsdp, key), problem, remedy)
    if kind == "FSDP" and sizes.sequence_shards > 1:
        yield Mistake("", None, f"{sizes} under FSDP is not verified", "use MULTI_GPU, or leave out pp")


def _deepspeed_mistakes(config: AccelerateConfig) -> Iterator[Mistake]:
    section, machines = config.deepspeed_config, config.num_machines or 1
    if section is None:
        problem = "without deepspeed_config"
        yield Mistake("distributed_type", "DEEPSPEED", problem, "write one, as in accelerate_configs/zero2.yaml")
        return
    if machines > 1 and section.deepspeed_multinode_launcher is None:
        problem = "would start DeepSpeed's own launcher (pdsh)"
        remedy = f"write deepspeed_multinode_launcher: standard in deepspeed_config; {topics.MACHINES}"
        yield Mistake("num_machines", machines, problem, remedy)
    if section.deepspeed_config_file is None:
        yield from _inline_mistakes(section)
        stage = section.zero_stage
    else:
        yield from _beside_file(config, section)
        try:
            zero = parse_json(read_json(section.deepspeed_config_file)).zero_optimization or ZeroOptimization()
        except ConfigError as error:
            yield from error.mistakes
            return
        yield from _zero_plus_plus_mistakes(config, zero)
        stage = zero.stage
    option = "deepspeed_config.zero3_init_flag"
    if stage == 3 and section.zero3_init_flag:  # Accelerate itself turns it off under the other stages
        problem = "is refused: weights are never drawn at random, and are sharded as they are read"
        yield Mistake(option, True, problem, f"write false; {topics.ZERO}")
    if stage == 3 and section.zero3_init_flag is None:
        # Without the key, DeepSpeedPlugin defaults to true under stage 3, and each rank would initialize its own shard.
        yield Mistake(option, None, "is missing, and Accelerate would use true", "write false")


def _inline_mistakes(section: DeepSpeedConfig) -> Iterator[Mistake]:
    stage = section.zero_stage
    if stage is None:
        problem = "is missing, and Accelerate would use 2"
        yield Mistake("deepspeed_config.zero_stage", None, problem, "write 1, 2 or 3")
    elif stage != 3 and section.offload_param_device != "none":
        problem = f"needs zero_stage: 3, not {stage}"
        option = "deepspeed_config.offload_param_device"
        yield Mistake(option, section.offload_param_device, problem, "remove it, or write 3")
    for part in ("optimizer", "param"):
        device, path = (getattr(section, f"offload_{part}_{key}") for key in ("device", "nvme_path"))
        if device == "nvme" or path is not None:
            remedy = (
                f"write a DeepSpeed JSON with zero_optimization.offload_{part} and name it in deepspeed_config_file; "
                f"{topics.OFFLOAD}"
            )
            problem = ": `accelerate launch` does not pass the nvme path on"
            yield Mistake(f"deepspeed_config.offload_{part}_device", "nvme", problem, remedy)


def _beside_file(config: AccelerateConfig, section: DeepSpeedConfig) -> Iterator[Mistake]:
    problem = "beside deepspeed_config_file is refused by Accelerate"
    for key in NOT_BESIDE_FILE:
        if key in section.model_fields_set:
            yield Mistake(f"deepspeed_config.{key}", None, problem, "write it into the JSON")
    if config.mixed_precision is not None:
        remedy = "remove it from the YAML and set it in the config"
        yield Mistake("mixed_precision", config.mixed_precision, problem, remedy)


def _zero_plus_plus_mistakes(config: AccelerateConfig, zero: ZeroOptimization) -> Iterator[Mistake]:
    copies, processes = zero.zero_hpz_partition_size, config.num_processes
    if processes and processes % copies:
        problem = f"does not divide num_processes={processes}"
        yield Mistake("zero_hpz_partition_size", copies, problem, "write how many processes a machine has")
    mesh = config.parallelism_config
    if zero.zero_plus_plus and mesh and (mesh.parallelism_config_tp_size or 1) > 1:
        problem = ": DeepSpeed takes its groups from all ranks, and not from those of tp"
        yield Mistake(" and ".join(zero.zero_plus_plus), None, problem, "remove it")
