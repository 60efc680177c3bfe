"""Rewards: what ships, and functions of one's own in a process with limits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainers.config.mistakes import ConfigError
from trainers.config.objectives import REWARDS
from trainers.config.reward_file import reward_columns, reward_mistakes
from trainers.config.validation import build, ignored_choices
from trainers.rewards.functions import exact_match, math_verify
from trainers.rewards.process import RewardProcess
from trainers.rewards.worker import load
from trainers.run.compatibility import recorded_versions
from trainers.run.errors import TrainingError

GRPO = {"model_name_or_path": "embedded", "dataset_name": "embedded", "objective": "grpo"}


def write(folder: Path, body: str) -> str:
    """A reward `f` in a file of its own; its value for the option."""
    (folder / "reward.py").write_text(body)
    return f"{folder / 'reward.py'}:f"


def rewards(name: str, timeout: float = 60, answers: tuple[str, ...] = ("yes", "no")) -> list[float]:
    process = RewardProcess([name], timeout)
    try:
        return process.compute(["Is it?"] * len(answers), answers, {"answer": ["yes"] * len(answers)})[name]
    finally:
        process.close()


def test_exact_match_ignores_space_around_alone() -> None:
    assert exact_match([" yes\n", "yes!", "y es"], ["yes"] * 3) == [1.0, 0.0, 0.0]


def test_equal_expressions_match() -> None:
    texts = ["It is $\\frac{1}{2}$.", "The answer is \\boxed{0.5}", "\\boxed{2}", "I do not know"]
    assert math_verify(texts, ["$1/2$"] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_a_function_gets_what_it_names(tmp_path: Path) -> None:
    name = write(tmp_path, "def f(completions, answer):\n    return [a == b for a, b in zip(completions, answer)]\n")
    assert rewards(name) == [1.0, 0.0]
    name = write(tmp_path, "def f(prompts, *rest, **others):\n    return [len(prompts)] * 2\n")
    assert rewards(name) == [2.0, 2.0]


EXACT = [0, -1.5, 1e-308, 2**64 + 1, 10**400, True, None, "", "\u2028é🎉", [], {}, [[{"a": [None, {"b": []}]}]], 1.0]
COLUMNS = """import json
def f(completions, answer, *, tests, level=7, **others):
    json.dump([answer, tests, level], open({!r}, "w"))
    return [0.0] * len(completions)
"""


def test_columns_reach_a_function_exactly_as_they_are(tmp_path: Path) -> None:
    out = tmp_path / "got.json"
    name = write(tmp_path, COLUMNS.format(str(out)))
    count = len(EXACT)
    for columns, level in (({"level": EXACT, "more": EXACT}, EXACT), ({}, 7)):
        process = RewardProcess([name], 60)
        request = {"answer": ["yes"] * count, "tests": EXACT, **columns}
        assert process.compute([""] * count, [""] * count, request) == {name: [0.0] * count}
        process.close()
        got = json.loads(out.read_text())
        assert repr(got) == repr([["yes"] * count, EXACT, level])


def test_a_function_that_changes_a_column_changes_it_for_no_other(tmp_path: Path) -> None:
    name = write(
        tmp_path,
        """
def clears(completions, tests):
    return [len(tests) - len(tests[0]) for each in completions if tests[0].clear() is None]

def counts(completions, tests):
    return [len(each) for each in tests]
""".replace("def clears", "def f"),
    )
    process = RewardProcess([name, name.replace(":f", ":counts")], 60)
    rewards = process.compute(["", ""], ["", ""], {"tests": [[1, 2, 3], [4]]})
    process.close()
    assert rewards[name.replace(":f", ":counts")] == [3.0, 1.0]


def test_columns_follow_from_the_parameters_of_all_rewards(tmp_path: Path) -> None:
    assert reward_columns(["exact_match", "math_verify"]) == {"answer": False}
    assert reward_columns(["json_schema"]) == {}
    head = "def f(completions, prompts, solution, weight=1.0, *, tests, answer=None, **others):"
    name = write(tmp_path, f"{head}\n    return [0.0]\n")
    wanted = {"solution": False, "weight": True, "tests": False, "answer": True}
    assert reward_columns([name]) == wanted
    assert reward_columns([name, "exact_match"]) == reward_columns(["exact_match", name]) == {**wanted, "answer": False}


def test_a_name_inside_another_function_is_not_the_catch_all(tmp_path: Path) -> None:
    inner = "def f(completions, **kw):\n    def g(**kw): return kw\n    return [{} for _ in completions]\n"
    for value in ("1.0", "(lambda kw: kw)(1.0)", "g(a=1)['a']"):
        assert reward_columns([write(tmp_path, inner.format(value))]) == {}
    with pytest.raises(ConfigError, match=r"uses \*\*kw"):
        reward_columns([write(tmp_path, inner.format("(lambda other: kw)(1.0)"))])


def test_what_ships_reads_the_columns_that_its_parameters_name(tmp_path: Path) -> None:
    for name in REWARDS:
        function, parameters = load(name, schema_file(tmp_path, PET))
        assert callable(function)
        assert {*parameters} - {"prompts", "completions"} == {*reward_columns([name])}


@pytest.mark.parametrize(
    ("head", "sentence"),
    [
        ("f(completions, /)", "has parameters before /, and it is called with names; remove the /"),
        ("f(completions, messages)", "has the parameter 'messages', a column that row formats have; rename both"),
        ("f(completions, images)", "has the parameter 'images', a column"),
        ("f(completions, **others)", "uses **others, which gets nothing; name each column as a parameter"),
        ("f(completions, others)", ""),
        ("f(completions, others, **more)", ""),
    ],
)
def test_parameters_that_cannot_be_filled_are_refused(head: str, sentence: str, tmp_path: Path) -> None:
    name = write(tmp_path, f"def {head}:\n    return [others for _ in completions]\n")
    if not sentence:
        build({**GRPO, "reward_funcs": name})
        return
    with pytest.raises(ConfigError) as caught:
        build({**GRPO, "reward_funcs": name})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"columns": "difficulty=level"}, ""),
        ({"columns": "answer=solution"}, ""),
        ({"columns": "difficulti=level"}, "did you mean columns.difficulty"),
        ({"columns": "answer=solution", "objective": "sft"}, "with objective=sft, which does not read it"),
    ],
)
def test_columns_of_rewards_can_be_mapped(changes: dict[str, str], sentence: str, tmp_path: Path) -> None:
    name = write(tmp_path, "def f(completions, difficulty):\n    return difficulty\n")
    if not sentence:
        build({**GRPO, "reward_funcs": name, **changes})
        return
    with pytest.raises(ConfigError) as caught:
        build({**GRPO, "reward_funcs": name, **changes})
    assert sentence in str(caught.value)


def test_a_process_answers_again_and_keeps_its_modules(tmp_path: Path) -> None:
    name = write(tmp_path, "calls = []\ndef f(completions):\n    calls.append(1)\n    return [len(calls)] * 2\n")
    process = RewardProcess([name, "exact_match"], 60)
    for count in (1.0, 2.0):
        got = process.compute(["a", "b"], ["yes", "no"], {"answer": ["yes", "yes"]})
        assert got == {name: [count, count], "exact_match": [1.0, 0.0]}
    process.close()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("def f(completions):\n    return [1.0]\n", "it gave 1 numbers for 2 answers"),
        ("def f(completions):\n    return [1.0, float('nan')]\n", "it gave 'nan', which is not a finite number"),
        ("def f(completions):\n    return [1.0, None]\n", "it gave 'None', which is not a finite number"),
        ("def f(completions):\n    raise KeyError('x')\n", "KeyError: 'x'"),
        ("def f(completions):\n    raise SystemExit(3)\n", "SystemExit: 3"),
        ("import absent_module\ndef f(completions):\n    return [1, 1]\n", "No module named 'absent_module'"),
        ("import os\ndef f(completions):\n    os._exit(7)\n", "the process of the rewards"),
        ("def f(completions):\n    return [len(bytearray(2**34)), 1]\n", "MemoryError"),
        ("def f(completions):\n    print('noise')\n    return 'ab'\n", "it gave 'a', which is not a finite number"),
    ],
)
def test_what_gives_no_numbers_ends_the_run_with_its_name(body: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as caught:
        rewards(write(tmp_path, body))
    assert sentence in str(caught.value)
    assert "reward.py:f" in str(caught.value)


def test_one_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    name = write(tmp_path, "import time\ndef f(completions):\n    time.sleep(600)\n")
    with pytest.raises(TrainingError, match="reward_timeout=3 s"):
        rewards(name, timeout=3)


def test_secrets_stay_out_of_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("MY_PASSWORD", "secret")
    out = tmp_path / "environment.json"
    body = "import json, os\ndef f(completions):\n    json.dump(dict(os.environ), open({!r}, 'w'))\n    return [0, 0]\n"
    rewards(write(tmp_path, body.format(str(out))))
    seen = json.loads(out.read_text())
    assert "secret" not in str(seen)
    assert seen["PATH"] == os.environ["PATH"]


# -- before the start --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("def g():\n    pass\n", "has no function f; its functions are g"),
        ("f = 1\n", "has no function f; its functions are none"),
        ("def f(:\n", "is no Python"),
    ],
)
def test_a_file_without_the_function_is_refused(body: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build({**GRPO, "reward_funcs": write(tmp_path, body)})


def test_a_file_is_not_run_before_the_start(tmp_path: Path) -> None:
    name = write(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\ndef f():\n    pass\n")
    config = build({**GRPO, "reward_funcs": name})
    assert not (tmp_path / "ran").exists()
    before = recorded_versions(config)
    assert [key for key in before if key == "the reward f of reward.py"]
    write(tmp_path, "def f():\n    pass\n")
    assert recorded_versions(config) != before
    assert "the reward f of reward.py" not in recorded_versions(config.model_copy(update={"objective": "dpo"}))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    assert "is not a regular file" in str(reward_mistakes([f"{tmp_path / 'pipe.py'}:f"], None)[0])
    absent = f"{tmp_path / 'absent.py'}:f"
    cause = "cannot be read: No such file or directory; check the path"
    assert str(reward_mistakes([absent], None)[0]) == f"reward_funcs={absent} {cause}"
    assert reward_mistakes(["exact_match", "math_verify"], None) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"reward_funcs": "exact"}, "'exact' is no reward"),
        ({"reward_funcs": "exact_match,exact_match"}, "two rewards have the same name"),
        ({"loss_spike_factor": 3.0}, "losses of sampled answers are around 0"),
        ({"reward_weights": "1,2"}, "2 weights for 1 rewards"),
        ({"max_completion_length": 1024}, "leaves no room for a prompt"),
        ({"torch_compile": True}, "compiled layers do not sample"),
        ({"overlong": "split"}, "half an answer"),
        ({"loss_type": "sigmoid"}, "use grpo, dr_grpo, dapo, gspo, rloo"),
        ({"beta": 0.1, "loss_type": "rloo"}, "divergence would be a part of the rewards"),
        ({"beta": 0.1, "random_init": True, "method": "full"}, "random weights are nothing to stay near to"),
        ({"beta": 0, "objective": "dpo"}, "beta=0 with objective=dpo: nothing would be learned; use more than 0"),
        ({"temperature": 0}, "greater than or equal to 0.01"),
        ({"num_generations": 1}, "greater than or equal to 2"),
        ({"dataset_format": "text"}, "takes chat"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build({**GRPO, **changes})


# -- a JSON Schema -----------------------------------------------------------------------------------------------------

PET = {
    "type": "object", "properties": {"name": {"type": "string"}, "age": {"$ref": "#/$defs/age"}}, "required": ["name"],
    "additionalProperties": False, "$defs": {"age": {"type": "integer", "minimum": 0}},
}  # fmt: skip


def schema_file(folder: Path, schema: object) -> str:
    path = folder / "schema.json"
    path.write_text(schema if isinstance(schema, str) else json.dumps(schema))
    return str(path)


def test_an_answer_fits_a_schema_or_does_not(tmp_path: Path) -> None:
    answers = {
        '{"name": "Rex", "age": 3}': 1.0, ' \n{"name": ""} ': 1.0, '{"name": "Rex", "age": -1}': 0.0,
        '{"name": "Rex", "age": 2.5}': 0.0, '{"age": 3}': 0.0, '{"name": "Rex", "colour": 1}': 0.0, "": 0.0, "Rex": 0.0,
        '```json\n{"name": "Rex"}\n```': 0.0, '{"name": "Rex"} and more': 0.0, '{"name": "a", "name": "b"}': 0.0,
        '{"name": NaN}': 0.0, "[" * 10**5: 0.0, "null": 0.0,
    }  # fmt: skip
    process = RewardProcess(["json_schema"], 60, schema_file(tmp_path, PET))
    rewards = process.compute([""] * len(answers), list(answers), {})["json_schema"]
    process.close()
    assert dict(zip(answers, rewards, strict=True)) == answers


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (None, "reward_schema is not set, and the reward json_schema needs it; name its file"),
        ("{", "is no JSON Schema: Expecting property name"),
        ('{"type": "object", "type": "array"}', "has a key twice in one object"),
        ({"type": "objekt"}, "is no JSON Schema: what stands at $.type does not fit anyOf"),
        ("[]", "is no object of JSON that describes an answer"),
        ("true", "is no object of JSON that describes an answer"),
        ({"$schema": 5}, "is no object of JSON that describes an answer"),
        ('{"const": NaN}', "is no JSON Schema: ValueError"),
        ({"pattern": "a{99999999999999999999}"}, "is no JSON Schema: OverflowError"),
        ({"$ref": "https://example.com/pet.json"}, "refers to 'https://example.com/pet.json', which it does not hold"),
        ({"items": {"$ref": "file:///etc/passwd"}}, "refers to 'file:///etc/passwd', which it does not hold"),
        ({"properties": {"a": {"$ref": "#/$defs/absent"}}}, "refers to '#/$defs/absent', which it does not hold"),
        ({"$ref": "#"}, "refers to itself without end"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema: object, sentence: str, tmp_path: Path) -> None:
    path = None if schema is None else schema_file(tmp_path, schema)
    with pytest.raises(ConfigError) as caught:
        build({**GRPO, "reward_funcs": "json_schema", "reward_schema": path})
    assert sentence in str(caught.value)
    assert "reward_schema" in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"q": {"$id": "#q", "type": "integer"}},
         "properties": {"age": {"$ref": "#q"}}},
        {"$schema": "http://json-schema.org/draft-04/schema#", "id": "http://example.com/pet",
         "definitions": {"age": {"type": "integer"}}, "properties": {"age": {"$ref": "#/definitions/age"}}},
        {"properties": {"age": {"$id": "https://example.com/age", "$defs": {"b": {"type": "integer"}},
                                "$ref": "#/$defs/b"}}},
        {"type": "object", "properties": {"age": {"type": "integer"}, "pups": {"items": {"$ref": "#"}}}},
        {"properties": {"age": {"type": "integer"}, "kind": {"const": {"$ref": "no reference"}}}},
        {"properties": {"age": {"type": "integer"}, "form": {"$ref": "https://json-schema.org/draft/2020-12/schema"}}},
    ],
)  # fmt: skip
def test_schemas_of_all_drafts_refer_to_their_parts(schema: object, tmp_path: Path) -> None:
    config = build({**GRPO, "reward_funcs": "json_schema", "reward_schema": schema_file(tmp_path, schema)})
    process = RewardProcess(["json_schema"], 60, config.reward_schema)
    rewards = process.compute([""] * 2, ['{"age": 3, "pups": [{}]}', '{"age": "three"}'], {})["json_schema"]
    process.close()
    assert rewards == [1.0, 0.0]


def test_numbers_too_large_to_divide_fit_no_schema(tmp_path: Path) -> None:
    """jsonschema raises OverflowError for them; a sampled answer must not end the run."""
    answers = ["9" * 400, "1e999", "0.25"]
    process = RewardProcess(["json_schema"], 60, schema_file(tmp_path, {"type": "number", "multipleOf": 0.01}))
    assert process.compute([""] * 3, answers, {})["json_schema"] == [0.0, 0.0, 1.0]
    process.close()


def test_a_schema_is_checked_again_at_a_resume_and_ignored_without_its_reward(tmp_path: Path) -> None:
    config = build({**GRPO, "reward_funcs": "json_schema", "reward_schema": schema_file(tmp_path, PET)})
    before = recorded_versions(config)
    assert "the reward_schema" in before
    schema_file(tmp_path, {**PET, "required": []})
    assert recorded_versions(config) != before
    other = build({**GRPO, "reward_schema": str(tmp_path / "schema.json")})
    assert [str(mistake) for mistake in ignored_choices(other)] == [
        "reward_schema is ignored: json_schema is not among reward_funcs"
    ]
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ConfigError, match="is not a regular file"):
        build({**GRPO, "reward_funcs": "json_schema", "reward_schema": str(tmp_path / "pipe.json")})
