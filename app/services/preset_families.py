"""The presets by family and size, and which of them are expected to fit the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.plan.hardware import GIB, ROOM
from app.services.choices import GpuChoice
from trainers.config.byte_text import byte_text
from trainers.config.objectives import OBJECTIVES
from trainers.config.presets import PRETRAIN, Method, model_names, model_presets


@dataclass(frozen=True)
class PresetChoice:
    """A preset of a model.

    Args:
        name: its name.
        method: `full`, `lora` or `qlora`.
        objective: what it trains for, such as `DPO`; empty for supervised fine-tuning.
        memory: what it needs, in words.
        fits: whether the preset's own estimate is below the memory of the GPUs here; None where that says nothing.
    """

    name: str
    method: str
    objective: str
    memory: str
    fits: bool | None


@dataclass(frozen=True)
class PresetModel:
    """A model with presets.

    Args:
        title: e.g. `Qwen3 8B`.
        parameters: number of its weights; 0 for the embedded model.
        presets: one per method, and those of other objectives.
    """

    title: str
    parameters: int
    presets: tuple[PresetChoice, ...]


def preset_families(gpus: Sequence[GpuChoice]) -> dict[str, list[PresetModel]]:
    """The models by family, each family by size, and the embedded model first.

    Args:
        gpus: the GPUs of this machine.
    """
    families: dict[str, list[PresetModel]] = {}
    for model in model_names():
        presets = model_presets(model)
        choices = tuple(
            PresetChoice(
                f"{model}-{name}",
                method.options.get("method", name),
                OBJECTIVES[name].label if name in OBJECTIVES else "Pre-training" if name == PRETRAIN else "",
                _memory(method),
                _fits(method, gpus),
            )
            for name, method in presets.methods.items()
        )
        parameters = presets.model.safetensors_total if presets.model else 0
        families.setdefault(_family(presets.title), []).append(PresetModel(presets.title, parameters, choices))
    for models in families.values():
        models.sort(key=lambda model: model.parameters)
    return dict(sorted(families.items(), key=lambda item: (item[1][0].parameters > 0, item[0])))


def _family(title: str) -> str:
    """`Qwen3` of `Qwen3 8B`: the words before the size."""
    return title.split(" ")[0]


def _memory(method: Method) -> str:
    """GiB per GPU, on the fewest GPUs that take it."""
    able = {count: placement for count, placement in method.gpus.items() if placement.strategies} or method.gpus
    count, placement = min(able.items(), key=lambda item: (item[1].host_gib > 0, item[0]))
    host = ", host memory" if placement.host_gib else ""
    size = byte_text(placement.gib * GIB)
    return f"{size}{host}" if count == 1 else f"{count} x {size}{host}"


def _fits(method: Method, gpus: Sequence[GpuChoice]) -> bool | None:
    if method.gpu_gib is None:
        return True
    placements = [placement for count, placement in method.gpus.items() if count <= len(gpus)]
    if not placements:
        return None
    memory = ROOM["gpu"] * min(gpu.memory for gpu in gpus) / GIB
    fitting = [placement for placement in placements if placement.strategies and placement.gib <= memory]
    if fitting and all(placement.host_gib for placement in fitting):
        return None
    return bool(fitting)
