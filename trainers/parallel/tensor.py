"""Tensor parallelism: the linear layers of each block, the embedding and the head cut across ranks.

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

from trainers.config.options import ConfigError
from trainers.objectives.sft import SupervisedLoss
from trainers.parallel.shards import Cut
from trainers.parallel.tensor_loss import vocabulary_cross_entropy
from trainers.strategy.tensor_plan import BY_HEADS, GATHERED, layer_plan, refusals

_COLUMN = {"colwise", "colwise_gather_output"}
_ROW = {"rowwise", "rowwise_split_input"}


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among those that share each layer.

    Args:
        group: their process group.
        rank: index in it.
        size: of it.
        first: False where other ranks hold the same parts, and a checkpoint takes theirs.
        cuts: what this rank holds of each weight that is cut, by the name that transformers or peft gives it.
    """

    group: Any
    rank: int
    size: int
    first: bool = True
    cuts: dict[str, Cut] = field(default_factory=dict)


class _Copy(torch.autograd.Function):
    """Into a part that each rank computes for itself: what the ranks' gradients add up to is the gradient."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return whole.view_as(whole)

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


class _Gather(torch.autograd.Function):
    """All ranks' parts side by side in the last dimension; `_Split` is the way back, and its gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, place: TensorParallel) -> torch.Tensor:
        ctx.place = place
        return _side_by_side(part, place)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return _own_part(upstream[0], ctx.place), None


class _Split(torch.autograd.Function):
    """This rank's part of the last dimension."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, place: TensorParallel) -> torch.Tensor:
        ctx.place = place
        return _own_part(whole, place)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return _side_by_side(upstream[0], ctx.place), None


def _summed(part: torch.Tensor, group: Any) -> torch.Tensor:
    # A tensor of its own: activation checkpointing may keep the other one.
    total = part.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total


def _side_by_side(part: torch.Tensor, place: TensorParallel) -> torch.Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(place.size)]
    distributed.all_gather(parts, part, group=place.group)
    return torch.cat(parts, -1)


def _own_part(whole: torch.Tensor, place: TensorParallel) -> torch.Tensor:
    return whole.chunk(place.size, -1)[place.rank].contiguous()


class ColumnParallel(nn.Linear):
    """A linear layer with some of its outputs. `in_features` and `out_features` are those of the whole layer.

    Its input comes through `_Copy` where the block begins, once for all layers that read it.
    """

    place: TensorParallel
    gathers: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features]` to `[..., out_features / size]`, or to all of them with `gathers`."""
        output = functional.linear(input, self.weight, self.bias)
        return _Gather.apply(output, self.place) if self.gathers else output


class RowParallel(nn.Linear):
    """A linear layer with some of its inputs; its bias is whole. Features as in `ColumnParallel`."""

    place: TensorParallel
    splits: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features / size]`, or all of them with `splits`, to `[..., out_features]`, whole on each rank."""
        part = _Split.apply(input, self.place) if self.splits else input
        output = _Reduce.apply(functional.linear(part, self.weight), self.place.group)
        return output if self.bias is None else output + self.bias


class _VocabularyParallel:
    """An embedding with some of the words; scales of its class stay, since they are linear."""

    place: TensorParallel
    start: int

    def forward(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
        """`[batch, sequence]` to `[batch, sequence, hidden size]`."""
        here = input_ids - self.start
        absent = (here < 0) | (here >= self.weight.shape[0])
        found = super().forward(here.masked_fill(absent, 0))  # type: ignore[misc]
        return _Reduce.apply(found.masked_fill(absent[..., None], 0.0), self.place.group)


class _PartialGradient:
    """A module whose weights are whole while each rank uses them on its own heads: their gradients are added up.

    In the forward pass and not by a hook on the weight, which would not outlive FSDP's exchange of weights.
    """

    place: TensorParallel

    def forward(self: Any, *inputs: Any, **rest: Any) -> Any:
        """As the class that this is mixed into."""
        weights = dict(self._parameters)
        copies = {name: one if one is None else _Copy.apply(one, self.place.group) for name, one in weights.items()}
        self._parameters.update(copies)
        try:
            return super().forward(*inputs, **rest)  # type: ignore[misc]
        finally:
            self._parameters.update(weights)


class CutHead(nn.Linear):
    """An output head with some of the words, whose weights the loss takes."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Refused: nothing here needs whole logits."""
        raise NotImplementedError("the output head is cut by tensor parallelism; call the loss module instead")


@lru_cache
def _mixed(mixin: Any, kind: Any) -> Any:
    """The class with a mixin before it, under its own name, by which others know it."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


class _Cutter:
    """Cuts one model in place, and keeps book of it by weight."""

    def __init__(self, kind: str, place: TensorParallel):
        self.kind, self.place, self.boxes = kind, place, dict[int, Cut]()

    def refusal(self, what: str, way: str = "use tp_size=1, with fsdp2 for instance") -> ConfigError:
        """What cannot be cut, and the way out."""
        return ConfigError(f"tp_size={self.place.size}: {self.kind} {what}; {way}")

    def block(self, name: str, parent: nn.Module, words: dict[str, str]) -> None:
        """The layers of an attention or MLP module, between which each rank computes its own part.

        Args:
            words: of the plan, by the name of the child.
        """
        used = set(words.values())
        alike = used <= GATHERED
        if not (alike or used <= BY_HEADS) or not used & _COLUMN or not used & _ROW:
            raise self.refusal(f"has a plan for {name} ({', '.join(sorted(used))}) that is not supported")
        for child, module in parent.named_children():
            linear = any(isinstance(part, nn.Linear) for part in module.modules())
            if child not in words and any(True for _ in module.parameters()) and (linear or not alike):
                raise self.refusal(f"has weights at {name}.{child} which its plan leaves out")
        if parent._parameters:
            raise self.refusal(f"has weights at {name} which its plan leaves out")
        for child, word in words.items():
            if word in _COLUMN | _ROW:
                self.linear(f"{name}.{child}", parent.get_submodule(child), word)
            else:
                self.share(parent.get_submodule(child))
        parent.register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if inputs:
            return (_Copy.apply(inputs[0], self.place.group), *inputs[1:]), named
        return inputs, {**named, "hidden_states": _Copy.apply(named["hidden_states"], self.place.group)}

    def linear(self, name: str, layer: Any, word: str) -> None:
        """A linear layer, and the adapter on it."""
        adapted = hasattr(layer, "base_layer")
        base = layer.base_layer if adapted else layer
        if type(base) is not nn.Linear:
            raise self.refusal(
                f"has a {type(base).__name__} at {name}, which tensor parallelism does not cut",
                "use method=full or lora without quantisation or fp8, or tp_size=1",
            )
        cut = self.column if word in _COLUMN else self.row
        cut(name, base, word in GATHERED)
        if not adapted:
            return
        if type(layer).__name__ != "Linear" or layer.lora_variant:
            raise self.refusal(f"has an adapter of a kind that cannot be cut at {name}")
        for key in layer.lora_A:
            if word in _COLUMN:
                self.share(layer.lora_A[key])
                self.column(name, layer.lora_B[key], word in GATHERED)
            else:
                self.row(name, layer.lora_A[key], word in GATHERED)

    def column(self, name: str, layer: Any, gathers: bool) -> None:
        """Keeps this rank's share of the outputs."""
        part = self._even(name, layer.weight.shape[0])
        for weight in (layer.weight, layer.bias):
            self.keep(weight, 0, part)
        layer.__class__, layer.place, layer.gathers = ColumnParallel, self.place, gathers

    def row(self, name: str, layer: Any, splits: bool) -> None:
        """Keeps this rank's share of the inputs."""
        self.keep(layer.weight, 1, self._even(name, layer.weight.shape[1]))
        layer.__class__, layer.place, layer.splits = RowParallel, self.place, splits

    def share(self, module: Any) -> None:
        """Keeps the weights whole, and adds their gradients up."""
        kind: Any = type(module)
        module.__class__, module.place = _mixed(_PartialGradient, kind), self.place

    def vocabulary(self, embedding: Any, head: Any) -> Cut:
        """Embedding and head, by words; shares may differ by one. Tied, they stay one weight.

        Returns:
            What this rank has of the head.
        """
        kind: Any = type(embedding)
        if not issubclass(kind, nn.Embedding):
            raise self.refusal(
                "has an adapter on its embedding, which tensor parallelism does not cut",
                "leave it out of lora_target_modules",
            )
        place, words = self.place, embedding.weight.shape[0]
        part = slice(words * place.rank // place.size, words * (place.rank + 1) // place.size)
        if head.weight.shape[0] != words:
            raise self.refusal(f"has {words} words in its embedding and {head.weight.shape[0]} in its head")
        tied = head.weight is embedding.weight
        for weight in (embedding.weight, None if tied else head.weight, head.bias):
            self.keep(weight, 0, part)
        padding = embedding.padding_idx
        inside = padding is not None and part.start <= padding < part.stop
        embedding.padding_idx = padding - part.start if inside else None  # its gradient is none
        embedding.__class__ = _mixed(_VocabularyParallel, kind)
        embedding.place, embedding.start, head.__class__ = place, part.start, CutHead
        return self.boxes[id(head.weight)]

    def keep(self, weight: nn.Parameter | None, dim: int, part: slice) -> None:
        """Leaves a part of one dimension of a weight; the parameter stays the one that others know."""
        if weight is None:
            return
        box = tuple(part if axis == dim else slice(0, size) for axis, size in enumerate(weight.shape))
        self.boxes[id(weight)] = Cut(weight.shape, box)
        weight.data = weight.data[box].clone(memory_format=torch.contiguous_format)

    def _even(self, name: str, size: int) -> slice:
        if size % self.place.size:
            raise self.refusal(f"has {size} rows or columns at {name}, which do not divide")
        share = size // self.place.size
        return slice(share * self.place.rank, share * (self.place.rank + 1))


def cut(loss: SupervisedLoss, group: Any, rank: int, size: int, first: bool | None = None) -> dict[str, Cut]:
    """Leaves this rank's part of each layer in a whole model, in place, before anything wraps it.

    Args:
        loss: on any device, its model whole and alike on every rank: read, adapted, and filled from a checkpoint.
        group: process group of the ranks that share each layer.
        rank: index in it.
        size: of it; 1 changes nothing.
        first: see `TensorParallel`; None: the group that has the run's first rank.

    Returns:
        What this rank holds of each weight that is cut, by its name in `loss.model.named_parameters()`.
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
    place = TensorParallel(group, rank, size, first)
    cutter = _Cutter(text.model_type, place)
    head = loss.base.get_output_embeddings()
    if not loss.chunked:
        adapted = hasattr(head, "base_layer")
        raise cutter.refusal(
            "has an adapter on its output head, which tensor parallelism does not cut"
            if adapted
            else "computes its logits in a way of its own, which tensor parallelism does not cut",
            "leave it out of lora_target_modules" if adapted else "use tp_size=1, with fsdp2 for instance",
        )
    plan, blocks = layer_plan(text), dict[str, dict[str, str]]()
    decoder = loss.base.get_decoder()
    for name, _ in decoder.named_modules():
        if word := plan.get(re.sub(r"\.\d+\.", ".*.", name)):
            parent, _, child = name.rpartition(".")
            blocks.setdefault(parent, {})[child] = word
    if not blocks:
        raise cutter.refusal("has no layer that its plan names")
    for name, words in blocks.items():
        cutter.block(name, decoder.get_submodule(name), words)
    rows = cutter.vocabulary(loss.base.get_input_embeddings(), head)
    named = ((name, id(weight)) for name, weight in loss.model.named_parameters())
    place.cuts.update({name: cutter.boxes[one] for name, one in named if one in cutter.boxes})
    loss.tensor = place
    mine = {"group": group, "start": rows.box[0].start, "words": rows.shape[0]}
    loss.cross_entropy = partial(vocabulary_cross_entropy, **mine)
    return place.cuts
