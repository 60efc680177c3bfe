"""Document boundaries of a packed micro-batch in the forms attention kernels take, and sequence shards of its rows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of a batch on a device; the host does not wait for what the device still has to do.

    CUDA copies so from pinned memory alone. Torch hands out pinned memory again only once the copies from it have
    ended, so that nothing here has to outlive them.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class DocumentLayout:
    """The documents of a micro-batch; the padding at the end of a row counts as a document.

    Args:
        ids: `[batch, sequence]` document number of each token; a token attends to earlier tokens of its own document.
        borders: `[documents + 1]` int32, where each document starts in the flattened batch, and the end of the last.
        longest: tokens of the longest document.
        host_borders: `borders` in host memory.
    """

    ids: torch.Tensor
    borders: torch.Tensor
    longest: int
    host_borders: tuple[int, ...]

    @classmethod
    def of(cls, borders: np.ndarray, rows: int) -> DocumentLayout:
        """The layout of documents that fill `rows` rows of equal length; no document spans two rows."""
        import torch

        lengths = borders[1:] - borders[:-1]
        ids = torch.from_numpy(np.arange(len(lengths)).repeat(lengths).reshape(rows, -1))
        return cls(ids, torch.from_numpy(borders.astype(np.int32)), int(lengths.max()), tuple(borders.tolist()))

    @cached_property
    def side_by_side(self) -> tuple[torch.Tensor, tuple[tuple[int, int], ...]]:
        """`[batch * sequence]` slot of each token once documents are grouped by length, and the groups.

        Each group is its number of documents and their width, in the order of the slots. Built on first use.
        """
        import torch

        borders = np.array(self.host_borders)
        slots, buckets = _buckets(borders[1:] - borders[:-1])
        return torch.from_numpy(slots).to(self.ids.device), buckets

    def to(self, device: torch.device) -> DocumentLayout:
        """A copy whose tensors are on `device`."""
        return replace(self, ids=to_device(self.ids, device), borders=to_device(self.borders, device))


class Scales(NamedTuple):
    """Factors that make a sum, divided by the examples of the global batch, a mean over something else there.

    Attributes:
        nll: Examples / trained tokens of the first documents of all examples.
        desirable, undesirable: Examples / those with that label; not a number if there are none.
    """

    nll: float = 1.0
    desirable: float = math.nan
    undesirable: float = math.nan


UNSCALED = Scales()


@dataclass(frozen=True)
class ScoredDocuments:
    """The documents of a micro-batch, example after example, for objectives that compare their log-probabilities.

    Args:
        of_label: `[labels]` number of the document, among these, that each label belongs to.
        tokens: `[documents]` fp32, trained tokens of each; of the full document, where ranks share rows.
        reference: `[documents]` fp32, log-probability of each under the initial model; None without a reference.
        scales: factors of the global batch.
        numbers: `[documents]` their numbers in the data set, in host memory.
        desirable: `[documents]` bool, the label of each; None without labels.
        columns: `[documents]` fp32 each, by name: the numeric columns of the example of each document.
        kl: fp32 scalar, KL divergence from the initial model over the global batch; None without.
        advantages: `[documents]` fp32, how much better than others each sampled answer is; None if nothing is sampled.
        sampled: `[labels]` fp32, log-probability of each label as the sampler computed it; None as above.
        old: `[labels]` fp32, log-probability of each label under the weights that sampled, as training computes it;
            None if it was not computed.
        is_fresh: whether the weights that sampled the answers are those that are trained now.
        initial: `[labels]` fp32, log-probability of each label under the initial model; None without.
    """

    of_label: torch.Tensor
    tokens: torch.Tensor
    reference: torch.Tensor | None
    scales: Scales
    numbers: np.ndarray
    desirable: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    advantages: torch.Tensor | None = None
    sampled: torch.Tensor | None = None
    old: torch.Tensor | None = None
    is_fresh: bool = True
    initial: torch.Tensor | None = None

    def to(self, device: torch.device) -> ScoredDocuments:
        """A copy whose tensors are on `device`."""
        names = ("of_label", "tokens", "reference", "desirable", "kl", "advantages", "sampled", "old")
        tensors = {name: getattr(self, name) for name in names}
        moved: dict[str, Any] = {
            name: to_device(tensor, device) for name, tensor in tensors.items() if tensor is not None
        }
        columns = {name: to_device(numbers, device) for name, numbers in self.columns.items()}
        return replace(self, columns=columns, **moved)


@dataclass(frozen=True)
class TopTokens:
    """What a teacher finds most likely at each label of a micro-batch, from `trainers/data/teacher_file.py`.

    Args:
        ids: `[labels, k]` int64 token ids.
        log_probs: `[labels, k + 1]` fp32 their log-probabilities, and that of all other tokens together.
        vocab_size: number of tokens that have a probability.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor
    vocab_size: int

    def to(self, device: torch.device) -> TopTokens:
        """A copy whose tensors are on `device`."""
        return replace(self, ids=to_device(self.ids, device), log_probs=to_device(self.log_probs, device))


@dataclass(frozen=True)
class SequenceShard:
    """The shard of every row that one rank holds.

    Args:
        index: index of this shard, from 0.
        count: shards of a row.
        zigzag: each rank holds two chunks, one from either end, which balances the work of causal attention.
    """

    index: int = 0
    count: int = 1
    zigzag: bool = False

    def padded(self, width: int) -> int:
        """The next width that divides into equal shards."""
        unit = self.count * (2 if self.zigzag and self.count > 1 else 1)
        return -(-width // unit) * unit

    def spans(self, width: int) -> list[tuple[int, int]]:
        """`[start, end)` columns of each chunk, in order."""
        if not self.zigzag or self.count == 1:
            size = width // self.count
            return [(self.index * size, (self.index + 1) * size)]
        size = width // (2 * self.count)
        return [(piece * size, (piece + 1) * size) for piece in (self.index, 2 * self.count - 1 - self.index)]

    def columns(self, width: int) -> np.ndarray:
        """The index of every column, in order."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.spans(width)])


FULL_SEQUENCE = SequenceShard()


OUR_KERNELS = "tunesmith_"
"""Prefix of the names of Tunesmith's attention functions."""


class AttentionMetadata:
    """What the tokens of a micro-batch may attend to; shared by all layers, so that masks are built once.

    Deliberately not a dataclass: module wrappers such as FSDP recurse into those, and would cast or move the tensors.

    Args:
        layout: the documents; a token attends to earlier tokens of its own document. None if each row is a single
            document, possibly padded on the right.
        over_ranks: attention across the sequence shards of other ranks (`trainers/parallel/sequence.py`); None if
            rows are not sharded.
    """

    def __init__(self, layout: DocumentLayout | None = None, over_ranks: Any = None) -> None:
        self.layout = layout
        self.over_ranks = over_ranks
        self.masks: dict[int | None, torch.Tensor] = {}
        self.blocks: dict[tuple[int, int | None], BlockMask] = {}
        self.pieces: dict[int | None, Any] = {}
        self.as_argument = self.dropped = False


class MetadataRoute:
    """Passes the metadata of a micro-batch to the attention function of a model.

    Normally through the keyword argument `attention_metadata` of the model call, which transformers forwards. For
    families that drop it on the way (StableLM), through a global variable; a `ContextVar` would not reach the autograd
    threads that recompute layers. The first forward pass (the probe's) uses both, and detects whether any layer misses
    the argument.

    Args:
        model: a transformers model.
        decoder: called instead of `model` if the loss applies the head itself.
    """

    current: AttentionMetadata | None = None
    """Metadata of the current pass, for layers that do not get the argument; shared by all routes."""

    def __init__(self, model: Any, decoder: Any):
        self.config = model.config
        self.by_argument: bool | None = None if _takes_any(model) and _takes_any(decoder) else False

    @contextmanager
    def hand_over(self, metadata: AttentionMetadata) -> Iterator[dict[str, AttentionMetadata]]:
        """Yields the keyword arguments for a model call, and sets `current` if the model needs it.

        `current` stays set after the call, for layers that are recomputed in the backward pass.
        """
        if not self._ours():
            yield {}
            return
        self.take_up(metadata)
        yield {} if self.by_argument is False else {"attention_metadata": metadata}
        if self.by_argument is None and (metadata.as_argument or metadata.dropped):
            self.by_argument = not metadata.dropped
            self.take_up(metadata)

    def take_up(self, metadata: AttentionMetadata) -> None:
        """Sets `current` if the model needs it; in a pipeline, it may hold the metadata of another micro-batch."""
        MetadataRoute.current = None if self.by_argument else metadata

    def _ours(self) -> bool:
        return str(self.config._attn_implementation).startswith(OUR_KERNELS)


def _takes_any(module: Any) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def received(argument: AttentionMetadata | None, compiling: bool) -> AttentionMetadata:
    """Returns the metadata for an attention call, from its argument or else from `MetadataRoute.current`.

    Args:
        argument: `attention_metadata` of the call.
        compiling: whether the layer is compiled; which way was used is not recorded then, as a compiled block with
            activation checkpointing must not have side effects.

    Raises:
        RuntimeError: if there is no metadata; tokens would attend to other documents.
    """
    metadata = MetadataRoute.current if argument is None else argument
    if metadata is None:
        raise RuntimeError(
            "attention_metadata did not reach this attention layer; call the model through its loss, or with "
            "attention_metadata=AttentionMetadata()"
        )
    if not compiling:
        metadata.as_argument |= argument is not None
        metadata.dropped |= argument is None
    return metadata


def _buckets(lengths: np.ndarray) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """Groups documents by length, four groups per doubling, each as wide as its longest document.

    Args:
        lengths: `[documents]` tokens of each.

    Returns:
        `[tokens]` slot of each token; number of documents and width of each group.
    """
    sizes, groups = lengths.tolist(), dict[int, list[int]]()  # only tens of them: lists are faster than arrays
    for document, size in enumerate(sizes):
        groups.setdefault(_group(size), []).append(document)
    # Lay the groups out one after another, each document padded to the width of its group.
    first_slot, buckets, used = [0] * len(sizes), [], 0
    for _, members in sorted(groups.items()):
        width = max(2, *(sizes[document] for document in members))  # kernels take a single query for generating
        for index, document in enumerate(members):
            first_slot[document] = used + index * width
        buckets.append((len(members), width))
        used += width * len(members)
    # Slot of a token: the first slot of its document plus its position in the document.
    ends = lengths.cumsum()
    return np.arange(ends[-1]) + (np.array(first_slot) + lengths - ends).repeat(lengths), tuple(buckets)


@cache
def _group(size: int) -> int:
    return math.ceil(4 * math.log2(size))
