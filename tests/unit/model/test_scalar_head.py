"""The head of a reward model: the same on every rank, compatible with stock transformers, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests.families import config_for, save_small
from trainers.config.mistakes import ConfigError
from trainers.config.validation import build
from trainers.model.load import build_model, build_unread
from trainers.model.probe import check_model_computes
from trainers.objectives.loss_module import LossModule
from trainers.strategy.strategy import load_strategy, refusal
from trainers.tools.memory_estimate import count_peaks, empty_model
from trainers.tools.preflight import check

BASE = {"model_name_or_path": "embedded", "dataset_name": "embedded", "objective": "reward"}


def settings(folder: Path, **changes: Any) -> Any:
    """A config of reward for a small model."""
    more = {"objective": "reward", "dataset_name": "embedded", "method": "full", "max_train_samples": 40}
    return config_for(folder, **{**more, **changes})


def refused(folder: Path, **changes: Any) -> str:
    """What `--check` says; loading the model says the same."""
    with pytest.raises(ConfigError) as caught:
        check(settings(folder, **changes), load_strategy("single"), has_gpu=False)
    with pytest.raises(ConfigError) as loaded:
        build_model(settings(folder, **changes))
    assert str(caught.value) == str(loaded.value)
    return str(caught.value)


def classifier(folder: Path, family: str = "llama", labels: int = 1, **changes: Any) -> Path:
    """A small stock sequence-classification model, saved."""
    return save_small(folder, family, AutoModelForSequenceClassification, num_labels=labels, **changes)


def test_the_head_depends_on_the_seed_alone(tmp_path: Path) -> None:
    """Not on what was drawn before, nor on the way that weights are read."""
    heads = []
    for seed, method in ((1, "full"), (1, "lora"), (2, "full")):
        torch.manual_seed(len(heads))
        for build_as in (build_model, lambda config: build_unread(config)[0]):
            model: Any = build_as(build({**BASE, "seed": seed, "method": method}))
            heads.append([weight for name, weight in model.named_parameters() if "score" in name][-1])
    assert all(head.requires_grad and head.dtype == torch.float32 and head.shape == (1, 128) for head in heads)
    assert all(torch.equal(head, heads[0]) for head in heads[:4])
    assert not torch.equal(heads[0], heads[4])


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_adapters_train_the_head_in_fp32_beside_them(mixed_precision: str) -> None:
    model: Any = build_model(build({**BASE, "method": "lora", "mixed_precision": mixed_precision}))
    heads = {name: weight for name, weight in model.named_parameters() if ".score." in name}
    assert [weight.requires_grad for weight in heads.values()] == [False, True]
    dtypes = [weight.dtype for weight in heads.values()]
    assert dtypes == [torch.bfloat16 if mixed_precision == "bf16" else torch.float32, torch.float32]
    assert type(model).__name__ == "PeftModelForSequenceClassification"
    assert not any("score" in name for name in model.targeted_module_names)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3", "mixtral"])
def test_families_score_as_their_own_forward_pass_does(family: str, packing: bool, tmp_path: Path) -> None:
    folder = save_small(tmp_path / family, family)
    assert check(settings(folder, packing=packing), load_strategy("single"), has_gpu=False)
    model: Any = build_model(settings(folder, packing=packing))
    check_model_computes(LossModule(model), model, packing, torch.device("cpu"), torch.float32)
    assert not [name for name, _ in model.named_parameters() if "lm_head" in name or "embed_out" in name]


def test_a_head_in_the_files_is_kept_and_no_other_weight_is_made_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = classifier(tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    model: Any = build_model(settings(folder))
    assert torch.equal(model.score.weight, stored["score.weight"])
    assert "starts from the head of the model's files" in capsys.readouterr().out
    for lost in ("score.weight", "model.norm.weight"):
        kept = {name: weight for name, weight in stored.items() if name != lost}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        assert f"weights that the model needs are not in its files: {lost}" in refused(folder)


def test_a_language_model_lends_its_decoder_and_nothing_else_may_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_small(tmp_path / "model", tie_word_embeddings=False)
    stored = load_file(folder / "model.safetensors")
    assert "lm_head.weight" in stored
    model: Any = build_model(settings(folder))
    assert torch.equal(model.get_decoder().norm.weight, stored["model.norm.weight"])
    said = capsys.readouterr().out
    assert "score.weight is a new head" in said
    assert "lm_head" not in said
    save_file({name: stored[name] for name in stored if "norm" not in name}, folder / "model.safetensors")
    assert "weights that the model needs are not in its files: model.layers.0" in refused(folder)


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    assert "transformers has no ForSequenceClassification class for olmoe models" in refused(
        save_small(tmp_path / "olmoe", "olmoe")
    )
    assert "has 3 outputs, and objective=reward trains one" in refused(classifier(tmp_path / "three", labels=3))
    with pytest.raises(ConfigError, match="LlamaForSequenceClassification, which has no language-modeling head"):
        build_model(settings(classifier(tmp_path / "scores"), objective="dpo"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"method": "qlora"}, "method=qlora with objective=reward"),
        ({"lora_target_modules": "q_proj,score"}, "whose head is trained in full"),
        ({"overlong": "split"}, "half an answer cannot be preferred"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build({**BASE, **changes})


def test_pipelines_are_refused() -> None:
    assert "objective=reward" in str(refusal(load_strategy("pp"), build(BASE), has_gpu=False))


def test_the_plan_counts_no_logits() -> None:
    """Scores take next to no memory where the logits of a language model take much."""
    peaks = {}
    for objective in ("reward", "sft"):
        config = build({**BASE, "objective": objective, "method": "full"})
        model: Any = empty_model(config, build_model(config).config)
        assert ("score.weight" in dict(model.named_parameters())) == (objective == "reward")
        peaks[objective] = count_peaks(config, model, 2, 64).highest
    assert 0 < peaks["reward"] < peaks["sft"]
