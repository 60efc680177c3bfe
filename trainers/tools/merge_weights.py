"""Merges full weights tensor by tensor: what is in memory is one weight of each model, never a model.

Weights are matched by their names in the model that transformers builds, so files may be cut and named differently.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils import merge_utils
from torch import nn

from trainers.checkpoint.scratch import Scratch, map_weights
from trainers.checkpoint.weights import persistent_buffers
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.load import build_unread, load_model_config
from trainers.model.stored import Source
from trainers.objectives.loss_module import inner_model
from trainers.run.merging import LINEAR, MergeRequest

_CHUNK = 2**24
"""Elements to sum at once in fp64."""
_SAME_MODEL = frozenset({
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures",
})  # fmt: skip
"""Keys of a model's config that change nothing in what it computes."""


@dataclass(frozen=True)
class MergedWeight:
    """A weight that is merged from those of several models when it is read.

    Args:
        name: its name in the model.
        sources: where it comes from in each model.
        base: where it comes from in the base model; None if it is not needed.
        request: how to merge.
        dtype: dtype to round the result to.
    """

    name: str
    sources: Sequence[Source]
    base: Source | None
    request: MergeRequest
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.sources[0].shape

    def read(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """See `StoredTensor.read`."""
        if target.numel():
            target.detach().copy_(self.mapped()[part])

    def mapped(self) -> torch.Tensor:
        """The merged weight, rounded once to `dtype`.

        Raises:
            ConfigError: if a model's weight, or the result, has a value that is not finite.
        """
        tensors = [source.mapped() for source in self.sources]
        for model, tensor in zip(self.request.models, tensors, strict=True):
            refuse_not_finite(tensor, f"{self.name} of {model.name}")
        base = None if self.base is None else self.base.mapped()
        if base is not None:
            refuse_not_finite(base, f"{self.name} of the base model")
        merge = weighted_sum if self.request.method == LINEAR else merge_differences
        merged = merge(self.name, tensors, base, self.request, self.dtype)
        refuse_not_finite(merged, f"{self.name} of the result in {str(self.dtype).removeprefix('torch.')}")
        return merged


def refuse_not_finite(tensor: torch.Tensor, name: str) -> None:
    """Raises ConfigError if a tensor has NaN or infinite values."""
    flat = tensor.reshape(-1)
    for start in range(0, flat.numel(), _CHUNK):
        if not flat[start : start + _CHUNK].isfinite().all():
            raise ConfigError(f"{name} has values that are not finite (NaN or infinity); leave that model out")


def weighted_sum(
    name: str, tensors: Sequence[torch.Tensor], base: torch.Tensor | None, request: MergeRequest, dtype: torch.dtype
) -> torch.Tensor:
    """The base plus the weighted sum of the differences from it, in fp64, rounded once.

    Args:
        name: name of the weight.
        tensors: it in each model, all of one shape.
        base: it in the base model; None if the weights add up to 1, so that it drops out.
        request: has the weights.
        dtype: dtype of the result.
    """
    weights = list(request.weights)
    if base is not None:
        tensors, weights = [*tensors, base], [*weights, 1 - sum(weights)]
    scale = torch.tensor(weights, dtype=torch.float64)
    flats = [tensor.reshape(-1) for tensor in tensors]
    merged = torch.empty(flats[0].shape, dtype=dtype)
    for start in range(0, merged.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        merged[part] = merge_utils.task_arithmetic([flat[part].double() for flat in flats], scale).to(dtype)
    return merged.view(tensors[0].shape)


def merge_differences(
    name: str, tensors: Sequence[torch.Tensor], base: torch.Tensor | None, request: MergeRequest, dtype: torch.dtype
) -> torch.Tensor:
    """The base plus what peft makes of the differences from it, in fp32; for the arguments, see `weighted_sum`.

    What DARE draws follows from the seed and the name of the weight, so no order of weights changes it.
    """
    assert base is not None
    start = base.float()
    differences = [tensor.float() - start for tensor in tensors]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a density of 1 keeps all
        torch.manual_seed(seed_of(request.seed, name))
        merge = getattr(merge_utils, request.method)
        merged: torch.Tensor = merge(differences, torch.tensor(request.weights), request.density)
    return merged.add_(start).to(dtype)


def seed_of(seed: int, name: str) -> int:
    """The seed of what is drawn for a weight."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])


def build_merged(configs: Sequence[TrainConfig], base: TrainConfig | None, request: MergeRequest, dtype: torch.dtype,
                 scratch: Scratch) -> nn.Module:  # fmt: skip
    """Builds the merged model, its weights in files without a name.

    Args:
        configs: each loads one of the models.
        base: loads the base model; None if its weights are not needed.
        request: how to merge.
        dtype: dtype to round weights to, but for those that the model keeps in fp32.
        scratch: where the weights go.

    Raises:
        ConfigError: if the models differ in more than their weights, or a weight cannot be merged.
    """
    names = [model.name for model in request.models]
    for name, config in zip(names[1:], configs[1:], strict=True):
        _refuse_other_architecture(names[0], configs[0], name, config)
    (model, stored), *others = [_unread(config, name) for config, name in zip(configs, names, strict=True)]
    for name, (other, _) in zip(names[1:], others, strict=True):
        _refuse_other_shapes(names[0], model, name, other)
        _refuse_other_buffers(names[0], model, name, other)
    sources = [stored, *(other for _, other in others)]
    of_base: Mapping[str, Source] = {}
    if base is not None:
        base_model, of_base = _unread(base, "the base model")
        _refuse_other_shapes(names[0], model, "the base model", base_model)
    fp32 = set(getattr(inner_model(model), "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        fp32 |= set(getattr(inner_model(model), "_keep_in_fp32_modules", None) or ())
    merged: dict[str, Source] = {
        name: MergedWeight(
            name, [source[name] for source in sources], of_base.get(name), request,
            torch.float32 if fp32 & set(name.split(".")) else dtype,
        )
        for name in stored
    }  # fmt: skip
    map_weights(model, merged, scratch)
    return model


def _unread(config: TrainConfig, name: str) -> tuple[nn.Module, dict[str, Source]]:
    model, stored = build_unread(config)
    if not stored:
        raise ConfigError(f"{name}: its weights cannot be read one by one, so they cannot be merged; save them with "
                          "transformers, not quantised and without code of its own")  # fmt: skip
    return model, stored


def _refuse_other_architecture(first: str, config: TrainConfig, second: str, other: TrainConfig) -> None:
    """Raises ConfigError for two models whose configs make different functions of the same weights."""
    values, others = (load_model_config(each).to_dict() for each in (config, other))
    for key in sorted(values.keys() | others.keys()):
        if key not in _SAME_MODEL and not key.endswith("token_id") and values.get(key) != others.get(key):
            problem = f"{second} has {key}={_short(others.get(key))} in its config.json, and {first} has "
            raise ConfigError(f"{problem}{_short(values.get(key))}; only models of one architecture can be merged")


def _short(value: Any) -> str:
    return str(value)[:80]


def _refuse_other_shapes(first: str, model: nn.Module, second: str, other: nn.Module) -> None:
    """Raises ConfigError for the first weight that is in one of two models only, or has another shape there."""
    shapes, others = ({name: list(weight.shape) for name, weight in each.named_parameters()} for each in (model, other))
    for name in [*shapes, *others]:
        shape, other_shape = (f"shape {each[name]}" if name in each else "none" for each in (shapes, others))
        if shape != other_shape:
            problem = (
                f"{name}: {first} has {shape}, and {second} has {other_shape}; only weights of one shape can be merged"
            )
            raise ConfigError(f"{problem} (another vocabulary, or other tied weights?)")


def _refuse_other_buffers(first: str, model: nn.Module, second: str, other: nn.Module) -> None:
    """Raises ConfigError for two models with different values that are saved but are no weights."""
    for name in persistent_buffers(model):
        if not torch.equal(model.get_buffer(name), other.get_buffer(name)):
            raise ConfigError(f"{name} differs between {first} and {second}; it is no weight, and cannot be merged")


def load_config(folder: Path | str, objective: str, revision: str | None = None) -> TrainConfig:
    """The config that loads full weights in fp32.

    Args:
        folder: folder or Hub id.
        objective: what they were trained for; decides which head they have.
        revision: branch, tag or commit on the Hub.
    """
    return TrainConfig(
        model_name_or_path=str(folder), model_revision=revision, dataset_name="embedded", packing=False, method="full",
        objective=objective, mixed_precision="no", gradient_checkpointing=False,
    )  # fmt: skip
