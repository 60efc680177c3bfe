"""What can be trained for: the data, options and metrics of each objective, without its loss. Imports no torch.

The losses are in `trainers/objectives/`. The loop, the batch plan and the pages know an objective only by what stands
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

SFT_FORMATS = ("chat", "sharegpt", "prompt_completion", "alpaca", "text")
PREFERENCE = "preference"
LABELLED = "labelled"
PROMPT = "prompt"
FORMAT_COLUMNS: dict[str, tuple[str, ...]] = {
    LABELLED: ("label",),
    "chat": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    PREFERENCE: ("chosen", "rejected"),
    PROMPT: ("prompt",),
}
"""The columns that each row format needs; a labelled row also needs its answer, in one of several columns."""
ANSWER = "answer"
"""The column that rewards compare sampled answers with, in rows whose prompt has no completion."""
PROMPT_ROLES = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system", "history",
    "tools", "functions", "chat_template_kwargs",
)  # fmt: skip
"""Columns that the row formats of an objective that samples read, which no reward can read too."""
COLUMN_ROLES = (
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system", "text",
    "history", "tools", "functions", "chat_template_kwargs", "chosen", "rejected", "label",
)  # fmt: skip
"""Every column that some row format reads."""
MEDIA = ("images", "image", "audio", "audios", "video", "videos")
"""Columns whose content is refused, as only text can be trained on."""
_REWARDS = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected")
_LABELLED_REWARDS = ("reward_accuracy", "reward_margin", "reward_desirable", "reward_undesirable")


@dataclass(frozen=True)
class ObjectiveSpec:
    """What an objective needs and reports.

    Attributes:
        name: Value of the option `objective`.
        label: Its short name, as papers write it.
        title: Its name in words.
        summary: One sentence.
        parts: Documents of an example, in order: a preference is a chosen and a rejected one.
        formats: Row formats that it takes (`trainers/data/formats.py`), in the order in which they are tried.
        loss_of: What the loss is computed of: the `labels`, which are the trained tokens, the log-probabilities of
            `documents`, or the model's `distributions` at the trained tokens.
        divisor: What the summed loss of a global batch is divided by: its trained tokens, or its examples.
        metrics: What it reports besides the loss, each a mean over the same divisor; the last ones may be left out.
        reports_in_training: Whether it reports the metrics at each step too, not only of the evaluation data.
        defaults: The options that only some objectives read, with their defaults for this one.
        loss_types: Values of `loss_type` that it takes, the first by default; empty if it has one loss.
        scalar_head: Whether it trains a head with one output on the last token of each document, in place of the
            probabilities of tokens.
        columns: Numeric columns that its loss reads: one number for each example.
        optional_columns: Those of them that the data may be without, but not some of its rows.
        reference: Whether it compares with the log-probabilities of the initial model.
        teacher: Whether it compares with the distributions of another model, which the option `teacher` names.
        labelled: Whether each example has a label: desirable or not.
        mismatched: Whether its loss contains the KL divergence from the initial model over the global batch, which is
            estimated on prompts with the answers of other examples (`trainers/data/mismatched.py`).
        samples: Whether it samples answers from the model that is trained, and rewards them.
        variants: What differs for some values of `loss_type`: fields of this class and their values.
        source: The paper that defines it.
    """

    name: str
    label: str
    title: str
    summary: str
    parts: tuple[str, ...] = ("",)
    formats: tuple[str, ...] = SFT_FORMATS
    loss_of: Literal["labels", "documents", "distributions"] = "documents"
    divisor: Literal["tokens", "examples"] = "examples"
    metrics: tuple[str, ...] = ()
    reports_in_training: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    loss_types: tuple[str, ...] = ()
    scalar_head: bool = False
    columns: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    reference: bool = False
    teacher: bool = False
    labelled: bool = False
    mismatched: bool = False
    samples: bool = False
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """The options besides `objective` that only some objectives read, as far as this one reads them."""
        return (*(["loss_type"] if self.loss_types else []), *self.defaults)

    @property
    def documents(self) -> int:
        """Documents of an example."""
        return len(self.parts)

    def variant(self, loss_type: str | None) -> ObjectiveSpec:
        """The objective under a value of `loss_type`."""
        return replace(self, **self.variants.get(loss_type or "", {}))


def _preference(name: str, label: str, title: str, summary: str, source: str, **more: Any) -> ObjectiveSpec:
    """An objective that learns from pairs of a chosen and a rejected answer."""
    return ObjectiveSpec(
        name, label, title, summary, ("chosen", "rejected"), (PREFERENCE,), metrics=_REWARDS, source=source, **more
    )


OBJECTIVES: dict[str, ObjectiveSpec] = {
    spec.name: spec
    for spec in (
        ObjectiveSpec(
            "sft", "SFT", "Supervised fine-tuning", "Learn to give the answers in the data.",
            loss_of="labels", divisor="tokens", metrics=("token_accuracy",), reports_in_training=False,
        ),
        _preference(
            "dpo", "DPO", "Direct preference optimization",
            "Learn from pairs to prefer the chosen answer over the rejected one, held near the initial model.",
            "https://arxiv.org/abs/2305.18290",
            defaults={"beta": 0.1, "label_smoothing": 0.0, "nll_weight": 0.0},
            loss_types=("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"), reference=True,
        ),
        _preference(
            "simpo", "SimPO", "Simple preference optimization",
            "Like DPO without the initial model: compares mean log-probabilities per token, with a margin.",
            "https://arxiv.org/abs/2405.14734",
            defaults={"beta": 2.0, "simpo_gamma": 1.0, "label_smoothing": 0.0, "nll_weight": 0.0},
        ),
        _preference(
            "cpo", "CPO", "Contrastive preference optimization",
            "Like DPO without the initial model, and learns the chosen answers as supervised fine-tuning does.",
            "https://arxiv.org/abs/2401.08417",
            defaults={"beta": 0.1, "label_smoothing": 0.0, "nll_weight": 1.0},
            loss_types=("sigmoid", "hinge", "ipo"),
        ),
        _preference(
            "orpo", "ORPO", "Odds ratio preference optimization",
            "Supervised fine-tuning on the chosen answers, and a penalty on the odds of the rejected ones.",
            "https://arxiv.org/abs/2403.07691",
            defaults={"beta": 0.1, "nll_weight": 1.0},
        ),
        ObjectiveSpec(
            "kto", "KTO", "Kahneman-Tversky optimization",
            "Learn from single answers with a label, desirable or not, held near the initial model.",
            formats=(PREFERENCE, LABELLED), metrics=(*_LABELLED_REWARDS, "kl"),
            defaults={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
            loss_types=("kto", "apo_zero_unpaired"), reference=True, labelled=True, mismatched=True,
            variants={"apo_zero_unpaired": {"mismatched": False, "metrics": _LABELLED_REWARDS}},
            source="https://arxiv.org/abs/2402.01306",
        ),
        ObjectiveSpec(
            "distill", "Distillation", "Knowledge distillation",
            "Learn what another model, the teacher, predicts at each token of the answers in the data.",
            loss_of="distributions", divisor="tokens", metrics=("kl", "token_accuracy"), reports_in_training=False,
            defaults={
                "teacher": None, "teacher_log_probs": None, "jsd_beta": 0.5, "distill_temperature": 1.0,
                "nll_weight": 0.0,
            },
            loss_types=("forward_kl", "reverse_kl", "jsd"), teacher=True,
            source="https://arxiv.org/abs/2306.13649",
        ),
        _preference(
            "reward", "Reward", "Reward model",
            "Learn from pairs to give the chosen answer a higher score than the rejected one.",
            "https://arxiv.org/abs/2203.02155",
            defaults={"center_rewards_coefficient": 0.0}, scalar_head=True,
            columns=("margin",), optional_columns=("margin",),
        ),
        ObjectiveSpec(
            "grpo", "GRPO", "Group relative policy optimization",
            "Sample several answers to each prompt, reward them with functions, and make the better ones more likely.",
            formats=("chat", "sharegpt", "prompt_completion", "alpaca", PROMPT),
            metrics=("clip_ratio", "sampler_difference", "kl"),
            defaults={
                "reward_funcs": ["exact_match"], "reward_weights": [], "reward_schema": None, "reward_timeout": 60.0,
                "num_generations": 8, "steps_per_generation": 1, "max_completion_length": 256, "temperature": 1.0,
                "beta": 0.0,
                "epsilon": 0.2, "epsilon_high": None,
                "importance_sampling_cap": 2.0, "mask_truncated_completions": False, "recorded_answers": None,
                "sampler_url": None,
            },
            loss_types=("grpo", "dr_grpo", "dapo", "gspo", "rloo"), samples=True,
            source="https://arxiv.org/abs/2402.03300",
        ),
    )
}  # fmt: skip
REWARDS = ("exact_match", "math_verify", "json_schema")
"""Rewards of sampled answers that ship with Tunesmith (`trainers/rewards/functions.py`)."""
OWN_OPTIONS = ("loss_type", *dict.fromkeys(name for spec in OBJECTIVES.values() for name in spec.defaults))
"""Options that only some objectives read."""
SAMPLED = ("reward", "reward_std", "equal_groups", "answer_tokens", "truncated", "sampling_s", "rewards_s")
"""Metrics of each step of an objective that samples, besides its own (`trainers/rollouts.py`)."""
WATCHED = ("reward", "loss")
"""What a run is watched by: the first of them that its rows have. Training raises a reward, and lowers a loss."""
LOSS_TYPES = tuple(dict.fromkeys(name for spec in OBJECTIVES.values() for name in spec.loss_types))
HIGHER_IS_BETTER = ("eval_token_accuracy", "eval_reward_accuracy", "eval_reward")
"""Metrics besides the loss by which the best checkpoint can be chosen; of these more is better, of the loss less."""

_ROW_KEYS = {
    "step", "attempt", "epoch", "loss", "grad_norm", "learning_rate", "tokens_per_second", "trained_tokens_per_second",
    "mfu", "data_wait", "memory_gib", "memory_reserved_gib", "host_memory_gib", "gpu_percent", "gpu_power_w", "tokens",
    "elapsed_s", "recent_tokens_per_second", "eta_s", "slow_ranks", "skipped", "bubble", "aux_loss", "checkpoint_bytes",
    "checkpoint_write_s", "checkpoint_stall_s", "perplexity", "evaluation_data", *SAMPLED,
    *(name for spec in OBJECTIVES.values() for name in spec.metrics),
}  # fmt: skip
"""Keys of rows of `metrics.jsonl`, besides those with the affixes below."""
MOST_NAMES = 8
"""Most columns, and most metrics, of an objective in a file of one's own."""


def is_name(text: object) -> bool:
    """Whether a text can name a column or a metric: an identifier of at most 40 ASCII letters."""
    return isinstance(text, str) and len(text) <= 40 and text.isascii() and text.isidentifier()


def is_free_metric(name: str) -> bool:
    """Whether a metric of one's own may have this name, in whatever case: no other value of a row of metrics has it."""
    key = name.lower()
    taken = key in _ROW_KEYS or key.startswith(("eval_", "reward_")) or key.endswith("_by_rank")
    return not taken and is_name(name)


def evaluation_metrics(spec: ObjectiveSpec) -> tuple[str, ...]:
    """Names of all metrics of an evaluation, the loss first."""
    if spec.samples:
        return ("eval_loss", "eval_reward", "eval_answer_tokens", "eval_truncated")
    perplexity = ("eval_perplexity",) if spec.loss_of == "labels" else ()
    return ("eval_loss", *perplexity, *(f"eval_{name}" for name in spec.metrics))
