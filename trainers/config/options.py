"""Definition of every training option: name, type, range, unit, default and one sentence of help.

The command line, YAML files, web page and reference table are all generated from `TrainConfig`. Options are parsed
(from flags, YAML and presets) in `trainers/config/parse.py`. Imports no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from trainers.config.mistakes import ConfigError, Mistake, nearest
from trainers.config.objective_file import file_spec, short_name
from trainers.config.objectives import OBJECTIVES, ObjectiveSpec
from trainers.config.option_types import (
    IsoDate,
    Names,
    NoWord,
    Numbers,
    ObjectiveName,
    Optionally,
    Pairs,
    RankNames,
    RewardNames,
    Schedule,
    StepRange,
)  # fmt: skip

EMBEDDED = "embedded"
FIXED_DATE = "2024-07-26"
"""Default date passed to chat templates: the one that Llama's templates fall back to."""
MACHINE_OPTIONS = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
MESH_OPTIONS = ("tp_size", "cp_size", "sp_size", "ep_size", "dp_replicate_size")
LAUNCH_OPTIONS = ("strategy", *MESH_OPTIONS, "gpus", "num_processes", *MACHINE_OPTIONS, "min_machines")
UNKNOWN = "is not an option"
"""`Mistake.problem` of an unknown option."""
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


def _option(section: str, default: Any = ..., unit: str = "", choices: tuple[str, ...] = (), **constraints: Any) -> Any:
    extra: dict[str, Any] = {"section": section, "unit": unit, "choices": choices}
    return Field(default=default, json_schema_extra=extra, **constraints)


class TrainConfig(BaseModel):
    """All options of one fine-tuning run except its strategy, which the Accelerate file defines.

    Raises:
        pydantic.ValidationError: On unknown keys or invalid values; `trainers.config.validation.build` converts it to
            a `ConfigError`.
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain_values(cls, value: Any, info: ValidationInfo) -> Any:
        # Control characters, and those that reverse the direction of text, could disguise a value in logs.
        texts = [value] if isinstance(value, str) else [*value, *value.values()] if isinstance(value, dict) else []
        for text in texts:
            if any(ord(letter) < 32 or 0x202A <= ord(letter) <= 0x202E for letter in str(text)):
                raise ValueError("control characters are not allowed")
        if isinstance(value, str) and value.startswith("~") and os.path.expanduser(value) == value:
            raise ValueError("there is no such home folder")
        numbers = cls.model_fields[str(info.field_name)].annotation in (int, float)
        if numbers and isinstance(value, bool):
            raise ValueError("input should be a number, not true or false")
        return value

    # Model
    preset: Annotated[str | None, Optionally] = _option("model", None)
    """Preset to start from; options given here override its values."""
    model_name_or_path: str = _option("model", min_length=1)
    """Hub id or local folder of the base model; `embedded` is the small model that ships with Tunesmith."""
    model_revision: Annotated[str | None, Optionally] = _option("model", None)
    """Branch, tag or commit of the base model on the Hub."""
    from_run: Annotated[str | None, Optionally] = _option("model", None)
    """Start from a run's result: its name or folder, or the folder of an export or adapter."""
    trust_remote_code: bool = _option("model", False)
    """Allow custom model code from the model's repository; enable only if you have read and trust that code."""
    random_init: bool = _option("model", False)
    """Initialize the weights randomly from `seed` instead of loading the pretrained ones."""
    num_hidden_layers: Annotated[int | None, Optionally] = _option("model", None, "layers", ge=1, le=10**6)
    """Keep only the first N decoder layers, to try out a model that would not fit."""
    rope_scaling: Literal["none", "linear", "dynamic", "yarn", "llama3"] = _option("model", "none")
    """Scale the rotary position embeddings for rows longer than the model supports; none: as the model is."""
    rope_factor: Annotated[float | None, Optionally] = _option("model", None, "times", gt=1, le=1000)
    """How many times more positions than in pretraining rope_scaling makes room for."""
    rope_original_max_positions: Annotated[int | None, Optionally] = _option("model", None, "tokens", ge=8, le=2**24)
    """Positions in pretraining, for rope_scaling; default: what the model's config says."""
    attn_implementation: Literal["auto", "varlen", "flex", "documents", "sdpa", "eager"] = _option("model", "auto")
    """Attention kernel; each keeps packed documents apart; auto: the fastest that supports device, dtype and model."""

    # Method
    method: Literal["full", "lora", "qlora"] = _option("method", "lora")
    """Train all weights, LoRA adapters on a frozen base, or LoRA adapters on a base quantized to 4 bits (nf4)."""
    lora_r: int = _option("method", 16, ge=1, le=4096)
    """Rank of the adapters."""
    lora_alpha: float = _option("method", 32.0, gt=0)
    """LoRA scaling; the adapters' output is multiplied by alpha / r."""
    loraplus_lr_ratio: float = _option("method", 1.0, ge=1, le=10**4)
    """Learning rate of the adapters' B matrices over that of their A matrices (LoRA+); its paper advises 16."""
    lora_dropout: float = _option("method", 0.0, ge=0, lt=1)
    """Dropout on the adapters' input; above 0, runs are not covered by the parity promise."""
    lora_target_modules: Names = _option("method", ["all-linear"], min_length=1)
    """Modules that get an adapter: `all-linear`, or comma-separated name suffixes such as `q_proj,v_proj`."""
    use_rslora: bool = _option("method", False)
    """Rank-stabilized LoRA: scale by alpha / sqrt(r), which keeps training stable at high ranks."""

    # Objective
    objective: ObjectiveName = _option("objective", "sft", choices=tuple(OBJECTIVES))
    """What to train for: sft, distill, kto (good and bad answers), others (pairs); or your own, `path.py:Name`."""
    loss_type: Annotated[
        Literal[
            "sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "kto", "apo_zero_unpaired",
            "forward_kl", "reverse_kl", "jsd", "grpo", "dr_grpo", "dapo", "gspo", "rloo",
        ] | None, Optionally
    ] = _option("objective", None)  # fmt: skip
    """Form of the loss of dpo, cpo, kto, distill and grpo, see docs/objectives.md; default: the first."""
    teacher: Annotated[str | None, Optionally] = _option("objective", None)
    """Model that distill learns from: Hub id, folder, `embedded`, or a run that is done (its name or folder)."""
    teacher_log_probs: Annotated[str | None, Optionally] = _option("objective", None)
    """Folder in which `tunesmith record` kept what a teacher predicts; distill then loads no teacher."""
    jsd_beta: float = _option("objective", 0.5, gt=0, lt=1)
    """Share of the teacher in the mixture of jsd: near 0 it acts as forward_kl, near 1 as reverse_kl."""
    distill_temperature: float = _option("objective", 1.0, ge=0.01, le=100)
    """Divides the logits of both models before distill compares them; the loss is not multiplied by its square."""
    beta: Annotated[float | None, Optionally] = _option("objective", None, ge=0, le=1000)
    """Scale of rewards (0.1, simpo 2), KL weight of grpo (0): more keeps dpo, kto, grpo near the initial model."""
    label_smoothing: float = _option("objective", 0.0, ge=0, lt=0.5)
    """Share of pairs that are expected to be labelled the wrong way round; dpo (sigmoid, robust), simpo and cpo."""
    simpo_gamma: float = _option("objective", 1.0, ge=0, le=1000)
    """Margin by which simpo wants the reward of the chosen answer to be higher."""
    nll_weight: Annotated[float | None, Optionally] = _option("objective", None, ge=0, le=1000)
    """Weight of the supervised loss on (chosen) answers; default: 1 for cpo and orpo, otherwise 0."""
    desirable_weight: float = _option("objective", 1.0, ge=0, le=1000)
    """Weight of desirable examples in the loss of kto; balance it with their number."""
    undesirable_weight: float = _option("objective", 1.0, ge=0, le=1000)
    """Weight of undesirable examples in the loss of kto; balance it with their number."""
    center_rewards_coefficient: float = _option("objective", 0.0, ge=0, le=1000)
    """Weight of the squared sum of both scores of a pair in the loss of reward; centres scores at 0."""
    reward_funcs: RewardNames = _option("objective", ["exact_match"], min_length=1)
    """Rewards of answers, comma-separated: exact_match, math_verify, json_schema, or yours, `path.py:function`."""
    reward_weights: Numbers = _option("objective", [])
    """Weight of each reward, comma-separated; default: 1 each."""
    reward_schema: Annotated[str | None, Optionally] = _option("objective", None)
    """File of the JSON Schema that an answer must fit to get 1 from the reward json_schema."""
    reward_timeout: float = _option("objective", 60.0, "seconds", gt=0, le=10**6)
    """Time that the rewards of a step's answers may take."""
    num_generations: int = _option("objective", 8, "answers", ge=2, le=4096)
    """Answers that grpo samples for each prompt; a row of `global_batch_size` is a prompt."""
    steps_per_generation: int = _option("objective", 1, "steps", ge=1, le=1024)
    """Steps whose answers are sampled at once, before the first of them; epsilon holds the later ones."""
    max_completion_length: int = _option("objective", 256, "tokens", ge=1, le=2**20)
    """Tokens of a sampled answer at most; prompt and answer fit into `max_length`."""
    temperature: float = _option("objective", 1.0, ge=0.01, le=100)
    """Divides the logits of grpo where it samples and where it trains; evaluation takes the most likely tokens."""
    epsilon: float = _option("objective", 0.2, gt=0, lt=1)
    """How far grpo lets a probability ratio go before it clips it."""
    epsilon_high: Annotated[float | None, Optionally] = _option("objective", None, gt=0, le=1000)
    """The same upwards, as in DAPO (0.28); default: epsilon."""
    importance_sampling_cap: float = _option("objective", 2.0, gt=0, le=1000)
    """Most that a sampled token counts where the sampler's probability is below that of training."""
    mask_truncated_completions: bool = _option("objective", False)
    """Learn nothing from answers that were cut at `max_completion_length`."""
    recorded_answers: Annotated[str | None, Optionally] = _option("objective", None)
    """Folder `rollouts` of a run, whose answers and rewards are taken in place of sampling."""
    sampler_url: Annotated[str | None, Optionally] = _option("objective", None)
    """Address of a vLLM server that samples the answers (method=lora); default: the run's processes."""

    # Data
    dataset_name: str = _option("data", min_length=1)
    """Training data: a file, folder, glob or Hub id; `embedded` is the data set that ships with Tunesmith."""
    dataset_config_name: Annotated[str | None, Optionally] = _option("data", None)
    """Configuration (subset) of a Hub data set."""
    dataset_split: str = _option("data", "train", min_length=1)
    """Split of a Hub data set to train on."""
    eval_dataset_name: Annotated[str | None, Optionally] = _option("data", None)
    """Evaluation data: a file, folder, glob or Hub id, as for `dataset_name`."""
    eval_split: str = _option("data", "eval", min_length=1)
    """Split of `eval_dataset_name` when that is a Hub data set."""
    eval_share: float = _option("data", 0.0, ge=0, lt=1)
    """Share of the training rows held out for evaluation when no `eval_dataset_name` is given."""
    dataset_format: Literal[
        "auto", "chat", "sharegpt", "alpaca", "prompt_completion", "text", "preference", "labelled", "prompt"
    ] = _option("data", "auto")
    """Row format; `auto` detects it from the columns."""
    columns: Pairs = _option("data", {})
    """Column names of your data by role, such as `prompt=question,completion=answer`."""
    sample_by: Literal["line", "paragraph", "document"] = _option("data", "line")
    """What counts as one document in a plain text file."""
    chat_template: Annotated[str | None, Optionally] = _option("data", None)
    """Jinja file that replaces the tokenizer's chat template."""
    assistant_only_loss: bool = _option("data", True)
    """Compute the loss on assistant (or completion) tokens only; plain text always trains on all tokens."""
    thoughts: Literal["keep", "drop", "train_empty"] = _option("data", "keep")
    """Reasoning before replies: train on it, or drop it; train_empty: also train on a template's empty think block."""
    template_date: IsoDate = _option("data", FIXED_DATE)
    """Date for chat templates that insert today's; fixed, so the same data gives the same tokens on any day."""
    max_length: int = _option("data", 1024, "tokens", ge=8, le=2**24)
    """Maximum length of a training row."""
    overlong: Literal["truncate", "drop", "split", "refuse"] = _option("data", "truncate")
    """What to do with rows longer than `max_length`; they are counted and reported."""
    packing: bool = _option("data", True)
    """Pack several documents into each row of `max_length`; attention never crosses document boundaries."""
    group_by_length: bool = _option("data", True)
    """Without packing, batch rows of similar length together to save padding."""
    bad_rows: Literal["refuse", "skip"] = _option("data", "refuse")
    """Refuse data that has unreadable rows, or skip those rows and list them."""
    max_train_samples: Annotated[int | None, Optionally] = _option("data", None, "rows", ge=1, le=10**12)
    """Use only the first N rows of the training data."""
    max_eval_samples: Annotated[int | None, Optionally] = _option("data", None, "rows", ge=1, le=10**12)
    """Use only the first N rows of the evaluation data."""
    dataset_num_proc: Annotated[int | None, Optionally] = _option("data", None, "processes", ge=1, le=4096)
    """Number of tokenization processes; default: one per core, a single one for small data."""
    cache_dir: Annotated[str | None, Optionally] = _option("data", None)
    """Folder for tokenized data; default: `tunesmith` in the user's cache folder."""

    # Batch
    global_batch_size: int = _option("batch", 16, "rows", ge=1, le=10**9)
    """Rows per optimizer step across all processes; gradient accumulation is derived from it."""
    per_device_train_batch_size: int = _option("batch", 1, "rows", ge=1, le=2**20)
    """Rows per micro-batch on each process; changes speed and memory, not the result."""
    per_device_eval_batch_size: int = _option("batch", 8, "rows", ge=1, le=2**20)
    """Rows per evaluation batch on each process."""
    num_train_epochs: float = _option("batch", 1.0, "epochs", gt=0, le=10**9)
    """Passes over the training data."""
    max_steps: Annotated[int | None, Optionally] = _option("batch", None, "steps", ge=1, le=10**12)
    """Number of optimizer steps; overrides `num_train_epochs`."""

    # Optimizer
    optim: Literal["adamw", "adamw_8bit"] = _option("optimizer", "adamw")
    """AdamW with fp32 states, or with 8-bit states: a quarter of the memory; not covered by the parity promise."""
    learning_rate: float = _option("optimizer", 2e-4, gt=0, le=10)
    """Peak learning rate of AdamW."""
    lr_scaling: Literal["none", "linear", "sqrt"] = _option("optimizer", "none")
    """Scale the learning rate by global_batch_size / lr_scaling_batch_size, or by its square root."""
    lr_scaling_batch_size: Annotated[int | None, Optionally] = _option("optimizer", None, "rows", ge=1, le=10**9)
    """Global batch size for which `learning_rate` was chosen."""
    lr_scheduler_type: Schedule = _option("optimizer", "cosine")
    """Learning-rate schedule after warm-up."""
    min_lr_ratio: float = _option("optimizer", 0.0, ge=0, le=1)
    """Final learning rate of the schedules that decay, as a fraction of the peak."""
    lr_num_cycles: int = _option("optimizer", 1, "cycles", ge=1, le=10**6)
    """Cosines of cosine_with_restarts, each from the peak."""
    lr_power: float = _option("optimizer", 1.0, gt=0, le=100)
    """Power of the polynomial schedule; 1 is linear."""
    lr_decay_ratio: float = _option("optimizer", 0.1, gt=0, le=1)
    """Decay of warmup_stable_decay as a fraction of all steps; before it, the rate is constant."""
    lr_decay_type: Literal["linear", "cosine", "1-sqrt"] = _option("optimizer", "linear")
    """Shape of that decay; 1-sqrt: 1 - the square root of what is over."""
    warmup_steps: int = _option("optimizer", 0, "steps", ge=0, le=10**12)
    """Number of warm-up steps, over which the learning rate rises from 0; overrides `warmup_ratio`."""
    warmup_ratio: float = _option("optimizer", 0.0, ge=0, le=1)
    """Warm-up as a fraction of all steps."""
    weight_decay: float = _option("optimizer", 0.0, ge=0)
    """Decoupled weight decay, applied to matrices only; norms and biases are not decayed."""
    adam_beta1: float = _option("optimizer", 0.9, ge=0, lt=1)
    """AdamW's beta1: decay rate of the first moment."""
    adam_beta2: float = _option("optimizer", 0.999, ge=0, lt=1)
    """AdamW's beta2: decay rate of the second moment."""
    adam_epsilon: float = _option("optimizer", 1e-8, gt=0)
    """AdamW's epsilon, added to the denominator for numerical stability."""
    max_grad_norm: float = _option("optimizer", 1.0, ge=0)
    """Maximum global gradient norm; 0: log the norm without clipping."""

    # Precision and memory
    mixed_precision: Annotated[Literal["no", "fp16", "bf16", "fp8"], NoWord] = _option("precision", "no")
    """Dtype of matmuls (fp8: linear layers only, else bf16); trained weights, norms, softmax and loss stay fp32."""
    master_weights: bool = _option("precision", True)
    """Keep trained weights in fp32; false: bf16 with stochastic rounding for larger models, not covered by parity."""
    gradient_checkpointing: bool = _option("precision", False)
    """Recompute activations in the backward pass: less memory for about a third more time."""
    selective_checkpointing: bool = _option("precision", False)
    """With gradient_checkpointing, save matmul and attention outputs (expensive to recompute); recompute the rest."""
    activation_offloading: bool = _option("precision", False)
    """With gradient_checkpointing, offload each layer's saved input to CPU memory until the backward pass."""
    torch_compile: bool = _option("precision", False)
    """Compile the decoder layers with torch.compile; worthwhile on GPUs with packed rows."""
    tf32: bool = _option("precision", False)
    """Allow TF32 matmuls on GPUs; not covered by the parity promise."""
    deterministic: bool = _option("precision", False)
    """Use deterministic kernels on GPUs, at some cost in speed; CPU runs are always deterministic."""

    # Data parallel
    ddp_comm_hook: Literal["none", "fp16", "bf16", "power_sgd"] = _option("ddp", "none")
    """Compress DDP's gradient all-reduce; not covered by the parity promise."""
    ddp_bucket_cap_mb: int = _option("ddp", 25, "MiB", ge=1, le=2**20)
    """Size of DDP's gradient all-reduce buckets."""
    ddp_find_unused_parameters: bool = _option("ddp", False)
    """Freeze weights that get no gradient from any text, under every strategy, instead of refusing their model."""

    # Pipeline
    pp_size: Annotated[int | None, Optionally] = _option("pipeline", None, "stages", ge=1, le=65_536)
    """Number of pipeline stages; default: the value in the strategy's file."""
    pp_schedule: Annotated[Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] | None, Optionally] = _option(
        "pipeline", None
    )
    """Pipeline schedule; default: the value in the strategy's file."""

    # Evaluation
    eval_steps: int = _option("evaluation", 0, "steps", ge=0, le=10**12)
    """Evaluate every N steps; 0: only at the end."""
    eval_on_start: bool = _option("evaluation", False)
    """Evaluate once before the first step."""
    load_best_model_at_end: bool = _option("evaluation", False)
    """Export the weights with the best evaluation result instead of the last ones."""
    metric_for_best_model: Literal["eval_loss", "eval_token_accuracy", "eval_reward_accuracy", "eval_reward"] = _option(
        "evaluation", "eval_loss"
    )
    """Metric that decides which checkpoint is the best."""
    early_stopping_patience: Annotated[int | None, Optionally] = _option(
        "evaluation", None, "evaluations", ge=1, le=10**9
    )
    """Stop after N evaluations without improvement."""
    early_stopping_threshold: float = _option("evaluation", 0.0, ge=0)
    """Minimum change that counts as an improvement."""

    # Run
    run_name: Annotated[str | None, Optionally] = _option("run", None, max_length=100)
    """Name of the run, shown in lists and trackers."""
    runs_dir: str = _option("run", "runs", min_length=1)
    """Parent folder of run folders."""
    output_dir: Annotated[str | None, Optionally] = _option("run", None)
    """The run folder itself, new or empty; default: a new folder in `runs_dir`."""
    resume_from_checkpoint: Annotated[str | None, Optionally] = _option("run", None)
    """`auto` for the newest good checkpoint of `output_dir`, or the path of one."""
    force_resume: bool = _option("run", False)
    """Resume although data, options or code have changed since the checkpoint was saved."""
    seed: int = _option("run", 42, ge=0, le=2**32 - 1)
    """Seed for weight initialization, data order and dropout."""
    logging_steps: int = _option("run", 10, "steps", ge=1, le=10**12)
    """Log metrics every N steps."""
    save_steps: int = _option("run", 500, "steps", ge=0, le=10**12)
    """Save a checkpoint every N steps; 0: only at the end."""
    save_total_limit: int = _option("run", 2, "checkpoints", ge=2, le=10**9)
    """Number of checkpoints to keep, not counting the best one."""
    checkpoint_url: Annotated[str | None, Optionally] = _option("run", None, max_length=1000)
    """Also copy each checkpoint to this fsspec URL, such as s3://bucket/run, and resume from it."""
    max_restarts: int = _option("run", 3, "restarts", ge=0, le=1000)
    """Maximum number of automatic restarts from the newest checkpoint, as long as each attempt makes progress."""
    hang_timeout: int = _option("run", 600, "seconds", ge=0, le=10**9)
    """Restart a run when a rank makes no progress for this long; 0: never. Start, save and export get half an hour."""
    non_finite: Literal["stop", "skip"] = _option("run", "stop")
    """On a non-finite loss or gradient: stop the run, or skip the update (at most ten in a row)."""
    loss_spike_factor: float = _option("run", 0.0, ge=0)
    """Roll back to a checkpoint when the loss exceeds N times its recent median, and skip those steps; 0: never."""
    stop_at_step: Annotated[int | None, Optionally] = _option("run", None, "steps", ge=1, le=10**12)
    """Evaluate, save and stop after this step; `resume` with another value, or `none`, goes on as if never stopped."""
    auto_find_batch_size: bool = _option("run", False)
    """On out of memory, restart with half the per_device_train_batch_size and the same global batch."""
    share_gpus: bool = _option("run", False)
    """Start even if another run uses the same GPUs, instead of waiting for them."""
    report_to: Names = _option("run", [])
    """Trackers in addition to `metrics.jsonl`, comma-separated: tensorboard, wandb, trackio, mlflow."""
    profile_steps: StepRange = _option("run", None)
    """First and last step to profile, such as 10:13: writes a trace and a summary into the run folder."""
    profile_ranks: RankNames = _option("run", ["0"], min_length=1)
    """Ranks to profile, comma-separated, or all."""
    merge_adapter: bool = _option("run", False)
    """Merge the adapters into the base model and export full weights."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option("run", "auto")
    """Dtype of the exported weights; auto: the dtype of the base model's files."""
    control: Literal["none", "mean-of-means"] = _option("run", "none")
    """Train with a deliberate, well-known mistake, so that `tunesmith prove` can show that it detects it."""

    def scaled_learning_rate(self) -> float:
        """Returns the peak learning rate after applying `lr_scaling`."""
        if self.lr_scaling == "none" or self.lr_scaling_batch_size is None:
            return self.learning_rate
        factor = self.global_batch_size / self.lr_scaling_batch_size
        return self.learning_rate * (factor if self.lr_scaling == "linear" else math.sqrt(factor))

    def accumulation_steps(self, data_parallel_size: int) -> int:
        """Returns the number of micro-batches per step on each of `data_parallel_size` ranks.

        Raises:
            ConfigError: If the global batch does not divide evenly; the message shows the arithmetic.
        """
        micro = self.per_device_train_batch_size
        rows, total = micro * data_parallel_size, self.global_batch_size
        if total % rows == 0:
            return total // rows
        ways = [f"use {max(1, round(total / rows)) * rows}"]
        fits = [n for n in range(data_parallel_size, 0, -1) if total % (micro * n) == 0]
        ways += [f"{n} data-parallel rank{'s' * (n > 1)}" for n in fits[:1]]
        ranks = f"{data_parallel_size} data-parallel ranks"
        problem = f"is not divisible by per_device_train_batch_size={micro} x {ranks} = {rows}"
        raise ConfigError.about("global_batch_size", total, problem, ", or ".join(ways))

    @property
    def label(self) -> str:
        """What the id of a run says that has no name of its own."""
        return self.preset or (short_name(self.objective) if self.from_run else self.model_name_or_path)

    @property
    def objective_spec(self) -> ObjectiveSpec:
        """What the objective needs and reports, under the config's `loss_type`.

        Raises:
            ConfigError: If it is in a file that cannot be read or does not say so.
        """
        if self.objective not in OBJECTIVES:
            return file_spec(self.objective)
        return OBJECTIVES[self.objective].variant(self.loss_type)

    @property
    def example_tokens(self) -> int:
        """Most tokens of an example, over all of its documents."""
        return self.max_length * self.objective_spec.documents

    @property
    def row_tokens(self) -> int:
        """Most tokens of a row: an example fits in a packed one, and a document in one without packing."""
        return self.example_tokens if self.packing else self.max_length

    def objective_options(self) -> dict[str, Any]:
        """Returns the values of the options that the objective reads, with its own defaults."""
        spec, values = self.objective_spec, dict[str, Any]()
        for name, default in spec.defaults.items():
            values[name] = default if getattr(self, name) is None else getattr(self, name)
        return {"loss_type": self.loss_type or spec.loss_types[0], **values} if spec.loss_types else values

    @property
    def penalizes_kl(self) -> bool:
        """Whether sampled answers lose by their divergence from the initial model."""
        return self.objective_spec.samples and self.objective_options()["beta"] > 0

    def profiled_steps(self) -> tuple[int, int] | None:
        """Returns the first and the last step to profile, counted from 1; None if there are none."""
        if self.profile_steps is None:
            return None
        first, _, last = self.profile_steps.partition(":")
        return int(first), int(last)

    def small_optimizer(self) -> bool:
        """Whether weights or Adam states are kept below fp32, which takes Tunesmith's own optimizer."""
        return self.optim != "adamw" or not self.master_weights

    def has_evaluation(self) -> bool:
        """Whether there is evaluation data, named or held out."""
        return self.eval_dataset_name is not None or self.eval_share > 0

    def outside_parity(self) -> list[str]:
        """Returns the choices to warn about because they void the promise that the strategy never changes the model.

        Excludes bf16, which most runs use and for which a tolerance was measured; see `precision_lines`.
        """
        choices = []
        if self.ddp_comm_hook != "none":
            choices.append(f"ddp_comm_hook={self.ddp_comm_hook}")
        if self.method != "full" and self.lora_dropout > 0:
            choices.append(f"lora_dropout={self.lora_dropout}")
        if self.optim != "adamw":
            choices.append(f"optim={self.optim}")
        if not self.master_weights:
            choices.append("master_weights=false")
        if self.tf32:
            choices.append("tf32=true")
        if self.control != "none":
            choices.append(f"control={self.control} (a deliberate fault)")
        if self.mixed_precision in ("fp16", "fp8"):
            choices.append(f"mixed_precision={self.mixed_precision} (its own measured band)")
        return choices


def precision_lines(config: TrainConfig) -> list[str]:
    """Explains what bf16 means for parity between strategies; empty for other dtypes."""
    if config.mixed_precision != "bf16":
        return []
    return ["mixed_precision=bf16: matrix products in bf16; strategies agree within its measured band, not to the bit"]


def unknown_option(name: str, known: Iterable[str] | None = None, verb: str = "train") -> Mistake:
    """Returns the mistake for an unknown option.

    Args:
        name: The given name.
        known: The valid names; default: those of `TrainConfig`.
        verb: The `tunesmith` command whose help lists the options.
    """
    if name in LAUNCH_OPTIONS:
        remedy = f"write --{name} on the command line of `tunesmith {verb}`"
        return Mistake(name, None, "is not an option of the config", remedy)
    remedy = nearest(name, known or TrainConfig.model_fields, f"`tunesmith {verb} --help` lists all options")
    return Mistake(name, None, UNKNOWN, remedy)
