"""What objectives besides `sft` ask of the windows of a stream, and what a start makes of damaged files."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.parity.runs import mostly_long
from tests.unit.data.test_stream import Alone, config_of, data, planned, small_shards, stream_of, texts, walk, write
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.local_copies import copy_of_query
from trainers.data.mismatched import Mismatched
from trainers.data.stream import Stream, Window, stream_lines
from trainers.data.stream_plan import StreamPlan
from trainers.run.errors import TrainingError

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


def labelled(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {number} ", "completion": f"answer {number}" * (1 + number % 4), "label": number > 5}
            for number in range(count)]  # fmt: skip


def pairs_of(plan: StreamPlan, steps: range, world: int) -> list[list[bytes]]:
    """The tokens of the mismatched documents of each step, over all ranks."""
    pairs = []
    for step in steps:
        rows, chosen = plan.chosen(step)
        other, numbers = rows.mismatched, rows.members_of(chosen)
        assert other is not None
        pairs.append([other.documents.document(number)[0].tobytes() for number in numbers.tolist()])
        shares = [plan.batch(step, rank).mismatched for rank in range(world)]
        assert len({len(share) for share in shares}) == 1, "every rank does the same passes"
        lengths = sum(int((micro.labels >= 0).sum()) for share in shares for micro in share)
        assert lengths == sum(int(other.documents.trained[number]) for number in numbers.tolist())
    return pairs


@pytest.mark.parametrize("packing", mostly_long([True, False], [True]))
def test_mismatched_answers_are_those_of_the_window_on_any_number_of_ranks_and_after_a_resume(
    data: Path, packing: bool
) -> None:
    changes = {"objective": "kto", "packing": packing, "streaming_window": 30, "per_device_train_batch_size": 1}
    config = config_of(write(data, labelled(90)), **changes)
    walked, step = planned(config), 3
    found = pairs_of(walked, range(step + 4), 1)
    assert len({pair for pairs in found[:3] for pair in pairs}) > 3
    first = Mismatched(stream_of(walked).open(Window(0, 0)))
    of_window = {first.document(number)[0].tobytes() for number in range(len(first.base))}
    assert {*found[0]} <= of_window
    own = {first.base.document(number)[0].tobytes() for number in range(len(first.base))}
    assert not {*found[0]} & own, "control: an answer to another prompt"
    later = planned(config, 2)
    later.restore(step, walked.position(step))
    assert pairs_of(later, range(step, step + 4), 2) == found[step:]
    other = planned(config.model_copy(update={"streaming_window": 60}))
    assert pairs_of(other, range(1), 1) != found[:1], "control: another window"


def test_a_window_of_one_answer_has_none_to_compare_with(data: Path) -> None:
    rows = [{"prompt": "a", "completion": "b" * 900, "label": True} for _ in range(3)]
    options = {"objective": "kto", "packing": False, "global_batch_size": 1, "per_device_train_batch_size": 1}
    config = config_of(write(data, rows), **options, max_length=1024)
    with pytest.raises(ConfigError, match=r"the only one.*raise streaming_window"):
        planned(config.model_copy(update={"streaming_window": 1}))
    assert planned(config).total_steps, "control"


def test_a_position_of_another_format_or_in_other_sources_is_refused(data: Path) -> None:
    plan = planned(config_of(data))
    (position,) = plan.position(2)
    others: list[Any] = [
        {"window": 0}, position | {"window": "0"}, "x", 7, position | {"epoch": -1}, position | {"x": 1},
        position | {"epoch": True}, position | {"rows": 0.5},
    ]  # fmt: skip
    for other in others:
        with pytest.raises(TrainingError, match=r"position in the data is of another format.*start a new run"):
            plan.restore(2, [other])
    plan.restore(2, [position])
    with pytest.raises(TrainingError, match="positions in 2 sources, and this run has 1"):
        plan.restore(2, [position, position])


@pytest.mark.parametrize("damage", ["{}", "[]", '{"sha256": 1, "plan": {}}', "changed", "text"])
def test_a_list_of_shards_that_was_damaged_is_made_anew(data: Path, damage: str) -> None:
    known = Stream(config_of(data))
    index = known.folder / "shards.json"
    intact = index.read_text()
    index.write_text(intact.replace('"rows": ', '"rows": 1', 1) if damage == "changed" else damage)
    assert index.read_text() != intact
    assert Stream(config_of(data)).shards == known.shards
    assert index.read_text() == intact


def test_the_answer_to_a_query_is_a_stream(tmp_path: Path) -> None:
    """Its rows are those of the file; another answer is another stream."""
    pytest.importorskip("sqlalchemy")
    database = tmp_path / "rows.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE rows (text TEXT)")
        connection.executemany("INSERT INTO rows VALUES (?)", [(row["text"],) for row in texts(100)])
    query = {"dataset_query": "SELECT text FROM rows ORDER BY rowid", "packing": False, "streaming_window": 20}
    asked = planned(config_of(tmp_path / "x", **query, dataset_name=f"sqlite:///{database}"))
    plain = planned(config_of(write(tmp_path / "rows.jsonl", texts(100)), packing=False))
    copy_of_query.cache_clear()
    Stream(config_of(tmp_path / "x", **query, dataset_name=f"sqlite:///{database}"))  # another rank asks as well
    asked_tokens, tokens = (sum(plan.batch(step, 0).tokens for step in range(25)) for plan in (asked, plain))
    assert asked_tokens == tokens, "an epoch"
    assert "on disk in full" in "\n".join(stream_lines(stream_of(asked).open(Window(0, 0))))
    with sqlite3.connect(database) as connection:
        connection.execute("DELETE FROM rows WHERE rowid = 7")
    copy_of_query.cache_clear()
    again = Stream(config_of(tmp_path / "x", **query, dataset_name=f"sqlite:///{database}"))
    assert again.fingerprint != stream_of(asked).fingerprint
    assert again.rows == 99
