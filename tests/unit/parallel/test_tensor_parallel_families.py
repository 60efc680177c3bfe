"""Tensor parallelism gives one process's loss and gradients for every family of transformers that it accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.parallel.tensor_parallel_families import CONTROL

ROOT = Path(__file__).resolve().parents[3]
TOLERANCE = 5e-5
"""Of relative differences in fp32: ten times the largest seen of 48 families."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By family, the largest difference on two ranks, or why the family is refused."""
    folder = tmp_path_factory.mktemp("families")
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = []
    for rank in ("0", "1"):
        arguments = [str(folder / "store"), rank, str(folder / "report.json")]
        command = [sys.executable, "-m", "tests.unit.parallel.tensor_parallel_families", *arguments]
        with (folder / f"log-{rank}.txt").open("wb") as log:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=alone, stdout=log, stderr=subprocess.STDOUT))
    failed = [number for number, rank in enumerate(ranks) if rank.wait(timeout=500)]
    assert not failed, (folder / f"log-{failed[0]}.txt").read_text(encoding="utf-8")
    answers: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return answers


def test_every_accepted_family_is_its_model(report: dict[str, Any]) -> None:
    accepted = {family: value for family, value in report.items() if isinstance(value, list) and family != CONTROL}
    assert {family: value for family, (value, _) in accepted.items() if not value < TOLERANCE} == {}
    assert {"llama", "qwen3", "gemma3", "helium", "nemotron", "gpt_neox", "olmo_hybrid"} <= accepted.keys()
    assert len(accepted) > 40


def test_tokens_are_divided_where_only_norms_see_them(report: dict[str, Any]) -> None:
    """nanochat calls its final norm twice; others mix tokens, or have matrices, outside of the blocks."""
    whole = {family for family, value in report.items() if isinstance(value, list) and not value[1]}
    assert whole == {"hrm_text", "nanochat", "olmo_hybrid", "phi4_multimodal", "youtu"}


def test_a_mistake_would_be_seen(report: dict[str, Any]) -> None:
    assert report[CONTROL][0] > 100 * TOLERANCE


def test_a_refused_family_is_named_with_another_way(report: dict[str, Any]) -> None:
    refused = {family: reason for family, reason in report.items() if isinstance(reason, str)}
    assert refused
    assert [family for family, reason in refused.items() if "use tp_size=1" not in reason] == []
