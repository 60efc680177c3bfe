"""The options of the batch, the optimizer and its learning rate. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from trainers.config.option_types import Optionally, OptionGroup, Schedule, option

ADAMW = ("adamw", "adamw_8bit")
SCHEDULE_FREE = "schedule_free_adamw"
STEPPED = "z"
"""Key of the point that schedule-free AdamW steps from, among a weight's states, in memory and in checkpoints."""
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
SETTINGS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ADAMW, _ADAM),
    "lion": ("lion_beta1", "lion_beta2"),
    "muon": ("muon_momentum", *_ADAM),
    "adafactor": (),
    SCHEDULE_FREE: _ADAM,
}
"""The options that each optimizer reads, next to learning rate and weight decay."""
STATE_BYTES = {
    "adamw": (8.0, 8.0),
    "adamw_8bit": (2 + 8 / 256, 2 + 8 / 256),
    "lion": (4.0, 4.0),
    "muon": (4.0, 8.0),
    "adafactor": (0.02, 0.02),
    SCHEDULE_FREE: (8.0, 8.0),
}
"""Bytes of optimizer state per trained weight in layers and elsewhere: a momentum, two moments, or their codes.

Adafactor's are those of a matrix of 400 rows and columns; larger ones have less, adapters more, of little in all."""
AVERAGE = "ema"
"""Key of the moving average among a weight's states, in memory and in checkpoints."""
AVERAGE_BYTES = 4.0
"""Bytes of the moving average per trained weight."""


class BatchOptions(OptionGroup):
    """How many rows a step takes, and how many steps a run."""

    global_batch_size: int = option("batch", 16, "rows", ge=1, le=10**9)
    """Rows per optimizer step across all processes; gradient accumulation is derived from it."""
    per_device_train_batch_size: int = option("batch", 1, "rows", ge=1, le=2**20)
    """Rows per micro-batch on each process; changes speed and memory, not the result."""
    per_device_eval_batch_size: int = option("batch", 8, "rows", ge=1, le=2**20)
    """Rows per evaluation batch on each process."""
    num_train_epochs: float = option("batch", 1.0, "epochs", gt=0, le=10**9)
    """Passes over the training data."""
    max_steps: Annotated[int | None, Optionally] = option("batch", None, "steps", ge=1, le=10**12)
    """Number of optimizer steps; overrides `num_train_epochs`."""


class OptimizerOptions(OptionGroup):
    """How weights are updated."""

    optim: Literal["adamw", "adamw_8bit", "lion", "muon", "adafactor", "schedule_free_adamw"] = option(
        "optimizer", "adamw"
    )
    """AdamW (8-bit: no parity), Lion, Muon, Adafactor, schedule-free AdamW (constant rate)."""
    learning_rate: float = option("optimizer", 2e-4, gt=0, le=10)
    """Peak learning rate; lion wants 3 to 10 times less than adamw, and as much more decay."""
    embedding_learning_rate: Annotated[float | None, Optionally] = option("optimizer", None, gt=0, le=10)
    """Peak learning rate of the token embedding and the output head; default: `learning_rate`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = option("optimizer", "none")
    """Scale the learning rates by global_batch_size / lr_scaling_batch_size, or by its square root."""
    lr_scaling_batch_size: Annotated[int | None, Optionally] = option("optimizer", None, "rows", ge=1, le=10**9)
    """Global batch size for which `learning_rate` was chosen."""
    lr_scheduler_type: Schedule = option("optimizer", "cosine")
    """Learning-rate schedule after warm-up."""
    min_lr_ratio: float = option("optimizer", 0.0, ge=0, le=1)
    """Final learning rate of the schedules that decay, as a fraction of the peak."""
    lr_num_cycles: int = option("optimizer", 1, "cycles", ge=1, le=10**6)
    """Cosines of cosine_with_restarts, each from the peak."""
    lr_power: float = option("optimizer", 1.0, gt=0, le=100)
    """Power of the polynomial schedule; 1 is linear."""
    lr_decay_ratio: float = option("optimizer", 0.1, gt=0, le=1)
    """Decay of warmup_stable_decay as a fraction of all steps; before it, the rate is constant."""
    lr_decay_type: Literal["linear", "cosine", "1-sqrt"] = option("optimizer", "linear")
    """Shape of that decay; 1-sqrt: 1 - the square root of what is over."""
    warmup_steps: int = option("optimizer", 0, "steps", ge=0, le=10**12)
    """Number of warm-up steps, over which the learning rate rises from 0; overrides `warmup_ratio`."""
    warmup_ratio: float = option("optimizer", 0.0, ge=0, le=1)
    """Warm-up as a fraction of all steps."""
    weight_decay: float = option("optimizer", 0.0, ge=0)
    """Decoupled weight decay, applied to matrices only; norms and biases are not decayed."""
    adam_beta1: float = option("optimizer", 0.9, ge=0, lt=1)
    """Beta1 of AdamW, and of Muon's AdamW: decay rate of the first moment."""
    adam_beta2: float = option("optimizer", 0.999, ge=0, lt=1)
    """Beta2 of AdamW, and of Muon's AdamW: decay rate of the second moment."""
    adam_epsilon: float = option("optimizer", 1e-8, gt=0)
    """Epsilon of AdamW, and of Muon's AdamW, added to the denominator for numerical stability."""
    lion_beta1: float = option("optimizer", 0.9, ge=0, lt=1)
    """Lion's beta1: share of the momentum in each update, next to the gradient."""
    lion_beta2: float = option("optimizer", 0.99, ge=0, lt=1)
    """Lion's beta2: decay rate of the momentum; adam_beta2 has another default."""
    muon_momentum: float = option("optimizer", 0.95, ge=0, lt=1)
    """Muon's decay rate of the momentum, which is Nesterov's."""
    max_grad_norm: float = option("optimizer", 1.0, ge=0)
    """Maximum global gradient norm; 0: log the norm without clipping."""
    ema_decay: Annotated[float | None, Optionally] = option("optimizer", None, gt=0, lt=1)
    """Keep a moving average of the weights (0.999, ...), for `tunesmith export RUN --ema`."""
