"""The base model that the models of a merge share: only differences from one base can be added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.runs.runs import config_values
from app.services.model_names import NamedModel, named_model
from trainers.config.mistakes import ConfigError, errors_about
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.embedded import BASE_DIR
from trainers.run.from_run import Source, start_options
from trainers.run.lineage import read_export, stages_of
from trainers.run.manifest import read_manifest
from trainers.run.weight_headers import base_folder, cached_folder

_OF_BASE = ("num_hidden_layers", "new_tokens", "pad_vocab_to_multiple_of", "rope_scaling", "rope_factor",
            "rope_original_max_positions", "random_init")  # fmt: skip
"""Options of a run that change the base of its adapter."""


@dataclass(frozen=True)
class Base:
    """A base model.

    Args:
        name: Hub id or folder.
        revision: branch, tag or commit on the Hub.
    """

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.name + (f" at revision {self.revision}" if self.revision else "")

    def folder(self) -> Path | None:
        """Where its files are on this machine; None if they are not."""
        config = TrainConfig(model_name_or_path=self.name, model_revision=self.revision, dataset_name=EMBEDDED)
        folder = base_folder(config)
        return folder if folder.is_dir() else cached_folder(config)

    def equals(self, other: Base) -> bool:
        """Whether two bases have the same weights: by their names, or by the sha256 of their files."""
        if self == other:
            return True
        folders = [base.folder() for base in (self, other)]
        if None in folders:
            return False
        first, second = [folder.resolve() for folder in folders if folder is not None]
        return first == second or Source(first).digest() == Source(second).digest()


def shared_base(
    models: Sequence[NamedModel], kind: str, chosen: str | None, runs_dir: Path, needed: bool
) -> Base | None:
    """The base that all models were trained from.

    Args:
        models: what is merged.
        kind: `adapter` or `full`.
        chosen: the base as named on the command line.
        runs_dir: folder of run folders.
        needed: whether its weights are needed.

    Returns:
        None if it is unknown and not needed.

    Raises:
        ConfigError: if the models have different bases, or the base is unknown and needed.
    """
    if kind == "adapter":
        if chosen is not None:
            problem = "does not apply to adapters, which name their base"
            raise ConfigError.about("--base", chosen, problem, "leave it out")
        return _base_of_adapters(models)
    if chosen is not None:
        return _named_base(chosen, runs_dir)
    stages = {model.label: _start_of(model) for model in models}
    known = {label: base for label, base in stages.items() if base is not None}
    first, base = next(iter(known.items()), ("", None))
    for label, other in known.items():
        if base is not None and not base.equals(other):
            _refuse_different(first, base, label, other)
    if needed and (base is None or len(known) < len(models)):
        unknown = ", ".join(label for label in stages if label not in known)
        raise ConfigError.about("--base", None, f"is missing: {unknown} does not say what it was trained from, and the "
                                "differences from the base are merged", "name it: --base MODEL")  # fmt: skip
    return base


def _refuse_different(first: str, base: Base, second: str, other: Base) -> None:
    problem = f"{first} was trained from {base}, and {second} from {other}, whose weights are not known to be the same"
    raise ConfigError(f"{problem}; merge models of one base")


def _named_base(name: str, runs_dir: Path) -> Base:
    model = named_model(name, runs_dir)
    if model.is_adapter:
        raise ConfigError.about("--base", name, "holds an adapter", "name the full weights")
    if model.folder is None and model.run is not None:
        raise ConfigError.about("--base", name, "is a checkpoint", "export it, and name the folder")
    return Base(str(model.folder) if model.folder else model.label)


def _base_of_adapters(models: Sequence[NamedModel]) -> Base:
    """The base of adapters, which must also have been changed in the same way, as by scaled RoPE or new layers."""
    options = {model.label: _adapter_options(model) for model in models}
    (first, values), *others = options.items()
    base = _base_in(values)
    for label, other in others:
        if not base.equals(_base_in(other)):
            _refuse_different(first, base, label, _base_in(other))
        for name in (*_OF_BASE, "method"):
            before, after = (each.get(name) or None for each in (values, other))
            if before != after:
                problem = f"{first} was trained with {name}={_text(before)}, and {label} with {name}={_text(after)}"
                raise ConfigError(f"{problem}: their bases differ; merge adapters of one base")
    return base


def _text(value: Any) -> str:
    return "false" if value is None else str(value)


def _base_in(options: Mapping[str, Any]) -> Base:
    revision = options.get("model_revision")
    return Base(str(options.get("model_name_or_path")), str(revision) if revision else None)


def _adapter_options(model: NamedModel) -> dict[str, Any]:
    """The options of an adapter and its base."""
    if model.folder is None:
        assert model.run is not None
        return config_values(model.run)
    with errors_about("from_run", "model"):
        options = start_options({"from_run": str(model.folder)}, {})
    recorded = read_export(model.folder)[0]
    return {**options, "random_init": bool(recorded.get("random_init"))}


def _start_of(model: NamedModel) -> Base | None:
    """The model that the first of the runs began with that led to full weights; None if unknown."""
    if model.folder is not None:
        if model.folder.resolve() == BASE_DIR.resolve():
            return Base(EMBEDDED)
        config, stages = read_export(model.folder)
        if not config:
            return None
    else:
        assert model.run is not None
        assert model.weights is not None
        manifest = read_manifest(model.run.checkpoints / model.weights)
        config, stages = manifest["config"], stages_of(manifest, model.run.id)
    name = stages[0].base or str(config.get("model_name_or_path") or "")
    revision = config.get("model_revision") if name == config.get("model_name_or_path") else None
    return Base(name, str(revision) if revision else None) if name else None
