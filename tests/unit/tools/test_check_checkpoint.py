"""What `--check` says of the checkpoint to go on from: its manifest alone tells whether it belongs to the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families import config_for, save_small
from tests.made_runs import manifest_tensors
from trainers.config.mistakes import ConfigError
from trainers.model.load import build_model
from trainers.run.folder import write_json
from trainers.run.manifest import FORMAT, seal
from trainers.strategy.strategy import load_strategy
from trainers.tools.preflight import check


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("base"))


def checkpoint_of(model: torch.nn.Module, folder: Path, without: str = "nothing", **changes: Any) -> Path:
    """The manifest of a checkpoint of a model, without the tensors whose names contain a text."""
    folder.mkdir(parents=True)
    tensors = {name: entry for name, entry in manifest_tensors(model).items() if without not in name}
    manifest = {"format": FORMAT, "step": 3, "world": 1, "progress": {}, "files": {}, "config": {}, "versions": {},
                "base": "", "data_fingerprint": "", "tensors": {**tensors, "optim.state.x.step": {"shape": []}},
                **changes}  # fmt: skip
    write_json(folder / "manifest.json", {**manifest, "seal": seal(manifest)})
    return folder


def checked(base: Path, source: Path | str, run_dir: Path | None = None, **options: Any) -> list[str]:
    config = config_for(base, output_dir="run", resume_from_checkpoint=str(source), **options)
    return check(config, load_strategy("single"), False, run_dir)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_checkpoint_of_the_model_passes_and_one_of_another_does_not(method: str, base: Path, tmp_path: Path) -> None:
    own = build_model(config_for(base, method=method))
    assert checked(base, checkpoint_of(own, tmp_path / "own"), method=method)
    other = build_model(config_for(save_small(tmp_path / "other", num_hidden_layers=3), method=method))
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=.*: the model does not have .*layers\.2\."):
        checked(base, checkpoint_of(other, tmp_path / "more"), method=method)
    with pytest.raises(ConfigError, match=r"needs are not in it: .*layers\.0\.mlp\.up_proj.*; use a"):
        checked(base, checkpoint_of(own, tmp_path / "less", without="0.mlp.up_proj"), method=method)
    wide = build_model(config_for(save_small(tmp_path / "wide", intermediate_size=64), method=method))
    with pytest.raises(ConfigError, match=r" is \d+x\d+ in it and \d+x\d+ in the model \(so are \d+ others\)"):
        checked(base, checkpoint_of(wide, tmp_path / "wider"), method=method)


def test_what_is_no_checkpoint_is_refused_with_its_reason(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint=/nowhere does not exist; use the folder"):
        checked(base, "/nowhere")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no manifest\.json and is not a checkpoint"):
        checked(base, tmp_path)
    for name, write in {"pipe": os.mkfifo, "text": lambda path: path.write_text("{")}.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name / "manifest.json")
        with pytest.raises(ConfigError, match="cannot be used: its manifest is missing or not JSON; use another"):
            checked(base, tmp_path / name)


def test_the_newest_checkpoint_of_a_resumed_run_is_looked_at_where_it_can_be_read(base: Path, tmp_path: Path) -> None:
    """A bad one is not a mistake of the user's: the ranks set it aside."""
    assert checked(base, "auto", tmp_path), "a run without any"
    newest = tmp_path / "checkpoints" / "step-00000003"
    other = build_model(config_for(save_small(tmp_path / "other", num_hidden_layers=3)))
    checkpoint_of(other, newest)
    with pytest.raises(ConfigError, match="step-00000003: the model does not have"):
        checked(base, "auto", tmp_path)
    (newest / "manifest.json").write_text("{")
    assert checked(base, "auto", tmp_path)


@pytest.mark.parametrize("tensors", [None, [], "x"])
def test_a_manifest_that_lacks_its_tensors_is_named_and_not_a_traceback(
    tensors: Any, base: Path, tmp_path: Path
) -> None:
    folder = checkpoint_of(build_model(config_for(base)), tmp_path / "own", tensors=tensors)
    with pytest.raises(ConfigError, match="cannot be used: its manifest lacks tensors; use another"):
        checked(base, folder)
