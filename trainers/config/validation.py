"""Builds a validated `TrainConfig`: checks each option by itself, then their combinations. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError

from trainers.config.fields import text_of
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.objectives import (
    ANSWER,
    COLUMN_ROLES,
    HIGHER_IS_BETTER,
    OBJECTIVES,
    OWN_OPTIONS,
    evaluation_metrics,
)
from trainers.config.optimizer_options import ADAMW, SCHEDULE_FREE, SETTINGS_OF
from trainers.config.options import EMBEDDED, TRACKERS, TrainConfig, unknown_option
from trainers.config.remote_data import holds_credentials, remote_mistakes
from trainers.config.reward_file import columns_of_rewards, reward_mistakes
from trainers.config.sampler import sampler_mistakes

MISSING = "is missing"
"""`Mistake.problem` of a required option that was not given."""
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
"""The start of a URL; also of one with a slash too few, of which a local folder `s3:` would be made."""


def build(values: dict[str, Any]) -> TrainConfig:
    """Builds a validated config from plain values.

    Raises:
        ConfigError: Lists every mistake.
    """
    try:
        config = TrainConfig.model_validate(values)
        mistakes = []
    except ValidationError as error:
        mistakes = [_explain(dict(detail)) for detail in error.errors()]
        # Build a config of the valid options, so that conflicts between those are reported in the same error.
        bad = {str(detail["loc"][0]) for detail in error.errors()}
        required = {name: "x" for name, field in TrainConfig.model_fields.items() if field.is_required()}
        required |= {"dataset_name": "x"} if "dataset_name" in bad else {}
        good = {name: value for name, value in values.items() if name not in bad}
        config = TrainConfig.model_validate({**required, **good})
    mistakes += conflicting_options(config)
    if mistakes:
        raise ConfigError(mistakes)
    return config


def _explain(detail: dict[str, Any]) -> Mistake:
    """Converts a pydantic error to a mistake."""
    name, value, context = str(detail["loc"][0]), detail["input"], detail.get("ctx", {})
    text = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
    keys = [key for key in detail["loc"][1:] if isinstance(key, str)]  # of a mapping
    text = "=".join([*keys, text])
    if detail["type"] == "extra_forbidden":
        return unknown_option(name)
    if detail["type"] == "missing":
        return _missing(name)
    if detail["type"] == "literal_error":
        return Mistake(name, text, "is not a valid value", f"use {context['expected']}")
    field = TrainConfig.model_fields.get(name)
    extra: Any = field.json_schema_extra if field else {}
    unit = f" ({extra['unit']})" if extra.get("unit") else ""
    message = detail["msg"].partition(", unable to parse")[0]  # what follows says no more
    return Mistake(name, text, f"is refused: {message[0].lower()}{message[1:]}{unit}", _default_hint(name))


def _missing(name: str) -> Mistake:
    return Mistake(name, None, MISSING, f"give --{name} or pick a preset (`tunesmith presets`)")


def _default_hint(name: str) -> str:
    field = TrainConfig.model_fields[name]
    return f"its default is {text_of(field.get_default()) or 'none'}" if not field.is_required() else "it must be given"


def conflicting_options(config: TrainConfig) -> list[Mistake]:
    """Returns a mistake for each combination of options that is not allowed."""
    evaluates = config.has_evaluation()
    rules: list[tuple[bool, str, object, str, str]] = [
        (config.load_best_model_at_end and not evaluates,
         "load_best_model_at_end", True, "without evaluation data", "set eval_dataset_name or eval_share"),
        (config.early_stopping_patience is not None and not (evaluates and config.eval_steps),
         "early_stopping_patience", None, "needs evaluations", "set eval_steps, and eval_dataset_name or eval_share"),
        (config.eval_dataset_name is not None and config.eval_share > 0,
         "eval_dataset_name", None, f"and eval_share={config.eval_share} are both set",
         "keep one (eval_dataset_name=none)"),
        (config.lr_scaling != "none" and config.lr_scaling_batch_size is None,
         "lr_scaling", config.lr_scaling,
         "needs lr_scaling_batch_size, the batch that learning_rate was chosen for", ""),
        (config.rope_scaling != "none" and config.rope_factor is None,
         "rope_scaling", config.rope_scaling, "needs rope_factor, such as 4 for rows four times as long", ""),
        (0 < config.loss_spike_factor <= 1,
         "loss_spike_factor", config.loss_spike_factor, "would see every other loss as a spike", "use 2 or more, or 0"),
        (config.checkpoint_url is not None and "://" not in config.checkpoint_url,
         "checkpoint_url", config.checkpoint_url, "is not a URL such as s3://bucket/run",
         "save_steps saves to output_dir"),
        (holds_credentials(config.checkpoint_url),
         "checkpoint_url", None, "holds credentials",
         "leave them out and set them in the environment (AWS_ACCESS_KEY_ID, ...)"),
        (holds_credentials(config.resume_from_checkpoint),
         "resume_from_checkpoint", None, "holds credentials", "leave them out and set them in the environment"),
        (config.attn_implementation == "varlen" and config.mixed_precision == "no",
         "attn_implementation", "varlen", f"needs half precision, not mixed_precision={config.mixed_precision}",
         "use auto"),
        (config.attn_implementation == "documents" and config.torch_compile,
         "attn_implementation", "documents", "has new shapes at each step, all of them compiled by torch_compile=true",
         "use auto"),
        (config.resume_from_checkpoint == "auto" and config.output_dir is None,
         "resume_from_checkpoint", "auto", "needs output_dir, the run folder to resume (or `tunesmith resume RUN`)",
         ""),
    ]  # fmt: skip
    return [
        *(Mistake(name, value, problem, remedy) for applies, name, value, problem, remedy in rules if applies),
        *_method_conflicts(config),
        *_mix_conflicts(config),
        *remote_mistakes(config),
        *_streaming_conflicts(config),
        *_schedule_free_conflicts(config),
        *_evaluation_conflicts(config),
        *_objective_conflicts(config),
        *_unknown_columns(config),
        *(
            Mistake("report_to", name, "is not a tracker", f"use {', '.join(TRACKERS)}")
            for name in config.report_to
            if name not in TRACKERS
        ),
    ]


def _method_conflicts(config: TrainConfig) -> list[Mistake]:
    """Returns a mistake for each option that does not fit the method."""
    method = config.method
    rules: list[tuple[bool, str, object, str, str]] = [
        (config.merge_adapter and method == "full",
         "merge_adapter", True, "with method=full: there is no adapter", "leave it out"),
        (config.random_init and method == "lora" and not config.merge_adapter,
         "random_init", True, "with method=lora would export adapters without a base",
         "use method=full or merge_adapter"),
        (config.random_init and method == "qlora",
         "random_init", True, "with method=qlora: there are no pretrained weights to quantize", "use method=full"),
        (config.pad_vocab_to_multiple_of is not None and method != "full",
         "pad_vocab_to_multiple_of", config.pad_vocab_to_multiple_of,
         f"with method={method}: peft pads no base that it loads for an adapter", "use method=full, or leave it out"),
        (bool(config.freeze) and method == "full" and config.mixed_precision == "fp8",
         "freeze", ",".join(config.freeze), "with mixed_precision=fp8, which only trained layers compute in",
         "use bf16"),
        (bool(config.modules_to_save) and method == "qlora",
         "modules_to_save", ",".join(config.modules_to_save), "with method=qlora, whose modules are in 4 bits",
         "use lora"),
        (not config.lora_target_modules and not (method == "lora" and config.lora_target_parameters),
         "lora_target_modules", "none", "leaves nothing to adapt",
         "use all-linear, or name stacks in lora_target_parameters with method=lora"),
        (bool(config.lora_target_parameters) and method == "qlora",
         "lora_target_parameters", ",".join(config.lora_target_parameters),
         "with method=qlora, which quantizes no stack", "use lora"),
        (bool(config.lora_target_parameters) and method == "lora" and config.lora_dropout > 0,
         "lora_dropout", config.lora_dropout, "with lora_target_parameters: peft drops no inputs of stacked weights",
         "use 0"),
        (bool(config.lora_target_parameters) and method == "lora" and config.optim == "muon",
         "optim", "muon", "with lora_target_parameters: adapters of all experts would be one matrix", "use adamw"),
        (bool(config.lora_target_parameters) and method == "lora" and config.use_dora,
         "use_dora", True, "with lora_target_parameters: peft has no norms of stacked weights",
         "leave one of them out"),
        *((applies and method != "full" and config.init_lora_weights == "pissa",
           "init_lora_weights", "pissa", f"with {problem}", remedy) for applies, problem, remedy in (
            (method == "qlora", "method=qlora: the residual is subtracted from weights as they are stored", "use lora"),
            (config.use_dora, "use_dora=true, whose magnitudes are of the weight itself", "leave one of them out"),
            (bool(config.lora_target_parameters), "lora_target_parameters: stacks have no singular vectors in peft",
             "leave one of them out"),
            (config.penalizes_kl, "a penalty of the KL divergence: without its adapters, the base is no initial model",
             "use default, or beta=0"),
            (not config.merge_adapter and config.export_dtype in ("bfloat16", "float16"),
             f"export_dtype={config.export_dtype}, which would round away the difference from the base",
             "use auto or merge_adapter"),
        )),
        (config.init_lora_weights == "loftq" and method == "qlora" and config.penalizes_kl,
         "init_lora_weights", "loftq",
         "with a penalty of the KL divergence: without its adapters, the base is no initial model",
         "use default, or beta=0"),
        (config.init_lora_weights == "loftq" and method == "lora",
         "init_lora_weights", "loftq", "with method=lora, whose base is not rounded", "use pissa, or method=qlora"),
        (config.use_dora and method == "qlora",
         "use_dora", True, "with method=qlora, which would dequantize every weight twice in each pass", "use lora"),
        (config.mixed_precision == "fp8" and method != "full",
         "mixed_precision", "fp8", f"with method={method}: only trained linear layers compute in float8", "use bf16"),
        *_rounding_conflicts(config),
        (not config.master_weights and method != "full",
         "master_weights", False, f"with method={method}: adapters are small, and stay in fp32", "leave it out"),
        (not config.master_weights and config.mixed_precision != "bf16",
         "master_weights", False, f"keeps weights in bf16, and mixed_precision={config.mixed_precision}", "use bf16"),
        (not config.master_weights and config.optim not in ADAMW,
         "master_weights", False, f"with optim={config.optim}: AdamW alone rounds its updates to bf16 by chance",
         "leave it out, or use adamw"),
    ]  # fmt: skip
    return [Mistake(name, value, problem, remedy) for applies, name, value, problem, remedy in rules if applies]


def _rounding_conflicts(config: TrainConfig) -> list[tuple[bool, str, str, str, str]]:
    """Rules about quantization-aware training: whether one applies, its option, value, problem and remedy."""
    rules = [
        (config.method != "full", f"with method={config.method}: adapters would not be rounded with their base",
         "use method=full"),
        (config.mixed_precision == "fp8", "with mixed_precision=fp8, which rounds the same layers", "use bf16"),
        (not config.master_weights, "with master_weights=false, whose updates are rounded by chance",
         "leave one of them out"),
        (config.torch_compile, "with torch_compile=true: they were not tried together", "leave one of them out"),
        (config.objective_spec.samples, f"with objective={config.objective}: it was not tried with sampled answers",
         "leave it out"),
    ]  # fmt: skip
    return [
        (config.qat != "none" and applies, "qat", config.qat, problem, remedy) for applies, problem, remedy in rules
    ]


def _schedule_free_conflicts(config: TrainConfig) -> list[Mistake]:
    """Returns a mistake for each option that does not fit schedule-free AdamW."""
    if config.optim != SCHEDULE_FREE:
        return []
    optim = f"with optim={config.optim}"
    rules: list[tuple[bool, str, object, str, str]] = [
        (config.lr_scheduler_type != "constant",
         "lr_scheduler_type", config.lr_scheduler_type, f"{optim}, whose average takes the place of a decay",
         "use constant, with warmup_steps"),
        (config.warmup_ratio > 0 and not config.warmup_steps,
         "warmup_ratio", config.warmup_ratio, f"{optim}, whose average must not depend on the run's length",
         "use warmup_steps"),
        (config.adam_beta1 < 0.5,
         "adam_beta1", config.adam_beta1, f"{optim}: gradients would be taken far from the average", "use 0.9 to 0.98"),
        (config.ema_decay is not None,
         "ema_decay", config.ema_decay, f"{optim}, which exports an average already", "leave it out"),
        (config.objective_spec.samples,
         "optim", config.optim, f"with objective={config.objective}: answers would not be sampled by what is exported",
         "use adamw"),
    ]  # fmt: skip
    return [Mistake(name, value, problem, remedy) for applies, name, value, problem, remedy in rules if applies]


def _mix_conflicts(config: TrainConfig) -> list[Mistake]:
    """Returns a mistake for training data that is not named, and for each option that does not fit a mix."""
    if config.mix is None:
        return [] if config.dataset_name else [_missing("dataset_name")]
    rules: list[tuple[bool, str, object, str, str]] = [
        (config.dataset_name is not None,
         "mix", config.mix, f"and dataset_name={config.dataset_name} are both set",
         "keep one of them, and set the other to none"),
        (config.max_train_samples is not None,
         "max_train_samples", config.max_train_samples, "with a mix, whose sources are cut each by itself",
         "give sources a `limit` in the mix"),
        (config.teacher_log_probs is not None,
         "teacher_log_probs", config.teacher_log_probs, "with a mix, whose rows are not those that were recorded",
         "use teacher, or dataset_name"),
    ]  # fmt: skip
    return [Mistake(name, value, problem, remedy) for applies, name, value, problem, remedy in rules if applies]


def _streaming_conflicts(config: TrainConfig) -> list[Mistake]:
    """Returns a mistake for each option that does not fit data that is read as the run goes."""
    if not config.dataset_streaming:
        return []
    rules: list[tuple[bool, str, str]] = [
        (config.max_steps is None, "needs max_steps: the length of an epoch is not known before it is read", ""),
        (config.eval_share > 0 and config.max_eval_samples is None,
         "with eval_share needs max_eval_samples: the rows held out of a stream are as many as it is large",
         "set it, or eval_dataset_name"),
        (config.teacher_log_probs is not None,
         "with teacher_log_probs: recorded predictions take many times the disk of the tokens that a stream saves",
         "use teacher"),
    ]  # fmt: skip
    return [Mistake("dataset_streaming", True, problem, remedy) for applies, problem, remedy in rules if applies]


def _evaluation_conflicts(config: TrainConfig) -> list[Mistake]:
    """Returns a mistake for each option that does not fit an evaluation without training, or answers during it."""
    if config.generates_answers:
        return _answer_conflicts(config)
    if not config.eval_only:
        return []
    rules: list[tuple[bool, str, str]] = [
        (not config.has_evaluation(), "needs evaluation data", "set eval_dataset_name or eval_share"),
        (config.objective != "sft", f"with objective={config.objective}: it evaluates answers to prompts, and texts",
         "use objective=sft"),
        (config.dataset_streaming, "with dataset_streaming: no row is trained", "leave it out"),
        (config.auto_find_batch_size, "with auto_find_batch_size, which starts a training run again",
         "lower per_device_eval_batch_size instead"),
        (config.torch_compile and config.eval_answer_tokens > 0,
         "with torch_compile=true: compiled layers do not generate", "leave it out, or set eval_answer_tokens=0"),
    ]  # fmt: skip
    return [Mistake("eval_only", True, problem, remedy) for applies, problem, remedy in rules if applies]


def _answer_conflicts(config: TrainConfig) -> list[Mistake]:
    """Returns a mistake for each option that does not fit answers during training."""
    steps = f"with eval_generate_steps={config.eval_generate_steps}"
    rules: list[tuple[bool, str, object, str, str]] = [
        (not config.has_evaluation(), "eval_generate_steps", config.eval_generate_steps,
         "needs evaluation data, whose prompts it answers", "set eval_dataset_name or eval_share"),
        (config.eval_answer_tokens == 0, "eval_answer_tokens", 0, f"{steps}: no answer would have a token",
         "set it, such as 128"),
        (config.objective_spec.scalar_head, "objective", config.objective,
         f"{steps}: its model scores answers, and writes none", "use eval_generate_steps=0"),
        (config.torch_compile, "torch_compile", True, f"{steps}: compiled layers do not generate",
         "leave one of them out"),
    ]  # fmt: skip
    return [Mistake(*rule[1:]) for rule in rules if rule[0]]


def _unknown_columns(config: TrainConfig) -> Iterator[Mistake]:
    """Yields a mistake for each role in `columns` that no row format, objective or reward has."""
    if not config.columns:
        return
    try:
        of_rewards = columns_of_rewards(config)
    except ConfigError:  # which is a mistake of its own
        return
    known = [*COLUMN_ROLES, *config.objective_spec.columns, *(() if of_rewards is None else (ANSWER, *of_rewards))]
    of_others = {ANSWER, *(name for spec in OBJECTIVES.values() for name in spec.columns)}
    for role, column in config.columns.items():
        if role not in known and role in of_others:
            problem = f"with objective={config.objective}, which does not read it"
            yield Mistake(f"columns.{role}", column, problem, "leave it out")
        elif role not in known:
            yield unknown_option(f"columns.{role}", [f"columns.{name}" for name in known])


def _objective_conflicts(config: TrainConfig) -> list[Mistake]:
    """Returns a mistake for each option that does not fit the objective."""
    spec, objective = config.objective_spec, f"with objective={config.objective}"
    metrics = [name for name in evaluation_metrics(spec) if name in ("eval_loss", *HIGHER_IS_BETTER)]
    method = config.method
    samples = spec.samples and (config.recorded_answers is None or config.has_evaluation())
    smooths = config.loss_type in (None, "sigmoid", "robust", "sigmoid_norm")
    rules: list[tuple[bool, str, object, str, str]] = [
        (config.loss_type is not None and bool(spec.loss_types) and config.loss_type not in spec.loss_types,
         "loss_type", config.loss_type, objective, f"use {', '.join(spec.loss_types)}"),
        (config.label_smoothing > 0 and "label_smoothing" in spec.defaults and not smooths,
         "label_smoothing", config.label_smoothing, f"with loss_type={config.loss_type}, which has no such term",
         "use loss_type=sigmoid or 0"),
        (config.loss_type == "robust" and config.label_smoothing == 0,
         "loss_type", "robust", "needs label_smoothing, the share of wrong labels", "set it, such as 0.1"),
        (config.dataset_format not in ("auto", *spec.formats),
         "dataset_format", config.dataset_format, f"{objective}, which takes {', '.join(spec.formats)}",
         "use auto, or another objective"),
        (config.metric_for_best_model not in metrics,
         "metric_for_best_model", config.metric_for_best_model, objective, f"use {' or '.join(metrics)}"),
        (spec.loss_of == "documents" and config.overlong == "split",
         "overlong", "split", f"{objective}: half an answer cannot be preferred", "use truncate, drop or refuse"),
        (spec.teacher and config.teacher is not None and config.teacher_log_probs is not None,
         "teacher_log_probs", config.teacher_log_probs, "with a teacher, which it takes the place of",
         "leave one of them out"),
        (spec.teacher and config.teacher is None and config.teacher_log_probs is None,
         "teacher", None, f"is not set, {objective}",
         "name the model to learn from: a Hub id, a folder, or a run that is done"
         + (" (`tunesmith train tiny-full` trains one)" if config.model_name_or_path == EMBEDDED else "")),
        (config.neftune_noise_alpha > 0 and config.objective != "sft",
         "neftune_noise_alpha", config.neftune_noise_alpha, f"{objective}: noise was tried with sft alone", "use 0"),
        (spec.teacher and bool(config.new_tokens),
         "new_tokens", ",".join(config.new_tokens), f"{objective}, whose teacher does not know them", "leave it out"),
        (config.beta == 0 and "beta" in spec.defaults and not spec.samples,
         "beta", 0, f"{objective}: nothing would be learned", "use more than 0"),
        (config.penalizes_kl and config.loss_type == "rloo",
         "beta", config.beta, "with loss_type=rloo, where the divergence would be a part of the rewards",
         "leave it out, or use another loss_type"),
        (config.penalizes_kl and config.method == "full" and config.mixed_precision == "fp8",
         "beta", config.beta, "with mixed_precision=fp8: the copy of the initial model is not rounded so", "use bf16"),
        (config.penalizes_kl and config.random_init,
         "beta", config.beta, "with random_init=true: random weights are nothing to stay near to", "leave it out"),
        (spec.labelled and config.desirable_weight == config.undesirable_weight == 0,
         "desirable_weight", 0, "with undesirable_weight=0: nothing would be learned", "set one of them, such as 1"),
        (spec.scalar_head and config.method == "qlora",
         "method", "qlora", f"{objective}: its head is not kept out of quantization", "use lora"),
        (spec.scalar_head and method != "full" and "score" in config.modules_to_save,
         "modules_to_save", "score", f"{objective}, whose head is trained in full anyway", "leave it out"),
        (spec.scalar_head and "score" in config.lora_target_modules,
         "lora_target_modules", "score", f"{objective}, whose head is trained in full", "leave it out"),
        (spec.loss_of == "documents" and not config.assistant_only_loss,
         "assistant_only_loss", False, f"{objective}, which compares the answers alone", "leave it out"),
        (spec.samples and len(config.reward_weights) not in (0, len(config.reward_funcs)),
         "reward_weights", len(config.reward_weights), f"weights for {len(config.reward_funcs)} rewards",
         "give each one"),
        (spec.samples and config.max_completion_length >= config.max_length,
         "max_completion_length", config.max_completion_length,
         f"leaves no room for a prompt in max_length={config.max_length}", "make it smaller"),
        (spec.samples and config.loss_spike_factor > 0,
         "loss_spike_factor", config.loss_spike_factor, f"{objective}: losses of sampled answers are around 0",
         "leave it out"),
        (samples and config.sampler_url is None and config.torch_compile,
         "torch_compile", True, f"{objective}: compiled layers do not sample", "leave it out"),
    ]  # fmt: skip
    rewards = reward_mistakes(config.reward_funcs, config.reward_schema) if samples else []
    return [*(Mistake(*rule[1:]) for rule in rules if rule[0]), *rewards, *sampler_mistakes(config)]


def ignored_choices(config: TrainConfig) -> list[Mistake]:
    """Returns a warning for each option set by the user that another one leaves without effect, or with a bad one."""
    changed = {name for name in config.model_fields_set if getattr(config, name) != _defaults().get(name)}
    ignored: list[Mistake] = []

    def ignore(names: Iterable[str], reason: str, value: object = None) -> None:
        ignored.extend(Mistake(name, value, f"is ignored: {reason}") for name in sorted(names))

    if config.method == "full":
        of_adapters = {name for name in changed if "lora" in name or name in ("modules_to_save", "use_dora")}
        ignore(of_adapters, "method=full has no adapters")
    else:
        if not config.modules_to_save:
            reason = f"method={config.method} trains no embedding without modules_to_save=embed_tokens,lm_head"
            ignore({"embedding_learning_rate"} & changed, reason)
        ignore({"freeze"} & changed, f"method={config.method} trains adapters alone")
    if config.method != "full" and config.ddp_find_unused_parameters:
        ignore(["ddp_find_unused_parameters"], f"method={config.method} trains adapters, where text reaches", True)
    spec = config.objective_spec
    ignore({*OWN_OPTIONS} & changed - {*spec.options}, f"objective={spec.name} does not read it")
    if "jsd_beta" in spec.defaults and config.loss_type != "jsd":
        ignore({"jsd_beta"} & changed, f"loss_type={config.objective_options()['loss_type']}")
    if spec.samples and "json_schema" not in config.reward_funcs:
        ignore({"reward_schema"} & changed, "json_schema is not among reward_funcs")
    if config.recorded_answers is not None:
        ignore({"steps_per_generation"} & changed, "recorded_answers hold what each step trains on")
    if config.max_steps is not None and "num_train_epochs" in changed:
        ignore(["num_train_epochs"], f"max_steps={config.max_steps} decides", config.num_train_epochs)
    if config.warmup_steps and config.warmup_ratio:
        ignore(["warmup_ratio"], f"warmup_steps={config.warmup_steps} decides", config.warmup_ratio)
    if EMBEDDED == config.eval_dataset_name != config.dataset_name:
        remedy = "name your own, or none and an eval_share"
        ignored.append(Mistake("eval_dataset_name", EMBEDDED, "with other training data", remedy))
    if not config.has_evaluation():
        ignore({"eval_steps", "eval_on_start", "max_eval_samples"} & changed, "there is no evaluation data")
    if config.ddp_timeout and config.ddp_timeout <= config.hang_timeout:
        problem = f"is not above hang_timeout={config.hang_timeout}: a rank that hangs ends the run without its name"
        ignored.append(Mistake("ddp_timeout", config.ddp_timeout, problem, "raise it, or lower hang_timeout"))
    if config.qat == "none":
        ignore({"qat_group_size"} & changed, "qat=none rounds nothing")
    own = {name for optim, names in SETTINGS_OF.items() if optim != config.optim for name in names}
    ignore((own - {*SETTINGS_OF[config.optim]}) & changed, f"optim={config.optim} does not read it")
    if config.attn_implementation in ("varlen", "documents") and not config.packing:
        ignore(["attn_implementation"], "packing=false; sdpa does the same work", config.attn_implementation)
    if not config.gradient_checkpointing:
        ignore({"selective_checkpointing", "activation_offloading"} & changed, "gradient_checkpointing is off")
    of_schedule = {"cosine_with_restarts": {"lr_num_cycles"}, "polynomial": {"lr_power"},
                   "warmup_stable_decay": {"lr_decay_ratio", "lr_decay_type"}}  # fmt: skip
    unread = set().union(*of_schedule.values()) - of_schedule.get(config.lr_scheduler_type, set())
    ignore(unread & changed, f"lr_scheduler_type={config.lr_scheduler_type}")
    if config.min_lr_ratio and config.lr_scheduler_type in ("constant", "inverse_sqrt"):
        ignore(["min_lr_ratio"], f"lr_scheduler_type={config.lr_scheduler_type}", config.min_lr_ratio)
    if config.early_stopping_threshold and config.early_stopping_patience is None:
        ignore(["early_stopping_threshold"], "early_stopping_patience is not set")
    if config.eval_answer_tokens and not config.eval_only and not config.generates_answers:
        ignore(["eval_answer_tokens"], "eval_only=false and eval_generate_steps=0")
    if config.eval_only:
        ignore({"eval_generate_steps", "eval_generate_prompts"} & changed, "eval_only=true answers every row")
    elif not config.generates_answers:
        ignore({"eval_generate_prompts"} & changed, "eval_generate_steps=0")
    if config.rope_scaling == "none":
        ignore({"rope_factor", "rope_original_max_positions"} & changed, "rope_scaling=none")
    if not config.dataset_streaming and config.mix is None:  # a source of a mix may be a stream
        ignore({"streaming_window", "streaming_cache"} & changed, "dataset_streaming is off")
    if config.lr_scaling == "none" and "lr_scaling_batch_size" in changed:
        ignore(["lr_scaling_batch_size"], "lr_scaling=none")
    return ignored


def _defaults() -> dict[str, Any]:
    return {name: field.get_default() for name, field in TrainConfig.model_fields.items() if not field.is_required()}
