"""The model card: its metadata, what it hides, and that its command repeats the run."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from app.command_line import TRAIN
from tests.made_runs import add_sealed_checkpoint, made_run
from tests.parity.runs import mostly_long
from tests.unit.run.test_from_run import finished, resolved
from trainers.checkpoint.loading_code import loading_code
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.config.presets import preset_names
from trainers.config.validation import build
from trainers.run.folder import write_json
from trainers.run.from_run import resolve_request
from trainers.run.lineage import Stage
from trainers.run.manifest import read_manifest
from trainers.run.merging import Merge
from trainers.run.model_card import (
    History,
    changed_options,
    command,
    commands,
    evaluated,
    history_of,
    measured_at,
    model_card,
    public,
)


def card(config: TrainConfig, kind: str = "adapter", history: History | None = None) -> ModelCard:
    return ModelCard(model_card(config, kind, {}, "model = ...", history or History()))


def config(**options: Any) -> TrainConfig:
    return build({"model_name_or_path": "org/base", "dataset_name": "org/rows", **options})


def test_the_metadata_name_what_is_on_the_hub() -> None:
    data = card(config(mix=None)).data
    assert (data.base_model, data.base_model_relation, data.datasets) == ("org/base", "adapter", ["org/rows"])
    assert (data.library_name, data.pipeline_tag, data.license) == ("peft", "text-generation", None)
    merged = card(config(), "merged").data
    assert (merged.library_name, merged.base_model_relation) == ("transformers", "finetune")
    assert card(config(dataset_name="hf://datasets/org/logs@main/a.jsonl")).data.datasets == ["org/logs"]


def test_what_is_local_is_named_by_its_last_part_alone(tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "base").mkdir()
    local = config(model_name_or_path=str(tmp_path / "base"), dataset_name=str(tmp_path / "my.jsonl"),
                   cache_dir=str(tmp_path / "cache"), from_run=None, run_name="tuned")  # fmt: skip
    stages = [Stage(str(tmp_path / "first")), Stage("second", "sft", "lora", str(tmp_path / "my.jsonl"), 5)]
    parsed = card(local, history=History(stages, "ddp", 2))
    assert str(tmp_path) not in str(parsed)
    assert (parsed.data.base_model, parsed.data.datasets) == (None, None)
    assert "Adapter weights of `base` (a folder of the publisher's), fine-tuned" in parsed.text
    assert "on `my.jsonl`" in parsed.text
    assert "1. the weights in first\n2. second (sft on my.jsonl, method=lora, step 5)" in parsed.text


def test_the_sources_of_a_mix_are_named(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"text": "a"}\n')
    write_json(tmp_path / "mix.yaml", {"sources": [{"dataset_name": "org/rows"}, {"dataset_name": "own.jsonl"}]})
    parsed = card(config(dataset_name=None, mix=str(tmp_path / "mix.yaml")))
    assert parsed.data.datasets == ["org/rows"]
    assert "on `org/rows`, `own.jsonl`." in parsed.text
    assert str(tmp_path) not in str(parsed)


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("/home/me/data/my.jsonl", "my.jsonl"),
        ("~/my.jsonl", "my.jsonl"),
        (["/home/me/own.py:score", "exact_match"], ["own.py:score", "exact_match"]),
        ("https://user:pass@host.org/a.jsonl?sig=x", "https://host.org/a.jsonl"),
        ("postgresql://user:pass@10.0.0.1/rows", "postgresql://.../rows"),
        ("s3://internal-bucket/rows.jsonl", "s3://.../rows.jsonl"),
        ("http://localhost:8000/a.jsonl", "http://.../a.jsonl"),
        ("https://data-server/a.jsonl", "https://.../a.jsonl"),
        ("http://192.168.1.7:80/a.jsonl", "http://.../a.jsonl"),
        ("http://[::1]:80/a.jsonl", "http://.../a.jsonl"),
        ("https://8.8.8.8/a.jsonl", "https://8.8.8.8/a.jsonl"),
        ("hf://datasets/org/logs/a.jsonl", "hf://datasets/org/logs/a.jsonl"),
        ({"a": "/x/y"}, {"a": "y"}),
        (
            ["--output_dir=/home/me/out", "--weights=-1,2", "--base=~/b"],
            ["--output_dir=out", "--weights=-1,2", "--base=b"],
        ),
        ("org/rows", "org/rows"),
        (3, 3),
    ],
)
def test_values_as_others_may_read_them(value: Any, seen: Any) -> None:
    assert public(value) == seen


def test_names_of_merged_models_stay_in_their_cells_of_the_table() -> None:
    models = [{"name": name, "weight": 0.5, "stages": [{"run": name}], "files": {"a": "0"}} for name in ("b|c", "d\ne")]
    text = card(config(), history=History(merge=Merge("cat", models))).text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert [row.replace("\\|", "").count("|") for row in rows[:4]] == [5] * 4
    assert rows[2].startswith("| b\\|c | 0.5 | the weights in b\\|c |")
    assert rows[3].startswith("| d e |")


def test_a_secret_of_the_environment_is_not_in_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-123456789")
    assert "sk-123456789" not in str(card(config(columns={"prompt": "sk-123456789"})))
    assert public("https://host.org/sk-123456789/a.jsonl") == "https://host.org/***/a.jsonl"
    assert public("s3://bucket/sk-123456789") == "s3://.../***"


@pytest.mark.parametrize("name", mostly_long(preset_names(), ["tiny-lora", "tiny-dpo", "tiny-distill"]))
def test_the_command_gives_the_options_of_the_run(name: str) -> None:
    """Without the preset, whose content another version may change."""
    teacher = {"teacher": "org/teacher"} if name == "tiny-distill" else {}
    chosen = {"learning_rate": "1e-5", "dataset_name": "org/rows", **teacher}
    wanted = Request(preset=name, options=chosen).resolve()
    argv = shlex.split(command(wanted, History(strategy="fsdp2", processes=8, sizes={"tp": 2})))
    assert argv[:8] == ["tunesmith", "train", "--strategy", "fsdp2", "--num_processes", "8", "--tp_size", "2"]
    args = TRAIN.read(argv[2:])
    assert args
    got = args.request.resolve()
    assert changed_options(got) == changed_options(wanted)
    assert got.learning_rate == 1e-5


def test_the_history_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    run = made_run(tmp_path, "mine", steps=60, strategy="hsdp", world=4)
    run.metrics.write_text('{"step": 0, "eval_loss": 3.0}\n' + run.metrics.read_text() + '{"step": 60, "eval_lo')
    folder = add_sealed_checkpoint(run, 30, layout="hsdp", world=4)
    history = history_of(run, read_manifest(folder))
    assert (history.strategy, history.processes) == ("hsdp", 4)
    assert history.sizes == {"dp_replicate": 2}
    assert history.before == {"eval_loss": 3.0}
    assert history.after == evaluated(run, 30)[0] != evaluated(run, 60)[0]
    assert history_of(run, read_manifest(folder), averaged=True).after == {}, "the average was not evaluated"
    stages = [Stage("first", "sft"), *history.stages]
    text = model_card(config(), "adapter", {}, "", replace(history, stages=stages))
    assert "| evaluation data | before this stage | after |" in text
    assert "Python" not in text.partition("## Environment")[2], "that of training is unknown"
    other = history_of(run, read_manifest(add_sealed_checkpoint(run, 40, layout="ddp", world=2)))
    assert (other.strategy, other.sizes) == ("ddp", {}), "the file is that of another attempt"


def test_rows_that_a_later_attempt_replaced_are_not_those_of_the_weights(tmp_path: Path) -> None:
    run = made_run(tmp_path, "mine", steps=60)
    rows = [(0, 0, 3.0), (0, 10, 2.0), (0, 30, 1.5), (1, 11, None), (1, 20, 1.8), (2, 31, None)]
    lines = [
        json.dumps({"step": step, "attempt": attempt, **({"eval_loss": loss} if loss else {"loss": 1.0})})
        for attempt, step, loss in rows
    ]
    run.metrics.write_text("\n".join(lines))
    assert evaluated(run, 10) == ({"eval_loss": 2.0}, 0)
    assert evaluated(run, 20) == ({"eval_loss": 1.8}, 1)
    assert evaluated(run, 30) == ({}, None), "the attempt that came to this step did not evaluate"
    first, second = (history_of(run, read_manifest(add_sealed_checkpoint(run, step))) for step in (10, 20))
    assert (first.before, first.after) == ({"eval_loss": 3.0}, {"eval_loss": 2.0})
    assert (second.before, second.after) == ({}, {"eval_loss": 1.8}), "perhaps of other evaluation data"


@pytest.mark.parametrize(("data", "before"), [("feed", {"eval_loss": 3.0}), ("beef", {}), (None, {})])
def test_before_and_after_are_of_the_same_data(tmp_path: Path, data: str | None, before: dict[str, Any]) -> None:
    """Also where a resume lies between them."""
    run = made_run(tmp_path, "mine", steps=20)
    rows: list[dict[str, Any]] = [
        {"step": 0, "eval_loss": 3.0, "evaluation_data": "feed"},
        {"step": 20, "attempt": 1, "eval_loss": 1.8, **({"evaluation_data": data} if data else {})},
    ]
    run.metrics.write_text("\n".join(map(json.dumps, rows)))
    history = history_of(run, read_manifest(add_sealed_checkpoint(run, 20)))
    assert (history.before, history.after) == (before, {"eval_loss": 1.8})


def test_the_loss_in_training_is_left_out_where_an_earlier_step_is_exported() -> None:
    results = {"train_loss": 0.5, "eval_loss": 0.7, "exported_step": 40}
    assert measured_at(results, 60) == {"eval_loss": 0.7, "exported_step": 40}
    assert measured_at(results, 40) == results


def test_the_commit_is_named_rather_than_a_branch() -> None:
    branch = config(model_revision="main")
    assert "`org/base` at revision `0123abc`, fine-tuned" in card(branch, history=History(revision="0123abc")).text
    assert "`org/base` at revision `main`, fine-tuned" in card(branch).text


def test_a_card_lists_the_sources_of_a_mix_with_their_weights(tmp_path: Path) -> None:
    sources = [{"dataset_name": "org/rows", "weight": 3, "dataset_split": "train"},
               {"dataset_name": str(tmp_path / "a|b.jsonl"), "weight": 0.5, "limit": 20, "loss": "all"}]  # fmt: skip
    write_json(tmp_path / "mix.yaml", {"sources": sources, "stopping_strategy": "all_exhausted"})
    mixed = config(dataset_name=None, mix=str(tmp_path / "mix.yaml"))
    text = model_card(mixed, "full", {}, "", History(data="f1ng3r"))
    assert "| rows | org/rows, split train | 3 | all | as the options say |" in text
    assert r"| a-b | a\|b.jsonl | 0.5 | 20 | all |" in text
    assert "smaller ones repeat." in text
    assert "- fingerprint of the training data f1ng3r" in text
    assert str(tmp_path) not in text
    (tmp_path / "mix.yaml").unlink()
    for other in (mixed, config()):
        assert "## Data" not in model_card(other, "full", {}, "", History())


def test_the_sources_are_those_of_the_run_s_own_copy_of_the_mix(tmp_path: Path) -> None:
    write_json(tmp_path / "mix.yaml", {"sources": [{"dataset_name": "org/new"}]})
    write_json(tmp_path / "copy.yaml", {"sources": [{"dataset_name": "org/old"}]})
    mixed = config(dataset_name=None, mix=str(tmp_path / "mix.yaml"))
    assert card(mixed, history=History(mix=str(tmp_path / "copy.yaml"))).data.datasets == ["org/old"]


def test_an_earlier_checkpoint_is_repeated_by_two_commands() -> None:
    line = ["--checkpoint", "step-00000020", "--merged"]
    first, second = commands(config(), History(stop_at_step=20, export=line)).splitlines()
    assert first.endswith("--stop_at_step 20")
    args = TRAIN.read(shlex.split(first)[2:])
    assert args
    assert args.request.resolve().stop_at_step == 20
    assert second == "tunesmith export RUN --checkpoint step-00000020 --merged"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_after_another_run_the_command_names_that_run(method: str, tmp_path: Path) -> None:
    """And not the folder `model` of its export, which is called the same in every run."""
    run = finished(tmp_path / "runs", "first", method)
    wanted = resolved("first")
    stages = [Stage("first", "sft", method, "rows", 60, "org/base"), Stage("second", "dpo", method, "rows", 5)]
    argv = shlex.split(command(wanted, History(stages)))
    assert argv[2:4] == ["--from_run", "first"]
    args = TRAIN.read(argv[2:])
    assert args
    again = resolve_request(args.request)
    assert changed_options(again) == changed_options(wanted)
    assert (again.from_run, again.method) == (str(run.model), method)
    parsed = card(wanted, "full", History(stages))
    if method == "full":
        assert "weights of the result of `first`, which began with `org/base`, fine-tuned" in parsed.text
        assert parsed.data.base_model == "org/base"
        assert card(wanted, "adapter", History(stages)).data.base_model is None, "it is on other weights"


def test_an_adapter_of_a_model_of_images_and_text_is_loaded_on_a_base_of_its_own_class() -> None:
    trained, auto = config(model_name_or_path="org/base", method="lora"), "AutoModelForImageTextToText"
    assert loading_code(trained, "adapter", auto).splitlines()[:2] == [
        f'model = {auto}.from_pretrained("org/base")', "model = PeftModel.from_pretrained(model, folder)  # from peft",
    ]  # fmt: skip
    assert loading_code(trained, "merged", auto) == f"model = {auto}.from_pretrained(folder)  # from transformers"
    assert loading_code(trained, "adapter").startswith("model = AutoPeftModelForCausalLM.from_pretrained(folder)")


@pytest.mark.parametrize("result", ["runs/first/model", "runs/first/export-merged", "exported/first"])
def test_an_adapter_on_the_result_of_a_run_names_that_run_and_not_the_base_before_it(
    tmp_path: Path, result: str
) -> None:
    folder = str(tmp_path / result)
    trained = config(model_name_or_path=folder).model_copy(update={"from_run": folder, "method": "lora"})
    code = loading_code(trained, "adapter")
    assert "# Needs the result of first where adapter_config.json names it; a merged export needs no base." in code
    assert str(tmp_path) not in code
    for other in (trained.model_copy(update={"from_run": None}), config(method="lora")):  # control
        assert "the result of" not in loading_code(other, "adapter")
    assert "the result of" not in loading_code(trained, "merged")
