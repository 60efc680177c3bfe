"""The embedded default: what is shipped is what the programs say, and the score can tell right from wrong."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.embedded import chat_data, documents, general_text, preference_data, project_text
from benchmarks.embedded.records import (
    KINDS,
    make_record,
    names_in,
    read_json,
    read_xml,
    split_of,
    to_json,
    to_xml,
)
from trainers.embedded import BASE_DIR, DATA_DIR, GENERAL_DIR, PREFERENCES_DIR, TEXT_DIR
from trainers.tools import score

SPLITS = tuple(chat_data.SIZES)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BASE_DIR)


def _names(row: dict) -> set[str]:
    """Names of a row, read from the answer: the user's text opens with a capitalised request."""
    return names_in(row["messages"][1]["content"])


def test_folders_are_found_without_torch():
    code = (
        "import sys, trainers.embedded as e\n"
        "assert e.BASE_DIR.is_dir() and e.DATA_DIR.is_dir() and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_base_is_small_and_as_its_config_says():
    config = json.loads((BASE_DIR / "config.json").read_text())
    weights = BASE_DIR / "model.safetensors"
    assert weights.stat().st_size <= 5_000_000
    with safe_open(weights, "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        kinds = {file.get_slice(key).get_dtype() for key in shapes}
    assert kinds == {"F32"}
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], config["hidden_size"]] == [1024, 128]
    assert "lm_head.weight" not in shapes
    assert config["tie_word_embeddings"]
    assert config["max_position_embeddings"] >= 1024
    recipe = json.loads((BASE_DIR / "recipe.json").read_text())
    parameters = sum(math.prod(shape) for shape in shapes.values())
    assert parameters == recipe["parameters"]
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == recipe["weights_sha256"]
    assert 800_000 < parameters < 1_000_000


def test_nothing_pickled_is_shipped():
    files = [path for folder in (BASE_DIR, DATA_DIR) for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja", ".md", ".jsonl"}
    assert sum(path.stat().st_size for path in DATA_DIR.iterdir()) < 2_500_000


def test_tokenizer_is_fast_and_round_trips(tokenizer):
    assert tokenizer.is_fast
    assert len(tokenizer) == 1024
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    for text in ("Belo Katari, 1234", 'a\n\n{"b": "ü €"}', " <x>y</x> "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("2024")["input_ids"]) == 4


def test_chat_mask_covers_answers_and_their_end(tokenizer):
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": '{"a": 1}'},
        {"role": "user", "content": "Again"},
        {"role": "assistant", "content": "<b>2</b>"},
    ]
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    trained = tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert trained == '{"a": 1}<|end|><b>2</b><|end|>'
    assert ids[-1] == tokenizer.eos_token_id


def test_generation_prompt_is_a_token_prefix_of_the_whole_chat(tokenizer):
    for row in itertools.islice(score.load_rows("eval"), 50):
        messages = row["messages"]
        whole = tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=True)
        assert whole[: len(prompt["input_ids"])] == prompt["input_ids"]


def test_unknown_role_is_refused(tokenizer):
    with pytest.raises(Exception, match="roles system, user and assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}])


def test_rows_fit_in_256_tokens(tokenizer):
    for split in SPLITS:
        chats = [row["messages"] for row in score.load_rows(split)]
        assert max(map(len, tokenizer.apply_chat_template(chats, return_dict=True)["input_ids"])) <= 256


def test_names_never_cross_splits():
    names = {split: [_names(row) for row in score.load_rows(split)] for split in SPLITS}
    every = {split: set().union(*names[split]) for split in SPLITS}
    for one, other in itertools.combinations(SPLITS, 2):
        assert not every[one] & every[other]
    assert all(split_of(name) == split for split in SPLITS for name in every[split])
    assert all(row - every["train"] - every["eval"] for row in names["test"])
    assert [len(names[split]) for split in SPLITS] == [4000, 200, 200]


def test_pretraining_sees_no_held_out_name_and_no_chat():
    for text in itertools.islice(documents.documents(1), 2000):
        assert all(split_of(name) == "train" for name in names_in(text) - set(documents.MONTHS))
        assert not any(word in text for word in ("User", "Assistant", "JSON"))


def test_regenerated_data_is_byte_identical(tmp_path: Path):
    chat_data.write_splits(tmp_path)
    for split in SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (DATA_DIR / f"{split}.jsonl").read_bytes()


def test_other_seed_gives_other_data():
    first, second = (next(chat_data.rows("eval", seed))[0] for seed in (1, 2))
    assert first != second


def test_documents_repeat_for_a_seed():
    first, second = (list(itertools.islice(documents.documents(5), 200)) for _ in "ab")
    assert first == second
    assert first != list(itertools.islice(documents.documents(6), 200))


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_states_its_record(split):
    tasks = set()
    for row, record in chat_data.rows(split):
        answer = chat_data.read_answer(row["task"], row["messages"][1]["content"])
        assert list(answer.items()) == list(record.items())
        tasks.add(row["task"])
    assert tasks == set(chat_data.TASKS)


def test_readers_undo_writers_for_every_kind():
    import random

    records = [make_record(random.Random(seed), "train") for seed in range(200)]
    assert {record["kind"] for record in records} == {kind.name for kind in KINDS}
    for record in records:
        assert read_json(to_json(record)) == record == read_xml(to_xml(record))
    with pytest.raises(ValueError, match="not a JSON object"):
        read_json("[1]")


def test_exact_match_tells_right_from_wrong():
    assert score.exact_match(["a", "b"], ["a", "b"]) == 1.0
    assert score.exact_match(["a", "b"], ["a", "b "]) == 0.5
    assert score.exact_match(["a"], ["a<|end|>"]) == 0.0
    with pytest.raises(ValueError, match="1 expected"):
        score.exact_match(["a"], [])


def test_base_alone_scores_about_zero_with_a_finite_loss():
    result = score.score_model(BASE_DIR, "test", limit=16, samples=2)
    assert result["exact_match"] <= 0.1
    assert 0 < result["eval_loss"] < 20
    assert len(result["samples"]) == 2
    assert set(result["samples"][0]) == {"prompt", "expected", "answer"}


def test_the_accuracy_of_preferences_is_that_of_whole_answers() -> None:
    """Against the plain model's probabilities of one pair after another; swapped pairs give the complement."""
    import torch

    model, tokenizer = score.load_model(BASE_DIR)
    rows = score.load_rows("test", 12, PREFERENCES_DIR)

    def log_probability(row: dict[str, Any], side: str) -> float:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = tokenizer.apply_chat_template(row["prompt"] + row[side], return_dict=True)["input_ids"]
        end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits.log_softmax(-1)[0]
        return sum(log_probs[at - 1, ids[at]].item() for at in range(len(prompt), end))

    expected = sum(log_probability(row, "chosen") > log_probability(row, "rejected") for row in rows) / len(rows)
    assert 0.5 <= expected < 1
    assert score.preference_accuracy(model, tokenizer, rows) == pytest.approx(expected)
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    assert score.preference_accuracy(model, tokenizer, swapped) == pytest.approx(1 - expected)


def test_score_reads_an_adapter_and_a_copy_that_answers_is_right(tmp_path: Path, tokenizer, monkeypatch):
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(BASE_DIR, dtype=torch.float32)
    adapter = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapter.peft_config["default"].base_model_name_or_path = str(BASE_DIR)
    adapter.save_pretrained(tmp_path)
    fresh = score.score_model(tmp_path, "test", limit=2)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    (tmp_path / "cut").mkdir()
    shutil.copy(tmp_path / "adapter_config.json", tmp_path / "cut")
    save_file(dict(list(tensors.items())[1:]), tmp_path / "cut" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=f"needs are not in it: {re.escape(next(iter(tensors)))}"):
        score.load_model(tmp_path / "cut")
    plain = score.score_model(BASE_DIR, "test", limit=2)
    assert fresh["eval_loss"] == pytest.approx(plain["eval_loss"], abs=1e-5)
    assert [s["answer"] for s in fresh["samples"]] == [s["answer"] for s in plain["samples"]]

    monkeypatch.setattr(score, "answers", lambda *given: [r["messages"][-1]["content"] for r in given[-1]])
    assert score.score_model(BASE_DIR, "test", limit=2)["exact_match"] == 1.0


def test_the_shipped_preferences_are_what_the_program_writes(tmp_path: Path) -> None:
    preference_data.write_splits(tmp_path)
    for split in SPLITS:
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (PREFERENCES_DIR / f"{split}.jsonl").read_bytes()
    first, second = (next(preference_data.pairs("eval", seed)) for seed in (1, 2))
    assert first != second


@pytest.mark.parametrize("split", SPLITS)
def test_each_preference_has_one_right_and_one_wrong_answer(split):
    """The right one is the chat data's; the wrong one is not, and no record can be read from it that is the same."""
    answers = {row["messages"][0]["content"]: (row["messages"][1]["content"], record)
               for row, record in chat_data.rows(split)}  # fmt: skip
    pairs = [json.loads(line) for line in (PREFERENCES_DIR / f"{split}.jsonl").read_text().splitlines()]
    assert len(pairs) == preference_data.SIZES[split]
    assert {pair["mistake"] for pair in pairs} == set(preference_data.MISTAKES)
    for pair in pairs:
        right, record = answers[pair["prompt"][0]["content"]]
        assert pair["chosen"][0]["content"] == right
        try:
            read = chat_data.read_answer(pair["task"], pair["rejected"][0]["content"])
        except (ValueError, ElementTree.ParseError):
            continue
        assert read != record


def test_the_shipped_texts_are_pages_and_code_and_those_of_evaluation_are_not_trained_on(tmp_path: Path) -> None:
    def texts(folder: Path) -> dict[str, list[str]]:
        lines = {split: (folder / f"{split}.jsonl").read_text().splitlines() for split in ("train", "eval")}
        return {split: [json.loads(line)["text"] for line in lines[split]] for split in lines}

    shipped = texts(TEXT_DIR)
    assert not {*shipped["train"]} & {*shipped["eval"]}
    for split, least in (("train", 40), ("eval", 5)):
        assert len(shipped[split]) >= least
        assert any(text.startswith("# ") for text in shipped[split])
        assert any("from __future__" in text for text in shipped[split])
    project_text.write_splits(tmp_path)
    now = texts(tmp_path)
    assert len({*now["train"], *now["eval"]} & {*shipped["train"], *shipped["eval"]}) > 10, "the program's own"


def test_the_shipped_general_text_is_the_programs_and_varied(tmp_path: Path) -> None:
    general_text.write(tmp_path)
    shipped = (GENERAL_DIR / "passages.jsonl").read_bytes()
    assert (tmp_path / "passages.jsonl").read_bytes() == shipped
    rows = [json.loads(line) for line in shipped.splitlines()]
    assert len({row["text"] for row in rows}) == len(rows) > 300
    assert len({row["kind"] for row in rows}) >= 10
    assert 60_000 < len(shipped) < 150_000
    assert max(len(row["text"]) for row in rows) < 600, "short enough to be read whole"
    trained = (TEXT_DIR / "train.jsonl").read_text() + (DATA_DIR / "train.jsonl").read_text()
    assert not any(json.dumps(row["text"])[1:-1] in trained for row in rows)
