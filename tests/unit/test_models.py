"""Each kind of model trains as the stock model does, by the program of the table in docs/models.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import models
from benchmarks.models import COLUMNS, judge, page, read_results
from tests.families import save_small
from tests.parity.runs import mostly_long

KINDS = ("qwen3", "phi3", "gemma2", "qwen3_moe", "qwen3_5_text", "llama4_text", "qwen3_vl", "mistral3")
"""Tied weights; fused projections; sliding windows and softcaps; experts; linear attention beside attention; attention
in chunks; images and text, one with positions of three axes."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("kind", mostly_long(KINDS, ["qwen3_moe", "qwen3_vl"]))
def test_a_first_step_is_the_stock_models(kind: str) -> None:
    row = judge(kind)
    assert {name: row[name] for name in COLUMNS} == {
        **dict.fromkeys(("full", "lora", "packed", "chunked_loss"), True),
        **dict.fromkeys(("fsdp2", "fsdp2_lora", "tp", "pp", "export")),
    }, row["reason"]


@pytest.mark.long
def test_two_ranks_and_the_export_of_a_sampled_type() -> None:
    """Attention sinks, whose weights are no matrix, and experts, whose plan tensor parallelism refuses."""
    row = judge("gpt_oss", sampled=True)
    values = {name: row[name] for name in COLUMNS}
    assert values == {**dict.fromkeys(COLUMNS, True), "tp": False, "pp": False}, row["reason"]
    assert "tp: " in row["reason"]
    assert "pp: " in row["reason"]


def test_documents_that_leak_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Control: layers that do not get the borders of documents, and no probe that would refuse them."""
    save_small(tmp_path / "model", "qwen3_5_text")
    monkeypatch.setattr("trainers.model.load.split_mixers", lambda model: None)
    monkeypatch.setattr("trainers.build.check_model_computes", lambda *args, **kwargs: None)
    verdict, _, reason = models._first_step(tmp_path, "full", True)
    assert verdict == "WRONG"
    assert reason
    assert "the stock model" in reason
    assert models._first_step(tmp_path, "full", False)[0] is True, "unpacked, there is nothing to leak"


def test_a_type_without_a_small_model_or_time_is_not_judged() -> None:
    assert judge("reformer")["reason"].startswith("no small model: AssertionError")
    late = judge("llama", seconds=0.01)
    assert late["reason"] == "not done after 0.01 s"
    assert {late[name] for name in COLUMNS} == {None}


def test_the_page_is_the_newest_result() -> None:
    results = read_results()
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == page(results)
    kinds = {row["model_type"] for row in results["rows"]}
    assert len(kinds) == len(results["rows"]) > 180
    assert not [row for row in results["rows"] if "WRONG" in row.values()]
    assert all(row["reason"] for row in results["rows"] if False in row.values())
