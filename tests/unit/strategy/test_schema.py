"""Whatever stands in an Accelerate YAML or a DeepSpeed JSON, the answer is a list of clear sentences, and at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainers.config.mistakes import ConfigError
from trainers.strategy.accelerate_rules import check
from trainers.strategy.accelerate_schema import AccelerateConfig
from trainers.strategy.deepspeed_rules import parse_json, read_json
from trainers.strategy.deepspeed_schema import OPTIMIZERS, DeepSpeedJson
from trainers.strategy.schema import Section, nested_section, parse


def paths_of(section: type[Section], *above: str) -> Iterator[tuple[str, ...]]:
    """The keys that lead to each value that may stand there, and to one that may not."""
    yield (*above, "unknown\nkey")
    for name, field in section.model_fields.items():
        yield (*above, name)
        if nested := nested_section(field):
            yield from paths_of(nested, *above, name)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["auto", "no", "NO", "2", "cpu", "nvme", "FULL_SHARD", "FSDP", "x" * 10_000]),
)
KEYS = st.sampled_from(["enabled", "type", "params", "a\nb"])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
BASES: list[dict[str, Any]] = [
    {"distributed_type": "MULTI_GPU", "num_processes": 2},
    {
        "distributed_type": "FSDP",
        "num_processes": 4,
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        "parallelism_config": {"parallelism_config_tp_size": 2},
    },
    {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": {"zero_stage": 3}},
]


def with_value(base: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy of nested mappings with one value set."""
    inner = with_value(base.get(path[0]) or {}, path[1:], value) if path[1:] else value
    return {**base, path[0]: inner}


def assert_clear(lines: list[str]) -> None:
    """One line each, of bounded length, and with a way out."""
    for line in lines:
        assert line.isprintable()
        assert len(line) < 800
        assert "; " in line


@given(st.sampled_from(BASES), st.sampled_from([*paths_of(AccelerateConfig)]), VALUES, st.sampled_from([1, 2, 3]))
@example(BASES[0], ("num_processes",), 10**26, 1)
@example(BASES[1], ("parallelism_config", "parallelism_config_tp_size"), 10**26, 2)
def test_any_value_in_the_yaml(base: dict[str, Any], path: tuple[str, ...], value: Any, pp_size: int) -> None:
    if path[-1] != "deepspeed_config_file":  # any text is a path
        assert_clear([str(mistake) for mistake in check(with_value(base, path, value), pp_size)])


@given(st.sampled_from([1, 2, 3]), st.sampled_from([*paths_of(DeepSpeedJson)]), VALUES)
def test_any_value_in_the_json(stage: int, path: tuple[str, ...], value: Any) -> None:
    try:
        parse_json(with_value({"zero_optimization": {"stage": stage}}, path, value))
    except ConfigError as error:
        assert_clear(error.lines)


@pytest.mark.parametrize("model", [AccelerateConfig, DeepSpeedJson, *dict.fromkeys(OPTIMIZERS.values())])
def test_only_texts_are_literals(model: type[Section]) -> None:
    """`Literal[1]` takes true, and `Literal[False]` takes 0."""
    for path in paths_of(model):
        section = model
        for name in path[:-1]:
            section = nested_section(section.model_fields[name]) or section
        if path[-1] in section.model_fields:
            annotation = section.model_fields[path[-1]].annotation
            literals = [kind for kind in (annotation, *get_args(annotation)) if get_origin(kind) is Literal]
            assert all(isinstance(text, str) for literal in literals for text in get_args(literal)), path


def test_thousands_of_unknown_keys_are_answered_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(AccelerateConfig, {f"fsdp_{number}": number for number in range(50_000)})
    assert len(caught.value.mistakes) == 100


@pytest.mark.parametrize("depth", [100, 400, 900, 3000])
def test_deep_values_are_refused_or_no_plain_json(depth: int, tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": ' + "[" * depth + "]" * depth + "}}")
    with pytest.raises(ConfigError) as caught:
        parse_json(read_json(str(path)))
    assert_clear(caught.value.lines)


def test_a_number_that_json_reads_as_infinite_is_refused() -> None:
    with pytest.raises(ConfigError, match="sub_group_size=inf is refused; write a finite number"):
        parse_json(json.loads('{"zero_optimization": {"stage": 2, "sub_group_size": 1e999}}'))
