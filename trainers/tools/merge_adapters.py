"""Merges LoRA adapters with peft's `add_weighted_adapter`, without the weights of their base model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.adapter import Adapter
from trainers.model.load import load_model_config, model_path
from trainers.model.probe import in_one_line
from trainers.model.scalar_head import model_family
from trainers.model.stored import without_memory
from trainers.run.from_run import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainers.run.merging import CAT, FACTOR_METHODS, LINEAR, RANK_METHODS, MergeRequest
from trainers.tools.merge_weights import refuse_not_finite

RESULT = "merged"
"""Name of the merged adapter, and of the folder that peft writes it to."""
_EXACT = 1e-6
"""Largest relative difference of `cat` from the weighted sum of the updates, in fp32."""
_UNMERGEABLE = {
    "use_dora": "the magnitudes of DoRA are no sum",
    "modules_to_save": "peft merges no modules that are trained in full beside the adapter",
    "trainable_token_indices": "peft merges no trained tokens",
    "target_parameters": "peft merges no adapters of parameters, such as those of experts",
}
"""Settings of an adapter that peft's `add_weighted_adapter` refuses, or drops silently."""


def merge_adapters(request: MergeRequest, config: TrainConfig, folder: Path) -> tuple[Path, int, float | None]:
    """Merges adapters into one.

    Args:
        request: what to merge, and how.
        config: loads the base model, of which only its config is read.
        folder: where to write.

    Returns:
        The folder of the merged adapter, its rank, and how far it is from the exact weighted sum of the updates,
        relative to it (None for a method that does not approximate that).

    Raises:
        ConfigError: if peft cannot merge them.
    """
    adapters = {f"model-{number}": model for number, model in enumerate(request.models)}
    files = {name: _check_files(Path(model.folder), model.name, config) for name, model in adapters.items()}
    _refuse_other_modules({adapters[name].name: file for name, file in files.items()})
    with torch.device("meta"):
        base = model_family(config).from_config(load_model_config(config))
    with without_memory(base):
        try:
            merged = _load(base, {name: model.folder for name, model in adapters.items()})
        except Exception as error:  # peft raises errors of any kind
            raise ConfigError(f"the adapters cannot be loaded on one base ({in_one_line(error)})") from None
        for name, file in files.items():
            try:
                file.refuse_misfits(merged, name)
            except ValueError as error:
                raise ConfigError(f"{adapters[name].name} does not fit the base model: {error}") from None
        _check_layers(merged, request, dict(zip(adapters, (model.name for model in request.models), strict=True)))
        for settings in merged.peft_config.values():
            # Their scales are computed by now. The result has none of its own: peft would give it that of rsLoRA.
            settings.use_rslora, settings.init_lora_weights = False, True
        torch.manual_seed(request.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                merged.add_weighted_adapter(
                    list(adapters), list(request.weights), RESULT, combination_type=request.method,
                    svd_rank=request.rank, svd_full_matrices=False, density=request.density,
                )  # fmt: skip
            except Exception as error:  # peft raises errors of any kind
                raise ConfigError(
                    f"peft cannot merge these adapters with {request.method}: {in_one_line(error)}"
                ) from None
        for name, weight in merged.named_parameters():
            if f".{RESULT}" in name:
                refuse_not_finite(weight, f"{name} of the result")
        deviation = _deviation(merged, dict(zip(adapters, request.weights, strict=True)))
        if request.method == CAT and not deviation <= _EXACT:
            raise AssertionError(f"the merged adapter is {deviation:.1e} from the weighted sum of the updates")
        rank = int(merged.peft_config[RESULT].r)
        merged.save_pretrained(str(folder), selected_adapters=[RESULT])
    approximates = request.method in (LINEAR, CAT, "svd")
    return folder / RESULT, rank, deviation if approximates else None


def _check_files(folder: Path, name: str, config: TrainConfig) -> Adapter:
    """Reads an adapter; raises ConfigError if that fails, peft cannot merge its kind, or its weights are not finite."""
    try:
        adapter = Adapter.read(folder, model_path(config))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{name}: {error}") from None
    for option, reason in _UNMERGEABLE.items():
        if value := getattr(adapter.settings, option, None):
            problem = f"{name} has {option}={str(value)[:80]} in its {ADAPTER_CONFIG}: {reason}"
            raise ConfigError(f"{problem}; merge full weights instead, which `tunesmith export RUN --merged` writes")
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as tensors:
        for tensor in tensors.keys():  # noqa: SIM118
            refuse_not_finite(tensors.get_tensor(tensor), f"{tensor} of {name}")
    return adapter


def _refuse_other_modules(files: Mapping[str, Adapter]) -> None:
    """Raises ConfigError for adapters that leave out different modules: peft gives the result those of the first."""
    left_out = {name: file.settings.exclude_modules or () for name, file in files.items()}
    if len({value if isinstance(value, str) else frozenset(value) for value in left_out.values()}) > 1:
        listed = ", ".join(f"{str(value)[:80] or 'none'} in {name}" for name, value in left_out.items())
        raise ConfigError(
            f"the adapters leave out different modules (exclude_modules in their {ADAPTER_CONFIG}): {listed}; "
            "merge full weights instead, which `tunesmith export RUN --merged` writes"
        )


def _load(base: Any, folders: dict[str, str]) -> Any:
    (first, folder), *others = folders.items()
    merged = PeftModel.from_pretrained(base, folder, adapter_name=first, torch_device="cpu")
    for name, path in others:
        merged.load_adapter(path, adapter_name=name, torch_device="cpu")
    return merged


def _layers(model: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, LoraLayer))


def _check_layers(model: nn.Module, request: MergeRequest, names: dict[str, str]) -> None:
    """Raises ConfigError for ranks that the method cannot merge."""
    for place_of_layer, layer in _layers(model):
        where_ranks = {adapter: layer.r[adapter] for adapter in names if adapter in layer.r}
        if request.method in FACTOR_METHODS and len(set(where_ranks.values())) > 1:
            listed = ", ".join(f"{rank} in {names[adapter]}" for adapter, rank in where_ranks.items())
            problem = f"method={request.method} needs equal ranks, and {place_of_layer} has rank {listed}"
            raise ConfigError(f"{problem}; use --method cat or svd, or one that ends with _svd")
        if request.method in RANK_METHODS:
            smallest, rank = min(layer.in_features, layer.out_features), request.rank or max(where_ranks.values())
            if rank > smallest:
                raise ConfigError.about("--rank", rank, f"is larger than {place_of_layer}, of {smallest}", "make it "
                                        "smaller")  # fmt: skip


def _factors(layer: LoraLayer, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A `[rank, in]` and B `[out, rank]` of an adapter of a layer, in fp64."""
    if adapter in layer.lora_A:
        return layer.lora_A[adapter].weight.double(), layer.lora_B[adapter].weight.double()
    return layer.lora_embedding_A[adapter].double(), layer.lora_embedding_B[adapter].double()


@torch.no_grad()
def _deviation(model: nn.Module, weights: dict[str, float]) -> float:
    """Norm of the difference between the merged updates and the weighted sum of the updates, relative to the sum.

    Norms are computed from the factors: `|BA|^2` is the trace of `(B^T B)(A A^T)`.
    """
    difference = total = 0.0
    for _, layer in _layers(model):
        merged = _factors(layer, RESULT)
        scaled = [(_factors(layer, name), weight * layer.scaling[name]) for name, weight in weights.items()
                  if name in layer.r]  # fmt: skip
        lefts, rights = [b * scale for (_, b), scale in scaled], [a for (a, _), _ in scaled]
        total += _squared_norm(lefts, rights)
        difference += _squared_norm([*lefts, -layer.scaling[RESULT] * merged[1]], [*rights, merged[0]])
    return math.sqrt(max(difference, 0.0) / total) if total > 0 else 0.0


def _squared_norm(lefts: list[torch.Tensor], rights: list[torch.Tensor]) -> float:
    left, right = torch.cat(lefts, dim=1), torch.cat(rights, dim=0)
    return float(((left.T @ left) * (right @ right.T)).sum())
