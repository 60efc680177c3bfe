"""What a training step sends, from the model's sizes and the mesh alone. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from trainers.strategy.mesh import MeshSizes

FP32 = 4
TokenCounts = Sequence[int]
"""Of a micro-batch on one rank: token slots, and trained tokens."""


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model.

    Args:
        parameters: all of them; a tied weight counts once.
        vectors: those of them in weights of one dimension, which tensor parallelism leaves whole.
        outside: those outside the layers: embedding, last norm, head.
        tied: embedding and head are one weight.
        trained_share: share of the parameters that get gradients.
        gradient_bytes: bytes of a number of those.
        gathered_bytes: bytes of a parameter where weights are gathered, the mean.
        matmul_bytes: bytes of an element that a matrix product returns.
        hidden_bytes: bytes of an element of the hidden states.
    """

    parameters: int
    vectors: int
    outside: int
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_size: int
    vocab_size: int
    tied: bool
    trained_share: float = 1.0
    gradient_bytes: float = FP32
    gathered_bytes: float = FP32
    matmul_bytes: int = FP32
    hidden_bytes: int = FP32

    @classmethod
    def of(cls, model: Any) -> ModelSizes:
        """The sizes of a transformers model, all of it trained in fp32."""
        weights, config = dict(model.named_parameters()), model.config.get_text_config()
        return cls(
            sum(weight.numel() for weight in weights.values()),
            sum(weight.numel() for weight in weights.values() if weight.ndim == 1),
            sum(weight.numel() for name, weight in weights.items() if ".layers." not in name),
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads, config.vocab_size,
            bool(config.tie_word_embeddings),
        )  # fmt: skip

    def local_parameters(self, sizes: MeshSizes) -> float:
        """Parameters that tensor and pipeline parallelism leave a rank, before FSDP; the mean over ranks."""
        full = (self.parameters - self.vectors) / sizes.tp + self.vectors
        twice = self.vocab_size * self.hidden / sizes.tp if self.tied and sizes.pp > 1 else 0
        return (full + twice) / sizes.pp


@dataclass(frozen=True)
class Term:
    """A part of a step's traffic.

    Args:
        collective: as the counted ones are called.
        formula: how it follows from the sizes.
        bytes: given by a rank in all steps; the mean over the ranks of a pipeline.
        wire: bytes that a rank then sends, in the best algorithm there is.
    """

    collective: str
    formula: str
    bytes: float
    wire: float = 0.0


def term(collective: str, formula: str, size: float, ways: int) -> Term:
    """A part of a step's traffic among `ways` ranks."""
    shares = {"all-reduce": 2 * (ways - 1) / ways, "all-gather": ways - 1, "send": 1.0}
    return Term(collective, formula, size, size * shares.get(collective, (ways - 1) / ways))


def predicted(
    kind: str, sizes: MeshSizes, chunks: int, model: ModelSizes, steps: Sequence[Sequence[TokenCounts]], warm: int
) -> list[Term]:
    """What a rank should send in all steps after the first `warm`, by collective; nothing for what has no formula.

    Args:
        kind: the `distributed_type`, or `ZERO` and its stage, or `GRAD_OP`: FSDP that keeps what it has gathered.
        chunks: pipeline stages of each rank.
        steps: this rank's micro-batches, those of the first steps too.
    """
    counted = steps[warm:]
    micro_batches = [counts for step in counted for counts in step]
    terms = weight_terms(kind, sizes, model, len(counted), len(micro_batches))
    terms += _tensor(sizes, model, micro_batches) + _rows(sizes, model, micro_batches)
    if sizes.pp > 1:
        terms += _pipeline(kind, sizes, chunks, model, steps, warm)
    return [_together([part for part in terms if part.collective == collective]) for collective in _in_order(terms)]


def _in_order(terms: Sequence[Term]) -> list[str]:
    return list(dict.fromkeys(term.collective for term in terms))


def _together(terms: Sequence[Term]) -> Term:
    """One term for those of one collective."""
    formula = " + ".join(term.formula for term in terms)
    return Term(terms[0].collective, formula, sum(term.bytes for term in terms), sum(term.wire for term in terms))


def weight_terms(kind: str, sizes: MeshSizes, model: ModelSizes, steps: int, micro_batches: int) -> list[Term]:
    """Gradients, and gathered weights.

    FSDP keeps what is outside the layers from forward to backward, and of a pipeline's stages, reduced once in a step,
    all.
    """
    ways, copies = sizes.dp_shard * sizes.sequence_shards, sizes.dp_replicate
    local = model.local_parameters(sizes)
    reduced, full = local * model.trained_share * model.gradient_bytes, local * model.gathered_bytes
    if kind.startswith("ZERO"):
        return _zero(int(kind[-1]), reduced, ways, steps, micro_batches)
    if kind not in ("FSDP", "GRAD_OP"):
        return (
            [term("all-reduce", "weights", reduced * steps, sizes.grad_group_size)] if sizes.grad_group_size > 1 else []
        )
    if sizes.pp > 1:
        gathered, quantity, times, how = full, "weights", steps, ""
    elif kind == "GRAD_OP":
        gathered, quantity, times, how = full, "weights", micro_batches, " per micro-batch"
    else:
        outside = (model.outside - model.hidden) / sizes.tp + model.hidden
        gathered, quantity = 2 * full - outside * model.gathered_bytes, "(weights + those of layers)"
        times, how = micro_batches, " per micro-batch"
    terms = [
        term("all-gather", f"{quantity} / shards{how}", gathered / ways * times, ways),
        term("reduce-scatter", f"weights{how}", reduced * times, ways),
    ]
    if sizes.dp_replicate > 1:
        terms.append(term("all-reduce", f"weights / shards{how}", reduced / ways * times, copies))
    return terms


def _zero(stage: int, held: float, ways: int, steps: int, micro_batches: int) -> list[Term]:
    """Gradients once a step or in each micro-batch, and the updated weights. Nothing for what stage 3 gathers."""
    if stage == 3:
        return [term("reduce-scatter", "weights per micro-batch", held * micro_batches, ways)]
    times, how = (steps, "") if stage == 1 else (micro_batches, " per micro-batch")
    return [
        term("all-reduce", f"weights{how}", held * times, ways),
        term("all-gather", "weights / shards", held / ways * steps, ways),
    ]


def _tensor(sizes: MeshSizes, model: ModelSizes, micro_batches: Sequence[TokenCounts]) -> list[Term]:
    """Two sums forward and two backward in each layer, one behind the embedding; the loss: two sums and a gradient."""
    if sizes.tp == 1:
        return []
    slots, trained = (sum(counts[column] for counts in micro_batches) for column in (0, 1))
    activations = (
        slots * model.hidden * (2 * model.layers * (model.matmul_bytes + model.hidden_bytes) + model.hidden_bytes)
    )
    loss = trained * (model.hidden + 3) * FP32
    formula = "(4 x layers + 1) x activations + trained tokens x (hidden + 3)"
    return [term("all-reduce", formula, (activations + loss) / sizes.pp, sizes.tp)]


def _rows(sizes: MeshSizes, model: ModelSizes, micro_batches: Sequence[TokenCounts]) -> list[Term]:
    """In attention: heads for parts of rows and back (sp), or keys and values gathered, their gradients summed (cp)."""
    slots, terms = sum(counts[0] for counts in micro_batches), list[Term]()
    vector = slots * model.head_size * model.matmul_bytes
    heads, key_heads = model.heads // sizes.tp, model.key_heads // sizes.tp
    if sizes.sp > 1:
        exchanged = 2 * heads + 2 * lcm(key_heads, sizes.sp)
        formula = "2 x layers x (Q + K + V + output)"
        terms.append(term("all-to-all", formula, 2 * model.layers * exchanged * vector / sizes.pp, sizes.sp))
    if sizes.cp > 1:
        both = model.layers * 2 * key_heads * vector / sizes.pp
        terms.append(term("all-gather", "layers x (K + V)", both, sizes.cp))
        terms.append(
            term("reduce-scatter", "cp x layers x (K + V)", sizes.cp * both / model.matmul_bytes * FP32, sizes.cp)
        )
    return terms


def _pipeline(
    kind: str, sizes: MeshSizes, chunks: int, model: ModelSizes, steps: Sequence[Sequence[TokenCounts]], warm: int
) -> list[Term]:
    """Hidden states and their gradients at each border of stages, in buffers of the largest micro-batch so far.

    The ranks with embedding and head, where these are one weight, tell each other its gradient.
    """
    room, elements = 0, 0
    for number, step in enumerate(steps):
        room = max(room, *(counts[0] for counts in step))
        elements += len(step) * room * model.hidden if number >= warm else 0
    borders = sizes.pp * chunks - 1
    formula, sent = "2 x borders x hidden states per micro-batch", 2.0 * borders * elements * model.hidden_bytes
    if model.tied:
        shards = sizes.dp_shard if kind in ("FSDP", "GRAD_OP") else 1
        formula += ", 2 x tied weight" + (" / shards" if shards > 1 else "")
        sent += 2 * model.vocab_size * model.hidden * model.gradient_bytes / sizes.tp / shards * (len(steps) - warm)
    return [term("send", f"({formula}) / stages' ranks", sent / sizes.pp, 2)]
