"""Splits a model into pipeline stages; weights keep their transformers and peft names.

Modules that a rank does not hold are replaced by ones without weights. A stage is a shallow copy of the decoder in
which the layers of other stages pass hidden states through unchanged, so that it reuses the decoder's own `forward`.
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
from trainers.model.experts import expert_share
from trainers.model.sizes import matmul_parameters
from trainers.objectives.output_head import decoder_of
from trainers.strategy.pipeline_schedules import SCHEDULES, balance, stages_of

FAMILIES = {
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
    *("olmo", "olmo2", "smollm3", "granite", "cohere", "stablelm"),
}
"""Families that can be split; tests/unit/parallel/test_pipeline.py compares the stages of each with its model."""
_NORMS = ("norm", "final_layernorm", "final_layer_norm")


class Absent(nn.Module):
    """Replaces a module of another stage; returns the hidden states unchanged."""

    def __init__(self, kind: Any = None):
        super().__init__()
        self.attention_type = kind  # some decoders choose the mask by it

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns `hidden` unchanged."""
        return hidden


@dataclass
class Work:
    """State of the current step, shared by all stages of a rank.

    Args:
        micro_batches: tensors of each micro-batch, on the device.
        shares: factor on the summed loss of each micro-batch before its backward pass.
        room: number of tokens that the buffers between stages can hold.
        beat: called with `forward` and `backward` as they begin.
        loss: fp32 sum over the micro-batches so far; only on the rank of the last stage.
        correct: number of correctly predicted tokens; counted only without gradients.
        by_source: `[sources]` loss of each source of a mix, in training; empty if they are not told apart.
    """

    micro_batches: list[dict[str, Any]] = field(default_factory=list)
    shares: Sequence[float] = ()
    room: int = 0
    beat: Callable[[str], None] = lambda section: None
    loss: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    correct: torch.Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    by_source: torch.Tensor = field(default_factory=lambda: torch.zeros(0))

    def take(self, micro_batches: list[dict[str, Any]], shares: Sequence[float], device: torch.device) -> None:
        """Starts a new step and resets the sums."""
        self.micro_batches, self.shares = micro_batches, shares
        self.loss = torch.zeros((), device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)
        sources = micro_batches[0].get("sources")
        self.by_source = torch.zeros(0 if sources is None else sources.number, device=device)


class _Known(torch.autograd.Function):
    """Attaches a precomputed gradient to a loss; may be backpropagated more than once (split-backward schedules)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        return (upstream[0] * ctx.gradient).to(ctx.gradient.dtype), None, None


class Chunk(nn.Module):
    """One pipeline stage.

    Args:
        loss: the `LossModule` whose model is split.
        decoder: the stage's copy of the decoder.
        head: the output head on the last stage, otherwise None.
        first: whether this is the first stage, which takes token ids instead of hidden states.
        work: state shared with the rank's other stages.
    """

    def __init__(self, loss: Any, decoder: Any, head: nn.Module | None, first: bool, work: Work):
        super().__init__()
        self.decoder, self.head, self.first, self.work = decoder, head, first, work
        self.compute: torch.dtype = loss.compute
        self.source = [loss]  # in a list, so that torch does not register it as a submodule
        self.number = 0
        self.metadata = AttentionMetadata()

    def take_up(self, number: int, section: str) -> None:
        """Selects a micro-batch and makes its attention metadata current.

        Needed before backward passes too: checkpointed layers run again, and another micro-batch may have run since.

        Args:
            number: index of the micro-batch in `work`.
            section: name of the pass, for the heartbeat.
        """
        self.number = number
        self.work.beat(section)
        loss = self.source[0]
        self.metadata = AttentionMetadata(self.work.micro_batches[number]["documents"], loss.over_ranks)
        loss.route.take_up(self.metadata)

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Runs the stage on the micro-batch selected by `take_up`.

        Args:
            activations: `[room, hidden size]` hidden states of the flattened micro-batch, followed by unused slots;
                ignored by the first stage, which reads token ids instead.

        Returns:
            `[room, hidden size]` input of the next stage; from the last stage, the scaled loss as fp32 `[1]`.
        """
        micro_batch = self.work.micro_batches[self.number]
        rows, width = micro_batch["input_ids"].shape
        half = self.compute != torch.float32
        self.source[0].noise = micro_batch.get("noise")
        # Slice the micro-batch out of the buffer, run the layers, and pad the result to the size of the buffer again.
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
        """Runs the stage's layers.

        Args:
            start: `[batch, sequence]` token ids, or `[batch, sequence, hidden size]` hidden states.
            position_ids: `[batch, sequence]`, restarting at each document.

        Returns:
            `[batch, sequence, hidden size]` hidden states.
        """
        inputs = {"input_ids": start} if self.first and not start.is_floating_point() else {"inputs_embeds": start}
        with self.source[0].route.hand_over(self.metadata) as more:
            hidden: torch.Tensor = self.decoder(
                **inputs, **more, position_ids=position_ids, use_cache=False
            ).last_hidden_state
        return hidden

    def score(self, picked: torch.Tensor, labels: torch.Tensor, share: float) -> torch.Tensor:
        """Computes the loss and, immediately, the head's gradients, so that no micro-batch stores them until backward.

        Args:
            picked: `[trained, hidden size]` hidden states that predict the trained tokens.
            labels: `[trained]` the trained tokens.
            share: factor on the summed loss.

        Returns:
            The scaled loss as fp32 `[1]`; the unscaled loss in evaluation.
        """
        head: Any = self.head
        cross_entropy, rule = self.source[0].cross_entropy, self.source[0].rule
        with torch.autocast(picked.device.type, enabled=False):
            if not torch.is_grad_enabled():
                loss, correct = cross_entropy(picked, head.weight, head.bias, labels, *rule)
                self.work.loss, self.work.correct = self.work.loss + loss, self.work.correct + correct
                return loss.reshape(1)
            # Backpropagate through the head only, up to a detached copy; `_Known` continues from its gradient later.
            leaf = picked.detach().requires_grad_()
            sources = self.work.micro_batches[self.number].get("sources")
            loss, metrics = cross_entropy(leaf, head.weight, head.bias, labels, *rule, sources)
            scaled = loss * share
            scaled.backward()
        self.work.loss = self.work.loss + loss.detach()
        self.work.by_source = self.work.by_source if sources is None else self.work.by_source + metrics
        known: torch.Tensor = _Known.apply(picked, scaled.detach().reshape(1), leaf.grad)
        return known


@dataclass(frozen=True)
class LocalStages:
    """The stages of a rank.

    Args:
        chunks: the stages of this rank, in order.
        stages: their numbers in the pipeline.
        shapes: shape of every trained weight of the full model, by name.
        dtypes: dtype of every trained weight of the full model, by name.
        trained: names and parameters of the trained weights on this rank.
        tied: name of the trained weight that is both embedding and output head; None if there is none.
        hidden_size: size of the hidden states between stages.
        dtype: dtype of the embedding weight.
        total_numel: elements of these stages' weights before tensor parallelism.
        layers: the decoder layers of each stage of the pipeline.
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
    """Splits the model of a `LossModule` in place and returns this rank's stages.

    Args:
        loss: the unwrapped loss module with its weights; tensor parallelism may have split it already.
        schedule: one of `SCHEDULES`.
        ranks: number of ranks in the pipeline.
        rank: index of this rank in it.
        work: state shared by the stages.

    Raises:
        ConfigError: if the model cannot be split into these stages.
    """
    base, model = loss.base, loss.model
    decoder, head, embedding = decoder_of(base), base.get_output_embeddings(), base.get_input_embeddings()
    layers = split_layers(loss, schedule, ranks)
    stages, total = stages_of(schedule, ranks, rank), len(layers)
    # Record names, shapes and dtypes of the full model before any of its modules are removed.
    slices = loss.tensor.slices if loss.tensor else {}
    weights, tied, dtype = list(model.named_parameters()), tied_weight(loss), embedding.weight.dtype
    full_shapes = {name: slices.get(name, weight).shape for name, weight in weights}
    shapes = {name: full_shapes[name] for name, weight in weights if weight.requires_grad}
    dtypes = {name: weight.dtype for name, weight in weights if weight.requires_grad}
    # Build each stage as a copy of the decoder that shares the weights of its layers.
    chunks, token_shards = [], loss.tensor.shards if loss.tensor else None
    if token_shards is not None:
        token_shards.remove()
    for stage in stages:
        first, last = stage == 0, stage == total - 1
        copied = _stage(decoder, layers[stage], embedding, first, last)
        if token_shards is not None:
            token_shards.install([decoder.layers[layer] for layer in layers[stage]], final_norm(copied))
        chunks.append(Chunk(loss, copied, head if last else None, first, work))
    # Remove from the original model what no stage of this rank holds, so that its memory is freed.
    for layer in set(range(len(decoder.layers))) - {layer for stage in stages for layer in layers[stage]}:
        decoder.layers[layer] = Absent()
    if 0 not in stages:
        _replace(decoder, embedding)
    if total - 1 not in stages:
        _replace(base, head)
        _replace(decoder, final_norm(decoder))
    local = {id(weight) for weight in model.parameters()}
    trained = [(name, weight) for name, weight in weights if weight.requires_grad and id(weight) in local]
    total_numel = sum(full_shapes[name].numel() for name, weight in weights if id(weight) in local)
    size = int(base.config.get_text_config().hidden_size)
    return LocalStages(chunks, stages, shapes, dtypes, trained, tied, size, dtype, total_numel, layers)


def split_layers(loss: Any, schedule: str, ranks: int) -> list[range]:
    """Assigns decoder layers to stages, balanced by their matrix products.

    Args:
        loss: the `LossModule`; its weights may be on the meta device.
        schedule: one of `SCHEDULES`.
        ranks: number of ranks in the pipeline.

    Returns:
        The decoder layers of each stage, first stage first.

    Raises:
        ConfigError: if the model cannot be split by layers, or has too few of them.
    """
    decoder, head = decoder_of(loss.base), loss.base.get_output_embeddings()
    _refuse_unsplittable_layers(loss, decoder, head)
    share = expert_share(loss.base.config.get_text_config())
    layer_cost = sum(sum(matmul_parameters(layer, share)) for layer in decoder.layers) / len(decoder.layers)
    head_cost = head.in_features * head.out_features
    try:
        layers = balance(len(decoder.layers), ranks * SCHEDULES[schedule].chunks, layer_cost, head_cost)
    except ValueError as error:
        raise ConfigError(
            f"pp_size={ranks} with pp_schedule={schedule}: {error}, so a smaller pp_size or another schedule"
        ) from None
    _refuse_frozen_stages(loss, layers)
    return layers


def _refuse_frozen_stages(loss: Any, layers: list[range]) -> None:
    """Raises ConfigError if a stage trains nothing: it would have no gradient to send, and no optimizer."""
    decoder, last = decoder_of(loss.base), len(layers) - 1
    outside = {0: [loss.base.get_input_embeddings()], last: [final_norm(decoder), loss.base.get_output_embeddings()]}
    for stage, numbers in enumerate(layers):
        parts = [*(decoder.layers[number] for number in numbers), *outside.get(stage, [])]
        if not any(weight.requires_grad for part in parts for weight in part.parameters()):
            problem = f"pipeline stage {stage} of {len(layers)} (layers {numbers.start} to {numbers.stop - 1})"
            raise ConfigError(f"{problem} trains nothing; freeze less, adapt more, or use another strategy")


def tied_weight(loss: Any) -> str | None:
    """Name of the trained weight that is both embedding and output head; None if there is none."""
    weight: Any = getattr(loss.base.get_output_embeddings(), "weight", None)
    tied = weight is not None and weight is getattr(loss.base.get_input_embeddings(), "weight", None)
    if not tied or not weight.requires_grad:
        return None
    return next(name for name, parameter in loss.model.named_parameters() if parameter is weight)


def refuse_tied_shards(loss: Any, schedule: str) -> None:
    """Raises ConfigError if one rank would hold a tied weight in two stages: FSDP 2 cannot shard it twice."""
    if SCHEDULES[schedule].turns and tied_weight(loss) is not None:
        raise ConfigError(
            f"pp_schedule={schedule} puts embedding and head on one rank, and this model ties them, which FSDP cannot "
            "shard; use zero_bubble, or data parallel without dp_shard"
        )


def refuse_unsplittable_family(kind: str) -> None:
    """Raises ConfigError for a `model_type` without support for pipeline stages."""
    if kind not in FAMILIES:
        raise _unsplittable(kind)


def _unsplittable(kind: str) -> ConfigError:
    known = ", ".join(sorted(FAMILIES))
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
    listed = isinstance(getattr(decoder, "layers", None), nn.ModuleList)
    if not loss.chunked or not listed or final_norm(decoder) is None:
        raise _unsplittable(kind)


def _stage(decoder: Any, layers: range, embedding: nn.Module, first: bool, last: bool) -> Any:
    """A shallow copy of the decoder with only some of its layers, whose weights it shares."""
    part = copy.copy(decoder)
    part._modules = dict(decoder._modules)
    part.layers = nn.ModuleList(
        layer if index in layers else Absent(getattr(layer, "attention_type", None))
        for index, layer in enumerate(decoder.layers)
    )
    if not last:
        _replace(part, final_norm(decoder))
    if first:
        return part
    _replace(part, embedding)
    if hasattr(part, "embed_dropout"):
        part.embed_dropout = nn.Identity()
    if hasattr(part, "embedding_multiplier"):  # Granite scales any input, also hidden states
        part.embedding_multiplier = 1.0
    return part


def final_norm(decoder: Any) -> nn.Module | None:
    """The final norm, after the last layer; None if it is not found."""
    return next((decoder._modules[name] for name in _NORMS if decoder._modules.get(name) is not None), None)


def _replace(parent: Any, child: Any) -> None:
    for name, module in list(parent._modules.items()):
        if module is child:
            setattr(parent, name, Absent())


class PipelineStages(nn.Module):
    """Runs each of a rank's stages on synthetic hidden states, to probe the model without communication.

    Args:
        loss: the module that was split; it provides the names of the weights.
        chunks: the stages of this rank.
        hidden_size: size of the hidden states.
        dtype: dtype of the hidden states.
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
        """Returns a meaningless loss; for arguments and results, see `LossModule.forward`."""
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
