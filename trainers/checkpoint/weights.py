"""The weights of an unwrapped model: which of them checkpoints hold, what identifies the frozen ones, and loading."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.config.optimizer_options import AVERAGE, SCHEDULE_FREE, STEPPED
from trainers.model.principal import PREFIX
from trainers.model.stored import Between, Source, StoredTensor, tensors_in
from trainers.parallel.backend import trained_weights
from trainers.parallel.shards import WEIGHT
from trainers.run.manifest import read_manifest

STATE = "optim.state."
"""Start of the names of optimizer states: `optim.state.<weight>.<key>`."""
_WEIGHTS = f"{WEIGHT}."
EXTRA = "extra."
"""Prefix of the names of tensors in checkpoints that are no state of the model."""
OTHER_BASE = "the base model's weights are not those that its adapters were trained on"
NOTHING: Mapping[str, Source] = MappingProxyType({})


def persistent_buffers(model: nn.Module) -> list[str]:
    """Names of the buffers to save: those of the state dict if all weights are trained, otherwise none."""
    if not all(weight.requires_grad for weight in model.parameters()):
        return []
    persistent = set(model.state_dict(keep_vars=True))
    return [name for name, _ in model.named_buffers() if name in persistent]


def base_digest(model: nn.Module, stored: Mapping[str, Source] = NOTHING) -> str:
    """sha256 of a sample of each frozen weight; empty if all weights are trained.

    Values are rounded to bf16, so that the digest does not depend on the compute dtype. 4-bit weights are left out:
    embeddings and norms identify the base model.

    Args:
        model: the unwrapped model.
        stored: where its weights on the meta device are to be read from.
    """
    digest = hashlib.sha256()
    frozen = [(name, weight) for name, weight in model.named_parameters() if not weight.requires_grad]
    for name, weight in frozen:
        if weight.is_floating_point() and type(weight) is nn.Parameter:
            flat = (stored[name].mapped() if weight.is_meta else weight.detach()).reshape(-1)
            sample = flat[:: max(1, flat.numel() // 1024)].to(weight.dtype).to(torch.bfloat16)
            digest.update(f"{name} {list(weight.shape)}".encode() + sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest() if frozen else ""


def refuse_other_base(manifest: dict[str, Any], model: nn.Module, stored: Mapping[str, Source] = NOTHING) -> None:
    """Raises ConfigError when the frozen weights of a model are not those that a checkpoint was trained on."""
    if manifest["base"] != base_digest(model, stored):
        raise ConfigError(f"{OTHER_BASE}; restore them")


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of an unwrapped model that a checkpoint contains: trained weights and persistent buffers."""
    return dict(trained_weights(model)) | {name: model.get_buffer(name) for name in persistent_buffers(model)}


def _states(tensors: Sequence[StoredTensor], key: str) -> dict[str, StoredTensor]:
    """An optimizer state of every weight that has it, by the weight's name."""
    ends = STATE, f".{key}"
    return {
        tensor.name.removeprefix(ends[0]).removesuffix(ends[1]): tensor
        for tensor in tensors
        if tensor.name.startswith(ends[0]) and tensor.name.endswith(ends[1])
    }


def _averages(tensors: Sequence[StoredTensor], model: nn.Module) -> dict[str, StoredTensor]:
    """The moving average of every trained weight in a checkpoint, by the weight's name.

    Raises:
        ValueError: if there is none.
    """
    averages = _states(tensors, AVERAGE)
    if missing := [name for name, _ in trained_weights(model) if name not in averages]:
        raise ValueError(f"it has no moving average of {missing[0]}")
    return averages


def saved_factors(folder: Path) -> dict[str, torch.Tensor]:
    """The first adapters that a checkpoint holds, if its run subtracts them from the base (PiSSA)."""
    files = [folder / file for file in sorted(read_manifest(folder)["files"])]
    tensors = {name.removeprefix(EXTRA): tensor for file in files for name, tensor in tensors_in(file).items()}
    return {name: tensor.mapped() for name, tensor in tensors.items() if name.startswith(PREFIX)}


def load_weights(
    folder: Path,
    model: nn.Module,
    stored: dict[str, Source] | None = None,
    averaged: bool = False,
    resumes: bool = False,
) -> None:
    """Copies the weights of a checkpoint into a model.

    Args:
        folder: the checkpoint.
        model: the unwrapped model.
        stored: where its weights on the meta device are to be read from; changed to the checkpoint.
        averaged: take the moving average of each trained weight.
        resumes: take the weights to train on, which schedule-free AdamW does not evaluate.

    Raises:
        ValueError: naming a weight that is missing on either side, or whose shape differs.
    """
    wanted, manifest = saved_tensors(model), read_manifest(folder)
    tensors = [tensor for file in sorted(manifest["files"]) for tensor in tensors_in(folder / file).values()]
    plain = {tensor.name.removeprefix(_WEIGHTS): tensor for tensor in tensors if tensor.name.startswith(_WEIGHTS)}
    sources: dict[str, Source] = {**plain, **(_averages(tensors, model) if averaged else {})}
    if not resumes and manifest["config"].get("optim") == SCHEDULE_FREE:
        share = 1 - 1 / manifest["config"]["adam_beta1"]
        stepped = _states(tensors, STEPPED)
        sources |= {name: Between(plain[name], end, share) for name, end in stepped.items()}
    for name, tensor in sources.items():
        if name not in wanted:
            raise ValueError(f"{name} is in the checkpoint but not in the model; was it saved with another config?")
        target = wanted.pop(name)
        if target.shape != tensor.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} in the checkpoint, {list(target.shape)} in the model"
            )
        if target.is_meta and stored is not None:
            former = stored[name]
            stored.update({alias: tensor for alias, other in stored.items() if other is former})
        else:
            with torch.no_grad():
                target.copy_(tensor.mapped())
    if wanted:
        raise ValueError(f"{len(wanted)} weights are not in the checkpoint, including {next(iter(wanted))}")
