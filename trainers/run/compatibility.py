"""What a resume would change in a run: it is named, and refused where the model that comes out would be another one.

Imports no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trainers.config.fields import text_of
from trainers.config.mistakes import Mistake
from trainers.config.options import TrainConfig
from trainers.run.folder import RunFolder
from trainers.run.manifest import read_manifest

PACKAGES = ("torch", "accelerate", "transformers", "datasets", "peft", "safetensors")
EXTRAS = ("bitsandbytes", "deepspeed")
PLACES = ("output_dir", "resume_from_checkpoint", "force_resume", "runs_dir")
"""Options that say where a run is and how it is started; its checkpoints do not keep them."""
FREE = frozenset({
    "preset", "model_revision", "trust_remote_code", "attn_implementation",
    "dataset_name", "dataset_config_name", "dataset_split", "chat_template",
    "eval_dataset_name", "eval_split", "max_eval_samples", "bad_rows", "dataset_num_proc", "cache_dir",
    "per_device_train_batch_size", "per_device_eval_batch_size", "auto_find_batch_size",
    "gradient_checkpointing", "selective_checkpointing", "activation_offloading", "torch_compile", "deterministic",
    "ddp_bucket_cap_mb", "pp_size", "pp_schedule",
    "eval_steps", "eval_on_start", "load_best_model_at_end", "metric_for_best_model", "early_stopping_patience",
    "early_stopping_threshold", "run_name", "checkpoint_url", "logging_steps", "save_steps", "save_total_limit",
    "max_restarts", "hang_timeout", "share_gpus", "non_finite", "loss_spike_factor", "report_to", "merge_adapter",
    "export_dtype",
})  # fmt: skip
"""Options that change what a run costs, watches or exports, and no step of it beyond parity; and names of data, whose
content the ranks compare."""
FORCE = "continue anyway with --force (trainers/train.py: --force_resume true)"
LENGTH = ("max_steps", "num_train_epochs")
"""How far a run goes; free where the learning rate of a step does not depend on it."""
STRUCTURE = ("method", "lora_r", "lora_target_modules", "num_hidden_layers")
"""Options that decide which tensors there are; no force makes a checkpoint fit."""


def versions() -> dict[str, str]:
    """What decides a result besides the config: versions of the packages, and of this one with its code's digest."""
    names = [*PACKAGES, *(name for name in EXTRAS if importlib.util.find_spec(name) is not None)]
    versions = {name: version(name).partition("+")[0] for name in names}  # +cpu, +cu128: builds of one version
    try:
        own = version("tunesmith")
    except PackageNotFoundError:
        own = "not installed"
    return {"tunesmith": f"{own} ({code_digest()})", **versions}


def code_digest() -> str:
    """The first letters of a digest of all the code in `trainers/`."""
    digest, root = hashlib.sha256(), Path(__file__).parent.parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:10]


def changed_options(manifest: dict[str, Any], config: dict[str, Any]) -> list[Mistake]:
    """Each option that has another value than when the checkpoint was saved."""
    then, step = manifest["config"], manifest["step"]
    return [
        Mistake(name, text_of(value), f", and {text_of(then[name])} when the checkpoint of step {step} was saved")
        for name, value in config.items()
        if name in then and then[name] != value and name not in PLACES
    ]


def changed_versions(manifest: dict[str, Any], installed: dict[str, str]) -> list[Mistake]:
    """Each package of another version."""
    then, step = manifest["versions"], manifest["step"]
    return [
        Mistake("", None, f"{name} is {number}, and was {then[name]} when the checkpoint of step {step} was saved")
        for name, number in installed.items()
        if name in then and then[name] != number
    ]


def refusals(
    manifest: dict[str, Any], config: dict[str, Any], installed: dict[str, str], force: bool = False
) -> list[Mistake]:
    """The changes with which a run must not go on from a checkpoint, with the way out.

    Args:
        manifest: of the checkpoint.
        config: all options now, as plain values.
        installed: `versions()` now.
        force: let pass all but what its tensors do not fit.
    """
    changed = changed_options(manifest, config)
    misfits = [
        replace(change, remedy="its tensors do not fit: start a new run")
        for change in changed
        if change.option in STRUCTURE
    ]
    if force:
        return misfits
    pass_by = {*FREE, *STRUCTURE, *(LENGTH if _rate_is_free_of_length(config) else ())}
    remedy = f"the remaining steps would differ: restore it, or {FORCE}"
    others = [change for change in changed if change.option not in pass_by] + changed_versions(manifest, installed)
    return misfits + [replace(change, remedy=remedy) for change in others]


def checkpoint_to_resume(source: str | None, run_dir: Path | None) -> Path | None:
    """The folder that a run goes on from as far as this machine can tell; None for none, and for a URL.

    Args:
        source: `auto` for the newest of the run, a checkpoint's path or URL, or None.
        run_dir: of the run; None where it is not known.
    """
    if source == "auto":
        checkpoints = RunFolder(run_dir).checkpoints if run_dir else None
        return max(checkpoints.glob("step-" + "[0-9]" * 8), default=None) if checkpoints else None
    return None if source is None or "://" in source else Path(source).expanduser()


def changes_since_save(run: RunFolder, config: TrainConfig, source: str | None) -> list[Mistake]:
    """Each change that the checkpoint to go on from cannot follow; the data is looked at by the ranks.

    It comes before anything is written: a `config.yaml` that its checkpoints do not fit fails every later resume too.

    Args:
        run: the run that goes on.
        config: its options now.
        source: `auto`, a checkpoint's path, or None for a start at step 0.
    """
    folder = checkpoint_to_resume(source, run.path)
    if folder is None:
        return []
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return []  # the ranks say what is wrong with it, and may take the one before
    return refusals(manifest, plain(config), versions(), config.force_resume)


def plain(config: TrainConfig) -> dict[str, Any]:
    """The options that a checkpoint keeps."""
    return config.model_dump(exclude=set(PLACES))


def _rate_is_free_of_length(config: dict[str, Any]) -> bool:
    warms_up_by_share = bool(config["warmup_ratio"]) and not config["warmup_steps"]
    return config["lr_scheduler_type"] in ("constant", "inverse_sqrt") and not warms_up_by_share
