"""A DeepSpeed JSON: read strictly, and every key that would leave the training script's own rules refused. No torch.

The keys are listed here and not asked of DeepSpeed, whose import takes seconds and which need not be installed;
`tests/unit/strategy/test_deepspeed_schema.py` compares them with DeepSpeed's models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from trainers.config.options import ConfigError
from trainers.strategy.accelerate_schema import (
    FLAG,
    LIST,
    MAX_PROCESSES,
    OWN_EXPORT,
    TEXT,
    WHOLE,
    Key,
    is_empty,
    key_mistakes,
)

MAX_JSON_BYTES = 1_000_000
AUTO = "auto"
PATH = Key((str,))
NUMBER = Key((int, float), least=0)
NUMBER_OR_AUTO = Key((int, float, str), words=(AUTO,), least=0)
# What the config decides, so that the JSON may only say "auto"; a number here would be passed over, or overrule it.
CONFIGURED = {
    "lr": "learning_rate of the config decides",
    "betas": "adam_beta1 and adam_beta2 of the config decide",
    "eps": "adam_epsilon of the config decides",
    "weight_decay": "weight_decay of the config decides",
}
_ONLY_AUTO = {
    name: Key((str, int, float, list), (AUTO,), why=f'write "auto"; {who}') for name, who in CONFIGURED.items()
}
_ADAM = _ONLY_AUTO | {
    "torch_adam": FLAG,
    "adam_w_mode": Key((bool,), (True,), why="Adam with L2 is another optimizer than the config's AdamW; remove it"),
}
# DeepSpeed 0.19, DEEPSPEED_OPTIMIZERS, each with what its constructors take on a GPU and on a CPU alike.
OPTIMIZERS: dict[str, dict[str, Key]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": {
        "lr": _ONLY_AUTO["lr"],
        "betas": Key((str, list), words=(AUTO,)),
        "weight_decay": _ONLY_AUTO["weight_decay"],
    },
}
# Our checkpoints were never run with the state of these. LAMB's trust ratio would be that of a flat partition too.
# The mu-parametrised ones are no names here at all: they need a package of their own.
UNTRIED = ("adagrad", "lamb", "muon")
AS_CONFIGURED = ("adam", "adamw")  # what they compute is the config's AdamW, up to rounding
ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")

_BATCH = 'the batch follows from global_batch_size; write "auto" or remove it'
_RULE = "it would leave the compute rule that all strategies share; remove it and use mixed_precision of the config"
_OWN_METRICS = "use report_to in the config"
_PARALLEL = "this parallelism is not supported yet; remove it"
_IDLE = "nothing here reads it; remove it"
_OWN_CHECKPOINTS = "checkpoints are Tunesmith's own; remove it"
_NO_PRINT = "the script prints its own progress; use logging_steps in the config"
_RENAMED = "DeepSpeed has renamed it; write "
_NO_SCALING = "ZeRO asserts at launch that it is off; remove it"


def _is_off(value: Any) -> bool:
    """Whether a section says that it is off, or nothing."""
    return is_empty(value) or (isinstance(value, dict) and value.get("enabled") is False)


def _all_auto(value: Any) -> bool:
    """Whether a section leaves everything to the training script, as many files for transformers do."""
    if not isinstance(value, dict) or not set(value) <= {"type", "params"}:
        return False
    params = value.get("params")
    return not value or (isinstance(params, dict) and bool(params) and all(each == AUTO for each in params.values()))


def _off_or_auto(*others: str) -> Key:
    """A precision section that may only say that it is off, or leave that to Accelerate."""
    enabled = Key((bool, str), (False, AUTO), why=_RULE)
    return Key((dict,), inside={"enabled": enabled} | {name: Key((bool, int, float)) for name in others})


_OFFLOAD: dict[str, Key] = {
    "device": Key((str,), ("none", "cpu", "nvme")),
    "nvme_path": PATH,
    "buffer_count": NUMBER,
    "pin_memory": FLAG,
}
OFFLOAD_OPTIMIZER = _OFFLOAD | {
    "pipeline_read": FLAG,
    "pipeline_write": FLAG,
    "fast_init": FLAG,
    "ratio": NUMBER,
    "super_offload": FLAG,
    "cpuadam_cores_perc": NUMBER,
}
OFFLOAD_PARAM = _OFFLOAD | {"buffer_size": NUMBER, "max_in_cpu": NUMBER}

ZERO: dict[str, Key] = {
    "stage": Key((int,), (1, 2, 3), why="ZeRO has the stages 1, 2 and 3; stage 0 is the ddp strategy"),
    "contiguous_gradients": FLAG,
    "reduce_scatter": FLAG,
    "reduce_bucket_size": NUMBER_OR_AUTO,
    "use_multi_rank_bucket_allreduce": FLAG,
    "allgather_partitions": FLAG,
    "allgather_bucket_size": NUMBER,
    "overlap_comm": FLAG,
    "compute_grad_norm": Key((bool,), (True,), why="the gradient norm is clipped and reported; remove it"),
    "load_from_fp32_weights": Key((bool,), unread=_OWN_CHECKPOINTS),
    "elastic_checkpoint": Key((bool,), (False,), why="checkpoints are Tunesmith's own; remove it"),
    "offload_param": Key((dict,), inside=OFFLOAD_PARAM),
    "offload_optimizer": Key((dict,), inside=OFFLOAD_OPTIMIZER),
    "zenflow": Key(why="it steps with gradients that are late, which changes the model; remove it"),
    "sub_group_size": NUMBER,
    "cpu_offload": Key(why=_RENAMED + "offload_optimizer"),
    "cpu_offload_param": Key(why=_RENAMED + "offload_param"),
    "cpu_offload_use_pin_memory": Key(why=_RENAMED + "pin_memory in offload_param or offload_optimizer"),
    "stage3_prefetch_bucket_size": NUMBER_OR_AUTO,
    "stage3_param_persistence_threshold": NUMBER_OR_AUTO,
    "stage3_model_persistence_threshold": NUMBER,
    "stage3_max_live_parameters": NUMBER,
    "stage3_max_reuse_distance": NUMBER,
    "stage3_gather_16bit_weights_on_model_save": Key(
        (bool, str), words=(AUTO,), unread=OWN_EXPORT, asks=lambda value: value is True
    ),
    "stage3_gather_fp16_weights_on_model_save": Key(why=_RENAMED + "stage3_gather_16bit_weights_on_model_save"),
    "stage3_module_granularity_threshold": NUMBER,
    "stage3_use_all_reduce_for_fetch_params": FLAG,
    "stage3_allgather_sequential": FLAG,
    "ignore_unused_parameters": FLAG,
    "legacy_stage1": Key((bool,), (False,), why="the old ZeRO-1 is not supported; remove it"),
    "round_robin_gradients": Key((bool,), (False,), why="its layout is not the one that DeepSpeed tells; remove it"),
    "parameter_alignment": FLAG,
    "zero_hpz_partition_size": Key((int,), least=1, most=MAX_PROCESSES),
    "zero_quantized_weights": FLAG,
    "zero_quantized_nontrainable_weights": FLAG,
    "zero_quantized_gradients": FLAG,
    "memory_efficient_linear": FLAG,
    "pipeline_loading_checkpoint": Key((bool,), unread=_OWN_CHECKPOINTS),
    "override_module_apply": FLAG,
    "log_trace_cache_warnings": FLAG,
    "enable_sanity_checks": FLAG,
    "save_muon_momentum_buffer_in_memory": Key((bool,), unread="Muon is not supported; remove it"),
    "leaf_module": Key((dict,), inside={"classes": LIST, "names": LIST, "name_suffixes": LIST}),
}

QUANTISED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
_SECOND_COPY = "zero_hpz_partition_size"

OPTIMIZER: dict[str, Key] = {"type": TEXT, "params": Key((dict,)), "legacy_fusion": FLAG}

JSON: dict[str, Key] = {
    "train_batch_size": Key((str, int), (AUTO,), why=_BATCH),
    "train_micro_batch_size_per_gpu": Key((str, int), (AUTO,), why=_BATCH),
    "gradient_accumulation_steps": Key((str, int), (AUTO,), why=_BATCH),
    "managed_gradient_accumulation": Key(why="the script accumulates by itself; remove it"),
    "gradient_clipping": Key(
        (str, int, float), (AUTO,), why='max_grad_norm of the config says where to clip; write "auto" or remove it'
    ),
    "zero_optimization": Key((dict,), inside=ZERO),
    "optimizer": Key((dict,), inside=OPTIMIZER),
    "scheduler": Key(
        why="the script sets the learning rate at each step; remove it and use lr_scheduler_type", idle=_all_auto
    ),
    "fp16": _off_or_auto(
        "auto_cast",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
        "fp16_master_weights_and_grads",
    ),
    "bf16": _off_or_auto(
        "immediate_grad_update", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states"
    ),
    "amp": Key(why=_RULE, idle=_is_off),
    "torch_autocast": Key(why=_RULE, idle=_is_off),
    "data_types": Key((dict,), inside={"grad_accum_dtype": Key((str,), ("fp32",), why="gradients are summed in fp32")}),
    "communication_data_type": Key((str,), ("fp32", "fp16", "bf16")),
    "seq_parallel_communication_data_type": TEXT,
    "prescale_gradients": Key((bool,), (False,), why=_NO_SCALING),
    "gradient_predivide_factor": Key((int, float), (1, 1.0), why=_NO_SCALING),
    "gradient_allreduce_op": Key((str,), ("mean",), why="the loss is scaled for a mean over ranks; remove it"),
    "zero_allow_untested_optimizer": Key(
        (bool,), unread="the script's own AdamW is one; remove it", asks=lambda value: value is False
    ),
    "zero_force_ds_cpu_optimizer": FLAG,
    "disable_allgather": Key((bool,), unread="DeepSpeed itself does not read it; remove it"),
    "disable_python_gc": FLAG,
    "dump_state": FLAG,
    "log_level": TEXT,
    "steps_per_print": Key((int, float), least=0, unread=_NO_PRINT),
    "wall_clock_breakdown": Key((bool,), unread=_NO_PRINT),
    "memory_breakdown": FLAG,
    "vocabulary_size": Key((int, float), least=0, unread="DeepSpeed itself does not read it; remove it"),
    "comms_logger": Key(
        (dict,),
        inside={"enabled": FLAG, "prof_all": FLAG, "prof_ops": LIST, "verbose": FLAG, "debug": FLAG},
        unread="its summary is never asked for; write verbose: true, which prints each operation, or remove it",
        asks=lambda value: value.get("enabled") is True and not value.get("verbose"),
    ),
    "flops_profiler": Key(
        (dict,),
        inside={
            "enabled": FLAG,
            "recompute_fwd_factor": NUMBER,
            "profile_step": NUMBER,
            "module_depth": WHOLE,
            "top_modules": NUMBER,
            "detailed": FLAG,
            "output_file": PATH,
        },
    ),
    "aio": Key(
        (dict,),
        inside={
            "block_size": NUMBER,
            "queue_depth": NUMBER,
            "intra_op_parallelism": NUMBER,
            "single_submit": FLAG,
            "overlap_events": FLAG,
            "use_gds": FLAG,
        },
    ),
    "activation_checkpointing": Key(why="use gradient_checkpointing: true in the config"),
    "checkpoint": Key(why="checkpoints are Tunesmith's own; remove it"),
    "datastates": Key(why="checkpoints are Tunesmith's own; remove it"),
    "compile": Key(why="use torch_compile in the config"),
    "tensorboard": Key(why=_OWN_METRICS, idle=_is_off),
    "wandb": Key(why=_OWN_METRICS, idle=_is_off),
    "csv_monitor": Key(why=_OWN_METRICS, idle=_is_off),
    "comet": Key(why=_OWN_METRICS, idle=_is_off),
    "tensor_parallel": Key(
        why="DeepSpeed's AutoTP cuts by rules of its own, which checkpoints and loss do not follow; "
        "write parallelism_config_tp_size into the YAML, as in zero2_tp"
    ),
    "expert_parallel": Key(why=_PARALLEL),
    "use_data_before_expert_parallelism": Key(why=_PARALLEL),
    "pipeline": Key(why=_PARALLEL),
    "data_efficiency": Key(why="the batch of each step is the script's own plan; remove it", idle=_is_off),
    "dataloader_drop_last": Key(why="the batch of each step is the script's own plan; remove it"),
    "weight_quantization": Key(why=_RULE),
    "hybrid_engine": Key(why=_IDLE, idle=_is_off),
    "autotuning": Key(why=_IDLE, idle=_is_off),
    "timers": Key(why=_IDLE),
}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"duplicate key {twice[0]!r}")
    return dict(pairs)


def read_json(name: str) -> dict[str, Any]:
    """The object in a DeepSpeed JSON.

    Args:
        name: its path; a relative one counts from the current folder, as in Accelerate.

    Raises:
        ConfigError: unreadable, too large, not an object, with a duplicate key, NaN or an infinite number.
    """
    path = Path(os.path.expanduser(name))
    where = f"deepspeed_config_file={name}"
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{where} is not a regular file; name a DeepSpeed JSON")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(f"{where} is larger than {MAX_JSON_BYTES} bytes; a DeepSpeed JSON is a short file")
        text = path.read_text(encoding="utf-8")
        loaded = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_refuse_constant)
    except ConfigError:  # a ValueError too
        raise
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{where} cannot be read: {reason}; a relative path counts from the current folder") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is no plain JSON: {str(error)[:300]}; write one object without comments") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where} holds a {type(loaded).__name__}; write one object, {{...}}")
    return loaded


def nested_paths(content: Mapping[str, Any], keys: Mapping[str, Key] | None = None, where: str = "") -> dict[str, str]:
    """Every path in the content of a DeepSpeed JSON, which DeepSpeed would write to, by its dotted key."""
    found = {}
    for name, value in content.items():
        key, path = (JSON if keys is None else keys).get(name), f"{where}.{name}" if where else name
        if key is PATH and isinstance(value, str):
            found[path] = value
        elif key is not None and key.inside is not None and isinstance(value, dict):
            found |= nested_paths(value, key.inside, path)
    return found


def json_mistakes(content: dict[str, Any]) -> list[str]:
    """Every mistake in the content of a DeepSpeed JSON, a line each; those of single keys hide those of the whole."""
    where = "DeepSpeed JSON"
    # At the top DeepSpeed reads only what it knows, so that a comment does nothing; its sections stop at one.
    read = {name: value for name, value in content.items() if not name.startswith("_")}
    mistakes = [f"{where}: {line}" for line in key_mistakes(read, JSON, "", "DeepSpeed")]
    return mistakes or [f"{where}: {line}" for line in _check_whole(content)]


def drop_idle(settings: dict[str, Any]) -> None:
    """Takes out, in place, what is accepted because it asks for nothing: DeepSpeed stops at some of it all the same.

    Args:
        settings: the content of a DeepSpeed JSON that has passed the check, before DeepSpeed gets it.
    """
    for name in [
        name for name, value in settings.items() if value is None or (name in JSON and JSON[name].idle(value))
    ]:
        del settings[name]


def _check_whole(content: dict[str, Any]) -> list[str]:
    zero = content.get("zero_optimization")
    if not zero or "stage" not in zero:
        return ["zero_optimization.stage is missing; write 1, 2 or 3"]
    stage, param, state = zero["stage"], zero.get("offload_param") or {}, zero.get("offload_optimizer") or {}
    rules = {
        f"zero_optimization.offload_param needs stage 3, not {stage}; remove it, or write 3": (
            stage != 3 and param.get("device", "none") != "none"
        ),
        f"zero_optimization.offload_optimizer.ratio={state.get('ratio')} needs stage 3, not {stage}; remove it": (
            stage != 3 and state.get("ratio", 1) != 1
        ),
    }
    rules |= {
        f"zero_optimization.{key}={zero[key]} needs stage 3, not {stage}; remove it, or write 3": stage != 3
        for key in zero_plus(zero)
    }
    rules["zero_optimization.zero_hpz_partition_size: a second copy beside weights that are offloaded; remove it"] = (
        stage == 3 and zero.get("zero_hpz_partition_size", 1) > 1 and param.get("device", "none") != "none"
    )
    rules["zero_optimization.offload_param.device=nvme: no checkpoint could be made of it; write cpu"] = (
        stage == 3 and param.get("device") == "nvme"
    )
    for name, section in (("offload_param", param), ("offload_optimizer", state)):
        nvme = section.get("device") == "nvme"
        rules |= {
            f"zero_optimization.{name}.device=nvme needs a place; write nvme_path": nvme and "nvme_path" not in section,
            f"zero_optimization.{name}.device=nvme is taken for cpu under stage {stage}; write stage 3, or cpu": (
                nvme and stage != 3
            ),
        }
    return [line for line, applies in rules.items() if applies] + _check_optimizer(content.get("optimizer"))


def _check_optimizer(optimizer: dict[str, Any] | None) -> list[str]:
    if optimizer is None:
        return []
    name, listed = optimizer.get("type"), ", ".join(OPTIMIZERS)
    if name is None:
        return [f"optimizer.type is missing; write one of {listed}"]
    kind = str(name).lower()
    if kind in ONE_BIT:
        return [f"optimizer.type={name} is gone from DeepSpeed 0.19; use one of {listed}"]
    if kind in UNTRIED:
        return [f"optimizer.type={name} is not supported, as checkpoints were never run with its state; use AdamW"]
    if kind not in OPTIMIZERS:
        return [f"optimizer.type={name} is no optimizer of DeepSpeed's own; use one of {listed}"]
    params = optimizer.get("params", {})
    mistakes = key_mistakes(params, OPTIMIZERS[kind], "optimizer.params", "DeepSpeed") or _check_betas(params)
    # The loop sets lr and the groups of weights bring weight_decay, so that only these two could slip away unseen.
    return mistakes + [
        f'optimizer.params.{key} is missing, and DeepSpeed would take a default of its own; write "auto"'
        for key in ("betas", "eps")
        if kind in AS_CONFIGURED and key not in params
    ]


def _check_betas(params: dict[str, Any]) -> list[str]:
    betas = params.get("betas", AUTO)
    good = betas == AUTO or (len(betas) == 2 and all(isinstance(each, int | float) for each in betas))
    return [] if good else [f'optimizer.params.betas={betas} is no pair; write two numbers, or "auto"']


def zero_plus(zero: dict[str, Any]) -> list[str]:
    """The keys of ZeRO++ that ask for something, in the content of `zero_optimization`."""
    asked = [key for key in QUANTISED if zero.get(key) is True]
    return asked + [_SECOND_COPY] * (zero.get(_SECOND_COPY, 1) > 1)


def leaves_parity(content: dict[str, Any]) -> list[str]:
    """The choices of a DeepSpeed JSON that leave the promise that the strategy never changes the model."""
    zero = content.get("zero_optimization") or {}
    found = [f"{key}=true" for key in QUANTISED if zero.get(key) is True]
    dtype = content.get("communication_data_type", "fp32")
    found += [f"communication_data_type={dtype}"] if dtype != "fp32" else []
    name = str((content.get("optimizer") or {}).get("type", "adamw"))
    return found + ([f"DeepSpeed's optimizer {name}"] if name.lower() not in AS_CONFIGURED else [])
