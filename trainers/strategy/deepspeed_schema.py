"""Pydantic models of a DeepSpeed JSON; values that would change what the training script computes are refused.

The keys are listed here because importing DeepSpeed takes seconds, and it need not be installed;
`tests/unit/strategy/test_deepspeed_schema.py` compares them with DeepSpeed's own models. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Predicate
from pydantic import Field

from trainers.strategy import topics
from trainers.strategy.schema import (
    MAX_PROCESSES,
    Absent,
    Ignored,
    Off,
    OnlyFalse,
    OnlyTrue,
    Refused,
    Section,
    key,
)

AUTO = "auto"
Auto = Literal["auto"]
Count = Annotated[float, Field(ge=0, multiple_of=1)]  # many files write 5e8
Share = Annotated[float, Field(ge=0, le=1)]
Device = Literal["none", "cpu", "nvme"]

_BATCH = Refused("the batch follows from global_batch_size", f'write "auto" or remove it; {topics.ACCUMULATION}')
_COMPUTE_RULE = Refused(
    "it would break the compute rule that all strategies share",
    f"remove it and use mixed_precision of the config; {topics.PRECISION}",
)
_OWN_METRICS = Refused("the run writes its own metrics", "remove it and use report_to in the config")
_NO_PARALLELISM = Refused("DeepSpeed would need a model written for it", f"remove it; {topics.MIXES}")
_UNREAD = Refused("nothing here reads it")
_OWN_CHECKPOINTS = "checkpoints are Tunesmith's own"
_CHECKPOINTS = Refused(_OWN_CHECKPOINTS, f"remove it; {topics.CHECKPOINTS}")
_NO_SCALING = Refused("ZeRO asserts at launch that it is off")
_OWN_PLAN = Refused("the batch of each step is the script's own plan")
_NO_PRINT = Ignored("the script prints its own progress; use logging_steps in the config")
_NOT_READ = Ignored("DeepSpeed itself does not read it; remove it")


def _renamed(name: str) -> Refused:
    return Refused("DeepSpeed has renamed it", f"write {name}")


class JsonSection(Section):
    """Model of a mapping in the JSON."""

    owner: ClassVar[str] = "DeepSpeed"
    where: ClassVar[str] = "no section of "
    """Path of the section in `GONE`."""

    @classmethod
    def explain_unknown(cls, name: str) -> tuple[str, str]:
        """Also recognizes `_comment` keys, which DeepSpeed rejects within a section, and what DeepSpeed has removed."""
        if name.startswith("_"):
            return ": JSON has no comments", "remove it"
        if gone := GONE.get(f"{cls.where}{name}"):
            problem, _, instead = gone.partition("; ")
            return f": {problem}", f"remove it; {instead}; {topics.ZERO}"
        return super().explain_unknown(name)


# Set by the config, so the JSON may only say "auto"; a number here would be ignored, or override the config.
_LEARNING_RATE = Refused("learning_rate of the config decides", 'write "auto"')
_WEIGHT_DECAY = Refused("weight_decay of the config decides", 'write "auto"')


class AdamParams(JsonSection):
    """`optimizer.params` of Adam and AdamW: arguments that the GPU and the CPU implementation both accept."""

    lr: Auto | None = key(_LEARNING_RATE)
    betas: Auto | None = key(Refused("adam_beta1 and adam_beta2 of the config decide", 'write "auto"'))
    eps: Auto | None = key(Refused("adam_epsilon of the config decides", 'write "auto"'))
    weight_decay: Auto | None = key(_WEIGHT_DECAY)
    torch_adam: bool | None = None
    adam_w_mode: OnlyTrue = key(Refused("Adam with L2 is another optimizer than the config's AdamW"))


class LionParams(JsonSection):
    """`optimizer.params` of Lion."""

    lr: Auto | None = key(_LEARNING_RATE)
    betas: Auto | Annotated[list[float], Field(min_length=2, max_length=2)] | None = key(
        Refused("it is not a pair", 'write two numbers, or "auto"')
    )
    weight_decay: Auto | None = key(_WEIGHT_DECAY)


# DeepSpeed 0.19, DEEPSPEED_OPTIMIZERS.
OPTIMIZERS: dict[str, type[JsonSection]] = {"adam": AdamParams, "adamw": AdamParams, "lion": LionParams}
AS_CONFIGURED = ("adam", "adamw")  # these compute the config's AdamW, up to rounding
# Checkpoints are untested with the state of these; LAMB would also compute its trust ratio on a flat partition.
# The mu-parametrized optimizers are not listed at all, as they need another package.
UNTRIED = ("adagrad", "lamb", "muon")
ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")


class Optimizer(JsonSection):
    """`optimizer`."""

    type: str | None = None
    params: dict[str, Any] | None = None
    legacy_fusion: bool | None = None


class OffloadParam(JsonSection):
    """`zero_optimization.offload_param`."""

    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Count | None = None
    pin_memory: bool | None = None
    buffer_size: Count | None = None
    max_in_cpu: Count | None = None


class OffloadOptimizer(JsonSection):
    """`zero_optimization.offload_optimizer`."""

    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Count | None = None
    pin_memory: bool | None = None
    pipeline_read: bool | None = None
    pipeline_write: bool | None = None
    fast_init: bool | None = None
    ratio: Share = 1.0
    super_offload: bool | None = None
    cpuadam_cores_perc: Share | None = None


class LeafModule(JsonSection):
    """`zero_optimization.leaf_module`."""

    classes: list[Any] | None = None
    names: list[Any] | None = None
    name_suffixes: list[Any] | None = None


class ZeroOptimization(JsonSection):
    """`zero_optimization`."""

    where: ClassVar[str] = "zero_optimization."

    stage: Annotated[int, Field(ge=1, le=3)] | None = key(
        Refused("ZeRO stages are 1, 2 and 3", f"write one as a number; stage 0 is the ddp strategy; {topics.ZERO}")
    )
    contiguous_gradients: bool | None = None
    reduce_scatter: bool | None = None
    reduce_bucket_size: Annotated[Count, Field(ge=1)] | Auto | None = None
    use_multi_rank_bucket_allreduce: bool | None = None
    allgather_partitions: bool | None = None
    allgather_bucket_size: Count | None = None
    overlap_comm: bool | None = None
    compute_grad_norm: OnlyTrue = key(Refused("the gradient norm is clipped and reported"))
    load_from_fp32_weights: bool | None = key(Ignored(f"{_OWN_CHECKPOINTS}; remove it"))
    elastic_checkpoint: OnlyFalse = key(_CHECKPOINTS)
    offload_param: OffloadParam | None = None
    offload_optimizer: OffloadOptimizer | None = None
    zenflow: Absent = key(Refused("it steps with stale gradients, which changes the model"))
    sub_group_size: Count | None = None
    cpu_offload: Absent = key(_renamed("offload_optimizer"))
    cpu_offload_param: Absent = key(_renamed("offload_param"))
    cpu_offload_use_pin_memory: Absent = key(_renamed("pin_memory in offload_param or offload_optimizer"))
    stage3_prefetch_bucket_size: Count | Auto | None = None
    stage3_param_persistence_threshold: Count | Auto | None = None
    stage3_model_persistence_threshold: Count | None = None
    stage3_max_live_parameters: Count | None = None
    stage3_max_reuse_distance: Count | None = None
    stage3_gather_16bit_weights_on_model_save: bool | Auto | None = key(
        Ignored(
            "the export is Tunesmith's own, in the dtype that it says; remove the line", lambda value: value is True
        )
    )
    stage3_gather_fp16_weights_on_model_save: Absent = key(_renamed("stage3_gather_16bit_weights_on_model_save"))
    stage3_module_granularity_threshold: Count | None = None
    stage3_use_all_reduce_for_fetch_params: bool | None = None
    stage3_allgather_sequential: bool | None = None
    ignore_unused_parameters: bool | None = None
    legacy_stage1: OnlyFalse = key(Refused("the old ZeRO-1 is not supported"))
    round_robin_gradients: OnlyFalse = key(Refused("its layout is not the one that DeepSpeed reports"))
    parameter_alignment: bool | None = None
    zero_hpz_partition_size: Annotated[int, Field(ge=1, le=MAX_PROCESSES)] = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool | None = None
    pipeline_loading_checkpoint: bool | None = key(Ignored(f"{_OWN_CHECKPOINTS}; remove it"))
    override_module_apply: bool | None = None
    log_trace_cache_warnings: bool | None = None
    enable_sanity_checks: bool | None = None
    save_muon_momentum_buffer_in_memory: bool | None = key(Ignored("Muon is not supported; remove it"))
    leaf_module: LeafModule | None = None

    @property
    def quantized(self) -> list[str]:
        """Enabled keys of ZeRO++ that quantize communication."""
        return [name for name in QUANTIZED if getattr(self, name)]

    @property
    def zero_plus_plus(self) -> dict[str, Any]:
        """Enabled keys of ZeRO++, with their values."""
        second_copy = {"zero_hpz_partition_size": self.zero_hpz_partition_size}
        return dict.fromkeys(self.quantized, True) | (second_copy if self.zero_hpz_partition_size > 1 else {})


QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


class Fp16(JsonSection):
    """`fp16`, which may only be off or `"auto"`."""

    enabled: OnlyFalse | Auto | None = key(_COMPUTE_RULE)
    auto_cast: bool | float | None = None
    loss_scale: bool | float | None = None
    initial_scale_power: bool | float | None = None
    loss_scale_window: bool | float | None = None
    hysteresis: bool | float | None = None
    consecutive_hysteresis: bool | float | None = None
    min_loss_scale: bool | float | None = None
    fp16_master_weights_and_grads: bool | float | None = None


class Bf16(JsonSection):
    """`bf16`, which may only be off or `"auto"`."""

    enabled: OnlyFalse | Auto | None = key(_COMPUTE_RULE)
    immediate_grad_update: bool | float | None = None
    check_grad_overflow: bool | float | None = None
    bf16_master_weights_and_grads: bool | float | None = None
    bf16_optimizer_states: bool | float | None = None


class DataTypes(JsonSection):
    """`data_types`."""

    grad_accum_dtype: Literal["fp32"] | None = key(Refused("gradients are summed in fp32", "write fp32"))


class CommsLogger(JsonSection):
    """`comms_logger`."""

    enabled: bool | None = None
    prof_all: bool | None = None
    prof_ops: list[Any] | None = None
    verbose: bool | None = key(Ignored("the summary at the end counts each operation; remove it"))
    debug: bool | None = None


class FlopsProfiler(JsonSection):
    """`flops_profiler`."""

    enabled: bool | None = None
    recompute_fwd_factor: Annotated[float, Field(ge=0)] | None = None
    profile_step: Count | None = None
    module_depth: int | None = None
    top_modules: Count | None = None
    detailed: bool | None = None
    output_file: str | None = None


class Aio(JsonSection):
    """`aio`."""

    block_size: Count | None = None
    queue_depth: Count | None = None
    intra_op_parallelism: Count | None = None
    single_submit: bool | None = None
    overlap_events: bool | None = None
    use_gds: bool | None = None


def _all_auto(value: Any) -> bool:
    """Whether every parameter of a section is `"auto"`, as in many files written for transformers."""
    if not isinstance(value, dict) or not set(value) <= {"type", "params"}:
        return False
    params = value.get("params")
    return not value or (isinstance(params, dict) and bool(params) and all(each == AUTO for each in params.values()))


class DeepSpeedJson(JsonSection):
    """The whole file."""

    where: ClassVar[str] = ""

    train_batch_size: Auto | None = key(_BATCH)
    train_micro_batch_size_per_gpu: Auto | None = key(_BATCH)
    gradient_accumulation_steps: Auto | None = key(_BATCH)
    managed_gradient_accumulation: Absent = key(Refused("the script accumulates by itself"))
    gradient_clipping: Auto | None = key(
        Refused("max_grad_norm of the config sets gradient clipping", 'write "auto" or remove it')
    )
    zero_optimization: ZeroOptimization | None = None
    optimizer: Optimizer | None = None
    scheduler: Annotated[Any, Predicate(_all_auto)] = key(
        Refused("the script sets the learning rate at each step", f"remove it and use lr_scheduler_type; {topics.ZERO}")
    )
    fp16: Fp16 | None = None
    bf16: Bf16 | None = None
    amp: Off = key(_COMPUTE_RULE)
    torch_autocast: Off = key(_COMPUTE_RULE)
    data_types: DataTypes | None = None
    communication_data_type: Literal["fp32", "fp16", "bf16"] = "fp32"
    seq_parallel_communication_data_type: str | None = None
    prescale_gradients: OnlyFalse = key(_NO_SCALING)
    gradient_predivide_factor: Annotated[float, Field(ge=1, le=1)] | None = key(_NO_SCALING)
    gradient_allreduce_op: Literal["mean"] | None = key(Refused("the loss is scaled for a mean over ranks"))
    zero_allow_untested_optimizer: bool | None = key(
        Ignored("the script's own AdamW is one; remove it", lambda value: value is False)
    )
    zero_force_ds_cpu_optimizer: bool | None = None
    disable_allgather: bool | None = key(_NOT_READ)
    disable_python_gc: bool | None = None
    dump_state: bool | None = None
    log_level: str | None = None
    steps_per_print: Count | None = key(_NO_PRINT)
    wall_clock_breakdown: bool | None = key(_NO_PRINT)
    memory_breakdown: bool | None = None
    vocabulary_size: Count | None = key(_NOT_READ)
    comms_logger: CommsLogger | None = None
    flops_profiler: FlopsProfiler | None = None
    aio: Aio | None = None
    activation_checkpointing: Absent = key(
        Refused("the script recomputes by itself", f"use gradient_checkpointing: true in the config; {topics.MEMORY}")
    )
    checkpoint: Absent = key(_CHECKPOINTS)
    datastates: Absent = key(_CHECKPOINTS)
    compile: Absent = key(Refused("the script compiles by itself", "use torch_compile in the config"))
    tensorboard: Off = key(_OWN_METRICS)
    wandb: Off = key(_OWN_METRICS)
    csv_monitor: Off = key(_OWN_METRICS)
    comet: Off = key(_OWN_METRICS)
    tensor_parallel: Absent = key(
        Refused(
            "DeepSpeed's AutoTP splits by its own rules, which checkpoints and loss do not follow",
            f"write parallelism_config_tp_size into the YAML, as in zero2_tp; {topics.MIXES}",
        )
    )
    expert_parallel: Absent = key(_NO_PARALLELISM)
    use_data_before_expert_parallelism: Absent = key(_NO_PARALLELISM)
    pipeline: Absent = key(_NO_PARALLELISM)
    data_efficiency: Off = key(_OWN_PLAN)
    dataloader_drop_last: Absent = key(_OWN_PLAN)
    weight_quantization: Absent = key(_COMPUTE_RULE)
    hybrid_engine: Off = key(_UNREAD)
    autotuning: Off = key(_UNREAD)
    timers: Absent = key(_UNREAD)


WITHOUT_EFFECT = (
    *("scheduler", "amp", "torch_autocast", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("data_efficiency", "hybrid_engine", "autotuning"),
)
"""Sections that are only accepted if they have no effect."""
OUTPUT_PATHS = (
    "zero_optimization.offload_param.nvme_path",
    "zero_optimization.offload_optimizer.nvme_path",
    "flops_profiler.output_file",
)
"""Keys of paths that DeepSpeed writes to."""
GONE = {
    "sparse_attention": "removed from DeepSpeed; long rows: --strategy cp or sp, and packing",
    "progressive_layer_drop": "removed from DeepSpeed, and it changes the model; faster: --method lora, packing",
    "compression_training": "removed from DeepSpeed; smaller weights: --method qlora",
    "quantize_training": "removed from DeepSpeed; smaller weights: --method qlora",
    "eigenvalue": "removed from DeepSpeed with quantize_training",
    "curriculum_learning": "removed from DeepSpeed; the order of rows follows from the seed",
    "elasticity": "removed from DeepSpeed; a checkpoint resumes on any number of processes: resume --num_processes",
    "sparse_gradients": "removed from DeepSpeed; gradients of the embedding are dense",
    "nebula": "removed from DeepSpeed; checkpoints are Tunesmith's own",
    "graph_harvesting": "removed from DeepSpeed; --torch_compile true",
    "amp": "removed from DeepSpeed; --mixed_precision bf16",
    "autotuning": "instead: tunesmith plan and tunesmith bench",
    "hybrid_engine": "for reinforcement learning, which is not offered",
    "zero_optimization.mics_shard_size": "removed from DeepSpeed; shards within groups: --strategy hsdp",
    "zero_optimization.mics_hierarchical_params_gather": "removed from DeepSpeed; --strategy hsdp",
    "zero_optimization.zeropp_loco_param": "removed from DeepSpeed; quantized gradients are outside the promise",
}
"""Features that DeepSpeed 0.19 removed, or that a run has no use for, with what replaces them."""
