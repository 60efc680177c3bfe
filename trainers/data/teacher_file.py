"""The most likely tokens of a teacher and their log-probabilities, recorded in a folder. Imports no torch.

`tunesmith record` writes it (`trainers/tools/record_teacher.py`); `teacher_log_probs` names it. For each split there
are plain arrays of NumPy, which ranks map into memory: `SPLIT.ids.npy`, `SPLIT.log_probs.npy` and `SPLIT.starts.npy`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.cache import TokenSet
from trainers.run.teacher import META, array_paths

if TYPE_CHECKING:
    from trainers.data.fill_cache import Split

VERSION = 1
_BLOCK = 1 << 16  # labels that are checked at once
_SUM_ERROR = 1e-3
"""How far the probabilities of a token may be from 1 in sum."""


class Recording(BaseModel):
    """What `teacher.json` says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: int
    teacher: str
    top_k: int = Field(ge=1)
    temperature: float = Field(gt=0)
    vocab_size: int = Field(ge=2)
    fingerprints: dict[str, str]


class TeacherFile:
    """The recorded predictions for one split.

    A label is a trained token of a document, in their order.

    Args:
        folder: the folder.
        split: `train` or `eval`.
        recording: its `teacher.json`.

    Attributes:
        ids: `[labels, top_k]` int32, the most likely tokens, the likeliest first.
        log_probs: `[labels, top_k + 1]` fp32, their log-probabilities, and that of all other tokens together.
        starts: `[documents + 1]` int64, where the labels of each document start.
    """

    def __init__(self, folder: Path, split: Split, recording: Recording):
        arrays = (np.load(path, mmap_mode="r", allow_pickle=False) for path in array_paths(folder, split))
        self.ids, self.log_probs, self.starts = arrays
        self.recording = recording

    def misfit(self, documents: TokenSet) -> str | None:
        """Why the arrays are not those of a data set; None if they are. Reads all of them.

        Args:
            documents: the data set.
        """
        top_k, labels = self.recording.top_k, int(documents.trained.sum())
        layout = [(self.ids, np.int32, (labels, top_k)), (self.log_probs, np.float32, (labels, top_k + 1)),
                  (self.starts, np.int64, (len(documents) + 1,))]  # fmt: skip
        if any(array.dtype != dtype or array.shape != shape for array, dtype, shape in layout):
            return "its arrays have other shapes than its teacher.json and the data say"
        if not np.array_equal(np.diff(self.starts), documents.trained) or self.starts[0] != 0:
            return "its documents have other lengths"
        for start in range(0, labels, _BLOCK):
            ids, log_probs = self.ids[start : start + _BLOCK], self.log_probs[start : start + _BLOCK]
            if ids.min() < 0 or ids.max() >= self.recording.vocab_size or (np.diff(np.sort(ids, 1), axis=1) == 0).any():
                return f"a label from {start:,} on has tokens that do not exist, or one twice"
            sums = np.exp(log_probs.astype(np.float64)).sum(1)
            if not np.isfinite(log_probs).all() or np.abs(sums - 1).max() > _SUM_ERROR:
                return f"a label from {start:,} on has probabilities that do not add up to 1"
        return None


def open_teacher_file(config: TrainConfig, split: Split, documents: TokenSet) -> TeacherFile:
    """The recorded predictions for one split of a run.

    Args:
        config: the run's config, with `teacher_log_probs`.
        split: `train` or `eval`.
        documents: its data.

    Raises:
        ConfigError: if they cannot be read, or are those of other data or another temperature.
    """
    folder = Path(str(config.teacher_log_probs))
    recording = read_recording(folder)
    if recording.temperature != config.distill_temperature:
        raise _refusal(
            folder, f"was recorded at distill_temperature={recording.temperature:g}",
            f"this run has {config.distill_temperature:g}: set it so, or record again",
        )  # fmt: skip
    if (fingerprint := recording.fingerprints.get(split)) is None:
        remedy = "record again with it" if split == "train" else "record again with it, or set eval_dataset_name=none"
        raise _refusal(folder, f"holds nothing of the {split} data", remedy)
    if fingerprint != documents.fingerprint:
        option = "dataset_name" if split == "train" else "eval_dataset_name"
        raise _refusal(
            folder, f"was recorded of other {split} data, or of the same with another template or other options",
            f"record again with this {option}, chat_template, tokenizer and all that chooses and cuts rows "
            "(max_length, overlong, columns, thoughts, max_train_samples, max_eval_samples, eval_share with its seed)",
        )  # fmt: skip
    try:
        return TeacherFile(folder, split, recording)
    except (OSError, ValueError, EOFError) as error:
        raise _refusal(folder, f"cannot be read: {error}", "record again") from None


def read_recording(folder: Path) -> Recording:
    """What the `teacher.json` in a folder says.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        recording = Recording.model_validate(json.loads((folder / META).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise _refusal(folder, f"has no {META}", "name a folder that `tunesmith record` wrote") from None
    except (OSError, ValueError, ValidationError, RecursionError) as error:
        problem = str(error).splitlines()[0][:200]
        raise _refusal(folder, f"has a {META} that cannot be read: {problem}", "record again") from None
    if recording.version != VERSION:
        raise _refusal(folder, f"is of version {recording.version}, and this program reads {VERSION}", "record again")
    return recording


def check_teacher_file(
    config: TrainConfig, splits: Sequence[tuple[Split, TokenSet | None]], vocab_size: int, tp: int = 1
) -> None:
    """Reads all of the recorded predictions of a run once, before it starts.

    Args:
        config: the run's config.
        splits: its data.
        vocab_size: tokens that its model has.
        tp: ranks that the vocabulary is split over.

    Raises:
        ConfigError: if they do not fit.
    """
    for split, documents in splits:
        if documents is None:
            continue
        file = open_teacher_file(config, split, documents)
        folder = Path(str(config.teacher_log_probs))
        if file.recording.vocab_size > vocab_size:
            problem = f"was recorded of {file.recording.vocab_size:,} tokens, and the model has {vocab_size:,}"
            raise _refusal(folder, problem, "record again with this model_name_or_path")
        if file.recording.vocab_size <= (start := vocab_size * (tp - 1) // tp):
            problem = (
                f"was recorded of {file.recording.vocab_size:,} tokens, and the last of {tp} tensor-parallel ranks"
            )
            raise _refusal(folder, f"{problem} holds those from {start:,} on", "use a smaller tp_size")
        if misfit := file.misfit(documents):
            raise _refusal(folder, f"does not fit the {split} data: {misfit}", "record again")


def _refusal(folder: Path, problem: str, remedy: str) -> ConfigError:
    return ConfigError.about("teacher_log_probs", str(folder), problem, remedy)


def values_of_labels(file: TeacherFile, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Copies of the ids `[labels, top_k]` and log-probabilities `[labels, top_k + 1]` of some labels.

    Args:
        file: the recorded predictions.
        labels: their numbers, in any order.
    """
    ids: np.ndarray[Any, Any] = np.asarray(file.ids[labels], dtype=np.int64)
    return ids, np.asarray(file.log_probs[labels])
