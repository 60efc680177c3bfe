"""What a training step should send, from the model's shape and the mesh alone. fp32, all weights trained, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from trainers.parallel.mesh import MeshSizes

FP32 = 4
Micro = Sequence[int]
"""Of a micro-batch on one rank: token slots, and trained tokens."""


@dataclass(frozen=True)
class Shape:
    """A model.

    Args:
        parameters: all of them; a tied weight counts once.
        vectors: those of them in weights of one dimension, which tensor parallelism leaves whole.
        outside: those outside the layers: embedding, last norm, head.
        tied: embedding and head are one weight.
    """

    parameters: int
    vectors: int
    outside: int
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_size: int
    words: int
    tied: bool

    @classmethod
    def of(cls, model: Any) -> Shape:
        """The shape of a transformers model."""
        weights, config = dict(model.named_parameters()), model.config.get_text_config()
        return cls(
            sum(one.numel() for one in weights.values()),
            sum(one.numel() for one in weights.values() if one.ndim == 1),
            sum(one.numel() for name, one in weights.items() if ".layers." not in name),
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads, config.vocab_size,
            bool(config.tie_word_embeddings),
        )  # fmt: skip

    def held(self, sizes: MeshSizes) -> float:
        """Parameters that tensor and pipeline parallelism leave a rank, before FSDP; the mean over ranks."""
        whole = (self.parameters - self.vectors) / sizes.tp + self.vectors
        twice = self.words * self.hidden / sizes.tp if self.tied and sizes.pp > 1 else 0
        return (whole + twice) / sizes.pp


@dataclass(frozen=True)
class Term:
    """A part of a step's traffic.

    Args:
        collective: as the counted ones are called.
        words: the formula.
        bytes: given by a rank in all steps; the mean over the ranks of a pipeline.
    """

    collective: str
    words: str
    bytes: float


def predicted(
    kind: str, sizes: MeshSizes, chunks: int, shape: Shape, steps: Sequence[Sequence[Micro]], warm: int
) -> list[Term]:
    """What a rank should send in all steps after the first `warm`, by collective; nothing for what has no formula.

    Args:
        kind: the `distributed_type`, or `ZERO` and its stage.
        chunks: pipeline stages of each rank.
        steps: this rank's micro-batches, those of the first steps too.
    """
    counted = steps[warm:]
    micros = [micro for step in counted for micro in step]
    found = _weights(kind, sizes, shape, len(counted), len(micros))
    found += _tensor(sizes, shape, micros) + _rows(sizes, shape, micros)
    if sizes.pp > 1:
        found += _pipeline(kind, sizes, chunks, shape, steps, warm)
    return [_together([term for term in found if term.collective == one]) for one in _in_order(found)]


def _in_order(terms: Sequence[Term]) -> list[str]:
    return list(dict.fromkeys(term.collective for term in terms))


def _together(terms: Sequence[Term]) -> Term:
    """One term for those of one collective."""
    return Term(terms[0].collective, " + ".join(term.words for term in terms), sum(term.bytes for term in terms))


def _weights(kind: str, sizes: MeshSizes, shape: Shape, steps: int, micros: int) -> list[Term]:
    """Gradients, and gathered weights.

    FSDP keeps what is outside the layers from forward to backward, and of a pipeline's stages, reduced once in a step,
    all.
    """
    held, ways = shape.held(sizes) * FP32, sizes.dp_shard * sizes.cp * sizes.sp
    if kind.startswith("ZERO"):
        return _zero(int(kind[-1]), held, ways, steps, micros)
    if kind != "FSDP":
        return [Term("all-reduce", "weights", held * steps)] if sizes.dp_replicate > 1 else []
    if sizes.pp > 1:
        gathered, what, times, how = held, "weights", steps, ""
    else:
        outside = (shape.outside - shape.hidden) / sizes.tp + shape.hidden
        gathered, what = 2 * held - outside * FP32, "(weights + those of layers)"
        times, how = micros, " per micro-batch"
    found = [
        Term("all-gather", f"{what} / shards{how}", gathered / ways * times),
        Term("reduce-scatter", f"weights{how}", held * times),
    ]
    if sizes.dp_replicate > 1:
        found.append(Term("all-reduce", f"weights / shards{how}", held / ways * times))
    return found


def _zero(stage: int, held: float, ways: int, steps: int, micros: int) -> list[Term]:
    """Gradients once a step or in each micro-batch, and the updated weights. Nothing for what stage 3 gathers."""
    if stage == 3:
        return [Term("reduce-scatter", "weights per micro-batch", held * micros)]
    times, how = (steps, "") if stage == 1 else (micros, " per micro-batch")
    return [
        Term("all-reduce", f"weights{how}", held * times),
        Term("all-gather", "weights / shards", held / ways * steps),
    ]


def _tensor(sizes: MeshSizes, shape: Shape, micros: Sequence[Micro]) -> list[Term]:
    """Two sums forward and two backward in each layer, one behind the embedding; the loss: two sums and a gradient."""
    if sizes.tp == 1:
        return []
    slots, trained = (sum(micro[place] for micro in micros) for place in (0, 1))
    activations = slots * shape.hidden * FP32
    loss = trained * (shape.hidden + 3) * FP32
    words = "(4 x layers + 1) x activations + trained tokens x (hidden + 3)"
    return [Term("all-reduce", words, ((4 * shape.layers + 1) * activations + loss) / sizes.pp)]


def _rows(sizes: MeshSizes, shape: Shape, micros: Sequence[Micro]) -> list[Term]:
    """In attention: heads for parts of rows and back (sp), or keys and values gathered, their gradients summed (cp)."""
    slots, found = sum(micro[0] for micro in micros), list[Term]()
    vector = slots * shape.head_size * FP32
    heads, key_heads = shape.heads // sizes.tp, shape.key_heads // sizes.tp
    if sizes.sp > 1:
        exchanged = 2 * heads + 2 * lcm(key_heads, sizes.sp)
        found.append(Term("all-to-all", "2 x layers x (Q + K + V + output)", 2 * shape.layers * exchanged * vector))
    if sizes.cp > 1:
        both = shape.layers * 2 * key_heads * vector
        found.append(Term("all-gather", "layers x (K + V)", both))
        found.append(Term("reduce-scatter", "cp x layers x (K + V)", sizes.cp * both))
    return found


def _pipeline(
    kind: str, sizes: MeshSizes, chunks: int, shape: Shape, steps: Sequence[Sequence[Micro]], warm: int
) -> list[Term]:
    """Hidden states and their gradients at each border of stages, in buffers of the largest micro-batch so far.

    The ranks with embedding and head, where these are one weight, tell each other its gradient.
    """
    room, elements = 0, 0
    for number, step in enumerate(steps):
        room = max(room, *(micro[0] for micro in step))
        elements += len(step) * room * shape.hidden if number >= warm else 0
    borders = sizes.pp * chunks - 1
    words, sent = "2 x borders x hidden states per micro-batch", 2.0 * borders * elements * FP32
    if shape.tied:
        shards = sizes.dp_shard if kind == "FSDP" else 1
        words += ", 2 x tied weight" + (" / shards" if shards > 1 else "")
        sent += 2 * shape.words * shape.hidden * FP32 / sizes.tp / shards * (len(steps) - warm)
    return [Term("send", f"({words}) / stages' ranks", sent / sizes.pp)]
