"""Chat rows whose lengths spread as they do in real data, and the very batches that a run trains on, for other loops.

write_chat -> train.jsonl -> (Tunesmith's own data code) -> batches.npz: ids, trained, places, offsets
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainers.config.options import TrainConfig
from trainers.data.batches import Rows, TrainPlan
from trainers.data.prepare import load_tokenizer, prepare

PROMPT_WORDS, ANSWER_WORDS, SPREAD = 12, 30, 0.9
"""Medians of the words in a prompt and an answer, and the standard deviation of their logarithms."""
_SYLLABLES = [first + last for first in "bdfgjklmnprstvz" for last in ("a", "e", "i", "o", "u", "an", "el", "ik")]


def write_chat(path: Path, count: int, seed: int) -> Path:
    """A JSONL file of `count` chats of one turn, lengths log-normal, words of random syllables."""
    chance = random.Random(seed)

    def words(median: int) -> str:
        number = max(1, round(chance.lognormvariate(np.log(median), SPREAD)))
        return " ".join("".join(chance.choices(_SYLLABLES, k=chance.randint(1, 3))) for _ in range(number))

    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            turns = (("user", words(PROMPT_WORDS)), ("assistant", words(ANSWER_WORDS)))
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@dataclass(frozen=True)
class Batches:
    """Rows in the order of training, flat; a step's are `global_batch_size` in a row.

    Args:
        ids: `[tokens]` int64.
        trained: `[tokens]` bool, whether the token is learned.
        places: `[tokens]` int64 position in its document.
        offsets: `[rows + 1]` where each row starts.
        global_batch_size: rows of a step.
    """

    ids: np.ndarray
    trained: np.ndarray
    places: np.ndarray
    offsets: np.ndarray
    global_batch_size: int

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, trained and places of one row."""
        start, end = self.offsets[number], self.offsets[number + 1]
        return self.ids[start:end], self.trained[start:end], self.places[start:end]

    def tokens(self, first: int, last: int) -> int:
        """Tokens of the steps from `first` up to `last`, which is left out."""
        return int(self.offsets[last * self.global_batch_size] - self.offsets[first * self.global_batch_size])

    def squared_lengths(self, first: int, last: int) -> int:
        """Sum of the squared lengths of the documents in those steps, for counting FLOPs of attention."""
        start, end = (int(self.offsets[step * self.global_batch_size]) for step in (first, last))
        begins = np.flatnonzero(self.places[start:end] == 0)
        return int((np.diff(np.append(begins, end - start)) ** 2).sum())

    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(np.diff(self.offsets).max())

    def save(self, path: Path) -> Path:
        """Writes an `.npz` file."""
        np.savez(path, **vars(self))
        return path

    @classmethod
    def load(cls, path: Path) -> Batches:
        """Reads what `save` wrote."""
        with np.load(path) as found:
            arrays = {name: found[name] for name in found.files}
        return cls(**{**arrays, "global_batch_size": int(arrays["global_batch_size"])})


def batches_of(config: TrainConfig) -> Batches:
    """What a run of this config trains on, step by step, to `max_steps`."""
    documents = prepare(config, "train")
    pad = load_tokenizer(config).pad_token_id or 0
    rows = Rows(documents, config.max_length, config.packing, pad)
    plan = TrainPlan(rows, config, 1)
    ids, trained, places, lengths = [], [], [], []
    for step in range(plan.total_steps):
        for row in plan.rows_of(step):
            members = rows.members[rows.offsets[row] : rows.offsets[row + 1]]
            found = [documents.document(int(member)) for member in members]
            # The first token of a document is predicted by nothing.
            masks = [np.concatenate([[False], mask[1:]]) for _, mask in found]
            ids += [tokens for tokens, _ in found]
            trained += masks
            places += [np.arange(len(mask)) for mask in masks]
            lengths.append(sum(len(mask) for mask in masks))
    flat = [np.concatenate(parts) for parts in (ids, trained, places)]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Batches(flat[0].astype(np.int64), flat[1], flat[2], offsets, config.global_batch_size)
