"""FSDP 1 and 2 (and HSDP): weights, gradients and optimizer state are sharded over the ranks.

Parameters and reductions are fp32, and autocast sets the compute dtype, as under every other strategy. Matrices which
autocast would cast anyway are cast before they are gathered, which is the same to the bit and half of the bytes.
FSDP 2 gathers the next layer before it computes one, and the preceding layer in the backward pass.
Gradients are reduced in every micro-batch, so that they stay sharded too; groups of HSDP sum theirs once per step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.model.casts import cast_before_gather
from trainers.model.reachability import reach_noted
from trainers.objectives.output_head import SCALAR_HEAD, decoder_of
from trainers.parallel.backend import Backend, total_numel, trained_weights, unsplit_numel, zero_missing_gradients
from trainers.parallel.fill import fill, filler
from trainers.parallel.norm import clip_grad_norm
from trainers.parallel.optimizer import build_optimizer, parameter_groups
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import local_part
from trainers.strategy.mesh import Mesh

_WRAPPER = "_fsdp_wrapped_module."  # inserted into names by FSDP 1


class FullySharded(Backend):
    """`fsdp1`, `fsdp2`, `hsdp` and their variants.

    Args:
        loss: the module that computes the loss; its `.model` is the transformers or peft model.
        config: the run's config.
        accelerator: wraps `loss` as its Accelerate file specifies.
        ranks: all processes of the run.
        mesh: the mesh of all ranks.

    Raises:
        ConfigError: if FSDP cannot wrap the model as specified; see `wrapped_classes`.
        TrainingError: if a file of the base model changed while it was read.
    """

    def __init__(self, loss: Any, config: TrainConfig, accelerator: Any, ranks: Ranks, mesh: Mesh):
        self.device = ranks.device
        plugin = accelerator.state.fsdp_plugin
        self.version = 2 if accelerator.is_fsdp2 else 1
        self.shapes = {name: weight.shape for name, weight in trained_weights(loss.model)}
        self.tensor = getattr(loss, "tensor", None)
        classes = _set_wrap_policy(plugin, loss, self.version)
        self.total_numel = total_numel(loss, self.tensor) - unsplit_numel(loss, self.tensor)
        cast = {id(loss.model.get_parameter(name)) for name in cast_before_gather(config, loss)}
        if self.version == 2:
            layers = _layers_in_order(loss, classes)  # FSDP changes their classes
            if cast:
                _gather_as_cast(accelerator, loss, classes, cast)
            # Accelerate insists on an optimizer, in which it looks for weights by address: the meta device has none.
            unused = torch.optim.SGD([trained_weights(loss.model)[-1][1]], lr=0.0)
            self.model, _ = accelerator.prepare(loss, unused)
            if not config.torch_compile:  # not tried with compiled layers
                prefetch_layers(loss, layers)
            # Ranks would otherwise reduce the gradients of different weights, those of the experts that each has used.
            if reach_noted(loss.base).varies and hasattr(self.model, "set_reduce_scatter_unused_params"):
                self.model.set_reduce_scatter_unused_params(True)
            fill(loss, torch.device("cpu") if isinstance(plugin.cpu_offload, CPUOffloadPolicy) else self.device)
            self.trained = trained_weights(loss.model)
        else:
            if cast and classes:
                plugin.auto_wrap_policy = _units_of_one_dtype(loss, classes, cast)
            plugin.param_init_fn = filler(loss, self.device)  # reads and shards one unit after the other
            self.model = accelerator.prepare(loss)
            self.trained = [(_plain(name), weight) for name, weight in trained_weights(self.model)]
        self.optimizer = build_optimizer(parameter_groups(self.trained, self.shapes, config), config)
        self.sums_groups = self.version == 2 and mesh.sizes.dp_replicate > 1
        # Count before any forward pass: after one without gradients, FSDP leaves the root's weights gathered.
        self.local_numel = sum(local_part(weight).numel() for weight in self.model.parameters())
        self.local_numel -= unsplit_numel(loss, self.tensor)
        shard_ranks = distributed.get_process_group_ranks(self._shard_group())
        self.primary = shard_ranks[0] == 0 if mesh.device_mesh is None else mesh.index("dp_replicate") == 0
        # This rank's span of a weight starts after those of the preceding ranks in its shard group.
        sizes = ranks.gather({name: local_part(weight).numel() for name, weight in self.trained})
        before = shard_ranks[: shard_ranks.index(ranks.rank)]
        self.starts = {
            name: sum(sizes[rank][name] for rank in before)
            for name, numel in sizes[ranks.rank].items()
            if numel < self.shapes[name].numel()
        }

    def _shard_group(self) -> Any:
        """The ranks over which each weight is sharded."""
        if self.version == 1:
            return self.model.process_group
        weight: Any = self.trained[0][1]
        return weight.device_mesh.get_group(weight.device_mesh.ndim - 1)

    def local_and_total_numel(self) -> tuple[int, int, int]:
        """See `Backend`; includes frozen weights."""
        tensor_ranks = self.tensor.size if self.tensor else 1
        return self.local_numel, self.total_numel, tensor_ranks * distributed.get_world_size(self._shard_group())

    def accumulate(self, last: bool) -> AbstractContextManager[Any]:
        """See `Backend`."""
        if self.sums_groups:
            self.model.set_requires_all_reduce(last)
        return nullcontext()

    def reshard(self) -> None:
        """See `Backend`; FSDP 2 leaves the root gathered without a backward pass."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def clip_grad_norm(self, limit: float) -> torch.Tensor:
        """See `Backend`."""
        if self.version == 1:
            return self.model.clip_grad_norm_(limit)
        zero_missing_gradients(self.trained)
        if self.tensor is not None:
            return clip_grad_norm(self.trained, self.tensor.slices, self.tensor.group, limit)
        norm = nn.utils.clip_grad_norm_([weight for _, weight in self.trained], limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _plain(name: str) -> str:
    """Converts a name in the wrapped loss module to the transformers or peft name."""
    return name.replace(_WRAPPER, "").removeprefix("model.")


def _gather_as_cast(accelerator: Any, loss: Any, classes: Sequence[str], cast: set[int]) -> None:
    """Makes FSDP 2 units of the matrices in each layer that autocast casts, which are gathered in the compute dtype.

    Accelerate then makes units of what is left of the layers.

    Args:
        accelerator: has the plugin that says how units are sharded.
        loss: the loss module.
        classes: names of the layers' classes.
        cast: ids of those matrices.
    """
    plugin, mesh = accelerator.state.fsdp_plugin, accelerator.torch_device_mesh
    policy = MixedPrecisionPolicy(loss.compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in reversed([module for module in loss.modules() if type(module).__name__ in classes]):
        parts = [part for part in layer.modules() if not isinstance(part, FSDPModule) and _all_in(part, cast)]
        if parts:
            fully_shard(
                parts,
                mesh=None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
                reshard_after_forward=plugin.reshard_after_forward,
                offload_policy=plugin.cpu_offload,
                mp_policy=policy,
            )


def _units_of_one_dtype(loss: Any, classes: Sequence[str], cast: set[int]) -> CustomPolicy:
    """FSDP 1 wrap policy, whose units are gathered in one dtype each.

    Those of layers are gathered in the compute dtype, and what autocast does not cast in them, such as norms, are units
    of their own.

    Args:
        loss: the loss module.
        classes: names of the classes that become units in any case.
        cast: ids of the weights that autocast casts.
    """
    policy = MixedPrecision(
        loss.compute, reduce_dtype=torch.float32, cast_forward_inputs=False, cast_root_forward_inputs=False
    )
    narrow, wide = set[nn.Module](), set[nn.Module]()
    for unit in [module for module in loss.modules() if type(module).__name__ in classes]:
        parts = [part for part in unit.modules() if any(True for _ in part.parameters(recurse=False))]
        others = [part for part in parts if not _all_in(part, cast)]
        if len(others) < len(parts) and unit not in others:
            narrow.add(unit)
            wide.update(others)
    return CustomPolicy(
        lambda part: {"mixed_precision": policy} if part in narrow else type(part).__name__ in classes or part in wide
    )


def _layers_in_order(loss: Any, classes: Sequence[str]) -> list[nn.Module]:
    """The layers of the text decoder that a text reaches and that become FSDP units, in the order of their use."""
    unreached = set(reach_noted(loss.base).unreached)
    names = {id(part): name for name, part in loss.base.named_modules()}
    layers = [part for part in (decoder_of(loss.base) or loss.base).modules() if type(part).__name__ in classes]
    weights = [{f"{names[id(layer)]}.{name}" for name, _ in layer.named_parameters()} for layer in layers]
    return [layer for layer, own in zip(layers, weights, strict=True) if unreached.isdisjoint(own)]


def prefetch_layers(loss: Any, layers: Sequence[nn.Module]) -> None:
    """Gathers a layer while the one before it computes, in the forward and in the backward pass.

    At most two layers are gathered at once. By itself, FSDP would gather the matrices of a layer, which may be a unit
    of their own, only when its backward pass has begun. A layer's unit asks for its matrices too, which must not ask
    for others: with activation checkpointing they run forward within the backward pass.

    Args:
        loss: the wrapped loss module, the root of all units.
        layers: modules of the loss in the order of their use; empty if the model is one unit.
    """
    units: list[Any] = [[part for part in layer.modules() if isinstance(part, FSDPModule)] for layer in layers]
    units = [own for own in units if own]
    ahead, back = [[loss], *units], [[loss], *reversed(units)]
    for own, following in pairwise(ahead):
        own[0].set_modules_to_forward_prefetch([*own[1:], *following])
    for own, following in pairwise(back):
        own[0].set_modules_to_backward_prefetch([*own[1:], *following])


def _all_in(part: nn.Module, ids: set[int]) -> bool:
    """Whether a module has weights of its own, all of them among those with these ids."""
    own = [id(weight) for weight in part.parameters(recurse=False)]
    return bool(own) and ids.issuperset(own)


def _set_wrap_policy(plugin: Any, loss: Any, version: int) -> list[str]:
    """Sets which layers become FSDP units, and returns their class names.

    Accelerate reads `_no_split_modules` of the module it wraps. A teacher and its layers are units too.
    """
    loss._no_split_modules = _layer_classes(loss)
    by_size = plugin.auto_wrap_policy is size_based_auto_wrap_policy
    wraps = by_size or plugin.auto_wrap_policy is transformer_auto_wrap_policy
    names = plugin.transformer_cls_names_to_wrap or []
    classes = wrapped_classes(loss, version, names, wraps, plugin.min_num_params if by_size else None)
    if by_size:
        plugin.transformer_cls_names_to_wrap = classes
        plugin.auto_wrap_policy = transformer_auto_wrap_policy if classes else None
    if loss.teacher is not None:  # a unit of its own: it is gathered for its forward pass only, and of another dtype
        classes = [*dict.fromkeys([*classes, *_layer_classes(loss.teacher), type(loss.teacher).__name__])]
        plugin.transformer_cls_names_to_wrap = classes
        plugin.auto_wrap_policy = transformer_auto_wrap_policy
    if classes and version == 1 and _mixes_dtypes(loss):
        # FSDP 1 flattens each unit into one tensor of one dtype: keep fp32 adapters apart from the bf16 base.
        kinds = {type(module) for module in loss.modules() if type(module).__name__ in classes}
        plugin.auto_wrap_policy = functools.partial(_layers_and_adapters, classes=tuple(kinds))
    return classes


def _mixes_dtypes(loss: Any) -> bool:
    return len({weight.dtype for weight in loss.model.parameters()}) > 1


def refuse_wrap(loss: Any, fsdp_config: dict[str, Any]) -> None:
    """Raises ConfigError if FSDP cannot wrap a model as an Accelerate file specifies.

    Args:
        loss: the module that computes the loss; its weights may be on the meta device.
        fsdp_config: the `fsdp_config` section of the file.
    """
    policy = fsdp_config["fsdp_auto_wrap_policy"]
    names = fsdp_config.get("fsdp_transformer_layer_cls_to_wrap")
    least = fsdp_config["fsdp_min_num_params"] if policy == "SIZE_BASED_WRAP" else None
    # Split names at commas only, as Accelerate does.
    wrapped_classes(loss, fsdp_config["fsdp_version"], names.split(",") if names else [], policy != "NO_WRAP", least)


def wrapped_classes(loss: Any, version: int, names: Sequence[str], wraps: bool, least: int | None) -> list[str]:
    """Class names whose instances become FSDP units; empty if the whole model is one unit.

    Args:
        loss: the module that computes the loss.
        version: FSDP version, 1 or 2.
        names: `fsdp_transformer_layer_cls_to_wrap`.
        wraps: whether `fsdp_auto_wrap_policy` requests units at all.
        least: `fsdp_min_num_params` under the size-based policy, otherwise None.

    Raises:
        ConfigError: if a class is not in the model, no layer class is known, or FSDP 1 cannot flatten an adapter.
    """
    kind, own = loss.base.config.model_type, _layer_classes(loss)
    if missing := sorted(set(names) - {type(module).__name__ for module in loss.modules()}):
        raise ConfigError(
            f"fsdp_transformer_layer_cls_to_wrap={','.join(missing)} is not a layer class of {kind}; "
            f"its layer classes are {', '.join(own) or 'unknown'}"
        )
    classes = _classes_by_size(loss, own, least) if least is not None else list(names) or own
    if not wraps or (least is not None and not classes):
        return []
    if not classes:
        raise ConfigError(
            f"{kind} names no layer class to wrap, so the whole model would be gathered at once; "
            "set fsdp_transformer_layer_cls_to_wrap in the Accelerate file"
        )
    if version == 1:
        _refuse_odd_adapters(loss)
    return classes


def _layer_classes(loss: Any) -> list[str]:
    """Names of this model's layer classes, according to transformers."""
    present = {type(module).__name__ for module in loss.modules()}
    return [name for name in getattr(loss.base, "_no_split_modules", None) or [] if name in present]


def _classes_by_size(loss: nn.Module, layers: list[str], least: int) -> list[str]:
    """Class names of the smallest blocks in decoder layers (or the layers themselves) with more than `least` weights.

    The libraries' own size-based policies would also wrap lists of layers, which FSDP 2 refuses, and the output head,
    whose weight the loss uses directly.
    """
    blocks = [module for module in loss.modules() if type(module).__name__ in layers]
    large = [part for block in blocks for part in block.modules() if _is_block(part) and _numel(part) > least]
    smallest = [part for part in large if not any(below in large for below in part.modules() if below is not part)]
    return sorted({type(part).__name__ for part in smallest})


def _is_block(part: nn.Module) -> bool:
    """Whether a module is a composite block of transformers, such as attention; excludes generic layers like heads."""
    return type(part).__module__.startswith("transformers") and bool(list(part.children()))


def _numel(part: nn.Module) -> int:
    return sum(weight.numel() for weight in part.parameters())


def _refuse_odd_adapters(loss: Any) -> None:
    """Raises ConfigError for adapters FSDP 1 cannot flatten: on fused experts, or on embeddings of another dtype."""
    mixed = _mixes_dtypes(loss)
    for name, module in loss.named_modules():
        kind = type(module).__name__
        trained = any(weight.requires_grad for weight in module.parameters(recurse=False))
        saved = ".modules_to_save." in name and not name.endswith(f"{SCALAR_HEAD}.modules_to_save.default")
        rows = name.endswith(".trainable_tokens_delta")
        odd = trained and (saved or not isinstance(module, nn.Linear))
        if kind == "ParamWrapper" or (mixed and odd):
            raise ConfigError(
                f"fsdp1 cannot shard the adapter at {_plain(name)} ({kind}); use --strategy fsdp2, or leave that "
                f"module out of {'modules_to_save' if saved else 'new_tokens' if rows else 'lora_target_modules'}"
            )


def _layers_and_adapters(module: nn.Module, recurse: bool, nonwrapped_numel: int, classes: tuple[type, ...]) -> bool:
    """FSDP 1 wrap policy: wraps decoder layers and trained leaf modules."""
    weights = list(module.parameters(recurse=False))
    leaf = not list(module.children()) and bool(weights) and all(weight.requires_grad for weight in weights)
    return recurse or isinstance(module, classes) or leaf
