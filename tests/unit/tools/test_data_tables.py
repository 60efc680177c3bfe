"""What `tunesmith data` and the Data page count of a mix, and the table of lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from app.cli import run_verb
from app.commands.data_tables import lengths_text, source_rows
from app.services.data import DataJob, close_data, data_job, known_rows, start_statistics
from tests.unit.tools.test_data_preview import until
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data import stream
from trainers.data.batches import TrainPlan
from trainers.data.prepare import prepare
from trainers.data.tables import QUANTILES, length_table
from trainers.tools.data_preview import Preview
from trainers.tools.preflight import make_rows
from ui.pages.data_parts import statistics_panel


@pytest.fixture
def _processes_end() -> Iterator[None]:
    yield
    close_data()


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def a_mix(folder: Path, strategy: str = "first_exhausted") -> str:
    write(folder / "small.jsonl", [f"row {number} " + "of a few words " * (number % 4) for number in range(30)])
    write(folder / "large.jsonl", [f"entry {number} " + "with other words " * (number % 7) for number in range(90)])
    mix = {"stopping_strategy": strategy, "sources": [
        {"dataset_name": "small.jsonl", "weight": 3}, {"dataset_name": "large.jsonl", "weight": 1, "limit": 60},
    ]}  # fmt: skip
    (folder / "mix.yaml").write_text(yaml.safe_dump(mix))
    return str(folder / "mix.yaml")


def config_of(folder: Path, **values: Any) -> TrainConfig:
    defaults = {"model_name_or_path": "embedded", "max_length": 64, "global_batch_size": 4,
                "per_device_train_batch_size": 1, "cache_dir": str(folder / "cache")}  # fmt: skip
    return build({**defaults, **values})


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("packing", [True, False])
def test_the_shares_and_passes_of_each_source_are_those_of_a_run(tmp_path: Path, strategy: str, packing: bool) -> None:
    config = config_of(tmp_path, mix=a_mix(tmp_path, strategy), packing=packing, eval_share=0.1)
    statistics = Preview(config).statistics()
    documents = prepare(config, "train")
    plan = TrainPlan(make_rows(config, documents), config, 1)
    read = plan.mix_order.rows_at(0, plan.mix_order.period * 40)  # type: ignore[union-attr]
    of_source = np.searchsorted(plan.rows.bounds, read, side="right") - 1
    tokens = np.bincount(of_source, plan.rows.lengths[read])
    for number, (source, part) in enumerate(zip(statistics["sources"], documents.parts, strict=True)):  # type: ignore[attr-defined]
        assert (source["rows"], source["documents"]) == (part.report.rows, len(part))
        assert (source["tokens"], source["trained_tokens"]) == (part.lengths.sum(), part.trained.sum())
        assert source["share"] == pytest.approx((of_source == number).mean())
        assert source["token_share"] == pytest.approx(tokens[number] / tokens.sum(), rel=0.05)
        epoch = plan.mix_order.counts(statistics["epoch_rows"])[number]  # type: ignore[union-attr]
        assert source["passes"] == pytest.approx(epoch / source["training_rows"], abs=1 / source["training_rows"])
    assert statistics["tokens"] == sum(source["tokens"] for source in statistics["sources"])
    assert sum(source["held_out"] for source in statistics["sources"]) == statistics["held_out"] > 0
    assert (max(source["passes"] for source in statistics["sources"]) > 1) == (strategy == "all_exhausted"), "control"


def test_passes_over_a_stream_are_estimated_by_its_first_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About those of the same mix in full; not those over the window, which are many times as many."""
    monkeypatch.setattr(stream, "SHARD_BYTES", 400)
    mix = a_mix(tmp_path, "all_exhausted")
    config = config_of(tmp_path, mix=mix, packing=False, max_steps=5, streaming_window=20)
    full, streamed = (Preview(own).statistics()["sources"]
                      for own in (config, config.model_copy(update={"dataset_streaming": True})))  # fmt: skip
    assert [source["streamed"] for source in (*full, *streamed)] == [False, False, True, True]
    for source, known in zip(streamed, full, strict=True):
        assert source["passes"] == pytest.approx(known["passes"], rel=0.2)
    assert sum(source["rows"] for source in streamed) < sum(source["rows"] for source in full), "control"
    table = source_rows(Preview(config.model_copy(update={"dataset_streaming": True})).statistics())
    assert table[0][0].endswith(" (first window)")
    assert table[0][-1].startswith("about ")


def test_rows_of_a_mix_are_shown_source_after_source(tmp_path: Path) -> None:
    look = Preview(config_of(tmp_path, mix=a_mix(tmp_path)))
    page = look.rows(28, 5)
    assert [row["where"].split(":")[0] for row in page["rows"]] == ["small"] * 2 + ["large"] * 3
    assert [row["number"] for row in page["rows"]] == [28, 29, 30, 31, 32]
    assert page["rows"][2]["where"].endswith("large.jsonl:1")
    assert look.rows(118, 5)["total"] == 120
    assert [row["use"] for row in look.rows(88, 4)["rows"]] == ["train"] * 2 + ["none"] * 2, "its limit"
    assert look.rows(500, 5)["rows"] == []


@pytest.mark.usefixtures("_processes_end", "elsewhere")
def test_the_verb_and_the_page_count_every_source(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["data", "tiny-lora", "--mix", a_mix(tmp_path), "--cache_dir", str(tmp_path), "--max_length", "64"]
    argv += ["--global_batch_size", "4", "--per_device_train_batch_size", "1", "--rows", "1"]
    assert run_verb([*argv, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert [(source["name"], source["rows"]) for source in document["sources"]] == [("small", 30), ("large", 60)]
    assert [row["where"].rpartition("/")[2] for row in document["shown"]] == ["small.jsonl:1", "large.jsonl:1"]
    assert run_verb(argv) == 0
    printed = capfd.readouterr().out
    assert [line.split()[:3] for line in printed.splitlines() if line.startswith(("small ", "large ", "all "))] == [
        ["small", "30", "30"], ["large", "60", "60"], ["all", "90", "90"],
    ]  # fmt: skip
    assert lengths_text(document) in printed
    page = str(statistics_panel(DataJob("done", statistics=document)))
    for cell in (cell for row in source_rows(document) for cell in row if cell):
        assert f">{cell}</td>" in page
    assert "median" in page


@pytest.mark.usefixtures("_processes_end", "elsewhere")
def test_a_counted_mix_is_known_until_a_source_changes(tmp_path: Path) -> None:
    config = config_of(tmp_path, mix=a_mix(tmp_path))
    assert known_rows(config) is None
    job = data_job(start_statistics(config))
    assert job is not None
    until(lambda: job.state not in ("waiting", "running"))
    assert job.state == "done", job.mistakes
    assert job.statistics is not None
    assert known_rows(config) == job.statistics["steps_per_epoch"] * config.global_batch_size
    with (tmp_path / "large.jsonl").open("a") as stream:
        stream.write('{"text": "more"}\n')
    assert known_rows(config) is None


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_quantiles_are_lengths_that_so_many_documents_have_at_most(lengths: list[int]) -> None:
    for entry in length_table(np.array(lengths, dtype=np.int64)):
        assert entry["tokens"] in lengths
        assert sum(length <= entry["tokens"] for length in lengths) >= entry["share"] * len(lengths) - 1e-6
        assert sum(length < entry["tokens"] for length in lengths) <= entry["share"] * len(lengths) + 1e-6
    assert [entry["share"] for entry in length_table(np.array(lengths))] == list(QUANTILES)
