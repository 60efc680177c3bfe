"""FSDP 2 gathers matrices in the compute dtype: half of the bytes, and the same bits in everything that comes of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parallelism import measure
from benchmarks.shapes import empty_model
from tests.launching import ROOT, launch_well
from tests.parity.checks import same_bits
from tests.parity.runs import mostly_long, options, run
from trainers.embedded import BASE_DIR
from trainers.strategy.strategy import load_strategy
from trainers.strategy.traffic import ModelSizes

BF16: dict[str, Any] = {"mixed_precision": "bf16"}
IN_FP32 = """import os
if "RANK" in os.environ:
    from trainers.parallel import fsdp
    fsdp.casts_before_gathers = lambda *_: False
"""


@pytest.mark.parametrize("name", mostly_long(["fsdp2", "hsdp", "cp", "sp"], ["fsdp2"]))
def test_matrices_gathered_in_bf16_change_no_bit(name: str, tmp_path: Path) -> None:
    (tmp_path / "inject").mkdir()
    (tmp_path / "inject/sitecustomize.py").write_text(IN_FP32)
    path, ranks = f"{tmp_path / 'inject'}{os.pathsep}{ROOT}", load_strategy(name).num_processes
    whole = launch_well(tmp_path / "run", ranks, options("full", True, **BF16), strategy=name, by_hand=True,
                        timeout=600, PYTHONPATH=path)  # fmt: skip
    cast = run(ranks, "full", True, name, **BF16)
    assert same_bits(cast, whole)
    assert not same_bits(cast, run(ranks, "full", True, name)), "control: in fp32 they are others"


def test_half_of_the_bytes_of_the_layers_are_gathered(tmp_path: Path) -> None:
    strategy, sizes = load_strategy("fsdp2"), ModelSizes.of(empty_model(BASE_DIR))
    narrow = replace(sizes, casts_layers=True, matmul_bytes=2)
    measured = measure(tmp_path, strategy, BASE_DIR, steps=4, **BF16)
    gathered, others = ({term.collective: term.bytes for term in measured.expected(each)} for each in (narrow, sizes))
    assert measured.sent("all-gather") == pytest.approx(gathered["all-gather"], rel=0.01)
    assert measured.sent("all-gather") < 0.6 * others["all-gather"], "the embedding is not cast"
    assert measured.sent("reduce-scatter") == pytest.approx(others["reduce-scatter"], rel=0.01), "in fp32"
