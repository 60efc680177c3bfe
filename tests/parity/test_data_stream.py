"""A stream trains the same model under every strategy, and a resumed run goes on with the next row."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launching import Finished, launch, launch_well
from tests.parity import plain
from tests.parity.checks import equal_after_resume
from tests.parity.runs import STEPS, config, curve, mostly_long, options, run
from tests.shared import once
from trainers.data.stream import Stream

ROWS_OF_A_SHARD, SHARDS = 20, 5


def data() -> str:
    """Rows with a long field that nothing reads, so that few rows fill a shard; two of them are in a window."""

    def write(folder: Path) -> None:
        note = "x" * ((1 << 20) // (ROWS_OF_A_SHARD - 1))
        with (folder / "rows.jsonl").open("w") as file:
            for number in range(ROWS_OF_A_SHARD * SHARDS):
                text = f"row {number} has {number * 7 % 10} " * (1 + number % 9)
                file.write(json.dumps({"text": text, "note": note}) + "\n")

    return str(once("stream", write) / "rows.jsonl")


def mix(held_weight: float = 1.0) -> str:
    """The rows above as a stream, beside chats that are held in full."""

    def write(folder: Path) -> None:
        sources = [
            {"dataset_name": data(), "weight": 3.0, "streaming": True},
            {"dataset_name": "embedded", "name": "chat", "limit": 30, "weight": held_weight},
        ]
        (folder / "mix.yaml").write_text(yaml.safe_dump({"sources": sources}))

    return str(once(f"stream-mix-{held_weight}", write) / "mix.yaml")


def mixed(**changes: Any) -> dict[str, Any]:
    """The same with a stream as a source of a mix."""
    return streamed(mix=mix(), dataset_name="none", dataset_streaming=False, **changes)


def streamed(**changes: Any) -> dict[str, Any]:
    """Changes of the options of a parity run that stream: the steps cross several windows and the end of an epoch."""
    own = {
        "dataset_name": data(),
        "eval_dataset_name": "none",
        "max_eval_samples": None,
        "max_train_samples": None,
        "dataset_streaming": True,
        "streaming_window": 2 * ROWS_OF_A_SHARD,
        "max_length": 96,
    }
    return {**own, **changes}


def trained(name: str, packing: bool = True, **changes: Any) -> Finished:
    return run(1 if name == "single" else 2, "full", packing, name, **streamed(**changes))


@functools.cache
def plainly(packing: bool, window: int) -> plain.Curve:
    return plain.train(config("full", packing, **streamed(streaming_window=window)))


@pytest.mark.parametrize(
    ("name", "packing"),
    mostly_long(
        [(name, True) for name in ("single", "ddp", "fsdp1", "fsdp2", "zero2", "zero3", "tp", "sp", "cp", "pp")]
        + [("single", False), ("ddp", False)],
        [("ddp", True)],
    ),
)
def test_a_stream_trains_the_same_model_under_every_strategy(name: str, packing: bool) -> None:
    finished = trained(name, packing)
    assert curve(finished).agrees(plainly(packing, 2 * ROWS_OF_A_SHARD))
    assert finished.rows("loss")[-1]["epoch"] > 1, "the steps read the data more than once"
    if name == "ddp":
        assert not curve(finished).agrees(plainly(packing, ROWS_OF_A_SHARD)), "control: another window"


@pytest.mark.parametrize(("name", "processes"), mostly_long([("ddp", 2), ("single", 1), ("fsdp2", 2)], [("ddp", 2)]))
def test_a_resume_goes_on_with_the_same_rows(name: str, processes: int, tmp_path: Path) -> None:
    undisturbed = trained("ddp")
    checkpoint = undisturbed.checkpoints[0]
    again = options("full", True, **streamed(), resume_from_checkpoint=str(checkpoint), cache_dir=str(tmp_path / "new"))
    resumed = launch_well(tmp_path / "run", processes, again, strategy=name)
    if name == "ddp":
        assert equal_after_resume(undisturbed, resumed)
    before = {row["step"]: row for row in undisturbed.rows("loss")}
    for row in resumed.rows("loss"):
        assert row["tokens"] == before[row["step"]]["tokens"]
        assert row["epoch"] == before[row["step"]]["epoch"]
        assert abs(row["loss"] - before[row["step"]]["loss"]) < 1e-5
    changed = {**again, "streaming_window": ROWS_OF_A_SHARD}
    refused = launch(tmp_path / "changed", processes, changed, strategy=name)
    assert refused.status != 0
    assert "streaming_window" in refused.output


@pytest.mark.parametrize("name", mostly_long(["ddp", "single", "fsdp2", "zero3", "tp", "cp", "pp"], ["ddp"]))
def test_a_mix_with_a_stream_trains_the_same_model_under_every_strategy(name: str) -> None:
    finished = run(1 if name == "single" else 2, "full", True, name, **mixed())
    assert curve(finished).agrees(_mixed_plainly(mix()))
    last = finished.rows("loss")[-1]
    assert {"loss/rows", "loss/chat", "tokens/rows", "tokens/chat"} <= last.keys()
    assert abs(last["share/rows"] - 0.75) < 1 / (8 * STEPS)


@pytest.mark.long
def test_a_mix_with_a_stream_goes_on_bit_for_bit(tmp_path: Path) -> None:
    finished = run(2, "full", True, "ddp", **mixed())
    assert not curve(finished).agrees(_mixed_plainly(mix(0.5))), "control: another weight"
    again = options("full", True, **mixed(), resume_from_checkpoint=str(finished.checkpoints[0]))
    assert equal_after_resume(finished, launch_well(tmp_path / "run", 2, again, strategy="ddp"))


@functools.cache
def _mixed_plainly(file: str) -> plain.Curve:
    return plain.train(config("full", True, **mixed() | {"mix": file}))


def test_a_bad_row_ends_the_run_when_its_window_comes_and_nothing_is_lost(tmp_path: Path) -> None:
    """Without the bad row, the run goes on from what was saved."""
    stream = Stream(config("full", True, **streamed()))
    number = stream.shards[stream.windows(0)[1][0]].line
    rows = Path(data()).read_text().splitlines()
    rows[number - 1] = rows[number - 1][:-5]
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join(rows))
    settings = options("full", True, **streamed(dataset_name=str(bad), save_steps=100))
    ended = launch(tmp_path / "run", 2, settings, strategy="ddp")
    assert ended.status != 0
    assert f"bad.jsonl:{number}: " in ended.output
    assert ended.run.read_state()["state"] == "failed"
    (checkpoint,) = ended.checkpoints
    last = ended.rows("loss")[-1]["step"]
    assert checkpoint.name.endswith(f"{last:08d}")
    assert 0 < last < STEPS
    again = {**settings, "bad_rows": "skip", "resume_from_checkpoint": "auto"}
    resumed = launch_well(tmp_path / "run", 2, again, strategy="ddp")
    assert [row["step"] for row in resumed.rows("loss")] == list(range(1, STEPS + 1))
    assert "1 bad rows skipped, such as\n" in resumed.output
