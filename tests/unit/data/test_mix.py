"""A mix keeps its shares in every prefix of a run, and its batches are a pure function on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainers.config.mistakes import ConfigError
from trainers.config.mix import Mix, read_mix
from trainers.config.mix import config_of as of_source
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data.batches import TrainPlan
from trainers.data.mix import MixedSet, MixOrder
from trainers.data.prepare import prepare
from trainers.tools.preflight import plan_training

WEIGHTS = st.lists(
    st.sampled_from([1, 2, 3, 7, 0.1, 0.25, 7.5, 0.01, 11, 1 / 3, 0.12345678901234568, 1234567, 891011]),
    min_size=1, max_size=7,
)  # fmt: skip


def order(weights: list[float], rows: list[int], strategy: str = "first_exhausted", seed: int = 1) -> MixOrder:
    sources = [{"dataset_name": f"d{number}", "weight": weight} for number, weight in enumerate(weights)]
    mix = Mix.model_validate({"sources": sources, "stopping_strategy": strategy})
    return MixOrder(np.cumsum([0, *rows]), mix, seed)


def largest_deviation(sources: np.ndarray, weights: list[float]) -> float:
    """Most rows by which a source is ahead of its share, or behind it, in any prefix."""
    counts = np.cumsum(np.eye(len(weights))[sources], axis=0)
    shares = np.array(weights) / sum(weights)
    return float(np.abs(counts - shares * np.arange(1, len(sources) + 1)[:, None]).max())


@settings(max_examples=150, deadline=None)
@given(WEIGHTS)
def test_shares_are_exact_within_a_row_in_every_prefix(weights: list[float]) -> None:
    mixed = order(weights, [5] * len(weights))
    assert largest_deviation(mixed.sources(0, min(2 * mixed.period, 3000)), weights) < 1


def test_a_draw_at_random_is_not_that_exact() -> None:
    weights = [0.7, 0.2, 0.1]
    drawn = np.random.default_rng(0).choice(3, size=1000, p=weights)
    assert largest_deviation(drawn, weights) > 5


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.data())
def test_no_row_is_repeated_before_its_source_is_read_in_full(weights: list[float], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(1, 30), min_size=len(weights), max_size=len(weights)))
    mixed = order(weights, rows)
    length = min(3 * mixed.period, 2000)
    taken, sources = mixed.rows_at(0, length), mixed.sources(0, length)
    start = data.draw(st.integers(0, length))
    assert (mixed.rows_at(start, length) == taken[start:]).all(), "a pure function of the position"
    orders = set()
    for source, count in enumerate(rows):
        of_source = taken[sources == source] - mixed.bounds[source]
        assert ((of_source >= 0) & (of_source < count)).all()
        for number in range(len(of_source) // count):
            one_pass = of_source[number * count : (number + 1) * count]
            assert sorted(one_pass) == list(range(count))
            orders.add((source, tuple(one_pass)))
    values = np.arange(mixed.bounds[-1]) * 3 + 1
    sums = [int(values[taken[sources == source]].sum()) for source in range(len(rows))]
    assert mixed.values_until(length, values) == sums


def test_each_pass_and_each_seed_has_an_order_of_its_own() -> None:
    rows = order([1], [20]).rows_at(0, 40)
    assert rows[:20].tolist() != rows[20:].tolist()
    assert rows[:20].tolist() != order([1], [20], seed=2).rows_at(0, 20).tolist()


SMALL = st.lists(st.sampled_from([1, 2, 3, 7, 0.5, 0.25]), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(SMALL, st.data())
def test_an_epoch_ends_when_its_strategy_says(weights: list[float], data: st.DataObject) -> None:
    """Against a walk along the order; the shares alone decide, which are exact within a row."""
    rows = data.draw(st.lists(st.integers(1, 30), min_size=len(weights), max_size=len(weights)))
    first, full = (order(weights, rows, name) for name in ("first_exhausted", "all_exhausted"))
    walk = np.cumsum(np.eye(len(rows), dtype=int)[first.sources(0, full.epoch_rows + first.period)], axis=0)
    repeats = int(np.argmax((walk > rows).any(1)))  # rows before the first that is repeated
    complete = int(np.argmax((walk >= rows).all(1))) + 1
    period = first.period / min(first.shares)
    assert first.epoch_rows <= repeats < first.epoch_rows + period + 1
    assert full.epoch_rows - period - 1 < complete <= full.epoch_rows


def test_weights_of_many_digits_and_of_any_size_have_an_order() -> None:
    for weights in ([0.9, 0.00012345678901234567], [123456.7, 1 / 3], [2e7, 1e-6, 5], [1.0] * 100):
        mixed = order(weights, [50] * len(weights))
        assert mixed.period <= 1.001e6
        assert largest_deviation(mixed.sources(0, 3000), weights) < 1
        far = 10**15 + 7
        assert mixed.rows_at(far, far + 8).shape == (8,)
        assert mixed.counts(far).sum() == far


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))


def texts(word: str, count: int) -> list[dict[str, Any]]:
    return [{"text": f"{word} {number} " * (1 + number % 7)} for number in range(count)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with `a.jsonl`, `b.jsonl` and `mix.yaml`."""
    write(tmp_path, "a.jsonl", texts("red", 60))
    write(tmp_path, "b.jsonl", texts("green", 90))
    save(tmp_path, [{"dataset_name": "a.jsonl", "weight": 3}, {"dataset_name": "b.jsonl"}])
    return tmp_path


def save(folder: Path, sources: list[dict[str, Any]], **more: Any) -> Path:
    path = folder / "mix.yaml"
    path.write_text(yaml.safe_dump({"sources": sources, **more}))
    return path


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    options = {"global_batch_size": 4, "max_length": 32, "cache_dir": str(folder / "cache")}
    return build({"model_name_or_path": "embedded", "mix": str(folder / "mix.yaml"), **options, **changes})


def planned(config: TrainConfig, world: int = 1) -> TrainPlan:
    return plan_training(config, prepare(config, "train"), world)


def where(plan: TrainPlan, step: int) -> list[str]:
    return [Path(place).name for place in plan.rows.locations(plan.rows_of(step))]


@pytest.mark.parametrize("packing", [True, False])
def test_documents_share_rows_within_their_source_alone(data: Path, packing: bool) -> None:
    plan = planned(config_of(data, packing=packing))
    together = 0
    for row in range(len(plan.rows)):
        places = [Path(place).name.partition(":")[0] for place in plan.rows.locations(np.array([row]))]
        assert len(set(places)) == 1
        together += len(places) > 1
    assert (together > 0) == packing
    assert plan.rows.bounds[0] == 0 < plan.rows.bounds[1] < plan.rows.bounds[2] == len(plan.rows)


def test_a_batch_is_the_same_on_any_number_of_ranks_and_after_a_resume(data: Path) -> None:
    config = config_of(data)
    plans = [planned(config, world) for world in (1, 2, 4)]
    for step in (0, 7, 3, 60):  # out of order, as a resumed run asks
        shares = [[rows for rank in range(plan.world) for rows in plan.shares(step, rank)] for plan in plans]
        chosen = [sorted(np.concatenate(of_ranks).tolist()) for of_ranks in shares]
        assert chosen[0] == chosen[1] == chosen[2]
        assert len(chosen[0]) == config.global_batch_size
        sums = [plan.batch(step, plan.world - 1).trained_by_source for plan in plans]
        assert sums[0] == sums[1] == sums[2], "counts of the global batch, on any rank"
    assert where(planned(config), 0) != where(planned(config.model_copy(update={"seed": 7})), 0)


def test_metrics_count_rows_and_tokens_of_each_source(data: Path) -> None:
    plan = planned(config_of(data))
    rows = np.concatenate([plan.rows_of(step) for step in range(5)])
    of_a = rows < plan.rows.bounds[1]
    assert plan.source_metrics(5) == {
        "share/a": of_a.mean(), "tokens/a": plan.rows.lengths[rows[of_a]].sum(),
        "share/b": 1 - of_a.mean(), "tokens/b": plan.rows.lengths[rows[~of_a]].sum(),
    }  # fmt: skip
    batch = plan.batch(2, 0)
    assert sum(batch.trained_by_source.values()) == batch.trained_tokens
    labels = sum(len(micro.labels) for micro in batch.micro_batches)
    counts = sum(np.bincount(micro.sources.of_label, minlength=2) for micro in batch.micro_batches if micro.sources)
    assert counts.sum() == labels
    assert dict(zip("ab", counts.tolist(), strict=True)) == batch.trained_by_source


def test_a_source_has_options_of_its_own(data: Path) -> None:
    chat = [{"q": f"What is {number}?", "a": f"It is {number}."} for number in range(50)]
    write(data, "c.jsonl", chat)
    columns = {"prompt": "q", "completion": "a"}
    sources: list[dict[str, Any]] = [
        {"dataset_name": "a.jsonl", "limit": 10, "name": "text"}, {"dataset_name": "c.jsonl", "columns": columns},
        {"dataset_name": "c.jsonl", "columns": {**columns}, "loss": "all", "name": "everything"},
    ]  # fmt: skip
    save(data, sources)
    mixed = prepare(config_of(data), "train")
    assert isinstance(mixed, MixedSet)
    assert mixed.mix.names == ["text", "c", "everything"]
    text, answers, everything = mixed.parts
    assert text.report.rows == 10
    assert answers.report.trained_tokens < everything.report.trained_tokens
    assert answers.report.tokens == everything.report.tokens
    assert [line.split(":")[0] for line in (report.lines()[0] for report in mixed.reports)] == [
        f"train data {name} ({part.report.dataset})" for name, part in zip(mixed.mix.names, mixed.parts, strict=True)
    ]
    # Documents and their places are those of the parts, source after source.
    for index in (0, 9, 10, 59, 60, 109):
        part, local = (text, index) if index < 10 else (answers, index - 10) if index < 60 else (everything, index - 60)
        assert mixed.document(index)[0].tolist() == part.document(local)[0].tolist()
        assert mixed.where(index) == part.where(local)
    both = np.array([70, 3])
    assert mixed.gather(both)[0].tolist() == [*mixed.document(70)[0], *mixed.document(3)[0]]


def test_eval_share_holds_rows_of_each_source_out(data: Path) -> None:
    config = config_of(data, eval_share=0.1)
    train, evaluation = prepare(config, "train"), prepare(config, "eval")
    assert isinstance(train, MixedSet)
    assert isinstance(evaluation, MixedSet)
    held_out = [part.report.rows for part in evaluation.parts]
    assert held_out == [part.report.held_out for part in train.parts]
    assert all(held_out)
    trained = {train.where(index) for index in range(len(train))}
    assert not trained & {evaluation.where(index) for index in range(len(evaluation))}


def test_the_fingerprint_follows_data_and_weights(data: Path) -> None:
    config = config_of(data)
    before = prepare(config, "train").fingerprint
    save(data, [{"dataset_name": "a.jsonl", "weight": 3.0, "name": "other"}, {"dataset_name": "b.jsonl"}])
    assert prepare(config, "train").fingerprint == before, "a name changes no batch"
    save(data, [{"dataset_name": "a.jsonl", "weight": 2}, {"dataset_name": "b.jsonl"}])
    changed = prepare(config, "train").fingerprint
    write(data, "b.jsonl", texts("blue", 90))
    assert len({before, changed, prepare(config, "train").fingerprint}) == 3


BAD: list[tuple[Any, str]] = [
    ({}, "has no sources"),
    ({"sources": []}, "sources"),
    ({"sources": [{"weight": 1}]}, "has no source 1: dataset_name"),
    ({"sources": [{"dataset_name": "a.jsonl", "weigth": 2}]}, "did you mean weight?"),
    ({"sources": [{"dataset_name": "a.jsonl", "weight": 0}]}, "source 1: weight=0 is refused"),
    ({"sources": [{"dataset_name": "a.jsonl", "weight": float("nan")}]}, "source 1: weight=nan is refused"),
    ({"sources": [{"dataset_name": "a.jsonl", "limit": 0}]}, "source 1: limit=0 is refused"),
    ({"sources": [{"dataset_name": "a.jsonl", "loss": "some"}]}, "source 1: loss='some' is refused"),
    ({"sources": [{"dataset_name": "a.jsonl"}, {"dataset_name": "x/a.csv"}]}, "2 sources of the name 'a'"),
    ({"sources": [{"dataset_name": "a.jsonl", "name": "a/b"}]}, "names a source 'a/b'"),
    ({"sources": [{"dataset_name": "a.jsonl"}], "stop": "first"}, "unknown key, stop"),
    ({"sources": "a.jsonl"}, "sources='a.jsonl' is refused"),
    ({"sources": ["a.jsonl"]}, "write `- dataset_name: ...`"),
    ({"sources": [{"dataset_name": "a.jsonl", "limit": True}]}, "source 1: limit=True is refused"),
    ({"sources": [{"dataset_name": "a.jsonl", "weight": True}]}, "source 1: weight=True is refused"),
    ({"sources": [{"dataset_name": "a.jsonl", "weight": "3"}]}, "source 1: weight='3' is refused"),
    ({"sources": [{"dataset_name": "none"}]}, "names 'none' as the data"),
    ({"sources": [{"dataset_name": "x" * 300}]}, "names a file that cannot be"),
    ({"sources": [{"dataset_name": "~nosuchuser/a.jsonl"}]}, "names a file that cannot be"),
]  # fmt: skip


@pytest.mark.parametrize(("contents", "message"), BAD)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, contents: Any, message: str) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump(contents))
    with pytest.raises(ConfigError) as error:
        read_mix(str(path))
    assert str(path) in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"dataset_name": "missing.jsonl"}, "missing.jsonl"),
        ({"dataset_name": "a.jsonl", "dataset_format": "strange"}, "source a: dataset_format='strange'"),
        ({"dataset_name": "a.jsonl", "columns": {"nonsense": "text"}}, "source a: columns.nonsense"),
        ({"dataset_name": "bad.jsonl"}, "bad.jsonl:2"),
    ],
)
def test_a_mistake_in_a_source_is_named(data: Path, source: dict[str, Any], message: str) -> None:
    (data / "bad.jsonl").write_text('{"text": "one"}\n{"text": \n')
    save(data, [source, {"dataset_name": "b.jsonl"}])
    with pytest.raises(ConfigError, match=r"mix\.yaml") as error:
        prepare(config_of(data), "train")
    assert message in str(error.value)


def test_paths_are_those_beside_the_mix(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = data / "elsewhere"
    (elsewhere / "org").mkdir(parents=True)
    write(elsewhere, "here.jsonl", texts("blue", 5))
    monkeypatch.chdir(elsewhere)
    save(data, [{"dataset_name": "here.jsonl"}, {"dataset_name": "sub/../a.jsonl"}, {"dataset_name": "some/set-2.5"}])
    sources = read_mix(str(data / "mix.yaml")).sources
    assert [source.dataset_name for source in sources] == [
        str(data / "here.jsonl"),
        str(data / "a.jsonl"),
        "some/set-2.5",
    ]
    assert [source.label for source in sources] == ["here", "a", "set-2.5"]
    with pytest.raises(ConfigError, match=r"here\.jsonl does not exist"):
        prepare(config_of(data), "train")
    save(data, [{"dataset_name": "."}, {"dataset_name": f"{data.name}.jsonl"}])
    with pytest.raises(ConfigError, match="2 sources of the name"):
        read_mix(str(data / "mix.yaml"))
    save(data, [{"dataset_name": "org"}])
    with pytest.raises(ConfigError, match="not beside the mix"):
        read_mix(str(data / "mix.yaml"))


def test_a_source_may_have_no_template_of_its_own(data: Path) -> None:
    (data / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    save(data, [{"dataset_name": "a.jsonl", "chat_template": "none"}, {"dataset_name": "b.jsonl"}])
    config = config_of(data, chat_template=str(data / "t.jinja"))
    first, second = (of_source(config, source) for source in read_mix(str(config.mix)).sources)
    assert (first.chat_template, second.chat_template) == (None, str(data / "t.jinja"))


def test_an_epoch_without_a_full_batch_is_refused(data: Path) -> None:
    save(data, [{"dataset_name": "a.jsonl", "limit": 1}, {"dataset_name": "b.jsonl"}])
    with pytest.raises(ConfigError, match="an epoch ends with the first source that has no more"):
        planned(config_of(data))
    save(
        data, [{"dataset_name": "a.jsonl", "limit": 1}, {"dataset_name": "b.jsonl"}], stopping_strategy="all_exhausted"
    )
    assert planned(config_of(data)).steps_per_epoch > 1


def test_options_that_do_not_fit_a_mix_are_refused() -> None:
    values = {"model_name_or_path": "x", "mix": "mix.yaml"}
    for name, value in (("dataset_name", "x"), ("max_train_samples", 3)):
        with pytest.raises(ConfigError, match=str(name)):
            build({**values, name: value})
    with pytest.raises(ConfigError, match="dataset_name is missing"):
        build({"model_name_or_path": "x"})
    assert build(values).training_data == "mix.yaml"
