"""What is installed: against the bounds, each other and known faults, by metadata that really lies there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.doctor.versions import BAD_PAIRS, Setting, installed, version_checks
from tests.launching import ROOT
from trainers.strategy.strategy import load_strategy, resolve

PLAIN = Setting(load_strategy("ddp"), has_gpu=False)


def metadata_of(folder: Path, name: str, version: str, *requires: str) -> None:
    """A distribution, as pip leaves it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
    (info / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines, ""]))


def test_this_environment_is_sound() -> None:
    assert [check.passed for check in version_checks(PLAIN)] == [True, True, True]


def test_a_second_environment_with_wrong_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata_of(tmp_path, "transformers", "4.1.0")
    metadata_of(tmp_path, "torchvision", "0.20.0", "torch==2.5.0")
    metadata_of(tmp_path, "gradio", "6.19.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    bounds, requirements, pairs = version_checks(PLAIN)
    assert (bounds.passed, requirements.passed, pairs.passed) == (False, False, False)
    assert "transformers>=5.17, and 4.1.0 is installed" in bounds.value
    assert "torchvision 0.20.0 wants torch==2.5.0, and 2." in requirements.value
    assert "gradio 6.19.0: pages leak files" in pairs.value
    assert "CVE-2026-27167" in pairs.value
    assert bounds.remedy
    assert requirements.remedy
    assert "gradio>=6.31" in pairs.remedy


def test_the_first_on_the_path_counts(tmp_path: Path) -> None:
    metadata_of(tmp_path, "accelerate", "0.1")
    code = "from app.doctor.versions import installed; print(installed()['accelerate'])"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, cwd=ROOT,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert done.stdout.strip() == "0.1"
    assert installed()["accelerate"] != "0.1"


def test_zbv_needs_a_newer_torch_on_a_cpu_alone() -> None:
    zbv = replace(resolve(load_strategy("pp"), 2, "no"), pp_schedule="zbv")
    versions = {**installed(), "torch": "2.11.0"}
    assert version_checks(Setting(zbv, False), versions)[2].passed is False
    assert version_checks(Setting(zbv, True), versions)[2].passed is True
    assert version_checks(PLAIN, versions)[2].passed is True


def test_every_pair_says_where_it_is_from_and_what_to_do() -> None:
    assert all(pair.source and pair.remedy and pair.problem for pair in BAD_PAIRS)
