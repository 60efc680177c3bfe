"""The models that a command line names: a run, RUN@WEIGHTS, a model folder, a Hub id, or the embedded model.

A run stands for what it exported: that is what others will use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.console import shortened
from app.runs.runs import find_run
from app.services.chat import HUB_ID, weights_of
from trainers.config.mistakes import ConfigError
from trainers.config.options import EMBEDDED
from trainers.run.folder import RunFolder
from trainers.run.from_run import ADAPTER_CONFIG


@dataclass(frozen=True)
class NamedModel:
    """A model as the user named it.

    Args:
        label: how it is called.
        run: the run that it comes from; None for others.
        weights: checkpoint or export of the run.
        folder: folder that transformers or peft can load; None for a checkpoint and for a Hub id.
    """

    label: str
    run: RunFolder | None = None
    weights: str | None = None
    folder: Path | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether its folder holds an adapter rather than full weights."""
        return self.folder is not None and (self.folder / ADAPTER_CONFIG).is_file()


def named_model(text: str, runs_dir: Path) -> NamedModel:
    """The model of a name.

    Args:
        text: as on the command line.
        runs_dir: folder of run folders.

    Raises:
        ConfigError: if there is none.
    """
    name, at, weights = text.rpartition("@")
    path = Path(text).expanduser()
    if path.is_dir() and any((path / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        path = path.absolute()
        exported = path.name == "model" or path.name.startswith("export-")
        return NamedModel(f"{path.parent.name}/{path.name}" if exported else path.name, folder=path)
    is_hub_id = HUB_ID.fullmatch(text) is not None and not path.exists()
    if is_hub_id or text == EMBEDDED:
        return NamedModel(text)
    run = find_run(name if at else text, runs_dir)
    choices = weights_of(run)
    weights = weights if at else next(iter(choices), "")
    if weights not in choices:
        held = ", ".join(choices[:8]) or "nothing that can be loaded"
        raise ConfigError(f"{shortened(text)}: run {run.id} has no weights {shortened(weights)!r}; it has {held}")
    label = run.id if weights == "model" else f"{run.id}@{weights}"
    folder = run.path / weights
    return NamedModel(label, run, weights, folder if folder.is_dir() else None)
