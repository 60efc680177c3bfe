"""Pieces of a log: bounded, in plain text, whatever the log holds."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from app.runs import log
from app.runs.log import CHUNK_BYTES, MAX_LINES, SEARCH_BYTES, find_in_log, is_error, read_log
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, log_line


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "a")
    made.create()
    return made


def add(run: RunFolder, *lines: tuple[str, str]) -> None:
    with open(run.log, "a", encoding="utf-8") as file:
        file.writelines(log_line(who, text) for who, text in lines)


def texts(answer: dict[str, Any]) -> list[str]:
    return [line.text for line in answer["lines"]]


def test_the_end_comes_first_then_only_what_is_new(run: RunFolder) -> None:
    add(run, ("launcher", "hello"), ("rank 0", "one"))
    first = read_log(run, {})
    assert [(line.writer, line.text) for line in first["lines"]] == [("launcher", "hello"), ("0", "one")]
    assert first["jumped"]
    assert read_log(run, {"after": first["end"]})["lines"] == []
    add(run, ("rank 1", "two"))
    second = read_log(run, {"after": first["end"], "follow": True})
    assert (texts(second), second["start"], second["jumped"]) == (["two"], first["end"], False)


def test_pieces_towards_the_start_and_the_end_are_the_whole_log(run: RunFolder) -> None:
    add(run, *((f"rank {number % 3}", f"line {number} {'x' * (number % 190)}") for number in range(4000)))
    whole = [f"line {number} {'x' * (number % 190)}" for number in range(4000)]
    answer = read_log(run, {})
    back = texts(answer)
    while answer["start"] > 0:
        answer = read_log(run, {"before": answer["start"]})
        back = texts(answer) + back
    assert back == whole
    answer = read_log(run, {"after": 0})
    on = texts(answer)
    while answer["end"] < answer["size"]:
        answer = read_log(run, {"after": answer["end"]})
        on += texts(answer)
    assert on == whole


@pytest.mark.parametrize("who", ["0", "2", "launcher"])
def test_the_lines_of_one_rank_are_all_found(run: RunFolder, who: str) -> None:
    names = ["launcher", "rank 0", "rank 2"]
    add(run, *((names[number * number % 3], f"line {number}") for number in range(3000)))
    wanted = [f"line {n}" for n in range(3000) if names[n * n % 3].removeprefix("rank ") == who]
    answer = read_log(run, {"who": who})
    found = texts(answer)
    while answer["start"] > 0:
        answer = read_log(run, {"before": answer["start"], "who": who})
        found = texts(answer) + found
    assert found == wanted


def test_one_who_follows_is_taken_to_the_end_and_one_who_reads_is_not(run: RunFolder) -> None:
    add(run, ("rank 0", "begin"))
    end = read_log(run, {})["end"]
    add(run, *(("rank 0", f"line {number}") for number in range(5000)))
    assert texts(read_log(run, {"after": end, "follow": True}))[-1] == "line 4999"
    assert read_log(run, {"after": end, "follow": True})["jumped"]
    assert texts(read_log(run, {"after": end}))[0] == "line 0"


FLOOD = {
    "a long line": b"x" * 3_000_000,
    "binary": bytes(range(256)) * 3000,
    "no line ends": b"\r" * 500_000,
    "line ends": b"\n" * 500_000,
    "colours": b"\x1b[31mred\x1b[0m\n" * 20_000,
    "brackets": b"\x1b[" * 200_000,
    "a heading without end": b"2026-01-01T00:00:00+00:00 [rank " * 20_000,
    "html": b"<img src=x onerror=alert(1)>\n" * 9_000,
}


@pytest.mark.parametrize("name", FLOOD)
def test_a_flood_is_bounded_and_plain(run: RunFolder, name: str) -> None:
    run.log.write_bytes(FLOOD[name] + b"\nend\n")
    for asked in ({}, {"after": 0}, {"before": run.log.stat().st_size // 2}, {"after": 0, "who": "3"}, {"who": "3"}):
        answer = read_log(run, asked)
        sent = json.dumps({**answer, "lines": [list(line) for line in answer["lines"]]})
        assert len(sent) < 8 * CHUNK_BYTES
        assert len(answer["lines"]) <= max(MAX_LINES, CHUNK_BYTES)
        assert not any(ord(letter) < 32 and letter != "\t" for text in texts(answer) for letter in text)
        assert 0 <= answer["start"] <= answer["end"] <= answer["size"]
    assert texts(read_log(run, {}))[-1] == "end"


def test_a_flood_can_be_walked_through(run: RunFolder) -> None:
    run.log.write_bytes(b"first\n" + FLOOD["a long line"] + b"\nend\n")
    answer, steps = read_log(run, {}), 0
    while answer["start"] > 0 and steps < 200:
        answer, steps = read_log(run, {"before": answer["start"]}), steps + 1
    assert texts(answer)[0] == "first"
    answer = read_log(run, {"after": 0})
    while answer["end"] < answer["size"]:
        answer = read_log(run, {"after": answer["end"]})
    assert texts(answer)[-1] == "end"


def test_a_line_drawn_over_itself_shows_its_last_state(run: RunFolder) -> None:
    run.log.write_bytes(b"2026-01-01T00:00:00.000+00:00 [rank 0] 10%\r50%\r\x1b[32m100%\x1b[0m\r\n")
    (line,) = read_log(run, {})["lines"]
    assert (line.text, line.writer, line.time) == ("100%", "0", "2026-01-01T00:00:00")


def test_half_a_line_waits_until_its_writer_rests(run: RunFolder) -> None:
    run.log.write_bytes(b"one\nha")
    assert texts(read_log(run, {})) == ["one"]
    old = time.time() - 60
    os.utime(run.log, (old, old))
    assert texts(read_log(run, {})) == ["one", "ha"]
    assert texts(read_log(run, {"after": 4})) == ["ha"]


@pytest.mark.parametrize(
    "text",
    ["Traceback (most recent call last):", "ValueError: bad", "torch.OutOfMemoryError: CUDA",
     "[rank1]: KeyError: 'a'",
     "E1121 ERROR failed (exitcode: -9) local_rank: 1", "error: unknown option", "RuntimeError"],
)  # fmt: skip
def test_errors_are_told(text: str) -> None:
    assert is_error(text.encode())


@pytest.mark.parametrize(
    "text", ["step 3 loss 0.1", "0 errors", "error_rate 0.3", "an exception to this", "terror", ""]
)
def test_other_lines_are_no_errors(text: str) -> None:
    assert not is_error(text.encode())


def test_errors_are_found_in_both_directions(run: RunFolder) -> None:
    lines = [("rank 0", f"step {number}") for number in range(60_000)]
    for at in (10, 30_000, 59_000):
        lines[at] = (f"rank {at % 7}", f"ValueError: number {at}")
    add(run, *lines)

    def walk(back: bool, start: int, **more: Any) -> list[str]:
        found: list[str] = []
        while True:
            answer = find_in_log(run, {"start": start, "back": back, **more})
            assert abs(answer["searched"] - start) <= SEARCH_BYTES + 1
            if answer["at"] is not None:
                found.append(texts(read_log(run, {"after": answer["at"]}))[0])
                start = answer["at"] + (0 if back else 1)
            elif not answer["more"]:
                return found
            else:
                start = answer["searched"]

    size, all_of_them = run.log.stat().st_size, [f"ValueError: number {at}" for at in (10, 30_000, 59_000)]
    assert size > 2 * SEARCH_BYTES
    assert walk(False, 0) == all_of_them
    assert walk(True, size) == all_of_them[::-1]
    assert walk(False, 0, who=str(30_000 % 7)) == all_of_them[1:2]
    assert walk(False, 0, words="STEP 4999") == [f"step {number}" for number in (4999, *range(49990, 50000))]
    assert walk(False, 0, words="nowhere") == []


@pytest.mark.parametrize(
    "asked",
    [{"after": -2}, {"after": "0"}, {"after": 1.5}, {"before": True}, {"before": 2**60}, {"who": "rank 0"},
     {"who": "../x"}, {"who": {"a": 1}}, {"after": [1]}, {"who": "٣"}],
)  # fmt: skip
def test_a_strange_request_is_refused(run: RunFolder, asked: dict) -> None:
    add(run, ("rank 0", "one"))
    with pytest.raises(ConfigError):
        read_log(run, asked)
    wrong = {"start": asked.get("after", asked.get("before", 0)), "who": asked.get("who")}
    with pytest.raises(ConfigError):
        find_in_log(run, wrong)


def test_a_log_that_is_a_link_or_absent_is_empty(run: RunFolder, tmp_path: Path) -> None:
    assert read_log(run, {})["lines"] == []
    (tmp_path / "secret").write_text("secret\n")
    run.log.symlink_to(tmp_path / "secret")
    assert read_log(run, {})["lines"] == []
    assert read_log(run, {"after": 0})["lines"] == []
    assert find_in_log(run, {"words": "secret"})["at"] is None


def test_the_writers_are_the_ranks(run: RunFolder) -> None:
    assert log.log_writers(run) == []
    run.accelerate.write_text("num_processes: 3\n")
    assert log.log_writers(run) == [0, 1, 2]
