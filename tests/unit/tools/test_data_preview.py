"""What the preview shows is what is trained on; it pages through any file, counts, can be cancelled, and refuses."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli import run_verb
from app.commands.data import summary_lines
from app.services.data import (
    cancel_job,
    close_data,
    data_config,
    data_job,
    known_rows,
    open_data,
    row_number,
    start_statistics,
)
from app.services.form import preview as form_preview
from app.services.rpc_client import Worker
from tests.parity.runs import mostly_long
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data.batches import TrainPlan
from trainers.data.prepare import prepare
from trainers.tools import data_preview
from trainers.tools.data_preview import BINS, Preview, histogram
from trainers.tools.preflight import make_rows
from ui.pages.data_parts import rows_panel

WORDS = ["red", "boat", "town", "rain", "<b>bold</b>", "Größe", "日本", "🎉", "${x}", "{{y}}"]


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def a_row(kind: str, rng: random.Random) -> dict[str, Any]:
    if kind == "text":
        return {"text": words(rng, 30)}
    if kind == "prompt_completion":
        return {"prompt": words(rng, 10), "completion": words(rng, 20)}
    turns = [("user", words(rng, 8)), ("assistant", words(rng, 12))] * rng.randint(1, 2)
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def config_of(tmp_path: Path, data: Path, **values: Any) -> TrainConfig:
    given = {"global_batch_size": 4, "max_length": 64, "cache_dir": str(tmp_path / "cache"), **values}
    return build({"model_name_or_path": "embedded", "dataset_name": str(data), **given})


def some_data(tmp_path: Path, kind: str = "chat", count: int = 40) -> Path:
    rng = random.Random(7)
    return write(tmp_path / "data.jsonl", [a_row(kind, rng) for _ in range(count)])


Run = tuple[bool, int]


def trained_rows(config: TrainConfig, look: Preview) -> dict[int, tuple[list[Run], str]]:
    """What the batches of an epoch train on, by row: stretches of trained and other tokens, and the text."""
    data = prepare(config, "train")
    plan = TrainPlan(make_rows(config, data), config, 1)
    found = {}
    for step in range(plan.steps_per_epoch):
        micro = plan.batch(step, 0).micro_batches
        rows = plan.rows_of(step)
        for number, batch in enumerate(micro):
            flat = np.zeros(batch.input_ids.numel(), dtype=bool)
            flat[batch.positions.numpy() + 1] = True
            assert np.array_equal(batch.input_ids.numpy().reshape(-1)[flat], batch.labels.numpy())
            size = config.per_device_train_batch_size
            for line, row in enumerate(rows[number * size : (number + 1) * size]):
                length = int(plan.rows.lengths[row])
                ids, mask = batch.input_ids[line, :length], flat.reshape(batch.input_ids.shape)[line, :length]
                borders = np.flatnonzero(np.diff(batch.position_ids[line, :length].numpy()) != 1) + 1
                parts = zip(np.split(ids.numpy(), borders), np.split(mask, borders), strict=True)
                documents = [(runs_of(part), look.tokenizer.decode(tokens.tolist())) for tokens, part in parts]
                found[int(row)] = (
                    [run for runs, _ in documents for run in runs],
                    "".join(text for _, text in documents),
                )
    return found


def runs_of(mask: np.ndarray) -> list[Run]:
    parts = np.split(mask, np.flatnonzero(np.diff(mask)) + 1)
    return [(bool(part[0]), len(part)) for part in parts]


def shown_rows(look: Preview, count: int) -> dict[int, tuple[list[Run], str]]:
    """The same, as the preview shows it."""
    shown = {}
    for index in range(count):
        documents = look.packed(index)["documents"]
        segments = [segment for document in documents for segment in document["segments"]]
        runs = [(segment["trained"], segment["tokens"]) for segment in segments]
        shown[index] = (runs, "".join(segment["text"] for segment in segments))
    return shown


@pytest.mark.parametrize(
    ("kind", "packing"),
    mostly_long(product(["chat", "prompt_completion", "text"], [True, False]), [("chat", True), ("text", False)]),
)
def test_what_is_shown_is_what_the_batches_train_on(tmp_path: Path, kind: str, packing: bool) -> None:
    config = config_of(tmp_path, some_data(tmp_path, kind), packing=packing)
    look = Preview(config)
    trained = trained_rows(config, look)
    assert trained == shown_rows(look, len(trained))
    assert {run for runs, _ in trained.values() for run, _ in runs} == {True, False}
    # The control: another loss mask is seen.
    other = Preview(config.model_copy(update={"assistant_only_loss": not config.assistant_only_loss}))
    assert (trained == shown_rows(other, len(trained))) == (kind == "text")


def test_rows_as_read_are_the_documents_of_the_batches(tmp_path: Path) -> None:
    config = config_of(tmp_path, some_data(tmp_path), max_length=40, overlong="split")
    look = Preview(config)
    read = [document for row in look.rows(0, 50)["rows"] for document in row["documents"]]
    batched = [document for index in range(look.packed(0)["total"]) for document in look.packed(index)["documents"]]
    key = lambda document: json.dumps(document["segments"])  # noqa: E731
    assert sorted(map(key, read)) == sorted(map(key, batched))
    assert len(read) > 40, "some row was to be split"


def test_pages_are_the_rows_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_preview, "PAGE_BYTES", 300)
    folder = tmp_path / "many"
    folder.mkdir()
    rng, rows = random.Random(3), [{"text": f"row {number}"} for number in range(60)]
    write(folder / "a.jsonl", rows[:25])
    write(folder / "b.jsonl", rows[25:])
    look = Preview(config_of(tmp_path, folder))
    for _ in range(30):
        offset, count = rng.randrange(70), rng.randint(1, 20)
        page = look.rows(offset, count)
        numbers = [row["number"] for row in page["rows"]]
        assert numbers == list(range(offset, min(offset + count, 60)))
        assert [json.loads(row["raw"]) for row in page["rows"]] == rows[offset : offset + count]
    assert look.rows(99, 1)["total"] == 60
    assert look.rows(25, 1)["rows"][0]["where"].endswith("b.jsonl:1")


def test_the_first_page_of_a_large_file_looks_no_further(tmp_path: Path) -> None:
    line = json.dumps({"text": "x" * 1000}).encode() + b"\n"
    data = tmp_path / "large.jsonl"
    data.write_bytes(line * 40_000)
    look = Preview(config_of(tmp_path, data))
    page = look.rows(0, 10)
    assert len(page["rows"]) == 10
    assert page["total"] is None
    assert sum(shard.end - shard.start for shard in look._shards) < 2 * data_preview.PAGE_BYTES
    assert look.rows(39_999, 10)["rows"][0]["number"] == 39_999
    end = {"rows": [], "offset": 40_000, "total": 40_000, "bytes": len(line) * 40_000, "formats": ["text"]}
    assert look.rows(40_000, 10) == end


GOOD = {"messages": [{"role": "user", "content": "red?"}, {"role": "assistant", "content": "no, blue"}]}
BAD = [
    GOOD,
    '{"messages": [',
    {"messages": "none"},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "long " * 100}]},
    GOOD,
]


def test_statistics_count_what_becomes_of_the_rows(tmp_path: Path) -> None:
    data = write(tmp_path / "bad.jsonl", BAD)
    look = Preview(config_of(tmp_path, data, overlong="drop", global_batch_size=2))
    counted = look.statistics()
    assert (counted["rows"], counted["documents"], counted["dropped"], counted["bad"]) == (5, 2, 1, 2)
    assert counted["bad_rows"] == {"broken JSON": 1, "wrong type": 1}
    assert [where for where, _, _ in counted["bad_listed"]] == [f"{data}:2", f"{data}:3"]
    assert sum(entry["count"] for entry in counted["histogram"]) == 2
    assert counted["packing_efficiency"] == counted["tokens"] / (64 * counted["training_rows"])
    assert any("set bad_rows=skip" in line for line in counted["mistakes"])
    statuses = [row["status"] for row in look.rows(0, 9)["rows"]]
    assert statuses == ["whole", "bad", "bad", "dropped", "whole"]
    assert look.rows(1, 1)["rows"][0]["mistake"][0] == "broken JSON"


def test_a_truncated_row_tells_what_is_left_of_it(tmp_path: Path) -> None:
    row = Preview(config_of(tmp_path, write(tmp_path / "long.jsonl", [BAD[3]]))).rows(0, 1)["rows"][0]
    assert (row["status"], row["kept_tokens"]) == ("truncated", 64)
    assert row["tokens"] > 64
    assert sum(segment["tokens"] for segment in row["documents"][0]["segments"]) == 64


def test_refused_overlong_rows_are_counted_and_named(tmp_path: Path) -> None:
    data = write(tmp_path / "bad.jsonl", [BAD[0], BAD[3], BAD[4]])
    counted = Preview(config_of(tmp_path, data, overlong="refuse", global_batch_size=1)).statistics()
    assert counted["bad_rows"] == {"too long": 1}
    assert any(f"{data}:2: too long" in line for line in counted["mistakes"])


def test_held_out_rows_are_those_that_are_not_trained(tmp_path: Path) -> None:
    data = some_data(tmp_path)
    config = config_of(tmp_path, data, eval_share=0.25, max_train_samples=20)
    rows = Preview(config).rows(0, 50)["rows"]
    uses = {row["where"]: row["use"] for row in rows}
    for split, use in (("train", "train"), ("eval", "eval")):
        tokens = prepare(config, split)  # type: ignore[arg-type]
        assert {tokens.where(index) for index in range(len(tokens))} == {
            where for where, to in uses.items() if to == use
        }
    count = list(uses.values()).count("eval")
    assert count > 4
    assert list(uses.values()).count("none") == 20 - count
    counted = Preview(config.model_copy(update={"max_eval_samples": 4})).statistics()
    assert (counted["rows"], counted["left_out"], counted["held_out"], counted["eval_left_out"]) == (
        *(20, 20 - count, count, count - 4),
    )
    held_out = f"{count} rows for evaluation, by eval_share; max_eval_samples leaves {count - 4} of them out"
    assert {"held out": held_out, "left out": f"{20 - count} rows, by max_train_samples"}.items() <= dict(
        summary_lines(counted)
    ).items()


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_every_length_is_in_one_bin(lengths: list[int]) -> None:
    bins = histogram(np.array(lengths, dtype=np.int64))
    assert len(bins) <= BINS
    assert [entry["count"] for entry in bins] == [
        sum(entry["from"] <= length <= entry["to"] for length in lengths) for entry in bins
    ]
    assert sum(entry["count"] for entry in bins) == len(lengths)


def until(condition: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


# -- through the process ---------------------------------------------------------------------------------------------


@pytest.fixture
def _processes_end() -> Iterator[None]:
    yield
    close_data()


def test_a_count_is_cancelled_and_leaves_nothing(tmp_path: Path) -> None:
    data = some_data(tmp_path, count=60_000)
    config = config_of(tmp_path, data)
    worker = Worker("trainers.tools.data_preview")
    try:
        answer = worker.ask({"ask": "statistics", "config": config.model_dump()}, 300.0)
        progress = [next(answer)["progress"], next(answer)["progress"]]
        assert progress[1]["total"] == 60_000
        worker.cancel()
        last = list(answer)[-1]
        assert last == {"end": True, "cancelled": True}
        assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
        page = next(worker.ask({"ask": "rows", "offset": 5, "count": 2, "config": config.model_dump()}, 300.0))
        assert [row["number"] for row in page["rows"]] == [5, 6]
    finally:
        worker.close()


@pytest.mark.usefixtures("_processes_end", "elsewhere")
def test_a_count_in_the_background_serves_the_training(tmp_path: Path) -> None:
    data = some_data(tmp_path)
    lines = data.read_text().splitlines()
    data.write_text("\n".join(["{" + '"likes": 3, ' + lines[0][1:], *lines[1:]]) + "\n")
    config = config_of(tmp_path, data)
    key = start_statistics(config)
    assert start_statistics(config) == key
    job = data_job(key)
    assert job is not None
    until(lambda: job.state not in ("waiting", "running"))
    assert job.state == "done", job.mistakes
    assert job.statistics is not None
    assert known_rows(config) == job.statistics["training_rows"] > 0
    assert known_rows(config.model_copy(update={"learning_rate": 0.5})) == known_rows(config)
    assert known_rows(config.model_copy(update={"max_length": config.max_length // 2})) is None, "control"
    assert known_rows(config.model_copy(update={"objective": "kto"})) is None, "it reads other columns"
    typed = {name: value for name, value in config.model_dump(exclude_defaults=True).items() if name != "preset"}
    shown = form_preview(typed, num_processes=1)
    assert "Data: unused fields: `likes`, 1 row." in shown.warnings
    numbers = shown.numbers
    assert numbers
    assert numbers.total_steps == job.statistics["total_steps"] > 0
    assert known_rows(config.model_copy(update={"dataset_name": str(tmp_path)})) is None, "a folder may change unseen"
    folder = prepare(config, "train").folder
    made = folder.stat().st_mtime_ns
    assert prepare(config, "train").folder.stat().st_mtime_ns == made
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [folder]
    cancel_job(key)
    assert job.state == "done"
    assert data_job("no such key") is None


@pytest.mark.usefixtures("_processes_end", "elsewhere")
def test_the_process_refuses_as_the_training_does(tmp_path: Path) -> None:
    config = config_of(tmp_path, write(tmp_path / "strange.jsonl", [{"a": 1}]))
    with pytest.raises(ConfigError, match="match no known format"):
        open_data(config).rows(0, 1)
    with pytest.raises(ConfigError, match="give a row number of 0 or more"):
        open_data(config).rows(-1, 1)


@pytest.mark.usefixtures("_processes_end", "elsewhere")
def test_the_verb_reports(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = write(tmp_path / "bad.jsonl", BAD)
    words = ["data", "tiny-lora", "--dataset_name", str(data), "--global_batch_size", "2", "--cache_dir", str(tmp_path)]
    words += ["--per_device_train_batch_size", "1", "--rows", "2"]
    assert run_verb([*words, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["rows"], document["bad"], len(document["shown"])) == (5, 2, 2)
    assert run_verb(words) == 0
    printed = capfd.readouterr()
    assert "«" in printed.out
    assert "\n".join(document["template"]) in printed.out
    assert document["template"][-1].startswith("  trained: ")
    assert f"{data}:2" in printed.out
    assert "training would refuse" in printed.err
    assert run_verb([*words, "--rows", "many", "--max_length", "1"]) == 2
    refused = capfd.readouterr().err
    assert "rows='many'" in refused
    assert "max_length='1'" in refused


PROMPTS = [
    {"prompt": [{"role": "user", "content": "1+1?"}], "solution": 2, "level": 3},
    {"prompt": [{"role": "user", "content": "1+2?"}], "completion": [{"role": "assistant", "content": "3"}]},
    {"prompt": [{"role": "user", "content": "1+3?"}], "level": None},
]


def test_prompts_are_shown_with_what_rewards_get_and_what_they_lack(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "prompts.jsonl", PROMPTS)
    argv = ["data", "tiny-lora", "--objective", "grpo", "--dataset_name", str(data), "--cache_dir", str(tmp_path)]
    argv += ["--columns", "answer=solution", "--max_length", "300", "--global_batch_size", "1"]
    argv += ["--per_device_train_batch_size", "1"]
    assert run_verb([*argv, "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    first, answered, lacking = document["shown"]
    assert (first["unanswered"], json.loads(first["for_rewards"])) == (True, {"answer": "2"})
    assert not any(segment["trained"] for segment in first["documents"][0]["segments"])
    assert first["documents"][0]["segments"][-1]["text"].endswith("Assistant:\n")
    assert (answered["unanswered"], answered["for_rewards"]) == (False, "")
    assert lacking["mistake"][0] == "no answer"
    assert document["unused"] == {"level": 1}
    assert any("prompts.jsonl:3: no answer: rewards compare" in mistake for mistake in document["mistakes"])
    assert (document["packing"], document["packing_efficiency"]) == (False, None)  # each prompt has a row
    assert run_verb(argv) == 0
    printed = capfd.readouterr()
    assert "a prompt that the model answers" in printed.out
    assert 'rewards get {"answer": "2"}' in printed.out
    page = str(rows_panel({"rows": document["shown"], "offset": 0, "total": 3}))
    assert page.count("a prompt that the model answers") == 1
    assert page.count("Rewards get") == 1


def test_a_strangers_request_is_checked(tmp_path: Path) -> None:
    roots = [tmp_path]
    assert data_config({"max_length": 64}, "tiny-lora", roots=roots).max_length == 64
    for values, word in (
        ({"dataset_name": "/etc/passwd"}, "dataset_name"),
        ({"chat_template": "../../x"}, "chat_template"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"max_length": "many"}, "max_length"),
        ({"nonsense": 1}, "nonsense"),
    ):
        with pytest.raises(ConfigError, match=word):
            data_config(values, "tiny-lora", roots=roots)
    for run_id in ("../x", "/etc", "~root", "nothing"):
        with pytest.raises(ConfigError):
            data_config({}, None, run_id, tmp_path, roots)
    for number in ("-1", "1.5", "x", float("nan"), float("inf"), [1], "1" * 40, "٣"):
        with pytest.raises(ConfigError):
            row_number(number)
    assert [row_number(value) for value in (None, 7.0, "12", 3)] == [0, 7, 12, 3]
