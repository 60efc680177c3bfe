"""The stages of training that led to a model: of run after run, each from the result of the one before.

A run's checkpoints and its exports contain them, so that they outlast the earlier runs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainers.config.objective_file import short_name
from trainers.run.folder import RunFolder, read_json
from trainers.run.json_file import load_json

EXPORT_RECORD = "tunesmith.json"
"""File of an export that says how its weights were trained: `config`, the options, `stages`, `weights`, the bytes and
sha256 of each weight file, `files`, the names of all files, `checked`, the verdict of loading it back, `base`, the
digest of an adapter's frozen base weights, and `merge`, how it was merged from other models."""
MERGE = "merge"
"""`Stage.objective` of a merge, whose `data` are the merged models."""
PASSED, FAILED, UNCHECKED = "passed", "failed", "not loaded back"
"""Verdicts: it is the trained model, it is not or cannot be loaded, it was not compared for lack of memory."""
_MAX_BYTES = 10_000_000
_LONGEST = 300


@dataclass(frozen=True)
class Stage:
    """One run on the way to a model, or the folder that the first of them started from.

    Args:
        run: Id of the run; the path of a folder that no known run wrote.
        objective: What it trained for; empty for a folder.
        method: `full`, `lora` or `qlora`; empty for a folder.
        data: Name or path of its training data.
        step: Step of the weights; None if unknown.
        base: Name or path of the base model that it started from; empty if unknown.
    """

    run: str
    objective: str = ""
    method: str = ""
    data: str = ""
    step: int | None = None
    base: str = ""

    def __str__(self) -> str:
        if not self.objective:
            return f"the weights in {self.run}"
        if self.objective == MERGE:
            return f"{self.run} (a merge of {self.data}, method={self.method})"
        at = "" if self.step is None else f", step {self.step}"
        return f"{self.run} ({self.objective} on {self.data}, method={self.method}{at})"


def as_stages(value: Any) -> list[Stage]:
    """Parses the stages of a document, which may be damaged; entries of another form are left out."""
    stages = []
    for entry in value if isinstance(value, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("run"), str):
            continue
        texts = {name: str(entry.get(name) or "")[:_LONGEST] for name in ("run", "objective", "method", "data", "base")}
        step = entry.get("step")
        stages.append(Stage(**texts, step=step if type(step) is int else None))
    return stages


def in_words(stages: Sequence[Stage]) -> str:
    """The stages in one line, the first one first."""
    return ", then ".join(map(str, stages))


def stages_before(run: RunFolder) -> list[Stage]:
    """The stages that led to what a run started from; none if it started from a base model."""
    return as_stages((read_json(run.start) or {}).get("stages"))


def stages_of(manifest: Mapping[str, Any], run: str) -> list[Stage]:
    """The stages of the weights in a checkpoint, the run's own last.

    Args:
        manifest: The checkpoint's manifest.
        run: Id of the run.
    """
    config, start = manifest["config"], manifest.get("from_run")
    earlier = as_stages(start.get("stages")) if isinstance(start, dict) else []
    objective, method = (str(config.get(name) or "") for name in ("objective", "method"))
    data = str(config.get("mix") or config.get("dataset_name") or "")
    base = str(config.get("model_name_or_path") or "")
    return [*earlier, Stage(run, short_name(objective), method, data, manifest["step"], base)]


def export_record(
    config: Mapping[str, Any],
    stages: Sequence[Stage],
    weights: Mapping[str, tuple[int, str]] | None = None,
    files: Sequence[str] = (),
    checked: str = "",
    base: str = "",
    merge: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of an export's `EXPORT_RECORD`.

    Args:
        config: The options of the last stage.
        stages: The runs that led to the weights, in order.
        weights: Bytes and sha256 of each weight file.
        files: Names of all files, this one included.
        checked: `PASSED`, `FAILED` or `UNCHECKED`; empty if unknown.
        base: Digest of the frozen base weights; empty if there are none.
        merge: How the weights were merged from those of other models; None if they were trained.
    """
    hashes = {name: {"bytes": size, "sha256": digest} for name, (size, digest) in (weights or {}).items()}
    listed = [asdict(stage) for stage in stages]
    parts = {"config": dict(config), "stages": listed, "weights": hashes, "files": sorted(files)}
    others = {"checked": checked, "base": base, "merge": dict(merge or {})}
    return parts | {name: value for name, value in others.items() if value}


def read_export(folder: Path) -> tuple[dict[str, Any], list[Stage]]:
    """Reads how the weights of an export were trained.

    Returns:
        The options of the last stage, and all stages; without a record, no options and the folder as the only stage.
    """
    record = _read_record(folder)
    config, stages = record.get("config"), as_stages(record.get("stages"))
    return config if isinstance(config, dict) else {}, stages or [Stage(str(folder))]


def base_of(folder: Path) -> str:
    """The digest of the base weights that an exported adapter was trained on; empty if unknown."""
    return str(_read_record(folder).get("base") or "")


def _read_record(folder: Path) -> dict[str, Any]:
    """The record of an export; empty without one, or if it is damaged."""
    try:
        record = load_json(folder / EXPORT_RECORD, _MAX_BYTES)
    except (OSError, ValueError):
        record = None
    return record if isinstance(record, dict) else {}
