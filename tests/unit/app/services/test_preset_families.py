"""The presets by family and size, and what is said of their fit."""

from __future__ import annotations

from app.plan.hardware import GIB
from app.services.choices import GpuChoice
from app.services.preset_families import PresetChoice, preset_families
from trainers.config.presets import preset_names


def presets(*memories: int) -> dict[str, PresetChoice]:
    """All presets on a machine with GPUs of these GiB."""
    gpus = [GpuChoice(index, "GPU", gib * GIB, gib * GIB, "") for index, gib in enumerate(memories)]
    models = [model for models in preset_families(gpus).values() for model in models]
    return {preset.name: preset for model in models for preset in model.presets}


def test_every_preset_is_there_once_and_families_are_ordered_by_size() -> None:
    families = preset_families([])
    assert sorted(presets()) == sorted(preset_names())
    assert next(iter(families)) == "Embedded"
    for models in families.values():
        assert [model.parameters for model in models] == sorted(model.parameters for model in models)
    assert [model.title for model in families["Qwen3"]][:2] == ["Qwen3 0.6B", "Qwen3 1.7B"]


def test_without_gpus_only_what_needs_none_is_said_to_fit() -> None:
    assert {name for name, preset in presets().items() if preset.fits is not None} == {
        "tiny-full",
        "tiny-lora",
        "tiny-dpo",
        "tiny-kto",
        "tiny-distill",
        "tiny-reward",
        "tiny-grpo",
        "tiny-pretrain",
    }


def test_a_preset_of_another_objective_says_so() -> None:
    assert {name: preset.objective for name, preset in presets().items() if preset.objective} == {
        "tiny-dpo": "DPO",
        "tiny-kto": "KTO",
        "tiny-distill": "Distillation",
        "tiny-reward": "Reward",
        "tiny-grpo": "GRPO",
        "tiny-pretrain": "Pre-training",
    }
    assert presets()["tiny-dpo"].method == "full"


def test_fit_follows_number_and_memory_of_the_gpus() -> None:
    assert presets(24)["qwen3-8b-lora"].fits is True
    assert presets(12)["qwen3-8b-lora"].fits is False
    assert presets(80)["qwen3-8b-full"].fits is False, "it takes eight"
    assert presets(*[80] * 8)["qwen3-8b-full"].fits is True
    assert presets(80, 80)["qwen3-8b-full"].fits is None, "two would offload, and the host is not known"
    assert presets(*[80] * 8)["qwen3-8b-full"].memory == "8 x 35.0 GiB"
