"""What a run writes is known to the byte before it starts, as far as tensors go."""

from __future__ import annotations

import json
import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.model.load import build_model
from trainers.run import disk
from trainers.run.disk import Tensor, bytes_needed, check_room, local_tensors, tensors_of
from trainers.run.weight_headers import cached_folder, hub_headers

LOG = 2_000_000
MATRIX = Tensor("model.layers.0.self_attn.q_proj.weight", (100, 50), "BF16")
LATER = Tensor("model.layers.1.mlp.up_proj.weight", (100, 50), "BF16")
NORM = Tensor("model.norm.weight", (50,), "BF16")
TOWER = Tensor("vision_tower.encoder.layers.0.fc1.weight", (10, 10), "BF16")


def config_of(**options: Any) -> TrainConfig:
    return build({"model_name_or_path": "embedded", "dataset_name": "embedded", **options})


def test_the_embedded_model_by_the_model_itself() -> None:
    ranks = {"lora_rank_pattern": r"q_proj=4,layers\.1\.mlp\.(up|down)_proj=24"}
    for options in ({"method": "full"}, {"method": "lora"}, {"method": "lora", **ranks}):
        config = config_of(**options, save_steps=10)
        trained = sum(weight.numel() for weight in build_model(config).parameters() if weight.requires_grad)
        found = bytes_needed(config, local_tensors(config), steps=100)
        assert found == LOG + 3 * 12 * trained + 4 * trained, "two are kept while a third is written"


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        ({"method": "full", "save_steps": 0}, 100, 12 * 5050 + 2 * 5050),
        ({"method": "full", "save_steps": 50}, 100, 2 * 12 * 5050 + 2 * 5050),
        ({"method": "full", "save_steps": 10}, 100, 3 * 12 * 5050 + 2 * 5050),
        ({"method": "full", "save_steps": 10}, None, 12 * 5050 + 2 * 5050),
        ({"method": "full", "save_steps": 10, "max_steps": 100}, None, 3 * 12 * 5050 + 2 * 5050),
        ({"method": "full", "save_steps": 1, "save_total_limit": 5}, 100, 6 * 12 * 5050 + 2 * 5050),
        (
            {"method": "full", "save_steps": 1, "load_best_model_at_end": True, "eval_share": 0.1},
            100,
            4 * 12 * 5050 + 2 * 5050,
        ),
        ({"method": "full", "save_steps": 0, "export_dtype": "float32"}, 9, 12 * 5050 + 4 * 5050),
        (
            {"method": "full", "save_steps": 0, "master_weights": False, "mixed_precision": "bf16"},
            9,
            10 * 5050 + 2 * 5050,
        ),
        ({"method": "lora", "save_steps": 0, "lora_r": 4}, 9, 12 * 600 + 2 * 600),
        ({"method": "lora", "save_steps": 0, "lora_r": 4, "merge_adapter": True}, 9, 12 * 600 + 2 * 5050),
        ({"method": "lora", "save_steps": 0, "lora_target_modules": "up_proj"}, 9, 0),
    ],
)
def test_each_choice_counts(options: dict[str, Any], steps: int | None, expected: int) -> None:
    assert bytes_needed(config_of(**options), [MATRIX, NORM], steps) == LOG + expected


def test_what_is_cut_off_or_not_trained_is_not_counted() -> None:
    config = config_of(method="full", save_steps=0)
    assert bytes_needed(config, [MATRIX, TOWER], 9) == LOG + 12 * 5000 + 2 * 5100, "a tower is exported as it came"
    first = config.model_copy(update={"num_hidden_layers": 1})
    assert bytes_needed(first, [MATRIX, LATER], 9) == bytes_needed(config, [MATRIX], 9)


@pytest.mark.parametrize(
    ("dtypes", "expected"), [(("BF16", "F32"), 2), (("F32", "BF16"), 4), (("F8_E4M3", "F16"), 2), (("F64", "BF16"), 4)]
)
def test_an_export_has_one_dtype_the_most_common_of_its_base(dtypes: tuple[str, str], expected: int) -> None:
    tensors = [Tensor(MATRIX.name, MATRIX.shape, dtypes[0]), Tensor(NORM.name, NORM.shape, dtypes[1])]
    assert bytes_needed(config_of(method="full", save_steps=0), tensors, 9) == LOG + (12 + expected) * 5050


def test_adapters_on_experts_are_counted_where_the_model_is_known() -> None:
    expert = Tensor("model.layers.0.mlp.experts.7.up_proj.weight", (100, 50), "BF16")
    router = Tensor("model.layers.0.mlp.gate.weight", (8, 50), "BF16")
    config = config_of(method="lora", save_steps=0, lora_r=4)
    assert bytes_needed(config, [MATRIX, expert, router], 9) == LOG + 14 * 600, (
        "a folder is refused only for what is sure"
    )
    assert bytes_needed(config, [MATRIX, expert, router], 9, trained_weights=1000) == LOG + 14 * 1000


def test_a_model_on_the_hub_is_asked_for_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def file(tensor: Tensor, bytes_: int) -> SimpleNamespace:
        info = SimpleNamespace(shape=list(tensor.shape), dtype=tensor.dtype, data_offsets=(0, bytes_))
        return SimpleNamespace(tensors={tensor.name: info})

    repo = SimpleNamespace(files_metadata={"a": file(MATRIX, 10_000), "b": file(NORM, 100)})
    tree = [SimpleNamespace(path=name, size=size) for name, size in (("a", 10_200), ("b", 300))]
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", lambda self, name, revision: repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", lambda self, name, revision: tree)
    config = config_of().model_copy(update={"model_name_or_path": "owner/name"})
    assert local_tensors(config) == []
    assert tensors_of(hub_headers(config) or {}) == [MATRIX, NORM]


def test_a_download_that_was_broken_off_is_not_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it fetches the rest; files that lack some are no reason to refuse it."""
    import huggingface_hub

    config = config_of().model_copy(update={"model_name_or_path": "owner/name"})
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": dict(zip("ab", names, strict=True))}
    assert cached_folder(config) is None
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / names[0]).touch()
    assert cached_folder(config) is None
    (tmp_path / names[1]).touch()
    assert cached_folder(config) == tmp_path


def test_only_the_files_that_are_loaded_count_and_a_pipe_does_not_block(tmp_path: Path) -> None:
    """Mistral's folders hold all weights twice."""
    config = config_of().model_copy(update={"model_name_or_path": str(tmp_path)})
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    os.mkfifo(tmp_path / "consolidated.safetensors")
    assert local_tensors(config) == [Tensor("a", (3,), "F32")]
    (tmp_path / "model.safetensors").unlink()
    assert local_tensors(config) == []


def test_a_disk_that_is_too_small_is_refused_and_what_is_there_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = config_of(method="full", save_steps=0), tmp_path / "runs" / "new"
    needed = bytes_needed(config, [MATRIX, NORM], 9)
    Disk = namedtuple("Disk", "f_bavail f_frsize")
    monkeypatch.setattr(disk.os, "statvfs", lambda path: Disk(needed, 1))
    check_room(config, [MATRIX, NORM], run, 9)
    monkeypatch.setattr(disk.os, "statvfs", lambda path: Disk(needed - 1, 1))
    with pytest.raises(ConfigError, match=f"at least {needed:,} bytes, for 1 checkpoint and the export, and"):
        check_room(config, [MATRIX, NORM], run, 9)
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "checkpoints" / "step-1" / "shard.safetensors").write_bytes(b"x")
    check_room(config, [MATRIX, NORM], run, 9)
