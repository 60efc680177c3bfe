"""The base model's tokenizer: finding its files, hashing them, loading it. Imports no torch."""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.data.training_template import TrainingTemplate, as_record, own_template, stop_token_ids, training_template
from trainers.run.hub_errors import hub_mistake
from trainers.run.import_path import child_environment
from trainers.run.json_file import MAX_BYTES, load_json
from trainers.run.process_limits import why_it_died

_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
    "generation_config.json",
)
_TEMPLATE_BYTES = 1_000_000
_PROOF_SECONDS = 600.0  # of wall time, for a disk or network that hangs
_ROOT = Path(__file__).resolve().parents[2]
_PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>")


def tokenizer_folder(config: TrainConfig) -> Path:
    """The local folder with the tokenizer's files: that of the run to start from, or of the base model.

    A model on the Hub is downloaded if necessary.

    Raises:
        ConfigError: if the model is missing, gated or unreachable.
    """
    if config.from_run:
        start = Path(config.from_run)
        if not start.is_dir():
            raise ConfigError.about("from_run", start, "is gone, and its tokenizer is needed", "restore the folder")
        if (start / "tokenizer.json").is_file():
            return start
    name = config.model_name_or_path
    if name == EMBEDDED:
        from trainers.embedded import BASE_DIR

        return BASE_DIR
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError.about("model_name_or_path", name, "is a file", "pass the folder that holds config.json")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or (path.parent.is_dir() and "/" in name):
        raise ConfigError.about("model_name_or_path", name, "does not exist", f"{_near(path)}")
    return _fetch(name, config.model_revision, config.trust_remote_code)


def _near(path: Path) -> str:
    parent = path.parent
    names = sorted(os.listdir(parent)) if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"did you mean {parent / near[0]}?" if near else "check the path"


@lru_cache
def _fetch(name: str, revision: str | None, remote_code: bool) -> Path:
    """Downloads the tokenizer's files of a model on the Hub; cached per process."""
    from huggingface_hub import snapshot_download

    code = ["*.py"] if remote_code else []
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*_FILES, "config.json", *code]))
    except Exception as error:  # offline, timeouts, a full disk: in the exceptions of several libraries
        message = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        problem = f"is not on this machine and cannot be downloaded ({message})"
        remedy = "go online once, or pass a local folder"
        unknown = Mistake("model_name_or_path", name, problem, remedy)
        raise ConfigError(hub_mistake(name, revision, error) or unknown) from None


def tokenizer_hash(folder: Path, config: TrainConfig) -> str:
    """sha256 of the tokenizer's files, the stop tokens and the training chat template with its date.

    Raises:
        ConfigError: when a file cannot be read.
    """
    _check_files(folder, config.model_name_or_path)
    digest = hashlib.sha256()
    for path in _tokenizer_files(folder, config.trust_remote_code):
        name, content = path.relative_to(folder), path.read_bytes()
        digest.update(f"{name}:{len(content)}:".encode() + content)
    source = chosen_template(config, own_template(folder)).source
    dated = source is not None and ("strftime_now" in source or "date_string" in source)
    if config.new_tokens:
        digest.update(repr(config.new_tokens).encode())
    digest.update(repr((source, config.template_date if dated else None, stop_token_ids(folder))).encode())
    return digest.hexdigest()


def _tokenizer_files(folder: Path, remote_code: bool) -> Iterator[Path]:
    """The regular files of the tokenizer, sorted by name."""
    patterns = [*_FILES, *(["*.py"] if remote_code else [])]
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")], key=str):
        name = str(path.relative_to(folder))
        if path.is_file() and any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            yield path


def _check_files(folder: Path, name: str) -> None:
    """Refuses files that would block the process that opens them, or exhaust its memory.

    Raises:
        ConfigError: for a pipe or a device, and for files too large to be a tokenizer's.
    """
    for path in [*folder.glob("*"), *folder.glob("*/*")]:
        file = str(path.relative_to(folder))
        if not any(fnmatch.fnmatch(file, pattern) for pattern in (*_FILES, "config.json")):
            continue
        try:
            status = path.stat()
        except OSError:
            continue  # reported when it is opened
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            raise ConfigError.about(
                "model_name_or_path", name, f": {file} is not a regular file", "download or save the model again"
            )
        limit = _TEMPLATE_BYTES if file.endswith(".jinja") else MAX_BYTES
        if stat.S_ISREG(status.st_mode) and status.st_size > limit:
            raise ConfigError.about(
                "model_name_or_path",
                name,
                f": {file} is larger than {limit:,} bytes",
                "download or save the model again",
            )


def _prove(folder: Path, name: str) -> None:
    """Loads the tokenizer and encodes a sample in a separate process, once per state of its files.

    Raises:
        ConfigError: if that process dies or takes too long.
    """
    files = list(_tokenizer_files(folder, remote_code=False))
    _prove_once(folder, name, tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@lru_cache
def _prove_once(folder: Path, name: str, files: tuple[tuple[str, int, int], ...]) -> None:
    command = [sys.executable, "-P", "-m", "trainers.data.tokenizer_proof", str(folder)]
    environment = {**child_environment(os.environ, str(_ROOT)), "TOKENIZERS_PARALLELISM": "false"}
    try:
        result = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, timeout=_PROOF_SECONDS, check=False)  # fmt: skip
        failure = why_it_died(result.returncode, result.stderr.decode("utf-8", "replace")) if result.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"does not load within {_PROOF_SECONDS:.0f} s"
    if failure:
        raise ConfigError(
            f"the tokenizer of model_name_or_path={name} {failure}; download the model again, or use one you trust"
        )


def chosen_template(config: TrainConfig, own: str | None) -> TrainingTemplate:
    """The template to train with, for a model whose own template is `own`.

    Raises:
        ConfigError: if the file of the `chat_template` option cannot be read.
    """
    file, file_text = config.chat_template, read_chat_template(config)
    return training_template(own, file, file_text, config.assistant_only_loss, config.output_dir)


def template_record(config: TrainConfig) -> dict[str, str | None]:
    """The record of the training template that is saved in the run folder, so that the run resumes with the same one.

    Raises:
        ConfigError: if the model or the file of the `chat_template` option cannot be read.
    """
    own = own_template(tokenizer_folder(config))
    return as_record(own, chosen_template(config, own))


def read_chat_template(config: TrainConfig) -> str | None:
    """The text of the file of the `chat_template` option, or None.

    Raises:
        ConfigError: if it cannot be read, or is too large to be a template.
    """
    if config.chat_template is None:
        return None
    path = Path(config.chat_template).expanduser()
    try:
        if path.exists() and not path.is_file():
            raise ConfigError.about("chat_template", path, "is not a regular file", "give a Jinja file")
        if path.stat().st_size > _TEMPLATE_BYTES:
            raise ConfigError.about(
                "chat_template", path, f"is larger than {_TEMPLATE_BYTES:,} bytes", "give a Jinja file"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read chat_template={path}: {reason}; give a Jinja file") from None


def _config_mistake(folder: Path, config: TrainConfig) -> Mistake | None:
    """What is wrong with the model's config.json, which transformers reads before the tokenizer; None if nothing is."""
    from transformers import AutoConfig

    values: Any = {}
    try:
        values = load_json(folder / "config.json")
        if isinstance(values, dict):
            AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
            return None
        problem = f"a JSON {type(values).__name__}, not an object"
    except FileNotFoundError:
        return None
    except Exception as error:  # each family validates its values differently
        problem = str(error).strip().partition("\n")[0][:200]
        dtype = values.get("dtype", values.get("torch_dtype"))
        if isinstance(error, AttributeError) and f"torch' has no attribute {dtype!r}" in problem:
            problem = f"its dtype is {dtype!r}, not one of torch such as 'bfloat16'"
    problem = f": its config.json describes no model ({problem})"
    remedy = "correct it, or download the model again"
    return Mistake("model_name_or_path", config.model_name_or_path, problem, remedy)


def load_tokenizer(config: TrainConfig) -> Any:
    """Loads the fast tokenizer of the base model, with the chat template of the config and a pad token.

    The pad token is taken from the existing vocabulary, so the embeddings grow only for `new_tokens`.

    Returns:
        A transformers tokenizer backed by the tokenizers library.

    Raises:
        ConfigError: if the model is missing, gated or unreachable, has no fast tokenizer, or its tokenizer takes too
            much time or memory.
    """
    folder, name = tokenizer_folder(config), config.model_name_or_path
    _check_files(folder, name)
    files = {path.name for path in _tokenizer_files(folder, config.trust_remote_code)}
    if not any("chat_template" not in file for file in files - {"generation_config.json"}):
        raise ConfigError(
            f"model_name_or_path={name} has no tokenizer; it needs tokenizer.json, which `save_pretrained` of its "
            "tokenizer writes"
        )
    if not config.trust_remote_code or (folder / "tokenizer.json").is_file():
        _prove(folder, name)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a hostile or broken folder can fail in any way
        message = str(error).strip().partition("\n")[0][:200]
        mistake = _config_mistake(folder, config) or (
            f"cannot load the tokenizer of model_name_or_path={name}: {message}; it needs tokenizer.json and "
            "config.json"
        )
        raise ConfigError(mistake) from None
    if not tokenizer.is_fast:
        raise ConfigError.about("model_name_or_path", name, "has only a slow tokenizer", "convert it to tokenizer.json")
    tokenizer.name_or_path = name
    template = read_chat_template(config)
    if template is None and not tokenizer.chat_template:
        template = own_template(folder)  # that of a processor of images and text, which its tokenizer does not read
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.pad_token_id is None:
        vocabulary = tokenizer.get_vocab()
        own = [token for token in _PAD_TOKENS if token in vocabulary]
        tokenizer.pad_token = next(iter([*own, tokenizer.unk_token or tokenizer.eos_token]))
    _add_tokens(tokenizer, config.new_tokens)
    return tokenizer


def _add_tokens(tokenizer: Any, tokens: Sequence[str]) -> dict[str, int]:
    """Adds tokens to a tokenizer; returns the ids of those that it lacked.

    They are no special tokens, so that decoding keeps them. A token that is known already stays as it is: as an added
    token it would be cut out of longer ones.
    """
    from transformers import AddedToken

    known = tokenizer.get_vocab()
    fresh = [token for token in tokens if token not in known]
    tokenizer.add_tokens([AddedToken(token, lstrip=False, rstrip=False, normalized=False) for token in fresh])
    return {token: tokenizer.convert_tokens_to_ids(token) for token in fresh}


def new_token_ids(config: TrainConfig) -> dict[str, int]:
    """Ids of the `new_tokens` that the base model's tokenizer lacks, by token.

    Raises:
        ConfigError: see `load_tokenizer`.
    """
    if not config.new_tokens:
        return {}
    # A run that goes on from an adapter has a tokenizer that knows them, and a base model that does not.
    tokenizer = load_tokenizer(config.model_copy(update={"from_run": None, "new_tokens": []}))
    return _add_tokens(tokenizer, config.new_tokens)
