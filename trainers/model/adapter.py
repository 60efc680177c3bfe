"""Reads a LoRA adapter saved by peft and checks it against a base model before setting weights. Safetensors only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from trainers.embedded import BASE_DIR
from trainers.model.probe import in_one_line
from trainers.model.weight_names import Shapes, misfits
from trainers.run.json_file import load_json
from trainers.run.weight_headers import read_header

ADAPTER_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


@dataclass(frozen=True)
class Adapter:
    """A saved adapter with a valid config and safetensors header.

    Args:
        folder: the folder of the adapter.
        settings: its saved peft config.
        shapes: shapes of its tensors, by name.
    """

    folder: Path
    settings: LoraConfig
    shapes: Shapes

    @classmethod
    def read(cls, folder: Path, base: str | None = None) -> Adapter:
        """Reads the config and the safetensors header, but no weights.

        Args:
            folder: the folder that peft saved the adapter to.
            base: Hub id or path of the base model to use it with; None: the one that it names.

        Raises:
            ValueError: if the adapter is incomplete, not LoRA, only a pickle, or made for another base.
        """
        settings = _read_settings(folder / ADAPTER_CONFIG)
        base_name = settings.base_model_name_or_path
        base = base or base_name
        if base is None:
            raise ValueError(f"its {ADAPTER_CONFIG} names no base")
        if base_name and base_name != base and _is_hub_id(base_name) and (_is_hub_id(base) or base == str(BASE_DIR)):
            raise ValueError(f"its {ADAPTER_CONFIG} names the base {base_name}, and the run's base is {base}")
        if not (folder / _WEIGHTS).exists():
            pickled = f"; {_PICKLE} is a pickle, which would run code when read" if (folder / _PICKLE).exists() else ""
            raise ValueError(f"it has no {_WEIGHTS}{pickled}")
        headers = read_header(folder / _WEIGHTS)
        return cls(folder, settings, {name: shape for name, (_, shape) in headers.items()})

    def attach(self, base: Any) -> Any:
        """Attaches the adapter to a base model, whose layers are modified in place, and loads its weights.

        Args:
            base: the transformers model.

        Returns:
            The peft model.

        Raises:
            ValueError: if peft cannot use the config, or tensors are missing, unexpected or of another shape.
        """
        try:
            model: Any = get_peft_model(base, self.settings)
        except Exception as error:  # peft raises errors of any kind
            raise _unusable(error) from None
        # Compare shapes before loading, ignoring weights of the base that peft may have saved as well.
        expected = {name: list(tensor.shape) for name, tensor in _named_tensors(model).items()}
        own = {name: list(tensor.shape) for name, tensor in base.state_dict().items()}
        adapter_shapes = {
            name: size for name, size in self.shapes.items() if name in expected or not _is_base(name, own)
        }
        if lines := misfits(expected, adapter_shapes):
            raise ValueError("; ".join(lines))
        set_peft_model_state_dict(model, load_file(self.folder / _WEIGHTS))
        return model


def _read_settings(path: Path) -> LoraConfig:
    values = load_json(path)
    kind = values.get("peft_type") if isinstance(values, dict) else None
    if kind != "LORA":
        raise ValueError(f"the peft_type in its {path.name} is {kind!r}, and only LORA is supported")
    try:
        settings = PeftConfig.from_pretrained(str(path.parent))
    except Exception as error:  # peft raises errors of any kind
        raise _unusable(error) from None
    assert isinstance(settings, LoraConfig)
    return settings


def _unusable(error: Exception) -> ValueError:
    return ValueError(f"its {ADAPTER_CONFIG} cannot be used ({in_one_line(error)})")


def _named_tensors(model: nn.Module) -> dict[str, Any]:
    return dict(get_peft_model_state_dict(model, save_embedding_layers=False))


def _is_base(name: str, own: Shapes) -> bool:
    """Whether a saved tensor belongs to the base model; peft saves those too if the embedding has an adapter."""
    return name.removeprefix("base_model.model.") in own


def _is_hub_id(name: str) -> bool:
    return not name.startswith(("/", ".", "~")) and not Path(name).exists()
