"""Picks the training chat template: the user's file, TRL's training version of the model's own, or the model's own.

Many models ship a template meant for inference: it drops the thoughts of earlier turns, or does not mark what the model
generates. TRL ships patched versions of such templates. They are read from its package data without importing it, and
looked up by the text of the model's own template. A run saves its training template in its folder and resumes with it,
whatever version of TRL is installed by then. The exported tokenizer keeps the model's own template, as with TRL's
trainer, because that is the one for inference. Imports no torch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainers.run.json_file import load_json
from trainers.run.record import CHAT_TEMPLATE

MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SUFFIX = "_training.jinja"


@dataclass(frozen=True)
class TrainingTemplate:
    """A chat template to train with.

    Attributes:
        source: Jinja source, or None if there is no chat template.
        origin: Where it comes from, in a few words.
    """

    source: str | None
    origin: str


def training_template(
    own: str | None, file: str | None, file_text: str | None, assistant_only: bool, run_folder: str | None = None
) -> TrainingTemplate:
    """Picks the template to train with.

    Args:
        own: Source of the model's own template, or None.
        file: The `chat_template` option, or None.
        file_text: Contents of that file; used as they are.
        assistant_only: Whether only replies are trained; otherwise the model's own template is used.
        run_folder: Folder of a run that may have been started before, or None.
    """
    if file_text is not None:
        return TrainingTemplate(file_text, f"chat_template={file}")
    if own is not None and assistant_only and not MARKERS.search(own):
        if run_folder and (saved := _saved_template(Path(run_folder).expanduser() / CHAT_TEMPLATE, own)):
            return saved
        name = _trl_names().get(own.strip())
        folder = _trl_folder()
        if name and folder:
            source = (folder / f"{name}{_SUFFIX}").read_text(encoding="utf-8")
            return TrainingTemplate(source, f"TRL {version('trl')}'s training version ({name}) of the model's own")
    return TrainingTemplate(own, "the model's own")


def as_record(own: str | None, template: TrainingTemplate) -> dict[str, str | None]:
    """The record of the training template that is saved in the run folder.

    Args:
        own: Source of the model's own template, or None.
        template: The one to train with.
    """
    return {"origin": template.origin, "own_sha256": _digest(own or ""), "source": template.source}


def _saved_template(path: Path, own: str) -> TrainingTemplate | None:
    """The template that a run was started with, if the model's own has not changed since; None otherwise."""
    try:
        record = load_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("own_sha256") != _digest(own):
        return None
    source, origin = record.get("source"), record.get("origin")
    return TrainingTemplate(source, origin) if isinstance(source, str) and isinstance(origin, str) else None


def _digest(own: str) -> str:
    return hashlib.sha256(own.strip().encode("utf-8", "replace")).hexdigest()


@lru_cache
def _trl_folder() -> Path | None:
    try:
        spec = importlib.util.find_spec("trl")
    except (ImportError, ValueError):
        return None
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else None
    return folder if folder and folder.is_dir() else None


@lru_cache
def _trl_names() -> dict[str, str]:
    """Text to name of each template for which TRL has a training version."""
    folder = _trl_folder()
    if folder is None:
        return {}
    names = sorted(path.name.removesuffix(_SUFFIX) for path in folder.glob(f"*{_SUFFIX}"))
    stock = {name: folder / f"{name}.jinja" for name in names}
    return {path.read_text(encoding="utf-8").strip(): name for name, path in stock.items() if path.is_file()}


def own_template(folder: Path) -> str | None:
    """The default chat template in a tokenizer's folder, as transformers finds it, or else a processor's, or None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = _in_json(folder / name)
        if template is not None:
            return template
    return None


def _in_json(path: Path) -> str | None:
    try:
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None  # loading the tokenizer fails too, and reports why
    template: Any = values.get("chat_template") if isinstance(values, dict) else None
    if isinstance(template, list):  # several, by name
        entries = [item for item in template if isinstance(item, dict)]
        template = next((item.get("template") for item in entries if item.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def stop_token_ids(folder: Path) -> list[int]:
    """Ids of the tokens at which the model's own configuration stops generation."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        try:
            values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (OSError, ValueError, RecursionError):
            continue
        listed = values.get("eos_token_id") if isinstance(values, dict) else None
        ids |= {item for item in (listed if isinstance(listed, list) else [listed]) if type(item) is int and item >= 0}
    return sorted(ids)
