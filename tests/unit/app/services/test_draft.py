"""The draft that Train and Data share: whatever the browser sends, it is choices of today's form or nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.services.draft import MAX_LENGTH, read_draft, with_data, write_draft
from app.services.fields import names
from app.services.form import Choices
from app.services.starting_values import starting_values
from trainers.config.mistakes import ConfigError

DRAFT: dict[str, Any] = {
    "preset": "tiny-lora", "strategy": "fsdp2", "devices": "4", "source": "?clone=a",
    "options": {**starting_values("tiny-lora"), "max_steps": "7", "packing": False, "run_name": " mine "},
}  # fmt: skip


def test_a_draft_is_what_differs_from_its_preset() -> None:
    choices = read_draft(json.dumps(DRAFT))
    expected = {"max_steps": "7", "packing": "false", "run_name": "mine"}
    assert choices == Choices("tiny-lora", expected, "fsdp2", (), 4)
    assert read_draft(write_draft(choices)) == choices
    assert read_draft(json.dumps({**DRAFT, "devices": ["0", "2"]})) == Choices("tiny-lora", expected, "fsdp2", (0, 2))


def test_where_it_trains_and_the_options_of_slurms_job_are_kept() -> None:
    job = {"on": "slurm", "nodes": "4", "time": "", "container": "evil.sif", "qos": 3, "account": "x" * 2000}
    choices = read_draft(json.dumps({**DRAFT, "job": job}))
    assert choices
    assert choices.job == {"on": "slurm", "nodes": "4", "time": ""}, "code comes from no page"
    assert read_draft(write_draft(with_data(choices, "tiny-full", {"dataset_name": "me/mine"}))).job == choices.job
    assert read_draft(json.dumps({**DRAFT, "job": ["on"]})) == read_draft(json.dumps(DRAFT))


def test_what_the_form_of_today_does_not_know_is_left_out() -> None:
    options = {"max_steps": "7", "gone": "1", "preset": "x", "lora_r": 3, "run_name": None, "output_dir": ["a"]}
    assert read_draft(json.dumps({**DRAFT, "preset": "gone", "options": options, "devices": "many"})) == Choices(
        None, {"max_steps": "7"}, "fsdp2"
    )


def test_a_draft_with_another_method_is_of_that_methods_preset() -> None:
    draft = {"preset": "tiny-lora", "options": {**starting_values("tiny-full"), "seed": "7"}}
    assert read_draft(json.dumps(draft)) == Choices("tiny-full", {"seed": "7"})


JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=8) | st.sampled_from(["tiny-lora", "4"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


@given(st.fixed_dictionaries({}, optional={
    "preset": JSON, "strategy": JSON, "devices": JSON, "job": JSON,
    "options": JSON | st.dictionaries(st.sampled_from(sorted(names())), JSON, max_size=5),
}))  # fmt: skip
def test_any_json_is_choices(draft: dict[str, Any]) -> None:
    choices = read_draft(json.dumps(draft))
    assert choices is not None
    assert all(name in names() and isinstance(text, str) for name, text in choices.values.items())
    assert read_draft(write_draft(choices)) == choices


@pytest.mark.parametrize(
    "text", ["", "null", "[]", '"x"', "{", "[" * 100_000, "9" * 5000, None, 3, " " * (MAX_LENGTH + 1)]
)
def test_what_is_no_draft_is_none(text: Any) -> None:
    assert read_draft(text) is None


def test_data_of_the_data_page_joins_the_draft() -> None:
    draft = Choices("tiny-lora", {"max_steps": "7", "dataset_name": "old.jsonl", "max_length": "64"}, "fsdp2", (), 4)
    shown = {"dataset_name": "new.jsonl", "max_length": starting_values("tiny-lora")["max_length"]}
    joined = with_data(draft, None, shown)
    assert joined == Choices("tiny-lora", {"max_steps": "7", "dataset_name": "new.jsonl"}, "fsdp2", (), 4)
    assert with_data(draft, "tiny-full", shown).preset == "tiny-full"
    assert with_data(None, "tiny-full", shown).values == {"dataset_name": "new.jsonl"}
    with pytest.raises(ConfigError):
        with_data(draft, "gone", shown)
