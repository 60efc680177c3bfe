"""Splits a model into pipeline stages, whose weights keep the names that transformers and peft gave them.

What a rank does not hold is replaced by modules without weights. A stage is a shallow copy of the decoder in which the
layers of all other stages only hand on the hidden states, so that the decoder's own forward pass is the stage's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainers.config.mistakes import ConfigError
from trainers.data.layout import AttentionMetadata, DocumentLayout
from trainers.model.load import matmul_parameters
from trainers.objectives.sft import LINEAR_HEADS
from trainers.strategy.pipeline_schedules import SCHEDULES, balance, stages_of

_NORMS = ("norm", "final_layernorm")


class Absent(nn.Module):
    """In the place of a module of another stage; hands on the hidden states."""

    def __init__(self, kind: Any = None):
        super().__init__()
        self.attention_type = kind  # some decoders look there for the mask

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """`hidden` as it is."""
        return hidden


@dataclass
class Work:
    """The step in hand, which all stages of a rank look at.

    Args:
        micro_batches: their tensors, on the device.
        shares: what each one's summed loss is multiplied with before its gradients are taken.
        room: tokens that the buffers between stages have place for.
        beat: told `forward` and `backward` as they begin.
        loss: fp32, summed over the micro-batches so far; on the last stage's rank.
        correct: tokens predicted right, counted without gradients only.
    """

    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    shares: Sequence[float] = ()
    room: int = 0
    beat: Callable[[str], None] = lambda section: None
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    correct: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    def take(self, micro_batches: list[dict[str, Any]], shares: Sequence[float], device: torch.device) -> None:
        """A new step."""
        self.micro_batches, self.shares = micro_batches, shares
        self.loss = torch.zeros((), device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)


class _Known(torch.autograd.Function):
    """A loss whose gradient is known already; it may be asked for more than once."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return (upstream[0] * ctx.gradient).to(ctx.gradient.dtype), None, None


class Chunk(nn.Module):
    """One stage.

    Args:
        loss: the `SupervisedLoss` whose model is split.
        decoder: the stage's copy of it.
        head: the output head, on the last stage.
        first: takes token ids in place of hidden states.
        work: shared with the rank's other stages.
    """

    def __init__(self, loss: Any, decoder: Any, head: nn.Module | None, first: bool, work: Work):
        super().__init__()
        self.decoder, self.head, self.first, self.work = decoder, head, first, work
        self.compute: torch.dtype = loss.compute
        self.source = [loss]  # in a list, so that torch does not take it for a part of the stage
        self.number = 0
        self.metadata = AttentionMetadata()

    def take_up(self, number: int, section: str) -> None:
        """Sets the documents of a micro-batch: another one's may be in hand, and checkpointed layers run again."""
        self.number = number
        self.work.beat(section)
        loss = self.source[0]
        self.metadata = AttentionMetadata(self.work.micro_batches[number]["documents"], loss.over_ranks)
        loss.route.take_up(self.metadata)

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """The stage's part of the micro-batch that was taken up.

        Args:
            activations: `[room, hidden size]`, the hidden states of the flattened micro-batch, then anything; the first
                stage reads token ids instead.

        Returns:
            The same of the next stage; of the last one the scaled loss, fp32 `[1]`.
        """
        micro_batch = self.work.micro_batches[self.number]
        rows, width = micro_batch["input_ids"].shape
        half = self.compute != torch.float32
        with torch.autocast(activations.device.type, self.compute, enabled=half, cache_enabled=False):
            start = micro_batch["input_ids"] if self.first else activations[: rows * width].unflatten(0, (rows, width))
            with self.source[0]._resting(micro_batch["input_ids"].device):
                hidden = self.run(start, micro_batch["position_ids"])
            if self.head is None:
                hidden = hidden.flatten(0, 1)
                return functional.pad(hidden, (0, 0, 0, self.work.room - len(hidden)))
            picked = hidden.flatten(0, 1).index_select(0, micro_batch["positions"]).to(self.compute)
        return self.score(picked, micro_batch["labels"], self.work.shares[self.number])

    def run(self, start: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Through the stage's layers.

        Args:
            start: `[batch, sequence]` token ids, or `[batch, sequence, hidden size]` hidden states.
        """
        inputs = {"input_ids": start} if self.first and not start.is_floating_point() else {"inputs_embeds": start}
        with self.source[0].route.hand_over(self.metadata) as more:
            hidden: torch.Tensor = self.decoder(
                **inputs, **more, position_ids=position_ids, use_cache=False
            ).last_hidden_state
        return hidden

    def score(self, picked: torch.Tensor, labels: torch.Tensor, share: float) -> torch.Tensor:
        """The loss; the head's gradients are taken at once, so that no micro-batch waits with them until its backward.

        Args:
            picked: `[trained, hidden size]` the hidden states before the trained tokens.
        """
        head: Any = self.head
        cross_entropy, rule = self.source[0].cross_entropy, self.source[0].rule
        with torch.autocast(picked.device.type, enabled=False):
            if not torch.is_grad_enabled():
                loss, correct = cross_entropy(picked, head.weight, head.bias, labels, *rule)
                self.work.loss, self.work.correct = self.work.loss + loss, self.work.correct + correct
                return loss.reshape(1)
            leaf = picked.detach().requires_grad_()
            loss, _ = cross_entropy(leaf, head.weight, head.bias, labels, *rule)
            scaled = loss * share
            scaled.backward()
        self.work.loss = self.work.loss + loss.detach()
        known: torch.Tensor = _Known.apply(picked, scaled.detach().reshape(1), leaf.grad)
        return known


@dataclass(frozen=True)
class LocalStages:
    """The stages of a rank.

    Args:
        chunks: the stages, in order; numbers in `stages`.
        shapes: of every trained weight of the full model, by name; `dtypes` likewise.
        trained: the trained weights of this rank, by the same names.
        tied: name of the weight that the first and the last stage both hold, None without.
        hidden_size: of the hidden states between stages.
        total_numel: elements of these stages' weights, of which tensor parallelism may have left this rank fewer.
        layers: of each stage of the pipeline.
    """

    chunks: list[Chunk]
    stages: list[int]
    shapes: dict[str, torch.Size]
    dtypes: dict[str, torch.dtype]
    trained: list[tuple[str, nn.Parameter]]
    tied: str | None
    hidden_size: int
    dtype: torch.dtype
    total_numel: int
    layers: list[range]


def split_model(loss: Any, schedule: str, ranks: int, rank: int, work: Work) -> LocalStages:
    """Splits the model of a `SupervisedLoss` in place and returns this rank's stages.

    Args:
        loss: with its weights, split by tensor parallelism or not, before anything wraps it.
        ranks: of one pipeline.
        rank: within it.

    Raises:
        ConfigError: when the model cannot be split so.
    """
    base, model = loss.base, loss.model
    decoder, head, embedding = base.get_decoder(), base.get_output_embeddings(), base.get_input_embeddings()
    layers = split_layers(loss, schedule, ranks)
    stages, total = stages_of(schedule, ranks, rank), len(layers)
    # What the full model has is noted while it is all there; names stay, while its modules go.
    slices = loss.tensor.slices if loss.tensor else {}
    weights, tied, dtype = list(model.named_parameters()), tied_weight(loss), embedding.weight.dtype
    full_shapes = {name: slices.get(name, weight).shape for name, weight in weights}
    shapes = {name: full_shapes[name] for name, weight in weights if weight.requires_grad}
    dtypes = {name: weight.dtype for name, weight in weights if weight.requires_grad}
    # Each stage is a copy of the decoder that shares the weights of its layers.
    chunks = []
    for stage in stages:
        first, last = stage == 0, stage == total - 1
        copied = _stage(decoder, layers[stage], embedding, first, last)
        chunks.append(Chunk(loss, copied, head if last else None, first, work))
    # Then the model itself lets go of what no stage of this rank has.
    for layer in set(range(len(decoder.layers))) - {layer for stage in stages for layer in layers[stage]}:
        decoder.layers[layer] = Absent()
    if 0 not in stages:
        _replace(decoder, embedding)
    if total - 1 not in stages:
        _replace(base, head)
        _replace(decoder, _norm(decoder))
    local = {id(weight) for weight in model.parameters()}
    trained = [(name, weight) for name, weight in weights if weight.requires_grad and id(weight) in local]
    total_numel = sum(full_shapes[name].numel() for name, weight in weights if id(weight) in local)
    size = int(base.config.get_text_config().hidden_size)
    return LocalStages(chunks, stages, shapes, dtypes, trained, tied, size, dtype, total_numel, layers)


def split_layers(loss: Any, schedule: str, ranks: int) -> list[range]:
    """The decoder layers of each stage.

    Args:
        loss: the `SupervisedLoss`; its weights may be on the meta device.
        ranks: of one pipeline.

    Raises:
        ConfigError: when the model has no layers that can be split so, or too few.
    """
    decoder, head = loss.base.get_decoder(), loss.base.get_output_embeddings()
    _refuse_unsplittable_layers(loss, decoder, head)
    layer_cost, head_cost = sum(matmul_parameters(decoder.layers[0])), head.in_features * head.out_features
    try:
        return balance(len(decoder.layers), ranks * SCHEDULES[schedule].chunks, layer_cost, head_cost)
    except ValueError as error:
        raise ConfigError(
            f"pp_size={ranks} with pp_schedule={schedule}: {error}, so a smaller pp_size or another schedule"
        ) from None


def tied_weight(loss: Any) -> str | None:
    """Name of the trained weight that is both embedding and output head; None without one."""
    weight: Any = getattr(loss.base.get_output_embeddings(), "weight", None)
    tied = weight is not None and weight is getattr(loss.base.get_input_embeddings(), "weight", None)
    if not tied or not weight.requires_grad:
        return None
    return next(name for name, parameter in loss.model.named_parameters() if parameter is weight)


def refuse_tied_shards(loss: Any, schedule: str) -> None:
    """Raises ConfigError when one rank would hold a tied weight in two stages, as FSDP 2 cannot shard it twice."""
    if SCHEDULES[schedule].turns and tied_weight(loss) is not None:
        raise ConfigError(
            f"pp_schedule={schedule} puts embedding and head on one rank, and this model ties them, which FSDP cannot "
            "shard; use zero_bubble, or data parallel without dp_shard"
        )


def refuse_unsplittable_family(kind: str) -> None:
    """Raises ConfigError for a `model_type` whose models have no pipeline stages here."""
    if kind not in LINEAR_HEADS:
        raise _unsplittable(kind)


def _unsplittable(kind: str) -> ConfigError:
    known = ", ".join(sorted(LINEAR_HEADS))
    return ConfigError(
        f"{kind} models cannot be split into pipeline stages here; use another strategy, or a model of {known}"
    )


def _refuse_unsplittable_layers(loss: Any, decoder: Any, head: Any) -> None:
    kind = loss.base.config.get_text_config().model_type
    refuse_unsplittable_family(kind)
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            "pipeline stages need the plain output head; leave lm_head out of lora_target_modules, or use another "
            "strategy"
        )
    if not loss.chunked or not isinstance(getattr(decoder, "layers", None), nn.ModuleList) or _norm(decoder) is None:
        raise _unsplittable(kind)


def _stage(decoder: Any, layers: range, embedding: nn.Module, first: bool, last: bool) -> Any:
    """A copy of the decoder that shares the weights of some layers and lacks the others."""
    part = copy.copy(decoder)
    part._modules = dict(decoder._modules)
    part.layers = nn.ModuleList(
        layer if index in layers else Absent(getattr(layer, "attention_type", None))
        for index, layer in enumerate(decoder.layers)
    )
    if not last:
        _replace(part, _norm(decoder))
    if first:
        return part
    _replace(part, embedding)
    if hasattr(part, "embed_dropout"):
        part.embed_dropout = nn.Identity()
    if hasattr(part, "embedding_multiplier"):  # Granite's decoder scales whatever comes in
        part.embedding_multiplier = 1.0
    return part


def _norm(decoder: Any) -> nn.Module | None:
    """The norm after the last layer."""
    return next((decoder._modules[name] for name in _NORMS if decoder._modules.get(name) is not None), None)


def _replace(parent: Any, child: Any) -> None:
    for name, module in list(parent._modules.items()):
        if module is child:
            setattr(parent, name, Absent())


class PipelineStages(nn.Module):
    """A rank's stages, each on stand-in hidden states, for looks at the model that send nothing.

    Args:
        loss: the module that was split; its weights have their names from it.
        dtype: of the hidden states.
    """

    def __init__(self, loss: Any, chunks: list[Chunk], hidden_size: int, dtype: torch.dtype):
        super().__init__()
        self.loss, self.stages, self.hidden_size, self.dtype = loss, chunks, hidden_size, dtype
        self.chunks = nn.ModuleList(chunks)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        documents: DocumentLayout | None,
        positions: torch.Tensor,
        labels: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A loss without meaning; arguments and results as `SupervisedLoss.forward`."""
        waves = torch.arange(1, self.hidden_size + 1, device=input_ids.device)
        stand_in = torch.sin(input_ids.reshape(-1, 1) * waves).to(self.dtype)
        names = ("input_ids", "position_ids", "documents", "positions", "labels")
        work = self.stages[0].work
        inputs = dict(zip(names, (input_ids, position_ids, documents, positions, labels), strict=True))
        work.take([inputs], [1.0], input_ids.device)
        work.room = max(work.room, input_ids.numel())
        for chunk in self.stages:
            chunk.take_up(0, "forward")
            chunk(stand_in)
        return work.loss, work.correct
