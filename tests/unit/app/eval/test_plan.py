"""What `tunesmith eval` evaluates, on which rows, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from app.eval.plan import EVAL, Plan, make_plan
from tests.made_runs import add_checkpoint, made_run
from trainers.config.mistakes import ConfigError
from trainers.embedded import BASE_DIR, GENERAL_DIR
from trainers.run.folder import RunFolder, write_json


def plan(*words: str) -> Plan:
    args = EVAL.read(list(words))
    assert args is not None
    return make_plan(args)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with an adapter and a checkpoint, and one of all weights without evaluation data."""
    monkeypatch.chdir(tmp_path)
    embedded: dict[str, Any] = {"model_name_or_path": "embedded", "dataset_name": "embedded"}
    first = made_run(tmp_path / "runs", "first", config={
        **embedded, "method": "lora", "eval_dataset_name": "embedded", "max_eval_samples": 7, "learning_rate": 1e-3,
        "max_length": 300, "lora_r": 5,
    })  # fmt: skip
    add_checkpoint(first, 20)
    first.model.mkdir()
    write_json(first.model / "adapter_config.json", adapter())
    (first.model / "adapter_model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    second = made_run(tmp_path / "runs", "second", config={**embedded, "method": "full"})
    shutil.copytree(BASE_DIR, second.model)
    return tmp_path


def adapter() -> dict[str, Any]:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(BASE_DIR), "r": 5,
        "lora_alpha": 32, "target_modules": ["q_proj"], "bias": "none",
    }  # fmt: skip


def test_a_run_is_compared_with_its_base_on_its_own_rows(runs: Path) -> None:
    prepared = plan("first", "first@step-00000020")
    assert [candidate.label for candidate in prepared.candidates] == ["base", "first", "first@step-00000020"]
    base, tuned, checkpoint = prepared.candidates
    config = base.job().config
    assert (config.model_name_or_path, config.from_run, config.method, config.lora_r) == ("embedded", None, "lora", 1)
    assert (config.eval_only, config.eval_answer_tokens, config.objective) == (True, 256, "sft")
    assert (config.eval_dataset_name, config.max_eval_samples, config.max_length) == ("embedded", 7, 300)
    assert tuned.options["from_run"] == str(runs / "runs/first/model")
    assert checkpoint.checkpoint is not None
    assert (checkpoint.checkpoint[0].id, checkpoint.checkpoint[1]) == ("first", "step-00000020")
    assert "from_run" not in checkpoint.options, "it is exported first"
    folders = [candidate.options["output_dir"] for candidate in prepared.candidates]
    assert len(set(folders)) == 3
    assert not prepared.folder.exists()


SHAPES_ROWS = (
    "dataset_name", "dataset_query", "eval_dataset_name", "eval_split", "eval_share", "dataset_format", "columns",
    "sample_by", "assistant_only_loss", "thoughts", "template_date", "max_length", "overlong", "packing", "bad_rows",
    "max_eval_samples", "mixed_precision", "num_hidden_layers", "rope_scaling", "new_tokens", "trust_remote_code",
    "attn_implementation",
)  # fmt: skip


@pytest.mark.parametrize("words", [(), ("--dataset_name", "mine.jsonl", "--chat_template", "own.jinja")])
def test_what_shapes_the_rows_is_the_same_for_all_models(runs: Path, words: tuple[str, ...]) -> None:
    """Also where a preset or another run says otherwise; what the command line says holds for all."""
    (runs / "mine.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (runs / "own.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    first = made_run(runs / "runs", "pre", config={
        "preset": "tiny-pretrain", "model_name_or_path": "embedded", "dataset_name": "embedded", "method": "lora",
        "eval_dataset_name": "embedded", "overlong": "drop", "assistant_only_loss": False,
        "template_date": "2025-01-01", "trust_remote_code": True, "max_length": 200,
    })  # fmt: skip
    shutil.copytree(runs / "runs/first/model", first.model)
    configs = [candidate.job().config for candidate in plan("pre", "first", "embedded", *words).candidates]
    assert len(configs) == 4
    for name in SHAPES_ROWS:
        assert len({str(getattr(config, name)) for config in configs}) == 1, name
    assert (configs[0].overlong, configs[0].assistant_only_loss, configs[0].template_date) == (
        "drop",
        False,
        "2025-01-01",
    )
    assert not configs[0].trust_remote_code, "code of a repository runs only if the command line says so"
    if words:
        assert {config.chat_template for config in configs} == {str(runs / "own.jinja")}
    else:
        assert configs[0].preset is None


def test_the_base_of_a_run_in_4_bits_that_began_with_another_is_in_4_bits(runs: Path) -> None:
    folder = runs / "runs/second/model"
    made_run(runs / "runs", "quantized", config={
        "model_name_or_path": str(folder), "from_run": str(folder), "dataset_name": "embedded", "method": "qlora",
        "eval_dataset_name": "embedded", "new_tokens": "<a>",
    })  # fmt: skip
    add_checkpoint(RunFolder(runs / "runs/quantized"), 20)
    base, checkpoint = plan("quantized").candidates
    config = base.job().config
    assert (config.method, config.model_name_or_path, config.new_tokens) == ("qlora", str(folder), ["<a>"])
    assert checkpoint.label == "quantized@step-00000020"


def test_a_model_is_evaluated_once(runs: Path) -> None:
    labels = [
        candidate.label
        for candidate in plan("second", "first", "--base", "first", "--dataset_name", "embedded").candidates
    ]
    assert labels == ["first", "second"]
    folders = [runs / name / "model" for name in ("a", "b")]
    for folder in folders:
        shutil.copytree(BASE_DIR, folder)
    several = plan(*map(str, folders), "--base", "none", "--dataset_name", "embedded").candidates
    assert [candidate.label for candidate in several] == ["a/model", "b/model"]


def test_other_rows_take_the_place_of_those_of_the_run(runs: Path) -> None:
    (runs / "mine.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    options = ("--dataset_name", "mine.jsonl", "--base", "none", "--answer_tokens", "9")
    (only,) = plan("second", *options).candidates
    config = only.job().config
    assert config.eval_dataset_name == str(runs / "mine.jsonl")
    assert (config.max_eval_samples, config.eval_answer_tokens) == (None, 9)
    assert (config.method, config.lora_r, config.model_name_or_path) == ("lora", 1, str(runs / "runs/second/model"))
    by_folder = plan(str(BASE_DIR), *options).candidates[0].job().config
    assert by_folder.model_name_or_path == str(BASE_DIR)
    other = plan("first", "--dataset_name", "mine.jsonl", "--base", "embedded").candidates
    assert [candidate.label for candidate in other] == ["embedded", "first"]
    assert other[0].job().config.max_eval_samples is None, "those of the run are for its own rows"


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ((), ["there is no model to evaluate"]),
        (("third",), ["there is no run 'third'"]),
        (("first@step-00000010",), ["run first has no weights 'step-00000010'; it has model, step-00000020"]),
        (("second",), ["dataset_name is missing: run second has no evaluation data"]),
        (("embedded",), ["dataset_name is missing: no run says which rows to evaluate"]),
        (
            ("first", "--learning_rate", "1", "--method", "full", "--detach", "--tp_size", "2", "--config", "x.yaml"),
            ["method=full is set by eval", "learning_rate has no part", "config has no part", "tp_size=2 has no part",
             "--detach has no part"],
        ),
        (("first", "--metrics", "f2", "--answer_tokens", "-1"), ["--answer_tokens='-1' is not", "metrics=f2 is no"]),
        (("first", "--metrics", "loss,f1", "--answer_tokens", "0"), ["metrics=f1 with --answer_tokens 0"]),
        (("first@step-00000020", "--base", "none", "--strategy", "tp"), ["eval_only=true with tp 2"]),
        (("first", "--strategy", "tp"), ["eval_only=true with tp 2: only data-parallel ranks evaluate row by row"]),
    ],
)  # fmt: skip
def test_what_cannot_be_evaluated_is_refused(runs: Path, words: tuple[str, ...], lines: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(*words)
    for line in lines:
        assert line in "\n".join(refused.value.lines)
    assert not list((runs / "runs").glob("eval-*"))


def test_samples_for_forgetting_are_other_rows_of_the_same_model(runs: Path) -> None:
    (runs / "mine.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (runs / "own.txt").write_text("What was known before.\n")
    argv = ("--forgetting", "--forgetting_dataset", "own.txt", "--dataset_name", "mine.jsonl", "--columns", "prompt=x")
    prepared = plan("first", *argv, "--seed", "9")
    assert [sample.name for sample in prepared.samples] == ["general text", "own"]
    for candidate in prepared.candidates:
        evaluated, own = candidate.job().config, candidate.job(sample="own").config
        assert own.eval_dataset_name == str(runs / "own.txt")
        assert (own.columns, own.max_eval_samples, own.eval_answer_tokens) == ({}, None, 0)
        for name in ("model_name_or_path", "from_run", "method", "max_length", "mixed_precision", "seed", "strategy"):
            assert getattr(own, name, None) == getattr(evaluated, name, None), name
        general = candidate.job(sample="general text").config
        assert general.eval_dataset_name == str(GENERAL_DIR / "passages.jsonl")
        assert len({str(config.output_dir) for config in (evaluated, own, general)}) == 3
    assert plan("first").samples == []


def test_undesirable_answers_of_a_run_with_labels_are_told_apart(runs: Path) -> None:
    """By their labels, on its own rows alone: others may have a column of that name."""
    of_kto = made_run(runs / "runs", "judged", config={"objective": "kto", "eval_dataset_name": "rows.jsonl"})
    shutil.copytree(BASE_DIR, of_kto.model)
    formats = [
        plan(*words).candidates[0].options.get("dataset_format")
        for words in ((of_kto.id,), (of_kto.id, "--dataset_name", "embedded"), ("first",))
    ]
    assert formats == ["labelled", None, "auto"]
