"""TrainConfig and the three ways into it: every option documented, every mistake named, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.reference import options_table
from trainers.config.fields import fields as option_fields
from trainers.config.fields import sections
from trainers.config.labels import CHOICES, LABELS
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.parse import Request, dump_yaml, parse_request
from trainers.config.validation import build, ignored_choices
from trainers.config.yaml_file import read_yaml

BASE = {"model_name_or_path": "embedded", "dataset_name": "embedded"}
EVALUATED = {"eval_dataset_name": "embedded"}
ANSWERED = {**EVALUATED, "eval_generate_steps": 5, "eval_answer_tokens": 9}


def mistakes(values: dict) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(values)
    return caught.value.lines


def test_every_option_has_one_sentence_of_help_and_a_section() -> None:
    for section, fields in sections().items():
        assert section
        for name, field in fields.items():
            assert field.description, name
            assert field.description.endswith("."), name
            assert len(field.description) < 140, name


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lerning_rate": 1e-4}, "lerning_rate is not an option; did you mean learning_rate?"),
        ({"xyzzy": 1}, "xyzzy is not an option; `tunesmith train --help` lists all options"),
        ({"max_steps": 0}, "max_steps=0 is refused: input should be greater than or equal to 1 (steps)"),
        ({"packing": "perhaps"}, "packing='perhaps' is refused"),
        ({"learning_rate": "fast"}, "learning_rate='fast' is refused"),
        ({"learning_rate": float("nan")}, "learning_rate=nan is refused"),
        ({"method": "lorra"}, "method='lorra' is not a valid value; use 'full', 'lora' or 'qlora'"),
        ({"save_total_limit": 1}, "save_total_limit=1 is refused: input should be greater than or equal to 2"),
        ({"columns": {"promt": "q"}}, "columns.promt is not an option; did you mean columns.prompt?"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end=true without evaluation data"),
        ({"early_stopping_patience": 2}, "early_stopping_patience needs evaluations"),
        ({"lr_scaling": "linear"}, "lr_scaling=linear needs lr_scaling_batch_size"),
        ({"eval_dataset_name": "embedded", "eval_share": 0.1}, "eval_dataset_name and eval_share=0.1 are both set"),
        ({"merge_adapter": True, "method": "full"}, "merge_adapter=true with method=full"),
        ({"random_init": True}, "random_init=true with method=lora would export adapters without a base"),
        ({"resume_from_checkpoint": "auto"}, "resume_from_checkpoint=auto needs output_dir"),
        ({"report_to": "tensorbord"}, "report_to=tensorbord is not a tracker"),
        ({"lora_rank_pattern": "q_proj"}, "lora_rank_pattern=q_proj='' is refused: input should be a valid integer"),
        ({"lora_rank_pattern": "q_proj=0"}, "lora_rank_pattern=q_proj='0' is refused: input should be greater"),
        ({"lora_rank_pattern": {"q_proj": True}}, "lora_rank_pattern={'q_proj': True} is refused: value error, input"),
        (
            {"lora_rank_pattern": "q_proj=4,q_proj=8"},
            "lora_rank_pattern='q_proj=4,q_proj=8' is refused: value error",
        ),
        ({"lora_rank_pattern": "=4"}, "lora_rank_pattern='=4' is refused: value error, a number has no module"),
        ({"lora_alpha_pattern": "q_proj=nan"}, "lora_alpha_pattern=q_proj='nan' is refused: input should be a finite"),
        (
            {"lora_rank_pattern": "(?i)q_proj=8"},
            "lora_rank_pattern='(?i)q_proj=8' is refused: value error, (?i)q_proj is not",
        ),
        (
            {"lora_rank_pattern": "((a+)+)+x=8"},
            "lora_rank_pattern='((a+)+)+x=8' is refused: value error, ((a+)+)+x is not",
        ),
        ({"lora_alpha_pattern": "(=8"}, "lora_alpha_pattern='(=8' is refused: value error, ( is no regular expression"),
        ({"new_tokens": ["<a>", " "]}, "new_tokens=['<a>', ' '] is refused: value error, ' ' is blank"),
        ({"new_tokens": ["a\x1b[2J"]}, "new_tokens=['a\\x1b[2J'] is refused: value error, 'a\\x1b[2J' is blank, or"),
        ({"new_tokens": "<a>,<b>,<a>"}, "new_tokens='<a>,<b>,<a>' is refused: value error, <a> is there twice"),
        ({"new_tokens": "<a>", "objective": "distill", "teacher": "x"}, "new_tokens=<a> with objective=distill, whose"),
        ({"pad_vocab_to_multiple_of": 1}, "pad_vocab_to_multiple_of=1 is refused"),
        ({"pad_vocab_to_multiple_of": 8}, "pad_vocab_to_multiple_of=8 with method=lora: peft pads no base"),
        ({"lora_target_parameters": "experts.w", "lora_dropout": 0.1}, "lora_dropout=0.1 with lora_target_parameters"),
        ({"lora_target_parameters": "experts.w", "use_dora": True}, "use_dora=true with lora_target_parameters"),
        ({"lora_target_modules": "none"}, "lora_target_modules=none leaves nothing to adapt; use all-linear, or name"),
        ({"lora_target_parameters": "a", "method": "qlora"}, "lora_target_parameters=a with method=qlora, which"),
        *(
            ({"init_lora_weights": "pissa", **changes}, f"init_lora_weights=pissa with {line}")
            for changes, line in (
                ({"method": "qlora"}, "method=qlora: the residual is subtracted"),
                ({"use_dora": True}, "use_dora=true, whose magnitudes"),
                ({"lora_target_parameters": "experts.w"}, "lora_target_parameters: stacks have no"),
                ({"export_dtype": "bfloat16"}, "export_dtype=bfloat16, which would round away"),
            )
        ),
        ({"init_lora_weights": "loftq", "method": "lora"}, "init_lora_weights=loftq with method=lora, whose base"),
        (
            {"init_lora_weights": "loftq", "method": "qlora", "objective": "grpo", "beta": 0.1},
            "init_lora_weights=loftq with a penalty of the KL divergence",
        ),
        ({"neftune_noise_alpha": 5, "objective": "dpo"}, "neftune_noise_alpha=5.0 with objective=dpo: noise was tried"),
        ({"neftune_noise_alpha": -1}, "neftune_noise_alpha=-1 is refused"),
        *(
            ({"method": "full", "qat": "int4", **changes}, f"qat=int4 with {line}")
            for changes, line in (
                ({"method": "lora"}, "method=lora: adapters would not be rounded with their base"),
                ({"method": "qlora"}, "method=qlora: adapters would not"),
                ({"mixed_precision": "fp8"}, "mixed_precision=fp8, which rounds the same layers"),
                ({"mixed_precision": "bf16", "master_weights": False}, "master_weights=false, whose updates"),
                ({"torch_compile": True}, "torch_compile=true: they were not tried"),
                ({"objective": "grpo"}, "objective=grpo: it was not tried with sampled"),
            )
        ),
        ({"qat": "int3"}, "qat='int3' is not a valid value; use 'none', '8da4w'"),
        ({"qat": "int4", "method": "full", "qat_group_size": 4}, "qat_group_size=4 is refused"),
        ({"load_in_8bit": True}, "load_in_8bit is not offered: LLM.int8 rounds the inputs of a layer too"),
        ({"load_in_4bit": True}, "load_in_4bit is not an option; use --method qlora"),
        ({"method": "qlora", "use_dora": True}, "use_dora=true with method=qlora, which would dequantize"),
        ({"method": "qlora", "modules_to_save": "lm_head"}, "modules_to_save=lm_head with method=qlora"),
        (
            {"method": "full", "freeze": "norm", "mixed_precision": "fp8"},
            "freeze=norm with mixed_precision=fp8, which only trained layers compute in; use bf16",
        ),
        ({"eval_generate_steps": 5, "eval_answer_tokens": 9}, "eval_generate_steps=5 needs evaluation data, whose"),
        ({"eval_generate_steps": 5, **EVALUATED}, "eval_answer_tokens=0 with eval_generate_steps=5: no answer would"),
        ({**ANSWERED, "objective": "reward"}, "objective=reward with eval_generate_steps=5: its model scores"),
        ({**ANSWERED, "torch_compile": True}, "torch_compile=true with eval_generate_steps=5: compiled layers"),
        ({"eval_generate_steps": -1}, "eval_generate_steps=-1 is refused"),
        (
            {**EVALUATED, "eval_only": True, "eval_answer_tokens": 9, "torch_compile": True},
            "eval_only=true with torch_co",
        ),
        ({**ANSWERED, "eval_generate_prompts": 0}, "eval_generate_prompts=0 is refused"),
        ({**ANSWERED, "eval_generate_prompts": 101}, "eval_generate_prompts=101 is refused"),
        ({"run_name": "a\nb"}, "run_name='a\\nb' is refused"),
        ({"run_name": "x" * 300}, "run_name="),
    ],
)
def test_a_mistake_is_named(changes: dict, line: str) -> None:
    found = mistakes(BASE | changes)
    assert len(found) == 1
    assert found[0].startswith(line)


def test_all_mistakes_at_once_clashes_too() -> None:
    names = [
        "lora_r",
        "max_length",
        "lerning_rate is not an option",
        "load_best_model_at_end",
        "columns.foo is not an option",
    ]
    wrong = BASE | {"lora_r": -1, "lerning_rate": 1, "max_length": "long", "load_best_model_at_end": True}
    found = mistakes(wrong | {"columns": "foo=a", "report_to": "x"})
    assert [line.partition("=")[0].partition(";")[0] for line in found] == [*names, "report_to"]


def test_missing_options_say_how_to_give_them() -> None:
    assert [line.split()[0] for line in mistakes({})] == ["model_name_or_path", "dataset_name"]


def test_accumulation_is_derived_and_a_remainder_refused_with_the_arithmetic() -> None:
    config = build(BASE | {"global_batch_size": 30, "per_device_train_batch_size": 4})
    with pytest.raises(ConfigError, match=r"global_batch_size=30 is not divisible .*=4 x 4 data-parallel ranks = 16"):
        config.accumulation_steps(4)
    assert build(BASE | {"global_batch_size": 48, "per_device_train_batch_size": 4}).accumulation_steps(4) == 3


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 16))
def test_accumulation_times_ranks_times_rows_is_the_global_batch(total: int, micro: int, ranks: int) -> None:
    config = build(BASE | {"global_batch_size": total, "per_device_train_batch_size": micro})
    try:
        assert config.accumulation_steps(ranks) * micro * ranks == total
    except ConfigError:
        assert total % (micro * ranks) != 0


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rate_scaling(rule: str, factor: float) -> None:
    config = build(
        BASE | {"lr_scaling": rule, "lr_scaling_batch_size": 8, "global_batch_size": 32, "learning_rate": 1e-3}
    )
    assert config.scaled_learning_rate() == pytest.approx(1e-3 * factor)


def test_idle_choices_are_warned_of() -> None:
    config = build(
        BASE
        | {"method": "full", "lora_r": 8, "max_steps": 5, "num_train_epochs": 3, "warmup_steps": 2, "warmup_ratio": 0.1}
    )
    assert [str(mistake).partition(" ")[0] for mistake in ignored_choices(config)] == [
        "lora_r",
        "num_train_epochs=3.0",
        "warmup_ratio=0.1",
    ]


@pytest.mark.parametrize(
    ("changes", "ignored"),
    [
        ({}, []),
        ({"eval_generate_steps": 0}, ["eval_generate_prompts", "eval_answer_tokens"]),
        ({"eval_only": True}, ["eval_generate_prompts", "eval_generate_steps"]),
        ({"eval_only": True, "eval_generate_steps": 0}, ["eval_generate_prompts"]),
    ],
)
def test_options_of_answers_without_answers_are_ignored(changes: dict, ignored: list[str]) -> None:
    config = build(BASE | ANSWERED | {"eval_generate_prompts": 3} | changes)
    assert sorted(mistake.option for mistake in ignored_choices(config)) == sorted(ignored)


@pytest.mark.parametrize(("timeout", "hang", "warned"), [(20, 600, True), (600, 600, True), (601, 600, False),
                                                       (20, 0, False), (None, 600, False)])  # fmt: skip
def test_a_timeout_that_comes_before_the_hanging_rank_is_named_is_a_warning(
    timeout: int | None, hang: int, warned: bool
) -> None:
    lines = [str(line) for line in ignored_choices(build(BASE | {"ddp_timeout": timeout, "hang_timeout": hang}))]
    assert any(f"ddp_timeout={timeout} is not above hang_timeout={hang}" in line for line in lines) is warned


def test_every_option_of_adapters_is_ignored_without_adapters() -> None:
    adapters: dict[str, object] = {"lora_rank_pattern": "q_proj=4", "lora_alpha_pattern": "q_proj=4"}
    adapters |= {
        "modules_to_save": "lm_head",
        "use_dora": True,
        "lora_target_parameters": "experts.w",
        "init_lora_weights": "pissa",
    }
    assert [mistake.option for mistake in ignored_choices(build(BASE | {"method": "full"} | adapters))] == [
        "init_lora_weights",
        "lora_alpha_pattern",
        "lora_rank_pattern",
        "lora_target_parameters",
        "modules_to_save",
        "use_dora",
    ]
    lora = build(
        BASE | {"method": "lora", "freeze": "norm"} | adapters | {"use_dora": False, "init_lora_weights": "default"}
    )
    assert [mistake.option for mistake in ignored_choices(lora)] == ["freeze"]


def test_flags_yaml_and_preset_read_the_same(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("learning_rate: 1e-4\npacking: false\ncolumns: {prompt: q}\nreport_to: [tensorboard]\n")
    words = ["--learning_rate", "1e-4", "--packing", "false", "--columns", "prompt=q", "--report_to", "tensorboard"]
    by_file = Request(preset="tiny-lora", config=str(path)).resolve()
    by_flags = parse_request(["--preset", "tiny-lora", *words]).resolve()
    assert by_file == by_flags
    assert by_flags.learning_rate == 1e-4


def test_later_wins_preset_then_file_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("preset: tiny-lora\nlora_r: 4\nseed: 5\n")
    config = parse_request(["--config", str(path), "--seed", "6"]).resolve()
    assert (config.preset, config.lora_r, config.seed, config.dataset_name) == ("tiny-lora", 4, 6, "embedded")


def test_dumped_yaml_reads_back_the_same(tmp_path: Path) -> None:
    options = ["--run_name", "it's “quoted” ünï", "--columns", "prompt=a b,completion=c", "--max_steps", "3"]
    config = parse_request(["--preset", "tiny-full", *options]).resolve()
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    assert Request(config=str(path)).resolve() == config


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--preset", "tini-lora"], "preset=tini-lora is unknown; did you mean tiny-lora?"),
        (["--learning_rate"], "--learning_rate has no value"),
        (["--help"], "help is not an option; `tunesmith train --help` lists all options"),
        (["tiny-lora"], "unexpected argument 'tiny-lora'"),
        (["--preset", "tiny-lora", "--pack", "true"], "pack is not an option; did you mean packing?"),
        (["--config", "/no/such.yaml"], "cannot read /no/such.yaml: No such file or directory"),
    ],
)
def test_wrong_flags(argv: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_request(argv).resolve()
    assert caught.value.lines[0].startswith(line)


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['touch /tmp/x']",
        "a: &x [1]\nb: *x",
        "seed: 1\nseed: 2",
        "- 1\n- 2",
        "seed: [1",
        "1: 2",
        "a: " + "[" * 5000,
    ],
)
def test_hostile_or_broken_yaml_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        read_yaml(path)


def test_the_reference_table_is_current() -> None:
    """It also freezes the list of options: a new one is a decision that shows in the diff of docs/OPTIONS.md."""
    committed = (Path(__file__).parents[3] / "docs" / "OPTIONS.md").read_text(encoding="utf-8")
    assert committed == options_table()
    assert not {"strategy", "gpus", "num_processes"} & set(TrainConfig.model_fields)


def test_every_option_has_a_label_in_words() -> None:
    labels = {option.name: option.label for option in option_fields()}
    assert {name for name, label in labels.items() if label == name or "_" in label or not label[0].isupper()} == set()
    assert len(set(labels.values())) == len(labels), "two options would look alike"
    assert LABELS.keys() == labels.keys(), "labels of options that are no more"
    for name, words in CHOICES.items():
        assert words.keys() <= set(next(option for option in option_fields() if option.name == name).choices)
