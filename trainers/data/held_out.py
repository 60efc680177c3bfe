"""Which rows `eval_share` holds out for evaluation: a hash of what a row says and the seed. Imports no torch.

A row's side depends on no other row, so it stays when data grow, shrink or change their order; rows that say the same
are on one side, also in other files and other sources of a mix.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainers.config.mistakes import ConfigError
from trainers.config.objectives import SFT_FORMATS
from trainers.data.formats import Document
from trainers.data.shards import BadRow

BAD = 2**64 - 1
"""The hash of a row that cannot be used: it is reported with the training data."""
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True)
class Selection:
    """Which rows of a data set belong to the split: the held-out ones, the others, or all.

    Attributes:
        seed: Chooses the rows held out.
        threshold: Rows whose hash is below it are held out; 0 holds out none.
        held_out: Whether this split is the held-out one.
    """

    seed: int = 0
    threshold: int = 0
    held_out: bool = False

    def has(self, row: tuple[Document, ...] | BadRow, formats: Sequence[str]) -> bool:
        """Whether a row belongs to the split; `formats` are those of the objective."""
        return not self.threshold or (row_hash(row, formats, self.seed) < self.threshold) == self.held_out


def row_hash(row: tuple[Document, ...] | BadRow, formats: Sequence[str], seed: int) -> int:
    """A 64-bit hash of what a row says, the same for every tokenizer, chat template and length.

    Where an objective compares answers, it is that of the prompt, so that no prompt is on both sides.

    Args:
        row: Its documents, or what is wrong with it.
        formats: Row formats that the objective takes.
        seed: Seed of the split.
    """
    if isinstance(row, BadRow):
        return BAD
    return min(text_hash(content_of(row[0], prompt_only=tuple(formats) != SFT_FORMATS), str(seed)), BAD - 1)


def text_hash(text: str, key: str = "") -> int:
    """A 64-bit hash of a text without its white space: of a prompt and its completion, some forms have none between."""
    letters = "".join(text.split()).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(letters, digest_size=8, key=key.encode()[:64]).digest(), "little")


def content_of(document: Document, prompt_only: bool = False) -> str:
    """The text of a document without what templates may leave out: roles, spaces at the ends, thoughts, names, tools.

    Documents of the same tokens have the same content, but for white space.

    Args:
        document: As read.
        prompt_only: Only what is before the answer, if anything is.
    """
    messages = document.messages
    if prompt_only and (document.untrained or document.prompt):
        text = document.prompt + _joined(messages[: document.untrained])
    else:
        text = f"{document.prompt} {document.completion} {_joined(messages)}"
    text = " ".join(_THOUGHT.sub("", text).split())
    return text or json.dumps(messages, sort_keys=True, default=str)


def _joined(messages: Iterable[dict[str, object]]) -> str:
    return " ".join(str(message["content"]) for message in messages)


def selection_of(
    share: float, seed: int, held_out: bool, hashes: Callable[[], Iterable[npt.NDArray[np.uint64]]]
) -> Selection:
    """The rows of a split: those whose hash is below `share`, and at least one row on each side.

    Only data so small that no hash, or every one, is below the share have the row with the least hash, or all but the
    one with the greatest, held out; such a row may change its side when others are added.

    Args:
        share: `eval_share`.
        seed: Seed of the split.
        held_out: Whether the split is the held-out one.
        hashes: Gives the hashes of all rows, part by part.

    Raises:
        ConfigError: if fewer than two usable rows say different things.
    """
    threshold, least, greatest = int(share * 2**64), BAD, 0
    for part in hashes():
        usable = part[part != BAD]
        if len(usable):
            least, greatest = min(least, int(usable.min())), max(greatest, int(usable.max()))
    if least >= greatest:
        problem = "cannot hold out one of the rows: fewer than two of them are usable and say different things"
        raise ConfigError.about("eval_share", share, problem, "add data, or set eval_dataset_name")
    return Selection(seed, min(max(threshold, least + 1), greatest), held_out)
