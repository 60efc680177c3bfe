"""`tunesmith train --on kubernetes`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import run_verb
from app.schedulers.kubernetes import object_name

ASKED = ["--on", "kubernetes", "--image", "tunesmith", "--volume_claim", "data", "--output_dir", "/shared/runs/first"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run_verb(["train", *words, "--dry_run", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def settings(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    data = next(yaml.safe_load_all(document["script"]))["data"]
    return yaml.safe_load(data["config.yaml"]), yaml.safe_load(data["strategy.yaml"])


def test_the_options_are_resolved_here_for_the_nodes_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    document = printed(capsys, "tiny-lora", *ASKED, "--nodes", "2", "--gpus_per_node", "4", "--learning_rate", "0.01")
    config, strategy = settings(document)
    assert (document["world_size"], document["strategy"]) == (8, "ddp")
    assert (config["learning_rate"], config["per_device_train_batch_size"]) == (0.01, 2)
    assert (strategy["num_processes"], strategy["num_machines"]) == (8, 2)
    name = object_name("/shared/runs/first", "data")
    assert strategy["main_process_ip"] == f"{name}-0.{name}"
    assert config["cache_dir"] == "/shared/cache"
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_was_chosen_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = settings(printed(capsys, "tiny-lora", *ASKED, "--cache_dir", "/shared/elsewhere"))
    assert config["cache_dir"] == "/shared/elsewhere"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*ASKED], "--on kubernetes only prints a manifest; add --dry_run"),
        ([*ASKED[:-1], "runs/first", "--dry_run"], "output_dir=runs/first is not on the volume"),
        ([*ASKED[:-2], "--dry_run"], "output_dir is not on the volume that the pods see, /shared; write --output_dir"),
        ([*ASKED, "--dry_run", "--cache_dir", "/var/x"], "cache_dir=/var/x is not on the volume"),
        ([*ASKED, "--dry_run", "--dataset_name", "mine.jsonl"], "dataset_name=.*/mine.jsonl is not on the volume"),
        ([*ASKED, "--dry_run", "--recorded_answers", "/var/x"], "recorded_answers=/var/x is not on the volume"),
        ([*ASKED, "--dry_run", "--machine_rank", "1"], "machine_rank=1 is decided by Kubernetes"),
        ([*ASKED, "--dry_run", "--detach"], "--detach is not needed with --on kubernetes"),
        ([*ASKED, "--dry_run", "--partition", "a"], "--partition is for jobs of SLURM; add --on slurm"),
        (["--image", "a"], "--image is for jobs of Kubernetes; add --on kubernetes"),
        (
            ["--nodes", "2"],
            "--nodes is for jobs of SLURM, Ray, Kubernetes; add --on slurm.ray.kubernetes",
        ),
        (["--on", "moon"], "on=moon is no place to train"),
        ([*ASKED, "--dry_run", "--check"], "--check with --on kubernetes"),
    ],
)
def test_what_cannot_be_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"text": "a"}\n')
    assert run_verb(["train", "tiny-lora", *words]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert re.search(message, written.err)


def test_resume_is_the_manifest_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("preset: tiny-lora\n")
    (tmp_path / "run" / "state.json").write_text('{"id": "run", "state": "stopped"}')
    assert run_verb(["resume", str(tmp_path / "run"), "--on", "kubernetes"]) == 2
    assert "hand its manifest to `kubectl replace --force -f -`" in capsys.readouterr().err
