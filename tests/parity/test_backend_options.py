"""What each backend offers beside the files that ship, in a user's own Accelerate YAML or DeepSpeed JSON."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.launching import launch, launch_well
from tests.parity.checks import equal_after_resume, reference, resumed
from tests.parity.runs import HALF, config, curve, long, mostly_long, options
from trainers.config.mistakes import ConfigError
from trainers.model.load import build_model
from trainers.objectives.loss_module import LossModule
from trainers.parallel.fsdp import _classes_by_size, _refuse_odd_adapters
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, Shard, check_coverage
from trainers.run.errors import TrainingError

FSDP2 = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_cpu_ram_efficient_loading": False}
FSDP1 = {
    **{**FSDP2, "fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD"},
    **{"fsdp_sync_module_states": False, "fsdp_use_orig_params": True},
}
SIZE = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 50_000}
FSDP = {
    "fsdp2 keeps weights whole until the backward pass": FSDP2 | {"fsdp_reshard_after_forward": False},
    "fsdp2 cut by size": FSDP2 | SIZE | {"fsdp_reshard_after_forward": True},
    "fsdp1 prefetch": FSDP1 | {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": True},
    "fsdp1 cut by size": FSDP1 | SIZE,
    "fsdp1 no shard": FSDP1 | {"fsdp_sharding_strategy": "NO_SHARD"},
}
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000, "overlap_comm": False}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
AUTO = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)
ZERO: dict[str, dict[str, Any]] = {
    "zero1 with small buckets": {"zero_optimization": {"stage": 1, **BUCKETS}},
    "zero2, optimizer on the CPU": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "zero3 with auto everywhere": {
        "zero_optimization": {"stage": 3, **AUTO},
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        **{"gradient_clipping": "auto", "bf16": {"enabled": "auto"}},
    },
    "zero3 cut to the last weight": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "zero2 with DeepSpeed's own AdamW": {"zero_optimization": {"stage": 2}, "optimizer": ADAMW},
}


def write(folder: Path, kind: str, **settings: Any) -> str:
    """A user's own Accelerate file."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": kind, "num_processes": 2, **settings}))
    return str(path)


@pytest.mark.parametrize("name", mostly_long(FSDP, ["fsdp2 cut by size"]))
def test_fsdp(name: str, tmp_path: Path) -> None:
    file = write(tmp_path, "FSDP", fsdp_config=FSDP[name])
    finished = launch_well(tmp_path / "run", 2, options("full", True), strategy=file)
    assert curve(finished).agrees(reference("full", True))


def test_profilers_show_what_they_see_and_change_nothing(tmp_path: Path) -> None:
    """torch's profiler on both ranks, and DeepSpeed's profiler of FLOPs and logger of communication."""
    content = ZERO["zero1 with small buckets"] | {
        "flops_profiler": {"enabled": True, "profile_step": 3, "detailed": False},
        "comms_logger": {"enabled": True},
    }
    (tmp_path / "zero.json").write_text(json.dumps(content))
    inline = {"deepspeed_config_file": str(tmp_path / "zero.json"), "zero3_init_flag": False}
    file = write(tmp_path, "DEEPSPEED", deepspeed_config=inline)
    profiled = options("full", True, profile_steps="5:7", profile_ranks="all")
    finished = launch_well(tmp_path / "run", 2, profiled, strategy=file)
    assert curve(finished).agrees(reference("full", True))
    assert "DeepSpeed Flops Profiler" in finished.output
    assert re.search(r"busbw_avg \(Gbps\)[^$]*\n\s+\d+\.\d+ [KM]B +[1-9]", finished.output)
    for rank in (0, 1):
        seen = json.loads((finished.run.path / "profile" / f"rank-{rank}.json").read_text())
        assert (seen["first_step"], seen["steps"]) == (5, 3)
        assert sum(seen["shares"].values()) == pytest.approx(1)
        assert seen["shares"]["compute"] > 0 < seen["shares"]["exposed"] + seen["shares"]["overlapped"]


@pytest.mark.parametrize("name", mostly_long(ZERO, []))
def test_zero(name: str, tmp_path: Path) -> None:
    json_file = tmp_path / "zero.json"
    json_file.write_text(json.dumps(ZERO[name]))
    inline = {"deepspeed_config_file": str(json_file), "zero3_init_flag": False}
    file = write(tmp_path, "DEEPSPEED", deepspeed_config=inline)
    finished = launch_well(tmp_path / "run", 2, options("full", True), strategy=file)
    assert curve(finished).agrees(reference("full", True))


@long
def test_zero3_on_nvme(tmp_path: Path) -> None:
    """The optimizer's state rests on a disk: the same curve, a bit-exact resume, and a checkpoint that moves."""
    disk = tmp_path / "nvme"
    place = {"device": "nvme", "nvme_path": str(disk), "pin_memory": False}
    (killed := disk / "tunesmith-of-a-killed-process").mkdir(parents=True)
    (tmp_path / "zero.json").write_text(json.dumps(
        {"zero_optimization": {"stage": 3, "sub_group_size": 600_000, "offload_optimizer": place}}
    ))  # fmt: skip
    inline = {"deepspeed_config_file": str(tmp_path / "zero.json"), "zero3_init_flag": False}
    file = write(tmp_path, "DEEPSPEED", deepspeed_config=inline)
    finished = launch_well(tmp_path / "run", 2, options("full", True), strategy=file, timeout=900)
    assert re.search(r"offload +nvme\n", finished.output)
    assert not killed.exists()
    assert not list(disk.glob("tunesmith-*/")), "what was written is removed"
    assert curve(finished).agrees(reference("full", True))
    again = resumed(tmp_path / "again", 2, "full", finished.checkpoints[0], file)
    assert equal_after_resume(finished, again)
    moved = resumed(tmp_path / "moved", 2, "full", finished.checkpoints[0], "fsdp2")
    assert moved.series("loss") == pytest.approx(reference("full", True).losses[HALF:], abs=1e-5)


@pytest.mark.parametrize(
    ("least", "classes"),
    [
        (0, ["LlamaAttention", "LlamaMLP"]),
        (100_000, ["LlamaMLP"]),
        (150_000, ["LlamaDecoderLayer"]),
        (10_000_000, []),
    ],
)
def test_units_by_size(least: int, classes: list[str]) -> None:
    loss = LossModule(build_model(config("full", True)))
    assert _classes_by_size(loss, ["LlamaDecoderLayer"], least) == classes


@pytest.mark.parametrize(("precision", "fits"), [("no", True), ("bf16", False)])
def test_fsdp1_refuses_adapters_that_it_cannot_flatten(precision: str, fits: bool) -> None:
    targets = "embed_tokens,q_proj"
    asked = config("lora", True, lora_target_modules=targets, mixed_precision=precision)
    with (
        nullcontext() if fits else pytest.raises(ConfigError, match=r"fsdp1 cannot shard the adapter at .*embed_tokens")
    ):
        _refuse_odd_adapters(LossModule(build_model(asked)))


def test_weights_that_are_not_whole_are_seen() -> None:
    """Control: a rank that misses an element, and two that hold the same one."""
    ranks = Ranks(torch.device("cpu"))
    check_coverage([Shard("w", torch.Size([3]), 0, {WEIGHT: torch.zeros(3)})], ranks)
    with pytest.raises(TrainingError, match=r"w has 3 elements, the ranks hold \[2\] of them"):
        check_coverage([Shard("w", torch.Size([3]), 0, {WEIGHT: torch.zeros(2)})], ranks)


def test_a_layer_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = write(tmp_path, "FSDP", fsdp_config=FSDP2 | {"fsdp_transformer_layer_cls_to_wrap": "LamaDecoderLayer"})
    refused = launch(tmp_path / "run", 2, options("full", True), strategy=file)
    assert refused.status != 0
    assert "fsdp_transformer_layer_cls_to_wrap=LamaDecoderLayer is not a layer class of llama" in refused.output
    assert "its layer classes are LlamaDecoderLayer" in refused.output
