"""Each trap of Accelerate's YAML is one case: what Accelerate would ignore or fill in by itself is refused."""

from __future__ import annotations

import inspect
import re
from typing import Any, Literal, get_args, get_origin

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import constants, launch
from accelerate.utils.dataclasses import DeepSpeedPlugin

from trainers.strategy.accelerate_rules import ONLY_FSDP1, check
from trainers.strategy.accelerate_schema import (
    LAUNCHER_FLAGS,
    NOT_BESIDE_FILE,
    AccelerateConfig,
    DeepSpeedConfig,
    FsdpConfig,
    ParallelismConfig,
)
from trainers.strategy.schema import Section

DDP: dict[str, Any] = {"distributed_type": "MULTI_GPU", "num_processes": 2}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": False,
}
FSDP1 = FSDP2 | {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"}
MESH = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}


def without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def fsdp(config: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": config} | others


def fsdp2(**keys: Any) -> dict[str, Any]:
    return fsdp(FSDP2 | keys)


def fsdp1(**keys: Any) -> dict[str, Any]:
    return fsdp(FSDP1 | keys)


def hsdp(**sizes: Any) -> dict[str, Any]:
    mesh = MESH | {f"parallelism_config_{axis}": size for axis, size in sizes.items()}
    return fsdp(FSDP2, num_processes=4, parallelism_config=mesh)


def zero(**inline: Any) -> dict[str, Any]:
    return {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 2} | inline}


WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "top": [
        (DDP | {"num_proceses": 2}, "num_proceses: unknown Accelerate key num_proceses; did you mean num_processes?"),
        (
            DDP | {"max_restarts": 3},
            "max_restarts is a flag of `accelerate launch` and no key of its YAML; pass --max_",
        ),
        (DDP | {"monitor_interval": 1}, "monitor_interval is a flag"),
        (
            DDP | {"rdzv_backend": "c10d"},
            "rdzv_backend='c10d' is refused: Accelerate does not read it from a file; remove it and pass "
            "--rdzv_backend; see docs/topics.md#launching",
        ),
        (DDP | {"rdzv_conf": "x"}, "rdzv_conf is a flag"),
        (DDP | {"num_processes": "two"}, "num_processes='two' is refused; write a whole number"),
        (DDP | {"num_processes": True}, "num_processes=true is refused; write a whole number"),
        (DDP | {"num_processes": 1}, "distributed_type=MULTI_GPU with num_processes=1"),
        ({"num_processes": 2}, "distributed_type is missing"),
        ({"distributed_type": "MULTI_GPU"}, "num_processes is missing"),
        (
            {"distributed_type": False, "num_processes": 1},
            "distributed_type=false: YAML reads a bare NO as false; put it",
        ),
        (DDP | {"distributed_type": "MULTI_CPU"}, "distributed_type=MULTI_CPU starts one process without mpirun"),
        (DDP | {"distributed_type": "NO"}, "distributed_type='NO' is one process, num_processes=2"),
        (
            DDP | {"distributed_type": "TPU"},
            "distributed_type=TPU is not supported; use NO, MULTI_GPU, FSDP, DEEPSPEED",
        ),
        (DDP | {"num_processes": 3, "num_machines": 2}, "num_processes=3 is not divisible by num_machines=2"),
        (
            DDP | {"compute_environment": "AMAZON_SAGEMAKER"},
            "compute_environment='AMAZON_SAGEMAKER' is refused; write 'LOCAL_MACHINE'",
        ),
        (DDP | {"mixed_precision": "bf61"}, "mixed_precision=bf61 is not a precision"),
        (DDP | {"mixed_precision": False}, "mixed_precision=false: YAML reads a bare NO as false"),
        (
            DDP | {"mixed_precision": "fp8"},
            "mixed_precision=fp8 is chosen in the config; remove it and pass --mixed_precision fp8",
        ),
        (DDP | {"fp8_config": {"backend": "TE"}}, "fp8_config is refused: fp8 is chosen in the config"),
        (
            DDP | {"dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            "dynamo_config.dynamo_backend='INDUCTOR' is refused: the launcher's torch.compile",
        ),
        (
            DDP | {"dynamo_backend": "INDUCTOR"},
            "dynamo_backend='INDUCTOR' is refused: the launcher's torch.compile is not supported",
        ),
        (DDP | {"dynamo_backend": False}, "dynamo_backend=false: YAML reads a bare NO as false; put it in quotes"),
        (DDP | {"dynamo_config": {"dynamo_bakend": "NO"}}, "dynamo_config.dynamo_bakend: unknown Accelerate key"),
        (
            DDP | {"megatron_lm_config": {"megatron_lm_tp_degree": 2}},
            "megatron_lm_config is refused: Accelerate's Megatron-LM plugin builds a model of its own with new "
            "weights; use --strategy 3d",
        ),
        (DDP | {"mpirun_config": {"mpirun_ccl": "1"}}, "mpirun_config is refused: mpirun is not supported"),
        (DDP | {"tpu_name": "pod"}, "tpu_name='pod' is refused: TPU pods are not supported; remove it"),
        (DDP | {"commands": ["ls"]}, "commands=['ls'] is refused: TPU pods are not supported; remove it"),
        (DDP | {"num_proceses": None}, "num_proceses: unknown Accelerate key num_proceses; did you mean num_proc"),
        (
            DDP | {"main_process_port": "any"},
            "main_process_port='any' is refused: it is not a port; write 0 to 65535, such as 29500",
        ),
        (DDP | {"main_process_port": -1}, "main_process_port=-1 is refused: it is not a port"),
        (
            DDP | {"machine_rank": 1},
            "machine_rank=1 with num_machines=1: ranks count from 0, so that the last one is 1 - 1 = 0; write 0 to 0",
        ),
        (
            DDP | {"num_machines": 2, "machine_rank": 2},
            "machine_rank=2 with num_machines=2: ranks count from 0, so that the last one is 2 - 1 = 1; write 0 to 1",
        ),
        (
            DDP | {"fsdp_config": FSDP2},
            "fsdp_config under distributed_type=MULTI_GPU is ignored; write FSDP, or remove",
        ),
        (DDP | {"deepspeed_config": {"zero_stage": 2}}, "deepspeed_config under distributed_type=MULTI_GPU is ignored"),
        (
            DDP | {"num_processes": 4, "parallelism_config": MESH},
            "parallelism_config_dp_shard_size=2 cannot be combined with distributed_type=MULTI_GPU; use FSDP",
        ),
        (zero() | {"fsdp_config": FSDP2}, "fsdp_config under distributed_type=DEEPSPEED is ignored"),
        (
            DDP | {"num_processes": 2, "distributed_type": "MEGATRON_LM"},
            "distributed_type=MEGATRON_LM: Accelerate's Megatron-LM plugin builds a model of its own with new weights; "
            "use --strategy 3d",
        ),
        (
            {"distributed_type": "TPU", "num_processes": 2},
            "distributed_type=TPU is not supported; use NO, MULTI_GPU, FSDP",
        ),
        (
            zero() | {"num_processes": 4, "parallelism_config": MESH},
            "parallelism_config_dp_replicate_size=2 cannot be combined with distributed_type=DEEPSPEED; use MULTI_GPU",
        ),
        (fsdp2() | {"deepspeed_config": {"zero_stage": 2}}, "deepspeed_config under distributed_type=FSDP is ignored"),
        (fsdp2() | {"fsdp_config": "x"}, "fsdp_config='x' is refused; write a mapping"),
    ],
    "fsdp": [
        (fsdp({}), "distributed_type=FSDP without fsdp_config; write one, as in accelerate_configs/fsdp2.yaml"),
        (without(fsdp2(), "fsdp_config"), "distributed_type=FSDP without fsdp_config"),
        (
            fsdp2(fsdp_ofload_params=True),
            "fsdp_config.fsdp_ofload_params: unknown Accelerate key fsdp_ofload_params; did",
        ),
        (fsdp2(fsdp_limit_all_gathers=True), "fsdp_config.fsdp_limit_all_gathers: unknown Accelerate key"),
        (
            fsdp2(offload_params=True),
            "fsdp_config.offload_params: the Accelerate key has a prefix; write fsdp_offload_par",
        ),
        (fsdp2(fsdp_offload_params="true"), "fsdp_config.fsdp_offload_params='true' is refused; write true or false"),
        (fsdp2(fsdp_offload_params=None), "fsdp_config.fsdp_offload_params is empty; write a value or remove the line"),
        (fsdp(without(FSDP2, "fsdp_version")), "fsdp_config.fsdp_version is missing, and Accelerate would use 1"),
        (fsdp2(fsdp_version=3), "fsdp_config.fsdp_version=3 is refused: FSDP versions are 1 and 2; write 2"),
        (
            fsdp(without(FSDP2, "fsdp_auto_wrap_policy")),
            "fsdp_config.fsdp_auto_wrap_policy is missing, and the whole model",
        ),
        (
            fsdp2(fsdp_auto_wrap_policy="LAYERS"),
            "fsdp_config.fsdp_auto_wrap_policy='LAYERS' is refused; write 'TRANSFORMER",
        ),
        (
            fsdp2(fsdp_auto_wrap_policy="SIZE_BASED_WRAP"),
            "fsdp_config.fsdp_auto_wrap_policy=SIZE_BASED_WRAP needs a size; write fsdp_min_num_params",
        ),
        (fsdp2(fsdp_min_num_params=0), "fsdp_config.fsdp_min_num_params=0 is refused; write at least 1"),
        (fsdp2(fsdp_min_num_params=9), "fsdp_config.fsdp_min_num_params is ignored under TRANSFORMER_BASED_WRAP"),
        (
            fsdp2(fsdp_auto_wrap_policy="NO_WRAP", fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer"),
            "fsdp_config.fsdp_transformer_layer_cls_to_wrap is ignored under NO_WRAP",
        ),
        (
            fsdp2(fsdp_sharding_strategy="FULL_SHARD"),
            "fsdp_config.fsdp_sharding_strategy is ignored under fsdp_version=2; write fsdp_reshard_after_forward",
        ),
        (
            fsdp2(fsdp_use_orig_params=True),
            "fsdp_config.fsdp_use_orig_params is ignored under fsdp_version=2; remove the",
        ),
        (fsdp2(fsdp_sync_module_states=True), "fsdp_config.fsdp_sync_module_states is ignored under fsdp_version=2"),
        (
            fsdp2(fsdp_backward_prefetch="BACKWARD_PRE"),
            "fsdp_config.fsdp_backward_prefetch is ignored under fsdp_version=2",
        ),
        (fsdp2(fsdp_forward_prefetch=True), "fsdp_config.fsdp_forward_prefetch is ignored under fsdp_version=2"),
        (
            fsdp1(fsdp_reshard_after_forward=True),
            "fsdp_config.fsdp_reshard_after_forward is ignored under fsdp_version=1; write fsdp_sharding_strategy",
        ),
        (
            fsdp1(fsdp_reshard_after_forward="SHARD_GRAD_OP"),
            "fsdp_config.fsdp_reshard_after_forward=SHARD_GRAD_OP is ignored under fsdp_version=1; "
            "write fsdp_sharding_strategy: SHARD_GRAD_OP",
        ),
        (
            fsdp1(fsdp_reshard_after_forward="FULL_SHARD", fsdp_sharding_strategy="SHARD_GRAD_OP"),
            "fsdp_config.fsdp_reshard_after_forward=FULL_SHARD is ignored under fsdp_version=1; "
            "write fsdp_sharding_strategy: FULL_SHARD",
        ),
        (
            fsdp1(fsdp_reshard_after_forward="FULL"),
            "fsdp_config.fsdp_reshard_after_forward='FULL' is refused; write true or false, or 'FULL_SHARD'",
        ),
        (
            fsdp2(fsdp_reshard_after_forward="SHARD_GRAD_OP"),
            "fsdp_config.fsdp_reshard_after_forward=SHARD_GRAD_OP is an fsdp_version=1 option; write false",
        ),
        (
            fsdp2(fsdp_reshard_after_forward="HYBRID_SHARD"),
            "fsdp_config.fsdp_reshard_after_forward=HYBRID_SHARD is an fsdp_version=1 option; write true or false, or",
        ),
        (fsdp1(fsdp_use_orig_params=False), "fsdp_config.fsdp_use_orig_params=false cannot mix frozen and trained"),
        (
            fsdp1(fsdp_sharding_strategy="HYBRID_SHARD"),
            "fsdp_config.fsdp_sharding_strategy=HYBRID_SHARD takes its groups from the machines, and there is only one",
        ),
        (
            fsdp(FSDP1, num_processes=1),
            "fsdp_config.fsdp_version=1 with num_processes=1 turns FULL_SHARD into NO_SHARD",
        ),
        (
            fsdp2(fsdp_activation_checkpointing=True),
            "fsdp_config.fsdp_activation_checkpointing=true is refused: its recomp",
        ),
        (
            fsdp2(fsdp_activation_checkpointing_offload=True),
            "fsdp_config.fsdp_activation_checkpointing_offload=true is refused: its recompute",
        ),
        (
            fsdp2(fsdp_state_dict_type="LOCAL_STATE_DICT"),
            "fsdp_config.fsdp_state_dict_type='LOCAL_STATE_DICT' is refused: c",
        ),
        (
            fsdp2(fsdp_ignored_modules="lm_head"),
            "fsdp_config.fsdp_ignored_modules='lm_head' is refused: the gradients of ignored",
        ),
        (
            fsdp(FSDP2, mixed_precision="fp16"),
            "mixed_precision=fp16 needs loss scaling, which is only done under single",
        ),
    ],
    "mesh": [
        (
            hsdp(dp_shard_size=3),
            "parallelism_config: dp_replicate 2 x dp_shard 3 = 6, but num_processes=4; make them equal",
        ),
        (
            fsdp(FSDP2, parallelism_config={"tp_size": 2}),
            "parallelism_config.tp_size: the Accelerate key has a prefix; write parallelism_config_tp_size",
        ),
        (
            hsdp(pp_size=2),
            "parallelism_config.parallelism_config_pp_size: unknown Accelerate key parallelism_config_pp_size",
        ),
        (
            hsdp(tp_size=2),
            "parallelism_config: dp_replicate 2 x dp_shard 2 x tp 2 = 8, but num_processes=4; make them equal",
        ),
        (
            hsdp(cp_size=2),
            "parallelism_config: dp_replicate 2 x dp_shard 2 x cp 2 = 8, but num_processes=4; make them equal",
        ),
        (
            hsdp(sp_size=2),
            "parallelism_config: dp_replicate 2 x dp_shard 2 x sp 2 = 8, but num_processes=4; make them equal",
        ),
        (
            hsdp(dp_replicate_size=1, dp_shard_size=1, cp_size=2, sp_size=2),
            "parallelism_config: cp and sp both split the rows; use one of them",
        ),
        (
            hsdp(dp_replicate_size=-1, dp_shard_size=-1),
            "parallelism_config: dp_replicate and dp_shard are both -1, the rest; write -1 once",
        ),
        (
            hsdp(dp_replicate_size=3, dp_shard_size=-1),
            "parallelism_config: dp_replicate 3 = 3, but num_processes=4; use",
        ),
        (
            hsdp(dp_replicate_size=1, cp_size=2, cp_backend="torch"),
            "parallelism_config_cp_backend: rows are split by the training script",
        ),
        (
            hsdp(dp_shard_size=0),
            "parallelism_config.parallelism_config_dp_shard_size=0 is refused: it is not a number of processes",
        ),
        (hsdp(dp_replicate_size=4, dp_shard_size=1), "parallelism_config_dp_shard_size=1 leaves nothing to shard over"),
        (fsdp(FSDP1, num_processes=4, parallelism_config=MESH), "parallelism_config needs fsdp_version: 2"),
    ],
    "deepspeed": [
        (without(zero(), "deepspeed_config"), "distributed_type=DEEPSPEED without deepspeed_config; write one, as in"),
        (
            zero() | {"deepspeed_config": {"zero3_init_flag": False}},
            "deepspeed_config.zero_stage is missing, and Accele",
        ),
        (zero(zero_stag=2), "deepspeed_config.zero_stag: unknown Accelerate key zero_stag; did you mean zero_stage?"),
        (
            zero(zero_optimization={"stage": 2}),
            "deepspeed_config.zero_optimization is a key of a DeepSpeed JSON, and Acc",
        ),
        (
            zero(zero_stage=0),
            "deepspeed_config.zero_stage=0 is refused: ZeRO stages are 1, 2 and 3; write one as a number; stage",
        ),
        (
            zero(zero_stage="2"),
            "deepspeed_config.zero_stage='2' is refused: ZeRO stages are 1, 2 and 3; write one as a number",
        ),
        (
            zero(zero_stage=3),
            "deepspeed_config.zero3_init_flag is missing, and Accelerate would use true; write false",
        ),
        (
            zero(zero_stage=3, zero3_init_flag=True),
            "deepspeed_config.zero3_init_flag=true is refused: weights are never drawn",
        ),
        (
            zero(gradient_accumulation_steps=4),
            "deepspeed_config.gradient_accumulation_steps=4 is refused: accumulation is",
        ),
        (
            zero(gradient_accumulation_steps=True),
            "deepspeed_config.gradient_accumulation_steps=true is refused: accumulation",
        ),
        (zero(gradient_clipping=1.0), "deepspeed_config.gradient_clipping=1.0 is refused: max_grad_norm of the config"),
        (
            zero(offload_optimizer_device="disk"),
            "deepspeed_config.offload_optimizer_device='disk' is refused; write 'none', 'cpu' or 'nvme'",
        ),
        (zero(offload_param_device="cpu"), "deepspeed_config.offload_param_device=cpu needs zero_stage: 3, not 2"),
        (
            zero(zero_stage=3, zero3_init_flag=False, offload_param_device="nvme", offload_param_nvme_path="/nvme"),
            "deepspeed_config.offload_param_device=nvme: `accelerate launch` does not pass the nvme path on; write",
        ),
        (
            zero(deepspeed_hostfile="hosts"),
            "deepspeed_config.deepspeed_hostfile='hosts' is refused: it belongs to DeepSpeed's own",
        ),
        (zero(deepspeed_inclusion_filter="x"), "deepspeed_config.deepspeed_inclusion_filter='x' is refused"),
        (
            zero(deepspeed_multinode_launcher="pdsh"),
            "deepspeed_config.deepspeed_multinode_launcher='pdsh' is refused: onl",
        ),
        (
            zero() | {"num_machines": 2},
            "num_machines=2 would start DeepSpeed's own launcher (pdsh); write deepspeed_multi",
        ),
        (
            zero() | {"mixed_precision": "fp16"},
            "mixed_precision=fp16 needs loss scaling, which is only done under single",
        ),
    ],
}


@pytest.mark.parametrize(
    ("values", "line"), [pytest.param(*case, id=case[1][:60]) for each in WRONG.values() for case in each]
)
def test_a_wrong_config_is_refused(values: dict[str, Any], line: str) -> None:
    found = check(values)
    assert len(found) == 1, found
    assert str(found[0]).startswith(line)


RIGHT = {
    "ddp": DDP,
    "ddp with empty sections": DDP | {"fsdp_config": {}, "deepspeed_config": None, "gpu_ids": "0,1"},
    "fsdp2": fsdp2(
        fsdp_reshard_after_forward=False, fsdp_offload_params=True, fsdp_state_dict_type="SHARDED_STATE_DICT"
    ),
    "ddp, nothing in old keys": DDP
    | dict.fromkeys(("tpu_name", "tpu_zone", "tpu_vm", "command_file", "commands", "mpirun_config"))
    | {"dynamo_config": {}, "megatron_lm_config": {}, "mpirun_config": {}, "fp8_config": {}, "tpu_env": []},
    "ddp, dynamo off": DDP | {"dynamo_config": {"dynamo_backend": "NO"}},
    "ddp, dynamo off as of old": DDP | {"dynamo_backend": "NO"},
    "ddp, port in quotes": DDP | {"main_process_port": "29501"},
    "ddp, second machine": DDP | {"num_machines": 2, "machine_rank": 1},
    "ddp on a CPU": DDP | {"use_cpu": True},
    "ddp, static": DDP | {"rdzv_backend": "static"},
    "fsdp2, whole states": fsdp2(fsdp_state_dict_type="FULL_STATE_DICT"),
    "fsdp1, reshard word": fsdp1(fsdp_reshard_after_forward="FULL_SHARD", fsdp_state_dict_type="FULL_STATE_DICT"),
    "fsdp1, reshard word alone": fsdp(
        without(FSDP1, "fsdp_sharding_strategy") | {"fsdp_reshard_after_forward": "FULL_SHARD"}
    ),
    "fsdp1, the same word twice": fsdp1(
        fsdp_reshard_after_forward="SHARD_GRAD_OP", fsdp_sharding_strategy="SHARD_GRAD_OP"
    ),
    "zero2, init flag that does nothing": zero(zero3_init_flag=True),
    "fsdp2, one process": fsdp(FSDP2, num_processes=1),
    "fsdp2, bf16": fsdp(FSDP2, mixed_precision="bf16"),
    "fsdp2 by size": fsdp2(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=1000),
    "fsdp2 whole": fsdp2(fsdp_auto_wrap_policy="NO_WRAP", fsdp_activation_checkpointing=False),
    "fsdp2, layers by name": fsdp2(fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer,QwenDecoderLayer"),
    "fsdp1": fsdp1(fsdp_use_orig_params=True, fsdp_backward_prefetch="BACKWARD_PRE", fsdp_forward_prefetch=True),
    "fsdp1, not sharded": fsdp(FSDP1 | {"fsdp_sharding_strategy": "NO_SHARD"}, num_processes=1),
    "fsdp1, two machines": fsdp(FSDP1 | {"fsdp_sharding_strategy": "HYBRID_SHARD"}, num_machines=2),
    "fsdp1, states of rank 0": fsdp1(fsdp_sync_module_states=True),
    "hsdp": hsdp(tp_size=1, cp_size=1, cp_backend="torch"),
    "zero1": zero(zero_stage=1, gradient_accumulation_steps=1, offload_optimizer_device="cpu"),
    "zero2": zero(gradient_accumulation_steps="auto", gradient_clipping="auto", zero3_init_flag=False),
    "zero3": zero(zero_stage=3, zero3_init_flag=False, zero3_save_16bit_model=True, offload_param_device="cpu"),
    "zero2, two machines": zero(deepspeed_multinode_launcher="standard") | {"num_machines": 2},
}


@pytest.mark.parametrize("values", RIGHT.values(), ids=RIGHT)
def test_a_right_config_has_no_mistakes(values: dict[str, Any]) -> None:
    """The negative control of all cases above."""
    assert check(values) == []


def flags(group: str) -> dict[str, Any]:
    """The launcher's flags of one group, with their defaults."""
    groups = {found.title: found for found in launch_command_parser()._action_groups}
    return {action.dest: action.default for action in groups[group]._group_actions}


def test_the_keys_are_accelerates_own() -> None:
    """Fails when a new Accelerate reads another key, or no longer reads one of these."""
    legacy = {"dynamo_backend"}
    assert set(AccelerateConfig.model_fields) - legacy == set(ClusterConfig.__dataclass_fields__)
    exported = set(re.findall(r"\bfsdp_\w+", inspect.getsource(launch.prepare_multi_gpu_env)))
    assert set(FsdpConfig.model_fields) == exported == set(flags("FSDP Arguments")) | {"fsdp_ignored_modules"}
    assert set(DeepSpeedConfig.model_fields) == set(flags("DeepSpeed Arguments"))
    assert set(ParallelismConfig.model_fields) == set(flags("ParallelismConfig Arguments"))
    every = {action.dest for action in launch_command_parser()._actions}
    assert set(LAUNCHER_FLAGS) <= every - set(AccelerateConfig.model_fields)


def choices(section: type[Section], key: str) -> tuple[str, ...]:
    """The texts that a key may hold."""
    annotation = section.model_fields[key].annotation
    literals = [kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is Literal]
    return tuple(text for literal in literals for text in get_args(literal))


def test_the_values_are_accelerates_own() -> None:
    assert choices(FsdpConfig, "fsdp_auto_wrap_policy") == tuple(constants.FSDP_AUTO_WRAP_POLICY)
    assert choices(FsdpConfig, "fsdp_backward_prefetch") == tuple(constants.FSDP_BACKWARD_PREFETCH)
    torchs = ("_HYBRID_SHARD_ZERO2",)
    assert choices(FsdpConfig, "fsdp_sharding_strategy") == tuple(constants.FSDP_SHARDING_STRATEGY) + torchs
    assert set(constants.FSDP_STATE_DICT_TYPE) > set(choices(FsdpConfig, "fsdp_state_dict_type"))
    launchers = choices(DeepSpeedConfig, "deepspeed_multinode_launcher")
    assert set(constants.DEEPSPEED_MULTINODE_LAUNCHERS) > set(launchers) > set()


def test_what_accelerate_takes_by_itself_is_still_so() -> None:
    """The defaults and gaps that some rules exist for; when one changes, its rule can go."""
    defaults = flags("FSDP Arguments")
    assert (defaults["fsdp_version"], defaults["fsdp_auto_wrap_policy"]) == ("1", None)
    assert (defaults["fsdp_cpu_ram_efficient_loading"], defaults["fsdp_use_orig_params"]) == ("true", "true")
    assert defaults["fsdp_sharding_strategy"] == "FULL_SHARD"  # so that reshard_after_forward is not read under 1
    assert "NVME" not in inspect.getsource(launch.prepare_deepspeed_cmd_env)
    assert "str(self.hf_ds_config.is_zero3())" in inspect.getsource(DeepSpeedPlugin.__post_init__)


def test_what_accelerate_refuses_beside_a_deepspeed_json() -> None:
    source = inspect.getsource(DeepSpeedPlugin._deepspeed_config_checks)
    names = [
        name.removeprefix("ACCELERATE_").removeprefix("DEEPSPEED_")
        for name in re.findall(r'"(ACCELERATE_\w+)",', source)
    ]
    assert {name.lower() for name in names} - {"config_ds_fields"} == {*NOT_BESIDE_FILE, "mixed_precision"}


def test_the_tables_of_one_version_name_known_keys() -> None:
    assert set(ONLY_FSDP1) <= set(FsdpConfig.model_fields)
    assert set(NOT_BESIDE_FILE) <= set(DeepSpeedConfig.model_fields)


def test_every_mistake_is_one_line_with_a_way_out() -> None:
    for found in (str(mistake) for each in WRONG.values() for values, _ in each for mistake in check(values)):
        assert "\n" not in found
        assert re.search(r"; |: YAML|at least", found), found
