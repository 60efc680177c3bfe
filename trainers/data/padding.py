"""The token to pad with, by which a stock sequence-classification model finds the last token of a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.cache import TokenSet
from trainers.data.tokenizer import load_tokenizer

_UNUSED = ("pad", "unk", "reserved", "unused")
"""Parts of the names of special tokens that no document ends with, in the order in which they are taken."""


def padding_token(tokenizer: Any) -> int:
    """The tokenizer's padding token, or another special token if documents end with it, as with `eos`.

    Args:
        tokenizer: from `load_tokenizer`.

    Raises:
        ConfigError: if there is no such token.
    """
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        return int(tokenizer.pad_token_id)
    special = {
        token.content.lower(): number
        for number, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True)
        if token.special and number != tokenizer.eos_token_id
    }
    for part in _UNUSED:
        if fitting := [number for name, number in special.items() if part in name]:
            return min(fitting)
    raise ConfigError.about(
        "model_name_or_path",
        tokenizer.name_or_path,
        f"pads with {tokenizer.eos_token!r}, at which documents end, and a reward model must tell both apart",
        "give its tokenizer a pad_token of its own",
    )


def check_last_tokens(config: TrainConfig, splits: Sequence[TokenSet | None]) -> None:
    """Refuses documents whose last token a stock sequence-classification model would take for padding.

    Args:
        config: the run's config; nothing is done unless its objective scores last tokens.
        splits: the data sets.

    Raises:
        ConfigError: with file and line.
    """
    if not config.objective_spec.scalar_head:
        return
    tokenizer = load_tokenizer(config)
    padding = padding_token(tokenizer)
    for documents in splits:
        if documents is not None and (ends := np.flatnonzero(documents.last_tokens() == padding)).size:
            name = tokenizer.convert_ids_to_tokens(padding)
            raise ConfigError(
                f"{documents.where(int(ends[0]))}: a document ends with {name!r}, the token to pad with, which reward "
                "models leave out; remove it from the text, or use a tokenizer with another pad_token"
            )
