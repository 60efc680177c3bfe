"""Writes chat rows with realistic lengths, and exports the exact batches of a run for other training loops.

write_chat -> train.jsonl -> (Tunesmith's own data code) -> batches.npz: ids, trained, position_ids, offsets
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainers.config.options import TrainConfig
from trainers.data.batches import TrainPlan
from trainers.data.prepare import prepare
from trainers.data.rows import Rows

PROMPT_WORDS, ANSWER_WORDS, SPREAD = 12, 30, 0.9
"""Median words of a prompt and of an answer, and the standard deviation of their logarithms."""
_SYLLABLES = [first + last for first in "bdfgjklmnprstvz" for last in ("a", "e", "i", "o", "u", "an", "el", "ik")]


def write_chat(path: Path, count: int, seed: int) -> Path:
    """Writes a JSONL file of `count` one-turn chats with log-normal lengths and words of random syllables."""
    rng = random.Random(seed)

    def make_text(median: int) -> str:
        number = max(1, round(rng.lognormvariate(np.log(median), SPREAD)))
        return " ".join("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(number))

    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            turns = (("user", make_text(PROMPT_WORDS)), ("assistant", make_text(ANSWER_WORDS)))
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@dataclass(frozen=True)
class Batches:
    """Rows in training order, flat; each step trains `global_batch_size` consecutive rows.

    Args:
        ids: `[tokens]` int64.
        trained: `[tokens]` bool, whether the token is learned.
        position_ids: `[tokens]` int64 position in its document.
        offsets: `[rows + 1]` where each row starts.
        global_batch_size: rows of a step.
    """

    ids: np.ndarray
    trained: np.ndarray
    position_ids: np.ndarray
    offsets: np.ndarray
    global_batch_size: int

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, trained mask and position ids of one row."""
        start, end = self.offsets[number], self.offsets[number + 1]
        return self.ids[start:end], self.trained[start:end], self.position_ids[start:end]

    def tokens(self, first: int, last: int) -> int:
        """Tokens of the steps from `first` to `last`, exclusive."""
        return int(self.offsets[last * self.global_batch_size] - self.offsets[first * self.global_batch_size])

    def squared_lengths(self, first: int, last: int) -> int:
        """Sum of the squared lengths of the documents in those steps, for counting FLOPs of attention."""
        start, end = (int(self.offsets[step * self.global_batch_size]) for step in (first, last))
        begins = np.flatnonzero(self.position_ids[start:end] == 0)
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
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return cls(**{**arrays, "global_batch_size": int(arrays["global_batch_size"])})


def batches_of(config: TrainConfig) -> Batches:
    """The batches that a run of this config trains on, up to `max_steps`."""
    documents = prepare(config, "train")
    rows = Rows(documents, config.max_length, config.packing)
    plan = TrainPlan(rows, config, 1)
    ids, trained, position_ids, lengths = [], [], [], []
    for step in range(plan.total_steps):
        for row in plan.rows_of(step):
            members = rows.members[rows.offsets[row] : rows.offsets[row + 1]]
            contents = [documents.document(int(member)) for member in members]
            # Nothing predicts the first token of a document.
            masks = [np.concatenate([[False], mask[1:]]) for _, mask in contents]
            ids += [tokens for tokens, _ in contents]
            trained += masks
            position_ids += [np.arange(len(mask)) for mask in masks]
            lengths.append(sum(len(mask) for mask in masks))
    flat = [np.concatenate(parts) for parts in (ids, trained, position_ids)]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Batches(flat[0].astype(np.int64), flat[1], flat[2], offsets, config.global_batch_size)
