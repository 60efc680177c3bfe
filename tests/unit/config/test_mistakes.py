"""A mistake is its parts: its line, its way into another process and back, and how several are collected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.config.mistakes import ConfigError, Mistake, Mistakes, nearest

TEXTS = st.text(max_size=30)


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        (Mistake("seed", -1, "is refused", "use 0 or more"), "seed=-1 is refused; use 0 or more"),
        (Mistake("packing", True, ": no kernel"), "packing=true: no kernel"),
        (Mistake("gpus", "3", ", and 2 are here"), "gpus=3, and 2 are here"),
        (Mistake("output_dir", Path("a"), "holds a run"), "output_dir=a holds a run"),
        (Mistake("seed", None, "is missing"), "seed is missing"),
        (Mistake("", None, "no run", "name one"), "no run; name one"),
        (Mistake("zero_stage", 4, "is refused", source="my.yaml"), "my.yaml: zero_stage=4 is refused"),
    ],
)
def test_its_line_has_what_the_value_and_the_way_out(mistake: Mistake, line: str) -> None:
    assert str(mistake) == line
    assert str(ConfigError(mistake)) == line


@given(st.lists(st.builds(Mistake, TEXTS, st.none() | TEXTS, TEXTS, TEXTS, TEXTS), max_size=4))
def test_mistakes_reach_another_process_part_by_part(mistakes: list[Mistake]) -> None:
    sent = json.loads(json.dumps(ConfigError(mistakes).as_json()))
    assert ConfigError.from_json(sent).mistakes == mistakes


def test_a_source_holds_all_that_stands_in_it() -> None:
    error = ConfigError([Mistake("a", None, "is bad"), "b"], "x.yaml")
    assert error.lines == ["x.yaml: a is bad", "x.yaml: b"]
    assert ConfigError(error.mistakes, "on each machine").lines[0] == "on each machine: x.yaml: a is bad"
    assert [str(replace(mistake, source="")) for mistake in error.mistakes] == ["a is bad", "b"]


def test_several_checks_report_at_once() -> None:
    mistakes = Mistakes()
    for text in ("one", "two", "one"):
        with mistakes:
            raise ConfigError(text)
    with pytest.raises(ConfigError) as refused:
        mistakes.refuse()
    assert refused.value.lines == ["one", "two"]
    Mistakes().refuse()
    with pytest.raises(KeyError), mistakes:
        raise KeyError("no mistake of the user's")


def test_the_nearest_name_is_the_remedy() -> None:
    assert nearest("lerning_rate", ["seed", "learning_rate"], "use one") == "did you mean learning_rate?"
    assert nearest("xyzzy", ["seed", "learning_rate"], "use one") == "use one"
