"""What `tunesmith push` publishes: the files of one export, without what belongs to this machine."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.console import shortened
from app.runs.runs import find_run
from app.services.chat import weights_of
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, secrets_in
from trainers.run.from_run import ADAPTER_CONFIG
from trainers.run.json_file import load_json
from trainers.run.lineage import EXPORT_RECORD, FAILED, PASSED, UNCHECKED
from trainers.run.model_card import base_in_words, dumped, hub_id, public, public_record

CARD = "README.md"
_AGAIN = "export the run again: `tunesmith export RUN --output DIR`, then `tunesmith push DIR ORG/NAME`"
_MAX_TEXT = 200_000_000
"""Bytes of the largest file beside the weights: a tokenizer."""


@dataclass(frozen=True)
class Export:
    """An export to publish.

    Args:
        folder: Its folder.
        files: Content by path in the repository: bytes, or the path of a file on this machine.
        weights: sha256 of each weight file.
        left_out: Files in the folder that are not the export's.
        notes: What its reader should know.
    """

    folder: Path
    files: Mapping[str, bytes | Path]
    weights: Mapping[str, str]
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {
            name: content.stat().st_size if isinstance(content, Path) else len(content)
            for name, content in self.files.items()
        }

    def card(self) -> str:
        """The text of the model card."""
        content = self.files[CARD]
        return (content.read_bytes() if isinstance(content, Path) else content).decode()


def find_export(name: str, runs_dir: Path) -> Path:
    """The folder of an export.

    Args:
        name: A run, which stands for what it exported; `RUN@EXPORT` for another export of it; or an export's folder.
        runs_dir: Folder of run folders.

    Raises:
        ConfigError: If there is no such export.
    """
    path = Path(os.path.expanduser(name))
    if (path / EXPORT_RECORD).is_file():
        return path.absolute()
    name, _, weights = name.rpartition("@") if "@" in name else (name, "", "model")
    run = find_run(name, runs_dir)
    choices = weights_of(run)
    folder = run.path / weights
    if weights in choices and folder.is_dir():
        if not (folder / EXPORT_RECORD).is_file():
            raise ConfigError(f"{folder} does not say how it was trained ({EXPORT_RECORD} is missing); {_AGAIN}")
        return folder
    raise ConfigError(_no_export(run, weights, choices))


def _no_export(run: RunFolder, weights: str, choices: list[str]) -> str:
    """What to do about an export that does not exist."""
    checkpoints = [name for name in choices if name.startswith("step-")]
    exports = [name for name in choices if not name.startswith("step-")]
    state = (run.read_state() or {}).get("state")
    problem = f"run {run.id} is {state} and has no finished export" if weights == "model" else (
        f"run {run.id} has no export {shortened(weights)!r}"
    )  # fmt: skip
    if exports and weights not in checkpoints:
        return f"{problem}; push {run.id}@{exports[0]}"
    if not checkpoints:
        return f"{problem}, nor a checkpoint to export; let it train"
    step = weights if weights in checkpoints else checkpoints[0]
    export = f"`tunesmith export {run.id} --checkpoint {step} --output DIR`"
    return f"{problem}; write one with {export}, then `tunesmith push DIR ORG/NAME`"


def read_for_push(folder: Path, base_model: str | None = None) -> Export:
    """Reads an export, and removes from its texts what belongs to this machine. Weights are not read.

    Args:
        folder: Folder of the export.
        base_model: Hub id of a base model that is a folder on this machine.

    Raises:
        ConfigError: If it is incomplete, a file leads elsewhere, or a text names a path or secret of this machine.
    """
    try:
        record = load_json(folder / EXPORT_RECORD)
        names, config = sorted(map(str, record["files"])), dict(record["config"])
        hashes = {name: str(file["sha256"]) for name, file in record["weights"].items()}
        adapter = load_json(folder / ADAPTER_CONFIG) if ADAPTER_CONFIG in names else None
        if CARD not in names or not isinstance(adapter, dict | None):
            raise ValueError("no export")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{folder} was exported by an older version, or is damaged; {_AGAIN}") from None
    notes = _check_notes(folder, record)
    files: dict[str, bytes | Path] = {name: _regular(folder, name) for name in names}
    notes += _name_base(files, config, adapter, base_model)
    record["config"] = config
    files[EXPORT_RECORD] = dumped(public_record(record)).encode()
    private = _private(folder, load_json(folder / EXPORT_RECORD))
    for name in files.keys() - hashes.keys():
        _refuse_private(name, files[name], private)
    left_out = sorted(set(_below(folder)) - set(names))
    return Export(folder, files, hashes, left_out, notes)


def _check_notes(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """What a reader should know of how the export was compared with the trained model.

    Raises:
        ConfigError: If it is another model, or cannot be loaded.
    """
    verdict = record.get("checked")
    if verdict == FAILED:
        problem = f"{folder} failed its check: loaded back, it is not the trained model"
        remedy = "`tunesmith export RUN --output DIR --dtype float32`, then `tunesmith push DIR ORG/NAME`"
        raise ConfigError(f"{problem}; export the run again: {remedy}")
    if verdict == UNCHECKED:
        return ["it was not loaded back for lack of memory, so nobody knows whether it is the trained model"]
    return [] if verdict == PASSED else ["its record, of an older version, does not say whether it was loaded back"]


def _below(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (str(Path(parent, name).relative_to(folder)) for name in names)


def _regular(folder: Path, name: str) -> Path:
    """The path of a file of the export.

    Raises:
        ConfigError: If it is missing, is no regular file, or leads out of the folder.
    """
    path = folder / name
    try:
        inside = path.resolve(strict=True).is_relative_to(folder.resolve())
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; {_AGAIN}") from None
    if not inside:
        raise ConfigError(f"{path} leads out of the export, to {path.resolve()}; put the file itself there")
    if not regular:
        raise ConfigError(f"{path} is not a regular file; {_AGAIN}")
    return path


def _name_base(
    files: dict[str, bytes | Path], config: dict[str, Any], adapter: dict[str, Any] | None, base_model: str | None
) -> list[str]:
    """Names the base model so that others understand it; changes the files and options.

    Args:
        files: Content of the files.
        config: Options of the last stage.
        adapter: Config of the adapter; None for full weights.
        base_model: Hub id of a base model that is a folder on this machine.

    Returns:
        What a reader of an adapter cannot load.
    """
    base = str(config.get("model_name_or_path") or "")
    if base_model and hub_id(base):
        raise ConfigError.about("--base_model", base_model, f": the base is {base} on the Hub already", "leave it out")
    name = base_model or base
    if base_model:
        config["model_name_or_path"] = base_model
        files[CARD] = _with_base(
            files[CARD], base, base_model, adapter is not None, is_result=config.get("from_run") == base
        )
    if adapter is None:
        return []
    files[ADAPTER_CONFIG] = dumped({**adapter, "base_model_name_or_path": public(name)}).encode()
    if hub_id(name):
        return []
    title = base_in_words(base, config.get("from_run"))
    first = "push it too, and name it" if title.startswith("the result") else "name it there"
    return [
        f"{title} is not on the Hub, so others cannot load this adapter: {first} with --base_model ORG/NAME, or push a "
        "merged export (`tunesmith export RUN --merged`)"
    ]


def _with_base(card: bytes | Path, local: str, base_model: str, is_adapter: bool, is_result: bool) -> bytes:
    """The card with the base model in its metadata, and in its text where the folder on this machine is named."""
    from huggingface_hub import ModelCard

    text = card.read_text(encoding="utf-8") if isinstance(card, Path) else card.decode()
    parsed = ModelCard(text, ignore_metadata_errors=True)
    parsed.data["base_model"] = base_model
    relation = "merge" if "merge" in (parsed.data.get("tags") or []) else "finetune"
    parsed.data["base_model_relation"] = "adapter" if is_adapter else relation
    body, name = parsed.text, str(public(local))
    where = base_in_words(local, local if is_result else None)
    names = {
        f"\n# {name}, fine-tuned\n": f"\n# {base_model.partition('/')[2]}, fine-tuned\n",
        f"\n# {name}, merged\n": f"\n# {base_model.partition('/')[2]}, merged\n",
        f"`{name}` (a folder of the publisher's)": f"`{base_model}`",
        f"--model_name_or_path {shlex.quote(name)} ": f"--model_name_or_path {base_model} ",
        f"\nmodel_name_or_path: {name}\n": f"\nmodel_name_or_path: {base_model}\n",
        f"where you have {where}\n": f"where you have the base model, {base_model}\n",
    }
    for before, after in names.items():
        body = body.replace(before, after)
    parsed.text = body
    return str(parsed).encode()


def _private(folder: Path, record: Any) -> list[str]:
    """Texts that must not leave this machine: local paths of the run, its folder, the home folder, and secrets."""
    from huggingface_hub import get_token

    paths = {str(folder), str(folder.parent), str(folder.resolve()), *_local_paths(record)}
    home = Path.home()
    paths |= {str(home)} if len(home.parts) > 2 else set()  # /root is a word too
    paths = {path for path in paths if len(Path(path).parts) > 2}
    token = get_token()
    return [*sorted(paths, key=len, reverse=True), *secrets_in(os.environ), *([token] if token else [])]


def _local_paths(value: Any) -> Iterator[str]:
    """The absolute paths in an export's record, without the name after the colon of a Python file."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from _local_paths(entry)
    elif isinstance(value, str) and value.startswith("/"):
        yield value.partition(":")[0]


def _refuse_private(name: str, content: bytes | Path, private: list[str]) -> None:
    """Raises ConfigError if a file contains a private text."""
    if isinstance(content, Path):
        if content.stat().st_size > _MAX_TEXT:
            raise ConfigError(f"{content} is too large for a file that is no weights; {_AGAIN}")
        content = content.read_bytes()
    for text in private:
        if text.encode() in content:
            private_text = f"the path {text}" if text.startswith("/") else "a secret"
            raise ConfigError(f"{name} contains {private_text} of this machine; remove it there, or {_AGAIN}")
