"""What objectives besides `sft` ask of the windows of a stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.runs import mostly_long
from tests.unit.data.test_stream import Alone, config_of, data, planned, small_shards, stream_of, walk, write
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.stream import Stream

__all__ = ["data", "small_shards"]  # fixtures


@pytest.mark.parametrize(
    ("first_has_it", "problem"),
    mostly_long([(True, "is missing, and rows before have it"), (False, "is there, and rows before lack it")],
                [(True, "is missing, and rows before have it")]),
)  # fmt: skip
def test_a_further_window_has_the_optional_columns_of_the_first(data: Path, first_has_it: bool, problem: str) -> None:
    everywhere = {*range(1, 121)}

    def config(with_margin: set[int]) -> TrainConfig:  # lines of the same bytes either way, so that the shards stay
        names = ["margin" if line in with_margin else "nargin" for line in sorted(everywhere)]
        rows = [{"prompt": "a", "chosen": f"b {line:3}", "rejected": "c", name: 1} for line, name in enumerate(names)]
        return config_of(write(data, rows), objective="reward", streaming_window=30, packing=False)

    known = Stream(config(everywhere))
    first = [known.shards[number] for number in known.windows(0)[0]]
    lines = {line for shard in first for line in range(shard.line, shard.line + shard.rows)}
    plan = planned(config(lines if first_has_it else everywhere - lines))
    assert {shard.line for shard in stream_of(plan).shards} == {shard.line for shard in known.shards}
    with pytest.raises(ConfigError, match=rf"rows.jsonl:\d+: 'margin' {problem}; give it to all rows"):
        walk(plan, 30)
    assert walk(planned(config(everywhere)), 10) == 10, "control"


def test_a_stop_leaves_out_no_window_of_what_is_computed_before_the_first_step(data: Path) -> None:
    """A resume goes on from `stop_at_step` with the log-probabilities of the initial model that a checkpoint holds."""
    runs = ({"max_steps": 10}, {"max_steps": 10, "stop_at_step": 1}, {"max_steps": 1})
    streams = [planned(config_of(data, **own)).streamed_rows[0] for own in runs]
    read = [[documents.window for documents, _ in rows.windows(Alone(), lambda: None)] for rows in streams]
    assert read[0] == read[1]
    assert len(read[0]) > len(read[2]) == 1, "control: fewer steps"
