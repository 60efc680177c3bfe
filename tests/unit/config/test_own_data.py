"""A preset's options about its data go with that data: naming one's own clears them, and says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.command_line import TRAIN
from app.launch.foreground import result, take_back, write_folder
from app.launch.job import train_job
from app.services.draft import read_draft
from app.services.form import load_yaml, preview
from app.services.starting_values import differences, follow_data, starting_values
from tests.presets import left_to_the_user
from trainers.config.fields import text_of
from trainers.config.options import TrainConfig
from trainers.config.parse import Request, dump_yaml
from trainers.config.presets import preset_names
from trainers.train import with_micro_batch

pytestmark = pytest.mark.usefixtures("elsewhere")
ABOUT_DATA = ("dataset_config_name", "dataset_split", "eval_dataset_name", "eval_split", "eval_share", "dataset_format",
              "columns", "sample_by", "max_train_samples", "max_eval_samples", "eval_steps",
              "eval_on_start")  # fmt: skip


def defaults() -> dict[str, Any]:
    return {name: TrainConfig.model_fields[name].get_default() for name in ABOUT_DATA}


def about_data(config: TrainConfig) -> dict[str, Any]:
    return config.model_dump(include=set(ABOUT_DATA))


def resolved(preset: str, **options: Any) -> tuple[TrainConfig, list[str]]:
    request = Request(preset, options={**left_to_the_user(preset), **options})
    return request.resolve(), [line for line in request.notes if "--from_run" not in line]


@pytest.mark.parametrize("preset", preset_names())
def test_own_data_brings_no_option_of_the_presets_data(preset: str) -> None:
    config, [line] = resolved(preset, dataset_name="my.jsonl")
    assert about_data(config) == defaults()
    before, no_lines = resolved(preset)
    assert no_lines == []
    assert before.eval_dataset_name not in (None, config.eval_dataset_name), "there was something to clear"
    gone = [name for name, value in about_data(before).items() if value != defaults()[name]]
    assert line.startswith(f"dataset_name=my.jsonl instead of preset {preset}'s: its ")
    assert all(f"{name}" in line for name in gone)
    assert line.endswith("left out; --eval_share 0.05 holds rows out for evaluation")
    rest = set(TrainConfig.model_fields) - {*ABOUT_DATA, "dataset_name"}
    assert config.model_dump(include=rest) == before.model_dump(include=rest), "and nothing else"


def test_rows_are_held_out_on_request() -> None:
    config, [line] = resolved("smollm2-135m-lora", dataset_name="my.jsonl", eval_share="0.05")
    assert (config.eval_share, config.eval_dataset_name, config.max_train_samples) == (0.05, None, None)
    assert config.eval_steps == 200, "there is an evaluation, at the preset's steps"
    assert line.endswith("max_eval_samples left out")


@pytest.mark.parametrize("name", [name for name in ABOUT_DATA if name not in ("columns", "eval_share")])
def test_what_the_user_says_of_the_own_data_stays(name: str) -> None:
    values = {"eval_dataset_name": "eval.jsonl", "max_train_samples": 7, "max_eval_samples": 7, "eval_steps": 7,
              "eval_on_start": True, "dataset_format": "chat", "sample_by": "document"}  # fmt: skip
    value = values.get(name, "x")
    config, _ = resolved("qwen3-8b-lora", **{"dataset_name": "my.jsonl", "eval_dataset_name": "e.jsonl", name: value})
    assert getattr(config, name) == value


def test_own_evaluation_data_leave_the_training_data_alone() -> None:
    config, [line] = resolved("qwen3-8b-lora", eval_dataset_name="eval.jsonl")
    assert (config.max_train_samples, config.dataset_config_name) == (100_000, "all")
    assert (config.eval_split, config.max_eval_samples, config.eval_steps) == ("eval", None, 200)
    assert line == ("eval_dataset_name=eval.jsonl instead of preset qwen3-8b-lora's: its eval_split, max_eval_samples "
                    "left out")  # fmt: skip
    assert resolved("qwen3-8b-lora", eval_dataset_name="none")[1] == []


def test_the_presets_own_data_named_again_are_not_ones_own() -> None:
    before, _ = resolved("qwen3-8b-lora")
    assert resolved("qwen3-8b-lora", dataset_name=before.dataset_name) == (before, [])


def test_a_saved_config_says_all_of_it_itself(tmp_path: Path) -> None:
    config, _ = resolved("qwen3-8b-lora", dataset_name="my.jsonl", max_train_samples="100000", eval_share="0.1")
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    again = Request(config=str(tmp_path / "config.yaml"))
    assert (again.resolve(), again.notes) == (config, [])


def test_it_is_said_in_each_way_in(tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"text": "a"}\n')
    job = train_job(TRAIN.read(["tiny-lora", "--dataset_name", "my.jsonl"]))
    [line] = job.notes
    assert line.startswith("dataset_name=my.jsonl instead of preset tiny-lora's: its eval_dataset_name left out")
    shown = preview({"dataset_name": "my.jsonl"}, preset="tiny-lora", num_processes=2)
    assert shown.as_json()["notes"] == [line]
    assert "--eval_dataset_name none" in shown.command, "the pasted command evaluates on nothing either"
    request = Request("tiny-lora", options={"dataset_name": "my.jsonl"})
    config = request.resolve()
    assert with_micro_batch(config, job.strategy, request)[1] == [line]


def test_it_is_in_the_json_and_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"text": "a"}\n')
    job = train_job(TRAIN.read(["tiny-lora", "--dataset_name", "my.jsonl", "--output_dir", str(tmp_path / "run")]))
    write_folder(job)
    assert result(job, {"state": "done"})["notes"] == job.notes
    assert job.run.log.read_text().splitlines()[0].endswith(f" [supervisor] {job.notes[0]}")
    take_back(job.run)
    assert not job.run.path.exists(), "nor is a log left of a start that was broken off"


PRESETS = [name for name in preset_names() if starting_values(name)["eval_dataset_name"] != "none"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_form_shows_the_data_that_will_be_used(preset: str) -> None:
    before = starting_values(preset)
    shown = {**before, "dataset_name": "my.jsonl"}
    followed = follow_data(preset, before, shown)
    shown |= followed
    assert {name: shown[name] for name in ABOUT_DATA} == {name: text_of(value) for name, value in defaults().items()}
    assert followed["eval_dataset_name"] == "none"
    assert differences(shown, preset) == {"dataset_name": "my.jsonl"}, "so that the line names what was left out"
    assert follow_data(preset, shown, {**shown, "dataset_name": "other.jsonl"}) == {}
    back = {**shown, "dataset_name": before["dataset_name"]}
    assert back | follow_data(preset, shown, back) == before, "and all of it comes back with the preset's data"


def test_a_form_keeps_what_was_typed() -> None:
    before = starting_values("qwen3-8b-lora")
    typed = {**before, "max_train_samples": "7", "eval_dataset_name": "eval.jsonl"}
    typed |= follow_data("qwen3-8b-lora", before, typed)
    own = {**typed, "dataset_name": "my.jsonl"}
    own |= follow_data("qwen3-8b-lora", typed, own)
    assert (own["max_train_samples"], own["eval_dataset_name"], own["eval_steps"]) == ("7", "eval.jsonl", "200")
    again = {**own, "eval_dataset_name": before["eval_dataset_name"]}  # the preset's evaluation data, asked for
    again |= follow_data("qwen3-8b-lora", own, again)
    values = differences(again, "qwen3-8b-lora")
    assert values["eval_dataset_name"] == before["eval_dataset_name"]
    shown = preview(values, preset="qwen3-8b-lora", num_processes=2)
    assert f"--eval_dataset_name {before['eval_dataset_name']}" in shown.command
    assert load_yaml(shown.yaml).values["eval_dataset_name"] == before["eval_dataset_name"]


def test_a_draft_of_the_page_without_these_fields_names_the_data_alone() -> None:
    options = {**starting_values("qwen3-8b-lora"), "dataset_name": "my.jsonl"}
    kept = read_draft(json.dumps({"preset": "qwen3-8b-lora", "options": options}))
    assert kept
    assert kept.values == {"dataset_name": "my.jsonl"}
