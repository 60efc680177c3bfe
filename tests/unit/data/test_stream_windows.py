"""What objectives besides `sft` ask of the windows of a stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.test_stream import Alone, config_of, data, planned, small_shards, stream_of, walk, write
from trainers.config.mistakes import ConfigError
from trainers.data.stream import Stream

__all__ = ["data", "small_shards"]  # fixtures


def test_a_further_window_has_the_optional_columns_of_the_first(data: Path) -> None:
    def rows(with_margin: set[int]) -> list[Any]:  # lines of the same bytes either way, so that the shards stay
        names = ["margin" if line in with_margin else "nargin" for line in range(1, 121)]
        return [{"prompt": "a", "chosen": f"b {line:3}", "rejected": "c", names[line - 1]: 1} for line in range(1, 121)]

    config = config_of(write(data, rows(set())), objective="reward", streaming_window=30, packing=False)
    known = Stream(config)
    first = [known.shards[number] for number in known.windows(0)[0]]
    lines = {line for shard in first for line in range(shard.line, shard.line + shard.rows)}
    for with_margin, problem in (
        (lines, "is missing, and rows before have it"),
        ({*range(1, 121)} - lines, "is there"),
    ):
        plan = planned(
            config_of(write(data, rows(with_margin)), objective="reward", streaming_window=30, packing=False)
        )
        assert {shard.line for shard in stream_of(plan).shards} == {shard.line for shard in known.shards}
        with pytest.raises(ConfigError, match=rf"rows.jsonl:\d+: 'margin' {problem}.*give it to all rows"):
            walk(plan, 30)
    assert walk(planned(config_of(write(data, rows({*range(1, 121)})), objective="reward", packing=False)), 30) == 30, (
        "control"
    )


def test_a_stop_leaves_out_no_window_of_what_is_computed_before_the_first_step(data: Path) -> None:
    """A resume goes on from `stop_at_step` with the log-probabilities of the initial model that a checkpoint holds."""
    read = [[window.window for window, _ in planned(config_of(data, **own)).streamed_rows[0].windows(Alone(), int)]
            for own in ({"max_steps": 10}, {"max_steps": 10, "stop_at_step": 1}, {"max_steps": 1})]  # fmt: skip
    assert read[0] == read[1]
    assert len(read[0]) > len(read[2]) == 1, "control: fewer steps"
