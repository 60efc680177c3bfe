"""Compares a resumed run with its checkpoint, and refuses changes that lead to another model. Imports no torch."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import permutations
from pathlib import Path
from typing import Any

from trainers.config.fields import text_of
from trainers.config.lr_schedule import stable_steps
from trainers.config.mistakes import Mistake
from trainers.config.objective_file import file_version
from trainers.config.optimizer_options import ADAMW, SCHEDULE_FREE
from trainers.config.options import TrainConfig
from trainers.config.reward_file import schema_version
from trainers.run.folder import RunFolder, cache_folder, read_json, write_json
from trainers.run.manifest import read_manifest
from trainers.run.teacher import TEACHERS, teacher_version

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "peft", "safetensors")
EXTRAS = ("bitsandbytes", "deepspeed", "torchao")
PLACES = ("output_dir", "resume_from_checkpoint", "force_resume", "runs_dir", "stop_at_step")
"""Options that say where a run is stored, and how it is started and stopped; not saved in checkpoints."""
FREE = frozenset({
    "preset", "teacher", "teacher_log_probs", "model_revision", "trust_remote_code", "attn_implementation",
    "dataset_name", "dataset_query", "mix", "dataset_config_name", "dataset_split", "chat_template",
    "eval_dataset_name", "eval_split", "max_eval_samples", "bad_rows", "dataset_num_proc", "cache_dir",
    "streaming_cache",
    "per_device_train_batch_size", "per_device_eval_batch_size", "auto_find_batch_size",
    "gradient_checkpointing", "selective_checkpointing", "activation_offloading", "torch_compile", "deterministic",
    "ddp_backend", "ddp_timeout", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "pp_size", "pp_schedule",
    "eval_steps", "eval_on_start", "load_best_model_at_end", "metric_for_best_model", "early_stopping_patience",
    "early_stopping_threshold", "run_name", "checkpoint_url", "logging_steps", "save_steps", "save_total_limit",
    "max_restarts", "hang_timeout", "share_gpus", "non_finite", "loss_spike_factor", "report_to", "merge_adapter",
    "reward_timeout", "reward_schema",
    "export_dtype", "profile_steps", "profile_ranks", "eval_only", "eval_answer_tokens",
    "eval_generate_steps", "eval_generate_prompts",
})  # fmt: skip
"""Options that may change on resume: they affect cost, monitoring or export, but no training step beyond the parity
tolerance. Answers that are sampled in batches of another size, or on other ranks, differ where a rounding flips a
token. Includes the names of the data, of a teacher and of a schema, as their content is compared."""
FORCE = "continue anyway with --force (trainers/train.py: --force_resume true)"
LENGTH = ("max_steps", "num_train_epochs")
"""Options for the length of a run; they may change if the learning rates so far do not depend on the length, and
not within the steps that are sampled at once, of which the last ones of a run may have been left out."""
LATER_OPTIONS: dict[str, Any] = {
    "ema_decay": None, "new_tokens": [], "pad_vocab_to_multiple_of": None, "lora_target_parameters": [],
    "init_lora_weights": "default", "neftune_noise_alpha": 0.0, "dataset_streaming": False,
    "embedding_learning_rate": None, "qat": "none", "qat_group_size": 32,
}  # fmt: skip
"""Options that determine what is saved and that older checkpoints do not name, with the values that those had."""
STRUCTURE = (
    "method", "freeze", "lora_r", "lora_rank_pattern", "lora_target_modules", "lora_target_parameters",
    "modules_to_save", "use_dora", "init_lora_weights", "num_hidden_layers", "new_tokens", "pad_vocab_to_multiple_of",
)  # fmt: skip
"""Options that determine the set of tensors; a checkpoint cannot fit after a change, even with --force."""


def versions() -> dict[str, str]:
    """Returns what determines a result besides the config: package versions, and Tunesmith's own with a code digest."""
    names = [*PACKAGES, *(name for name in EXTRAS if importlib.util.find_spec(name) is not None)]
    versions = {name: version(name).partition("+")[0] for name in names}  # +cpu, +cu128: builds of one version
    try:
        own = version("tunesmith")
    except PackageNotFoundError:
        own = "not installed"
    return {"tunesmith": f"{own} ({code_digest()})", **versions}


@cache
def code_digest(root: Path = Path(__file__).parent.parent) -> str:
    """Returns the first 10 hex digits of a sha256 over all code in `trainers/`, without comments and docstrings.

    Parsing takes a third of a second; the result is cached on disk under the digest of the text.
    """
    sources = {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.py"))}
    text = hashlib.sha256(repr(sources).encode()).hexdigest()
    cached: Path | None = None
    with contextlib.suppress(RuntimeError):  # no home folder is known
        cached = cache_folder() / "code" / f"{text[:32]}.json"
    if cached and isinstance(known := (read_json(cached) or {}).get("digest"), str):
        return known
    digest = hashlib.sha256()
    for name, source in sources.items():
        digest.update(repr((name, _syntax(ast.parse(source)))).encode())
    if cached:
        with contextlib.suppress(OSError):  # without a cache, it is computed again
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_json(cached, {"digest": digest.hexdigest()[:10]})
    return digest.hexdigest()[:10]


def _syntax(node: Any) -> Any:
    """Returns a syntax tree as plain values, without docstrings, and without empty fields, which vary with Python."""
    if isinstance(node, list):
        return [_syntax(item) for item in node if not _is_docstring(item)]
    if isinstance(node, ast.AST):
        fields = [(name, _syntax(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return type(node).__name__, fields
    return node


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def recorded_versions(config: TrainConfig) -> dict[str, str]:
    """Returns what a checkpoint records: `versions()`, and the digests of objective, rewards, schema and frozen model.

    Raises:
        ConfigError: If that file cannot be read.
    """
    rewards = config.reward_funcs if config.objective_spec.samples else []
    files = [("objective", config.objective), *(("reward", name) for name in rewards)]
    digests = {name: digest for file in files for name, digest in file_version(*file).items()}
    if "json_schema" in rewards and config.reward_schema:
        digests |= schema_version(config.reward_schema)
    return versions() | digests | teacher_version(config)


def changed_options(manifest: dict[str, Any], config: dict[str, Any]) -> list[Mistake]:
    """Returns each option whose value differs from when the checkpoint was saved."""
    then, step = {**LATER_OPTIONS, **manifest["config"]}, manifest["step"]
    return [
        Mistake(name, text_of(value), f", and {text_of(then[name])} when the checkpoint of step {step} was saved")
        for name, value in config.items()
        if name in then and then[name] != value and name not in PLACES
    ]


def changed_versions(manifest: dict[str, Any], installed: dict[str, str]) -> list[Mistake]:
    """Returns each package whose version differs from when the checkpoint was saved."""
    then, step = manifest["versions"], manifest["step"]
    changed = [
        Mistake("", None, f"{name} is {number}, and was {then[name]} when the checkpoint of step {step} was saved")
        for name, number in installed.items()
        if name in then and then[name] != number
    ]
    for before, now in permutations(TEACHERS, 2):
        if before in then and now in installed and now not in then:
            problem = f"{now} takes the place of {before}, which the checkpoint of step {step} was trained with"
            changed.append(Mistake("", None, problem))
    return changed


def refusals(
    manifest: dict[str, Any], config: dict[str, Any], installed: dict[str, str], force: bool = False
) -> list[Mistake]:
    """Returns the changes that prevent resuming from a checkpoint, with remedies.

    Args:
        manifest: Manifest of the checkpoint.
        config: All current options, as plain values.
        installed: Current result of `recorded_versions()`.
        force: Only refuse changes that the checkpoint's tensors do not fit.
    """
    changed = changed_options(manifest, config)
    misfits = [
        replace(change, remedy="its tensors do not fit: start a new run")
        for change in changed
        if change.option in STRUCTURE or _has_other_states(change.option, manifest["config"], config)
    ]
    if force:
        return misfits
    moved = ["sampler_url"] if config.get("sampler_url") and manifest["config"].get("sampler_url") else []
    free_length = (
        _rate_is_free_of_length(config, manifest) and manifest["step"] % (config.get("steps_per_generation") or 1) == 0
    )
    pass_by = {*FREE, *STRUCTURE, *moved, *(LENGTH if free_length else ())}
    remedy = f"the remaining steps would differ: restore it, or {FORCE}"
    others = [change for change in changed if change.option not in pass_by] + changed_versions(manifest, installed)
    return misfits + [replace(change, remedy=remedy) for change in others]


def _has_other_states(option: str, then: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether an option's change leaves the optimizer without states that it needs, or with others."""
    if option == "ema_decay":
        return None in (then.get(option), now[option])
    if option == "adam_beta1" and now["optim"] == SCHEDULE_FREE:  # the average is computed from it
        return True
    return option == "optim" and not {then["optim"], now["optim"]} <= {*ADAMW}


def checkpoint_to_resume(source: str | None, run_dir: Path | None) -> Path | None:
    """Returns the checkpoint folder to resume from, as far as this machine can tell; None for a URL or without one.

    Args:
        source: `auto` for the newest checkpoint of the run, path or URL of a checkpoint, or None.
        run_dir: The run folder; None if unknown.
    """
    if source == "auto":
        checkpoints = RunFolder(run_dir).checkpoints if run_dir else None
        return max(checkpoints.glob("step-" + "[0-9]" * 8), default=None) if checkpoints else None
    return None if source is None or "://" in source else Path(source).expanduser()


def changes_since_save(run: RunFolder, config: TrainConfig, source: str | None) -> list[Mistake]:
    """Returns each change that prevents resuming from the checkpoint; the ranks compare the data later.

    Called before anything is written, as a `config.yaml` that does not fit the checkpoints breaks all later resumes.

    Args:
        run: The run to resume.
        config: Its current options.
        source: `auto`, path of a checkpoint, or None to start at step 0.
    """
    folder = checkpoint_to_resume(source, run.path)
    if folder is None:
        return []
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return []  # the ranks report what is wrong with it, and may use the previous one
    return refusals(manifest, plain(config), recorded_versions(config), config.force_resume)


def plain(config: TrainConfig) -> dict[str, Any]:
    """Returns the options that a checkpoint saves."""
    return config.model_dump(exclude=set(PLACES))


def saved_config(config: TrainConfig, manifest: Mapping[str, Any], free: Collection[str] = ()) -> TrainConfig:
    """The config that a checkpoint was saved with.

    Args:
        config: That of the run's newest attempt, for what a checkpoint does not save, and the dtype of the export.
        manifest: The checkpoint's manifest.
        free: Options that are left as they are in `config`.
    """
    left = {*PLACES, *free, "export_dtype"}
    saved = {name: value for name, value in manifest["config"].items() if name in plain(config) and name not in left}
    return TrainConfig.model_validate({**config.model_dump(), **saved})


def _rate_is_free_of_length(config: dict[str, Any], manifest: dict[str, Any]) -> bool:
    """Whether the steps up to a checkpoint had the same learning rates in a run of another length."""
    kind, step = config["lr_scheduler_type"], manifest["step"]
    if config["warmup_ratio"] and not config["warmup_steps"]:
        return False
    if kind == "warmup_stable_decay":  # as long as neither run has begun to decay
        lengths = (config["max_steps"], manifest["config"].get("max_steps"))
        return all(length and step <= stable_steps(length, config["lr_decay_ratio"]) for length in lengths)
    return kind in ("constant", "inverse_sqrt")
