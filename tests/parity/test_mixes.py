"""Mixes that ship under no name: a file of one's own asks for them, and they train what one process trains.

ZeRO over tensor groups and cut rows, pipelines over cut rows, ZeRO++'s second copy inside a machine, MoE leaf modules.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.parity.checks import check_export, equal_after_resume, reference, resumed
from tests.parity.runs import curve, mostly_long, run
from tests.parity.test_families import trained
from tests.shared import once

WORLD = 4
MIXES: dict[str, tuple[str, int, dict[str, int]]] = {
    "zero1_tp": ("DEEPSPEED 1", 1, {"dp_shard": 2, "tp": 2}),
    "zero3_tp": ("DEEPSPEED 3", 1, {"dp_shard": 2, "tp": 2}),
    "zero2_cp": ("DEEPSPEED 2", 1, {"dp_shard": 2, "cp": 2}),
    "zero3_sp": ("DEEPSPEED 3", 1, {"dp_shard": 2, "sp": 2}),
    "zero3_sp_tp": ("DEEPSPEED 3", 1, {"sp": 2, "tp": 2}),
    "pp_cp": ("MULTI_GPU", 2, {"cp": 2}),
    "pp_sp": ("MULTI_GPU", 2, {"sp": 2}),
    "sp_tp": ("MULTI_GPU", 1, {"sp": 2, "tp": 2}),
    "cp_tp": ("MULTI_GPU", 1, {"cp": 2, "tp": 2}),
    "ddp_sp": ("MULTI_GPU", 1, {"dp_replicate": 2, "sp": 2}),
    "ddp_cp": ("MULTI_GPU", 1, {"dp_replicate": 2, "cp": 2}),
}
"""Backend, pipeline stages, and the mesh of four processes, by a name of this test."""
IN_FOUR = {
    "tp": ("MULTI_GPU", 1, {"tp": 4}),
    "sp": ("FSDP", 1, {"sp": 4}),
    "cp": ("FSDP", 1, {"cp": 4}),
    "pp": ("MULTI_GPU", 4, {}),
}
"""One cut into as many parts as there are processes."""
SHORT = ["zero2_cp", "pp_sp"]
HPZ = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}


def written(name: str, values: dict[str, Any], comment: str = "") -> str:
    """The path of an Accelerate file."""
    text = comment + yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **values})
    folder = once(f"strategy-{name}", lambda folder: (folder / f"{name}.yaml").write_text(text))
    return str(folder / f"{name}.yaml")


def mix(name: str) -> str:
    """The Accelerate file of a mix."""
    backend, stages, sizes = (MIXES | IN_FOUR)[name]
    kind, _, stage = backend.partition(" ")
    values: dict[str, Any] = {"distributed_type": kind, "num_processes": WORLD}
    if sizes:
        values["parallelism_config"] = {f"parallelism_config_{axis}_size": size for axis, size in sizes.items()}
    if kind == "FSDP":
        values["fsdp_config"] = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                                 "fsdp_cpu_ram_efficient_loading": False}  # fmt: skip
    if stage:
        values["deepspeed_config"] = {"zero_stage": int(stage), "zero3_init_flag": False}
    return written(name, values, f"# A mix of the tests\n# pp_size: {stages}\n")


def hpz() -> str:
    """The Accelerate file of ZeRO 3 with a second copy of the weights in each half of the processes."""
    path = once("strategy-json", lambda folder: (folder / "hpz.json").write_text(json.dumps(HPZ))) / "hpz.json"
    section = {"deepspeed_config_file": str(path), "zero3_init_flag": False}
    return written("hpz", {"distributed_type": "DEEPSPEED", "num_processes": WORLD, "deepspeed_config": section})


@pytest.mark.parametrize("name", mostly_long(MIXES, SHORT))
def test_p2_full(name: str) -> None:
    assert curve(run(WORLD, "full", True, mix(name))).agrees(reference("full", True))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_other_schedules_over_parts_of_rows(schedule: str) -> None:
    two_stages_a_rank = run(WORLD, "full", True, mix("pp_cp"), pp_schedule=schedule)
    assert curve(two_stages_a_rank).agrees(reference("full", True))


@pytest.mark.parametrize("name", mostly_long(MIXES, []))
def test_p2_lora(name: str) -> None:
    assert curve(run(WORLD, "lora", False, mix(name))).agrees(reference("lora", False))


@pytest.mark.parametrize("name", mostly_long(MIXES, ["zero3_tp"]))
def test_resume_is_bit_exact_and_the_export_is_whole(name: str, tmp_path: Path) -> None:
    undisturbed = run(WORLD, "full", True, mix(name))
    check_export(undisturbed, "full", True)
    again = resumed(tmp_path / "again", WORLD, "full", undisturbed.checkpoints[0], mix(name))
    assert equal_after_resume(undisturbed, again)


@pytest.mark.parametrize("name", mostly_long(IN_FOUR, []))
def test_four_parts(name: str) -> None:
    """A Llama with as many heads and layers."""
    assert curve(trained(WORLD, "llama", mix(name))).agrees(curve(trained(1, "llama")))


@pytest.mark.parametrize("family", mostly_long(["qwen3", "llama"], []))
def test_zero_over_tensor_groups_with_norms_of_queries_and_words_left_over(family: str) -> None:
    assert curve(trained(WORLD, family, mix("zero3_tp"))).agrees(curve(trained(1, family)))


@pytest.mark.long
def test_zero_over_tensor_groups_with_its_state_in_host_memory() -> None:
    section = {"zero_stage": 2, "offload_optimizer_device": "cpu"}
    sizes = {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2}
    values = {"distributed_type": "DEEPSPEED", "num_processes": WORLD, "deepspeed_config": section}
    file = written("zero2_tp_offload", values | {"parallelism_config": sizes})
    assert curve(run(WORLD, "full", True, file)).agrees(reference("full", True))


@pytest.mark.long
def test_the_second_copy_of_zero_plus_plus_changes_nothing(tmp_path: Path) -> None:
    """Nor after a resume: DeepSpeed makes the copy anew at an update of its own alone."""
    finished = run(WORLD, "full", True, hpz())
    assert re.search(r"second copies +over 2\n", finished.output)
    assert curve(finished).agrees(reference("full", True))
    assert not curve(run(WORLD, "full", True, hpz(), control="mean-of-means")).agrees(reference("full", True))
    again = resumed(tmp_path / "again", WORLD, "full", finished.checkpoints[0], hpz())
    assert equal_after_resume(finished, again)


@pytest.mark.long
def test_moe_leaf_modules_change_nothing() -> None:
    """A mixture of experts under ZeRO 3, its expert layers gathered as one."""
    section = {"zero_stage": 3, "zero3_init_flag": False, "deepspeed_moe_layer_cls_names": "Qwen3MoeSparseMoeBlock"}
    leaf = written("leaf", {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section})
    alone = curve(trained(1, "qwen3_moe"))
    assert curve(trained(2, "qwen3_moe", leaf)).agrees(alone)
    assert alone.losses[-1] < alone.losses[0] - 0.05
