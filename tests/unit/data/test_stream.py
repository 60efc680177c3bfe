"""A stream reads every row once an epoch, in windows; its batches are a pure function of data, seed and step."""

from __future__ import annotations

import json
import os
import re
import resource
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parity.runs import mostly_long
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data import cache, stream, stream_split
from trainers.data.gathered import GatheredSet
from trainers.data.prepare import cached, prepare, prepare_splits
from trainers.data.rows import Rows
from trainers.data.stream import Stream, Window, WindowSet, stream_lines
from trainers.data.stream_plan import StreamPlan
from trainers.data.stream_rows import StreamedRows
from trainers.run.errors import TrainingError
from trainers.run.folder import write_json
from trainers.run.manifest import FORMAT, seal
from trainers.tools.data_preview import Preview
from trainers.tools.preflight import describe_plan, plan_training

MIB = 1 << 20


class Alone:
    """The ranks of a run with a single process."""

    is_main = True

    def gather(self, value: Any) -> list[Any]:
        return [value]


class WithAnother(Alone):
    """Beside a rank that reads something else."""

    def __init__(self, other: Any):
        self.other = other

    def gather(self, value: Any) -> list[Any]:
        return [value, self.other]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SHARD_BYTES", 700)


def own_memory() -> float:
    """Private memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def texts(count: int) -> list[dict[str, str]]:
    return [{"text": f"row {number} " * (1 + number % 5)} for number in range(count)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", texts(300))


def config_of(data: Path, **changes: Any) -> TrainConfig:
    options = {
        "model_name_or_path": "embedded", "dataset_name": str(data), "global_batch_size": 4, "max_length": 64,
        "cache_dir": str(data.parent / "cache"), "dataset_streaming": True, "streaming_window": 60, "max_steps": 10**6,
        "dataset_num_proc": 1,
    }  # fmt: skip
    return build({**options, **changes})


def planned(config: TrainConfig, world: int = 1) -> StreamPlan:
    plan = plan_training(config, prepare(config, "train"), world)
    assert isinstance(plan, StreamPlan)
    return plan


def stream_of(plan: StreamPlan) -> Stream:
    (source,) = plan.sources
    assert isinstance(source, StreamedRows)
    return source.stream


def pieces_of(rows: Rows) -> int:
    """How many windows the rows of a batch are from."""
    assert isinstance(rows.documents, GatheredSet)
    return len(rows.documents.pieces)


def walk(plan: StreamPlan, steps: int) -> int:
    """Agrees on the data of the first steps; returns their number."""
    for step in range(steps):
        plan.agree(step, Alone())
    return steps


def line_of(location: str) -> int:
    return int(location.rpartition(":")[2])


@pytest.mark.parametrize(("packing", "window", "size"), [(True, 60, 4), (False, 60, 7), (False, 17, 3), (True, 999, 2)])
def test_every_row_is_read_once_in_each_epoch(data: Path, packing: bool, window: int, size: int) -> None:
    config = config_of(data, packing=packing, streaming_window=window, global_batch_size=size)
    plan, lines, step = planned(config), list[int](), 0
    while plan.epochs(step) < 2:
        lines += map(line_of, plan.locations(step))
        step += 1
    assert Counter(lines[:300]) == Counter(range(1, 301))
    assert lines[:300] != lines[300:600], "each epoch has an order of its own"
    in_full = config.model_copy(update={"dataset_streaming": False})
    whole = plan_training(in_full, prepare(in_full, "train"), 1)
    assert lines[:20] != [line_of(place) for at in range(9) for place in whole.locations(at)][:20], "control"
    if not packing:
        assert Counter(lines[300:600]) == Counter(range(1, 301))


def test_rows_are_shuffled_within_windows_of_the_size_that_is_asked_for(data: Path) -> None:
    config = config_of(data, packing=False, group_by_length=False)
    plan = planned(config)
    shards = stream_of(plan).shards
    for epoch in range(3):
        windows = stream_of(plan).windows(epoch)
        assert sorted(shard for window in windows for shard in window) == list(range(len(shards)))
        rows = [sum(shards[shard].rows for shard in window) for window in windows]
        largest = max(shard.rows for shard in shards)
        assert all(60 <= count < 60 + largest for count in rows[:-1])
        assert 60 <= rows[-1] < 2 * 60 + largest
    read = [line_of(place) for step in range(15) for place in plan.locations(step)]
    first = [shards[shard] for shard in stream_of(plan).windows(0)[0]]
    assert {*read[:60]} <= {line for shard in first for line in range(shard.line, shard.line + shard.rows)}
    assert read[:60] != sorted(read[:60])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 3), st.sampled_from([12, 40, 150]), st.sampled_from([2, 4, 8]), st.data())
def test_a_batch_is_a_function_of_the_step_and_what_a_checkpoint_holds(
    data: Path, seed: int, window: int, size: int, draw: st.DataObject
) -> None:
    changes = {"seed": seed, "streaming_window": window, "global_batch_size": size, "packing": False}
    config = config_of(data, **changes, per_device_train_batch_size=1)
    walked, steps = planned(config), 2 * 300 // size
    batches = [walked.locations(step) for step in range(steps)]
    step = draw.draw(st.integers(0, steps - 1))
    saved = json.loads(json.dumps(walked.position(step)))
    for world in (1, 2):
        resumed = planned(config, world)
        resumed.restore(step, saved)
        for later in range(step, min(step + 6, steps)):
            assert resumed.locations(later) == batches[later]
            shares = [place for rank in range(world) for place in resumed.locations(later, rank)]
            assert Counter(shares) == Counter(batches[later])
    assert planned(config).locations(step) == batches[step], "also without a position"
    (only,) = saved
    if only["rows"] + 1 < size:
        other = planned(config)
        other.restore(step, [{**only, "rows": only["rows"] + 1}])
        assert other.locations(step) != batches[step], "control: another position"


def test_the_cache_stays_within_its_limit_and_memory_is_flat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 MB of rows, most of them in a field that is read past, make over 40 MB of tokens in a cache of 20 MiB."""
    monkeypatch.setattr(stream, "SHARD_BYTES", MIB)
    note, path = "x" * 1620, tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(100_000):
            file.write(json.dumps({"text": f"row {number % 1000} of a long stream of rows " * 7, "note": note}) + "\n")
    assert path.stat().st_size > 180e6
    config = config_of(path, streaming_window=9000, streaming_cache=20, max_length=512, dataset_num_proc=2)
    plan, step, memory, tokens, largest = planned(config), 0, list[float](), 0, 0
    while plan.epochs(step) < 1:
        plan.agree(step, Alone())
        tokens += plan.batch(step, 0).tokens
        step += 1
        if step % 200 == 0:
            folders = os.walk(tmp_path / "cache" / "streams")  # passes over those that are removed meanwhile
            largest = max(largest, sum(_size(Path(folder) / name) for folder, _, names in folders for name in names))
            memory.append(own_memory())
    assert 5 * tokens > 40 * MIB, "bytes of all tokens and masks"
    assert 10 * MIB < largest < 20 * MIB, "with the shards that are being written"
    assert max(memory[len(memory) // 4 :]) - memory[len(memory) // 4] < 8


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # removed meanwhile
        return 0


def test_rows_of_two_windows_share_a_batch_and_none_is_repeated_on_another_rank(data: Path) -> None:
    plans = [planned(config_of(data, streaming_window=30, packing=True, per_device_train_batch_size=1), 4)] * 4
    crossed = 0
    for step in range(20):
        data_rows, chosen = plans[0].chosen(step)
        crossed += pieces_of(data_rows) > 1
        batches = [plan.batch(step, rank) for rank, plan in enumerate(plans)]
        real = [int(micro.tokens) for batch in batches for micro in batch.micro_batches]
        assert sum(real) == batches[0].tokens == int(data_rows.lengths[chosen].sum())
    assert crossed >= 2, "control: some batches cross the end of a window"


def test_a_batch_may_hold_rows_of_several_windows(data: Path) -> None:
    """Long rows at first: other windows have fewer packed rows than a batch."""
    rows = [{"text": f"long {number} " * 12} for number in range(60)] + [{"text": f"{number}"} for number in range(240)]
    write(data, rows)
    shards = Stream(config_of(data)).shards
    is_long_first = (seed for seed in range(50) if shards[_first_shard(data, seed)].line < 50)
    plan = planned(config_of(data, seed=next(is_long_first), streaming_window=12, global_batch_size=6))
    assert max(pieces_of(plan.chosen(step)[0]) for step in range(12)) > 2
    lines, step = Counter[int](), 0
    while plan.epochs(step) < 1.2:
        lines += Counter(map(line_of, plan.locations(step)))
        step += 1
    assert {*lines} == {*range(1, 301)}


def _first_shard(data: Path, seed: int) -> int:
    return Stream(config_of(data, seed=seed, streaming_window=12)).windows(0)[0][0]


def test_shards_without_documents_are_passed_over(data: Path) -> None:
    broken = ['{"text": "' + "x" * 900] * 3
    rows = [*texts(100), *broken, *texts(100)]
    plan = planned(config_of(write(data, rows), bad_rows="skip", streaming_window=120, packing=False))
    walk(plan, 60)
    lines = {line_of(place) for step in range(60) for place in plan.locations(step)}
    assert len(lines) > 150
    assert not lines & {101, 102, 103}


def test_two_runs_share_a_cache_that_is_too_small_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MIB", 4096)
    paths = [write(tmp_path / f"rows-{name}.jsonl", texts(300 + number)) for number, name in enumerate("ab")]
    configs = [config_of(path, packing=False, streaming_cache=12) for path in paths]
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(walk, planned(config), 40) for config in configs]
    assert [future.result() for future in done] == [40, 40]


def test_a_stop_does_not_wait_for_the_next_window(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, released = planned(config_of(data, packing=False)), Event()
    batches = plan.batches(0, 0)
    opened = stream_of(plan).open
    monkeypatch.setattr(stream_of(plan), "open", lambda window: (released.wait(60), opened(window))[1])
    for _ in range(len(plan.rows) // 4):
        next(batches)
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 5
    released.set()


def test_a_position_that_the_stream_does_not_have_is_refused(data: Path) -> None:
    plan = planned(config_of(data, streaming_window=600))
    with pytest.raises(TrainingError, match="the checkpoint is in window 10 of epoch 1, which has 1 now"):
        plan.restore(50, [{"epoch": 0, "window": 9, "rows": 17, "tokens": 0}])


@pytest.mark.parametrize("readable", mostly_long([True, False], [True]))
def test_a_resume_tokenises_from_the_window_where_it_stands(data: Path, tmp_path: Path, readable: bool) -> None:
    config, step = config_of(data, packing=False), 50
    plan = planned(config)
    walk(plan, step)
    batches, position = [plan.locations(later) for later in range(step, step + 9)], plan.position(step)
    assert position[0]["window"] >= 2
    folder = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    manifest: dict[str, Any] = {
        "format": FORMAT, "step": step, "world": 1, "base": "", "data_fingerprint": "", "config": {}, "files": {},
        "progress": {"stream": position}, "tensors": {}, "versions": {},
    }  # fmt: skip
    write_json(folder / "manifest.json", {**manifest, "seal": seal(manifest) if readable else "damaged"})
    changes = {
        "resume_from_checkpoint": "auto",
        "output_dir": str(tmp_path / "run"),
        "cache_dir": str(tmp_path / "new"),
    }
    resumed = planned(config.model_copy(update=changes))
    resumed.restore(step, position)
    assert [resumed.locations(later) for later in range(step, step + 9)] == batches
    stream = stream_of(resumed)
    tokenised = {int(path.name) for path in stream.folder.glob("[0-9]*") if not path.suffix}
    first = {*stream.windows(0)[0]}
    assert (not tokenised & first) == readable, "control: a checkpoint that cannot be read says nothing"


def test_a_bad_row_is_refused_when_its_window_comes(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(data, packing=False)
    windows = Stream(config).windows(0)
    shard = Stream(config).shards[windows[2][0]]
    rows: list[Any] = texts(300)
    rows[shard.line] = '{"text": "broken'
    rows[shard.line + 1] = {"text": "with a field", "colour": "red"}
    config = config_of(write(data, rows), packing=False)
    assert Stream(config).windows(0) == windows
    plan = planned(config)
    with pytest.raises(ConfigError, match=rf"rows.jsonl:{shard.line + 1}: .*JSON"):
        walk(plan, 100)
    assert walk(planned(config), 30) == 30, "the windows before it are read"
    plan = planned(config_of(data, packing=False, bad_rows="skip"))
    walk(plan, 70)
    lines = capsys.readouterr().out
    assert "(window 3 of" in lines
    assert "1 bad rows skipped, such as" in lines
    assert lines.count("unused fields: `colour`") == 1


def test_the_embedded_data_is_a_stream_too(data: Path) -> None:
    config = config_of(data, dataset_name="embedded", max_length=256, max_train_samples=90)
    in_full = prepare(config.model_copy(update={"dataset_streaming": False}), "train")
    of_all = {in_full.where(index): in_full.document(index)[0].tobytes() for index in range(len(in_full))}
    window = Stream(config).open(Window(0, 0))
    assert len(window) >= 30
    assert all(of_all[window.where(index)] == window.document(index)[0].tobytes() for index in range(len(window)))


def test_ranks_that_read_other_documents_are_refused(data: Path) -> None:
    plan = planned(config_of(data))
    with pytest.raises(TrainingError, match="window 1 of epoch 1 of the data is not the same on rank 0 and on ranks 1"):
        plan.agree(0, WithAnother(("another digest", None)))
    with pytest.raises(TrainingError, match="cannot be read: rank 1: no such file"):
        plan.agree(0, WithAnother(("", "no such file")))
    plan.agree(0, WithAnother((stream_of(plan).open(Window(0, 0)).digest, None)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_steps": None}, "dataset_streaming=true needs max_steps"),
        ({"eval_share": 0.1}, "with eval_share needs max_eval_samples.*eval_dataset_name"),
        ({"eval_share": 1e-9, "max_eval_samples": 5}, "eval_share=1e-09 holds out no row of the stream"),
        ({"objective": "distill", "teacher_log_probs": "recorded"}, "with teacher_log_probs: recorded.*use teacher"),
        (
            {"streaming_window": 1, "global_batch_size": 40},
            "streaming_window=1 gives .* at first.*make it larger",
        ),
        ({"global_batch_size": 400}, "streaming_window=60 gives .* fewer than global_batch_size=400"),
        ({"global_batch_size": 400, "streaming_window": 999}, "global_batch_size=400 is larger than the data"),
    ],
)
def test_what_does_not_fit_a_stream_is_refused(data: Path, changes: dict[str, Any], problem: str) -> None:
    def start() -> None:
        config = config_of(data, **{"packing": False, **changes})
        prepare_splits(config)
        planned(config)

    with pytest.raises(ConfigError, match=problem):
        start()


def test_data_that_is_held_whole_is_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = data.with_name("rows.json")
    rows.write_text(json.dumps(texts(5)))
    with pytest.raises(ConfigError, match=r"rows.json is a .json file, which is read as a whole.*\.jsonl"):
        prepare(config_of(rows), "train")
    missing = data.with_name("nothing.jsonl")
    with pytest.raises(ConfigError, match="does not exist"):
        prepare(config_of(missing), "train")


def test_a_cache_that_is_too_small_is_refused_with_the_size_that_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_MIB", 4096)
    path = write(tmp_path / "rows.jsonl", texts(600))
    with pytest.raises(ConfigError, match=r"streaming_cache=1 .*two windows") as refused:
        prepare(config_of(path, streaming_cache=1, packing=False), "train")
    enough = re.search(r"use (\d+) or more", str(refused.value))
    assert enough is not None
    walk(planned(config_of(path, streaming_cache=int(enough[1]), packing=False)), 40)


def test_the_start_says_what_is_promised_and_what_is_not(data: Path) -> None:
    config = config_of(data)
    first = prepare(config, "train")
    assert isinstance(first, WindowSet)
    said, described = "\n".join(stream_lines(first)), describe_plan(plan_training(config, first, 1))
    assert re.search(r"300 rows in \d+ shards.*windows? of 60 rows.*at most 4,096 MiB", said)
    assert "does not promise" in said
    assert re.search(r"in the first window, about \d+ steps an epoch", described)
    assert stream_lines(prepare(config.model_copy(update={"dataset_streaming": False}), "train")) == []
    assert first.report.lines()[0].startswith(f"train data {data} (window 1 of ")
    assert cached(config, "train") is not None
    counted, plan = Preview(config).statistics(), planned(config)
    assert counted["steps_per_epoch"] == plan.steps_per_epoch > len(plan.rows) / 4, "not of the first window alone"
    assert counted["epoch_rows"] == plan.rows_of_epoch()


def test_shards_in_the_cache_are_not_tokenised_again_and_damage_is_repaired(data: Path) -> None:
    config = config_of(data)
    before = planned(config)
    folders = {path: path.stat().st_ino for path in stream_of(before).folder.glob("[0-9]*")}
    again = planned(config)
    assert {path: path.stat().st_ino for path in folders} == folders
    for path in folders:
        (path / "input_ids").unlink()  # which the first plan has mapped
        (path / "input_ids").write_bytes(b"damaged")
    repaired = planned(config)
    assert any(path.stat().st_ino != number for path, number in folders.items())
    for plan in (again, repaired):
        ours, theirs = plan.batch(0, 0).micro_batches[0], before.batch(0, 0).micro_batches[0]
        assert np.array_equal(ours.input_ids.numpy(), theirs.input_ids.numpy())


def test_a_window_of_many_shards_does_not_run_out_of_open_files(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(data, streaming_window=999)
    prepare(config, "train")
    monkeypatch.setattr(cache, "_MAPPED", 1)  # as of large shards
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        assert len(prepare(config, "train")) == 300
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
        monkeypatch.setattr(stream, "open_more_files", lambda: None)
        with pytest.raises(ConfigError, match=r"Too many open files; raise the limit \(ulimit -n\)"):
            prepare(config, "train")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_limit_of_rows_is_a_limit_of_the_stream(data: Path) -> None:
    plan = planned(config_of(data, max_train_samples=130, packing=False))
    lines, step = list[int](), 0
    while plan.epochs(step) < 1:
        lines += map(line_of, plan.locations(step))
        step += 1
    assert {*lines} == {*range(1, 131)}
    assert any("170 rows left out by max_train_samples" in line for line in plan.rows.documents.report.lines())


@pytest.mark.parametrize(("limit", "rows"), mostly_long([(12, None), (5, 130)], [(5, 130)]))
def test_rows_are_held_out_by_the_rule_of_data_that_is_read_in_full(data: Path, limit: int, rows: int | None) -> None:
    changes = {"eval_share": 0.1, "max_eval_samples": limit, "max_train_samples": rows, "packing": False}
    config = config_of(data, **changes)
    in_full = config.model_copy(update={"dataset_streaming": False})
    assert cached(config, "eval") is None
    train, evaluation = prepare(in_full, "train"), prepare(config, "eval")
    known = cached(config, "eval")
    assert known is not None
    assert known.fingerprint == evaluation.fingerprint
    expected = prepare(in_full, "eval")
    assert [evaluation.where(index) for index in range(limit)] == [expected.where(index) for index in range(limit)]
    assert len(evaluation) == len(expected) == limit
    plan, lines, step = planned(config), list[int](), 0
    while plan.epochs(step) < 1:
        lines += map(line_of, plan.locations(step))
        step += 1
    assert {*lines} == {line_of(train.where(index)) for index in range(len(train))}
    assert not {*lines} & {line_of(evaluation.where(index)) for index in range(limit)}
    assert plan.rows.documents.report.held_out > 0  # type: ignore[attr-defined]
    other = prepare(config.model_copy(update={"seed": 5}), "eval")
    assert other.where(0) != evaluation.where(0) or other.where(1) != evaluation.where(1), "control: another seed"


def test_rows_are_hashed_only_until_enough_are_held_out(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[str]()  # and other small files that are read
    read = stream_split.np.fromfile
    monkeypatch.setattr(
        stream_split.np, "fromfile", lambda path, dtype: (hashed.append(path.name), read(path, dtype))[1]
    )
    stream_of_all = Stream(config_of(data, eval_share=0.1, max_eval_samples=3))
    assert len(stream_of_all.held_out()) == 3
    hashes = [name for name in hashed if name.endswith(".hashes")]
    assert 0 < len(hashes) < len(stream_of_all.shards) / 2


def test_data_that_moves_is_the_same_stream(data: Path, tmp_path: Path) -> None:
    before = Stream(config_of(data))
    (tmp_path / "there").mkdir()
    moved = tmp_path / "there" / data.name
    data.rename(moved)
    after = Stream(config_of(moved, cache_dir=str(tmp_path / "cache")))
    assert after.fingerprint == before.fingerprint
    assert after.open(Window(0, 0)).where(0).startswith(str(moved))
