"""The options of the objective. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from trainers.config.objectives import OBJECTIVES
from trainers.config.option_types import Numbers, ObjectiveName, Optionally, OptionGroup, RewardNames, option


class ObjectiveOptions(OptionGroup):
    """What the model is trained for."""

    objective: ObjectiveName = option("objective", "sft", choices=tuple(OBJECTIVES))
    """What to train for: sft, distill, kto (good and bad answers), others (pairs); or your own, `path.py:Name`."""
    loss_type: Annotated[
        Literal[
            "sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "kto", "apo_zero_unpaired",
            "forward_kl", "reverse_kl", "jsd", "grpo", "dr_grpo", "dapo", "gspo", "rloo",
        ] | None, Optionally
    ] = option("objective", None)  # fmt: skip
    """Form of the loss of dpo, cpo, kto, distill and grpo, see docs/objectives.md; default: the first."""
    teacher: Annotated[str | None, Optionally] = option("objective", None)
    """Model that distill learns from: Hub id, folder, `embedded`, or a run that is done (its name or folder)."""
    teacher_log_probs: Annotated[str | None, Optionally] = option("objective", None)
    """Folder in which `tunesmith record` kept what a teacher predicts; distill then loads no teacher."""
    jsd_beta: float = option("objective", 0.5, gt=0, lt=1)
    """Share of the teacher in the mixture of jsd: near 0 it acts as forward_kl, near 1 as reverse_kl."""
    distill_temperature: float = option("objective", 1.0, ge=0.01, le=100)
    """Divides the logits of both models before distill compares them; the loss is not multiplied by its square."""
    beta: Annotated[float | None, Optionally] = option("objective", None, ge=0, le=1000)
    """Scale of rewards (0.1, simpo 2), KL weight of grpo (0): more keeps dpo, kto, grpo near the initial model."""
    label_smoothing: float = option("objective", 0.0, ge=0, lt=0.5)
    """Share of pairs that are expected to be labelled the wrong way round; dpo (sigmoid, robust), simpo and cpo."""
    simpo_gamma: float = option("objective", 1.0, ge=0, le=1000)
    """Margin by which simpo wants the reward of the chosen answer to be higher."""
    nll_weight: Annotated[float | None, Optionally] = option("objective", None, ge=0, le=1000)
    """Weight of the supervised loss on (chosen) answers; default: 1 for cpo and orpo, otherwise 0."""
    desirable_weight: float = option("objective", 1.0, ge=0, le=1000)
    """Weight of desirable examples in the loss of kto; balance it with their number."""
    undesirable_weight: float = option("objective", 1.0, ge=0, le=1000)
    """Weight of undesirable examples in the loss of kto; balance it with their number."""
    center_rewards_coefficient: float = option("objective", 0.0, ge=0, le=1000)
    """Weight of the squared sum of both scores of a pair in the loss of reward; centres scores at 0."""
    reward_funcs: RewardNames = option("objective", ["exact_match"], min_length=1)
    """Rewards of answers, comma-separated: exact_match, math_verify, json_schema, or yours, `path.py:function`."""
    reward_weights: Numbers = option("objective", [])
    """Weight of each reward, comma-separated; default: 1 each."""
    reward_schema: Annotated[str | None, Optionally] = option("objective", None)
    """File of the JSON Schema that an answer must fit to get 1 from the reward json_schema."""
    reward_timeout: float = option("objective", 60.0, "seconds", gt=0, le=10**6)
    """Time that the rewards of a step's answers may take."""
    num_generations: int = option("objective", 8, "answers", ge=2, le=4096)
    """Answers that grpo samples for each prompt; a row of `global_batch_size` is a prompt."""
    steps_per_generation: int = option("objective", 1, "steps", ge=1, le=1024)
    """Steps whose answers are sampled at once, before the first of them; epsilon holds the later ones."""
    max_completion_length: int = option("objective", 256, "tokens", ge=1, le=2**20)
    """Tokens of a sampled answer at most; prompt and answer fit into `max_length`."""
    temperature: float = option("objective", 1.0, ge=0.01, le=100)
    """Divides the logits of grpo where it samples and where it trains; evaluation takes the most likely tokens."""
    epsilon: float = option("objective", 0.2, gt=0, lt=1)
    """How far grpo lets a probability ratio go before it clips it."""
    epsilon_high: Annotated[float | None, Optionally] = option("objective", None, gt=0, le=1000)
    """The same upwards, as in DAPO (0.28); default: epsilon."""
    importance_sampling_cap: float = option("objective", 2.0, gt=0, le=1000)
    """Most that a sampled token counts where the sampler's probability is below that of training."""
    mask_truncated_completions: bool = option("objective", False)
    """Learn nothing from answers that were cut at `max_completion_length`."""
    recorded_answers: Annotated[str | None, Optionally] = option("objective", None)
    """Folder `rollouts` of a run, whose answers and rewards are taken in place of sampling."""
    sampler_url: Annotated[str | None, Optionally] = option("objective", None)
    """Address of a vLLM server that samples the answers (method=lora); default: the run's processes."""
