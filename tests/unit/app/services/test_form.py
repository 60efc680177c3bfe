"""The model behind the Train page: fields, mistakes by field, derived numbers, and a command that a shell can read."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import app.hardware
from app.hardware import Devices, Gpu
from app.launch.foreground import write_folder
from app.services.address import choices_of
from app.services.choices import GpuChoice, gpu_choices, strategy_choices
from app.services.data import data_config
from app.services.fields import COMMON, as_texts
from app.services.form import (
    Preview,
    by_field,
    from_run,
    load_yaml,
    preview,
    preview_request,
    read_text,
)
from app.services.starting_values import differences, starting_values
from tests.made_runs import made_run
from trainers.config.fields import fields, text_of
from trainers.config.local_paths import absolute_paths
from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.options import TrainConfig
from trainers.config.parse import dump_yaml, parse_request
from trainers.embedded import BASE_DIR
from trainers.run.folder import RunFolder, register
from trainers.run.from_run import resolve_request
from trainers.strategy.strategy import from_launcher, resolve, strategy_names

pytestmark = pytest.mark.usefixtures("elsewhere")
CPU: dict[str, Any] = {"preset": "tiny-lora", "num_processes": 2}


# -- fields ------------------------------------------------------------------------------------------------------------


def test_every_option_is_a_field_with_its_docstring() -> None:
    known = {one.name: one for one in fields()}
    assert set(known) == set(TrainConfig.model_fields) - {"preset"}
    assert known["learning_rate"].kind == "float"
    assert known["learning_rate"].limits == "above 0, at most 10"
    assert known["max_steps"].optional
    assert known["max_steps"].limits == "steps, at least 1"
    assert (known["packing"].kind, known["packing"].default) == ("bool", "true")
    assert known["mixed_precision"].choices == ("no", "fp16", "bf16", "fp8")
    assert (known["columns"].kind, known["report_to"].kind) == ("map", "list")
    assert known["model_name_or_path"].default is None
    assert set(COMMON) <= {one.name for one in fields()}
    assert all(one.help for one in fields())


@pytest.mark.parametrize("preset", [None, "tiny-lora", "qwen3-8b-qlora"])
def test_an_untouched_form_says_nothing(preset: str | None) -> None:
    start = starting_values(preset)
    assert differences(start, preset) == {}
    as_shown = {name: "" if text == "none" and name == "max_steps" else text for name, text in start.items()}
    assert differences(as_shown, preset) == {}
    assert differences({**start, "packing": False, "learning_rate": " 1e-3 "}, preset) == {
        "packing": "false", "learning_rate": "1e-3"
    }  # fmt: skip


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "launch", "field"),
    [
        ({"learning_rate": "abc"}, {}, "learning_rate"),
        ({"global_batch_size": "31"}, {}, "global_batch_size"),
        ({"packing": "perhaps"}, {}, "packing"),
        ({"columns": "foo=bar"}, {}, "columns"),
        ({"early_stopping_patience": "2"}, {}, "early_stopping_patience"),
        ({"run_name": "a\nb"}, {}, "run_name"),
        ({"run_name": "a\ud800b"}, {}, "run_name"),
        ({"run_name": "x" * 5000}, {}, "run_name"),
        ({"seed": 10**5000}, {}, "seed"),
        ({"seed": {"a": {}}}, {}, "seed"),
        ({"nonsense": "1"}, {}, ""),
        ({"trust_remote_code": "yes"}, {}, "trust_remote_code"),
        ({}, {"preset": "nope"}, "preset"),
        ({}, {"strategy": "nope"}, "strategy"),
        ({}, {"strategy": "hsdp"}, "strategy"),
        ({}, {"strategy": "/dev/null/x.yaml"}, "strategy"),
        ({}, {"gpus": "7"}, "gpus"),
        ({}, {"gpus": [{"a": 1}]}, "gpus"),
        ({}, {"num_processes": "many"}, "gpus"),
        ({}, {"num_processes": 10**6}, "gpus"),
    ],
)
def test_a_mistake_stands_under_its_field(values: dict[str, Any], launch: dict[str, Any], field: str) -> None:
    shown = preview(values, **{**CPU, **launch})
    assert list(shown.errors) == [field]
    assert shown.job is None
    assert (shown.yaml, shown.command, shown.numbers) == ("", "", None)
    assert all(len(str(one)) < 3000 and "\n" not in str(one) for one in shown.mistakes)


def test_a_field_left_empty_is_none_in_the_command() -> None:
    """As an empty argument the command line would refuse it."""
    form = preview({"eval_dataset_name": "", "max_train_samples": ""}, preset="tiny-lora")
    assert form.errors == {}
    argv = shlex.split(form.command)
    assert "" not in argv
    assert argv[argv.index("--eval_dataset_name") + 1] == "none"


def test_all_mistakes_come_at_once() -> None:
    values = {"learning_rate": "abc", "packing": "x", "dataset_name": "/etc/passwd"}
    shown = preview(values, preset="tiny-lora", strategy="nope", num_processes="x", roots=[Path.cwd()])
    assert set(shown.errors) == {"learning_rate", "packing", "dataset_name", "strategy", "gpus"}
    assert set(preview({}).errors) == {"model_name_or_path", "dataset_name"}


def test_no_page_reads_or_runs_an_objective_in_a_file(tmp_path: Path) -> None:
    """Its errors would tell which files there are, and what classes are in them."""
    (tmp_path / "own.py").write_text("class Secret: spec = {'like': 'dpo'}\n")
    for objective in (f"{tmp_path}/own.py:Secret", f"{tmp_path}/own.py:Other", f"{tmp_path}/none.py:Other"):
        values = {"objective": objective, "model_name_or_path": "embedded", "dataset_name": "embedded"}
        shown = preview(values, **CPU, roots=[tmp_path])
        assert list(shown.errors) == ["objective"]
        assert "is a file of code, which no page runs" in str(shown.mistakes[0])
        assert shown.job is None
        with pytest.raises(ConfigError) as caught:
            data_config(values, roots=[tmp_path])
        assert [mistake.option for mistake in caught.value.mistakes] == ["objective"]
        assert "is a file of code, which no page runs" in str(caught.value)
    assert preview({**values, "objective": f"{tmp_path}/own.py:Secret"}, **CPU).job, (
        "control: without roots, it is read"
    )


@pytest.mark.parametrize("line", ["reward_funcs: [{}/own.py:reward]", "objective: {}/own.py:Own", "chat_template: {}"])
def test_no_page_reads_what_a_yaml_names_outside(line: str, tmp_path: Path) -> None:
    """Its errors would tell what is in a file."""
    text = "model_name_or_path: embedded\ndataset_name: embedded\n" + line.format(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_yaml(text, [Path.cwd() / "runs"])
    assert "no page runs" in str(caught.value) or "outside" in str(caught.value) or "not in" in str(caught.value)
    assert "cannot be read" not in str(caught.value)


@pytest.mark.parametrize("separator", ["", "exact_match,", "exact_match , "])
def test_no_page_reads_or_runs_a_reward_in_a_file(separator: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def reward(completions): return [0] * len(completions)\n")
    values = {"model_name_or_path": "embedded", "dataset_name": "embedded", "objective": "grpo",
              "max_completion_length": 64}  # fmt: skip
    rewards = f"{separator}{tmp_path}/own.py:reward"
    for value in (rewards, [name.strip() for name in rewards.split(",")]):
        shown = preview({**values, "reward_funcs": value}, **CPU, roots=[tmp_path])
        assert list(shown.errors) == ["reward_funcs"]
        assert "is a file of code, which no page runs" in str(shown.mistakes[0])
        with pytest.raises(ConfigError) as caught:
            data_config({**values, "reward_funcs": value}, roots=[tmp_path])
        assert "is a file of code, which no page runs" in str(caught.value)
    assert preview({**values, "reward_funcs": rewards}, **CPU).job, "control: without roots, it is read"
    assert preview({**values, "reward_funcs": "exact_match"}, **CPU, roots=[tmp_path]).job


def test_no_page_chooses_where_a_run_sends_requests() -> None:
    values = {"model_name_or_path": "embedded", "dataset_name": "embedded", "objective": "grpo",
              "max_completion_length": 64}  # fmt: skip
    for value in ("http://127.0.0.1:8000", " http://user:secret@127.0.0.1:8000"):
        shown = preview({**values, "sampler_url": value}, **CPU, roots=[Path.cwd()])
        assert list(shown.errors) == ["sampler_url"]
        assert "is an address that the run sends requests to, which no page chooses" in str(shown.mistakes[0])
        assert "secret" not in str(shown.mistakes[0])
        with pytest.raises(ConfigError, match="which no page chooses"):
            load_yaml(
                "\n".join(f"{name}: {text}" for name, text in {**values, "sampler_url": value}.items()), [Path.cwd()]
            )
    assert preview({**values, "sampler_url": "http://127.0.0.1:8000"}, **CPU).job, "control: from a terminal"
    for value in ("", "none"):
        assert preview({**values, "sampler_url": value}, **CPU, roots=[Path.cwd()]).job, "control: not set"


def test_a_refused_path_is_not_called_missing() -> None:
    shown = preview({"model_name_or_path": "/etc", "dataset_name": "embedded"}, num_processes=1, roots=[Path.cwd()])
    assert list(shown.errors) == ["model_name_or_path"]
    assert len(shown.mistakes) == 1


def test_a_mistake_is_shown_at_the_field_of_its_option() -> None:
    mistakes = {
        "dataset_name": Mistake("dataset_name", "seed=3.jsonl", "does not exist", "check the path"),
        "columns": Mistake("columns.promt", None, "is not an option"),
        "gpus": Mistake("num_processes", "x", "is not a number"),
        "strategy": Mistake("mixed_precision", "fp16", "is refused", source="ddp.yaml"),
        "": Mistake("strange", None, "names seed, and is not a field"),
    }
    assert by_field(mistakes.values()) == {field: [mistake] for field, mistake in mistakes.items()}


def test_nothing_is_written() -> None:
    preview({}, **CPU)
    assert list(Path.cwd().iterdir()) == []


def test_a_run_to_start_from_by_id_or_path_within_the_allowed_folders(tmp_path: Path) -> None:
    run = made_run(tmp_path / "runs", "sft", config={"method": "lora", "lora_r": 8})
    run.model.mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(BASE_DIR), "r": 8, "lora_alpha": 32.0,
               "target_modules": ["q_proj"]}  # fmt: skip
    (run.model / "adapter_config.json").write_text(json.dumps(adapter))
    save_file({"a": np.zeros(2, np.float32)}, run.model / "adapter_model.safetensors")
    for name in ("sft", str(run.path)):
        shown = preview({"from_run": name}, **CPU, roots=[Path.cwd()])
        assert shown.job, shown.errors
        assert (shown.job.config.lora_r, shown.job.config.from_run) == (8, str(run.model))
        assert f"--from_run {run.model}" in shown.command
        again = resolve_request(parse_request(shlex.split(shown.command.partition("train.py ")[2])))
        assert absolute_paths(again) == shown.job.config
    inside = [tmp_path / "data"]
    register(run)  # then its id is known everywhere
    assert "from_run" in preview({"from_run": str(run.path)}, **CPU, roots=inside).errors
    assert "from_run" in preview({"from_run": "sft", "runs_dir": str(inside[0])}, **CPU, roots=inside).errors


def test_a_teacher_by_id_or_path_within_the_allowed_folders(tmp_path: Path) -> None:
    run = made_run(tmp_path / "runs", "big", config={"method": "full"})
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    distill = {"objective": "distill"}
    for name in ("big", str(run.path), str(run.model)):
        shown = preview({**distill, "teacher": name}, **CPU, roots=[Path.cwd()])
        assert shown.job, shown.errors
        assert shown.job.config.teacher == str(run.model)
        assert f"--teacher {run.model}" in shown.command
    inside = [tmp_path / "data"]
    register(run)
    hub = {"teacher": "owner/name", "runs_dir": str(inside[0])}
    assert preview({**distill, **hub}, **CPU, roots=inside).job
    assert "teacher" in preview({**distill, "teacher": str(run.path)}, **CPU, roots=inside).errors
    assert "teacher" in preview({**distill, "teacher": "big", "runs_dir": str(inside[0])}, **CPU, roots=inside).errors


def test_the_base_of_an_adapter_stays_within_the_allowed_folders(tmp_path: Path) -> None:
    """The folder of an adapter may be uploaded, and its config names any folder."""
    folder, secret = tmp_path / "data" / "adapter", tmp_path / "secret"
    folder.mkdir(parents=True)
    secret.mkdir()
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(secret), "r": 8, "lora_alpha": 8.0,
               "target_modules": ["q_proj"]}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    save_file({"a": np.zeros(2, np.float32)}, folder / "adapter_model.safetensors")
    values = {"from_run": str(folder), "runs_dir": str(tmp_path / "data")}
    assert "model_name_or_path" in preview(values, **CPU, roots=[tmp_path / "data"]).errors
    assert not preview(values, **CPU, roots=[tmp_path]).errors


def test_remote_code_only_where_it_was_allowed() -> None:
    assert preview({"trust_remote_code": True}, **CPU).job is None
    assert preview({"trust_remote_code": True}, **CPU, remote_code=True).job is not None


@pytest.mark.parametrize("request_", [None, [], "x", {"x": 1}, {"options": []}, {"options": {}, "config": "x"}])
def test_a_script_sends_one_object(request_: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        preview_request(request_, tmp_path)
    assert preview_request({"preset": {"a": 1}}, tmp_path).job is None


def test_a_script_that_asks_for_slurm_is_refused_and_trained_nowhere(tmp_path: Path) -> None:
    for request in ({"on": "slurm"}, {"slurm": {"nodes": "2"}}, {"nodes": "2"}):
        with pytest.raises(ConfigError, match=f"the request has {next(iter(request))!r}; its keys are"):
            preview_request({"preset": "tiny-lora", **request}, tmp_path)
    shown = preview_request({"preset": "tiny-lora", "options": {"nodes": "2", "on": "slurm"}}, tmp_path)
    assert shown.job is None
    assert {mistake.option for mistake in shown.mistakes} == {"nodes", "on"}


def test_a_script_gets_what_a_person_sees(tmp_path: Path) -> None:
    request = {"preset": "tiny-lora", "strategy": "fsdp2", "num_processes": 2, "options": {"max_steps": 5}}
    shown = preview_request(request, tmp_path / "runs", [tmp_path])
    told = json.loads(json.dumps(shown.as_json()))
    assert told["errors"] == {}
    assert told["numbers"]["total_steps"] == 5
    assert shown.job
    assert shown.job.run.path.parent == tmp_path / "runs"


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_derived_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.services.form.known_rows", lambda config: 100)
    shown = preview({"global_batch_size": "32", "per_device_train_batch_size": 4}, **CPU)
    assert shown.numbers
    assert (shown.numbers.accumulation_steps, shown.numbers.data_parallel_size) == (4, 2)
    assert shown.numbers.tokens_per_step == 32 * 256
    assert (shown.numbers.steps_per_epoch, shown.numbers.total_steps) == (4, 4)
    shown = preview({"max_steps": "7", "lr_scaling": "linear", "lr_scaling_batch_size": "8"}, **CPU)
    assert shown.numbers
    assert (shown.numbers.epochs, shown.numbers.total_steps) == (None, 7)
    assert shown.numbers.learning_rate == pytest.approx(6e-3)
    assert shown.job
    assert shown.yaml == dump_yaml(shown.job.config)


def test_warnings_are_shown() -> None:
    shown = preview({"max_steps": "7", "num_train_epochs": "3", "lora_dropout": "0.1"}, **CPU)
    assert any("num_train_epochs" in line for line in shown.warnings)
    assert any("lora_dropout" in line for line in shown.warnings)


def test_it_is_quick() -> None:
    preview({}, **CPU)
    taken = []
    for number in range(9):
        began = time.process_time()
        preview({"learning_rate": f"{number + 1}e-4"}, **CPU, strategy="fsdp2", roots=[Path.cwd()])
        taken.append(time.process_time() - began)
    assert sorted(taken)[4] < 0.05


# -- the command -------------------------------------------------------------------------------------------------------


def words_of(command: str) -> list[str]:
    """The words that a real shell makes of a line."""
    made = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True)
    return made.stdout.decode().split("\0")[:-1]


def read_back(words: list[str]) -> tuple[TrainConfig, dict[str, Any]]:
    """What the training script makes of an argv: config and strategy."""
    script = next(index for index, word in enumerate(words) if word.endswith("train.py"))
    config = absolute_paths(parse_request(words[script + 1 :]).resolve())
    asked = from_launcher(words, "train.py")
    strategy = resolve(asked, asked.num_processes, config.mixed_precision)
    return config, {key: value for key, value in strategy.values.items() if key != "main_process_port"}


def agrees(shown: Preview, words: list[str]) -> bool:
    assert shown.job
    return read_back(words) == (shown.job.config, shown.job.strategy.values)


LETTERS = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="".join(map(chr, range(0x202A, 0x202F))))
NASTY = st.sampled_from(
    ["'", '"', "$(id)", "`id`", "\\", " ", "!", "#", "*", "&&", ";", "|", ">", "--", "=", "ü", "🙂"]
)
TEXTS = st.lists(LETTERS | NASTY, min_size=1, max_size=12).map("".join).filter(lambda text: len(text) <= 100)
NAMES = TEXTS.filter(lambda text: not text.startswith("~") and text.strip() and text.lower() not in ("none", "null"))
PARTS = TEXTS.filter(lambda text: "," not in text and "=" not in text and text.strip() == text)
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "run_name": TEXTS,
        "dataset_split": NAMES,
        "model_name_or_path": NAMES,
        "dataset_name": NAMES.filter(lambda text: "\0" not in text),
        "lora_target_modules": st.lists(PARTS, min_size=1, max_size=3),
        "columns": st.dictionaries(st.sampled_from(["prompt", "completion"]), PARTS, max_size=2),
        "learning_rate": st.floats(1e-9, 10) | st.sampled_from(["1e-3", " 0.5", "003e-5"]),
        "max_steps": st.none() | st.integers(1, 10**6),
        "packing": st.booleans() | st.sampled_from(["yes", "0", "True"]),
        "seed": st.integers(0, 2**32 - 1),
        "mixed_precision": st.sampled_from(["no", "bf16"]),
    },
)


@given(VALUES, st.sampled_from(["tiny-lora", "tiny-full"]), st.sampled_from(["ddp", "fsdp2", "single", None]))
@example({"dataset_split": "--", "run_name": "--"}, "tiny-lora", "ddp")
@settings(max_examples=50)
def test_a_pasted_command_is_the_same_run(values: dict[str, Any], preset: str, strategy: str | None) -> None:
    count = 1 if strategy == "single" else 2
    shown = preview(values, preset=preset, strategy=strategy, num_processes=count)
    assert shown.errors == {}
    assert agrees(shown, words_of(shown.command))


def test_a_command_that_is_not_quoted_is_another_run() -> None:
    shown = preview({"run_name": "a$HOME"}, **CPU)
    assert agrees(shown, words_of(shown.command))
    assert not agrees(shown, words_of(shown.command.replace("'", "")))


@pytest.mark.parametrize("letter", ["\n", "\r", "\0", "\x1b", "\u202e"])
def test_control_characters_are_refused(letter: str) -> None:
    assert list(preview({"run_name": f"a{letter}b"}, **CPU).errors) == ["run_name"]


def test_the_command_says_what_differs_and_no_more() -> None:
    shown = preview({"learning_rate": "3e-3", "max_steps": 5, "seed": ""}, **CPU)
    words = words_of(shown.command)
    script = next(index for index, word in enumerate(words) if word.endswith("train.py"))
    assert words[script + 1 :] == ["--preset", "tiny-lora", "--max_steps", "5"]
    assert Path(words[script]).is_absolute()
    assert Path(words[words.index("--config_file") + 1]).is_absolute()


def test_a_value_that_looks_like_an_option_is_joined_to_its_own() -> None:
    shown = preview({"run_name": "--config_file=/etc/passwd"}, **CPU)
    assert "--run_name=--config_file=/etc/passwd" in words_of(shown.command)
    assert agrees(shown, words_of(shown.command))


def test_local_paths_mean_the_same_in_any_folder(tmp_path: Path) -> None:
    (tmp_path / "a b.jsonl").write_text("{}\n")
    shown = preview({"dataset_name": "a b.jsonl", "runs_dir": "my runs"}, **CPU)
    words = words_of(shown.command)
    os.chdir("/")
    assert agrees(shown, words)
    assert words[-1] == str(tmp_path / "my runs")


def test_gpus_stand_first(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = [Gpu(index, f"GPU-{index}", "H100", 80 << 30) for index in range(4)]
    monkeypatch.setattr(app.hardware, "find_gpus", lambda: machine)
    shown = preview({}, preset="tiny-lora", gpus=["1", "3"], strategy="fsdp2")
    words = words_of(shown.command)
    assert words[0] == "CUDA_VISIBLE_DEVICES=1,3"
    assert shown.job
    assert shown.job.devices == Devices([1, 3], 2)


def test_a_mesh_that_the_file_does_not_say_gets_our_own_command() -> None:
    shown = preview({"global_batch_size": "48"}, preset="tiny-lora", strategy="hsdp", num_processes=6)
    words = words_of(shown.command)
    assert words[1:6] == ["train", "--strategy", "hsdp", "--num_processes", "6"]
    assert any("accelerate launch" in line for line in shown.warnings)
    shown = preview({"global_batch_size": "32"}, preset="tiny-lora", strategy="hsdp", num_processes=4)
    assert agrees(shown, words_of(shown.command))


def test_the_training_script_takes_the_command(tmp_path: Path) -> None:
    data = tmp_path / 'my "own" $data üñ.jsonl'
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(64)), encoding="utf-8")
    values = {
        "dataset_name": str(data), "eval_dataset_name": "none", "max_steps": "2", "packing": False,
        "global_batch_size": 8, "per_device_train_batch_size": 4, "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    shown = preview(values, **CPU)
    assert shown.errors == {}
    words = words_of(shown.command)
    script = next(index for index, word in enumerate(words) if word.endswith("train.py"))
    python = Path(words[0]).with_name("python")
    line = shown.command.replace(shown.command.partition("train.py")[0], f"{python} {Path(words[script]).parent}/", 1)
    done = subprocess.run(["bash", "-c", f"{line} --check"], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    assert "2 steps of 8 rows" in done.stdout


# -- saved, loaded, cloned ---------------------------------------------------------------------------------------------


def test_saved_and_loaded_it_is_the_same() -> None:
    values = {"learning_rate": "0.0007", "columns": "prompt=q,completion=a", "packing": "false", "run_name": "ü b"}
    shown = preview(values, **CPU)
    again = load_yaml(shown.yaml)
    assert (again.preset, again.values) == ("tiny-lora", values)
    assert preview(again.values, again.preset, num_processes=2).yaml == shown.yaml


def test_without_a_preset_everything_that_is_no_default_is_kept() -> None:
    loaded = load_yaml("model_name_or_path: embedded\ndataset_name: embedded\nlearning_rate: 1e-3\n")
    assert loaded.preset is None
    assert loaded.values == {"model_name_or_path": "embedded", "dataset_name": "embedded", "learning_rate": "0.001"}


@pytest.mark.parametrize(
    "text",
    [
        "- a\n", "a: 1\na: 2\n", "a: &x 1\nb: *x\n", "a: !!python/object/apply:os.system [id]\n", "foo: 1\n",
        "preset: nope\n", "preset: tiny-lora\nlearning_rate: [1]\n", "a: " + "[" * 90000, "x" * 200_000,
        "preset: tiny-lora\nseed: 2026-99-99\n", "preset: tiny-lora\ncolumns: {prompt: 'a,b'}\n", "a: \0\n",
    ],
)  # fmt: skip
def test_a_bad_yaml_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        load_yaml(text)


def test_a_binary_file_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        read_text(tmp_path / "x.yaml")


def test_mistakes_cannot_be_saved() -> None:
    assert preview({"learning_rate": "abc"}, **CPU).yaml == ""


@pytest.mark.parametrize(("strategy", "count"), [("fsdp2", 2), ("hsdp", 6), ("single", 1)])
def test_a_run_can_be_made_again(strategy: str, count: int, tmp_path: Path) -> None:
    values = {"learning_rate": "0.0007", "global_batch_size": "48", "runs_dir": str(tmp_path / "runs")}
    shown = preview(values, "tiny-lora", strategy, num_processes=count)
    assert shown.job
    write_folder(shown.job)
    shown.job.run.write_state(state="stopped")
    chosen = choices_of({"clone": shown.job.run.id}, tmp_path / "runs")
    assert chosen
    assert (chosen.preset, chosen.strategy, chosen.num_processes, chosen.gpus) == ("tiny-lora", strategy, count, ())
    assert chosen.values == {"learning_rate": "0.0007", "global_batch_size": "48"}
    for name in ("clone", "from_run"):
        with pytest.raises(ConfigError, match="not a run id"):
            choices_of({name: str(shown.job.run.path)}, tmp_path / "runs")


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_run_can_be_trained_further(method: str, tmp_path: Path) -> None:
    """With its preset and method, and nothing else of it: not its rate, and no file that may be gone."""
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    values = {"learning_rate": "0.0007", "method": method, "objective": "grpo", "reward_funcs": "json_schema",
              "reward_schema": str(tmp_path / "schema.json"), "max_completion_length": "64",
              "runs_dir": str(tmp_path / "runs")}  # fmt: skip
    job = preview(values, "tiny-lora", "single", num_processes=1).job
    assert job
    write_folder(job)
    job.run.write_state(state="done")
    (tmp_path / "schema.json").unlink()
    choices = choices_of({"from_run": job.run.id}, tmp_path / "runs")
    assert choices
    assert choices.values == {"from_run": job.run.id, "method": method}
    assert choices_of({}, tmp_path / "runs") is None


def test_a_strategy_of_ones_own_is_cloned_from_the_run(tmp_path: Path) -> None:
    shown = preview({"runs_dir": str(tmp_path)}, **CPU, strategy="ddp")
    assert shown.job
    write_folder(shown.job)
    file = shown.job.run.accelerate
    file.write_text(file.read_text() + "debug: true\n")
    assert from_run(shown.job.run).strategy == str(file)


def test_a_damaged_run_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    with pytest.raises(ConfigError):
        from_run(run)


# -- what else a form offers -------------------------------------------------------------------------------------------


def test_strategies_say_whether_they_can_run() -> None:
    told = {one.name: one for one in strategy_choices("lora", Devices([], 2))}
    assert set(told) == set(strategy_names())
    assert told["ddp"].reason is None
    assert told["ddp"].summary
    assert "accelerator" in str(told["fsdp2_offload"].reason)
    assert "at least 4" in str(told["hsdp"].reason)
    assert {one.name: one for one in strategy_choices("lora", Devices([], 4))}["hsdp"].reason is None


def test_without_gpus_there_are_none_to_choose() -> None:
    assert gpu_choices() == []
    assert GpuChoice(0, "H100", 80 << 30, None, "").holder == ""


@pytest.mark.parametrize("value", [True, None, 0.001, [1, 2], {"a": "b"}, "x"])
def test_values_are_written_as_on_the_command_line(value: Any) -> None:
    assert as_texts({"x": value}) == {"x": text_of(value)}


def test_every_default_of_a_choice_is_among_its_choices() -> None:
    """A list on the page takes nothing else."""
    wrong = [one.name for one in fields() if one.kind == "choice" and one.default not in one.choices]
    assert wrong == []
    schedule = next(one for one in fields() if one.name == "pp_schedule")
    assert (schedule.default, schedule.choices[:2]) == ("none", ("none", "gpipe"))
