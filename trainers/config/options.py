"""Definition of every training option: name, type, range, unit, default and one sentence of help.

The command line, YAML files, web page and reference table are all generated from `TrainConfig`. Options are parsed
(from flags, YAML and presets) in `trainers/config/parse.py`. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from trainers.config.data_options import DataOptions
from trainers.config.mistakes import ConfigError, Mistake, nearest
from trainers.config.model_options import MethodOptions, ModelOptions
from trainers.config.objective_file import file_spec, short_name
from trainers.config.objective_options import ObjectiveOptions
from trainers.config.objectives import LABELLED, OBJECTIVES, ObjectiveSpec
from trainers.config.optimizer_options import (
    ADAMW,
    AVERAGE_BYTES,
    SCHEDULE_FREE,
    SETTINGS_OF,
    STATE_BYTES,
    BatchOptions,
    OptimizerOptions,
)
from trainers.config.option_types import Names, NoWord, Optionally, RankNames, StepRange, option

EMBEDDED = "embedded"
MACHINE_OPTIONS = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
MESH_OPTIONS = ("tp_size", "cp_size", "sp_size", "ep_size", "dp_replicate_size")
LAUNCH_OPTIONS = ("strategy", *MESH_OPTIONS, "gpus", "num_processes", *MACHINE_OPTIONS, "min_machines")
_QUANTIZATION = {
    "load_in_4bit": ("is not an option", "use --method qlora"),
    "load_in_8bit": (
        "is not offered: LLM.int8 rounds the inputs of a layer too, by what is large in any row of the batch, so that "
        "strategy and packing would change the model",
        "use --method qlora, whose base is in 4 bits",
    ),
}
"""Options of transformers' bitsandbytes config: what is wrong with them, and the remedy."""
UNKNOWN = "is not an option"
"""`Mistake.problem` of an unknown option."""
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab", "comet_ml")


class TrainConfig(
    OptimizerOptions, BatchOptions, DataOptions, ObjectiveOptions, MethodOptions, ModelOptions
):  # pydantic lists the fields of the last base first
    """All options of one fine-tuning run except its strategy, which the Accelerate file defines.

    Raises:
        pydantic.ValidationError: On unknown keys or invalid values; `trainers.config.validation.build` converts it to
            a `ConfigError`.
    """

    # Precision and memory
    mixed_precision: Annotated[Literal["no", "fp16", "bf16", "fp8"], NoWord] = option("precision", "no")
    """Dtype of matmuls (fp8: linear layers only, else bf16); trained weights, norms, softmax and loss stay fp32."""
    master_weights: bool = option("precision", True)
    """Keep trained weights in fp32; false: bf16 with stochastic rounding for larger models, not covered by parity."""
    gradient_checkpointing: bool = option("precision", False)
    """Recompute activations in the backward pass: less memory for about a third more time."""
    selective_checkpointing: bool = option("precision", False)
    """With gradient_checkpointing, save matmul and attention outputs (expensive to recompute); recompute the rest."""
    activation_offloading: bool = option("precision", False)
    """With gradient_checkpointing, offload each layer's saved input to CPU memory until the backward pass."""
    torch_compile: bool = option("precision", False)
    """Compile the decoder layers with torch.compile; worthwhile on GPUs with packed rows."""
    tf32: bool = option("precision", False)
    """Allow TF32 matmuls on GPUs; not covered by the parity promise."""
    deterministic: bool = option("precision", False)
    """Use deterministic kernels on GPUs, at some cost in speed; CPU runs are always deterministic."""

    # Data parallel
    ddp_backend: Literal["auto", "nccl", "gloo", "cpu:gloo,cuda:nccl"] = option("ddp", "auto")
    """Backend between ranks; auto: NCCL on GPUs, gloo on CPUs. gloo on GPUs: with `ddp` only."""
    ddp_timeout: Annotated[int | None, Optionally] = option("ddp", None, "seconds", ge=1, le=10**9)
    """Limit of a collective; default: 5 minutes more than `hang_timeout`, at least 35 minutes."""
    ddp_comm_hook: Literal["none", "fp16", "bf16", "power_sgd"] = option("ddp", "none")
    """Compress DDP's gradient all-reduce; not covered by the parity promise."""
    ddp_bucket_cap_mb: int = option("ddp", 25, "MiB", ge=1, le=2**20)
    """Size of DDP's gradient all-reduce buckets."""
    ddp_find_unused_parameters: bool = option("ddp", False)
    """Freeze weights that get no gradient from any text, under every strategy, instead of refusing their model."""

    # Pipeline
    pp_size: Annotated[int | None, Optionally] = option("pipeline", None, "stages", ge=1, le=65_536)
    """Number of pipeline stages; default: the value in the strategy's file."""
    pp_schedule: Annotated[Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] | None, Optionally] = option(
        "pipeline", None
    )
    """Pipeline schedule; default: the value in the strategy's file."""

    # Evaluation
    eval_steps: int = option("evaluation", 0, "steps", ge=0, le=10**12)
    """Evaluate every N steps; 0: only at the end."""
    eval_on_start: bool = option("evaluation", False)
    """Evaluate once before the first step."""
    load_best_model_at_end: bool = option("evaluation", False)
    """Export the weights with the best evaluation result instead of the last ones."""
    metric_for_best_model: Literal["eval_loss", "eval_token_accuracy", "eval_reward_accuracy", "eval_reward"] = option(
        "evaluation", "eval_loss"
    )
    """Metric that decides which checkpoint is the best."""
    early_stopping_patience: Annotated[int | None, Optionally] = option(
        "evaluation", None, "evaluations", ge=1, le=10**9
    )
    """Stop after N evaluations without improvement."""
    early_stopping_threshold: float = option("evaluation", 0.0, ge=0)
    """Minimum change that counts as an improvement."""
    eval_only: bool = option("evaluation", False)
    """Train nothing: write the loss of each evaluation row, and the answer, to evaluation.jsonl."""
    eval_answer_tokens: int = option("evaluation", 0, "tokens", ge=0, le=10**6)
    """Longest answer to an evaluation row, with eval_only or eval_generate_steps; 0: no answers."""
    eval_generate_steps: int = option("evaluation", 0, "steps", ge=0, le=10**12)
    """Answer the same prompts every N steps and at the end, into answers.jsonl; 0: never."""
    eval_generate_prompts: int = option("evaluation", 5, "prompts", ge=1, le=100)
    """How many prompts of the evaluation data eval_generate_steps answers."""

    # Run
    run_name: Annotated[str | None, Optionally] = option("run", None, max_length=100)
    """Name of the run, shown in lists and trackers."""
    runs_dir: str = option("run", "runs", min_length=1)
    """Parent folder of run folders."""
    output_dir: Annotated[str | None, Optionally] = option("run", None)
    """The run folder itself, new or empty; default: a new folder in `runs_dir`."""
    resume_from_checkpoint: Annotated[str | None, Optionally] = option("run", None)
    """`auto` for the newest good checkpoint of `output_dir`, or the path of one."""
    force_resume: bool = option("run", False)
    """Resume although data, options or code have changed since the checkpoint was saved."""
    seed: int = option("run", 42, ge=0, le=2**32 - 1)
    """Seed for weight initialization, data order and dropout."""
    logging_steps: int = option("run", 10, "steps", ge=1, le=10**12)
    """Log metrics every N steps."""
    save_steps: int = option("run", 500, "steps", ge=0, le=10**12)
    """Save a checkpoint every N steps; 0: only at the end."""
    save_total_limit: int = option("run", 2, "checkpoints", ge=2, le=10**9)
    """Number of checkpoints to keep, not counting the best one."""
    checkpoint_url: Annotated[str | None, Optionally] = option("run", None, max_length=1000)
    """Also copy each checkpoint to this fsspec URL, such as s3://bucket/run, and resume from it."""
    max_restarts: int = option("run", 3, "restarts", ge=0, le=1000)
    """Maximum number of automatic restarts from the newest checkpoint, as long as each attempt makes progress."""
    hang_timeout: int = option("run", 600, "seconds", ge=0, le=10**9)
    """Restart a run when a rank makes no progress for this long; 0: never. Start, save and export get half an hour."""
    non_finite: Literal["stop", "skip"] = option("run", "stop")
    """On a non-finite loss or gradient: stop the run, or skip the update (at most ten in a row)."""
    loss_spike_factor: float = option("run", 0.0, ge=0)
    """Roll back to a checkpoint when the loss exceeds N times its recent median, and skip those steps; 0: never."""
    stop_at_step: Annotated[int | None, Optionally] = option("run", None, "steps", ge=1, le=10**12)
    """Evaluate, save and stop after this step; `resume` goes on as if never stopped."""
    auto_find_batch_size: bool = option("run", False)
    """On out of memory, restart with half the per_device_train_batch_size and the same global batch."""
    share_gpus: bool = option("run", False)
    """Start even if another run uses the same GPUs, instead of waiting for them."""
    report_to: Names = option("run", [])
    """Trackers beside `metrics.jsonl`: tensorboard, wandb, trackio, mlflow, swanlab, comet_ml."""
    profile_steps: StepRange = option("run", None)
    """First and last step to profile, such as 10:13: writes a trace and a summary into the run folder."""
    profile_ranks: RankNames = option("run", ["0"], min_length=1)
    """Ranks to profile, comma-separated, or all."""
    merge_adapter: bool = option("run", False)
    """Merge the adapters into the base model and export full weights."""
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("run", "auto")
    """Dtype of the exported weights; auto: the dtype of the base model's files."""
    control: Literal["none", "mean-of-means"] = option("run", "none")
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
        if self.eval_only:  # no batch is trained, so any number of ranks will do
            return 1
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
    def training_data(self) -> str:
        """Name of the training data, as the user gave it: of a data set, or of the file of a mix."""
        return self.mix or self.dataset_name or ""

    @property
    def objective_spec(self) -> ObjectiveSpec:
        """What the objective needs and reports, under the config's `loss_type`.

        Raises:
            ConfigError: If it is in a file that cannot be read or does not say so.
        """
        if self.objective not in OBJECTIVES:
            return file_spec(self.objective)
        spec = OBJECTIVES[self.objective].variant(self.loss_type)
        is_labelled = self.eval_only and self.dataset_format == LABELLED  # an evaluation leaves out undesirable answers
        return replace(spec, formats=(LABELLED,)) if is_labelled else spec

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
        """Whether weights or Adam states are kept below fp32, which takes Tunesmith's own AdamW."""
        return self.optim == "adamw_8bit" or not self.master_weights

    def state_bytes(self, in_layers: float, elsewhere: float = 0.0) -> float:
        """Returns the bytes of optimizer state, and of the moving average of the weights.

        Args:
            in_layers: Number of trained weights in the layers; their norms and biases are too few to count apart.
            elsewhere: Number of trained weights of embedding and head.
        """
        inside, outside = STATE_BYTES[self.optim]
        average = 0.0 if self.ema_decay is None else AVERAGE_BYTES
        return in_layers * (inside + average) + elsewhere * (outside + average)

    def saved_state_bytes(self, in_layers: float, elsewhere: float = 0.0) -> float:
        """Returns the bytes of optimizer state in a checkpoint, where states of 8 bits are in fp32.

        Args:
            in_layers: As for `state_bytes`.
            elsewhere: Likewise.
        """
        saved = self.model_copy(update={"optim": "adamw"}) if self.optim in ADAMW else self
        return saved.state_bytes(in_layers, elsewhere)

    def has_evaluation(self) -> bool:
        """Whether there is evaluation data, named or held out."""
        return self.eval_dataset_name is not None or self.eval_share > 0

    @property
    def generates_answers(self) -> bool:
        """Whether prompts of the evaluation data are answered while it trains."""
        return self.eval_generate_steps > 0 and not self.eval_only

    def outside_parity(self) -> list[str]:
        """Returns the choices to warn about because they void the promise that the strategy never changes the model.

        Excludes bf16, which most runs use and for which a tolerance was measured; see `precision_lines`.
        """
        choices = []
        if self.ddp_comm_hook != "none":
            choices.append(f"ddp_comm_hook={self.ddp_comm_hook}")
        if self.method != "full" and self.lora_dropout > 0:
            choices.append(f"lora_dropout={self.lora_dropout}")
        if self.optim == "adamw_8bit":
            choices.append(f"optim={self.optim}")
        if not self.master_weights:
            choices.append("master_weights=false")
        if self.tf32:
            choices.append("tf32=true")
        if self.control != "none":
            choices.append(f"control={self.control} (a deliberate fault)")
        if self.mixed_precision in ("fp16", "fp8"):
            choices.append(f"mixed_precision={self.mixed_precision} (its own measured band)")
        if self.qat != "none":
            choices.append(f"qat={self.qat} (rounding turns a difference in the last bit into a step)")
        return choices


def precision_lines(config: TrainConfig) -> list[str]:
    """Explains what bf16 means for parity between strategies; empty for other dtypes."""
    if config.mixed_precision != "bf16":
        return []
    return ["mixed_precision=bf16: matrix products in bf16; strategies agree within its measured band, not to the bit"]


def optimizer_lines(config: TrainConfig) -> list[str]:
    """Returns a line with the settings that an optimizer other than AdamW reads; empty for AdamW."""
    if config.optim in ADAMW:
        return []
    settings = ", ".join(f"{name}={getattr(config, name)}" for name in SETTINGS_OF[config.optim])
    notes = {
        "lion": "a learning rate for AdamW is 3 to 10 times too high for it",
        "muon": "Muon for the matrices of the layers, in fp32, AdamW for all else",
        SCHEDULE_FREE: "the log's losses are of the point that gradients are taken at; evaluations and exports, of the "
        "average",
        "adafactor": "second moments by rows and columns, no first; the learning rate is not scaled by the weights",
    }
    return [f"optim={config.optim}: {settings}{'; ' * bool(settings)}{notes[config.optim]}"]


def average_lines(config: TrainConfig) -> list[str]:
    """Returns a line about where the moving average of the weights is used; empty without it."""
    if config.ema_decay is None:
        return []
    uses = "training, evaluations and the run's own export use the weights themselves"
    return [f"ema_decay={config.ema_decay}: `tunesmith export RUN --ema` exports the moving average; {uses}"]


def choice_lines(config: TrainConfig) -> list[str]:
    """Returns what the log says about precision, optimizer and average."""
    return precision_lines(config) + optimizer_lines(config) + average_lines(config)


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
    if name in _QUANTIZATION:
        return Mistake(name, None, *_QUANTIZATION[name])
    remedy = nearest(name, known or TrainConfig.model_fields, f"`tunesmith {verb} --help` lists all options")
    return Mistake(name, None, UNKNOWN, remedy)
