"""Adds tokens to a model's vocabulary (`--new_tokens`): more rows in embedding and output head.

New rows begin as the mean of all rows in the files, as with transformers' `resize_token_embeddings`, but without the
random deviation that it adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.data.tokenizer import new_token_ids
from trainers.model.stored import CHUNK, Source, replace
from trainers.model.weight_names import first_names

_NOTED = "new_token_ids"
"""Attribute of a transformers model with the ids of its new tokens."""


@dataclass(frozen=True)
class GrownTensor:
    """An embedding, a head or its bias with more rows than in the files.

    Args:
        stored: where the tensor comes from.
        dtype: its dtype in the model.
        shape: its shape with all rows.
        fresh: numbers of the rows that begin as the mean of the stored ones.
    """

    stored: Source
    dtype: torch.dtype
    shape: torch.Size
    fresh: tuple[int, ...]

    @cached_property
    def mean(self) -> torch.Tensor:
        """Mean of the stored rows, in fp32; computed in fp64, so that it does not depend on the number of threads."""
        return _mean(self.stored.mapped(), self.dtype)

    def mapped(self) -> torch.Tensor:
        """All rows."""
        stored = self.stored.mapped()
        grown = torch.empty(self.shape, dtype=stored.dtype)
        grown[: len(stored)] = stored
        grown[list(self.fresh)] = self.mean.to(stored.dtype)
        return grown

    def read(self, target: torch.Tensor, part: tuple[slice, ...] = ()) -> None:
        """See `StoredTensor.read`."""
        if not target.numel():
            return
        rows, *others = part or (slice(0, size) for size in self.shape)
        stored = min(rows.stop, self.stored.shape[0]) - rows.start
        if stored > 0:
            self.stored.read(target[:stored], (slice(rows.start, rows.start + stored), *others))
        if fresh := [row - rows.start for row in self.fresh if rows.start <= row < rows.stop]:
            target.detach()[fresh] = self.mean[tuple(others)].to(target)


def _mean(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mean of the rows of a matrix that is used in a dtype."""
    rows = max(1, CHUNK * matrix.shape[0] // max(1, matrix.numel() * 8))
    total = sum(piece.to(dtype).double().sum(0) for piece in matrix.detach().split(rows))
    assert isinstance(total, torch.Tensor)
    return (total / matrix.shape[0]).float()


def token_ids(base: nn.Module) -> list[int]:
    """Ids of the tokens that were added to a model."""
    ids: list[int] = getattr(base, _NOTED, [])
    return ids


def note_tokens(base: nn.Module, ids: Iterable[int]) -> None:
    """Notes the ids of tokens that were added to a model, whose rows adapters are to train."""
    setattr(base, _NOTED, sorted(ids))


def grow_vocabulary(config: TrainConfig, base: Any, sources: dict[int, Source] | None = None) -> list[str]:
    """Adds the tokens that the config names to a transformers model, and pads its vocabulary.

    Args:
        config: the run's config.
        base: the model, on any device; its embedding and head keep their parameters, and so stay tied.
        sources: where weights on the meta device are to be read from, by id; those that grow are replaced.

    Returns:
        Log lines; none if nothing was asked for.

    Raises:
        ConfigError: if the model has other weights by token.
    """
    if not config.new_tokens and config.pad_vocab_to_multiple_of is None:
        return []
    ids = new_token_ids(config)
    before = base.get_input_embeddings().weight.shape[0]
    rows = grown_size(before, ids.values(), config.pad_vocab_to_multiple_of)
    add_rows(base, ids, rows, sources)
    lines = []
    if ids:
        listed = first_names([f"{token} ({number})" for token, number in ids.items()])
        lines.append(f"new tokens, which begin as the mean of all others: {listed}")
    if known := [token for token in config.new_tokens if token not in ids]:
        lines.append(f"new_tokens that are in the vocabulary already: {first_names(known)}")
    if rows > before:
        lines.append(f"vocabulary: {rows:,} rows in place of {before:,}")
    return lines


def grown_size(before: int, ids: Iterable[int], multiple: int | None) -> int:
    """Rows of a vocabulary with some new ids, padded to a multiple of some number."""
    rows, step = max([before, *(number + 1 for number in ids)]), multiple or 1
    return -(-rows // step) * step


def add_rows(base: Any, ids: Mapping[str, int], rows: int, sources: dict[int, Source] | None = None) -> None:
    """Enlarges embedding and output head of a transformers model to a number of rows.

    Args:
        base: see `grow_vocabulary`.
        ids: ids of new tokens, by token; they may be among the rows that there are, of which some have no token.
        rows: number of rows, at least as many as before.
        sources: see `grow_vocabulary`.

    Raises:
        ConfigError: if the model has other weights by token.
    """
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    before = embedding.weight.shape[0]
    _refuse_other_weights(base, embedding, head)
    fresh = tuple(sorted({*ids.values(), *range(before, rows)}))
    by_token = [embedding.weight] if head is None else [embedding.weight, head.weight, head.bias]
    for weight in {id(weight): weight for weight in by_token if weight is not None}.values():
        shape = torch.Size([rows, *weight.shape[1:]])
        if weight.is_meta:
            grown = torch.empty(shape, dtype=weight.dtype, device="meta")
            if sources and id(weight) in sources:
                sources[id(weight)] = GrownTensor(sources[id(weight)], weight.dtype, shape, fresh)
        else:
            grown = weight.new_empty(shape)
            grown[:before] = weight.detach()
            grown[list(fresh)] = _mean(weight, weight.dtype).to(grown)
        replace(weight, nn.Parameter(grown, weight.requires_grad))
    embedding.num_embeddings = rows
    if head is not None:
        head.out_features = rows
    for model_config in (base.config, base.config.get_text_config()):
        if getattr(model_config, "vocab_size", None) is not None:
            model_config.vocab_size = rows
    if hasattr(base, "vocab_size"):
        base.vocab_size = rows
    note_tokens(base, ids.values())


def _refuse_other_weights(base: Any, embedding: Any, head: Any) -> None:
    kind, before = base.config.model_type, embedding.weight.shape[0]
    plain = isinstance(embedding, nn.Embedding) and (head is None or isinstance(head, nn.Linear))
    if not plain:
        problem = f": {kind} has an embedding or output head of its own kind, which cannot be enlarged"
    elif hasattr(base.config.get_text_config(), "vocab_size_per_layer_input"):  # Gemma 3n
        problem = f": {kind} has embeddings of its own for each layer, which would lack the tokens"
    elif head is not None and head.weight.shape[0] != before:
        problem = f": {kind} has {before:,} tokens in its embedding and {head.weight.shape[0]:,} in its head"
    else:
        return
    raise ConfigError.about("new_tokens", None, problem, "leave new_tokens and pad_vocab_to_multiple_of out")
