"""`freeze`: which weights its patterns name, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.families import config_for, save_small
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.config.teacher import teacher_config
from trainers.config.validation import build
from trainers.model.load import build_model, build_unread, load_model_config
from trainers.run.disk import bytes_needed, local_tensors
from trainers.run.weight_headers import read_headers
from trainers.strategy.strategy import load_strategy, resolve
from trainers.tools.memory_estimate import empty_model, weights
from trainers.tools.model_check import inspect_model
from trainers.tools.preflight import check


def config(freeze: str, **changes: Any) -> TrainConfig:
    options = {"model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full", "freeze": freeze}
    return build({**options, **changes})


def frozen(settings: TrainConfig) -> set[str]:
    return {name for name, weight in build_model(settings).named_parameters() if not weight.requires_grad}


def test_a_pattern_names_weights_by_consecutive_parts_of_their_names() -> None:
    names = {name for name, _ in build_model(config("")).named_parameters()}
    assert frozen(config("layers.1-2.mlp")) == {
        name for name in names if name.startswith(("model.layers.1.mlp.", "model.layers.2.mlp."))
    }
    assert frozen(config("norm")) == {"model.norm.weight"}, "a part is not a piece of a longer one"
    assert frozen(config("*norm")) == {name for name in names if "norm" in name}
    assert frozen(config("q_proj.weight,layers.0-99.self_attn.k_*")) == {
        name for name in names if "q_proj" in name or "k_proj" in name
    }
    assert frozen(config("")) == set()


def test_freezing_one_of_two_tied_weights_freezes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert frozen(config("lm_head")) == {"model.embed_tokens.weight"}
    assert "tied, so frozen as well: model.embed_tokens.weight is lm_head.weight" in capsys.readouterr().out
    untied = config_for(save_small(tmp_path, tie_word_embeddings=False), method="full", freeze="lm_head")
    assert frozen(untied) == {"lm_head.weight"}  # control
    assert "tied" not in capsys.readouterr().out


def test_weights_left_in_their_files_are_frozen_alike() -> None:
    settings = config("embed_tokens,layers.0-1")
    model, stored = build_unread(settings)
    assert stored
    assert {name for name, weight in model.named_parameters() if not weight.requires_grad} == frozen(settings)


@pytest.mark.parametrize(
    ("freeze", "line"),
    [
        (
            "embed_tokens,layer.0",
            r"freeze=layer\.0 matches no weight of embedded; write parts of names such as model\.",
        ),
        ("layers.3-0", r"freeze=layers\.3-0 matches no weight"),
        ("model", "freeze=model leaves nothing to train"),
    ],
)
def test_what_freezes_nothing_or_everything_is_refused_before_the_start(freeze: str, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        build_model(config(freeze))
    with pytest.raises(ConfigError, match=line):
        check(config(freeze), load_strategy("single"), has_gpu=False)


def test_a_pipeline_stage_without_trained_weights_is_refused() -> None:
    strategy = resolve(load_strategy("pp"), 2, "no")
    with pytest.raises(ConfigError, match=r"pipeline stage 0 of 2 \(layers 0 to 1\) trains nothing; freeze less"):
        check(config("embed_tokens,layers.0-1"), strategy, has_gpu=False)
    assert check(config("embed_tokens,layers.0"), strategy, has_gpu=False)


def test_frozen_weights_are_counted_as_frozen() -> None:
    settings = config("embed_tokens,layers.0-1")
    model = build_model(settings)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    counted = weights(settings, empty_model(settings, load_model_config(settings)))
    assert counted["trained_inside"] + counted["trained_outside"] == trained
    facts = inspect_model(settings, read_headers(Path(build_model(config("")).name_or_path)), load_strategy("single"))
    assert facts["trained_weights"] == trained
    every = sum(weight.numel() for weight in model.parameters())
    needed = [bytes_needed(settings, local_tensors(settings), 1, count) for count in (every, trained)]
    assert needed[0] - needed[1] == 12 * (every - trained)


def test_what_freezes_the_student_does_not_freeze_its_teacher() -> None:
    options = {
        "model_name_or_path": "embedded",
        "dataset_name": "embedded",
        "objective": "distill",
        "teacher": "embedded",
    }
    config = build({**options, "method": "full", "freeze": "layers.3"})
    assert config.freeze == ["layers.3"]
    assert teacher_config(config).freeze == []
    adapted = build({**options, "method": "lora", "use_dora": True, "lora_rank_pattern": "q_proj=4"})
    assert (teacher_config(adapted).use_dora, teacher_config(adapted).lora_rank_pattern) == (False, {})


def test_embeddings_of_new_tokens_are_not_frozen() -> None:
    with pytest.raises(ConfigError, match=r"freeze=embed_tokens with new_tokens=<a>.*never be trained"):
        build_unread(config("embed_tokens", new_tokens="<a>"))
    build_unread(config("layers.0", new_tokens="<a>"))
