"""Rows held out by `eval_share` stay on their side when data grow, and rows that say the same are on one side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.unit.data.test_support import configure
from trainers.config.mistakes import ConfigError
from trainers.config.objectives import OBJECTIVES, SFT_FORMATS
from trainers.data.formats import Document
from trainers.data.held_out import BAD, Selection, content_of, row_hash, selection_of
from trainers.data.overlap import in_both, repeated
from trainers.data.prepare import prepare
from trainers.data.shards import BadRow
from trainers.data.tokenise import Options, example_of

Sides = dict[str, bool]


def held_out_by_content(texts: list[str], share: float, seed: int) -> tuple[Sides, bool]:
    """The side of each text, and whether the share alone put a text on each side."""
    rows = [(Document(completion=text),) for text in texts]
    hashes = np.array([row_hash(row, SFT_FORMATS, seed) for row in rows], dtype=np.uint64)
    selection = selection_of(share, seed, True, lambda: [hashes])
    sides = {text: selection.has(row, SFT_FORMATS) for text, row in zip(texts, rows, strict=True)}
    return sides, selection.threshold == int(share * 2**64)


def held_out_by_position(texts: list[str], share: float, seed: int) -> tuple[Sides, bool]:
    """The rule before: an exact count of the least hashes of positions."""
    hashes = np.random.default_rng(seed).permutation(1000)[: len(texts)]
    count = min(len(texts) - 1, max(1, round(share * len(texts))))
    return {
        text: bool(value < np.partition(hashes, count)[count]) for text, value in zip(texts, hashes, strict=True)
    }, True


TEXTS = st.lists(st.text("abcdef ", min_size=1).map(lambda text: f"x{text}x"), min_size=2, max_size=60, unique=True)


def moved(rule: Any, texts: list[str], added: list[tuple[int, str]], share: float, seed: int) -> set[str]:
    """The old rows that change their side when others are added."""
    grown = list(texts)
    for position, text in added:
        grown.insert(position % (len(grown) + 1), text)
    before, after = rule(texts, share, seed)[0], rule(grown, share, seed)[0]
    return {text for text in texts if before[text] != after[text]}


@settings(deadline=None)
@given(TEXTS, st.lists(st.tuples(st.integers(0, 99), st.text(min_size=1))), st.floats(0.1, 0.9), st.integers(0, 2**32))
def test_no_row_changes_its_side_when_rows_are_added_anywhere(
    texts: list[str], added: list[tuple[int, str]], share: float, seed: int
) -> None:
    assume(len({"".join(text.split()) for text in texts}) > 1)
    assume(held_out_by_content(texts, share, seed)[1])
    assert moved(held_out_by_content, texts, added, share, seed) == set()


def test_by_position_rows_change_their_side() -> None:
    """Control: the rule before; also when a row is added at the end, as its count is a share of all rows."""
    texts = [f"text {number}" for number in range(40)]
    assert moved(held_out_by_position, texts, [(0, "new")], 0.25, 1)
    at_the_end = [(40 + number, f"new {number}") for number in range(20)]
    assert any(moved(held_out_by_position, texts, at_the_end, 0.25, seed) for seed in range(9))


def test_the_share_is_about_what_was_set() -> None:
    hashes = np.array(
        [row_hash((Document(completion=str(i)),), SFT_FORMATS, 3) for i in range(20_000)], dtype=np.uint64
    )
    for share in (0.01, 0.25, 0.9):
        held_out = (hashes < selection_of(share, 3, True, lambda: [hashes]).threshold).mean()
        assert abs(held_out - share) < 5 * np.sqrt(share * (1 - share) / len(hashes))
    assert Selection(3, 0).has((Document(completion="x"),), SFT_FORMATS), "without eval_share, all rows are trained"


def row_of(row: dict[str, Any], objective: str = "sft") -> tuple[Document, ...] | BadRow:
    formats = OBJECTIVES[objective].formats
    return example_of(row, "auto", Options("line", {}, 99, "drop", True, formats, OBJECTIVES[objective].parts))


CHAT = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Three."}]
SAME: list[dict[str, Any]] = [
    {"messages": CHAT},
    {"id": 7, "messages": CHAT},
    {"messages": [{"role": "user", "name": "Ann", "content": " How many?\n"}, CHAT[1]]},
    {"conversations": [{"from": "human", "value": "How many?"}, {"from": "gpt", "value": "Three."}]},
    {"prompt": CHAT[:1], "completion": CHAT[1:]},
    {"instruction": "How many?", "output": "Three."},
    {"prompt": "How many?", "completion": "Three."},
    {"text": "How many?\nThree."},
    {"messages": [CHAT[0], {"role": "assistant", "content": "<think>one, two</think>Three."}]},
]


@pytest.mark.parametrize("row", SAME[1:])
def test_rows_that_say_the_same_in_another_form_are_on_one_side(row: dict[str, Any]) -> None:
    assert row_hash(row_of(row), SFT_FORMATS, 1) == row_hash(row_of(SAME[0]), SFT_FORMATS, 1)
    other = {"messages": [CHAT[0], {"role": "assistant", "content": "Four."}]}
    assert row_hash(row_of(other), SFT_FORMATS, 1) != row_hash(row_of(SAME[0]), SFT_FORMATS, 1), "control"
    assert row_hash(row_of(row), SFT_FORMATS, 2) != row_hash(row_of(row), SFT_FORMATS, 1), "control: the seed"


def test_answers_to_one_prompt_are_on_one_side() -> None:
    pairs = [{"prompt": "How many?", "chosen": str(i), "rejected": "none"} for i in range(5)]
    pairs += [{"chosen": [CHAT[0], {"role": "assistant", "content": str(i)}],
               "rejected": CHAT} for i in range(3)]  # fmt: skip
    formats = OBJECTIVES["dpo"].formats
    assert len({row_hash(row_of(pair, "dpo"), formats, 1) for pair in pairs}) == 1
    labelled = [{"prompt": "How many?", "completion": "3", "label": label} for label in (True, False)]
    assert len({row_hash(row_of(row, "kto"), OBJECTIVES["kto"].formats, 1) for row in labelled}) == 1
    rows = [{"prompt": "How many?", "completion": str(i)} for i in range(3)]
    assert len({row_hash(row_of(row), SFT_FORMATS, 1) for row in rows}) == 3, "control: sft compares no answers"


def test_rows_that_cannot_be_used_are_reported_with_the_training_data() -> None:
    bad = row_of({"nothing": 1})
    assert isinstance(bad, BadRow)
    assert row_hash(bad, SFT_FORMATS, 1) == BAD
    assert not Selection(1, 2**63, held_out=True).has(bad, SFT_FORMATS)
    assert content_of(Document(messages=({"role": "assistant", "content": "", "tool_calls": [{"x": 1}]},)))


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def texts_of(config: Any, split: Any) -> list[str]:
    tokens = prepare(config, split)
    return ["".join(chr(token) for token in tokens.document(number)[0]) for number in range(len(tokens))]


def test_a_grown_file_keeps_its_rows_on_their_sides_and_its_copies_together(tmp_path: Path) -> None:
    texts = [{"text": f"text {number}"} for number in range(40)]
    before = configure(tmp_path, write(tmp_path / "a.jsonl", texts), eval_share=0.25)
    new = [{"text": f"new {number}", "id": number} for number in range(30)]
    mixed = [*new[:10], *reversed(texts), *texts[:5], *new[10:], {"text": " text 3", "id": 1}]
    after = configure(tmp_path, write(tmp_path / "b.jsonl", mixed), eval_share=0.25)
    train, evaluation = (set(texts_of(before, split)) for split in ("train", "eval"))
    grown_train, grown_evaluation = (set(texts_of(after, split)) for split in ("train", "eval"))
    assert len(train) + len(evaluation) == 40
    assert train <= grown_train
    assert evaluation <= grown_evaluation
    assert len(train) < len(grown_train)
    assert len(evaluation) < len(grown_evaluation)
    assert in_both(prepare(after, "train"), prepare(after, "eval")) == []
    assert texts_of(before.model_copy(update={"seed": 1}), "eval") != texts_of(before, "eval")
    for limits in ({"max_train_samples": 7}, {"max_eval_samples": 3}, {"max_train_samples": 99}):
        split = "train" if "max_train_samples" in limits else "eval"
        (limit,) = limits.values()
        assert texts_of(after.model_copy(update=limits), split) == texts_of(after, split)[:limit]


def test_a_row_of_two_sources_is_on_one_side(tmp_path: Path) -> None:
    texts = [{"text": f"text {number}"} for number in range(30)]
    write(tmp_path / "a.jsonl", texts)
    write(tmp_path / "b.jsonl", [*texts[10:20], *({"text": f"other {number}"} for number in range(20))])
    mix = tmp_path / "mix.yaml"
    mix.write_text(yaml.safe_dump({"sources": [{"dataset_name": "a.jsonl"}, {"dataset_name": "b.jsonl"}]}))
    config = configure(tmp_path, "none", mix=str(mix), eval_share=0.3)
    train, evaluation = prepare(config, "train"), prepare(config, "eval")
    assert in_both(train, evaluation) == []
    assert repeated(train) + repeated(evaluation) == 10
    assert repeated(evaluation), "control: a row of both sources is held out"


def test_few_rows_have_one_on_each_side(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", [{"text": f"text {number}"} for number in range(5)])
    for share, counts in ((1e-9, (4, 1)), (1 - 1e-9, (1, 4))):
        config = configure(tmp_path, rows, eval_share=share)
        assert (len(prepare(config, "train")), len(prepare(config, "eval"))) == counts
    for number, lines in enumerate(([{"text": "x"}], [{"text": "x"}] * 3, [{"text": "x"}, "{broken"])):
        config = configure(tmp_path, write(tmp_path / f"{number}.jsonl", lines), eval_share=0.5, bad_rows="skip")
        with pytest.raises(ConfigError, match="cannot hold out one of the rows"):
            prepare(config, "train")
