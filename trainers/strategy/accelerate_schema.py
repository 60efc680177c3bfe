"""Pydantic models of an Accelerate YAML. Imports no torch.

`tests/unit/strategy/test_accelerate_files.py` compares the keys with those of the installed Accelerate.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from annotated_types import Predicate
from pydantic import Field, model_validator

from trainers.strategy import topics
from trainers.strategy.deepspeed_schema import DeepSpeedJson
from trainers.strategy.schema import (
    MAX_PROCESSES,
    Absent,
    Empty,
    Ignored,
    OnlyFalse,
    Processes,
    Refused,
    Section,
    key,
)

LAUNCHER_FLAGS = ("max_restarts", "monitor_interval", "rdzv_conf")
MEGATRON_PROBLEM = "Accelerate's Megatron-LM plugin builds a model of its own with new weights"
_NO_COMPILE = Ignored("dynamo_backend is NO; use torch_compile in the config")
_NO_TPU = Ignored("there is no TPU; remove the line", lambda value: value not in ("no", False))
_NO_TPU_PODS = Refused("TPU pods are not supported")
_NO_DYNAMO = Refused("the launcher's torch.compile is not supported", "use torch_compile in the config")


def _is_port(value: int | str) -> bool:
    return bool(re.fullmatch("[0-9]{1,5}", str(value))) and int(value) < 2**16


class DynamoConfig(Section):
    """`dynamo_config`; with the backend NO, which is also the default, the other keys have no effect."""

    dynamo_backend: Literal["NO", "no"] | None = key(_NO_DYNAMO)
    dynamo_mode: str | None = key(Ignored(_NO_COMPILE.reason, lambda value: value != "default"))
    dynamo_use_fullgraph: bool | None = key(_NO_COMPILE)
    dynamo_use_dynamic: bool | None = key(_NO_COMPILE)
    dynamo_use_regional_compilation: bool | None = key(_NO_COMPILE)


_RECOMPUTE = Refused(
    "its recompute is not the same for all strategies",
    f"use gradient_checkpointing: true in the config; {topics.MEMORY}",
)
Sharding = Literal[
    "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2"
]


class FsdpConfig(Section):
    """`fsdp_config`."""

    fsdp_version: Annotated[int, Field(ge=1, le=2)] | None = key(Refused("FSDP versions are 1 and 2", "write 2"))
    fsdp_auto_wrap_policy: Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"] | None = None
    fsdp_transformer_layer_cls_to_wrap: str | None = None
    fsdp_min_num_params: Annotated[int, Field(ge=1)] | None = None
    # A flag under version 2. Under version 1, `accelerate config` writes the sharding strategy here, which is not read.
    fsdp_reshard_after_forward: bool | Sharding | None = None
    fsdp_sharding_strategy: Sharding | None = None
    fsdp_backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"] | None = None
    fsdp_forward_prefetch: bool | None = None
    fsdp_offload_params: bool | None = None
    fsdp_use_orig_params: bool | None = None
    fsdp_sync_module_states: bool | None = None
    # `accelerate config` and `accelerate launch` choose true by default.
    fsdp_cpu_ram_efficient_loading: bool | None = key(
        Ignored("every process reads only what it keeps; write false, or remove the line")
    )
    # Has no effect: Tunesmith's checkpoints are always sharded and its exports full, as Accelerate's own checkpoints
    # resume FSDP1 incorrectly. `accelerate config` writes one of these two values by default.
    fsdp_state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT"] | None = key(
        Refused("checkpoints are Tunesmith's own and exports are full", f"remove the line; {topics.CHECKPOINTS}"),
        Ignored("checkpoints are Tunesmith's own, always sharded, and exports are full; remove the line"),
    )
    fsdp_activation_checkpointing: OnlyFalse = key(_RECOMPUTE)
    fsdp_activation_checkpointing_offload: OnlyFalse = key(_RECOMPUTE)
    fsdp_ignored_modules: Absent = key(
        Refused("the gradients of ignored modules are not summed over the ranks", "remove the line")
    )


_OWN_LAUNCHER = Refused(
    "it belongs to DeepSpeed's own launcher",
    f"write deepspeed_multinode_launcher: standard and remove the line; {topics.MACHINES}",
)


class DeepSpeedConfig(Section):
    """`deepspeed_config`."""

    deepspeed_config_file: str | None = None
    zero_stage: Annotated[int, Field(ge=1, le=3)] | None = key(
        Refused("ZeRO stages are 1, 2 and 3", f"write one as a number; stage 0 is the ddp strategy; {topics.ZERO}")
    )
    offload_optimizer_device: Literal["none", "cpu", "nvme"] = "none"
    offload_param_device: Literal["none", "cpu", "nvme"] = "none"
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=1)] | Literal["auto"] | None = key(
        Refused("accumulation is derived from global_batch_size", f"remove the line; {topics.ACCUMULATION}")
    )
    gradient_clipping: Literal["auto"] | None = key(
        Refused("max_grad_norm of the config sets gradient clipping", "remove the line")
    )
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = key(
        Ignored("the export is Tunesmith's own, in the dtype that it says; remove the line")
    )
    deepspeed_multinode_launcher: Literal["standard"] | None = key(
        Refused("only torchrun's is supported", f"write standard; {topics.MACHINES}")
    )
    deepspeed_hostfile: Absent = key(_OWN_LAUNCHER)
    deepspeed_exclusion_filter: Absent = key(_OWN_LAUNCHER)
    deepspeed_inclusion_filter: Absent = key(_OWN_LAUNCHER)
    deepspeed_moe_layer_cls_names: str | None = None

    @classmethod
    def explain_unknown(cls, name: str) -> tuple[str, str]:
        """Also recognizes keys of a DeepSpeed JSON."""
        if name in DeepSpeedJson.model_fields:
            return (
                "is a key of a DeepSpeed JSON, and Accelerate ignores it here",
                "write it into a JSON file and name that in deepspeed_config_file",
            )
        return super().explain_unknown(name)


# Accelerate refuses these together with `deepspeed_config_file`; see DeepSpeedPlugin._deepspeed_config_checks.
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

Size = Annotated[int, Field(ge=-1, le=MAX_PROCESSES), Predicate(bool)]
_NO_SIZE = Refused("it is not a number of processes", f"write 1 to {MAX_PROCESSES}, or -1 for the rest")


class ParallelismConfig(Section):
    """`parallelism_config`."""

    parallelism_config_dp_replicate_size: Size | None = key(_NO_SIZE)
    parallelism_config_dp_shard_size: Size | None = key(_NO_SIZE)
    parallelism_config_tp_size: Size | None = key(_NO_SIZE)
    parallelism_config_cp_size: Size | None = key(_NO_SIZE)
    parallelism_config_cp_backend: str | None = None
    parallelism_config_cp_comm_strategy: str | None = None
    parallelism_config_sp_size: Size | None = key(_NO_SIZE)
    parallelism_config_sp_backend: str | None = None
    parallelism_config_sp_seq_length: int | None = None
    parallelism_config_sp_seq_length_is_variable: bool | None = None
    parallelism_config_sp_attn_implementation: str | None = None


SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config")


class AccelerateConfig(Section):
    """The whole file; corresponds to `ClusterConfig` of Accelerate 1.15."""

    compute_environment: Literal["LOCAL_MACHINE"] | None = None
    distributed_type: str | None = None
    num_processes: Annotated[Processes, Field(ge=1)] | None = None
    num_machines: Processes | None = None
    machine_rank: Processes | None = None
    main_process_ip: str | None = None
    main_process_port: Annotated[int | str, Predicate(_is_port)] | None = key(
        Refused("it is not a port", "write 0 to 65535, such as 29500")
    )
    main_training_function: str | None = key(
        Ignored("only notebooks and TPUs are started by a function; remove the line", lambda value: value != "main")
    )
    mixed_precision: str | None = None
    use_cpu: bool | None = None
    debug: bool | None = None
    downcast_bf16: str | bool | None = key(_NO_TPU)
    gpu_ids: str | None = None
    # Accelerate reads it from its flag alone, whose default is static; `accelerate config` writes static.
    rdzv_backend: Literal["static"] | None = key(
        Refused("Accelerate does not read it from a file", f"remove it and pass --rdzv_backend; {topics.LAUNCHING}")
    )
    same_network: bool | None = None
    enable_cpu_affinity: bool | None = None
    tpu_env: list[Any] | None = None
    tpu_use_cluster: OnlyFalse = key(_NO_TPU_PODS)
    tpu_use_sudo: bool | None = None
    fsdp_config: FsdpConfig | None = None
    deepspeed_config: DeepSpeedConfig | None = None
    parallelism_config: ParallelismConfig | None = None
    tpu_name: Empty = key(_NO_TPU_PODS)
    tpu_zone: Empty = key(_NO_TPU_PODS)
    tpu_vm: Empty = key(_NO_TPU_PODS)
    command_file: Empty = key(_NO_TPU_PODS)
    commands: Empty = key(_NO_TPU_PODS)
    fp8_config: Empty = key(Refused("fp8 is chosen in the config", "remove it and pass --mixed_precision fp8"))
    dynamo_config: DynamoConfig | None = None
    dynamo_backend: Literal["NO", "no"] | None = key(_NO_DYNAMO)
    megatron_lm_config: Empty = key(Refused(MEGATRON_PROBLEM, f"use --strategy 3d; {topics.FRAMEWORKS}"))
    mpirun_config: Empty = key(
        Refused("mpirun is not supported", f"remove it and use MULTI_GPU, which runs on gloo here; {topics.MACHINES}")
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_empty_sections(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value != {} or name not in SECTIONS}

    @classmethod
    def explain_unknown(cls, name: str) -> tuple[str, str]:
        """Also recognizes flags of `accelerate launch`."""
        if name in LAUNCHER_FLAGS:
            return "is a flag of `accelerate launch` and no key of its YAML", f"pass --{name}"
        return super().explain_unknown(name)
