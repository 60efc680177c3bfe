"""Documents that occur more than once are counted, and those of the evaluation data that are trained on are listed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data.overlap import in_both, leak_lines, repeated, repeated_lines
from trainers.data.prepare import prepare, report_lines
from trainers.tools.data_preview import Preview


def write(path: Path, texts: list[str]) -> str:
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return str(path)


def config_of(folder: Path, **data: Any) -> TrainConfig:
    return build({"model_name_or_path": "embedded", "max_length": 64, "cache_dir": str(folder / "cache"), **data})


class Digests:
    """A data set of which the digests alone are known."""

    def __init__(self, digests: list[int]):
        self.digests = np.array(digests, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self.digests)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 20), min_size=1))
def test_the_pairs_are_those_of_a_plain_search(train: list[int], evaluation: list[int]) -> None:
    sets: Any = Digests(train), Digests(evaluation)
    assert in_both(*sets) == [(number, train.index(value)) for number, value in enumerate(evaluation) if value in train]
    assert repeated(sets[0]) == len(train) - len(set(train))


def test_what_is_trained_and_evaluated_is_listed_with_its_lines(tmp_path: Path) -> None:
    texts = [f"a text of number {number}" for number in range(20)]
    train = write(tmp_path / "train.jsonl", [*texts, texts[3], texts[3]])
    leaking = write(tmp_path / "eval.jsonl", ["something new", texts[7], "a text of number 3 and more", texts[3]])
    config = config_of(tmp_path, dataset_name=train, eval_dataset_name=leaking)
    lines = report_lines(prepare(config, "train"), prepare(config, "eval"))
    assert f"train data {train}: 2 of 22 documents (9.1%) repeat an earlier one exactly" in lines
    (leak,) = [line for line in lines if "trained on too" in line]
    assert leak.startswith(f"eval data {leaking}: 2 of 4 documents (50.0%)")
    assert leak.endswith(f"{leaking}:2 as {train}:8, {leaking}:4 as {train}:4")
    clean = config_of(tmp_path, dataset_name=write(tmp_path / "clean.jsonl", texts), eval_share=0.2)
    assert leak_lines(prepare(clean, "train"), prepare(clean, "eval")) == [], "control"
    assert repeated_lines(prepare(clean, "train")) == []


def test_the_data_page_says_so_too(tmp_path: Path) -> None:
    train, same = (
        write(tmp_path / "a.jsonl", ["one text", "another", "one text"]),
        write(tmp_path / "b.jsonl", ["another"]),
    )
    statistics = Preview(config_of(tmp_path, dataset_name=train, eval_dataset_name=same)).statistics()
    assert statistics["repeated"] == 1
    assert any(f"{same}:1 as {train}:2" in note for note in statistics["notes"])
    missing = config_of(tmp_path, dataset_name=train, eval_dataset_name=str(tmp_path / "no.jsonl"))
    assert any("no.jsonl" in line for line in Preview(missing).statistics()["mistakes"])


def test_the_sources_of_a_mix_are_compared_too(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["one text", "another text"])
    write(tmp_path / "b.jsonl", ["one text", "a third text"])
    mix = {"sources": [{"dataset_name": "a.jsonl"}, {"dataset_name": "b.jsonl"}]}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mix))
    documents = prepare(config_of(tmp_path, mix=str(tmp_path / "mix.yaml")), "train")
    assert repeated(documents) == 1
    assert all(repeated(part) == 0 for part in documents.parts)  # type: ignore[attr-defined]
