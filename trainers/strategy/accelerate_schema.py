"""What may stand in an Accelerate YAML: every key with its type and values, and the reason where one is refused.

Accelerate ignores an unknown nested key in silence and trains something else; here each is a mistake. No torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def is_empty(value: Any) -> bool:
    """Whether a section or list holds nothing, as `accelerate config` and old files write many."""
    return value in ({}, [])


def _never(value: Any) -> bool:
    return False


@dataclass(frozen=True)
class Key:
    """What one key may hold.

    Args:
        types: Python types of its value; empty for a key that is always refused.
        choices: the only values, empty for any of the types.
        words: the only texts, where other types may stand too.
        inside: the keys of the mapping that it holds.
        least: smallest number.
        most: largest number.
        why: why the key, or any value but `choices`, is refused, and the way out.
        idle: says of a value whether it asks for nothing, so that it passes even where the key is refused.
        unread: why a value that passes has no effect; empty for one that has.
        asks: with `unread`: whether a value asks for something, so that the user is warned.
    """

    types: tuple[type, ...] = ()
    choices: tuple[Any, ...] = ()
    words: tuple[str, ...] = ()
    inside: Mapping[str, Key] | None = None
    least: int | None = None
    most: int | None = None
    why: str = ""
    idle: Callable[[Any], bool] = _never
    unread: str = ""
    asks: Callable[[Any], bool] = bool


TEXT, FLAG, WHOLE, LIST = Key((str,)), Key((bool,)), Key((int,)), Key((list,))
COUNT = Key((int,), least=1)
MAX_PROCESSES = 65_536
"""More than any cluster has; a larger number is a slip, and loops over processes would never end."""
PROCESSES = Key((int,), most=MAX_PROCESSES)
SIZE = Key((int,), least=1, most=MAX_PROCESSES, idle=lambda value: value == -1)  # the rest

_COMPILE = "the launcher's torch.compile is not supported; use torch_compile in the config"

_NO_DYNAMO = Key((str,), ("NO", "no"), why=_COMPILE)
_NO_COMPILE = "dynamo_backend is NO; use torch_compile in the config"
# Under the backend NO, which is also the default, the launcher hands the others on and nobody acts on them.
_DYNAMO: dict[str, Key] = {
    "dynamo_backend": _NO_DYNAMO,
    "dynamo_mode": Key((str,), unread=_NO_COMPILE, asks=lambda value: value != "default"),
    "dynamo_use_fullgraph": Key((bool,), unread=_NO_COMPILE),
    "dynamo_use_dynamic": Key((bool,), unread=_NO_COMPILE),
    "dynamo_use_regional_compilation": Key((bool,), unread=_NO_COMPILE),
}
_NO_TPU = "there is no TPU; remove the line"
_TPU = Key(why="TPU pods are not supported; remove it", idle=is_empty)

_FP8 = "fp8 is chosen in the config; remove it and pass --mixed_precision fp8"
MEGATRON_WAY = "Accelerate's Megatron-LM plugin builds a model of its own with new weights; use --strategy 3d"

# Accelerate 1.15, ClusterConfig.
TOP: dict[str, Key] = {
    "compute_environment": TEXT,
    "distributed_type": TEXT,
    "num_processes": PROCESSES,
    "num_machines": PROCESSES,
    "machine_rank": PROCESSES,
    "main_process_ip": TEXT,
    "main_process_port": Key((int, str), least=0),
    "main_training_function": Key(
        (str,),
        unread="only notebooks and TPUs are started by a function; remove the line",
        asks=lambda value: value != "main",
    ),
    "mixed_precision": TEXT,
    "use_cpu": FLAG,
    "debug": FLAG,
    "downcast_bf16": Key((str, bool), unread=_NO_TPU, asks=lambda value: value not in ("no", False)),
    "gpu_ids": TEXT,
    "rdzv_backend": TEXT,
    "same_network": FLAG,
    "enable_cpu_affinity": FLAG,
    "tpu_env": LIST,
    "tpu_use_cluster": FLAG,
    "tpu_use_sudo": FLAG,
    "fsdp_config": Key((dict,)),
    "deepspeed_config": Key((dict,)),
    "parallelism_config": Key((dict,)),
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_vm": _TPU,
    "command_file": _TPU,
    "commands": _TPU,
    "fp8_config": Key(why=_FP8, idle=is_empty),
    "dynamo_config": Key((dict,), inside=_DYNAMO),
    "dynamo_backend": _NO_DYNAMO,
    "megatron_lm_config": Key(why=MEGATRON_WAY, idle=is_empty),
    "mpirun_config": Key(
        why="mpirun is not supported; remove it and use MULTI_GPU, which runs on gloo here", idle=is_empty
    ),
}
FLAGS_ONLY = ("max_restarts", "monitor_interval", "rdzv_conf")

_RECOMPUTE = "its recompute is not the same for all strategies; use gradient_checkpointing: true in the config"

SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2")

FSDP: dict[str, Key] = {
    "fsdp_version": Key((int,), (1, 2)),
    "fsdp_auto_wrap_policy": Key((str,), ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")),
    "fsdp_transformer_layer_cls_to_wrap": TEXT,
    "fsdp_min_num_params": COUNT,
    # A flag under version 2. Under 1 `accelerate config` writes the sharding strategy here, where nobody reads it.
    "fsdp_reshard_after_forward": Key((bool, str), words=SHARDINGS),
    "fsdp_sharding_strategy": Key((str,), SHARDINGS),
    "fsdp_backward_prefetch": Key((str,), ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")),
    "fsdp_forward_prefetch": FLAG,
    "fsdp_offload_params": FLAG,
    "fsdp_use_orig_params": FLAG,
    "fsdp_sync_module_states": FLAG,
    "fsdp_cpu_ram_efficient_loading": FLAG,
    # Accelerate's own checkpoints resume FSDP1 wrongly, so that nothing here writes or reads one, and neither type does
    # anything: ours are always sharded, exports always whole. `accelerate config` writes one of these by default.
    "fsdp_state_dict_type": Key(
        (str,),
        ("FULL_STATE_DICT", "SHARDED_STATE_DICT"),
        why="checkpoints are Tunesmith's own and exports are whole; remove the line",
        unread="checkpoints are Tunesmith's own, always sharded, and exports are whole; remove the line",
    ),
    "fsdp_activation_checkpointing": Key((bool,), (False,), why=_RECOMPUTE),
    "fsdp_activation_checkpointing_offload": Key((bool,), (False,), why=_RECOMPUTE),
    "fsdp_ignored_modules": Key(why="the gradients of ignored modules are not summed over the ranks; remove the line"),
}
# Each is ignored in silence under the other version; beside it the key that means the same there.
ONLY_FSDP1 = {
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
    "fsdp_use_orig_params": "",
    "fsdp_sync_module_states": "",
    "fsdp_backward_prefetch": "",
    "fsdp_forward_prefetch": "",
}
ONLY_FSDP2 = {"fsdp_reshard_after_forward": "fsdp_sharding_strategy: FULL_SHARD (true) or SHARD_GRAD_OP (false)"}

_BY_BATCH = "accumulation is derived from global_batch_size; remove the line"
OWN_EXPORT = "the export is Tunesmith's own, in the dtype that it says; remove the line"
_ONE_NETWORK = (
    "it belongs to DeepSpeed's own launcher; write deepspeed_multinode_launcher: standard and remove the line"
)

DEEPSPEED: dict[str, Key] = {
    "deepspeed_config_file": TEXT,
    "zero_stage": Key((int,), (1, 2, 3), why="ZeRO has the stages 1, 2 and 3; stage 0 is the ddp strategy"),
    "offload_optimizer_device": Key((str,), ("none", "cpu", "nvme")),
    "offload_param_device": Key((str,), ("none", "cpu", "nvme")),
    "offload_optimizer_nvme_path": TEXT,
    "offload_param_nvme_path": TEXT,
    "gradient_accumulation_steps": Key((int, str), (1, "auto"), why=_BY_BATCH),
    "gradient_clipping": Key(
        (str, int, float),
        ("auto",),
        why="max_grad_norm of the config says where gradients are clipped; remove the line",
    ),
    "zero3_init_flag": FLAG,
    "zero3_save_16bit_model": Key((bool,), unread=OWN_EXPORT),
    "deepspeed_multinode_launcher": Key((str,), ("standard",), why="only torchrun's is supported; write standard"),
    "deepspeed_hostfile": Key(why=_ONE_NETWORK),
    "deepspeed_exclusion_filter": Key(why=_ONE_NETWORK),
    "deepspeed_inclusion_filter": Key(why=_ONE_NETWORK),
    "deepspeed_moe_layer_cls_names": TEXT,
}
# Accelerate refuses these beside `deepspeed_config_file`: DeepSpeedPlugin._deepspeed_config_checks.
NOT_BESIDE_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)

PARALLELISM: dict[str, Key] = {
    "parallelism_config_dp_replicate_size": SIZE,
    "parallelism_config_dp_shard_size": SIZE,
    "parallelism_config_tp_size": SIZE,
    "parallelism_config_cp_size": SIZE,
    "parallelism_config_cp_backend": TEXT,
    "parallelism_config_cp_comm_strategy": TEXT,
    "parallelism_config_sp_size": SIZE,
    "parallelism_config_sp_backend": TEXT,
    "parallelism_config_sp_seq_length": WHOLE,
    "parallelism_config_sp_seq_length_is_variable": FLAG,
    "parallelism_config_sp_attn_implementation": TEXT,
}


def key_mistakes(
    values: Mapping[str, Any], keys: Mapping[str, Key], where: str, owner: str = "Accelerate"
) -> list[str]:
    """What the keys and single values have wrong, at any depth, a line each.

    Args:
        values: the mapping as it was read.
        keys: what may stand in it.
        where: path of the mapping, which begins each line; empty at the top.
        owner: whose keys they are.
    """
    found = []
    for name, value in values.items():
        path = f"{where}.{name}" if where else name
        if name not in keys:
            found.append(f"{path}: {_unknown(name, list(keys), owner)}")
        elif value is None and where:
            found.append(f"{path} is empty; write a value or remove the line")
        elif value is not None:
            found += _value_mistakes(path, value, keys[name], owner)
    return found


def unread_choices(values: Mapping[str, Any], keys: Mapping[str, Key], where: str = "") -> list[str]:
    """A line for each value that was accepted and that nobody acts on.

    Args:
        values: a mapping without mistakes.
        keys: what may stand in it.
        where: path of the mapping; empty at the top.
    """
    lines = []
    for name, value in values.items():
        path, key = f"{where}.{name}" if where else name, keys.get(name, Key())
        if key.unread and key.asks(value):
            lines.append(f"{path} is ignored: {key.unread}")
        elif key.inside is not None and isinstance(value, dict):
            lines += unread_choices(value, key.inside, path)
    return lines


def _unknown(name: str, known: list[str], owner: str) -> str:
    """The rest of the line for a key that nobody reads."""
    if owner == "DeepSpeed" and name.startswith("_"):
        return "JSON has no comments; remove it"
    longer = [key for key in known if key.endswith(f"_{name}")]
    if len(longer) == 1:
        return f"the {owner} key has a prefix; write {longer[0]}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"unknown {owner} key {name}; " + (f"did you mean {near[0]}?" if near else "remove the line")


def _value_mistakes(path: str, value: Any, key: Key, owner: str) -> list[str]:
    shown = f"{path}={value!r}"
    shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
    if key.idle(value):
        return []
    if not key.types:
        return [f"{path} is refused: {key.why}"]
    if not _has_type(value, key.types):
        if value is False and str in key.types:
            return [f"{shown}: YAML reads a bare NO as false; put it in quotes"]
        wanted = " or ".join(kind.__name__ for kind in key.types)
        return [f"{shown} is a {type(value).__name__}; write a {wanted}"]
    if key.choices and not any(type(value) is type(choice) and value == choice for choice in key.choices):
        listed = ", ".join(str(choice) for choice in key.choices)
        return [f"{shown} is refused: {key.why}" if key.why else f"{shown} is not one of its values; use {listed}"]
    if key.words and isinstance(value, str) and value not in key.words:
        kinds = " or ".join(kind.__name__ for kind in key.types if kind is not str)
        return [f"{shown} is a str; write a {kinds}, or {' or '.join(key.words)}"]
    if key.least is not None and isinstance(value, int | float) and value < key.least:
        return [f"{shown} must be at least {key.least}"]
    if key.most is not None and isinstance(value, int | float) and value > key.most:
        return [f"{shown} must be at most {key.most}"]
    if key.inside is not None and isinstance(value, dict):
        return key_mistakes(value, key.inside, path, owner)
    return []


def _has_type(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
