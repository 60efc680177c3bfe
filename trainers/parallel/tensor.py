"""Tensor parallelism: the linear layers of each block, the embedding and the head split over ranks.

Each rank keeps plain, smaller weights and computes its own heads, channels and words; where their results meet, the
ranks add or collect them. What wraps the model afterwards (DDP, FSDP 2) sees nothing unusual. Everything that every
rank holds (norms, the residual stream) has the same bits on all of them, in both directions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

from trainers.config.mistakes import ConfigError
from trainers.objectives.sft import SupervisedLoss
from trainers.parallel.shards import TensorSlice
from trainers.parallel.tensor_loss import vocabulary_cross_entropy
from trainers.strategy.tensor_plan import BY_HEADS, GATHERED, layer_plan, refusals

_COLUMN = {"colwise", "colwise_gather_output"}
_ROW = {"rowwise", "rowwise_split_input"}


@dataclass(frozen=True)
class TensorParallel:
    """The ranks that share each layer, and this one among them.

    Args:
        group: their process group.
        rank: index in it.
        size: of it.
        first: False where other ranks hold the same parts, and a checkpoint takes theirs.
        slices: what this rank holds of each weight that is split, by the name that transformers or peft gives it.
    """

    group: Any
    rank: int
    size: int
    first: bool = True
    slices: dict[str, TensorSlice] = field(default_factory=dict)


class _Copy(torch.autograd.Function):
    """Into a part that each rank computes for itself: what the ranks' gradients add up to is the gradient."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return _summed(upstream[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    """Out of it again: the sum of what each rank computed. Its gradient is the same for every summand."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        return _summed(part, group)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return upstream[0], None


class _GatherOutputs(torch.autograd.Function):
    """All ranks' parts side by side in the last dimension; `_SplitInputs` is the way back, and its gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return _side_by_side(part, tp)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return _own_part(upstream[0], ctx.tp), None


class _SplitInputs(torch.autograd.Function):
    """This rank's part of the last dimension."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return _own_part(full, tp)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return _side_by_side(upstream[0], ctx.tp), None


def _summed(part: torch.Tensor, group: Any) -> torch.Tensor:
    # A tensor of its own: activation checkpointing may keep the other one.
    total = part.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total


def _side_by_side(part: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(tp.size)]
    distributed.all_gather(parts, part, group=tp.group)
    return torch.cat(parts, -1)


def _own_part(full: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    return full.chunk(tp.size, -1)[tp.rank].contiguous()


class ColumnParallel(nn.Linear):
    """A linear layer with some of its outputs. `in_features` and `out_features` are those of the full layer.

    Its input comes through `_Copy` where the block begins, once for all layers that read it.
    """

    tp: TensorParallel
    gathers: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features / size]`, or to all of them with `gathers`."""
        output = functional.linear(input, self.weight, self.bias)
        return _GatherOutputs.apply(output, self.tp) if self.gathers else output


class RowParallel(nn.Linear):
    """A linear layer with some of its inputs; its bias is full. Features as in `ColumnParallel`."""

    tp: TensorParallel
    splits: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features / size]`, or all of them with `splits`, to `[..., out_features]`, alike on each rank."""
        part = _SplitInputs.apply(input, self.tp) if self.splits else input
        output = _Reduce.apply(functional.linear(part, self.weight), self.tp.group)
        return output if self.bias is None else output + self.bias


class _VocabularyParallel:
    """An embedding with some of the words; scales of its class stay, since they are linear."""

    tp: TensorParallel
    start: int

    def forward(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
        """`[batch, sequence]` to `[batch, sequence, hidden size]`."""
        local_ids = input_ids - self.start
        absent = (local_ids < 0) | (local_ids >= self.weight.shape[0])
        embedded = super().forward(local_ids.masked_fill(absent, 0))  # type: ignore[misc]
        return _Reduce.apply(embedded.masked_fill(absent[..., None], 0.0), self.tp.group)


class _PartialGradient:
    """A module whose weights every rank has in full while it uses them on its own heads: their gradients are added up.

    In the forward pass and not by a hook on the weight, which would not outlive FSDP's exchange of weights.
    """

    tp: TensorParallel

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        """As the class that this is mixed into."""
        weights = dict(self._parameters)
        copies = {
            name: weight if weight is None else _Copy.apply(weight, self.tp.group) for name, weight in weights.items()
        }
        self._parameters.update(copies)
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[misc]
        finally:
            self._parameters.update(weights)


class ShardedHead(nn.Linear):
    """An output head with some of the words, whose weights the loss takes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Refused: nothing here needs full logits."""
        raise NotImplementedError("the output head is split by tensor parallelism; call the loss module instead")


@lru_cache
def _mixed(mixin: Any, kind: Any) -> Any:
    """The class with a mixin before it, under its own name, by which others know it."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


class _Splitter:
    """Splits one model in place, and keeps book of it by weight."""

    def __init__(self, kind: str, tp: TensorParallel):
        self.kind, self.tp, self.slices = kind, tp, dict[int, TensorSlice]()

    def refusal(self, problem: str, remedy: str = "use tp_size=1, with fsdp2 for instance") -> ConfigError:
        """What cannot be split, and the way out."""
        return ConfigError(f"tp_size={self.tp.size}: {self.kind} {problem}; {remedy}")

    def block(self, name: str, parent: nn.Module, styles: dict[str, str]) -> None:
        """The layers of an attention or MLP module, between which each rank computes its own part.

        Args:
            styles: of the plan, such as `colwise`, by the name of the child.
        """
        used = set(styles.values())
        alike = used <= GATHERED
        if not (alike or used <= BY_HEADS) or not used & _COLUMN or not used & _ROW:
            raise self.refusal(f"has a plan for {name} ({', '.join(sorted(used))}) that is not supported")
        for child, module in parent.named_children():
            linear = any(isinstance(part, nn.Linear) for part in module.modules())
            if child not in styles and any(True for _ in module.parameters()) and (linear or not alike):
                raise self.refusal(f"has weights at {name}.{child} which its plan leaves out")
        if parent._parameters:
            raise self.refusal(f"has weights at {name} which its plan leaves out")
        for child, style in styles.items():
            if style in _COLUMN | _ROW:
                self.linear(f"{name}.{child}", parent.get_submodule(child), style)
            else:
                self.share(parent.get_submodule(child))
        parent.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inputs:
            return (_Copy.apply(inputs[0], self.tp.group), *inputs[1:]), kwargs
        return inputs, {**kwargs, "hidden_states": _Copy.apply(kwargs["hidden_states"], self.tp.group)}

    def linear(self, name: str, layer: Any, style: str) -> None:
        """A linear layer, and the adapter on it."""
        adapted = hasattr(layer, "base_layer")
        base = layer.base_layer if adapted else layer
        if type(base) is not nn.Linear:
            raise self.refusal(
                f"has a {type(base).__name__} at {name}, which tensor parallelism does not split",
                "use method=full or lora without quantization or fp8, or tp_size=1",
            )
        split = self.column if style in _COLUMN else self.row
        split(name, base, style in GATHERED)
        if not adapted:
            return
        if type(layer).__name__ != "Linear" or layer.lora_variant:
            raise self.refusal(f"has an adapter of a kind that cannot be split at {name}")
        for key in layer.lora_A:
            if style in _COLUMN:
                self.share(layer.lora_A[key])
                self.column(name, layer.lora_B[key], style in GATHERED)
            else:
                self.row(name, layer.lora_A[key], style in GATHERED)

    def column(self, name: str, layer: Any, gathers: bool) -> None:
        """Keeps this rank's share of the outputs."""
        part = self._even(name, layer.weight.shape[0])
        for weight in (layer.weight, layer.bias):
            self.keep(weight, 0, part)
        layer.__class__, layer.tp, layer.gathers = ColumnParallel, self.tp, gathers

    def row(self, name: str, layer: Any, splits: bool) -> None:
        """Keeps this rank's share of the inputs."""
        self.keep(layer.weight, 1, self._even(name, layer.weight.shape[1]))
        layer.__class__, layer.tp, layer.splits = RowParallel, self.tp, splits

    def share(self, module: Any) -> None:
        """Keeps the full weights, and adds their gradients up."""
        kind: Any = type(module)
        module.__class__, module.tp = _mixed(_PartialGradient, kind), self.tp

    def vocabulary(self, embedding: Any, head: Any) -> TensorSlice:
        """Embedding and head, by words; shares may differ by one. Tied, they stay one weight.

        Returns:
            What this rank has of the head.
        """
        kind: Any = type(embedding)
        if not issubclass(kind, nn.Embedding):
            raise self.refusal(
                "has an adapter on its embedding, which tensor parallelism does not split",
                "leave it out of lora_target_modules",
            )
        tp, vocab_size = self.tp, embedding.weight.shape[0]
        part = slice(vocab_size * tp.rank // tp.size, vocab_size * (tp.rank + 1) // tp.size)
        if head.weight.shape[0] != vocab_size:
            raise self.refusal(f"has {vocab_size} tokens in its embedding and {head.weight.shape[0]} in its head")
        tied = head.weight is embedding.weight
        for weight in (embedding.weight, None if tied else head.weight, head.bias):
            self.keep(weight, 0, part)
        padding = embedding.padding_idx
        inside = padding is not None and part.start <= padding < part.stop
        embedding.padding_idx = padding - part.start if inside else None  # its gradient is none
        embedding.__class__ = _mixed(_VocabularyParallel, kind)
        embedding.tp, embedding.start, head.__class__ = tp, part.start, ShardedHead
        return self.slices[id(head.weight)]

    def keep(self, weight: nn.Parameter | None, dim: int, part: slice) -> None:
        """Leaves a part of one dimension of a weight; the parameter stays the one that others know."""
        if weight is None:
            return
        slices = tuple(part if axis == dim else slice(0, size) for axis, size in enumerate(weight.shape))
        self.slices[id(weight)] = TensorSlice(weight.shape, slices)
        weight.data = weight.data[slices].clone(memory_format=torch.contiguous_format)

    def _even(self, name: str, size: int) -> slice:
        if size % self.tp.size:
            raise self.refusal(f"has {size} rows or columns at {name}, which do not divide")
        share = size // self.tp.size
        return slice(share * self.tp.rank, share * (self.tp.rank + 1))


def split_model(
    loss: SupervisedLoss, group: Any, rank: int, size: int, first: bool | None = None
) -> dict[str, TensorSlice]:
    """Leaves this rank's part of each layer in a full model, in place, before anything wraps it.

    Args:
        loss: on any device, its model full and alike on every rank: read, adapted, and filled from a checkpoint.
        group: process group of the ranks that share each layer.
        rank: index in it.
        size: of it; 1 changes nothing.
        first: see `TensorParallel`; None: the group that has the run's first rank.

    Returns:
        What this rank holds of each weight that is split, by its name in `loss.model.named_parameters()`.
        `loss.tensor` keeps it too.

    Raises:
        ConfigError: when the model has no plan that is known here, or its sizes do not divide. The model must not
            be used then.
    """
    if size == 1:
        return {}
    text = loss.base.config.get_text_config()
    if mistakes := refusals(text, size):
        raise ConfigError(mistakes)
    if first is None:
        first = 0 in distributed.get_process_group_ranks(group)
    tp = TensorParallel(group, rank, size, first)
    splitter = _Splitter(text.model_type, tp)
    head = loss.base.get_output_embeddings()
    if not loss.chunked:
        adapted = hasattr(head, "base_layer")
        raise splitter.refusal(
            "has an adapter on its output head, which tensor parallelism does not split"
            if adapted
            else "computes its logits in its own way, which tensor parallelism does not split",
            "leave it out of lora_target_modules" if adapted else "use tp_size=1, with fsdp2 for instance",
        )
    plan, blocks = layer_plan(text), dict[str, dict[str, str]]()
    decoder = loss.base.get_decoder()
    for name, _ in decoder.named_modules():
        if style := plan.get(re.sub(r"\.\d+\.", ".*.", name)):
            parent, _, child = name.rpartition(".")
            blocks.setdefault(parent, {})[child] = style
    if not blocks:
        raise splitter.refusal("has no layer that its plan names")
    for name, styles in blocks.items():
        splitter.block(name, decoder.get_submodule(name), styles)
    rows = splitter.vocabulary(loss.base.get_input_embeddings(), head)
    weights = loss.model.named_parameters()
    tp.slices.update({name: splitter.slices[id(weight)] for name, weight in weights if id(weight) in splitter.slices})
    loss.tensor = tp
    loss.cross_entropy = partial(
        vocabulary_cross_entropy, group=group, start=rows.slices[0].start, vocab_size=rows.shape[0]
    )
    return tp.slices
