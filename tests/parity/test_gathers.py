"""FSDP and ZeRO 3 gather matrices in the compute dtype, FSDP 2 a layer ahead: half of the bytes, and the same bits."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallelism import measure
from benchmarks.shapes import empty_model, model_folder
from tests.launching import ROOT, launch_well
from tests.parity.checks import equal_after_resume, same_bits
from tests.parity.runs import mostly_long, options, run
from trainers.strategy.strategy import load_strategy
from trainers.strategy.traffic import ModelSizes

BF16: dict[str, Any] = {"mixed_precision": "bf16"}
IN_FP32 = """import os
if "RANK" in os.environ:
    import torch
    from trainers.parallel import {module} as module
    if {version} == 1:  # the same units: others would sum the squares of gradients in another order
        real = module.MixedPrecision
        module.MixedPrecision = lambda dtype, **more: real(torch.float32, **more)
    else:
        module.cast_before_gather = lambda *_: set()
        module.prefetch_layers = lambda *_: None
"""
"""Gathers in fp32, and nothing ahead."""
ORDER = """import os
if "RANK" in os.environ:
    import json, re
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from trainers.parallel import fsdp
    steps, events, plain, prefetch, step = [], [], FSDPParamGroup.unshard, fsdp.prefetch_layers, fsdp.FullySharded.step

    def unshard(group, *args):
        found = re.search(r"layers[.](\\d+)[.]", group._module_fqn or "")
        if found and not group.is_unsharded and group._all_gather_result is None:
            events.append(f"gather {found[1]}")
        plain(group, *args)

    def watched(loss, layers):
        prefetch(loss, layers)
        for index, layer in enumerate(layers):
            def forward(module, inputs, output, index=index):
                events.append(f"forward {index}")
                if output[0].requires_grad:  # not when the kernel is tried, before the first step
                    output[0].register_hook(lambda gradient: events.append(f"backward {index}"))
            layer.self_attn.register_forward_hook(forward)

    def stepped(backend):
        step(backend)
        if os.environ["RANK"] == "0":
            with open(FILE, "a") as file:
                print(json.dumps(events), file=file)
        events.clear()
        steps.append(1)
        for module in backend.model.modules():  # control: in the third step, nothing is asked for
            if len(steps) == 2 and isinstance(module, FSDPModule):
                module.set_modules_to_forward_prefetch([])
                module.set_modules_to_backward_prefetch([])

    FSDPParamGroup.unshard, fsdp.prefetch_layers, fsdp.FullySharded.step = unshard, watched, stepped
"""
"""Writes in which order rank 0 gathers the matrices of layers and computes their attention, a line for each step."""


@pytest.mark.parametrize(
    "name", mostly_long(["fsdp2", "hsdp", "cp", "sp", "fsdp1", "fsdp1_grad_op", "zero3", "zero3_offload"], [])
)
def test_matrices_gathered_in_bf16_change_no_bit(name: str, tmp_path: Path) -> None:
    strategy = load_strategy(name)
    (tmp_path / "inject").mkdir()
    (tmp_path / "inject/sitecustomize.py").write_text(
        IN_FP32.format(module="zero" if strategy.zero_stage else "fsdp", version=strategy.fsdp_version)
    )
    path, ranks = f"{tmp_path / 'inject'}{os.pathsep}{ROOT}", strategy.num_processes
    whole = launch_well(tmp_path / "run", ranks, options("full", True, **BF16), strategy=name, by_hand=True,
                        timeout=600, PYTHONPATH=path)  # fmt: skip
    cast = run(ranks, "full", True, name, **BF16)
    assert same_bits(cast, whole)
    assert not same_bits(cast, run(ranks, "full", True, name)), "control: in fp32 they are others"


@pytest.mark.parametrize("name", mostly_long(["fsdp1", "zero3"], []))
def test_a_resumed_run_has_the_same_bits(name: str, tmp_path: Path) -> None:
    """Checkpoints hold fp32 weights, from which those that are kept gathered are cast again."""
    undisturbed = run(2, "full", True, name, **BF16)
    more = {**BF16, "resume_from_checkpoint": undisturbed.checkpoints[0]}
    again = launch_well(tmp_path / "again", 2, options("full", True, **more), strategy=name)
    assert equal_after_resume(undisturbed, again)


@pytest.mark.parametrize("checkpointing", mostly_long([False, True], []))
def test_the_next_layer_is_gathered_before_one_computes(tmp_path: Path, checkpointing: bool) -> None:
    """Of four layers; recomputed ones are gathered no more often. Without, each is gathered as it is needed."""
    (tmp_path / "inject").mkdir()
    file = tmp_path / "events"
    (tmp_path / "inject/sitecustomize.py").write_text(ORDER.replace("FILE", repr(str(file))))
    more = {
        "max_steps": 3,
        "global_batch_size": 4,
        "eval_dataset_name": "none",
        "gradient_checkpointing": checkpointing,
    }
    launch_well(tmp_path / "run", 2, options("full", True, **BF16, **more), strategy="fsdp2", by_hand=True,
                PYTHONPATH=f"{tmp_path / 'inject'}{os.pathsep}{ROOT}")  # fmt: skip
    _, ahead, needed = (json.loads(line) for line in file.read_text().splitlines())
    assert without_recomputed(ahead) == spelled("g0 g1 f0 g2 f1 g3 f2 f3 g3 g2 b3 g1 b2 g0 b1 b0")
    assert without_recomputed(needed) == spelled("g0 f0 g1 f1 g2 f2 g3 f3 g3 b3 g2 b2 g1 b1 g0 b0")


def spelled(short: str) -> list[str]:
    names = {"g": "gather", "f": "forward", "b": "backward"}
    return [f"{names[one[0]]} {one[1:]}" for one in short.split()]


def without_recomputed(events: list[str]) -> list[str]:
    """Without the second forward pass of a layer."""
    return [one for at, one in enumerate(events) if not one.startswith("forward") or one not in events[:at]]


@pytest.mark.parametrize("name", mostly_long(["fsdp1", "fsdp2", "zero3"], []))
def test_half_of_the_bytes_of_the_layers_are_gathered(name: str, tmp_path: Path) -> None:
    """A model large enough that ZeRO 3 does not keep its matrices."""
    folder = model_folder("24M", tmp_path)
    strategy, sizes = load_strategy(name), ModelSizes.of(empty_model(folder))
    narrow = replace(sizes, casts_layers=True, matmul_bytes=2)
    measured = measure(tmp_path / "run", strategy, folder, steps=4, **BF16)
    gathered, others = ({term.collective: term.bytes for term in measured.expected(each)} for each in (narrow, sizes))
    assert measured.sent("all-gather") == pytest.approx(gathered["all-gather"], rel=0.01)
    assert measured.sent("all-gather") < 0.8 * others["all-gather"], "the embedding is not cast"
    assert measured.sent("reduce-scatter") == pytest.approx(others["reduce-scatter"], rel=0.01), "in fp32"
