"""Checks a run before any process is launched: model, data, arithmetic, precision, trackers.

Also tokenises the data, so that the ranks find it in the cache. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainers.config.mistakes import ConfigError, Mistake, errors_about
from trainers.config.objectives import ObjectiveSpec
from trainers.config.options import TrainConfig
from trainers.config.teacher import teacher_config
from trainers.data.batches import TrainPlan
from trainers.data.fill_cache import Split
from trainers.data.gathered import GatheredSet
from trainers.data.layout import FULL_SEQUENCE, SequenceShard
from trainers.data.local_copies import cache_dir
from trainers.data.mismatched import Mismatched
from trainers.data.noise import NoiseRule
from trainers.data.padding import check_last_tokens
from trainers.data.prepare import TokenSet, prepare_splits, report_lines
from trainers.data.rollouts import check_prompts, prompts_to_answer, refuse_cut_rows, refuse_other_columns
from trainers.data.rows import Documents, Rows
from trainers.data.stream import streams_of
from trainers.data.stream_plan import StreamPlan
from trainers.data.teacher_file import check_teacher_file, open_teacher_file
from trainers.data.tokenizer import tokenizer_hash
from trainers.data.vocabulary import refuse_other_vocabulary
from trainers.run.compatibility import checkpoint_to_resume, versions
from trainers.run.disk import check_room, tensors_of
from trainers.run.folder import read_json, write_json
from trainers.run.from_run import refuse_adapter_start
from trainers.run.gpus import LEAST_CAPABILITY, capability
from trainers.run.hub_errors import hub_mistake
from trainers.run.json_file import load_json
from trainers.run.manifest import read_manifest
from trainers.run.weight_headers import (
    ADAPTER_AS_MODEL,
    INDEX_NAME,
    WEIGHTS_NAME,
    Headers,
    base_folder,
    cached_folder,
    hub_headers,
    read_headers,
)
from trainers.strategy.strategy import Strategy

HUB_SECONDS = 20.0
_CONFIG = "config.json"
_UNREAD = "the headers of the weight files could not be read from the Hub; the start of the run checks them"
_MODEL_OPTIONS = ("packing", "method", "num_hidden_layers", "random_init", "trust_remote_code", "attn_implementation",
                  "mixed_precision", "torch_compile", "lora_target_modules", "lora_r", "merge_adapter", "max_length",
                  "ddp_find_unused_parameters", "rope_scaling", "rope_factor", "rope_original_max_positions", "freeze",
                  "lora_rank_pattern", "lora_alpha_pattern", "modules_to_save", "use_dora", "new_tokens",
                  "lora_target_parameters", "init_lora_weights",
                  "pad_vocab_to_multiple_of")  # fmt: skip


def check(
    config: TrainConfig, strategy: Strategy, has_gpu: bool, run_dir: Path | None = None, on_this_machine: bool = True
) -> list[str]:
    """Checks a run; returns lines that describe what would be trained.

    Args:
        config: the validated config.
        strategy: resolved for all processes.
        has_gpu: whether the run uses GPUs.
        run_dir: the run folder, to check its disk space and, if the run is resumed, to use its saved chat template.
        on_this_machine: whether this machine is to train.

    Raises:
        ConfigError: with every mistake that can be found without loading weights.
    """
    data_parallel_size = strategy.data_parallel_size
    mistakes = (
        machine_mistakes(config, has_gpu, on_this_machine)
        + _arithmetic(config, data_parallel_size)
        + check_model(config)
    )
    if mistakes:
        raise ConfigError(mistakes)
    if config.objective_spec.teacher and config.teacher is not None:
        _check_teacher(config, strategy)
    refuse_adapter_start(config)
    folder = base_folder(config)
    local = folder if folder.is_dir() else cached_folder(config)
    headers = _headers(config, local)
    model = _inspected(config, local, None if config.random_init else headers, strategy)
    config = config if run_dir is None else config.model_copy(update={"output_dir": str(run_dir)})
    _check_checkpoint(config, run_dir)
    train, evaluation = prepare_splits(config)
    if config.eval_only:
        refuse_cut_rows(config, train)
    scaling_lines = check_positions(config, [train, evaluation], model["positions"])
    check_token_ids(config, [train, evaluation], model["vocab_size"])
    check_last_tokens(config, [train, evaluation])
    if config.teacher_log_probs is not None:
        check_teacher_file(config, [("train", train), ("eval", evaluation)], model["vocab_size"], strategy.sizes.tp)
    if config.objective_spec.samples:
        refuse_other_columns(config, train, evaluation)
    if config.generates_answers and evaluation is not None:
        prompts_to_answer(config, evaluation, model["positions"])
    plan = plan_training(config, train, data_parallel_size)
    if run_dir is not None and not config.eval_only:
        check_room(config, tensors_of(headers or {}), run_dir, plan.total_steps, model.get("trained_weights"))
    unread = headers is None and not config.random_init
    lines = [_UNREAD] if unread else []
    return [*lines, *model["lines"], *scaling_lines, *report_lines(train, evaluation), describe_plan(plan)]


def plan_training(
    config: TrainConfig,
    train: TokenSet,
    data_parallel_size: int,
    shard: SequenceShard = FULL_SEQUENCE,
) -> TrainPlan:
    """The batches of a run.

    Args:
        config: the run's config.
        train: the tokenised data.
        data_parallel_size: ranks that share a global batch.
        shard: the shard of each row that this rank holds.

    Raises:
        ConfigError: if the global batch does not divide evenly, or is larger than the data.
    """
    try:
        if streams_of(train):
            return StreamPlan(train, partial(make_rows, config, shard=shard), config, data_parallel_size)
        return TrainPlan(make_rows(config, train, shard), config, data_parallel_size)
    except ConfigError as error:  # too few rows: dropped rows are the likely cause
        raise ConfigError([*train.report.dropped_note(), *error.mistakes]) from None


def make_rows(
    config: TrainConfig, documents: TokenSet, shard: SequenceShard = FULL_SEQUENCE, split: Split = "train"
) -> Rows:
    """Rows of the data: packed, or one example each.

    Raises:
        ConfigError: if a prompt leaves no room for an answer, or the recorded predictions of a teacher do not fit.
    """
    fixed = config.torch_compile and config.packing  # one shape, one compiled graph
    spec, layout = config.objective_spec, (config.row_tokens, config.packing, fixed, shard, config.objective_spec)
    if spec.samples:  # a row is a prompt; its answers are packed once they are sampled
        check_prompts(config, documents)
        return Rows(documents, config.row_tokens, packing=False, shard=shard, objective=spec)
    mismatched = Rows(_mismatched(documents), *layout) if spec.mismatched else None
    recorded = spec.teacher and config.teacher_log_probs is not None
    teacher = open_teacher_file(config, split, documents) if recorded else None
    rows = Rows(
        documents, *layout, documents.desirable if spec.labelled else None, mismatched, _columns(spec, documents),
        teacher,
    )  # fmt: skip
    if split == "train" and config.neftune_noise_alpha > 0:
        rows.noise = NoiseRule(config.neftune_noise_alpha, config.seed)
    rows.splits_loss = split == "train" and rows.mix is not None and spec.name == "sft"
    return rows


def _mismatched(documents: TokenSet) -> Documents:
    """The mismatched documents; those of a batch were paired when its windows were opened."""
    return documents.mismatched if isinstance(documents, GatheredSet) else Mismatched(documents)


def _columns(spec: ObjectiveSpec, documents: TokenSet) -> dict[str, np.ndarray]:
    """The numeric columns that the objective reads, without optional ones that the data lacks."""
    columns = dict(zip(spec.columns, documents.numbers.T, strict=True))
    return {name: numbers for name, numbers in columns.items() if not np.isnan(numbers).all()}


def describe_plan(plan: TrainPlan) -> str:
    """One line with rows, steps, accumulation and tokens per step; one with the labels, if there are any."""
    rows, config = plan.rows, plan.config
    if config.objective_spec.samples:
        return (
            f"{len(rows)} prompts; {plan.total_steps} steps of {config.global_batch_size} prompts x "
            f"{config.num_generations} answers of at most {config.max_completion_length} tokens on {plan.world} ranks"
        )
    kind = f"packed rows of {config.row_tokens}" if config.packing else "rows"
    if config.eval_only:
        return f"{len(rows)} {kind} to evaluate; nothing is trained"
    tokens = int(rows.lengths.sum())
    fill = f" ({tokens / (len(rows) * config.row_tokens):.1%} full)" if config.packing else ""
    if isinstance(plan, StreamPlan):
        fill += f" in the first window, about {plan.steps_per_epoch:,} steps an epoch"
    return (
        f"{len(rows)} {kind}{fill}; {plan.total_steps} steps of {config.global_batch_size} rows = {plan.accumulation} "
        f"micro-batches x {config.per_device_train_batch_size} rows x {plan.world} ranks; "
        f"about {tokens * config.global_batch_size // len(rows)} tokens per step"
        + ("" if rows.desirable is None else f"\n{_describe_labels(rows.desirable, config)}")
    )


def _describe_labels(desirable: np.ndarray, config: TrainConfig) -> str:
    """How many examples have each label, and how their weights compare."""
    good, bad = int(desirable.sum()), int((~desirable).sum())
    totals = (config.desirable_weight * good, config.undesirable_weight * bad)
    compared = f", weighted {totals[0] / totals[1]:.3g} to 1" if min(totals) > 0 else ""
    return f"{good:,} desirable and {bad:,} undesirable examples{compared}"


def machine_mistakes(config: TrainConfig, has_gpu: bool, on_this_machine: bool = True) -> list[Mistake]:
    """Options that a machine does not support: they need a GPU, or a package that is not installed.

    Args:
        config: the validated config.
        has_gpu: whether the machine that is to train has GPUs.
        on_this_machine: whether it is this one; the age of another's GPUs is not known.
    """
    hook = config.ddp_comm_hook
    rules: list[tuple[bool, str, object, str, str]] = [
        (config.mixed_precision == "fp16" and not has_gpu,
         "mixed_precision", "fp16", "needs a GPU, but there is none", "use bf16 or no"),
        (hook in ("bf16", "power_sgd") and not has_gpu,  # under gloo, PowerSGD aborts the process
         "ddp_comm_hook", hook, "needs GPUs with NCCL, but there are none", "use fp16 or none"),
        ("nccl" in config.ddp_backend and not has_gpu,
         "ddp_backend", config.ddp_backend, "needs GPUs, but there are none", "use gloo or auto"),
        (hook in ("bf16", "power_sgd") and has_gpu and config.ddp_backend == "gloo",
         "ddp_comm_hook", hook, "needs NCCL", "leave ddp_backend=gloo out, or use fp16 or none"),
        (config.tf32 and not has_gpu, "tf32", True, "needs a GPU, but there is none", "leave it out"),
        (config.activation_offloading and not has_gpu,
         "activation_offloading", True, "needs a GPU, whose memory it saves, but there is none", "leave it out"),
        (config.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None,
         "method", "qlora", "needs bitsandbytes, which is not installed",
         '`pip install "tunesmith[quant]"`, or use method=lora'),
    ]  # fmt: skip
    mistakes = [Mistake(name, value, problem, remedy) for applies, name, value, problem, remedy in rules if applies]
    if config.mixed_precision == "fp8" and on_this_machine:
        mistakes += _float8_mistakes()
    if config.qat != "none" and importlib.util.find_spec("torchao") is None:
        remedy = '`pip install "tunesmith[fp8]"`, or leave it out'
        mistakes.append(Mistake("qat", config.qat, "needs torchao, which is not installed", remedy))
    missing = [name for name in config.report_to if importlib.util.find_spec(name) is None]
    return mistakes + [
        Mistake("report_to", name, "is not installed", f"`pip install {name}`, or leave it out") for name in missing
    ]


def _float8_mistakes() -> list[Mistake]:
    least, actual = ".".join(map(str, LEAST_CAPABILITY)), ".".join(map(str, capability()))
    mistakes = []
    if capability() < LEAST_CAPABILITY:
        problem = f"needs GPUs of compute capability {least}, this one has {actual}"
        mistakes.append(Mistake("mixed_precision", "fp8", problem, "use bf16"))
    if importlib.util.find_spec("torchao") is None:
        remedy = '`pip install "tunesmith[fp8]"`, or use bf16'
        mistakes.append(Mistake("mixed_precision", "fp8", "needs torchao, which is not installed", remedy))
    return mistakes


def _arithmetic(config: TrainConfig, data_parallel_size: int) -> list[Mistake]:
    try:
        config.accumulation_steps(data_parallel_size)
    except ConfigError as error:
        return error.mistakes
    return []


def check_model(config: TrainConfig) -> list[Mistake]:
    """Mistakes in the base model's name, folder or files, without loading it."""
    name, folder = config.model_name_or_path, base_folder(config)
    if folder.is_dir():
        files = {path.name for path in folder.iterdir()}
        problems = [] if "adapter_config.json" in files else _config_file_problems(folder / _CONFIG)
        problems = problems or _file_problems(files, config)
        if not problems and not config.random_init:
            try:
                read_headers(folder)
            except ConfigError as error:
                return error.mistakes
    elif "://" in name:
        problems = ["is a URL; use a local folder with config.json, or a Hub id (owner/name)"]
    elif folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        problems = ["is not a model folder; use a folder with config.json, or a Hub id"]
    else:
        return _hub_mistakes(config)
    return [Mistake("model_name_or_path", name, problem) for problem in problems]


def _check_teacher(config: TrainConfig, strategy: Strategy) -> None:
    """Raises ConfigError for mistakes in the teacher's name, folder or files, and for one that cannot be used here.

    That is one with another tokenizer, or one that the strategy cannot split.
    """
    with errors_about("model_name_or_path", "teacher"):
        if mistakes := check_model(teacher_config(config)):
            raise ConfigError(mistakes)
    refuse_other_vocabulary(config)
    if strategy.sizes.tp * strategy.sizes.sequence_shards > 1:
        from trainers.tools.model_check import refuse_teacher_split

        refuse_teacher_split(config, strategy)


def _headers(config: TrainConfig, local: Path | None) -> Headers | None:
    """Headers of the base model's weight files; None if unavailable.

    Raises:
        ConfigError: if required files are incomplete.
    """
    try:
        return hub_headers(config) if local is None else read_headers(local)
    except ConfigError:
        if config.random_init:
            return None
        raise


def _inspected(config: TrainConfig, local: Path | None, headers: Headers | None, strategy: Strategy) -> dict[str, Any]:
    """The result of `inspect_model`; cached if the model is local.

    Raises:
        ConfigError: if the model cannot be trained.
    """
    cache_file = None
    if local is not None:
        options = [getattr(config, name) for name in _MODEL_OPTIONS]
        options += [config.objective_spec.scalar_head]
        options += [strategy.dump()] if strategy.splits_model or strategy.sizes.sequence_shards > 1 else []
        model_config, tokenizer = (local / "config.json").read_text(encoding="utf-8"), tokenizer_hash(local, config)
        key = hashlib.sha256(json.dumps([versions(), model_config, headers, tokenizer, options]).encode()).hexdigest()
        cache_file = cache_dir(config) / "models" / f"{key}.json"
        if isinstance(known := read_json(cache_file), dict):
            return known

    from trainers.tools.model_check import inspect_model

    facts = inspect_model(config, headers, strategy)
    if cache_file is not None:
        with contextlib.suppress(OSError):  # without a cache, it is computed again
            cache_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(cache_file, facts)
    return facts


def _check_checkpoint(config: TrainConfig, run_dir: Path | None) -> None:
    """Checks that the checkpoint to resume from can be read, and that its weights fit the model.

    Raises:
        ConfigError: If not; says what is wrong with it.
    """
    source = config.resume_from_checkpoint
    folder = checkpoint_to_resume(source, run_dir)
    if folder is None:
        return
    label = f"resume_from_checkpoint={folder}"
    if not folder.is_dir():
        raise ConfigError(
            f"{label} does not exist; use the folder of a checkpoint, such as RUN/checkpoints/step-00000100"
        )
    if source != "auto" and not (folder / "manifest.json").exists():
        raise ConfigError(
            f"{label} has no manifest.json and is not a checkpoint; use one in the folder RUN/checkpoints"
        )
    try:
        manifest = read_manifest(folder)
    except (OSError, ValueError) as error:
        if source == "auto":
            return  # the ranks set it aside and use the previous one
        raise ConfigError(f"{label} cannot be used: {error}; use another checkpoint") from None

    from trainers.tools.model_check import checkpoint_misfits

    if lines := checkpoint_misfits(config, manifest):
        raise ConfigError(f"{label}: {'; '.join(lines)}; use a checkpoint of this model, or start a new run")


def check_token_ids(config: TrainConfig, splits: Sequence[TokenSet | None], vocab_size: int) -> None:
    """Refuses token ids that the model has no embedding for.

    Raises:
        ConfigError: with the token id and the size of the embedding.
    """
    largest = max((documents.largest_token_id() for documents in splits if documents is not None), default=0)
    if largest >= vocab_size:
        raise ConfigError.about(
            "model_name_or_path",
            config.model_name_or_path,
            f": its tokenizer produces token {largest} but the model has embeddings for {vocab_size} tokens, 0 to "
            f"{vocab_size - 1}",
            "use the tokenizer that belongs to the model, or resize its embeddings first "
            "(`resize_token_embeddings` of transformers)",
        )


def _config_file_problems(path: Path) -> list[str]:
    try:
        if not isinstance(load_json(path), dict):
            return [": config.json is not a JSON object; download or save the model again"]
    except FileNotFoundError:
        return ["has no config.json; use the folder that save_pretrained wrote"]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return [f": config.json cannot be read: {reason}; download or save the model again"]
    return []


def _file_problems(files: set[str], config: TrainConfig) -> list[str]:
    if "adapter_config.json" in files:
        return [ADAPTER_AS_MODEL]
    mistakes = []
    if not config.random_init and not files & {WEIGHTS_NAME, INDEX_NAME}:
        pickles = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth")))
        content = f"only {', '.join(pickles)}, which would run code when read" if pickles else "no weights"
        if others := sorted(file for file in files if file.endswith((".safetensors", ".gguf"))):
            content = f"only {', '.join(others[:3])}"
        need = f"{WEIGHTS_NAME} or {INDEX_NAME}"
        mistakes.append(f"has {content}; it needs {need} (`save_pretrained` of transformers writes them)")
    if any(file.startswith("modeling_") for file in files) and not config.trust_remote_code:
        mistakes.append("has its own code; review it, then pass --trust_remote_code true, or use another model")
    return mistakes


def check_positions(config: TrainConfig, splits: Sequence[TokenSet | None], positions: int | None) -> list[str]:
    """Refuses documents longer than the model supports, if its config says how many positions that are.

    Args:
        config: the run's config.
        splits: the data sets.
        positions: positions of the model as it is trained, with `rope_scaling`; None without.

    Returns:
        A line if the model is scaled although the data would fit without it.

    Raises:
        ConfigError: with the model's limit.
    """
    longest = max((documents.report.longest for documents in splits if documents is not None), default=0)
    longest = config.max_length if config.objective_spec.samples else longest  # a prompt and a sampled answer
    tokens, factor = min(longest, config.max_length), config.rope_factor
    if config.rope_scaling != "none" and factor is not None and positions is not None:
        original = round(positions / factor)
        if tokens <= positions:
            idle = (
                f"rope_scaling={config.rope_scaling}: the longest document has {tokens:,} tokens, which fit into the "
            )
            return [f"{idle}{original:,} positions before scaling"] if tokens <= original else []
        more = f"use max_length={positions}, or rope_factor={math.ceil(tokens / original)}"
    else:
        positions, scalable = _stated_positions(config)
        if positions is None or tokens <= positions:
            return []
        scaled = f", or rope_scaling=yarn with rope_factor={math.ceil(tokens / positions)}" if scalable else ""
        more = f"use max_length={positions}{scaled}"
    problem = f": the longest document has {tokens} tokens, the model supports {positions}"
    raise ConfigError.about("max_length", config.max_length, problem, more)


def _stated_positions(config: TrainConfig) -> tuple[int | None, bool]:
    """Positions that a local config.json states, and whether the model has unscaled rotary embeddings to extend.

    Not a family's default, which says nothing about a model.
    """
    path = base_folder(config) / _CONFIG
    stated = load_json(path) if path.is_file() else {}
    limit = stated.get("max_position_embeddings") or stated.get("n_positions")
    rope = stated.get("rope_parameters") or stated.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(limit, int):
        return None, False
    if kind == "dynamic":  # it starts there
        return int(limit * rope.get("factor", 1.0)), False
    return limit, kind == "default" and bool(rope or stated.get("rope_theta"))


def _hub_mistakes(config: TrainConfig) -> list[Mistake]:
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    name, revision = config.model_name_or_path, config.model_revision
    label = name + (f" at revision {revision}" if revision else "")
    try:
        if isinstance(try_to_load_from_cache(name, _CONFIG, revision=revision), str):
            return []  # downloaded before; works offline
        siblings = HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS).siblings or []
        files = {file.rfilename for file in siblings}
        problems = _file_problems(files, config)
        if not problems and _CONFIG not in files:
            problems = [f"has no {_CONFIG} on the Hub; use a model in the format of transformers"]
        if not problems:  # the files of a gated model are listed to everyone
            get_hf_file_metadata(hf_hub_url(name, _CONFIG, revision=revision), timeout=HUB_SECONDS)
        return [Mistake("model_name_or_path", label, problem) for problem in problems]
    except Exception as error:  # several libraries raise different errors without a network
        first = str(error).partition("\n")[0][:200]
        problem = f"cannot be looked up on the Hub: {first}"
        unknown = Mistake("model_name_or_path", label, problem, "try again later")
        return [hub_mistake(name, revision, error) or unknown]
