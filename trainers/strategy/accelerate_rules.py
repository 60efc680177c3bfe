"""What an Accelerate config as a whole has wrong: keys that contradict, miss or silently undo each other. No torch.

What single keys may hold is in `trainers/strategy/accelerate_schema.py`, what a DeepSpeed JSON may hold in
`trainers/strategy/deepspeed_schema.py`.
"""

from __future__ import annotations

from typing import Any

from trainers.config.options import ConfigError
from trainers.strategy.accelerate_schema import (
    DEEPSPEED,
    FLAGS_ONLY,
    FSDP,
    MEGATRON_WAY,
    NOT_BESIDE_FILE,
    ONLY_FSDP1,
    ONLY_FSDP2,
    PARALLELISM,
    TOP,
    key_mistakes,
)
from trainers.strategy.deepspeed_schema import JSON, json_mistakes, read_json, zero_plus
from trainers.strategy.mesh import AXES, combination_mistakes, data_axis, fitted

TYPES = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED")
SCALED_TYPES = ("NO", "MULTI_GPU")  # the ones under which the training script scales the loss for fp16
FP16_WAY = "mixed_precision=fp16 needs loss scaling, which is only done under single and ddp; use bf16"
_SECTIONS = {
    "fsdp_config": (FSDP, ("FSDP",)),
    "deepspeed_config": (DEEPSPEED, ("DEEPSPEED",)),
    "parallelism_config": (PARALLELISM, ("FSDP", "MULTI_GPU", "DEEPSPEED")),
}


def check(values: dict[str, Any], pp_size: int = 1) -> list[str]:
    """Every mistake in an Accelerate config, a line each; those of single keys hide those of the whole.

    Reads the DeepSpeed JSON that the config names.

    Args:
        values: as they were read.
        pp_size: pipeline stages, for which Accelerate has no key.
    """
    mistakes = [
        f"{key} is a flag of `accelerate launch` and no key of its YAML; pass --{key} {values[key]}"
        for key in FLAGS_ONLY
        if key in values
    ]
    mistakes += key_mistakes({key: value for key, value in values.items() if key not in FLAGS_ONLY}, TOP, "")
    for name, (keys, _) in _SECTIONS.items():
        section = values.get(name)
        if isinstance(section, dict):
            misplaced = _json_keys(section) if name == "deepspeed_config" else {}
            mistakes += misplaced.values()
            mistakes += key_mistakes({key: section[key] for key in section if key not in misplaced}, keys, name)
    return mistakes or _check_whole(values, pp_size)


def _json_keys(inline: dict[str, Any]) -> dict[str, str]:
    """A line for each key of a DeepSpeed JSON that was written into the YAML, where Accelerate passes over it."""
    return {
        key: f"deepspeed_config.{key} is a key of a DeepSpeed JSON, and Accelerate ignores it here; "
        "write it into a JSON file and name that in deepspeed_config_file"
        for key in inline
        if key in JSON and key not in DEEPSPEED
    }


def _check_whole(values: dict[str, Any], pp_size: int) -> list[str]:
    kind = values.get("distributed_type")
    mistakes = _check_common(values)
    for name, (_, kinds) in _SECTIONS.items():
        if values.get(name) and kind in TYPES and kind not in kinds:
            mistakes.append(f"{name} under distributed_type={kind} is ignored; write {kinds[0]}, or remove {name}")
    if kind == "FSDP":
        mistakes += _check_fsdp(values, values.get("fsdp_config") or {})
    if kind in _SECTIONS["parallelism_config"][1] or (kind in TYPES and pp_size > 1):
        mistakes += _check_mesh(values, pp_size)
    if kind == "DEEPSPEED":
        mistakes += _check_deepspeed(values, values.get("deepspeed_config") or {})
    return mistakes


def _check_common(values: dict[str, Any]) -> list[str]:
    kind, processes = values.get("distributed_type"), values.get("num_processes")
    machines, precision = values.get("num_machines") or 1, values.get("mixed_precision")
    rank, port = values.get("machine_rank") or 0, values.get("main_process_port")
    rules = {
        f"distributed_type is missing; write 'NO', {', '.join(TYPES[1:])}": kind is None,
        "distributed_type=MULTI_CPU starts one process without mpirun; write MULTI_GPU, which runs on gloo here": (
            kind == "MULTI_CPU"
        ),
        f"distributed_type={kind} is not supported; use {', '.join(TYPES)}": (
            kind not in (None, "MULTI_CPU", "MEGATRON_LM", *TYPES)
        ),
        f"distributed_type=MEGATRON_LM: {MEGATRON_WAY}": kind == "MEGATRON_LM",
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
        f"machine_rank={rank} with num_machines={machines}: ranks count from 0, so that the last one is "
        f"{machines} - 1 = {machines - 1}; write 0 to {machines - 1}": machines >= 1 and not 0 <= rank < machines,
        f"main_process_port={port!r} is no port; write a whole number, as 29500": (
            isinstance(port, str) and not (port.isascii() and port.isdigit())
        ),
        f"compute_environment={values.get('compute_environment')} is not supported; write LOCAL_MACHINE": (
            values.get("compute_environment") not in (None, "LOCAL_MACHINE")
        ),
        f"mixed_precision={precision} is no precision; use no, fp16 or bf16": (
            precision not in (None, "no", "fp16", "bf16", "fp8")
        ),
        "mixed_precision=fp8 is chosen in the config; remove it and pass --mixed_precision fp8": precision == "fp8",
        FP16_WAY: precision == "fp16" and kind in TYPES and kind not in SCALED_TYPES,
        "tpu_use_cluster=true is not supported; remove it": bool(values.get("tpu_use_cluster")),
    }
    return [line for line, applies in rules.items() if applies]


def _check_fsdp(values: dict[str, Any], fsdp: dict[str, Any]) -> list[str]:
    if not fsdp:
        return ["distributed_type=FSDP without fsdp_config; write one, as in accelerate_configs/fsdp2.yaml"]
    version, policy = fsdp.get("fsdp_version"), fsdp.get("fsdp_auto_wrap_policy")
    rules = {
        "fsdp_config.fsdp_version is missing, and Accelerate would take 1; write 2 (or 1)": version is None,
        "fsdp_config.fsdp_auto_wrap_policy is missing, and the whole model would be gathered at once; "
        "write TRANSFORMER_BASED_WRAP (or NO_WRAP if that is meant)": policy is None,
        "fsdp_config.fsdp_cpu_ram_efficient_loading is missing, and `accelerate launch` would take true; "
        "write false, or true to load on rank 0 alone": "fsdp_cpu_ram_efficient_loading" not in fsdp,
        "fsdp_config.fsdp_auto_wrap_policy=SIZE_BASED_WRAP needs a size; write fsdp_min_num_params": (
            policy == "SIZE_BASED_WRAP" and "fsdp_min_num_params" not in fsdp
        ),
        f"fsdp_config.fsdp_min_num_params is ignored under {policy}; remove it, or write SIZE_BASED_WRAP": (
            policy in ("TRANSFORMER_BASED_WRAP", "NO_WRAP") and "fsdp_min_num_params" in fsdp
        ),
        f"fsdp_config.fsdp_transformer_layer_cls_to_wrap is ignored under {policy}; "
        "remove it, or write TRANSFORMER_BASED_WRAP": (
            policy in ("SIZE_BASED_WRAP", "NO_WRAP") and "fsdp_transformer_layer_cls_to_wrap" in fsdp
        ),
    }
    mistakes = [line for line, applies in rules.items() if applies]
    mistakes += _other_version(fsdp, 2, ONLY_FSDP1) + _check_reshard2(fsdp) if version == 2 else []
    return mistakes + (_check_reshard1(fsdp) + _check_fsdp1(values, fsdp) if version == 1 else [])


def _check_reshard2(fsdp: dict[str, Any]) -> list[str]:
    """Version 2 takes a flag; Accelerate stops at the words of version 1."""
    value = fsdp.get("fsdp_reshard_after_forward")
    if not isinstance(value, str):
        return []
    way = {"FULL_SHARD": "write true", "SHARD_GRAD_OP": "write false"}.get(value, "write true or false, or use hsdp")
    return [f"fsdp_config.fsdp_reshard_after_forward={value} is a word of fsdp_version=1; {way}"]


def _check_reshard1(fsdp: dict[str, Any]) -> list[str]:
    """Version 1 never reads the key, as the launcher always sets a sharding strategy; the same word is harmless."""
    value, sharding = fsdp.get("fsdp_reshard_after_forward"), fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")
    if not isinstance(value, str):
        return _other_version(fsdp, 1, ONLY_FSDP2)
    line = f"fsdp_config.fsdp_reshard_after_forward={value} is ignored under fsdp_version=1"
    return [f"{line}; write fsdp_sharding_strategy: {value}"] if value != sharding else []


def _other_version(fsdp: dict[str, Any], version: int, other: dict[str, str]) -> list[str]:
    """Keys of the other FSDP version, which Accelerate passes over."""
    return [
        f"fsdp_config.{key} is ignored under fsdp_version={version}; "
        + (f"write {instead}" if instead else "remove the line")
        for key, instead in other.items()
        if key in fsdp
    ]


def _check_fsdp1(values: dict[str, Any], fsdp: dict[str, Any]) -> list[str]:
    sharding, processes = fsdp.get("fsdp_sharding_strategy", "FULL_SHARD"), values.get("num_processes")
    rules = {
        "fsdp_config.fsdp_use_orig_params=false cannot hold frozen beside trained weights, nor say their names; "
        "write true": fsdp.get("fsdp_use_orig_params") is False,
        "fsdp_config.fsdp_cpu_ram_efficient_loading=true with fsdp_sync_module_states=false: "
        "only rank 0 would have the weights; write fsdp_sync_module_states: true": (
            fsdp.get("fsdp_cpu_ram_efficient_loading") is True and fsdp.get("fsdp_sync_module_states") is False
        ),
        f"fsdp_config.fsdp_sharding_strategy={sharding} takes its groups from the machines, and this is one; "
        "use the hsdp strategy": "HYBRID" in sharding and (values.get("num_machines") or 1) < 2,
        f"fsdp_version=1 with num_processes=1 turns {sharding} into NO_SHARD; use fsdp_version: 2, or single": (
            processes == 1 and sharding != "NO_SHARD"
        ),
    }
    return [line for line, applies in rules.items() if applies]


def mesh_sizes(values: dict[str, Any]) -> dict[str, int]:
    """Sizes of the device mesh by axis, but for pp, as written; empty when the config has none."""
    written = values.get("parallelism_config") or {}
    return {axis: int(written[key]) for axis in AXES if (key := axis_key(axis)) in written}


def axis_key(axis: str) -> str:
    """Accelerate's key for the size of an axis of its mesh."""
    return f"parallelism_config_{axis}_size"


def _check_mesh(values: dict[str, Any], pp_size: int) -> list[str]:
    written, processes, kind = mesh_sizes(values), values.get("num_processes"), str(values["distributed_type"])
    if (not written and pp_size == 1) or processes is None:
        return []
    stages = {"pp": pp_size} if pp_size > 1 else {}
    sizes = fitted(stages | (written or {data_axis(kind): -1}), processes)
    if isinstance(sizes, str):
        return [f"parallelism_config: {sizes}" if written else sizes]
    mistakes = [f"parallelism_config: {line}" for line in combination_mistakes(kind, sizes)]
    for axis in ("cp", "sp"):
        given = values.get("parallelism_config") or {}
        how = [key for key in given if key.startswith(f"parallelism_config_{axis}_")]
        mistakes += [
            f"{key}: rows are cut by the training script, which keeps packed documents apart, and not by Accelerate; "
            "remove the line"
            for key in how
            if getattr(sizes, axis) > 1 and not key.endswith("_size")
        ]
    if kind == "FSDP" and (values.get("fsdp_config") or {}).get("fsdp_version") == 1:
        mistakes.append("parallelism_config needs fsdp_version: 2; under 1 Accelerate builds no mesh")
    if sizes.tp > 1 and (values.get("fsdp_config") or {}).get("fsdp_cpu_ram_efficient_loading"):
        mistakes.append(
            f"fsdp_config.fsdp_cpu_ram_efficient_loading=true with tp={sizes.tp}: each rank keeps its part of every "
            "matrix, and needs the weights; write false"
        )
    fsdp = values.get("fsdp_config") or {}
    if pp_size > 1:
        wanted = {
            "fsdp_offload_params": False, "fsdp_cpu_ram_efficient_loading": False, "fsdp_reshard_after_forward": False,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }  # fmt: skip
        mistakes += [
            f"fsdp_config.{key}={fsdp[key]} with pp={pp_size}: a stage's layers are cut one by one and stay gathered "
            f"for a step; write {str(value).lower() if value is False else value}, as in pp_fsdp2"
            for key, value in wanted.items()
            if key in fsdp and fsdp[key] != value
        ]
    if kind == "FSDP" and pp_size > 1 and sizes.parts > 1:
        mistakes.append(f"{sizes} under FSDP is not proved; use MULTI_GPU, or leave out pp")
    if kind in ("FSDP", "DEEPSPEED") and (written or pp_size > 1) and sizes.dp_shard * sizes.parts < 2:
        mistakes.append(
            f"parallelism_config_dp_shard_size={sizes.dp_shard} leaves nothing to shard over; write at least 2"
        )
    return mistakes


def _check_deepspeed(values: dict[str, Any], inline: dict[str, Any]) -> list[str]:
    if not inline:
        return ["distributed_type=DEEPSPEED without deepspeed_config; write one, as in accelerate_configs/zero2.yaml"]
    machines = values.get("num_machines") or 1
    mistakes = []
    if machines > 1 and "deepspeed_multinode_launcher" not in inline:
        mistakes.append(
            f"num_machines={machines} would start DeepSpeed's own launcher (pdsh); "
            "write deepspeed_multinode_launcher: standard in deepspeed_config"
        )
    file = inline.get("deepspeed_config_file")
    stage = inline.get("zero_stage")
    if file is not None:
        mistakes += _beside_file(values, inline)
        try:
            content = read_json(file)
        except ConfigError as error:
            return mistakes + error.mistakes
        mistakes += json_mistakes(content)
        zero = {} if mistakes else content.get("zero_optimization") or {}
        part, processes = zero.get("zero_hpz_partition_size", 1), values.get("num_processes")
        if processes and processes % part:
            mistakes.append(
                f"zero_hpz_partition_size={part} does not divide num_processes={processes}; "
                "write how many processes a machine has"
            )
        if (plus := zero_plus(zero)) and mesh_sizes(values).get("tp", 1) > 1:
            line = "DeepSpeed takes its groups from all ranks, and not from those of tp; remove it"
            mistakes.append(f"{' and '.join(plus)}: {line}")
        stage = (content.get("zero_optimization") or {}).get("stage") if not mistakes else None
    else:
        mistakes += _check_inline(inline)
    if stage == 3 and inline.get("zero3_init_flag"):  # Accelerate puts it off by itself under the other stages
        mistakes.append(
            "deepspeed_config.zero3_init_flag=True is refused: weights come from one place and never from sharded "
            "init; write false, and for a model larger than memory use fsdp2 with fsdp_cpu_ram_efficient_loading"
        )
    if stage == 3 and "zero3_init_flag" not in inline:
        # Without the key DeepSpeedPlugin takes true under stage 3, and each rank would build its share by itself.
        mistakes.append("deepspeed_config.zero3_init_flag is missing, and Accelerate would take true; write false")
    return mistakes


def _beside_file(values: dict[str, Any], inline: dict[str, Any]) -> list[str]:
    mistakes = [
        f"deepspeed_config.{key} beside deepspeed_config_file is refused by Accelerate; write it into the JSON"
        for key in NOT_BESIDE_FILE
        if key in inline
    ]
    if values.get("mixed_precision") is not None:
        mistakes.append(
            f"mixed_precision={values['mixed_precision']} beside deepspeed_config_file is refused by Accelerate; "
            "remove it from the YAML and say it in the config"
        )
    return mistakes


def _check_inline(inline: dict[str, Any]) -> list[str]:
    stage, param = inline.get("zero_stage"), inline.get("offload_param_device", "none")
    rules = {
        "deepspeed_config.zero_stage is missing, and Accelerate would take 2; write 1, 2 or 3": stage is None,
        f"deepspeed_config.offload_param_device={param} needs zero_stage: 3, not {stage}; remove it, or write 3": (
            param != "none" and stage in (1, 2)
        ),
    }
    mistakes = [line for line, applies in rules.items() if applies]
    for what in ("optimizer", "param"):
        if inline.get(f"offload_{what}_device") == "nvme" or f"offload_{what}_nvme_path" in inline:
            mistakes.append(
                f"deepspeed_config.offload_{what}_device=nvme: `accelerate launch` does not pass the nvme path on; "
                f"write a DeepSpeed JSON with zero_optimization.offload_{what} and name it in deepspeed_config_file"
            )
    return mistakes
