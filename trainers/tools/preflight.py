"""What can go wrong before any process is launched: model, data, arithmetic, precision, trackers.

It tokenises the data too, so that the ranks find it in the cache. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainers.config.options import ConfigError, TrainConfig
from trainers.data.batches import Rows, TrainPlan
from trainers.data.layout import WHOLE, RowPart
from trainers.data.prepare import TokenSet, cache_dir, prepare
from trainers.data.tokenizer import tokenizer_hash
from trainers.run.compatibility import versions
from trainers.run.disk import check_room, tensors_of
from trainers.run.folder import read_json, write_json
from trainers.run.gpus import LEAST_CAPABILITY, capability
from trainers.run.json_file import load_json
from trainers.run.weight_headers import Headers, base_folder, cached_folder, hub_headers, read_header, read_headers
from trainers.strategy.strategy import Strategy

_MODEL_OPTIONS = ("packing", "method", "num_hidden_layers", "random_init", "trust_remote_code", "attn_implementation",
                  "mixed_precision", "torch_compile", "lora_target_modules", "merge_adapter")  # fmt: skip


def check(config: TrainConfig, strategy: Strategy, has_gpu: bool, run_dir: Path | None = None) -> list[str]:
    """The lines that tell what would be trained.

    Args:
        config: the validated config.
        strategy: for all its processes.
        has_gpu: whether the run will be on GPUs.
        run_dir: where it would write, so that the room on that disk is looked at, and of a run that is resumed the chat
            template that it began with.

    Raises:
        ConfigError: with every mistake that can be found without loading weights.
    """
    data_parallel_size = strategy.data_parallel_size
    mistakes = machine_mistakes(config, has_gpu) + _arithmetic(config, data_parallel_size) + check_model(config)
    if mistakes:
        raise ConfigError(mistakes)
    folder = base_folder(config)
    local = folder if folder.is_dir() else cached_folder(config)
    headers = _headers(config, local)
    model = _inspected(config, local, None if config.random_init else headers, strategy)
    config = config if run_dir is None else config.model_copy(update={"output_dir": str(run_dir)})
    train = prepare(config, "train")
    evaluation = prepare(config, "eval") if config.has_evaluation() else None
    _check_positions(config, train.report.longest)
    check_token_ids(config, [train, evaluation], model["vocab_size"], model["pad_token_id"])
    plan = plan_training(config, train, data_parallel_size, pad_token_id=0)
    if run_dir is not None:
        check_room(config, tensors_of(headers or {}), run_dir, plan.total_steps)
    lines = [*model["lines"], *train.report.lines(), describe_plan(plan)]
    return lines + (evaluation.report.lines() if evaluation else [])


def plan_training(
    config: TrainConfig, train: TokenSet, data_parallel_size: int, pad_token_id: int, part: RowPart = WHOLE
) -> TrainPlan:
    """The batches of a run.

    Args:
        part: of each row, that this rank has.

    Raises:
        ConfigError: when the global batch does not divide, or is larger than the data.
    """
    try:
        return TrainPlan(make_rows(config, train, pad_token_id, part), config, data_parallel_size)
    except ConfigError as error:  # too few rows are left, as likely as not of those that were dropped
        raise ConfigError([*train.report.dropped_note(), *error.mistakes]) from None


def make_rows(config: TrainConfig, documents: TokenSet, pad_token_id: int, part: RowPart = WHOLE) -> Rows:
    """Rows of the data as the config wants them: packed or one document each."""
    fixed = config.torch_compile and config.packing  # one shape, one compiled graph
    return Rows(documents, config.max_length, config.packing, pad_token_id, fixed, part)


def describe_plan(plan: TrainPlan) -> str:
    """One line: rows, steps, accumulation, tokens per step."""
    rows, config = plan.rows, plan.config
    kind = f"packed rows of {config.max_length}" if config.packing else "rows"
    tokens = int(rows.lengths.sum())
    fill = f" ({tokens / (len(rows) * config.max_length):.1%} full)" if config.packing else ""
    return (
        f"{len(rows)} {kind}{fill}; {plan.total_steps} steps of {config.global_batch_size} rows = {plan.accumulation} "
        f"micro-batches x {config.per_device_train_batch_size} rows x {plan.world} ranks; "
        f"about {tokens * config.global_batch_size // len(rows)} tokens per step"
    )


def machine_mistakes(config: TrainConfig, has_gpu: bool) -> list[str]:
    """What this machine cannot do: precisions and hooks that need a GPU, packages that are not installed."""
    needs_gpu = {
        "mixed_precision=fp16 needs a GPU and there is none; use bf16 or no": config.mixed_precision == "fp16",
        f"ddp_comm_hook={config.ddp_comm_hook} needs GPUs with NCCL and there are none; use fp16 or none": (
            config.ddp_comm_hook in ("bf16", "power_sgd")  # under gloo, PowerSGD aborts the process
        ),
        "tf32=true needs a GPU and there is none; leave it out": config.tf32,
        "activation_offloading=true needs a GPU, whose memory it spares, and there is none; leave it out": (
            config.activation_offloading
        ),
    }
    mistakes = [line for line, asked in needs_gpu.items() if asked and not has_gpu]
    if config.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        mistakes.append(
            'method=qlora needs bitsandbytes, which is not installed; `pip install "tunesmith[quant]"`, '
            "or use method=lora"
        )
    if config.mixed_precision == "fp8":
        mistakes += _float8_mistakes()
    missing = [name for name in config.report_to if importlib.util.find_spec(name) is None]
    return mistakes + [f"report_to={name} is not installed; `pip install {name}`, or leave it out" for name in missing]


def _float8_mistakes() -> list[str]:
    least, here = ".".join(map(str, LEAST_CAPABILITY)), ".".join(map(str, capability()))
    mistakes = {
        f"mixed_precision=fp8 needs GPUs of compute capability {least}, here it is {here}; use bf16": (
            capability() < LEAST_CAPABILITY
        ),
        'mixed_precision=fp8 needs torchao, which is not installed; `pip install "tunesmith[fp8]"`, or use bf16': (
            importlib.util.find_spec("torchao") is None
        ),
    }
    return [line for line, applies in mistakes.items() if applies]


def _arithmetic(config: TrainConfig, data_parallel_size: int) -> list[str]:
    try:
        config.accumulation_steps(data_parallel_size)
    except ConfigError as error:
        return error.mistakes
    return []


def check_model(config: TrainConfig) -> list[str]:
    """Mistakes in the base model's name, folder or files, without loading it."""
    name = config.model_name_or_path
    folder = base_folder(config)
    if folder.is_dir():
        files, named = {path.name for path in folder.iterdir()}, f"model_name_or_path={name}"
        problem = _check_config_file(folder / "config.json", named) or _check_files(files, named, config)
        weights = [] if config.random_init else sorted(folder.glob("*.safetensors"))
        return problem or [line for path in weights for line in _check_header(path, named)]
    if "://" in name:
        return [f"model_name_or_path={name} is a URL; name a local folder with config.json, or a Hub id (owner/name)"]
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return [f"model_name_or_path={name} is no model folder; name a folder with config.json, or a Hub id"]
    return _check_hub(config)


def _headers(config: TrainConfig, local: Path | None) -> Headers | None:
    """Headers of the base model's weight files; None where they are not to be had.

    Raises:
        ConfigError: when files that are needed are not whole.
    """
    try:
        return hub_headers(config) if local is None else read_headers(local)
    except ConfigError:
        if config.random_init:
            return None
        raise


def _inspected(config: TrainConfig, local: Path | None, headers: Headers | None, strategy: Strategy) -> dict[str, Any]:
    """What `inspect_model` found in the config and in the headers of the weight files; remembered where it is local.

    Raises:
        ConfigError: when the model cannot be trained.
    """
    remembered = None
    if local is not None:
        options = [getattr(config, name) for name in _MODEL_OPTIONS]
        options += [strategy.dump()] if strategy.splits_model or strategy.sizes.parts > 1 else []
        shape, tokenizer = (local / "config.json").read_text(encoding="utf-8"), tokenizer_hash(local, config)
        key = hashlib.sha256(json.dumps([versions(), shape, headers, tokenizer, options]).encode()).hexdigest()
        remembered = cache_dir(config) / "models" / f"{key}.json"
        if isinstance(known := read_json(remembered), dict):
            return known

    from trainers.tools.model_check import inspect_model

    found = inspect_model(config, headers, strategy)
    if remembered is not None:
        with contextlib.suppress(OSError):  # it is found again next time
            remembered.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_json(remembered, found)
    return found


def check_token_ids(config: TrainConfig, splits: Sequence[TokenSet | None], vocab_size: int, pad_token_id: int) -> None:
    """Refuses tokens that the model has no embedding for.

    Raises:
        ConfigError: with the token and the size of the embedding.
    """
    largest = max([pad_token_id, *(documents.largest_token_id() for documents in splits if documents is not None)])
    if largest >= vocab_size:
        raise ConfigError(
            f"model_name_or_path={config.model_name_or_path}: its tokenizer writes token {largest} and the model has "
            f"embeddings for {vocab_size} tokens, 0 to {vocab_size - 1}; use the tokenizer that belongs to the model, "
            "or resize its embeddings first (`resize_token_embeddings` of transformers)"
        )


def _check_config_file(path: Path, named: str) -> list[str]:
    try:
        if not isinstance(load_json(path), dict):
            return [f"{named}: config.json holds no object; download or save the model again"]
    except FileNotFoundError:
        return [f"{named} has no config.json; name the folder that save_pretrained wrote"]
    except (OSError, ValueError) as error:
        return [f"{named}: config.json cannot be read: {error}; download or save the model again"]
    return []


def _check_files(files: set[str], named: str, config: TrainConfig) -> list[str]:
    mistakes = []
    if "adapter_config.json" in files:
        mistakes.append(f"{named} holds an adapter, which would be loaded in its place; merge it, or name its base")
    if not config.random_init and not any(file.endswith(".safetensors") for file in files):
        pickles = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth")))
        what = f"only {', '.join(pickles)}, which would run code when read" if pickles else "no weights"
        mistakes.append(f"{named} has {what}; it needs *.safetensors (`save_pretrained` of transformers writes them)")
    if any(file.startswith("modeling_") for file in files) and not config.trust_remote_code:
        mistakes.append(
            f"{named} brings its own code; read it, then pass --trust_remote_code true, or use another model"
        )
    return mistakes


def _check_header(path: Path, named: str) -> list[str]:
    """Mistakes in a safetensors file, from its header alone."""
    try:
        read_header(path)
    except (OSError, ValueError):
        return [f"{named}: {path.name} is damaged or cut short; download or save the model again"]
    return []


def _check_positions(config: TrainConfig, longest: int) -> None:
    """Refuses documents longer than the model was made for, where its config is at hand.

    Raises:
        ConfigError: with the model's limit.
    """
    folder = base_folder(config)
    if not (folder / "config.json").is_file():
        return
    shape = load_json(folder / "config.json")
    limit = shape.get("max_position_embeddings") or shape.get("n_positions")
    kept = min(longest, config.max_length)
    if isinstance(limit, int) and kept > limit:
        raise ConfigError(
            f"max_length={config.max_length}: the longest document has {kept} tokens, the model was made for {limit}; "
            f"use max_length={limit}"
        )


def _check_hub(config: TrainConfig) -> list[str]:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    name, revision = config.model_name_or_path, config.model_revision
    named = f"model_name_or_path={name}" + (f" at revision {revision}" if revision else "")
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            return []  # downloaded before; works offline
        siblings = HfApi().model_info(name, revision=revision, timeout=20).siblings or []
        return _check_files({file.rfilename for file in siblings}, named, config)
    except HFValidationError:
        return [f"{named} is neither a folder nor a Hub id (owner/name); check the spelling"]
    except GatedRepoError:
        return [f"{named} is gated; accept its terms on its Hub page, then set HF_TOKEN or run `hf auth login`"]
    except RepositoryNotFoundError:
        return [f"{named} is not on the Hub, or is private; check the spelling, or set HF_TOKEN"]
    except Exception as error:  # no network shows itself in the exceptions of several libraries
        first = str(error).partition("\n")[0][:200]
        return [f"{named} is no folder here and the Hub cannot be reached ({first}); name a local folder, or go online"]
