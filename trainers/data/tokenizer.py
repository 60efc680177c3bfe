"""The base model's tokenizer: where its files are, what tells it from others, how it is loaded. Imports no torch."""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainers.config import EMBEDDED, ConfigError, TrainConfig

_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
)
_TEMPLATE_BYTES = 1_000_000
_PAD_TOKENS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>")


def tokenizer_folder(config: TrainConfig) -> Path:
    """The local folder with the tokenizer's files; from the Hub they are fetched once.

    Raises:
        ConfigError: when the model is missing, gated or out of reach.
    """
    name = config.model_name_or_path
    if name == EMBEDDED:
        from trainers.embedded import BASE_DIR

        return BASE_DIR
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model_name_or_path={name} is a file; give the folder that holds config.json")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or (path.parent.is_dir() and "/" in name):
        raise ConfigError(f"model_name_or_path={name} does not exist; {_near(path)}")
    return _fetch(name, config.model_revision, config.trust_remote_code)


def _near(path: Path) -> str:
    parent = path.parent
    names = sorted(os.listdir(parent)) if parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"did you mean {parent / near[0]}?" if near else "check the path"


@lru_cache
def _fetch(name: str, revision: str | None, remote_code: bool) -> Path:
    """The tokenizer's files of a model on the Hub; asked for once per process."""
    from huggingface_hub import errors, snapshot_download

    code = ["*.py"] if remote_code else []
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*_FILES, "config.json", *code]))
    except errors.GatedRepoError:
        raise ConfigError(
            f"model_name_or_path={name} is gated; accept its terms at https://huggingface.co/{name}, then set HF_TOKEN "
            "or run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"model_revision={revision} is not there in {name}; leave it out") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ConfigError(
            f"model_name_or_path={name} is neither a folder here nor a model on the Hub that you may read; check the "
            "name, or set HF_TOKEN (or run `hf auth login`) if it is private"
        ) from None
    except Exception as error:  # offline, timeouts, a full disk: in the exceptions of several libraries
        said = str(error).partition("\n")[0][:200]
        raise ConfigError(
            f"model_name_or_path={name} is not on this machine and cannot be fetched ({type(error).__name__}: {said}); "
            "go online once, or give a local folder"
        ) from None


def tokenizer_hash(folder: Path, config: TrainConfig) -> str:
    """A sha256 over the tokenizer's files and the chat template that replaces theirs.

    Raises:
        ConfigError: when a file cannot be read.
    """
    patterns = [*_FILES, *(["*.py"] if config.trust_remote_code else [])]
    digest = hashlib.sha256()
    names = sorted(str(path.relative_to(folder)) for path in [*folder.glob("*"), *folder.glob("*/*")] if path.is_file())
    for name in names:
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            content = (folder / name).read_bytes()
            digest.update(f"{name}:{len(content)}:".encode() + content)
    template = read_chat_template(config)
    digest.update(repr(template).encode())
    return digest.hexdigest()


def read_chat_template(config: TrainConfig) -> str | None:
    """The text of the `chat_template` option's file, or None.

    Raises:
        ConfigError: when it cannot be read, or is too large to be a template.
    """
    if config.chat_template is None:
        return None
    path = Path(config.chat_template).expanduser()
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"chat_template={path} is no regular file; give a Jinja file")
        if path.stat().st_size > _TEMPLATE_BYTES:
            raise ConfigError(f"chat_template={path} is larger than {_TEMPLATE_BYTES:,} bytes; give a Jinja file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read chat_template={path}: {reason}; give a Jinja file") from None


def load_tokenizer(config: TrainConfig) -> Any:
    """The fast tokenizer of the base model, with the chat template of the config and a pad token.

    The pad token is one that the vocabulary already has, so the embeddings never grow.

    Returns:
        A transformers tokenizer backed by the tokenizers library.

    Raises:
        ConfigError: when the model is missing, gated, out of reach, or has no fast tokenizer.
    """
    from transformers import AutoTokenizer

    folder, name = tokenizer_folder(config), config.model_name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except Exception as error:  # a hostile or broken folder can fail in any way
        said = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(
            f"cannot load the tokenizer of model_name_or_path={name}: {said}; it needs tokenizer.json and config.json"
        ) from None
    if not tokenizer.is_fast:
        raise ConfigError(f"model_name_or_path={name} has only a slow tokenizer; convert it to tokenizer.json")
    tokenizer.name_or_path = name
    template = read_chat_template(config)
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.pad_token_id is None:
        vocabulary = tokenizer.get_vocab()
        own = [token for token in _PAD_TOKENS if token in vocabulary]
        tokenizer.pad_token = next(iter([*own, tokenizer.unk_token or tokenizer.eos_token]))
    return tokenizer
