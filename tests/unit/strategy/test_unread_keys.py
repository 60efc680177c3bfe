"""Each key that an Accelerate YAML or DeepSpeed JSON may hold is acted on, or its user is told that it is not."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic.fields import FieldInfo

from trainers.config.validation import build
from trainers.strategy.accelerate_schema import AccelerateConfig
from trainers.strategy.deepspeed_schema import DeepSpeedJson
from trainers.strategy.schema import Ignored, Section, nested_section, notes_of
from trainers.strategy.strategy import STRATEGIES_DIR, load_strategy, strategy_names

CONFIG = build({"model_name_or_path": "embedded", "dataset_name": "embedded"})
JSON_WITHOUT_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"steps_per_print": 10}, "steps_per_print"),
    ({"wall_clock_breakdown": True}, "wall_clock_breakdown"),
    ({"vocabulary_size": 5}, "vocabulary_size"),
    ({"disable_allgather": True}, "disable_allgather"),
    ({"comms_logger": {"enabled": True, "verbose": True}}, "comms_logger.verbose"),
    ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer"),
    ({"zero_optimization": {"stage": 2, "load_from_fp32_weights": True}}, "zero_optimization.load_from_fp32_weights"),
    (
        {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ),
]
JSON_THAT_ASKS_FOR_NOTHING: list[dict[str, Any]] = [
    {},
    {"wall_clock_breakdown": False, "zero_allow_untested_optimizer": True},
    {"comms_logger": {"enabled": False, "prof_all": True}},
    {"comms_logger": {"enabled": True, "prof_all": True}},
    {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto"}},
]


def ignored(path: Path) -> list[str]:
    return [line for line in load_strategy(str(path)).cautions(CONFIG) if " is ignored: " in line]


def with_json(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **content}))
    section = {"deepspeed_config_file": str(folder / "ds.json"), "zero3_init_flag": False}
    values = {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": section}
    (folder / "ds.yaml").write_text(yaml.safe_dump(values))
    return folder / "ds.yaml"


@pytest.mark.parametrize(("content", "path"), JSON_WITHOUT_EFFECT)
def test_a_deepspeed_key_without_effect_is_told(content: dict[str, Any], path: str, tmp_path: Path) -> None:
    [line] = ignored(with_json(tmp_path, content))
    assert line.startswith(f"DeepSpeed JSON: {path} is ignored: ")


@pytest.mark.parametrize("content", JSON_THAT_ASKS_FOR_NOTHING)
def test_what_asks_for_nothing_is_not(content: dict[str, Any], tmp_path: Path) -> None:
    assert ignored(with_json(tmp_path, content)) == []


@pytest.mark.parametrize(
    ("strategy", "section", "key", "value"),
    [
        ("fsdp2", "fsdp_config", "fsdp_state_dict_type", "FULL_STATE_DICT"),
        ("fsdp2", "fsdp_config", "fsdp_state_dict_type", "SHARDED_STATE_DICT"),
        ("zero3", "deepspeed_config", "zero3_save_16bit_model", True),
        ("ddp", "", "downcast_bf16", "yes"),
        ("ddp", "", "main_training_function", "train"),
    ],
)
def test_an_accelerate_key_without_effect_is_told(
    strategy: str, section: str, key: str, value: Any, tmp_path: Path
) -> None:
    values = yaml.safe_load((STRATEGIES_DIR / f"{strategy}.yaml").read_text())
    (values[section] if section else values)[key] = value
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(values))
    [line] = ignored(tmp_path / "own.yaml")
    assert line.startswith(f"{section}.{key} is ignored: " if section else f"{key} is ignored: ")


def test_the_strategies_that_ship_say_nothing_in_vain() -> None:
    for name in strategy_names():
        assert ignored(STRATEGIES_DIR / f"{name}.yaml") == []


def keys_of(section: type[Section], where: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that may stand there, at any depth, by its path."""
    for name, field in section.model_fields.items():
        path = f"{where}.{name}" if where else name
        yield path, field
        if nested := nested_section(field):
            yield from keys_of(nested, path)


def reasons(section: type[Section]) -> dict[str, str]:
    """Why a key has no effect, by its path."""
    notes = ((path, note) for path, field in keys_of(section) for note in notes_of(field))
    return {path: note.reason for path, note in notes if isinstance(note, Ignored)}


def deepspeeds_source() -> str:
    """DeepSpeed's code without the modules that only read its config."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec
    assert spec.submodule_search_locations
    declares = {"config.py", "constants.py", "config_utils.py", "offload_config.py"}
    elsewhere = {"inference", "autotuning", "launcher", "model_implementations", "module_inject", "elasticity"}
    files = [path for path in Path(spec.submodule_search_locations[0]).rglob("*.py") if path.name not in declares]
    return "\n".join(path.read_text(encoding="utf-8") for path in files if not elsewhere & set(path.parts))


def test_what_deepspeed_does_not_read_is_among_them() -> None:
    """A name that DeepSpeed's code has nowhere but in its config cannot have an effect."""
    source = deepspeeds_source()
    read = (path for path, field in keys_of(DeepSpeedJson) if field.annotation is not Any)
    names = {path: path.rpartition(".")[2].removeprefix("stage3_") for path in read}
    nowhere = {path for path, name in names.items() if name not in source and name.upper() not in source}
    assert nowhere <= set(reasons(DeepSpeedJson))
    assert "disable_allgather" in nowhere, "the control: the search finds one"


def test_each_has_a_reason_with_a_way_out() -> None:
    lines = [*reasons(AccelerateConfig).values(), *reasons(DeepSpeedJson).values()]
    assert len(lines) > 12
    assert all("remove" in reason or "use " in reason for reason in lines)
