"""The sampled answers of a run, whatever its files hold."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from app.runs.answers import MOST_ANSWERS, MOST_BYTES, MOST_TEXT, answers_view
from tests.made_runs import made_run
from trainers.config.mistakes import ConfigError
from trainers.data.rollouts import RecordedStep
from trainers.run.folder import RunFolder


def recorded(step: int, rewards: list[float], prompts: list[int]) -> dict[str, Any]:
    """A step as a run writes it; answer i has i + 1 tokens."""
    count = len(rewards)
    record = RecordedStep(
        prompts, [[7] * (index + 1) for index in range(count)], [[-0.5] * (index + 1) for index in range(count)],
        [index % 2 == 0 for index in range(count)], rewards, {"exact_match": rewards},
        [[f"prompt {prompt}", f"answer {index}", f"expected {prompt}"] for index, prompt in enumerate(prompts)],
        "digest", 1.0,
    )  # fmt: skip
    return dict(json.loads(record.to_json(step=step)))


def write(run: RunFolder, step: int, content: object) -> Path:
    run.rollouts.mkdir(exist_ok=True)
    path = run.rollouts / f"step-{step}.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_run(tmp_path, "sampled")


def test_answers_are_listed_by_prompt_and_the_best_comes_first(run: RunFolder) -> None:
    write(run, 1, recorded(1, [0.0, 1.0, 0.5, 0.25, 0.25], [4, 4, 4, 9, 9]))
    view = answers_view(run)
    assert (view["step"], view["prompts"], view["prompt"], view["functions"]) == (1, 2, 0, [])
    assert (view["text"], view["expected"], view["mean"], view["equal"]) == ("prompt 4", "expected 4", 0.5, False)
    assert [(each["text"], each["reward"], each["tokens"], each["ended"]) for each in view["listed"]] == [
        ("answer 1", 1.0, 2, False), ("answer 2", 0.5, 3, True), ("answer 0", 0.0, 1, True),
    ]  # fmt: skip
    other = answers_view(run, 1, 1)
    assert (other["text"], other["mean"], other["equal"], other["answers"]) == ("prompt 9", 0.25, True, 2)
    assert answers_view(run, 1, 50)["prompt"] == 1


def test_the_newest_step_is_the_first_and_nothing_is_sent_twice(run: RunFolder) -> None:
    assert answers_view(run) == {"token": "none", "steps": [], "step": None}
    for step in (9, 10, 11):
        write(run, step, recorded(step, [1.0], [step]))
    view = answers_view(run)
    assert (view["step"], view["steps"]) == (11, [9, 10, 11])
    assert answers_view(run, since=view["token"]) == {"same": True}
    write(run, 12, recorded(12, [1.0], [12]))
    assert answers_view(run, since=view["token"])["step"] == 12
    assert answers_view(run, step=9)["text"] == "prompt 9"
    with pytest.raises(ConfigError, match="step=3 has no answers in this run; the newest 4 steps are kept"):
        answers_view(run, step=3)


def test_several_rewards_are_told_apart(run: RunFolder) -> None:
    record = recorded(1, [0.0, 3.0], [4, 4])
    write(run, 1, {**record, "by_function": {"exact_match": [0, 1], "/a/file.py:short": [0, 2]}})
    view = answers_view(run)
    assert view["functions"] == ["exact_match", "/a/file.py:short"]
    assert view["listed"][0]["rewards"] == [1.0, 2.0]


def test_a_view_stays_small(run: RunFolder) -> None:
    record = recorded(1, [0.0] * 500, [4] * 500)
    write(run, 1, {**record, "texts": [["p" * 10**4 + "?", "a" * 10**4]] * 500})
    view = answers_view(run)
    assert (view["answers"], len(view["listed"]), view["expected"]) == (500, MOST_ANSWERS, "")
    assert len(json.dumps(view)) < (MOST_ANSWERS + 2) * (MOST_TEXT + 200)
    assert view["text"].startswith("[…] p")
    assert view["text"].endswith("p?")
    assert view["listed"][0]["text"].endswith("a […]")
    os.truncate(write(run, 2, ""), MOST_BYTES + 1)
    with pytest.raises(ConfigError, match="has 67,108,865 bytes of answers, and a page reads 67,108,864"):
        answers_view(run)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "7", "{", '{"prompts": 3}', '{"by_function": {}, "prompts": []}', "[" * 10**5,
     {**recorded(1, [1.0], [4]), "rewards": [float("nan")]}, {**recorded(1, [1.0], [4]), "rewards": [10**400]},
     {**recorded(1, [1.0], [4]), "texts": [["only"]]}, {**recorded(1, [1.0], [4]), "texts": []},
     {**recorded(1, [1.0], [4]), "by_function": [1]}, {**recorded(1, [1.0], [4]), "answers": [5]},
     {**recorded(1, [1.0], [4]), "prompts": ["x"]}, {**recorded(1, [1.0], [4]), "prompts": [None]}],
)  # fmt: skip
def test_a_damaged_file_is_named(content: object, run: RunFolder) -> None:
    write(run, 1, content)
    with pytest.raises(ConfigError, match=r"step='?1'? has answers that cannot be read"):
        answers_view(run)


@pytest.mark.parametrize("value", ["1", "../../etc/passwd", -1, 1.5, True, 10**20, "NaN"])
def test_steps_and_prompts_are_whole_numbers(value: object, run: RunFolder) -> None:
    write(run, 1, recorded(1, [1.0], [4]))
    for request in ({"step": value}, {"prompt": value}):
        with pytest.raises(ConfigError, match="is not a whole number from 0"):
            answers_view(run, **request)


def test_links_and_pipes_are_not_followed(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps(recorded(1, [1.0], [4])))
    run.rollouts.mkdir()
    (run.rollouts / "step-1.json").symlink_to(tmp_path / "other.json")
    os.mkfifo(run.rollouts / "step-2.json")
    for step in (1, 2):
        with pytest.raises(ConfigError, match="cannot be read"):
            answers_view(run, step=step)
