"""Rows of an objective that samples: prompts with and without an answer, and the columns that rewards read."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.unit.data.test_fields import CALL, OPENAI, TRL
from tests.unit.data.test_support import PLAIN, configure, save_tokenizer, write_jsonl
from trainers.config.mistakes import ConfigError
from trainers.config.objectives import FORMAT_COLUMNS, OBJECTIVES, PROMPT_ROLES
from trainers.config.options import TrainConfig
from trainers.data.files import resolve
from trainers.data.formats import OPTIONAL
from trainers.data.messages import MOST_LEVELS, RowError, json_value
from trainers.data.prepare import data_fingerprint, prepare, tokenised
from trainers.data.rollouts import Prompt, check_prompts, prompt_of, refuse_other_columns
from trainers.data.shards import BadRow
from trainers.data.sources import plan, read, unread_columns
from trainers.data.template import Encoder
from trainers.data.tokenise import Options, example_of
from trainers.data.tokenizer import load_tokenizer

USER = {"role": "user", "content": "What is 1+1?"}
REPLY = {"role": "assistant", "content": "It is 2."}
THINKING = PLAIN.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
EMPTY_THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}"
    "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = [
    {"role": "user", "content": "1+0?"}, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "1"},
]  # fmt: skip


def grpo(folder: Path, data: Path, **options: Any) -> TrainConfig:
    changes = {"objective": "grpo", "max_length": 512, "max_completion_length": 64, **options}
    return configure(folder, data, **changes)


def reward(folder: Path, parameters: str) -> str:
    """A reward of one's own with these parameters; its value for the option."""
    (folder / "reward.py").write_text(f"def f({parameters}):\n    return [0.0 for _ in completions]\n")
    return f"{folder / 'reward.py'}:f"


def prompts(folder: Path, rows: list[Any], **options: Any) -> list[Prompt]:
    """The prompts of rows in a file."""
    data = prepare(grpo(folder, write_jsonl(folder / "rows.jsonl", rows), **options), "train")
    return [prompt_of(data, index) for index in range(len(data))]


def refusal(folder: Path, rows: list[Any], **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        prompts(folder, rows, **options)
    return str(caught.value)


# -- prompts -----------------------------------------------------------------------------------------------------------

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"prompt": "1+1="}, {"completion": " 2"}),
    "text after a system": ({"prompt": "1+1=", "system": "Add."}, {"completion": " 2"}),
    "messages as prompt": ({"prompt": [USER]}, {"completion": [REPLY]}),
    "turns as prompt": ({"prompt": [USER, REPLY, USER]}, {"completion": [REPLY]}),
    "messages as text": ({"prompt": json.dumps([USER])}, {"completion": json.dumps([REPLY])}),
    "chat": ({"messages": [USER]}, {"messages": [USER, REPLY]}),
    "turns": ({"messages": [USER, REPLY, USER], "system": "Add."}, {"messages": [USER, REPLY, USER, REPLY]}),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "1+1?"}]},
        {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
    ),
}  # fmt: skip


TEMPLATES = {"plain": PLAIN, "empty thought": EMPTY_THOUGHT, "embedded": None}
WRITTEN = [
    (form, name)
    for form in FORMS
    for name in TEMPLATES
    if not ("turns" in form and name == "empty thought")  # it writes earlier turns differently, also before an answer
]


@pytest.mark.parametrize(("form", "name"), WRITTEN)
def test_a_prompt_is_the_one_of_a_row_with_an_answer_token_for_token(form: str, name: str, tmp_path: Path) -> None:
    (row, answered), template = FORMS[form], TEMPLATES[name]
    options = {} if template else {"model_name_or_path": "embedded"}
    if template:
        save_tokenizer(tmp_path / "model", template)
    alone, whole_row = prompts(tmp_path, [{**row, "answer": "2"}, {**row, **answered}], **options)
    assert alone.tokens.tolist() == whole_row.tokens.tolist()
    assert len(alone.tokens) >= 4
    assert (len(alone.answer), alone.columns) == (0, {"answer": "2"})
    assert len(whole_row.answer) > 0
    assert whole_row.columns == {}


def test_another_prompt_has_other_tokens(tmp_path: Path) -> None:
    """Control."""
    first, second = prompts(tmp_path, [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "completion": "3"}])
    assert first.tokens.tolist() != second.tokens.tolist()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "gptoss", "gemma4_v5", "llama3_1", "nemotron_3_nano", "glm4moe"])
@pytest.mark.parametrize("turns", [[USER], [{"role": "system", "content": "Add."}, USER], CALLS], ids=str)
def test_stock_templates_write_the_same_prompt(name: str, turns: list[Any], tmp_path: Path) -> None:
    config = grpo(tmp_path, write_jsonl(tmp_path / "none.jsonl", []))
    save_tokenizer(tmp_path / "model", (TRL / f"{name}.jinja").read_text(encoding="utf-8"))
    encoder = Encoder.of(load_tokenizer(config), True)
    options = Options("line", {}, 4096, "drop", True, OBJECTIVES["grpo"].formats, ("",), {}, {})
    row, tools = {"messages": turns}, {"tools": OPENAI["tools"]} if turns is CALLS else {}
    documents = [
        example_of({**tools, **row}, "auto", options),
        example_of({**tools, "messages": [*turns, REPLY]}, "auto", options),
    ]
    alone, answered = encoder.encode([document for of_row in documents for document in of_row])
    if isinstance(answered, BadRow):
        opens = "opens a thought" in answered.detail  # the model goes on with it, the answer in the data does not
        text = load_tokenizer(config).decode(alone.input_ids) if opens else ""
        assert text.endswith("<think>\n") if opens else alone == answered
        return
    assert alone.unanswered
    assert not alone.mask.any()
    trained = np.flatnonzero(answered.mask)
    before = int(trained[np.flatnonzero(np.diff(trained, prepend=-2) > 1)[-1]])  # of the last answer
    assert alone.input_ids.tolist() == answered.input_ids[:before].tolist()


def test_where_the_template_opens_a_thought_the_prompt_ends_within_it(tmp_path: Path) -> None:
    """With an answer without a thought, such a row is refused."""
    save_tokenizer(tmp_path / "model", THINKING)
    (prompt,) = prompts(tmp_path, [{"messages": [USER], "answer": "2"}])
    config = grpo(tmp_path, tmp_path / "rows.jsonl")
    assert load_tokenizer(config).decode(prompt.tokens).endswith("<|im_start|>assistant\n<think>\n")
    assert "opens a thought" in refusal(tmp_path, [{"messages": [USER, REPLY]}])


NO_PROMPT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "system", "content": "Add."}]}, "ends with a message of role 'system'; a prompt ends"),
    ({"prompt": [USER, REPLY]}, "prompt ends with a message of role 'assistant'; a prompt ends with user or tool"),
    ({"prompt": None}, "prompt is null, not text"),
    ({"prompt": 7}, "prompt is int, not text"),
    ({"prompt": " \n"}, "no prompt: prompt is empty"),
    ({"prompt": ["What?"]}, "prompt[0] is str and not an object"),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "no message of the assistant has any text"),
    ({"instruction": "Add.", "output": ""}, "output is empty"),
]


def test_rows_without_a_prompt_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for number, (row, _) in enumerate(NO_PROMPT):  # a file for each, as the first row says what the others are
        write_jsonl(tmp_path / "rows" / f"{number}.jsonl", [{**row, "answer": "2"}])
    with pytest.raises(ConfigError) as caught:
        prepare(grpo(tmp_path, tmp_path / "rows"), "train")
    for number, (_, sentence) in enumerate(NO_PROMPT):
        (line,) = [line for line in caught.value.lines if f"{number}.jsonl:1: " in line]
        assert sentence in line
    assert "the columns question, answer lack prompt" in refusal(tmp_path, [{"question": "1+1?", "answer": "2"}])


def test_other_objectives_take_no_prompt_alone(tmp_path: Path) -> None:
    for objective in [name for name, spec in OBJECTIVES.items() if not spec.samples]:
        for row in ({"prompt": "1+1=", "answer": "2"}, {"messages": [USER], "answer": "2"}):
            path = write_jsonl(tmp_path / "rows.jsonl", [row])
            needs = {"teacher": "embedded"} if objective == "distill" else {}
            with pytest.raises(ConfigError):
                prepare(configure(tmp_path, path, objective=objective, **needs), "train")
    assert prompts(tmp_path, [{"prompt": "1+1=", "answer": "2"}])


def test_a_prompt_that_was_cut_or_has_no_room_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "answer": 2}, {"prompt": "x" * 99, "answer": 2}])
    for length, sentence in ((90, "1 rows are longer than max_length=90"), (120, "rows.jsonl:2: has a prompt of 100")):
        config = grpo(tmp_path, path, max_length=length)
        with pytest.raises(ConfigError, match=sentence):
            check_prompts(config, prepare(config, "train"))
    dropped = prepare(grpo(tmp_path, path, max_length=90, overlong="drop"), "train")
    assert (len(dropped), dropped.report.dropped) == (1, 1)


# -- the answer --------------------------------------------------------------------------------------------------------


def test_an_answer_is_text_or_a_number(tmp_path: Path) -> None:
    texts = {"It is 2.": "It is 2.", " 2\n": " 2\n", 2: "2", -2.5: "-2.5", 10**400: "1" + "0" * 400}
    rows = [{"prompt": "1+1=", "solution": value} for value in texts]
    got = prompts(tmp_path, rows, columns="answer=solution")
    assert [prompt.columns for prompt in got] == [{"answer": text} for text in texts.values()]


def test_other_values_are_no_answer(tmp_path: Path) -> None:
    others: list[Any] = [True, ["2"], {"value": 2}]
    text = refusal(tmp_path, [{"prompt": "1+1=", "answer": value} for value in others])
    for number, value in enumerate(others, 1):
        sentence = f"wrong type: answer is {type(value).__name__}; the answer is a text or a number"
        assert f"rows.jsonl:{number}: {sentence}" in text


@pytest.mark.parametrize("name", ["exact_match", "math_verify", "completions, answer"])
def test_rewards_that_compare_need_an_answer(name: str, tmp_path: Path) -> None:
    options = {"reward_funcs": reward(tmp_path, name) if "," in name else name}
    lacking: list[Any] = [{"prompt": "1="}, {"prompt": "2=", "answer": None}, {"prompt": "3=", "answer": " "}]
    text = refusal(tmp_path, [{"prompt": "0=", "answer": 0}, *lacking], **options)
    wanted = (
        "no answer: rewards compare with an answer, and the row has none; give it a column 'answer', or a completion"
    )
    assert [f"rows.jsonl:{line}: {wanted}" in text for line in (1, 2, 3, 4)] == [False, True, True, True]
    assert f"rows.jsonl:1: {wanted}" in refusal(tmp_path, [{"messages": [USER]}], **options)


def test_a_row_without_an_answer_is_left_out_under_skip(tmp_path: Path) -> None:
    rows = [{"prompt": "0=", "answer": 0}, {"prompt": "1="}, {"prompt": "2=", "completion": " 2"}]
    config = grpo(tmp_path, write_jsonl(tmp_path / "rows.jsonl", rows), bad_rows="skip")
    data = prepare(config, "train")
    assert (len(data), data.report.bad_rows) == (2, {"no answer": 1})
    assert [data.where(index).rpartition(":")[2] for index in range(2)] == ["1", "3"]


def test_a_reward_that_compares_with_nothing_needs_none(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("{}")
    for options in ({"reward_funcs": reward(tmp_path, "completions")},
                    {"reward_funcs": "json_schema", "reward_schema": str(tmp_path / "schema.json")}):  # fmt: skip
        path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1="}, {"prompt": "2=", "answer": "2"}])
        data = prepare(grpo(tmp_path, path, **options), "train")
        assert [prompt_of(data, index).columns for index in range(2)] == [{}, {}]
        assert data.report.unused == {"answer": 1}


def test_a_completion_is_the_answer_also_beside_a_column_with_one(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "completion": " two", "answer": "2"}
    path = write_jsonl(tmp_path / "rows.jsonl", [row, {"prompt": "1+1=", "answer": "2"}])
    config = grpo(tmp_path, path)
    data = prepare(config, "train")
    assert load_tokenizer(config).decode(prompt_of(data, 0).answer, skip_special_tokens=True) == " two"
    assert [prompt_of(data, index).columns for index in range(2)] == [{}, {"answer": "2"}]
    assert data.report.unused == {"answer": 1}
    unread = [{**row, "answer": value} for value in (["2"], True, float("nan"), {"value": 2})]
    assert [prompt.columns for prompt in prompts(tmp_path, unread)] == [{}] * 4  # whatever it is
    both = refusal(tmp_path, [{"prompt": "1+1=", "completion": " two", "gold": "2"}], columns="answer=gold")
    assert "two answers: its completion is the answer that rewards compare with, and columns names 'gold' too" in both


def test_an_answer_that_a_reward_can_do_without_is_for_all_rows_or_none(tmp_path: Path) -> None:
    options = {"reward_funcs": reward(tmp_path, "completions, answer=None")}
    rows = [{"prompt": "1=", "answer": 1}, {"prompt": "2="}, {"prompt": "3=", "completion": "3"}]
    sentence = "rows.jsonl:2: 'answer' is missing, and other rows have one (1 of 3 lack it)"
    assert sentence in refusal(tmp_path, rows, **options)
    assert [prompt.has("answer") for prompt in prompts(tmp_path, [rows[0], rows[2]], **options)] == [True, True]
    assert [prompt.has("answer") for prompt in prompts(tmp_path, [rows[1]], **options)] == [False]


# -- columns -----------------------------------------------------------------------------------------------------------

VALUES = [0, -7, 2.5, 1e300, 2**70, True, None, "", "é\u2028🎉", [], {}, [1, [None, {"a": {}}]], {"b": 1, "a": [2]}]


def test_every_json_value_comes_back_exactly(tmp_path: Path) -> None:
    rows = [{"prompt": "1=", "tests": value} for value in VALUES]
    options = {"reward_funcs": reward(tmp_path, "completions, tests")}
    got = [prompt.columns["tests"] for prompt in prompts(tmp_path, rows, **options)]
    assert repr(got) == repr(VALUES)  # also the types of numbers, and the order of keys


CHANGING = [
    (b"NaN", "tests is nan, which JSON does not have"),
    (b"-Infinity", "tests is -inf, which JSON does not have"),
    (b"1e999", "tests is inf, which JSON does not have"),
    (b'[1, {"a": NaN}]', "tests[1].a is nan, which JSON does not have"),
    (b"9" * 5000, "broken JSON"),
    (b"[" * 101 + b"]" * 101, "over 100 levels of lists and objects"),
    (b"[" * 100000 + b"]" * 100000, "nested too deeply"),
    (b'"\\ud800"', "tests has an unpaired surrogate"),
    (b'{"\\udc00": 1}', "a key of tests has an unpaired surrogate"),
    (b'{"a": 1, "a": 2}', "duplicate key"),
]


def test_values_that_would_change_are_refused(tmp_path: Path) -> None:
    options = {"reward_funcs": reward(tmp_path, "completions, tests")}
    deepest = b"[" * 100 + b"]" * 100
    rows = [b'{"prompt": "1=", "tests": ' + value + b"}" for value in (deepest, *(value for value, _ in CHANGING))]
    lines = refusal(tmp_path, rows, **options).splitlines()
    assert not [line for line in lines if "rows.jsonl:1: " in line]
    for number, (_, sentence) in enumerate(CHANGING, 2):
        (line,) = [line for line in lines if f"rows.jsonl:{number}: " in line]
        assert sentence in line
    assert prompts(tmp_path, rows[:1], **options)[0].columns == {"tests": json.loads(deepest)}


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 1), b"x", (1,), {1}, float("nan"), {1: 2}, 1j])
def test_what_json_lacks_is_refused_by_type(value: Any) -> None:
    for nested in (value, [value], {"a": value}):
        with pytest.raises(RowError, match="tests"):
            json_value(nested, "tests")
    deep: Any = 1
    for _ in range(MOST_LEVELS):
        deep = [deep]
    assert json_value(deep, "tests") is deep


def test_a_row_without_a_column_is_refused(tmp_path: Path) -> None:
    options = {"reward_funcs": reward(tmp_path, "completions, level")}
    rows = [{"prompt": "1=", "level": None}, {"prompt": "2=", "levels": 3}]
    text = refusal(tmp_path, rows, **options)
    assert "rows.jsonl:2: missing key: 'level' is missing, and a reward reads it; did you mean 'levels'?" in text
    assert "--columns level=COLUMN" in text
    assert "rows.jsonl:1" not in text  # null is a value
    (prompt,) = prompts(tmp_path, rows[1:], columns="level=levels", **options)
    assert prompt.columns == {"level": 3}


def test_a_column_that_a_reward_can_do_without_is_for_all_rows_or_none(tmp_path: Path) -> None:
    options = {"reward_funcs": reward(tmp_path, "completions, level=1")}
    rows = [{"prompt": "1=", "level": 3}, {"prompt": "2="}]
    sentence = "rows.jsonl:2: 'level' is missing, and other rows have one (1 of 2 lack it); give it to all rows"
    assert sentence in refusal(tmp_path, rows, **options)
    assert [prompt.columns for prompt in prompts(tmp_path, rows[:1], **options)] == [{"level": 3}]
    assert [prompt.columns for prompt in prompts(tmp_path, rows[1:], **options)] == [{}]


def test_rewards_read_the_same_columns_of_both_splits(tmp_path: Path) -> None:
    name = reward(tmp_path, "completions, level=1, answer=None")
    rows = [{"prompt": "1=", "level": 3, "answer": 1}, {"prompt": "1=", "answer": 1}, {"prompt": "1=", "level": 3}]
    configs = [grpo(tmp_path, write_jsonl(tmp_path / f"{number}.jsonl", [row]), reward_funcs=name)
               for number, row in enumerate(rows)]  # fmt: skip
    complete, without_level, without_answer = (prepare(config, "train") for config in configs)
    refuse_other_columns(configs[0], complete, complete)
    refuse_other_columns(configs[0], complete, None)
    with pytest.raises(ConfigError, match="the training data have 'level', and the evaluation data do not"):
        refuse_other_columns(configs[0], complete, without_level)
    with pytest.raises(ConfigError, match="the evaluation data have 'answer', and the training data do not"):
        refuse_other_columns(configs[0], without_answer, complete)


def test_columns_are_read_beside_an_answer_and_the_others_are_listed(tmp_path: Path) -> None:
    row = {"messages": [USER, REPLY], "level": 3, "label": "sum", "note": "x"}
    options = {"reward_funcs": reward(tmp_path, "completions, level, label")}
    data = prepare(grpo(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [row]), **options), "train")
    assert prompt_of(data, 0).columns == {"level": 3, "label": "sum"}
    assert data.report.unused == {"note": 1}


def test_no_reward_can_read_a_column_of_a_row_format() -> None:
    read = {role for name in OBJECTIVES["grpo"].formats for role in (*FORMAT_COLUMNS[name], *OPTIONAL[name])}
    assert read == {*PROMPT_ROLES}


def test_columns_are_part_of_the_fingerprint_and_of_what_is_checked(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1=", "level": 3, "answer": 1}])
    seen = {
        data_fingerprint(grpo(tmp_path, path, reward_funcs=reward(tmp_path, parameters)), "train")
        for parameters in ("completions", "completions, level", "completions, level=1", "completions, answer")
    }
    assert len(seen) == 4
    config = grpo(tmp_path, path, reward_funcs=reward(tmp_path, "completions, level"))
    before = tokenised(config, "train")
    stored = before.folder / "columns"
    assert json.loads(stored.read_bytes()) == {"level": 3}
    stored.write_bytes(stored.read_bytes().replace(b"3", b"4"))  # damage
    assert prompt_of(tokenised(config, "train"), 0).columns == {"level": 3}
    write_jsonl(path, [{"prompt": "1=", "level": 5, "answer": 1}])
    assert prompt_of(tokenised(config, "train"), 0).columns == {"level": 5}


# -- kinds of files ----------------------------------------------------------------------------------------------------


def test_tables_hold_prompts_and_columns(tmp_path: Path) -> None:
    """A table of text has text; messages as JSON text are messages."""
    options = {"reward_funcs": reward(tmp_path, "completions, answer, level")}
    turn = '"[{""role"": ""user"", ""content"": ""x""}]"'
    (tmp_path / "rows.csv").write_text(f"prompt,answer,level\n1+1=,2,3\n{turn},,\n")
    config = grpo(tmp_path, tmp_path / "rows.csv", bad_rows="skip", **options)
    data = prepare(config, "train")
    assert prompt_of(data, 0).columns == {"answer": "2", "level": "3"}
    assert data.report.bad_rows == {"no answer": 1}
    (tmp_path / "rows.csv").write_text(f"prompt,answer,level\n{turn},2,\n")
    assert "<|im_start|>user" in load_tokenizer(config).decode(prompt_of(prepare(config, "train"), 0).tokens)
    rows = [{"prompt": "1+1=", "answer": 2, "level": {"of": [1, 2]}}, {"prompt": "1+2=", "answer": 3, "level": None}]
    (tmp_path / "rows.json").write_text(json.dumps({"data": rows}))
    pq.write_table(pa.Table.from_pylist([{**row, "more": 1} for row in rows]), tmp_path / "rows.parquet")
    for name in ("rows.json", "rows.parquet"):
        data = prepare(grpo(tmp_path, tmp_path / name, **options), "train")
        wanted = [{"answer": "2", "level": {"of": [1, 2]}}, {"answer": "3", "level": None}]
        assert [prompt_of(data, index).columns for index in range(2)] == wanted
    assert data.report.unused == {"more": 2}


@pytest.mark.parametrize(
    ("value", "kind"),
    [(datetime.datetime(2026, 1, 1), "datetime"), (b"x", "bytes"), (datetime.date(2026, 1, 1), "date")],
)
def test_columns_of_parquet_that_are_no_json_are_refused_by_type(value: Any, kind: str, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "1=", "day": value}]), tmp_path / "rows.parquet")
    config = grpo(tmp_path, tmp_path / "rows.parquet", reward_funcs=reward(tmp_path, "completions, day"))
    with pytest.raises(ConfigError, match=f"rows.parquet:1: no JSON: day is of type {kind}, which JSON does not have"):
        prepare(config, "train")
    unread = grpo(tmp_path, tmp_path / "rows.parquet", reward_funcs=reward(tmp_path, "completions"))
    assert prepare(unread, "train").report.unused == {"day": 1}


def test_a_hub_data_set_holds_prompts_and_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that other objects of the column have are left out where they are null, and null itself is a value."""
    rows = [{"prompt": [USER], "gold": 2.5, "tests": {"a": [1, None]}, "when": datetime.datetime(2026, 1, 1)},
            {"prompt": [USER], "gold": 3.0, "tests": {"b": "x"}, "when": None}]  # fmt: skip
    data_set = datasets.Dataset.from_list(rows)
    monkeypatch.setattr("trainers.data.table_rows._hub_rows", lambda *names: data_set)
    config = grpo(tmp_path, Path("someone/sums"), columns="answer=gold")
    (shard,) = plan(resolve(config, "train"), "line")
    for reads in ({"answer": False, "tests": False}, {"answer": False, "when": False}):
        options = Options("line", config.columns, 99, "drop", True, config.objective_spec.formats,
                          rewards=reads)  # fmt: skip
        documents = [example_of(row, "auto", options) for _, row in read(shard, "line", options.wanted)]
        if "tests" in reads:
            assert [json.loads(document.columns) for (document,) in documents] == [
                {"answer": "2.5", "tests": {"a": [1, None]}}, {"answer": "3.0", "tests": {"b": "x"}},
            ]  # fmt: skip
            assert unread_columns(shard.file, options.wanted) == ["when"]
        else:
            assert documents[0] == BadRow(
                "no JSON", "when is of type datetime, which JSON does not have; make it text or a number"
            )
