"""The model card: its metadata, what it hides, and that its command repeats the run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from app.command_line import TRAIN
from tests.made_runs import add_sealed_checkpoint, made_run
from tests.parity.runs import mostly_long
from trainers.config.options import TrainConfig
from trainers.config.parse import Request
from trainers.config.presets import preset_names
from trainers.config.validation import build
from trainers.run.folder import write_json
from trainers.run.lineage import Stage
from trainers.run.manifest import read_manifest
from trainers.run.model_card import History, changed_options, command, evaluated, history_of, model_card, public


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
    found = card(local, history=History(stages, "ddp", 2))
    assert str(tmp_path) not in str(found)
    assert (found.data.base_model, found.data.datasets) == (None, None)
    assert "Adapter weights of `base` (a folder of the publisher's), fine-tuned" in found.text
    assert "on `my.jsonl`" in found.text
    assert "1. the weights in first\n2. second (sft on my.jsonl, method=lora, step 5)" in found.text


def test_the_sources_of_a_mix_are_named(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"text": "a"}\n')
    write_json(tmp_path / "mix.yaml", {"sources": [{"dataset_name": "org/rows"}, {"dataset_name": "own.jsonl"}]})
    found = card(config(dataset_name=None, mix=str(tmp_path / "mix.yaml")))
    assert found.data.datasets == ["org/rows"]
    assert "on `org/rows`, `own.jsonl`." in found.text
    assert str(tmp_path) not in str(found)


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("/home/me/data/my.jsonl", "my.jsonl"),
        ("~/my.jsonl", "my.jsonl"),
        (["/home/me/own.py:score", "exact_match"], ["own.py:score", "exact_match"]),
        ("https://user:pass@host/a.jsonl?sig=x", "https://host/a.jsonl"),
        ("postgresql://user:pass@10.0.0.1/rows", "postgresql://.../rows"),
        ("s3://internal-bucket/rows.jsonl", "s3://.../rows.jsonl"),
        ({"a": "/x/y"}, {"a": "y"}),
        ("org/rows", "org/rows"),
        (3, 3),
    ],
)
def test_values_as_others_may_read_them(value: Any, seen: Any) -> None:
    assert public(value) == seen


def test_a_secret_of_the_environment_is_not_in_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "sk-123456789")
    assert "sk-123456789" not in str(card(config(columns={"prompt": "sk-123456789"})))


@pytest.mark.parametrize("name", mostly_long(preset_names(), ["tiny-lora", "tiny-dpo", "tiny-distill"]))
def test_the_command_gives_the_options_of_the_run(name: str) -> None:
    """Without the preset, whose content another version may change."""
    teacher = {"teacher": "org/teacher"} if name == "tiny-distill" else {}
    chosen = {"learning_rate": "1e-5", "dataset_name": "org/rows", **teacher}
    wanted = Request(preset=name, options=chosen).resolve()
    words = shlex.split(command(wanted, History(strategy="fsdp2", processes=8, sizes={"tp": 2})))
    assert words[:8] == ["tunesmith", "train", "--strategy", "fsdp2", "--num_processes", "8", "--tp_size", "2"]
    args = TRAIN.read(words[2:])
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
    assert history.after == evaluated(run, 30) != evaluated(run, 60)
    assert history_of(run, read_manifest(folder), averaged=True).after == {}, "the average was not evaluated"
    other = history_of(run, read_manifest(add_sealed_checkpoint(run, 40, layout="ddp", world=2)))
    assert (other.strategy, other.sizes) == ("ddp", {}), "the file is that of another attempt"
