"""The answers to the same prompts by step, whatever the file of a run folder holds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from app.runs import fixed_prompts
from app.runs.answers import MOST_TEXT
from app.runs.fixed_prompts import MOST_PROMPTS, MOST_STEPS, changes, prompt_answers
from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder

NOTHING = {"token": "none", "full": True, "prompts": []}


def line(step: Any, number: int = 0, answer: Any = "a", **more: Any) -> str:
    return json.dumps({"step": step, "row": f"f.jsonl:{number}", "answer": answer, "ended": True, **more}) + "\n"


def head(*numbers: int, **more: Any) -> list[str]:
    """The prompts that a file begins with."""
    rows = [{"row": f"f.jsonl:{number}", "prompt": f"p{number}", "expected": "e", **more} for number in numbers]
    return [json.dumps(row) + "\n" for row in rows]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_run(tmp_path, "answered")


def write(run: RunFolder, lines: Iterable[str]) -> None:
    run.answers.write_text("".join(lines), encoding="utf-8")


def append(run: RunFolder, text: str) -> None:
    with open(run.answers, "a", encoding="utf-8") as file:
        file.write(text)


def test_answers_of_a_prompt_with_what_changed(run: RunFolder) -> None:
    assert prompt_answers(run) == NOTHING
    texts = ["It is 4.", "It is 5.", "It is 5.", "It is"]
    steps = [line(step, number, text, ended=step < 3) for step, text in enumerate(texts) for number in (0, 1)]
    write(run, [*head(0, 1, 2), *steps])  # the third has no answer yet
    view = prompt_answers(run, 1)
    assert (view["prompts"], view["prompt"], view["steps"]) == (["f.jsonl:0", "f.jsonl:1"], 1, 4)
    assert (view["full"], view["text"], view["expected"]) == (True, "p1", "e")
    assert [(each["step"], each["ended"], each["same"], each["parts"]) for each in view["listed"]] == [
        (0, True, False, [("It is 4.", False)]),
        (1, True, False, [("It is ", False), ("5", True), (".", False)]),
        (2, True, True, [("It is 5.", False)]),
        (3, False, False, [("It is", False)]),
    ]
    assert prompt_answers(run, 50)["prompt"] == 1


def test_only_new_steps_are_sent(run: RunFolder) -> None:
    write(run, [*head(0), *(line(step, 0, "x" * 1000 + str(step)) for step in range(20))])
    view = prompt_answers(run)
    assert prompt_answers(run, since=view["token"]) == {"same": True}
    append(run, line(20, 0, "y") + '{"step": 21, "row": "f.json')  # half a row
    more = prompt_answers(run, since=view["token"])
    assert (more["full"], [each["step"] for each in more["listed"]], more["steps"]) == (False, [20], 21)
    assert len(json.dumps(more)) < 200 < 20_000 < len(json.dumps(view))
    replaced = run.path / "new"  # as a resume does
    replaced.write_text(line(20, 0, "z"))
    replaced.replace(run.answers)
    assert prompt_answers(run)["text"] == "[…]"  # its prompt is not in the file
    assert prompt_answers(run, since=more["token"])["listed"][0]["parts"] == [("z", False)]
    append(run, line(30, 1))  # control: another prompt, so the list of them is sent again
    assert prompt_answers(run, 0, view["token"])["full"] is True


def test_a_view_stays_small(run: RunFolder) -> None:
    long = head(0, prompt="q" * 9000 + "?", expected="e" * 9000)
    write(run, [*long, *(line(step, 0, "word " * 2000) for step in range(MOST_STEPS + 30))])
    view = prompt_answers(run)
    assert [each["step"] for each in view["listed"]] == [0, *range(31, MOST_STEPS + 30)]
    assert view["steps"] == MOST_STEPS + 30
    assert view["text"].endswith("q?")
    assert len(json.dumps(view)) < (MOST_STEPS + 3) * (MOST_TEXT + 200)
    write(run, [line(0, number) for number in range(MOST_PROMPTS + 9)])
    assert len(prompt_answers(run)["prompts"]) == MOST_PROMPTS


def test_of_a_large_file_the_newest_steps_are_read(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window begins within step 3, after the answers to its first two prompts."""
    steps = [line(step, number, f"{step} {number}") for step in range(60) for number in range(5)]
    write(run, [*head(0, 1, 2, 3, 4), *steps])
    few = prompt_answers(run, 2)
    assert (few["older"], few["steps"], few["listed"][0]["step"]) == (False, 60, 0), "control: all is read"
    size = len("".join(steps[3 * 5 + 2 :])) + 9
    monkeypatch.setattr(fixed_prompts, "MOST_BYTES", size)
    append(run, " \n")  # a new version of the file
    for number in range(5):
        view = prompt_answers(run, number)
        assert view["prompts"] == [f"f.jsonl:{each}" for each in range(5)]
        assert (view["older"], view["text"], view["steps"]) == (True, f"p{number}", 56)
        assert [each["step"] for each in view["listed"]] == list(range(11, 60))
        assert {text.split()[-1] for each in view["listed"] for text, _ in each["parts"][-1:]} == {str(number)}
    tokens = {prompt_answers(run, number)["token"].rpartition("/")[0] for number in range(5)}
    append(run, line(60, 0))
    more = prompt_answers(run, 4, view["token"])
    assert more == {"same": True}
    append(run, line(60, 4))
    more = prompt_answers(run, 4, view["token"])
    assert (more["full"], more["older"], [each["step"] for each in more["listed"]]) == (False, True, [60])
    assert len(tokens) == 5
    monkeypatch.setattr(fixed_prompts, "MOST_BYTES", len(line(60, 4)) + 9)
    append(run, " \n")
    assert prompt_answers(run)["prompts"], "a step that fills the window is shown all the same"


def test_a_prompt_beyond_the_head_has_answers(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_prompts, "MOST_HEAD", len("".join(head(0))) + 5)
    write(run, [*head(0, 1), line(0, 0), line(0, 1)])
    assert [prompt_answers(run, number)["text"] for number in (0, 1)] == ["p0", "[…]"]


def test_a_page_keeps_what_belongs_to_its_prompt(run: RunFolder) -> None:
    """Whatever replaces the file in place: the same inode, number of prompts and index, and a later step."""
    write(run, [*head(0, 1), line(0, 0), line(0, 1)])
    token = prompt_answers(run, 1)["token"]
    append(run, line(1, 0) + line(1, 1))
    assert prompt_answers(run, 1, token)["full"] is False, "control"
    write(run, [*head(1, 0), line(0, 1), line(0, 0), line(2, 1), line(2, 0)])
    assert prompt_answers(run, 1, token)["full"] is True


def test_a_page_that_slept_gets_all_that_is_listed(run: RunFolder) -> None:
    write(run, [*head(0), line(0)])
    token = prompt_answers(run)["token"]
    append(run, "".join(line(step) for step in range(1, MOST_STEPS - 1)))
    assert prompt_answers(run, since=token)["full"] is False, "control: nothing is left out"
    append(run, line(MOST_STEPS))
    assert prompt_answers(run, since=token)["full"] is True


@pytest.mark.parametrize(
    ("before", "after"),
    [("a " * 2000, "b a " * 1000), ("ab" * 2000, "ba" * 2000), (".," * 2000, ",." * 2000),
     (" ".join(map(str, range(900))), " ".join(map(str, range(900, 0, -1))))],
)  # fmt: skip
def test_long_texts_are_compared_quickly(before: str, after: str) -> None:
    began = time.process_time()
    parts = changes(before, after)
    assert time.process_time() - began < 1.0
    assert "".join(text for text, _ in parts) == after


@pytest.mark.parametrize(
    "content",
    ["", "[]\n", "7\n", "{\n", "\n\n", "[" * 10**5 + "\n", '{"step": 1}\n', line(-1), line(True), line("1"), line(1.5),
     line(1, answer=None), line(1, answer=["x"]), line(1, row=7), *head(0), *head(0, prompt=7), line(10**20),
     line(1)[:-1], *head(0, expected={}), '["row"]\n', '"step"\n',
     '{"step": NaN}\n', "\x00\xff\n"],
)  # fmt: skip
def test_what_is_no_row_is_left_out(content: str, run: RunFolder) -> None:
    write(run, [content])
    assert prompt_answers(run) == NOTHING
    write(run, [content if content.endswith("\n") else "", line(3)])
    assert [each["step"] for each in prompt_answers(run)["listed"]] == [3], "control"


def test_texts_stay_as_they_are(run: RunFolder) -> None:
    hostile = '<img src=x onerror="alert(1)">\u202e\ud800</script>&amp;'
    write(run, [line(1, 0, hostile)])
    view = prompt_answers(run)
    assert view["listed"][0]["parts"] == [(hostile, False)]
    assert json.loads(json.dumps(view, allow_nan=False))["listed"][0]["parts"][0][0] == hostile


def test_an_empty_answer_has_no_parts(run: RunFolder) -> None:
    write(run, [line(0, 0, ""), line(1, 0, "x"), line(2, 0, "")])
    assert [each["parts"] for each in prompt_answers(run)["listed"]] == [[], [("x", True)], []]


@pytest.mark.parametrize("value", ["1", -1, 1.5, True, 10**20])
def test_the_prompt_is_a_whole_number(value: object, run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="is not a whole number from 0"):
        prompt_answers(run, value)


@pytest.mark.parametrize("since", [7, "x", "1/2/3/4", "//", None, ["a"], "9" * 500])
def test_any_token_is_answered(since: object, run: RunFolder) -> None:
    write(run, [line(1)])
    assert prompt_answers(run, 0, since)["full"] is True


def test_links_and_pipes_are_not_followed(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text(line(1))
    run.answers.symlink_to(tmp_path / "other.jsonl")
    assert prompt_answers(run) == NOTHING
    run.answers.unlink()
    os.mkfifo(run.answers)
    assert prompt_answers(run) == NOTHING
