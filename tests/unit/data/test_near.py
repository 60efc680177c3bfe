"""Near-duplicates: what MinHash finds is what a plain comparison of all pairs finds, within a set and between two."""

from __future__ import annotations

import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.cli import run_verb
from tests.unit.data.test_support import configure
from trainers.config.mistakes import ConfigError
from trainers.data.formats import Document
from trainers.data.near import LISTED, TextSet, bands_of, between, similarity, within
from trainers.data.shards import BadRow
from trainers.tools.data_compare import compare

VOCABULARY = [f"word{number}" for number in range(3000)]


def a_text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(VOCABULARY, k=words))


def edited(text: str, rng: random.Random, words: int) -> str:
    """The text with some words replaced."""
    parts = text.split()
    for place in rng.sample(range(len(parts)), words):
        parts[place] = rng.choice(VOCABULARY)
    return " ".join(parts)


def planted(seed: int) -> list[str]:
    """Unlike texts, and some of them again with 0 to 25 % of their words replaced."""
    rng = random.Random(seed)
    texts = [a_text(rng, rng.randint(30, 120)) for _ in range(150)]
    texts += [
        edited(text, rng, round(len(text.split()) * rng.choice([0, 0.02, 0.05, 0.1, 0.25]))) for text in texts[:90]
    ]
    rng.shuffle(texts)
    return texts


def texts_of(texts: list[str], name: str = "data") -> TextSet:
    return TextSet(((f"{name}:{line}", (Document(completion=text),)) for line, text in enumerate(texts, 1)), name)


def plain_shingles(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return {tuple(words[start : start + 3]) for start in range(len(words) - 2)}


def jaccard(first: str, second: str) -> float:
    one_set, other = plain_shingles(first), plain_shingles(second)
    return len(one_set & other) / len(one_set | other)


def plain_groups(texts: list[str], threshold: float) -> set[frozenset[int]]:
    """Connected texts by a comparison of all pairs; texts that are alone are left out."""
    group = {index: {index} for index in range(len(texts))}
    for first, second in combinations(range(len(texts)), 2):
        if group[first] is not group[second] and jaccard(texts[first], texts[second]) >= threshold:
            group[first] |= group[second]
            for member in group[second]:
                group[member] = group[first]
    return {frozenset(members) for members in group.values() if len(members) > 1}


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.9])
def test_the_groups_are_those_of_a_comparison_of_all_pairs(threshold: float) -> None:
    texts = planted(1)
    groups = plain_groups(texts, threshold)
    with texts_of(texts) as rows:
        result = within(rows, threshold)
        assert within(rows, threshold) == result, "it is deterministic"
    exact = len(texts) - len(set(texts))
    assert result["exact"] == exact > 0
    assert result["exact"] + result["near"] == sum(len(group) - 1 for group in groups)
    assert result["share"] == (result["exact"] + result["near"]) / len(texts)
    for group in result["listed"]:
        places = frozenset(int(member["where"].split(":")[1]) - 1 for member in group["members"])
        assert any(places <= expected for expected in groups)
        assert all(member["similarity"] >= threshold for member in group["members"])
        assert group["members"][0]["text"][:50] == texts[int(group["members"][0]["where"].split(":")[1]) - 1][:50]


def test_another_threshold_finds_other_rows_and_unlike_texts_none() -> None:
    """Control: the edited texts are seen at one threshold alone, and texts of the same words in another order never."""
    rng = random.Random(2)
    text = a_text(rng, 100)
    with texts_of([text, edited(text, rng, 6), " ".join(reversed(text.split()))]) as rows:
        assert within(rows, 0.6)["near"] == 1
        assert within(rows, 0.95)["near"] == 0
    with texts_of([a_text(rng, 40) for _ in range(2000)]) as rows:
        assert (within(rows, 0.3)["near"], within(rows, 0.3)["exact"]) == (0, 0)


def test_pairs_at_the_threshold_are_seen() -> None:
    for threshold in (0.3, 0.5, 0.7, 0.95, 1.0):
        bands, size = bands_of(threshold)
        assert bands * size <= 128
        assert 1 - (1 - threshold**size) ** bands >= 0.999


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_what_is_in_other_data_is_what_a_comparison_of_all_pairs_finds(threshold: float) -> None:
    rng = random.Random(3)
    first, second = planted(3), [a_text(rng, 60) for _ in range(80)]
    second += [edited(text, rng, round(len(text.split()) * rng.choice([0, 0.05, 0.2]))) for text in first[:60]]
    with texts_of(first, "a") as of_first, texts_of(second, "b") as of_second:
        result = between(of_first, of_second, threshold)
    for side, (texts, others) in {"first": (first, second), "second": (second, first)}.items():
        alike = [any(jaccard(text, other) >= threshold for other in others) for text in texts]
        assert result[side]["exact"] == sum(text in others for text in texts) > 0
        assert result[side]["exact"] + result[side]["near"] == sum(alike)
        assert result[side]["share"] == sum(alike) / len(texts)
        assert not all(alike), "control"
    for row, other in result["listed"]:
        texts = first[int(row["where"][2:]) - 1], second[int(other["where"][2:]) - 1]
        assert row["similarity"] == other["similarity"] == round(jaccard(*texts), 4) >= threshold


@pytest.mark.parametrize(
    "text", ["", "。", "日本語の文", "x", "a b", "!!! ???", "\ud800", "ñ" * 3, "ไม่มีช่องว่าง", "<|end|>"]
)
def test_odd_texts_are_compared_too(text: str) -> None:
    rows = [("a:1", (Document(completion=text),)), ("a:2", (Document(completion=text + " and much else " * 3),)),
            ("a:3", BadRow("no text", "x")), ("a:4", (Document(completion=text),))]  # fmt: skip
    with TextSet(iter(rows), "a") as texts:
        assert (len(texts), texts.report.bad) == (3, 1)
        assert within(texts, 0.7)["exact"] == 1
        assert between(texts, texts, 0.7)["first"]["exact"] == 3
    assert similarity(np.array([1], dtype=np.uint64), np.array([1], dtype=np.uint64)) == 1


def test_very_many_alike_rows_are_one_group() -> None:
    rng = random.Random(4)
    text = a_text(rng, 200)
    with texts_of([edited(text, rng, 4) for _ in range(1500)]) as rows:
        assert within(rows, 0.5)["near"] == 1499
        assert between(rows, rows, 0.5)["listed"]
        assert len(between(rows, rows, 0.5)["listed"]) == LISTED


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return str(path)


def as_chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_other_data_are_read_in_their_own_format_and_their_bad_rows_are_named(tmp_path: Path) -> None:
    rng = random.Random(5)
    questions = [(a_text(rng, 40), a_text(rng, 20)) for _ in range(30)]
    data = write(tmp_path / "a.jsonl", [as_chat(*pair) for pair in questions])
    rows: list[Any] = [{"question": edited(question, rng, 2), "answer": answer} for question, answer in questions[:4]]
    rows += [{"question": question, "answer": answer} for question, answer in questions[4:7]]
    rows += [{"question": a_text(rng, 40), "answer": "new"}, '{"question": ', {"question": 7, "answer": "x"}]
    benchmark = write(tmp_path / "b.jsonl", rows)
    config = configure(tmp_path, data, eval_share=0.3)
    columns = {"prompt": "question", "completion": "answer"}
    update = {"eval_dataset_name": benchmark, "eval_share": 0.0}
    result = compare(config, 0.7, False, config.model_copy(update={**update, "columns": columns}))
    in_both = result["against"]
    training = compare(config, 0.7, False, None)
    assert training["against"] is None
    assert (in_both["second"]["rows"], result["unread"]["other"]["rows"]) == (8, 2)
    assert {bad[0] for bad in result["unread"]["other"]["listed"]} == {f"{benchmark}:9", f"{benchmark}:10"}
    everything = compare(config.model_copy(update={"eval_share": 0.0}), 0.7, False,
                         config.model_copy(update={**update, "columns": columns}))["against"]  # fmt: skip
    assert [everything["first"][name] for name in ("rows", "exact", "near")] == [30, 3, 4]
    assert [everything["second"][name] for name in ("rows", "exact", "near")] == [8, 3, 4]
    assert in_both["first"]["rows"] < 30, "rows that eval_share holds out are not trained on"
    with pytest.raises(ConfigError, match="match no known format"):
        compare(config, 0.7, False, config.model_copy(update=update))


def test_evaluation_rows_that_are_almost_trained_on_are_listed(tmp_path: Path) -> None:
    rng = random.Random(6)
    texts = [a_text(rng, 80) for _ in range(20)]
    data = write(tmp_path / "a.jsonl", [{"text": text} for text in [*texts, edited(texts[0], rng, 3)]])
    other = write(tmp_path / "b.jsonl", [{"text": edited(texts[5], rng, 4)}, {"text": a_text(rng, 80)}])
    result = compare(configure(tmp_path, data, eval_dataset_name=other), 0.7, True, None)
    assert (result["within"]["near"], result["evaluation"]["near"]) == (1, 0)
    assert (result["across"]["first"]["near"], result["across"]["second"]["near"]) == (1, 1)
    assert [row["where"] for row in result["across"]["listed"][0]] == [f"{other}:1", f"{data}:6"]


@pytest.mark.usefixtures("elsewhere")
def test_the_verb_lists_them_and_says_so_with_its_exit_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(7)
    texts = [a_text(rng, 30) for _ in range(12)]
    data = write(tmp_path / "a.jsonl", [{"text": text} for text in [*texts, edited(texts[1], rng, 1)]])
    same = write(tmp_path / "b.jsonl", [{"text": texts[3]}, {"text": a_text(rng, 30)}])
    clean = write(tmp_path / "c.jsonl", [{"text": a_text(rng, 30)}])
    argv = ["data", "tiny-lora", "--dataset_name", data, "--cache_dir", str(tmp_path), "--max_length", "256"]
    argv += ["--global_batch_size", "1", "--per_device_train_batch_size", "1", "--rows", "0", "--seed", "1"]
    assert run_verb([*argv, "--against", same, "--near_duplicates", "0.7", "--languages", "5", "--json"]) == 3
    document = json.loads(capfd.readouterr().out)
    comparison, languages = document["comparison"], document["languages"]
    assert (comparison["within"]["near"], comparison["against"]["first"]["exact"]) == (1, 1)
    assert (languages["sampled"], languages["documents"], languages["seed"]) == (5, 13, 1)
    assert sum(entry["documents"] for entry in languages["languages"]) == 5
    assert run_verb([*argv, "--against", same, "--near_duplicates", "0.7"]) == 3
    printed = capfd.readouterr().out
    assert "0 of 13 rows say the same as an earlier one and 1 almost the same" in printed
    assert f"trained on and in {same}: 1 of 13 rows (7.69%: 1 the same, 0 almost)" in printed
    assert f"{data}:4: {texts[3][:100]}" in printed
    assert run_verb([*argv, "--against", clean]) == 0, "control"
    capfd.readouterr()
    assert run_verb([*argv, "--near_duplicates", "0.1", "--languages", "many", "--against_columns", "a=b"]) == 2
    refused = capfd.readouterr().err
    for name in ("near_duplicates='0.1'", "languages='many'", "against_columns"):
        assert name in refused
