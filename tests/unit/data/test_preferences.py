"""Rows of preferences as people have them: every key is used, refused or named, and only the answers are trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data.formats import Document, RowError
from trainers.data.layout import SequenceShard
from trainers.data.preferences import example
from trainers.data.prepare import TokenSet, load_tokenizer, prepare
from trainers.tools.preflight import make_rows

USER, RIGHT, WRONG = (
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "assistant", "content": "3"},
)
PLAIN = (Document(prompt="1+1?", completion=" 2"), Document(prompt="1+1?", completion=" 3", desirable=False))


def read(row: dict[str, Any], **columns: str) -> tuple[Document, ...]:
    return example(row, "auto", columns, True, ("preference",))


def sides(row: dict[str, Any]) -> tuple[tuple[str, ...], int]:
    """The contents of the chosen conversation, and how many of its messages are context."""
    chosen, rejected = read(row)
    assert chosen.untrained == rejected.untrained
    assert [message["content"] for message in rejected.messages][-1] == "3"
    return tuple(message["content"] for message in chosen.messages), chosen.untrained


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
        {"chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"prompt": "1+1?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},  # UltraFeedback's
        {"prompt": [USER], "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
        {"prompt": "1+1?", "chosen": [RIGHT], "rejected": [WRONG]},
        {"messages": [USER], "chosen": RIGHT, "rejected": WRONG},
        {  # LLaMA-Factory's
            "conversations": [{"from": "human", "value": "1+1?"}],
            "chosen": {"from": "gpt", "value": "2"},
            "rejected": {"from": "gpt", "value": "3"},
        },
        {"instruction": "1+1?", "input": "", "chosen": "2", "rejected": "3"},  # LLaMA-Factory's, in Alpaca's columns
        {"chosen": json.dumps([USER, RIGHT]), "rejected": json.dumps([USER, WRONG])},  # a table's
    ],
)
def test_conversations_in_every_form(row: dict[str, Any]) -> None:
    assert sides(row) == (("1+1?", "2"), 1)


OPENAI = {"input": {"messages": [USER]}, "preferred_output": [RIGHT], "non_preferred_output": [WRONG]}


def test_openais_preferences_are_read_with_their_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    question = {"messages": [USER], "tools": tools, "parallel_tool_calls": True}
    row = {**OPENAI, "input": question, "id": 3}
    assert sides(OPENAI) == sides(row) == (("1+1?", "2"), 1)
    for document in read(row):
        assert document.variables == {"tools": tools}
        assert set(document.unused) == {"input.parallel_tool_calls", "id"}
    assert sides({**OPENAI, "input": json.dumps(question)}) == (("1+1?", "2"), 1), "a table's"
    assert example(OPENAI, "preference", {}, True, ("preference",)) == read(OPENAI)
    columns = {"prompt": "input", "chosen": "preferred_output", "rejected": "non_preferred_output"}
    assert read({**OPENAI, "input": "1+1?"}, **columns) == read(OPENAI), (
        "columns that are mapped are read as they are mapped"
    )


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**OPENAI, "input": {"tools": []}}, "input has no messages"),
        ({**OPENAI, "input": "1+1?"}, "input is text but not valid JSON"),
        ({**OPENAI, "messages": [USER, RIGHT]}, "messages is a column beside input and its answers"),
        ({**OPENAI, "preferred_output": [WRONG]}, "chosen and rejected are the same"),
    ],
)
def test_openais_preferences_without_a_question_or_with_two_are_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        read(row)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "1+1?", "chosen": "2", "rejected": "3"},
        {"question": "1+1?", "system": "Be brief.", "chosen": "2", "rejected": "3"},  # Intel/orca_dpo_pairs
        {"question": "1+1?", "chosen": [RIGHT], "rejected": [WRONG]},
    ],
)
def test_answers_without_a_question_are_refused(row: dict[str, Any]) -> None:
    """Controls: the column is named, or the prompt is there and empty."""
    with pytest.raises(RowError, match="no column holds the question; name it with --columns prompt=COLUMN"):
        read(row)
    assert len(read(row, prompt="question")) == 2
    assert len(read({"prompt": "", "chosen": "2", "rejected": "3"})) == 2


def test_the_turns_that_both_share_are_context() -> None:
    more = {"role": "user", "content": "and 1+2?"}
    row = {"chosen": [USER, RIGHT, more, RIGHT], "rejected": [USER, RIGHT, more, WRONG]}
    assert sides(row) == (("1+1?", "2", "and 1+2?", "2"), 3)


def test_the_question_of_alpacas_columns_is_not_lost() -> None:
    row = {"instruction": "Add.", "input": "1+1", "history": [["Hi", "Hello"]], "chosen": "2", "rejected": "3"}
    assert sides({**row, "system": "Be brief."}) == (("Be brief.", "Hi", "Hello", "Add.\n\n1+1", "2"), 4)
    assert [document.unused for document in read(row)] == [(), ()]
    plain = example(row | {"history": None}, "auto", {}, False, ("preference",))
    assert [document.prompt for document in plain] == ["### Task\nAdd.\n\n### Input\n1+1\n\n### Answer\n"] * 2
    assert [document.completion for document in plain] == ["2", "3"]


def test_alpacas_columns_are_named_where_another_column_asks() -> None:
    """But not the one that is mapped to another role."""
    row = {"prompt": "1+1?", "instruction": "Add.", "input": None, "chosen": " 2", "rejected": " 3"}
    assert read(row)[0] == PLAIN[0]
    assert read(row)[0].unused == ("instruction",)
    listed = {"instruction": "1+1?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}
    assert read(listed)[0].unused == ("instruction",)
    mapped = read({"instruction": "1+1?", "input": "x", "chosen": " 2", "rejected": " 3"}, prompt="instruction")
    assert mapped == PLAIN
    assert mapped[0].unused == ("input",)


def test_the_chosen_conversation_may_be_there_twice() -> None:
    """As in HuggingFaceH4/ultrafeedback_binarized; other messages beside a prompt are refused."""
    row = {"prompt": "1+1?", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}
    assert sides({**row, "messages": [USER, RIGHT]}) == (("1+1?", "2"), 1)
    assert read({**row, "messages": [USER, RIGHT]})[0].unused == ("messages",)
    with pytest.raises(RowError, match="prompt and messages both hold"):
        read({**row, "messages": [USER, WRONG]})


def test_system_and_tools_reach_both() -> None:
    row = {"system": "Be brief.", "prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}
    assert sides(row) == (("Be brief.", "1+1?", "2"), 2)


def test_texts_with_their_prompt_or_after_the_words_that_they_share() -> None:
    assert read({"prompt": "1+1?", "chosen": " 2", "rejected": " 3"}) == PLAIN
    assert read({"chosen": "1+1? 2", "rejected": "1+1? 3"}) == PLAIN
    words = read({"chosen": "So it is yes", "rejected": "So it is yet to be seen"})
    assert [document.prompt for document in words] == ["So it is"] * 2
    assert [document.completion for document in words] == [" yes", " yet to be seen"]
    assert read({"question": "1+1?", "chosen": " 2", "rejected": " 3"}, prompt="question") == PLAIN


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "a b", "rejected": "a b"}, "chosen and rejected are the same"),
        ({"chosen": [USER, RIGHT], "rejected": [USER, RIGHT]}, "chosen and rejected are the same"),
        ({"chosen": "a", "rejected": [USER, WRONG]}, "one of chosen and rejected is text"),
        ({"chosen": None, "rejected": "b"}, "chosen is null"),
        ({"chosen": "a b", "rejected": "a "}, "rejected, without the words at which both start, is empty"),
        ({"chosen": [USER, RIGHT], "rejected": [USER]}, "no message of the assistant has any text"),
        ({"prompt": [USER], "messages": [USER], "chosen": [RIGHT], "rejected": [WRONG]}, "keep one"),
        ({"prompt": [USER], "chosen": "2", "rejected": "3"}, "prompt holds messages, and chosen and rejected text"),
        ({"messages": [USER], "chosen": "2", "rejected": "3"}, "messages holds messages"),
        ({"chosen": 3, "rejected": "b"}, "chosen is int, not text"),
        ({"chosen": [{"role": "critic", "content": "x"}], "rejected": [WRONG]}, "has role 'critic'"),
        ({"chosen": [], "rejected": []}, "chosen is an empty list, not text"),
        ({"instruction": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
        ({"instruction": "q", "chosen": "a", "rejected": " "}, "rejected is empty"),
        ({"chosen": "a"}, "'rejected' is missing"),
        ({"prompt": 0, "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, "prompt is int and not a list"),
        ({"prompt": 0, "chosen": "a", "rejected": "b"}, "prompt is int, not text"),
        ({"messages": 0, "chosen": "a", "rejected": "b"}, "messages holds messages"),
    ],
)
def test_rows_that_hold_no_preference_are_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(RowError, match=problem):
        example(row, "preference", {}, True, ("preference",))


@pytest.mark.parametrize(
    "text", ['[{"role": "user"}, 3, {}]', '[{"a": 1}]', "[{not JSON}]", '[{"from": 1}, "from", {"b": 2}]']
)
def test_text_that_only_looks_like_messages_stays_text(text: str) -> None:
    chosen, _ = read({"prompt": "a", "chosen": text, "rejected": "b"})
    assert chosen.completion == text


def test_fields_that_nothing_uses_are_named() -> None:
    row = {"prompt": "a", "chosen": " b", "rejected": " c", "margin": 1.5, "tools": [{"name": "x"}], "id": 3}
    assert {path for document in read(row) for path in document.unused} == {"margin", "tools", "id"}


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(path: Path, **options: Any) -> TrainConfig:
    needed = {"model_name_or_path": "embedded", "dataset_name": str(path), "objective": "dpo", "global_batch_size": 1}
    return build({**needed, "per_device_train_batch_size": 1, "cache_dir": str(path.parent / "cache"), **options})


def pair(index: int, length: int = 1) -> dict[str, Any]:
    question = {"role": "user", "content": f"Number {index}?"}
    right, wrong = ({"role": "assistant", "content": f"{word} {index}" * length} for word in ("yes", "no"))
    return {"prompt": [question], "chosen": [right], "rejected": [wrong]}


def test_chosen_and_rejected_lie_side_by_side_and_train_the_answers_alone(tmp_path: Path) -> None:
    settings = config(written(tmp_path, [pair(index) for index in range(20)]), max_length=64)
    tokens, tokenizer = prepare(settings, "train"), load_tokenizer(settings)
    assert len(tokens) == 40
    for index in range(20):
        texts = [tokens.document(2 * index + side) for side in (0, 1)]
        trained = [tokenizer.decode(ids[mask].tolist()) for ids, mask in texts]
        assert [text.split()[0] for text in trained] == ["yes", "no"]
        assert all(f"Number {index}?" not in text for text in trained)
        assert tokens.where(2 * index) == tokens.where(2 * index + 1)


@pytest.mark.parametrize("packing", [True, False])
def test_each_label_belongs_to_its_document(packing: bool, tmp_path: Path) -> None:
    """Over a batch: the labels of a document, in order, are its trained tokens. Control: of the other side, not."""
    path = written(tmp_path, [pair(index, 1 + index % 3) for index in range(12)])
    settings = config(path, max_length=64, packing=packing)
    tokens = prepare(settings, "train")
    rows = make_rows(settings, tokens)
    assert rows.divisor() == 12
    assert rows.divisor(np.array([0])) == np.diff(rows.offsets)[0] // 2
    batch = rows.collate(np.arange(len(rows)))
    scored = batch.scored
    assert scored is not None
    assert sorted(scored.numbers.tolist()) == list(range(24))
    assert all(second == first + 1 for first, second in scored.numbers.reshape(-1, 2))
    agree = []
    for place, number in enumerate(scored.numbers):
        labels = batch.labels[scored.of_label == place].tolist()
        ids, mask = tokens.document(int(number))
        assert labels == ids[mask].tolist()
        assert scored.tokens[place] == len(labels)
        other = tokens.document(int(number) ^ 1)
        agree.append(labels == other[0][other[1]].tolist())
    assert not all(agree)


def test_a_pair_of_the_longest_documents_fits_in_a_packed_row(tmp_path: Path) -> None:
    path = written(tmp_path, [pair(1, 40), pair(2)])
    settings = config(path, max_length=32)
    tokens = prepare(settings, "train")
    assert tokens.lengths.tolist()[:2] == [32, 32]
    assert tokens.report.truncated == 1
    assert make_rows(settings, tokens).lengths.max() == 64
    dropped: TokenSet = prepare(config(path, max_length=32, overlong="drop"), "train")
    assert (len(dropped), dropped.report.dropped) == (2, 1)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_pair_that_is_the_same_once_truncated_is_dropped(tmp_path: Path, objective: str) -> None:
    """It would have a gradient of zero, or two labels. Control: the other pair, whose answers differ from the start."""
    late = {**pair(0), "chosen": [{"role": "assistant", "content": "a " * 40 + "x"}],
            "rejected": [{"role": "assistant", "content": "a " * 40 + "y"}]}  # fmt: skip
    tokens = prepare(config(written(tmp_path, [late, pair(1, 40)]), max_length=32, objective=objective), "train")
    assert (len(tokens), tokens.report.dropped, tokens.report.truncated) == (2, 1, 1)
    assert tokens.where(0).endswith(":2")


def test_a_mistake_names_the_answer_that_has_it(tmp_path: Path) -> None:
    rows = [pair(0), {**pair(1), "rejected": [{"role": "assistant", "content": ""}]}]
    with pytest.raises(ConfigError) as refused:
        prepare(config(written(tmp_path, rows)), "train")
    assert "pairs.jsonl:2" in str(refused.value)


def test_data_of_another_objective_says_which(tmp_path: Path) -> None:
    path = written(tmp_path, [pair(0)])
    with pytest.raises(ConfigError, match=r"format preference.*set objective=dpo"):
        prepare(config(path, objective="sft"), "train")
    chats = written(tmp_path, [{"messages": [USER, RIGHT]}])
    with pytest.raises(ConfigError, match=r"format chat.*set objective=sft"):
        prepare(config(chats), "train")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"overlong": "split"}, "half an answer cannot be preferred"),
        ({"assistant_only_loss": False}, "compares the answers alone"),
        ({"metric_for_best_model": "eval_token_accuracy"}, "use eval_loss or eval_reward_accuracy"),
        ({"objective": "cpo", "loss_type": "robust"}, "use sigmoid, hinge, ipo"),
        ({"loss_type": "robust"}, "needs label_smoothing"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "has no such term"),
        ({"dataset_format": "chat"}, "which takes preference"),
        ({"objective": "sft", "metric_for_best_model": "eval_reward_accuracy"}, "use eval_loss or eval_token_accuracy"),
    ],
)
def test_options_that_do_not_fit_the_objective_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        config(Path("/nowhere/pairs.jsonl"), **options)


def margins_of(folder: Path, *values: Any, objective: str = "reward", **options: Any) -> TokenSet:
    """The prepared data of pairs with these margins; `...` leaves it out."""
    rows: list[dict[str, Any]] = [{"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]} for _ in values]
    for row, value in zip(rows, values, strict=True):
        row |= {} if value is ... else {"margin": value}
    path = folder / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    needed = {"model_name_or_path": "embedded", "dataset_name": str(path), "cache_dir": str(folder / "cache")}
    return prepare(build({**needed, "objective": objective, **options}), "train")


def test_a_margin_is_a_number_of_the_pair(tmp_path: Path) -> None:
    data = margins_of(tmp_path, 0.5, "1.25", -2, 0)
    assert data.numbers[:, 0].tolist() == [0.5, 0.5, 1.25, 1.25, -2, -2, 0, 0]
    settings = build({"model_name_or_path": "embedded", "dataset_name": "x", "objective": "reward"})
    rows = make_rows(settings, data)
    scored = rows.collate(np.arange(len(rows))).scored
    assert scored is not None
    assert sorted(scored.columns["margin"].tolist()) == sorted(data.numbers[:, 0].tolist())


def test_without_margins_there_are_none(tmp_path: Path) -> None:
    data = margins_of(tmp_path, ..., None)
    assert np.isnan(data.numbers).all()
    settings = build({"model_name_or_path": "embedded", "dataset_name": "x", "objective": "reward"})
    assert make_rows(settings, data).columns == {}


@pytest.mark.parametrize("value", ["much", True, float("nan"), float("inf"), [1], {"a": 1}, 1e30])
def test_a_margin_that_is_no_number_is_refused_with_file_and_line(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pairs.jsonl:2: .*margin is .*, not a number from -1e6 to 1e6"):
        margins_of(tmp_path, 1, value)


@pytest.mark.parametrize("values", [(1, ..., 2), (1, None, 2)])
def test_margins_of_some_rows_only_are_refused_with_file_and_line(values: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pairs.jsonl:2: 'margin' is missing, and other rows .* \(1 of 3 lack it\)"):
        margins_of(tmp_path, *values)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_other_objectives_name_a_margin_as_unused(objective: str, tmp_path: Path) -> None:
    data = margins_of(tmp_path, 1, "much", objective=objective)
    assert list(data.report.unused) == ["margin"]
    assert not margins_of(tmp_path, 1, 2).report.unused  # control


def test_the_last_token_of_each_document_is_scored_wherever_rows_are_cut(tmp_path: Path) -> None:
    """With and without packing, and over ranks that share a row, each scores those that it holds."""
    data = margins_of(tmp_path, *range(5))
    for packing in (True, False):
        base = {"model_name_or_path": "embedded", "dataset_name": "x", "objective": "reward", "max_length": 64}
        settings = build({**base, "packing": packing})
        scored_by = dict[int, int]()
        for count, zigzag in ((1, False), (2, False), (2, True)):
            scored_by.clear()
            for index in range(count):
                rows = make_rows(settings, data, SequenceShard(index, count, zigzag))
                batch = rows.collate(np.arange(len(rows)))
                assert batch.scored is not None
                tokens = batch.input_ids.reshape(-1)[batch.positions].tolist()
                assert tokens == batch.labels.tolist()
                numbers = batch.scored.numbers[batch.scored.of_label.numpy()].tolist()
                assert not scored_by.keys() & set(numbers)
                scored_by.update(zip(numbers, tokens, strict=True))
            assert scored_by == dict(enumerate(data.last_tokens().tolist()))
