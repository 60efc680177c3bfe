"""Uploads an export to the Hub, in one commit: its readers see all of it or nothing.

What an interrupted upload has sent stays in the Hub's storage, which asks for the rest only when it is repeated.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.console import shortened
from app.push.files import Export
from trainers.config.mistakes import ConfigError
from trainers.run.hub_errors import push_problem
from trainers.run.lineage import EXPORT_RECORD
from trainers.run.log import without_secrets

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, HfApi

_OWN = re.compile(
    r"(base/)?(config|generation_config)\.json|adapter_config\.json|[^/]*\.safetensors(\.index\.json)?"
    r"|tokenizer[^/]*|special_tokens_map\.json|added_tokens\.json|vocab[^/]*\.(json|txt)|merges\.txt|[^/]*\.model"
    r"|chat_template[^/]*|additional_chat_templates/[^/]*"
)
"""Files of a model that an export may have; another one lacks some of them, and loaders would read those too."""
_WEIGHTS = (".safetensors", ".bin", ".index.json", ".gguf", ".pt")
_MOST_LISTED = 5


class PushFailed(RuntimeError):
    """The Hub or the network failed; the same command goes on from there."""


@dataclass(frozen=True)
class Target:
    """Where to push.

    Args:
        repo: Hub id of the repository.
        public: Whether everybody may read it; False: it is private.
        branch: Branch of the repository; None for main.
        replace: Whether to replace a model there that Tunesmith did not write.
    """

    repo: str
    public: bool = False
    branch: str | None = None
    replace: bool = False


@dataclass(frozen=True)
class Pushed:
    """What was pushed: the commit, its URL, and the files of the model before that it deleted."""

    commit: str
    url: str
    deleted: list[str]


def upload(export: Export, target: Target) -> Pushed:
    """Uploads an export, and compares what the Hub then has with it.

    Raises:
        ConfigError: If the Hub refuses it, or the repository is of another visibility or has another model.
        PushFailed: If the Hub or the network fails.
    """
    from huggingface_hub import CommitOperationDelete, HfApi, get_token
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    if get_token() is None:
        problem = "you are not logged in to the Hub"
        raise ConfigError(f"{problem}; set HF_TOKEN to a token that may write, or run `hf auth login`")
    with _explained(target):
        api = HfApi(library_name="tunesmith")
        api.create_repo(target.repo, private=not target.public, exist_ok=True)
        _refuse_other_visibility(api, target)
        if target.branch:
            api.create_branch(target.repo, branch=target.branch, exist_ok=True)
        before = _files_before(api, target, export)
        deletions = [CommitOperationDelete(name) for name in before]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [*_operations(export), *deletions]
        message = f"Upload {export.folder.name} with Tunesmith"
        commit = api.create_commit(target.repo, operations, commit_message=message, revision=target.branch)
        _refuse_difference(api, target, export, commit.oid)
    return Pushed(commit.oid, commit.commit_url, before)


def _operations(export: Export) -> list[CommitOperationAdd]:
    """The files as the client uploads them.

    Raises:
        ConfigError: If a weight file is not what was exported, for which its sha256 is computed.
    """
    from huggingface_hub import CommitOperationAdd

    operations = []
    for name, content in export.files.items():
        operation = CommitOperationAdd(name, str(content) if isinstance(content, Path) else content)
        if name in export.weights and operation.upload_info.sha256.hex() != export.weights[name]:
            problem = f"{export.folder / name} was changed after it was exported, so the model card does not fit it"
            raise ConfigError(f"{problem}; export the run again")
        operations.append(operation)
    return operations


def _refuse_other_visibility(api: HfApi, target: Target) -> None:
    """Raises ConfigError if a repository that existed before is public and was to be private, or the reverse."""
    if api.model_info(target.repo).private is not False:
        if target.public:
            problem = f"{target.repo} is private"
            raise ConfigError(f"--public: {problem}; change that in its settings on the Hub, or leave --public out")
    elif not target.public:
        problem = f"{target.repo} is public, and everybody would see these weights"
        raise ConfigError(f"{problem}; pass --public, or name another repository")


def _files_before(api: HfApi, target: Target, export: Export) -> list[str]:
    """The files of the model in the repository that this export lacks, which loaders would mix with it.

    Raises:
        ConfigError: If Tunesmith did not write them, and `--replace` does not say that they may go.
    """
    info = api.model_info(target.repo, revision=target.branch)
    there = sorted(file.rfilename for file in info.siblings or ())
    own = [name for name in there if _OWN.fullmatch(name)]
    foreign = [name for name in there if name.endswith(_WEIGHTS) and name not in own]
    others = foreign if EXPORT_RECORD in there else [*own, *foreign]
    if others and not target.replace:
        listed = ", ".join(others[:_MOST_LISTED]) + (" and others" if len(others) > _MOST_LISTED else "")
        problem = f"{target.repo} has files of another model: {shortened(listed)}"
        remedy = "pass --replace to put this one in its place, or push to another repository or --revision BRANCH"
        raise ConfigError(f"{problem}; {remedy}")
    return [name for name in [*own, *foreign] if name not in export.files]


def _refuse_difference(api: HfApi, target: Target, export: Export, commit: str) -> None:
    """Raises ConfigError if the Hub has left out a file, as a `.gitignore` there makes it do, or has another."""
    there = {file.path: file for file in api.get_paths_info(target.repo, list(export.files), revision=commit)}
    for name, size in export.sizes().items():
        if (file := there.get(name)) is None:
            problem = f"{target.repo} did not take {name}"
            raise ConfigError(f"{problem}; see whether a .gitignore there names it, and push again")
        digest = getattr(getattr(file, "lfs", None), "sha256", None)
        if getattr(file, "size", size) != size or digest not in (None, export.weights.get(name, digest)):
            raise PushFailed(f"{target.repo} has another {name} than was sent; push again")


@contextmanager
def _explained(target: Target) -> Iterator[None]:
    """Explains errors of the Hub and the network."""
    try:
        yield
    except (ConfigError, PushFailed):
        raise
    except Exception as error:
        problem = push_problem(target.repo, target.branch, error)
        if problem is None:
            raise
        mistake, is_temporary = problem
        if is_temporary:
            raise PushFailed(without_secrets(str(mistake))) from None
        raise ConfigError(without_secrets(str(mistake))) from None
