"""Starts a run from the result of another one, which `from_run` names. Imports no torch.

The result is what that run exported. Full weights become the base model. An adapter is trained further with
`method=lora` or `qlora`, and merged into its base with `method=full`. Tokenizer, chat template and stop tokens are
those of the export.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainers.config.fields import text_of
from trainers.config.mistakes import ConfigError, Mistake, errors_about
from trainers.config.objective_file import file_spec
from trainers.config.objectives import OBJECTIVES
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.parse import Request
from trainers.embedded import BASE_DIR
from trainers.run.compatibility import FORCE
from trainers.run.folder import LIVE_STATES, RunFolder, registered_runs
from trainers.run.json_file import load_json
from trainers.run.lineage import Stage, read_export
from trainers.run.manifest import sha256
from trainers.run.weight_headers import read_header, read_headers

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BASE: dict[str, Any] = {
    "num_hidden_layers": None, "new_tokens": [], "pad_vocab_to_multiple_of": None, "rope_scaling": "none",
    "rope_factor": None, "rope_original_max_positions": None,
}  # fmt: skip
"""Options that change a base model, and what leaves it as it is; the files of full weights include what they did."""
_SCORED = "SEQ_CLS"
"""The `task_type` of a reward model's adapter, which contains its head."""
_HEADS = ("classifier", "score")
"""What peft adds to the `modules_to_save` of an adapter with a scalar head."""
_UNCHANGED_BASE = (None, True, False, "gaussian")
"""Starts of an adapter that leave its base as it is."""
_UNDERSTOOD = frozenset({
    "base_model_name_or_path", "revision", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora",
    "rank_pattern", "alpha_pattern", "modules_to_save", "use_dora", "trainable_token_indices", "target_parameters",
    "peft_type", "task_type", "peft_version", "inference_mode", "init_lora_weights", "exclude_modules",
    "megatron_core", "qalora_group_size",
})  # fmt: skip
"""Keys of an adapter's config that are read, or that change nothing in a LoRA adapter once it is saved."""


def resolve_request(request: Request) -> TrainConfig:
    """Resolves a request, whose run may start from the result of another one, or learn from it.

    Raises:
        ConfigError: see `Request.resolve`, `start_options` and `teacher_option`.
    """
    return request.resolve(lambda values, chosen: {**start_options(values, chosen), **teacher_option(values)})


@dataclass(frozen=True)
class Source:
    """A folder with the weights to start from.

    Args:
        folder: The export of a run, or a folder written by peft or transformers.
    """

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The options that it was trained with; empty if unknown."""
        return read_export(self.folder)[0]

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).is_file()

    def files(self) -> list[Path]:
        """The weight files, sorted by name."""
        pattern = ADAPTER_WEIGHTS if self.is_adapter else "*.safetensors"
        return sorted(self.folder.glob(pattern))

    def digest(self) -> str:
        """sha256 of the names and digests of the weight files, all of which are read."""
        lines = [f"{path.name} {sha256(path)}\n" for path in self.files()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def adapter_of(config: TrainConfig) -> Path | None:
    """The folder of the adapter that a run starts from; None if it starts from full weights."""
    source = Source(Path(config.from_run)) if config.from_run else None
    return source.folder if source and source.is_adapter else None


def refuse_adapter_start(config: TrainConfig) -> None:
    """Raises ConfigError if the initial model, which is compared with, has an adapter: without it, it is another."""
    if config.penalizes_kl and (folder := adapter_of(config)):
        problem = f"and beta={config.beta}: the initial model, which is compared with, is loaded without its adapter"
        raise ConfigError.about("from_run", folder, problem, "merge it with `tunesmith export RUN --merged` first")


def start_options(values: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The options that follow from `from_run`.

    Args:
        values: All options that are set, including those of the preset.
        chosen: Those set in a file or by flags.

    Returns:
        Values by option, which replace those of the preset; empty without a `from_run`.

    Raises:
        ConfigError: If there are no weights to start from, or an option that was chosen contradicts them.
    """
    name = values.get("from_run")
    if name is None or str(name).lower() in ("", "none", "null"):
        return {}
    source = find_source(str(name), Path(os.path.expanduser(str(values.get("runs_dir") or "runs"))))
    method = values.get("method") or source.config.get("method") or "lora"
    if source.is_adapter:
        fixed, free = _adapter_options(source, str(method), str(values.get("objective") or "sft"))
    else:
        _refuse_incomplete(source)
        fixed = {"model_name_or_path": str(source.folder), "model_revision": None, "random_init": False}
        free = dict(_BASE)
    if "template_date" in source.config:
        free["template_date"] = source.config["template_date"]
    mistakes = [
        Mistake(option, text_of(chosen[option]), f", and from_run={name} has {text_of(value)}", "leave it out")
        for option, value in fixed.items()
        if option in chosen and _differs(option, chosen[option], value)
    ]
    if method == "full" and source.is_adapter and _differs("master_weights", values.get("master_weights", True), True):
        mistakes.append(_unmergeable(source, "master_weights=false would round it away in bf16"))
    if mistakes:
        raise ConfigError(mistakes)
    inherited = {option: value for option, value in free.items() if option not in chosen}
    return {**fixed, **inherited, "method": method, "from_run": str(source.folder)}


def teacher_option(values: Mapping[str, Any]) -> dict[str, Any]:
    """The folder of the weights that `teacher` names, if it is a run or a folder.

    Args:
        values: All options that are set.

    Raises:
        ConfigError: If the run has not exported its result, or it is an adapter.
    """
    name = str(values.get("teacher") or "")
    if name.lower() in ("", "none", "null", EMBEDDED):
        return {}
    path, runs_dir = Path(os.path.expanduser(name)), Path(os.path.expanduser(str(values.get("runs_dir") or "runs")))
    try:
        is_folder = path.is_dir()
    except (OSError, ValueError):
        is_folder = False
    registered = (runs_dir / name, *(run for run in registered_runs() if run.name == name))
    if not is_folder and (os.sep in name or not any(RunFolder(run).exists() for run in registered)):
        return {}  # on the Hub, or nowhere
    with errors_about("from_run", "teacher"):
        source = find_source(str(path.absolute()) if is_folder else name, runs_dir)
    if source.is_adapter:
        remedy = "merge it with `tunesmith export RUN --merged`, and name the folder that this prints"
        raise ConfigError.about("teacher", name, "holds an adapter, and a teacher needs full weights", remedy)
    return {"teacher": str(source.folder)}


def find_source(name: str, runs_dir: Path) -> Source:
    """Finds the weights that `from_run` names.

    Args:
        name: Id of a run, or path of its folder, of an export or of an adapter.
        runs_dir: Folder of run folders.

    Raises:
        ConfigError: If there is no such run or folder, or the run has not exported its result.
    """
    try:
        folder = Path(os.path.expanduser(name)) if os.sep in name else _run_folder(name, runs_dir)
        is_folder = folder.is_dir()
    except (OSError, ValueError) as error:  # e.g. a name longer than the file system allows
        if isinstance(error, ConfigError):
            raise
        is_folder = False
    if not is_folder:
        remedy = "check the path; a run that was deleted or renamed can be started from no more"
        raise ConfigError.about("from_run", name, "does not exist", remedy)
    run = RunFolder(folder)
    if run.exists():
        return Source(_export_of(run, name))
    if not any((folder / file).is_file() for file in (ADAPTER_CONFIG, "config.json")):
        problem = f"holds neither a run nor a model: it has no config.json and no {ADAPTER_CONFIG}"
        raise ConfigError.about("from_run", name, problem, "name a run, or the folder of an export")
    return Source(folder.absolute())


def _run_folder(name: str, runs_dir: Path) -> Path:
    """The folder of a run by its id: in `runs_dir`, or registered elsewhere."""
    registered = [path for path in registered_runs() if path.name == name]
    folders = {path.resolve(): path for path in (runs_dir / name, *registered) if RunFolder(path).exists()}
    if len(folders) == 1:
        return next(iter(folders.values()))
    if folders:
        paths = " or ".join(shlex.quote(str(path)) for path in folders.values())
        raise ConfigError.about(
            "from_run", name, f"is the name of {len(folders)} runs", f"give the path of one: {paths}"
        )
    ids = sorted(path.name for path in runs_dir.glob("*") if name in path.name and RunFolder(path).exists())
    remedy = f"did you mean {' or '.join(ids[-3:])}?" if ids else "`tunesmith runs list` lists the runs"
    raise ConfigError.about("from_run", name, f": there is no such run in {runs_dir}", remedy)


def _export_of(run: RunFolder, name: str) -> Path:
    """The folder with the result of a run that is done."""
    state, path = (run.read_state() or {}).get("state"), shlex.quote(str(run.path))
    if state == "done" and run.model.is_dir():
        return run.model
    if state in LIVE_STATES and (not _is_local(run) or any(process.alive() for process in run.processes())):
        raise ConfigError.about("from_run", name, f"is {state}", "wait until it is done, or stop it and export it")
    if state == "done":
        problem, again = f"has no export: {run.model} is missing", ""
    else:
        problem, again = f"is {state}, and has exported no result", f"finish it with `tunesmith resume {path}`, or "
    exports = sorted(entry.name for entry in run.path.glob("export-*") if not entry.name.endswith(("-failed", "-ema")))
    if exports:
        remedy = f"{again}start from its export: --from_run {shlex.quote(str(run.path / exports[0]))}"
    else:
        remedy = f"{again}export it with `tunesmith export {path}`, and start from the folder that this prints"
    raise ConfigError.about("from_run", name, problem, remedy)


def _is_local(run: RunFolder) -> bool:
    return (run.read_state() or {}).get("host") == socket.gethostname()


def _refuse_incomplete(source: Source) -> None:
    """Raises ConfigError if weight files are missing or damaged."""
    try:
        read_headers(source.folder)
    except ConfigError as error:
        problem = error.mistakes[0].problem
        raise ConfigError.about("from_run", source.folder, problem, "export the run again") from None


def _adapter_options(source: Source, method: str, objective: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options that an adapter determines, and those that it suggests.

    Raises:
        ConfigError: If it cannot be read, or not be trained further or merged.
    """
    saved = _read_adapter(source)
    trained, base = source.config, saved.get("base_model_name_or_path")
    kind = trained.get("method")
    _refuse_other_head(source, saved, objective)
    if kind in ("lora", "qlora") and method != kind:
        if kind == "qlora":
            raise ConfigError(_unmergeable(source, f"it was trained on a base in 4 bits, and method={method}"))
        if method == "qlora":
            raise ConfigError(_unmergeable(source, "it was trained on a base that is not in 4 bits, and method=qlora"))
    name = trained.get("model_name_or_path") or (EMBEDDED if base == str(BASE_DIR) else base)
    if not isinstance(name, str) or not name:
        problem = f": its {ADAPTER_CONFIG} names no base model"
        raise ConfigError.about("from_run", source.folder, problem, "add base_model_name_or_path there")
    if saved.get("trainable_token_indices") and not trained.get("new_tokens"):
        raise ConfigError(_unmergeable(source, "it trains tokens of the vocabulary, and does not say which are new"))
    if not trained and (source.folder / "base").is_dir():
        raise ConfigError.about("from_run", source.folder, "was trained with scaled RoPE", "export it merged")
    fixed = {"model_name_or_path": name, "model_revision": saved.get("revision"), "random_init": False}
    fixed |= {"new_tokens": [], **{option: trained[option] for option in _BASE if option in trained}}
    if saved.get("init_lora_weights") not in _UNCHANGED_BASE and not trained:
        problem = f"init_lora_weights={saved['init_lora_weights']}, which changes the base that it belongs to"
        raise ConfigError(_unmergeable(source, f"its {ADAPTER_CONFIG} says {problem}; save it converted by peft"))
    if method == "full":
        return fixed, {}
    targets = saved["target_modules"]
    own = {"lora_r": saved["r"], "lora_alpha": saved["lora_alpha"], "use_rslora": saved.get("use_rslora", False)}
    own["use_dora"] = saved.get("use_dora", False)
    own |= {f"lora_{name}": saved.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    own["modules_to_save"] = [name for name in saved.get("modules_to_save") or [] if name not in _HEADS]
    own["init_lora_weights"] = "default"  # what is exported is an adapter of the unchanged base
    own["lora_target_parameters"] = trained.get("lora_target_parameters", saved.get("target_parameters") or [])
    own["lora_target_modules"] = trained.get("lora_target_modules", targets)
    return {**fixed, **own}, {"lora_dropout": saved.get("lora_dropout", 0.0)}


def _refuse_other_head(source: Source, saved: Mapping[str, Any], objective: str) -> None:
    """Raises ConfigError if an adapter is that of a reward model and the objective trains none, or the reverse."""
    is_scored = saved.get("task_type") == _SCORED
    spec = OBJECTIVES[objective] if objective in OBJECTIVES else file_spec(objective)
    if is_scored and not spec.scalar_head:
        problem = f"holds the adapter of a reward model, which has no language-modeling head for objective={objective}"
        raise ConfigError.about("from_run", source.folder, problem, "start from the model that it was trained from")
    if spec.scalar_head and not is_scored:
        raise ConfigError(_unmergeable(source, f"objective={objective} trains a head that it lacks"))


def _read_adapter(source: Source) -> dict[str, Any]:
    """The config of a LoRA adapter, whose weights are there too."""
    try:
        saved = load_json(source.folder / ADAPTER_CONFIG)
        names = read_header(source.folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError) as error:
        problem = f": it cannot be read ({error})"
        if isinstance(error, FileNotFoundError):
            problem = f": {Path(error.filename).name} is missing"
        raise ConfigError.about("from_run", source.folder, problem, "save the adapter again, as safetensors") from None
    kind = saved.get("peft_type") if isinstance(saved, dict) else None
    if kind != "LORA":
        raise ConfigError.about("from_run", source.folder, f"is a peft adapter of type {kind!r}", "use one of LORA")
    other = [f"{key}={value}" for key, value in saved.items() if key not in _UNDERSTOOD and value and value != "none"]
    if other:
        raise ConfigError(_unmergeable(source, f"its {ADAPTER_CONFIG} has {', '.join(other)}, which is not supported"))
    if not isinstance(saved.get("target_modules"), list):
        raise ConfigError(_unmergeable(source, f"the target_modules in its {ADAPTER_CONFIG} are not a list of names"))
    return {**saved, "target_modules": adapted_modules(saved, names)}


def adapted_modules(saved: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """The target modules of an adapter, without those that it leaves out everywhere, such as a vision tower's.

    Args:
        saved: its config.
        names: of its weights.
    """
    targets = sorted(saved["target_modules"] or [])
    if not saved.get("exclude_modules"):
        return targets
    modules = {f".{name.partition('.lora_')[0]}" for name in names}
    return [target for target in targets if any(module.endswith(f".{target}") for module in modules)]


def _unmergeable(source: Source, reason: str) -> Mistake:
    remedy = "start from merged weights, which `tunesmith export RUN --merged` or peft's merge_and_unload writes"
    return Mistake("from_run", source.folder, f"holds an adapter, and {reason}", remedy)


def _differs(option: str, chosen: Any, value: Any) -> bool:
    """Whether a chosen value, perhaps still text, is another than the one that follows from the start."""
    required = {"model_name_or_path": "x", "dataset_name": "x"}
    try:
        parsed = getattr(TrainConfig.model_validate({**required, option: chosen}), option)
    except ValidationError:
        return False  # reported with the other mistakes
    if option != "model_name_or_path":
        return bool(parsed != value)
    return _absolute(parsed) != _absolute(value)


def _absolute(model: str) -> str:
    path = BASE_DIR if model == EMBEDDED else Path(os.path.expanduser(model))
    return str(path.absolute()) if path.exists() else model


# -- the record of a run's start -------------------------------------------------------------------------------------


def record_start(config: TrainConfig, before: Mapping[str, Any] | None, resumes: bool) -> dict[str, Any] | None:
    """What a run starts from, as its folder and its checkpoints record it.

    Args:
        config: The run's config.
        before: What its folder has recorded at an earlier attempt.
        resumes: Whether it goes on from a checkpoint, so that the weights of its start are not read again.

    Returns:
        `folder`, `run`, `step`, `weights` (a digest) and `stages`; None if the run starts from a base model.

    Raises:
        ConfigError: If the weights have changed since the run was started.
    """
    if config.from_run is None:
        return None
    if resumes and before:
        return dict(before)
    source = Source(Path(config.from_run))
    stages, digest = read_export(source.folder)[1], source.digest()
    if before and before.get("weights") != digest and not config.force_resume:
        problem = "has other weights than when this run was started"
        raise ConfigError.about("from_run", config.from_run, problem, f"restore them, start a new run, or {FORCE}")
    entries = [asdict(stage) for stage in stages]
    return {"folder": config.from_run, **_last(stages), "weights": digest, "stages": entries}


def _last(stages: Sequence[Stage]) -> dict[str, Any]:
    last = stages[-1]
    return {"run": last.run if last.objective else None, "step": last.step}


def start_line(config: TrainConfig, start: Mapping[str, Any]) -> str:
    """The log line that says what a run starts from, and how."""
    if adapter_of(config) is None:
        how = "its weights are the base model"
    elif config.method == "full":
        how = "its adapter is merged into the base model, and all weights are trained"
    else:
        how = f"its adapter is trained further (rank {config.lora_r})"
    return f"starts from {start['run'] or start['folder']}: {how}"
