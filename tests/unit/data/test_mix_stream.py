"""A mix with streams among its sources: exact shares, and batches that are a pure function of data, seed and step."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data.test_stream import Alone, texts, write
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build, ignored_choices
from trainers.data import stream
from trainers.data.prepare import cached, files_of, prepare
from trainers.data.stream import streams_of
from trainers.data.stream_plan import StreamPlan
from trainers.tools.preflight import plan_training

ROWS = {"streamed": 120, "small": 30, "held": 25}
WEIGHTS = {"streamed": 5, "small": 2, "held": 1.5}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of three sources, with a cache that the tests share."""
    made = tmp_path_factory.mktemp("mix")
    for name, count in ROWS.items():
        write(made / f"{name}.jsonl", texts(count))
    return made


def config_of(
    folder: Path, streaming: dict[str, Any] | None = None, ends: str = "all_exhausted", **changes: Any
) -> TrainConfig:
    own = {"streamed": True, "small": True} if streaming is None else streaming
    sources = [
        {"dataset_name": f"{name}.jsonl", "weight": WEIGHTS[name], **({"streaming": own[name]} if name in own else {})}
        for name in ROWS
    ]
    file = folder / f"mix-{ends}-{len(own)}.yaml"
    file.write_text(yaml.safe_dump({"sources": sources, "stopping_strategy": ends}))
    options = {
        "model_name_or_path": "embedded", "mix": str(file), "global_batch_size": 8, "max_length": 64,
        "per_device_train_batch_size": 1, "cache_dir": str(folder / "cache"), "streaming_window": 40,
        "max_steps": 10**6, "dataset_num_proc": 1,
    }  # fmt: skip
    return build({**options, **changes})


def planned(config: TrainConfig, world: int = 1) -> StreamPlan:
    plan = plan_training(config, prepare(config, "train"), world)
    assert isinstance(plan, StreamPlan)
    return plan


def source_of(location: str) -> str:
    return Path(location.rpartition(":")[0]).stem


def bits(plan: StreamPlan, step: int, rank: int = 0) -> list[bytes]:
    batch = plan.batch(step, rank)
    return [micro.input_ids.numpy().tobytes() + micro.labels.numpy().tobytes() for micro in batch.micro_batches]


@cache
def walked(folder: Path, packing: bool, seed: int) -> tuple[StreamPlan, list[list[str]], list[list[bytes]]]:
    """A plan, with the locations and bits of its first 60 batches."""
    plan = planned(config_of(folder, packing=packing, seed=seed))
    return plan, [plan.locations(step) for step in range(60)], [bits(plan, step) for step in range(60)]


@pytest.mark.parametrize("packing", [True, False])
def test_shares_are_exact_in_every_prefix_and_rows_hold_one_source(folder: Path, packing: bool) -> None:
    plan, _, _ = walked(folder, packing, 0)
    labels = list[str]()
    for step in range(60):
        rows, chosen = plan.chosen(step)
        for row in chosen.tolist():
            sources = {source_of(place) for place in rows.locations(np.array([row]))}
            assert len(sources) == 1, "documents share rows with documents of their source alone"
            labels += sources
    counts = np.cumsum([[label == name for name in ROWS] for label in labels], axis=0)
    shares = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    exact = np.arange(1, len(labels) + 1)[:, None] * shares
    assert np.abs(counts - exact).max() < 1
    drawn = np.random.default_rng(0).choice(3, size=len(labels), p=shares)
    assert np.abs(np.cumsum(np.eye(3)[drawn], axis=0) - exact).max() > 2, "control: a draw at random"
    metrics = plan.source_metrics(60)
    assert metrics["share/streamed"] == pytest.approx(shares[0], abs=1 / len(labels))
    assert metrics["tokens/streamed"] > 0


def test_tokens_of_prompts_are_not_counted_as_those_of_a_source(folder: Path) -> None:
    plan = planned(config_of(folder))
    plan.config = plan.config.model_copy(update={"objective": "grpo"})
    assert {name.partition("/")[0] for name in plan.source_metrics(3)} == {"share"}


def test_each_source_is_read_in_full_before_a_row_of_it_is_repeated(folder: Path) -> None:
    _, places, _ = walked(folder, False, 0)
    for name, count in ROWS.items():
        lines = [place for batch in places for place in batch if source_of(place) == name]
        assert len(lines) > count, "control: it is read more than once"
        assert len({*lines[:count]}) == count
        assert lines[:count] != lines[count : 2 * count], "each pass has an order of its own"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1), st.booleans(), st.integers(0, 50))
def test_a_batch_is_a_function_of_the_step_and_what_a_checkpoint_holds(
    folder: Path, seed: int, packing: bool, step: int
) -> None:
    plan, places, contents = walked(folder, packing, seed)
    saved = json.loads(json.dumps(plan.position(step)))
    config = config_of(folder, packing=packing, seed=seed)
    for world in (1, 2, 4):
        resumed = planned(config, world)
        resumed.restore(step, saved)
        for later in range(step, step + 4):
            shares = [content for rank in range(world) for content in bits(resumed, later, rank)]
            assert Counter(shares) == Counter(contents[later]), "bit for bit, on any number of ranks"
            assert resumed.locations(later) == places[later]
            assert resumed.source_metrics(later) == plan.source_metrics(later)
            assert resumed.epochs(later) == plan.epochs(later)
    other = planned(config)
    moved = {**saved[0], "rows": max(saved[0]["rows"] - 1, 0) if saved[0]["rows"] else 1}
    other.restore(step, [moved, *saved[1:]])
    assert other.locations(step) != places[step], "control: another position of one stream"


def test_an_epoch_ends_with_the_first_or_the_last_source(folder: Path) -> None:
    first, last = (planned(config_of(folder, ends=f"{name}_exhausted", packing=False)) for name in ("first", "all"))
    assert first.steps_per_epoch < last.steps_per_epoch
    for plan, end in ((first, max), (last, min)):
        counts = Counter(source_of(place) for step in range(30) for place in plan.locations(step))
        assert plan.epochs(30) == pytest.approx(end(counts[name] / ROWS[name] for name in ROWS), rel=0.02)


def test_ranks_agree_on_each_window_of_each_stream_once(folder: Path) -> None:
    class Counting(Alone):
        calls = 0

        def gather(self, value: Any) -> list[Any]:
            self.calls += 1
            return [value]

    plan, ranks = planned(config_of(folder, packing=False)), Counting()
    for step in range(40):
        plan.agree(step, ranks)
    rows = plan.source_order.counts(40 * 8).tolist()
    windows = sum(len(source.stream.windows(0)) * rows[number] / ROWS[name]
                  for number, name, source in zip(range(2), ROWS, plan.sources, strict=False))  # fmt: skip
    assert abs(ranks.calls - windows) <= 2


def test_the_run_decides_for_sources_that_do_not_say(folder: Path) -> None:
    every = config_of(folder, streaming={"held": False}, dataset_streaming=True)
    assert [source.label for source in streams_of(prepare(every, "train"))] == ["streamed", "small"]
    assert cached(every, "train") is not None
    assert [file.name for file in files_of(every, "train")] == [f"{name}.jsonl" for name in ROWS]
    none = config_of(folder, streaming={})
    assert streams_of(prepare(none, "train")) == []


def test_what_does_not_fit_is_refused_with_the_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"source streamed.*dataset_streaming=true needs max_steps"):
        prepare(config_of(folder, max_steps=None), "train")
    with pytest.raises(ConfigError, match=r"source 1: streaming='yes' is refused"):
        prepare(config_of(folder, streaming={"streamed": "yes"}), "train")
    monkeypatch.setattr(stream, "_MIB", 4096)
    with pytest.raises(ConfigError, match=r"streaming_cache=9 .*two windows .* of each of 2 streams") as refused:
        prepare(config_of(folder, streaming_cache=9, cache_dir=str(folder / "tiny")), "train")
    enough = int(str(refused.value).partition("use ")[2].split()[0])
    plan = planned(config_of(folder, streaming_cache=enough, cache_dir=str(folder / "tiny")))
    for step in range(30):
        plan.agree(step, Alone())
        assert plan.batch(step, 0).tokens > 0


def test_the_window_counts_for_sources_that_are_streams(folder: Path) -> None:
    config = config_of(folder)
    assert [str(warning) for warning in ignored_choices(config)] == []
    alone = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "streaming_window": 40})
    assert [str(warning) for warning in ignored_choices(alone)] == [
        "streaming_window is ignored: dataset_streaming is off"
    ], "control"
