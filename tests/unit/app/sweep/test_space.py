"""What a sweep varies, as written on the command line: every kind of value is used as it stands, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.sweep.space import Axis, grid, parse_axis
from trainers.config.fields import fields
from trainers.config.mistakes import ConfigError

FIELDS = {field.name: field for field in fields()}
PIECES = st.sampled_from(
    [
        "1",
        "8",
        "1e-4",
        "3e-4",
        "0",
        "-1",
        "nan",
        "inf",
        "1_0",
        "\u0661",
        "true",
        "false",
        "cosine",
        "a",
        "",
        " ",
        "x" * 500,
    ]
)
TEXTS = st.one_of(
    st.text(max_size=20),
    st.lists(PIECES, min_size=1, max_size=4).flatmap(
        lambda pieces: st.sampled_from([",", "|", ":", ", "]).map(lambda mark: mark.join(pieces))
    ),
)
Parser = Callable[[str, str], Axis | None]


def stands_for_itself(parse: Parser, name: str, text: str) -> None:
    """What is written is what is tried: no value lost, none made up, no single value taken apart."""
    axis, refusal = None, None
    try:
        axis = parse(name, text)
    except ConfigError as error:
        refusal = error
    if refusal:
        assert [mistake.option for mistake in refusal.mistakes] == [name]
        assert len(str(refusal)) < 1000
        return
    kind = FIELDS[name].kind
    mark = "|" if kind in ("text", "list", "map") else ","
    if axis is None:
        assert mark not in text
        return
    if axis.values:
        assert [value.strip() for value in text.split(mark)] == list(axis.values)
        assert len(set(axis.values)) == len(axis.values) > 1
        return
    assert kind in ("int", "float")
    low, high = float(axis.low), float(axis.high)
    assert low < high
    assert math.isfinite(low)
    assert math.isfinite(high)
    assert low > 0 or not axis.log
    assert text.startswith(axis.low) or text.strip().startswith(axis.low)


@given(st.sampled_from(sorted(FIELDS)), TEXTS)
@example("lora_target_modules", "q_proj,v_proj")
@example("lora_target_modules", "all-linear|q_proj,v_proj")
@example("profile_steps", "10:13")
@example("checkpoint_url", "s3://bucket/run")
@example("columns", "prompt=a,completion=b")
@example("learning_rate", "1e-5:1e-3:log")
@example("lora_r", "4:64")
@example("packing", "true,false")
def test_every_option_and_every_text(name: str, text: str) -> None:
    stands_for_itself(parse_axis, name, text)


def test_a_parser_that_takes_values_apart_would_be_seen() -> None:
    """Control."""

    def at_commas(name: str, text: str) -> Axis | None:
        values = tuple(text.split(","))
        return Axis(option=name, values=values) if len(values) > 1 else None

    stands_for_itself(at_commas, "lora_r", "8,16")
    with pytest.raises(AssertionError):
        stands_for_itself(at_commas, "lora_target_modules", "q_proj,v_proj")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("lora_r", "8,,16", "empty value"),
        ("lora_r", "8,8", "8 twice"),
        ("lora_r", "8,4:16", "mixes values and a range"),
        ("lora_r", "4.5:16", "is not a range"),
        ("learning_rate", "1e-3:1e-5", "empty range"),
        ("learning_rate", "0:1:log", "no logarithm"),
        ("learning_rate", "1e-5:1e-3:linear", "is not a range"),
        ("seed", "1,2", "use --seeds 3"),
        ("output_dir", "a|b", "cannot differ"),
    ],
)
def test_what_cannot_be_read_says_how_to_write_it(name: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_axis(name, text)


def test_a_grid_has_every_combination_once() -> None:
    axes = [Axis(option="a", values=("1", "2")), Axis(option="b", values=("x", "y", "z"))]
    points = grid(axes)
    assert len({tuple(point.items()) for point in points}) == len(points) == 6
    assert points[:2] == [{"a": "1", "b": "x"}, {"a": "1", "b": "y"}]
    assert grid([]) == [{}]
