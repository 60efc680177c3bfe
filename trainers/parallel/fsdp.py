"""FSDP 1 and 2 (and HSDP): weights, gradients and optimizer state sharded over the ranks.

No mixed-precision policy is given to them: parameters and reductions are fp32, and the compute dtype is autocast's,
as under every other strategy. Gradients are reduced at every micro-batch, so that they stay sharded too.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.parallel.backend import Backend, total_numel, trained_weights
from trainers.parallel.norm import clip_grad_norm
from trainers.parallel.optimizer import build_optimizer, parameter_groups
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import local_part
from trainers.run.errors import TrainingError
from trainers.strategy.mesh import Mesh

_WRAPPER = "_fsdp_wrapped_module."  # FSDP 1 puts it into names


class FullySharded(Backend):
    """`fsdp1`, `fsdp2`, `hsdp` and their kin.

    Args:
        loss: the module that computes the loss; its `.model` is the transformers or peft model.
        accelerator: wraps it as its Accelerate file says.
        ranks: all processes of the run.
        mesh: of all of them.

    Raises:
        ConfigError: when FSDP cannot wrap the model so; see `wrapped_classes`.
        TrainingError: when a weight is not what was loaded (RAM-efficient loading sends it over the wire).
    """

    def __init__(self, loss: Any, config: TrainConfig, accelerator: Any, ranks: Ranks, mesh: Mesh):
        self.device = ranks.device
        plugin = accelerator.state.fsdp_plugin
        self.version = 2 if accelerator.is_fsdp2 else 1
        self.shapes = {name: weight.shape for name, weight in trained_weights(loss.model)}
        self.tensor = getattr(loss, "tensor", None)
        _set_wrap_policy(plugin, loss, self.version)
        self.total_numel = total_numel(loss.model, self.tensor)
        digests = _digests(loss.model.named_parameters()) if plugin.cpu_ram_efficient_loading and ranks.is_main else {}
        if self.version == 2:
            optimizer = build_optimizer(parameter_groups(trained_weights(loss.model), self.shapes, config), config)
            self.model, wrapped = accelerator.prepare(loss, optimizer)
            self.optimizer = wrapped.optimizer
            self.trained = trained_weights(loss.model)
        else:
            self.model = accelerator.prepare(loss)
            self.trained = [(_plain(name), weight) for name, weight in trained_weights(self.model)]
            self.optimizer = build_optimizer(parameter_groups(self.trained, self.shapes, config), config)
        if plugin.cpu_ram_efficient_loading:
            _verify(self.model, digests, ranks)
        # Counted before any forward pass: after one without gradients FSDP leaves the root's weights gathered.
        self.local_numel = sum(local_part(weight).numel() for weight in self.model.parameters())
        shard_ranks = distributed.get_process_group_ranks(self._shard_group())
        self.primary = shard_ranks[0] == 0 if mesh.device_mesh is None else mesh.index("dp_replicate") == 0
        # The sizes on the ranks before this one, added up, say where its span of a weight starts.
        sizes = ranks.gather({name: local_part(weight).numel() for name, weight in self.trained})
        before = shard_ranks[: shard_ranks.index(ranks.rank)]
        self.starts = {
            name: sum(sizes[rank][name] for rank in before)
            for name, numel in sizes[ranks.rank].items()
            if numel < self.shapes[name].numel()
        }

    def _shard_group(self) -> Any:
        """The ranks that together hold one full weight."""
        if self.version == 1:
            return self.model.process_group
        weight: Any = self.trained[0][1]
        return weight.device_mesh.get_group(weight.device_mesh.ndim - 1)

    def local_and_total_numel(self) -> tuple[int, int, int]:
        """See `Backend`; frozen weights too."""
        tensor_ranks = self.tensor.size if self.tensor else 1
        return self.local_numel, self.total_numel, tensor_ranks * distributed.get_world_size(self._shard_group())

    def clip_grad_norm(self, limit: float) -> torch.Tensor:
        """See `Backend`."""
        if self.version == 1:
            return self.model.clip_grad_norm_(limit)
        if self.tensor is not None:
            return clip_grad_norm(self.trained, self.tensor.slices, self.tensor.group, limit)
        norm = nn.utils.clip_grad_norm_([weight for _, weight in self.trained], limit)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _plain(name: str) -> str:
    """The name that transformers or peft gave a weight, from the one in the wrapped loss module."""
    return name.replace(_WRAPPER, "").removeprefix("model.")


def _set_wrap_policy(plugin: Any, loss: Any, version: int) -> None:
    """Tells Accelerate which layers are units: it looks for the names on the module that it is given."""
    loss._no_split_modules = _layer_classes(loss)
    by_size = plugin.auto_wrap_policy is size_based_auto_wrap_policy
    wraps = by_size or plugin.auto_wrap_policy is transformer_auto_wrap_policy
    names = plugin.transformer_cls_names_to_wrap or []
    classes = wrapped_classes(loss, version, names, wraps, plugin.min_num_params if by_size else None)
    if by_size:
        plugin.transformer_cls_names_to_wrap = classes
        plugin.auto_wrap_policy = transformer_auto_wrap_policy if classes else None
    if classes and version == 1 and len({weight.dtype for weight in loss.parameters()}) > 1:
        # FSDP 1 flattens a unit into one tensor of one dtype: fp32 adapters apart from the bf16 base.
        kinds = {type(module) for module in loss.modules() if type(module).__name__ in classes}
        plugin.auto_wrap_policy = functools.partial(_layers_and_adapters, classes=tuple(kinds))


def refuse_wrap(loss: Any, fsdp_config: dict[str, Any]) -> None:
    """Raises ConfigError when FSDP cannot wrap a model as an Accelerate file says.

    Args:
        loss: the module that computes the loss; its weights may be on the meta device.
        fsdp_config: of that file.
    """
    policy = fsdp_config["fsdp_auto_wrap_policy"]
    names = fsdp_config.get("fsdp_transformer_layer_cls_to_wrap")
    least = fsdp_config["fsdp_min_num_params"] if policy == "SIZE_BASED_WRAP" else None
    # Accelerate splits the names so.
    wrapped_classes(loss, fsdp_config["fsdp_version"], names.split(",") if names else [], policy != "NO_WRAP", least)


def wrapped_classes(loss: Any, version: int, names: Sequence[str], wraps: bool, least: int | None) -> list[str]:
    """The classes of which each instance is a unit of FSDP; empty for one unit of all.

    Args:
        version: of FSDP.
        names: `fsdp_transformer_layer_cls_to_wrap`.
        wraps: whether `fsdp_auto_wrap_policy` asks for units at all.
        least: `fsdp_min_num_params`, where that decides.

    Raises:
        ConfigError: when a class is not in the model, none is known, or FSDP 1 cannot flatten an adapter.
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
    """The classes that transformers takes for the layers of this model."""
    present = {type(module).__name__ for module in loss.modules()}
    return [name for name in getattr(loss.base, "_no_split_modules", None) or [] if name in present]


def _classes_by_size(loss: nn.Module, layers: list[str], least: int) -> list[str]:
    """The smallest parts of decoder layers with more weights than `least`, by class; the layers where none is smaller.

    The libraries' own policies by size cut lists of layers, which FSDP 2 refuses, and the output head, whose weight
    the loss uses from outside.
    """
    blocks = [module for module in loss.modules() if type(module).__name__ in layers]
    large = [part for block in blocks for part in block.modules() if _is_block(part) and _numel(part) > least]
    smallest = [part for part in large if not any(below in large for below in part.modules() if below is not part)]
    return sorted({type(part).__name__ for part in smallest})


def _is_block(part: nn.Module) -> bool:
    """Written for the architecture, such as its attention; no plain layer, which the output head may be too."""
    return type(part).__module__.startswith("transformers") and bool(list(part.children()))


def _numel(part: nn.Module) -> int:
    return sum(weight.numel() for weight in part.parameters())


def _refuse_odd_adapters(loss: nn.Module) -> None:
    """Adapters that FSDP 1 cannot flatten: on fused experts, and, in a dtype of their own, on embeddings."""
    mixed = len({weight.dtype for weight in loss.parameters()}) > 1
    for name, module in loss.named_modules():
        kind = type(module).__name__
        trained = any(weight.requires_grad for weight in module.parameters(recurse=False))
        odd = trained and not isinstance(module, nn.Linear)
        if kind == "ParamWrapper" or (mixed and odd):
            raise ConfigError(
                f"fsdp1 cannot shard the adapter at {_plain(name)} ({kind}); use --strategy fsdp2, or leave that "
                "module out of lora_target_modules"
            )


def _layers_and_adapters(module: nn.Module, recurse: bool, nonwrapped_numel: int, classes: tuple[type, ...]) -> bool:
    """A wrap policy of FSDP 1: decoder layers, and each trained leaf."""
    weights = list(module.parameters(recurse=False))
    leaf = not list(module.children()) and bool(weights) and all(weight.requires_grad for weight in weights)
    return recurse or isinstance(module, classes) or leaf


def _digests(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """sha256 of the bytes of each weight."""
    return {
        name: hashlib.sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, weight in weights
    }


def _full_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight put together again on every rank, a unit at a time. Collective."""
    if not isinstance(model, FullyShardedDataParallel):
        for name, weight in model.named_parameters():
            yield _plain(name), weight.full_tensor() if isinstance(weight, DTensor) else weight
        return
    for prefix, unit in model.named_modules():
        if isinstance(unit, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                for name, weight in unit.named_parameters():
                    if _WRAPPER not in name.removeprefix(_WRAPPER):  # not a unit of its own
                        yield _plain(f"{prefix}.{name}" if prefix else name), weight


def _verify(model: nn.Module, expected: dict[str, str], ranks: Ranks) -> None:
    """Compares the weights that every rank now shares with those that rank 0 loaded, bit for bit."""
    got = {name: digest for name, digest in _digests(_full_weights(model)).items() if ranks.is_main}
    wrong = sorted(name for name in expected if got.get(name) != expected[name])
    problem = TrainingError(f"{len(wrong)} weights differ from the file, such as {wrong[0]}") if wrong else None
    ranks.agree(problem, "RAM-efficient loading")
    if ranks.is_main:
        print(f"RAM-efficient loading: {len(expected)} weights are as rank 0 read them, bit for bit", flush=True)
