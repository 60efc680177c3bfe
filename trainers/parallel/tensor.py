"""Tensor parallelism: splits the linear layers of each block, the embedding and the head over ranks.

After Megatron-LM (https://arxiv.org/abs/1909.08053). Each rank holds smaller plain weights and computes its own heads,
channels and vocabulary range; ranks sum or gather the results. Between blocks each rank has its share of the tokens
(`tensor_sequence.py`), or, where a model's layers do not allow that, all of them. Wrappers applied afterwards (DDP,
FSDP 2) need no changes. Replicated weights (norms) are bit-identical on all ranks, as are their gradients.
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
from trainers.objectives.log_probs import VocabularyShard
from trainers.objectives.loss_module import LossModule
from trainers.objectives.output_head import decoder_of
from trainers.parallel.pipeline_split import final_norm
from trainers.parallel.shards import TensorSlice
from trainers.parallel.tensor_loss import vocabulary_cross_entropy
from trainers.parallel.tensor_sequence import TokenShards, norms_between
from trainers.strategy.tensor_plan import BY_HEADS, GATHERED, layer_plan, refusals

_COLUMN = {"colwise", "colwise_gather_output"}
_ROW = {"rowwise", "rowwise_split_input"}


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel or expert-parallel group of this rank, and its slices of the model.

    Args:
        group: process group of the ranks that share each layer, or the experts of each layer.
        rank: index of this rank in the group.
        size: size of the group.
        first: False if other ranks hold the same slices and save them.
        slices: this rank's slice of each split weight, by its transformers or peft name.
        by_expert: whether only stacks of experts are split, between experts; each rank then has other tokens.
        copies: with `by_expert`, the process group of the ranks that hold the same experts.
        shards: how the ranks divide the tokens between blocks; None if each has all of them.
    """

    group: Any
    rank: int
    size: int
    first: bool = True
    slices: dict[str, TensorSlice] = field(default_factory=dict)
    by_expert: bool = False
    copies: Any = None
    shards: TokenShards | None = None


class _Copy(torch.autograd.Function):
    """Enters a tensor-parallel region: identity forward, all-reduce backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return _summed(upstream[0], ctx.group), None


class _Reduce(torch.autograd.Function):
    """Leaves a tensor-parallel region: all-reduce forward, identity backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        return _summed(part, group)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return upstream[0], None


class _GatherOutputs(torch.autograd.Function):
    """Concatenates the parts of all ranks in the last dimension; the backward pass keeps this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return _side_by_side(part, tp)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return _own_part(upstream[0], ctx.tp), None


class _SplitInputs(torch.autograd.Function):
    """Keeps this rank's part of the last dimension; the backward pass concatenates the parts of all ranks."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
        ctx.tp = tp
        return _own_part(full, tp)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return _side_by_side(upstream[0], ctx.tp), None


def _summed(part: torch.Tensor, group: Any) -> torch.Tensor:
    # Reduce a copy: activation checkpointing may have saved the original.
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
    """A linear layer with a subset of its outputs. `in_features` and `out_features` are those of the full layer.

    The block applies `_Copy` to its input once, for all of its column-parallel layers.
    """

    tp: TensorParallel
    gathers: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps `[..., in_features]` to `[..., out_features / size]`, or to `[..., out_features]` with `gathers`."""
        output = functional.linear(input, self.weight, self.bias)
        return _GatherOutputs.apply(output, self.tp) if self.gathers else output


class RowParallel(nn.Linear):
    """A linear layer with a subset of its inputs and the full bias. Its features are those of the full layer."""

    tp: TensorParallel
    splits: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Maps `[..., in_features / size]`, or `[..., in_features]` with `splits`, to `[..., out_features]`.

        The output is equal on every rank, or this rank's share of the tokens.
        """
        part = _SplitInputs.apply(input, self.tp) if self.splits else input
        output, shards = functional.linear(part, self.weight), self.tp.shards
        output = _Reduce.apply(output, self.tp.group) if shards is None else shards.leave_block(output)
        if self.bias is None:
            return output
        return output + (self.bias if shards is None else _Copy.apply(self.bias, self.tp.group))


class _VocabularyParallel:
    """An embedding with a range of the vocabulary; a scale that its class applies stays valid, as it is linear."""

    tp: TensorParallel
    start: int

    def forward(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
        """Maps `[batch, sequence]` token ids to `[batch, sequence, hidden size]`, equal on every rank."""
        local_ids = input_ids - self.start
        absent = (local_ids < 0) | (local_ids >= self.weight.shape[0])
        embedded = super().forward(local_ids.masked_fill(absent, 0))  # type: ignore[misc]
        return _Reduce.apply(embedded.masked_fill(absent[..., None], 0.0), self.tp.group)


class _PartialGradient:
    """Mixin for a module with replicated weights that each rank applies to its own heads or tokens; sums gradients.

    Done in `forward` instead of by a hook on the weights, which would be lost when FSDP replaces them.
    """

    tp: TensorParallel

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the forward of the original class with weights whose gradients are summed over the ranks."""
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
    """An output head with a range of the vocabulary; only the loss uses its weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Raises NotImplementedError: training never needs full logits."""
        raise NotImplementedError("the output head is split by tensor parallelism; call the loss module instead")


@lru_cache
def _mixed(mixin: Any, kind: Any) -> Any:
    """A subclass that puts a mixin before a class and keeps its name, by which other code identifies it."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


class _Splitter:
    """Splits one model in place and records the slice of each weight by its id.

    Args:
        kind: `model_type`, for error messages.
        tp: the tensor-parallel group.
    """

    def __init__(self, kind: str, tp: TensorParallel):
        self.kind, self.tp, self.slices = kind, tp, dict[int, TensorSlice]()

    def refusal(self, problem: str, remedy: str = "use tp_size=1, with fsdp2 for instance") -> ConfigError:
        """The error for a model that cannot be split, with a remedy."""
        return ConfigError(f"tp_size={self.tp.size}: {self.kind} {problem}; {remedy}")

    def block(self, name: str, parent: nn.Module, styles: dict[str, str]) -> None:
        """Splits the layers of an attention or MLP module, between which each rank computes its own part.

        Args:
            name: name of the module in the decoder.
            parent: the module.
            styles: style of each child in the plan, such as `colwise`, by name.

        Raises:
            ConfigError: if the plan is not supported, or leaves out weights of the module.
        """
        # Refuse unsupported styles, and weights that the plan leaves out, before changing anything.
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
            return (self._copied(inputs[0]), *inputs[1:]), kwargs
        return inputs, {**kwargs, "hidden_states": self._copied(kwargs["hidden_states"])}

    def _copied(self, hidden: torch.Tensor) -> torch.Tensor:
        shards = self.tp.shards
        copied: torch.Tensor = _Copy.apply(hidden, self.tp.group) if shards is None else shards.enter_block(hidden)
        return copied

    def linear(self, name: str, layer: Any, style: str) -> None:
        """Splits a linear layer and its adapter, if any."""
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
        # LoRA's product B @ A must be split like the base: B by outputs, or A by inputs; the other stays full.
        for key in layer.lora_A:
            if style in _COLUMN:
                self.share(layer.lora_A[key])
                self.column(name, layer.lora_B[key], style in GATHERED)
            else:
                self.row(name, layer.lora_A[key], style in GATHERED)
                if self.tp.shards is not None:
                    self.share(layer.lora_B[key])

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
        """Keeps the full weights and sums their gradients over the ranks."""
        kind: Any = type(module)
        module.__class__, module.tp = _mixed(_PartialGradient, kind), self.tp

    def vocabulary(self, embedding: Any, head: Any, like: int | None) -> TensorSlice:
        """Splits embedding and head by vocabulary, into ranges that may differ in size by one; tied weights stay tied.

        Args:
            embedding: the embedding.
            head: the output head; None for a model with a scalar head, which every rank holds.
            like: see `split_model`.

        Returns:
            This rank's slice of the head, or else of the embedding.
        """
        kind: Any = type(embedding)
        if not issubclass(kind, nn.Embedding):
            raise self.refusal(
                "has an adapter on its embedding, which tensor parallelism does not split",
                "leave it out of lora_target_modules",
            )
        tp, vocab_size = self.tp, embedding.weight.shape[0]
        borders = [(like or vocab_size) * rank // tp.size for rank in range(tp.size)] + [vocab_size]
        if borders[-1] <= borders[-2]:
            problem = f"has {vocab_size:,} tokens, and the model that learns from it {like:,}, of which the last rank"
            raise self.refusal(f"{problem} holds those from {borders[-2]:,} on")
        part = slice(borders[tp.rank], borders[tp.rank + 1])
        if head is not None and head.weight.shape[0] != vocab_size:
            raise self.refusal(f"has {vocab_size} tokens in its embedding and {head.weight.shape[0]} in its head")
        self.keep(embedding.weight, 0, part)
        if head is not None:
            self.keep(None if head.weight is embedding.weight else head.weight, 0, part)
            self.keep(head.bias, 0, part)
            head.__class__ = ShardedHead
        padding = embedding.padding_idx
        inside = padding is not None and part.start <= padding < part.stop
        embedding.padding_idx = padding - part.start if inside else None  # it gets no gradient
        embedding.__class__ = _mixed(_VocabularyParallel, kind)
        embedding.tp, embedding.start = tp, part.start
        return self.slices[id((head or embedding).weight)]

    def keep(self, weight: nn.Parameter | None, dim: int, part: slice) -> None:
        """Narrows a weight in place to a part of one dimension, so that references to the parameter stay valid."""
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
    loss: LossModule, group: Any, rank: int, size: int, first: bool | None = None, like: int | None = None
) -> dict[str, TensorSlice]:
    """Splits a full, unwrapped model in place, leaving this rank's slice of each layer.

    Args:
        loss: the loss module on any device; its model has its adapters and final weights, equal on every rank.
        group: process group of the ranks that share each layer.
        rank: index of this rank in the group.
        size: size of the group; 1 changes nothing.
        first: see `TensorParallel`; None for whether the group contains global rank 0.
        like: size of another model's vocabulary; each rank gets the tokens that it holds of that, the last one also
            those that the other model lacks. None for even parts.

    Returns:
        This rank's slice of each split weight, by its name in `loss.model.named_parameters()`; also set in
        `loss.tensor`.

    Raises:
        ConfigError: if the model has no supported plan, or its sizes are not divisible. The model may then be partly
            split and must not be used.
    """
    if size == 1:
        return {}
    text = loss.base.config.get_text_config()
    if mistakes := refusals(text, size):
        raise ConfigError(mistakes)
    if first is None:
        first = 0 in distributed.get_process_group_ranks(group)
    splitter = _Splitter(text.model_type, TensorParallel(group, rank, size, first))
    head = loss.base.get_output_embeddings()
    if not loss.chunked:
        adapted = hasattr(head, "base_layer")
        raise splitter.refusal(
            "has an adapter on its output head, which tensor parallelism does not split"
            if adapted
            else "computes its logits in its own way, which tensor parallelism does not split",
            "leave it out of lora_target_modules" if adapted else "use tp_size=1, with fsdp2 for instance",
        )
    # Collect the planned layers by parent module: each parent is split as a unit.
    plan, blocks = layer_plan(text), dict[str, dict[str, str]]()
    decoder = decoder_of(loss.base)
    for name, _ in decoder.named_modules():
        if style := plan.get(re.sub(r"\.\d+\.", ".*.", name)):
            parent, _, child = name.rpartition(".")
            blocks.setdefault(parent, {})[child] = style
    if not blocks:
        raise splitter.refusal("has no layer that its plan names")
    norms = norms_between(loss, {decoder.get_submodule(name) for name in blocks})
    tp = TensorParallel(group, rank, size, first, shards=None if norms is None else TokenShards(group, rank, size))
    splitter.tp = tp
    for name, styles in blocks.items():
        splitter.block(name, decoder.get_submodule(name), styles)
    if tp.shards is not None:
        for norm in norms or ():
            splitter.share(norm)
        tp.shards.install(list(decoder.layers), final_norm(decoder))
    rows = splitter.vocabulary(loss.base.get_input_embeddings(), head, like)
    weights = loss.model.named_parameters(remove_duplicate=False)  # in the last pipeline stage, a tied head has its own
    tp.slices.update({name: splitter.slices[id(weight)] for name, weight in weights if id(weight) in splitter.slices})
    loss.tensor = tp
    start, vocab_size = rows.slices[0].start, rows.shape[0]
    loss.vocabulary = VocabularyShard(start, vocab_size, group)
    loss.cross_entropy = partial(vocabulary_cross_entropy, group=group, start=start, vocab_size=vocab_size)
    return tp.slices
