"""Recorded predictions of a teacher: what fits a run, and whatever else such a folder may hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.shared import once
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data.layout import TopTokens
from trainers.data.prepare import prepare
from trainers.data.teacher_file import check_teacher_file
from trainers.tools.preflight import make_rows
from trainers.tools.record_teacher import record

VOCABULARY, TOP_K = 1024, 4


def config_of(folder: Path | None, **changes: Any) -> TrainConfig:
    source = {"teacher": "embedded"} if folder is None else {"teacher_log_probs": str(folder)}
    return build({"model_name_or_path": "embedded", "dataset_name": "embedded", "eval_dataset_name": "none",
                  "max_train_samples": 20, "objective": "distill", "method": "full", **source, **changes})  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a recording of the embedded model."""
    recorded = once("recorded-unit", lambda target: record(config_of(None), TOP_K, target) and None)
    return Path(shutil.copytree(recorded, tmp_path / "recorded"))


def check(config: TrainConfig, vocab_size: int = VOCABULARY, tp: int = 1) -> None:
    check_teacher_file(config, [("train", prepare(config, "train")), ("eval", None)], vocab_size, tp)


def test_rows_get_what_was_recorded_of_their_labels(folder: Path) -> None:
    config = config_of(folder, packing=True)
    check(config)
    data = prepare(config, "train")
    rows, ids = make_rows(config, data), np.load(folder / "train.ids.npy")
    likeliest = {}
    for number, start in enumerate(np.load(folder / "train.starts.npy")[:-1]):
        tokens, mask = data.document(number)
        context = [tuple(tokens[:at].tolist()) for at in np.flatnonzero(mask)]
        likeliest |= dict(zip(context, ids[start : start + len(context)].tolist(), strict=True))
    batch = rows.collate(np.arange(min(4, len(rows))))
    assert isinstance(batch.taught, TopTokens)
    flat, borders = batch.input_ids.flatten().tolist(), np.array(batch.documents.host_borders)  # type: ignore[union-attr]
    for position, top in zip(batch.positions.tolist(), batch.taught.ids.tolist(), strict=True):
        first = borders[np.searchsorted(borders, position, side="right") - 1]
        assert likeliest[tuple(flat[first : position + 1])] == top
    assert len({tuple(top) for top in batch.taught.ids.tolist()}) > 10  # control: they are not all alike


def damaged(name: str, change: Any) -> Any:
    def damage(folder: Path) -> None:
        array = np.load(folder / name)
        np.save(folder / name, change(array))

    return damage


def rewritten(**changes: Any) -> Any:
    def rewrite(folder: Path) -> None:
        values = json.loads((folder / "teacher.json").read_text())
        (folder / "teacher.json").write_text(json.dumps({**values, **changes}))

    return rewrite


def put(index: tuple[int, int], value: float) -> Any:
    def change(array: np.ndarray) -> np.ndarray:
        array[index] = value
        return array

    return change


def truncate(folder: Path) -> None:
    path = folder / "train.ids.npy"
    path.write_bytes(path.read_bytes()[:-9])


def pickled(folder: Path) -> None:
    np.save(folder / "train.starts.npy", np.array([{}], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: shutil.rmtree(folder), "has no teacher.json"),
        (lambda folder: (folder / "teacher.json").write_text("[]"), "cannot be read"),
        (lambda folder: (folder / "teacher.json").write_text("[" * 10**5), "cannot be read"),
        (rewritten(top_k="4"), "cannot be read"),
        (rewritten(other=1), "cannot be read"),
        (rewritten(version=2), "is of version 2"),
        (rewritten(top_k=5), "other shapes"),
        (rewritten(vocab_size=2000), "was recorded of 2,000 tokens, and the model has 1,024"),
        (rewritten(vocab_size=2), "tokens that do not exist"),
        (rewritten(fingerprints={}), "holds nothing of the train data"),
        (rewritten(fingerprints={"train": "0"}), "was recorded of other train data"),
        (rewritten(temperature=2.0), "was recorded at distill_temperature=2; this run has 1"),
        (lambda folder: (folder / "train.ids.npy").unlink(), "cannot be read"),
        (truncate, "cannot be read"),
        (pickled, "cannot be read"),
        (damaged("train.ids.npy", put((3, 0), -1)), "tokens that do not exist"),
        (damaged("train.ids.npy", lambda array: array.astype(np.int64)), "other shapes"),
        (damaged("train.ids.npy", lambda array: array[:, [0, 0, 2, 3]]), "or one twice"),
        (damaged("train.log_probs.npy", put((3, 0), np.nan)), "do not add up to 1"),
        (damaged("train.log_probs.npy", put((3, 0), 0.5)), "do not add up to 1"),
        (damaged("train.log_probs.npy", lambda array: array[:-1]), "other shapes"),
        (damaged("train.starts.npy", lambda array: array + (array == array[1])), "other lengths"),
    ],
)
def test_what_does_not_fit_is_refused(damage: Any, sentence: str, folder: Path) -> None:
    check(config_of(folder))
    damage(folder)
    with pytest.raises(ConfigError, match=sentence):
        check(config_of(folder))


def test_each_rank_of_a_split_vocabulary_holds_recorded_tokens(folder: Path) -> None:
    check(config_of(folder), 2 * VOCABULARY - 2, tp=2)
    with pytest.raises(ConfigError, match="the last of 2 tensor-parallel ranks holds those from 1,024 on"):
        check(config_of(folder), 2 * VOCABULARY, tp=2)


@pytest.mark.parametrize("changes", [{"max_train_samples": 19}, {"max_length": 64}, {"assistant_only_loss": False}])
def test_other_data_is_refused(changes: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ConfigError, match="was recorded of other train data"):
        check(config_of(folder, **changes))


def test_evaluation_data_that_was_not_recorded_is_refused(folder: Path) -> None:
    config = config_of(folder, eval_dataset_name="embedded")
    with pytest.raises(ConfigError, match=r"holds nothing of the eval data.*or set eval_dataset_name=none"):
        check_teacher_file(config, [("train", prepare(config, "train")), ("eval", prepare(config, "eval"))], VOCABULARY)


@pytest.mark.parametrize("top_k", [VOCABULARY, 4096])
def test_at_least_one_token_is_left_to_all_others(top_k: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"top_k=\d+ is not below the 1,024 tokens of both models"):
        record(config_of(None), top_k, tmp_path)
