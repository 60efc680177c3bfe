"""Finds the weights that a forward pass does nothing with but cast them to the compute dtype, once.

A strategy may cast such a weight before it sends it, which halves what is sent and changes no bit: neither of the
result nor of the gradient, which is that of the cast either way.
"""

from __future__ import annotations

import copy
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainers.config.options import TrainConfig
from trainers.model.attention import KERNELS
from trainers.model.reachability import as_fakes, without_log

_TOKENS = 12
_CAST = torch.ops.aten._to_copy.default


class Trace(TorchDispatchMode):
    """Records the operations of a pass, with dtypes and shapes of what they take, and which of them take a weight.

    Args:
        weights: names of the weights by id.
    """

    def __init__(self, weights: dict[int, str]):
        super().__init__()
        self.weights = weights
        self.operations: list[tuple[Any, ...]] = []
        self.uses: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records an operation. A cast of a weight is noted as its use only."""
        options = kwargs or {}
        if func.namespace == "prim":  # asks for a property
            return func(*args, **options)
        leaves = tree_leaves((args, options))
        names = [self.weights[id(leaf)] for leaf in leaves if id(leaf) in self.weights]
        for name in names:
            self.uses[name].append((func, options.get("dtype")))
        if not names or func is not _CAST:
            self.operations.append((func, *(_described(leaf) for leaf in leaves)))
        return func(*args, **options)


def _described(leaf: Any) -> Any:
    return (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else str(leaf)


def only_cast(loss: Any) -> set[str]:
    """Names of the trained weights that text only meets after their cast to the compute dtype, in one place.

    They are taken as fp32 and then as of the compute dtype: apart from the casts, both passes must be the same. None if
    the model cannot be followed without values, as those with experts.

    Args:
        loss: the loss module, with weights on any device; as it was afterwards.
    """
    try:
        with without_log("torch._subclasses.fake_tensor"):
            first = _trace(loss, set())
            names = {name for name, uses in first.uses.items() if uses == [(_CAST, loss.compute)]}
            second = _trace(loss, names)
    except Exception:  # families fail in any way
        logging.getLogger(__name__).debug("what casts weights is unknown without values", exc_info=True)
        return set()
    return names if first.operations == second.operations else set()


def cast_before_gather(config: TrainConfig, loss: Any) -> set[str]:
    """Names of the weights in layers that FSDP and ZeRO 3 gather in the compute dtype; empty if they gather as stored.

    Of adapters, the large weights are frozen and in that dtype already. Compiled layers must be one FSDP unit each.
    Layers that mix tokens without attention run once for each group of a rank's documents: ranks would wait for each
    other, and gradients of several calls would be summed in the compute dtype.

    Args:
        config: the run's config.
        loss: as for `only_cast`.
    """
    plain = loss.tensor is None and not loss.mixers and not config.torch_compile and config.mixed_precision != "fp8"
    plain = plain and config.qat == "none"  # which rounds the fp32 weights
    if config.method != "full" or loss.compute == torch.float32 or not plain:
        return set()
    classes = getattr(loss.base, "_no_split_modules", None) or []
    layers = [part for part in loss.model.modules() if type(part).__name__ in classes]
    inside = {id(weight) for layer in layers for weight in layer.parameters()}
    return {name for name in only_cast(loss) if id(loss.model.get_parameter(name)) in inside}


def _trace(loss: Any, narrow: set[str]) -> Trace:
    """Follows a pass over fakes of a model, whose weights of these names have the compute dtype."""
    with without_values(loss):
        for name in narrow:
            path, _, attribute = name.rpartition(".")
            weight = loss.model.get_parameter(name)
            fake = torch.empty(weight.shape, dtype=loss.compute)
            setattr(loss.model.get_submodule(path), attribute, nn.Parameter(fake, weight.requires_grad))
        trained = [(name, weight) for name, weight in loss.model.named_parameters() if weight.requires_grad]
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
        every = ids.new_zeros(_TOKENS)
        with Trace({id(weight): name for name, weight in trained}) as trace:
            loss(ids, torch.zeros_like(ids), None, every, every)
    return trace


@contextmanager
def without_values(loss: Any) -> Iterator[None]:
    """Lets a model run on the CPU without values: its weights and all new tensors are fakes.

    Args:
        loss: the loss module, with weights on any device; as it was afterwards.
    """
    with _eager(loss.base), _restored(loss.model), FakeTensorMode():
        as_fakes(loss.model)
        yield


@contextmanager
def _eager(base: Any) -> Iterator[None]:
    """Computes attention without kernels, which take no fakes."""
    before = base.config._attn_implementation
    if before in KERNELS.values():
        base.set_attn_implementation(KERNELS["eager"])
    try:
        yield
    finally:
        base.set_attn_implementation(before)


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Gives every module its weights and buffers back."""
    held = [(part, copy.copy(part._parameters), copy.copy(part._buffers)) for part in model.modules()]
    try:
        yield
    finally:
        for part, weights, buffers in held:
            part._parameters.update(weights)
            part._buffers.update(buffers)
