"""Expert parallelism: divides the experts of each layer over ranks, and everything else as `ddp` does.

Each rank has its own rows. transformers sends each (token, expert) pair to the rank of its expert and brings the result
back (`AllToAllEP`), so that the gradient of an expert is summed over the tokens of its whole group.

Every rank has the adapters of all experts and computes with those of its own; of the others their gradient is zero, so
that the mean which DDP takes is the one that the experts themselves get.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.distributed.expert_parallel import apply_expert_parallelism

from trainers.config.mistakes import ConfigError
from trainers.objectives.loss_module import LossModule
from trainers.objectives.output_head import decoder_of
from trainers.parallel.shards import TensorSlice
from trainers.parallel.tensor import TensorParallel
from trainers.strategy.expert_plan import DISPATCH, SHARD, expert_plan, expert_refusals
from trainers.strategy.mesh import Mesh


def expert_stacks(base: Any) -> list[str]:
    """Names in the decoder of the weights that its expert-parallel plan divides; empty without one.

    Args:
        base: the transformers model.
    """
    plan = expert_plan(base.config.get_text_config())
    return [name for name, _ in decoder_of(base).named_parameters() if plan.get(_pattern(name)) == SHARD]


def planned(loss: LossModule, ep_size: int) -> dict[str, str]:
    """The style of every stack of experts and of the module that it is in, by name in the decoder.

    Args:
        loss: the loss module, of which no expert was split yet.
        ep_size: ranks that share the experts of each layer.

    Raises:
        ConfigError: if the model's experts cannot be divided.
    """
    text, decoder = loss.base.config.get_text_config(), decoder_of(loss.base)
    if mistakes := expert_refusals(text, ep_size):
        raise ConfigError(mistakes)
    plan, option = expert_plan(text), f"ep_size={ep_size}: {text.model_type}"
    weights = expert_stacks(loss.base)
    modules = [
        name for name, module in decoder.named_modules()
        if plan.get(_pattern(name)) == DISPATCH and not _has_adapter(module)
    ]  # fmt: skip
    if not weights:
        raise ConfigError(f"{option} has no weight that its expert-parallel plan names; use ddp or fsdp2")
    for name in modules:
        inside = {f"{name}.{weight}" for weight, _ in decoder.get_submodule(name).named_parameters()}
        if left := sorted(inside - set(weights)):
            raise ConfigError(f"{option} has weights at {left[0]} which its plan leaves out; use ddp or fsdp2")
    for name in weights:
        count = decoder.get_parameter(name).shape[0]
        if count % ep_size or name.rpartition(".")[0] not in modules:
            raise ConfigError(f"{option} has {count} experts at {name}, which cannot be divided; use ddp or fsdp2")
    # Weights first: the module's forward is built from the number of experts that they leave it.
    return dict.fromkeys(weights, SHARD) | dict.fromkeys(modules, DISPATCH)


def _pattern(name: str) -> str:
    """A name as a plan writes it; adapters on stacks wrap the module of the experts."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name.replace(".base_layer", ""))


def _has_adapter(module: nn.Module) -> bool:
    """Whether it is the adapter that peft puts around the module of a stack; a run without adapters imports no peft."""
    return hasattr(module, "get_delta_factors")


def divide_experts(loss: LossModule, mesh: Mesh) -> dict[str, TensorSlice]:
    """Leaves this rank its experts of a full, unwrapped model, and has tokens sent to the others. Collective.

    Args:
        loss: the loss module on any device; modified in place.
        mesh: this rank's position in the mesh.

    Returns:
        This rank's slice of each stack of experts, by its name in `loss.model.named_parameters()`; also set in
        `loss.tensor`.

    Raises:
        ConfigError: if the model's experts cannot be divided.
    """
    size, rank = mesh.sizes.ep, mesh.index("ep")
    if size == 1:
        return {}
    plan, decoder = planned(loss, size), decoder_of(loss.base)
    names = {id(weight): name for name, weight in loss.model.named_parameters()}
    shapes = {name: decoder.get_parameter(name).shape for name, style in plan.items() if style == SHARD}
    full_names = {name: names[id(decoder.get_parameter(name))] for name in shapes}
    experts: Any = mesh.expert_mesh
    apply_expert_parallelism(decoder, experts["ep"], experts["alone"], plan)
    # Plain tensors in place of DTensors: DDP, the optimizer and checkpoints know them from tensor parallelism.
    slices = {}
    for name, shape in shapes.items():
        parent, _, key = name.rpartition(".")
        weight: Any = decoder.get_parameter(name)
        local = weight.detach().to_local().clone(memory_format=torch.contiguous_format)
        decoder.get_submodule(parent)._parameters[key] = nn.Parameter(local, weight.requires_grad)
        count = shape[0] // size
        part = (slice(rank * count, (rank + 1) * count), *(slice(0, side) for side in shape[1:]))
        slices[full_names[name]] = TensorSlice(shape, part)
        _keep_adapters_of(part[0], decoder, parent, key)
    first = mesh.index("ep_replicate") == 0
    copies = mesh.group("ep_replicate")
    loss.tensor = TensorParallel(mesh.group("ep"), rank, size, first, slices, by_expert=True, copies=copies)
    return slices


def _keep_adapters_of(local: slice, decoder: nn.Module, experts: str, key: str) -> None:
    """Has the adapters on a stack change the experts of this rank alone.

    Args:
        local: the experts of this rank.
        decoder: the decoder.
        experts: name of the module of the experts.
        key: name of the stack in it.
    """
    while experts.endswith(".base_layer"):  # an adapter on each stack, one around the other
        experts = experts.removesuffix(".base_layer")
        wrapper: Any = decoder.get_submodule(experts)
        if wrapper.parameter_name == key:
            wrapper.get_delta_factors = partial(_local_factors, wrapper.get_delta_factors, local)


def _local_factors(factors: Any, local: slice, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
    """peft's factors of the change of each expert, `[experts, ...]`, of some experts."""
    left, right, scaling = factors(adapter)
    return left[local], right[local], scaling
