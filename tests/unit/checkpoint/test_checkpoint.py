"""Checkpoints: bit-exact round trip, atomic publishing, and no damaged file is ever loaded in silence."""

from __future__ import annotations

import errno
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from trainers.checkpoint.checkpoint import Checkpoints
from trainers.checkpoint.weights import base_digest, load_weights, persistent_buffers
from trainers.config.validation import build
from trainers.parallel.ranks import Ranks
from trainers.parallel.replicated import Replicated
from trainers.run.compatibility import plain
from trainers.run.errors import TrainingError
from trainers.run.manifest import Origin, Progress, read_manifest, verify

CONFIG = plain(build({"model_name_or_path": "embedded", "dataset_name": "embedded", "learning_rate": 0.1}))


class Loss(nn.Module):
    """A loss module like the trainer's: its `.model` has a buffer that belongs into a checkpoint."""

    teacher = None

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model(rows).square().sum()


def wrap(loss: Loss) -> Replicated:
    return Replicated(loss, build(CONFIG), Accelerator(cpu=True))


def trained(seed: int = 0) -> tuple[Loss, Replicated]:
    loss = Loss(seed)
    backend = wrap(loss)
    for _ in range(3):
        backend.backward(backend.model(torch.randn(8, 6)))
        backend.step()
    return loss, backend


def save(store: Checkpoints, loss: Loss, backend: Replicated, progress: Progress) -> Path:
    buffers = {name: loss.model.get_buffer(name) for name in persistent_buffers(loss.model)}
    store.begin(backend, buffers, progress)
    assert store.finish()
    return store.path(progress.step)


def checkpoints(folder: Path, data: str = "data", seed: int = 1, **changes: int) -> Checkpoints:
    config = {**CONFIG, "seed": seed}
    return Checkpoints(folder, Ranks(torch.device("cpu")), Origin("single", config, data), **changes)


def saved(folder: Path, *steps: int) -> Checkpoints:
    store = checkpoints(folder, limit=5)
    loss, backend = trained()
    for step in steps:
        save(store, loss, backend, Progress(step=step))
    return store


def test_round_trip_is_bit_exact_with_optimizer_and_random_state(tmp_path: Path) -> None:
    loss, backend = trained()
    store = checkpoints(tmp_path)
    random.seed(3)
    np.random.seed(4)
    progress = Progress(step=3, elapsed_s=1.5, tokens=7, best_step=2, best_score=-0.25, stale_evaluations=1)
    folder = save(store, loss, backend, progress)
    expected = [torch.rand(3), random.random(), np.random.rand()]
    other = Loss(seed=9)
    assert store.load(folder, other.model) == progress
    other_backend = wrap(other)
    store.restore(folder, other_backend, seed=0)
    assert torch.equal(expected[0], torch.rand(3))
    assert (random.random(), np.random.rand()) == (expected[1], expected[2])
    for one, two in zip(loss.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(one, two)
    for one, two in zip(loss.parameters(), other.parameters(), strict=True):
        for key, value in backend.optimizer.state[one].items():
            assert torch.equal(value, other_backend.optimizer.state[two][key]), key


def test_the_manifest_tells_what_is_there(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    manifest = verify(tmp_path / "step-00000003")
    assert (manifest["step"], manifest["world"], manifest["layout"]) == (3, 1, "single")
    assert manifest["tensors"]["model.0.weight"] == {
        "shape": [5, 6],
        "dtype": "float32",
        "file": "rank-00000.safetensors",
    }
    assert not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
def test_damage_is_seen_set_aside_and_the_one_before_is_used(
    file: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = saved(tmp_path, 3, 6)
    path = tmp_path / "step-00000006" / file
    content = bytearray(path.read_bytes())
    if fault == "remove":
        path.unlink()
    elif fault == "truncate":
        path.write_bytes(content[:-7])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    assert store.newest() == tmp_path / "step-00000003"
    assert (tmp_path / "bad-step-00000006").is_dir()
    assert "checkpoint step-00000006 is bad" in capsys.readouterr().out


def test_every_single_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    path = tmp_path / "step-00000003" / "manifest.json"
    whole = json.loads(path.read_text())
    for key in whole:
        changed = {**whole, key: "other"}
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"manifest|format"):
            read_manifest(path.parent)


def test_half_written_ones_are_ignored_and_removed_by_the_next_save(tmp_path: Path) -> None:
    store = saved(tmp_path, 3)
    half = tmp_path / "step-00000006.tmp-0"
    half.mkdir()
    (half / "rank-00000.safetensors").write_bytes(b"x")
    assert store.newest() == tmp_path / "step-00000003"
    save(store, *trained(), Progress(step=9))
    assert not half.exists()


def test_at_least_two_and_the_best_are_kept(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, limit=1)
    loss, backend = trained()
    for step in range(1, 7):
        save(store, loss, backend, Progress(step=step, best_step=2 if step >= 2 else None))
    assert [path.name for path in store.published()] == ["step-00000002", "step-00000005", "step-00000006"]


def test_a_full_disk_leaves_the_last_good_one_and_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(tmp_path, 3)
    monkeypatch.setattr(
        "trainers.checkpoint.checkpoint.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})()
    )
    with pytest.raises(TrainingError, match=r"1,000 bytes free, a checkpoint needs [\d,]+; free space"):
        save(store, *trained(), Progress(step=6))
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    verify(tmp_path / "step-00000003")


@pytest.mark.parametrize("problem", [OSError(errno.EDQUOT, "Disk quota exceeded"),
                                     RuntimeError("Error while serializing: I/O error: x (os error 122)")])  # fmt: skip
def test_a_full_quota_leaves_the_last_good_one_and_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    """By the error alone: the disk itself has room."""
    store = saved(tmp_path, 3)

    def refuse(*_: Any, **__: Any) -> None:
        raise problem

    monkeypatch.setattr("trainers.checkpoint.checkpoint.save_file", refuse)
    with pytest.raises(TrainingError, match=r"Disk quota exceeded in .*, a checkpoint needs [\d,]+ bytes; free space"):
        save(store, *trained(), Progress(step=6))
    monkeypatch.undo()
    verify(tmp_path / "step-00000003")


def test_a_read_only_folder_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = saved(tmp_path, 3)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        "trainers.checkpoint.checkpoint.save_file", refuse
    )  # root may write anywhere, so the fault is injected
    with pytest.raises(TrainingError, match="Permission denied"):
        save(store, *trained(), Progress(step=6))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_gradients_dropped_after_they_were_scaled_back_leave_fp16_s_scaler_ready() -> None:
    loss, backend = trained()
    scaler = torch.amp.GradScaler("cpu")
    inner = backend.optimizer.optimizer

    def scale_back() -> None:
        scaler.scale(loss(torch.randn(8, 6))).backward()
        scaler.unscale_(inner)

    scale_back()
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(inner)  # control: it would refuse the next step
    backend.accelerator.scaler = scaler
    backend.skip_step()
    scale_back()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    with pytest.raises(ValueError, match="in the checkpoint but not in the model"):
        load_weights(tmp_path / "step-00000003", nn.Linear(6, 5))
    wider = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"\[5, 6\] in the checkpoint, \[5, 7\] in the model"):
        load_weights(tmp_path / "step-00000003", wider)
    longer = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="2 weights are not in the checkpoint"):
        load_weights(tmp_path / "step-00000003", longer)


def test_changed_data_and_options_are_refused_unless_forced(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    folder = tmp_path / "step-00000003"
    with pytest.raises(TrainingError, match="the data, its tokenizer or its options changed since it was saved"):
        checkpoints(tmp_path, data="other").load(folder, Loss(0).model)
    with pytest.raises(
        TrainingError, match="seed=2, and 1 when the checkpoint of step 3 was saved; the remaining steps"
    ):
        checkpoints(tmp_path, seed=2).load(folder, Loss(0).model)
    forced = checkpoints(tmp_path, data="other", seed=2, force=True)
    assert forced.load(folder, Loss(0).model).step == 3
    assert forced.differences(folder) == [
        "seed=2, and 1 when the checkpoint of step 3 was saved",
        "the data has changed since the checkpoint was saved",
    ]
    assert checkpoints(tmp_path).differences(folder) == []


def test_adapters_are_not_put_on_another_base(tmp_path: Path) -> None:
    loss = Loss(0)
    loss.model[0].requires_grad_(False)
    digest = base_digest(loss.model)
    half = Loss(0)
    half.model[0].requires_grad_(False).to(torch.bfloat16)
    assert digest == base_digest(half.model) != base_digest(Loss(0).model) == ""
    store = checkpoints(tmp_path)
    store.origin = replace(store.origin, base=digest)
    folder = save(store, loss, wrap(loss), Progress(step=3))
    assert store.load(folder, loss.model).step == 3
    with torch.no_grad():
        loss.model[0].weight *= 1.3
    store.origin = replace(store.origin, base=base_digest(loss.model))
    with pytest.raises(TrainingError, match="not those that its adapters were trained on"):
        store.load(folder, loss.model)


def test_going_on_from_an_older_one_sets_the_other_future_aside(tmp_path: Path) -> None:
    store = saved(tmp_path, 3, 6, 9)
    loss = Loss(0)
    progress = store.load(tmp_path / "step-00000003", loss.model)
    store.restore(tmp_path / "step-00000003", wrap(loss), seed=0)
    assert [path.name for path in store.published()] == ["step-00000003"]
    save(store, *trained(), Progress(step=progress.step + 1))
    assert store.newest() == tmp_path / "step-00000004"
    assert not list(tmp_path.glob("later-*"))


def test_nothing_written_is_a_pickle(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    assert {path.suffix for path in (tmp_path / "step-00000003").iterdir()} == {".json", ".safetensors"}


def test_one_that_is_named_after_another_step_is_set_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = saved(tmp_path, 3, 6)
    store.path(6).rename(store.path(9))
    assert store.newest() == store.path(3)
    assert (tmp_path / "bad-step-00000009").is_dir()
    assert "is bad: its name is for another step than its manifest, 6" in capsys.readouterr().out


def test_one_that_is_a_link_is_pruned_like_any_other(tmp_path: Path) -> None:
    store = checkpoints(tmp_path / "checkpoints", limit=2)
    loss, backend = trained()
    save(store, loss, backend, Progress(step=1))
    store.path(1).rename(tmp_path / "elsewhere")
    store.path(1).symlink_to(tmp_path / "elsewhere")
    for step in (2, 3):
        save(store, loss, backend, Progress(step=step))
    assert [path.name for path in store.published()] == ["step-00000002", "step-00000003"]
    assert not store.path(1).is_symlink()
    assert verify(tmp_path / "elsewhere")["step"] == 1, "what it led to is left"


def test_a_save_does_not_bring_a_removed_run_folder_back(tmp_path: Path) -> None:
    """The run would go on to its end in a folder without its files."""
    _, backend = trained()
    with pytest.raises(TrainingError, match="No such file or directory"):
        checkpoints(tmp_path / "removed" / "checkpoints").begin(backend, {}, Progress(step=1))
    assert not (tmp_path / "removed").exists()
