"""Reads a LoRA adapter saved by peft and checks it against a base model before setting weights. Safetensors only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.embedded import BASE_DIR
from trainers.model.load import model_path
from trainers.model.lora import adapts_tied
from trainers.model.probe import in_one_line
from trainers.model.stored import replace
from trainers.model.vocabulary import add_rows
from trainers.model.weight_names import Shapes, misfits
from trainers.run.from_run import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_of
from trainers.run.json_file import load_json
from trainers.run.weight_headers import read_header

_PICKLE = "adapter_model.bin"


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
        if not (folder / ADAPTER_WEIGHTS).exists():
            pickled = f"; {_PICKLE} is a pickle, which would run code when read" if (folder / _PICKLE).exists() else ""
            raise ValueError(f"it has no {ADAPTER_WEIGHTS}{pickled}")
        headers = read_header(folder / ADAPTER_WEIGHTS)
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
        self._enlarge(base)
        try:
            model: Any = get_peft_model(base, self.settings)
        except Exception as error:  # peft raises errors of any kind
            raise _unusable(error) from None
        self.load_into(model)
        return model

    def _enlarge(self, base: Any) -> None:
        """Gives a base model rows for the tokens that the adapter has added, as `AutoPeftModel` does."""
        tokens = self.settings.trainable_token_indices or {}
        ids = [*tokens] if isinstance(tokens, list) else [token for several in tokens.values() for token in several]
        rows = max(ids, default=-1) + 1
        if rows > base.get_input_embeddings().weight.shape[0]:
            add_rows(base, {}, rows)

    def load_into(self, model: Any) -> None:
        """Loads the weights into the adapters of a peft model, which may be of another dtype.

        Raises:
            ValueError: if tensors are missing, unexpected or of another shape.
        """
        self.refuse_misfits(model)
        set_peft_model_state_dict(model, load_file(self.folder / ADAPTER_WEIGHTS))

    def refuse_misfits(self, model: Any, name: str = "default") -> None:
        """Compares the tensors in the file with an adapter of a peft model, which peft itself only warns about.

        Args:
            model: the peft model.
            name: name of its adapter.

        Raises:
            ValueError: if tensors are missing, unexpected or of another shape.
        """
        expected = {path: list(tensor.shape) for path, tensor in _named_tensors(model, name).items()}
        # Weights of the base that peft may have saved as well are ignored.
        own = {path: list(tensor.shape) for path, tensor in model.get_base_model().state_dict().items()}
        adapter_shapes = {
            path: size for path, size in self.shapes.items() if path in expected or not _is_base(path, own)
        }
        if lines := misfits(expected, adapter_shapes):
            raise ValueError("; ".join(lines))


def load_start(config: TrainConfig, model: Any) -> None:
    """Loads the adapter that a run starts from: into the adapters of its model, or merged into all of its weights.

    Args:
        config: the run's config; nothing is done unless its `from_run` is an adapter.
        model: the unwrapped model, with the weights of the base model and new adapters.

    Raises:
        ConfigError: if the adapter does not fit the model, or cannot be merged into it.
    """
    folder = adapter_of(config)
    if folder is None:
        return
    try:
        adapter = Adapter.read(folder, model_path(config))
        if config.method == "full":
            _merge(adapter, model)
        else:
            for weight in model.parameters():
                if weight.requires_grad and weight.is_meta:  # left in the base's files, and saved by the adapter
                    replace(weight, nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype)))
            adapter.load_into(model)
    except ValueError as error:
        raise ConfigError.about("from_run", folder, f"cannot be used: {error}", "check its base model") from None


def _merge(adapter: Adapter, model: Any) -> None:
    """Adds an adapter to the weights of a full model in place; which of them are trained does not change."""
    trained = {name: weight.requires_grad for name, weight in model.named_parameters()}
    adapted = adapter.attach(model)
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    replaced = any(isinstance(end, ModulesToSaveWrapper) for end in ends)
    if replaced and model.config.get_text_config().tie_word_embeddings:
        raise ValueError("it replaces one of two tied embeddings")
    if adapts_tied(model, list(adapted.targeted_module_names)):
        raise ValueError("it adapts one of two tied embeddings; `tunesmith export RUN --merged` gives each its own")
    merged = adapted.merge_and_unload()
    assert merged is model
    if model.is_gradient_checkpointing:
        model.disable_input_require_grads()  # peft's hook; that of transformers is left
    for name, weight in model.named_parameters():
        weight.requires_grad_(trained[name])


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


def _named_tensors(model: nn.Module, adapter: str = "default") -> dict[str, Any]:
    return dict(get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False))


def _is_base(name: str, own: Shapes) -> bool:
    """Whether a saved tensor belongs to the base model; peft saves those too if the embedding has an adapter."""
    return name.removeprefix("base_model.model.") in own


def _is_hub_id(name: str) -> bool:
    return not name.startswith(("/", ".", "~")) and not Path(name).exists()
