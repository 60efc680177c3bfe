"""A LoRA adapter as peft saves it, held against a base model before any weight is set. Safetensors only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from trainers.embedded import BASE_DIR
from trainers.model.load import Shapes, misfits
from trainers.model.probe import in_one_line
from trainers.run.json_file import load_json
from trainers.run.weight_headers import read_header

ADAPTER_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"


@dataclass(frozen=True)
class Adapter:
    """A folder with an adapter whose config and header are whole.

    Args:
        folder: that holds it.
        settings: peft's, as they were saved.
        shapes: of its tensors, by name.
    """

    folder: Path
    settings: LoraConfig
    shapes: Shapes

    @classmethod
    def read(cls, folder: Path, base: str) -> Adapter:
        """Reads config and header, and no weight.

        Args:
            folder: that peft saved it to.
            base: Hub id or path of the base model that it is used with.

        Raises:
            ValueError: when it is not whole, of another kind than LoRA, only a pickle, or made for another base.
        """
        settings = _read_settings(folder / ADAPTER_CONFIG)
        base_name = settings.base_model_name_or_path
        if base_name and base_name != base and _is_hub_id(base_name) and (_is_hub_id(base) or base == str(BASE_DIR)):
            raise ValueError(f"its {ADAPTER_CONFIG} names the base {base_name}, and the run's base is {base}")
        if not (folder / _WEIGHTS).exists():
            pickled = f"; {_PICKLE} is a pickle, which would run code when read" if (folder / _PICKLE).exists() else ""
            raise ValueError(f"it has no {_WEIGHTS}{pickled}")
        header = read_header(folder / _WEIGHTS)
        return cls(folder, settings, {name: entry["shape"] for name, entry in header.items()})

    def attach(self, base: Any) -> Any:
        """The adapter with its weights on a base model, whose layers it changes in place.

        Raises:
            ValueError: naming tensors that only one of the two has, or whose shapes differ.
        """
        try:
            model: Any = get_peft_model(base, self.settings)
        except Exception as error:  # peft raises what it likes
            raise _unusable(error) from None
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
    except Exception as error:  # as above
        raise _unusable(error) from None
    assert isinstance(settings, LoraConfig)
    return settings


def _unusable(error: Exception) -> ValueError:
    return ValueError(f"its {ADAPTER_CONFIG} cannot be used ({in_one_line(error)})")


def _named_tensors(model: nn.Module) -> dict[str, Any]:
    return dict(get_peft_model_state_dict(model, save_embedding_layers=False))


def _is_base(name: str, own: Shapes) -> bool:
    """Whether a saved tensor is one of the base's, which peft writes beside an adapter on the embedding."""
    return name.removeprefix("base_model.model.") in own


def _is_hub_id(name: str) -> bool:
    return not name.startswith(("/", ".", "~")) and not Path(name).exists()
