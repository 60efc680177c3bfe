"""Predicts the communication of a training step from the sizes of the model and of the mesh. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm
from typing import Any

from trainers.config.options import TrainConfig
from trainers.strategy.mesh import AXES, MeshSizes
from trainers.strategy.strategy import Strategy

FP32 = 4
_BUCKET = 25 * 2**20
"""Bytes of gradients that DDP sums at once."""
PERSISTENT_BELOW = 100_000
"""Most elements of a weight that ZeRO 3 keeps gathered; DeepSpeed's default of `stage3_param_persistence_threshold`."""
_REUSED = 500_000_000
"""Weights that ZeRO 3 keeps from forward to backward: half of DeepSpeed's default `stage3_max_reuse_distance`."""
_PREFETCHED = 50_000_000
"""Elements that ZeRO 3 gathers at once, DeepSpeed's default of `stage3_prefetch_bucket_size`."""
_SHARDS = ("dp_shard", "cp", "sp")
_GRADIENTS = ("dp_replicate", *_SHARDS)
TokenCounts = Sequence[int]
"""Token slots and trained tokens of a micro-batch on one rank."""


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model.

    Args:
        parameters: Number of parameters; tied weights count once.
        vectors: Parameters in one-dimensional weights, which tensor parallelism does not shard.
        outside: Parameters outside the layers: embedding, final norm, head.
        tied: Whether embedding and head share a weight.
        trained_share: Fraction of the parameters that get gradients.
        gradient_bytes: Bytes per gradient element.
        gathered_bytes: Mean bytes per parameter in an all-gather of weights.
        casts_layers: FSDP and ZeRO 3 gather the matrices of layers in the compute dtype.
        divides_tokens: Tensor parallelism divides the tokens between blocks.
        matmul_bytes: Bytes per element of a matrix product's output.
        hidden_bytes: Bytes per element of the hidden states.
        experts: Trained parameters that expert parallelism divides; `expert_layers`, the layers that have them.
        chosen: Experts that each token uses.
        persistent: Parameters in weights of at most `PERSISTENT_BELOW` elements.
        persistent_weights: Number of those weights.
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
    casts_layers: bool = False
    divides_tokens: bool = True
    matmul_bytes: int = FP32
    hidden_bytes: int = FP32
    experts: float = 0.0
    expert_layers: int = 0
    chosen: int = 0
    persistent: float = 0.0
    persistent_weights: int = 0

    @classmethod
    def of(cls, model: Any) -> ModelSizes:
        """Returns the sizes of a transformers model, assuming that all of it is trained in fp32."""
        weights, config = dict(model.named_parameters()), model.config.get_text_config()
        persistent = [weight.numel() for weight in weights.values() if weight.numel() <= PERSISTENT_BELOW]
        return cls(
            sum(weight.numel() for weight in weights.values()),
            sum(weight.numel() for weight in weights.values() if weight.ndim == 1),
            sum(weight.numel() for name, weight in weights.items() if ".layers." not in name),
            config.num_hidden_layers, config.hidden_size, config.num_attention_heads, key_heads(config),
            head_size(config), config.vocab_size,
            bool(config.tie_word_embeddings), persistent=sum(persistent), persistent_weights=len(persistent),
        )  # fmt: skip

    def local_parameters(self, sizes: MeshSizes) -> float:
        """Returns the parameters per rank under tensor and pipeline parallelism, before FSDP; the mean over ranks."""
        full = (self.parameters - self.vectors) / sizes.tp + self.vectors
        twice = self.vocab_size * self.hidden / sizes.tp if self.tied and sizes.pp > 1 else 0
        return (full + twice) / sizes.pp


def head_size(config: Any) -> int:
    """Returns the size of an attention head, or the mean over the layers if it differs, as in Gemma 4.

    Args:
        config: transformers config of the language model.
    """
    sizes = [size or config.hidden_size // config.num_attention_heads for size in by_layer(config, "head_dim")]
    return round(sum(sizes) / len(sizes))


def key_heads(config: Any) -> int:
    """Returns the number of key heads, or the mean over the layers if it differs; `config` as for `head_size`."""
    counts = [count or config.num_attention_heads for count in by_layer(config, "num_key_value_heads")]
    return round(sum(counts) / len(counts))


def by_layer(config: Any, name: str) -> list[Any]:
    """Returns a size of each layer, or of all at once if it is the same; None without that size."""
    layers = getattr(config, "per_layer_config", None) or [config]
    sizes = [getattr(layer, name, None) for layer in layers]
    return sizes if len(set(sizes)) > 1 else sizes[:1]


@dataclass(frozen=True)
class Term:
    """One component of the traffic.

    Args:
        collective: Name of the collective, as in the measured counts.
        formula: How the size is derived, in words.
        bytes: Bytes that a rank passes to the collective in all counted steps; the mean over the ranks of a pipeline.
        wire: Bytes that a rank sends as a result, with an optimal algorithm.
        axes: Axes of the mesh that the ranks of the collective differ in; those of the first term if merged.
        calls: How often a rank calls the collective; the mean over the ranks of a pipeline.
    """

    collective: str
    formula: str
    bytes: float
    wire: float = 0.0
    axes: tuple[str, ...] = ()
    calls: float = 0.0


def term(collective: str, formula: str, size: float, ways: int, *axes: str, calls: float = 1.0) -> Term:
    """Returns the component for a collective over `ways` ranks along `axes`, of which each passes `size` bytes."""
    return Term(collective, formula, size, wire_bytes(collective, size, ways), axes, calls)


def wire_bytes(collective: str, size: float, ways: int) -> float:
    """Returns the bytes that each of `ways` ranks sends for the `size` that it passes to a collective, in a ring."""
    shares = {"all-reduce": 2 * (ways - 1) / ways, "all-gather": ways - 1, "send": 1.0}
    return size * shares.get(collective, (ways - 1) / ways)


def predicted(
    kind: str, sizes: MeshSizes, chunks: int, model: ModelSizes, steps: Sequence[Sequence[TokenCounts]], warm: int
) -> list[Term]:
    """Predicts what a rank sends in all steps after warm-up, by collective; omits traffic that has no formula.

    Args:
        kind: The `distributed_type`, `ZERO` followed by the stage, or `GRAD_OP` for FSDP without resharding after the
            forward pass.
        sizes: Sizes of the mesh.
        chunks: Pipeline stages per rank.
        model: Sizes of the model.
        steps: Micro-batches of this rank in each step, warm-up included.
        warm: Number of warm-up steps, which are not counted.
    """
    counted = steps[warm:]
    terms = weight_terms(kind, sizes, model, len(counted), sum(map(len, counted)))
    terms += activation_terms(kind, sizes, chunks, model, steps, warm)
    return [_together([part for part in terms if part.collective == collective]) for collective in _in_order(terms)]


def activation_terms(
    kind: str, sizes: MeshSizes, chunks: int, model: ModelSizes, steps: Sequence[Sequence[TokenCounts]], warm: int
) -> list[Term]:
    """Returns the traffic of activations and their gradients along all other axes; arguments as for `predicted`."""
    micro_batches = [counts for step in steps[warm:] for counts in step]
    terms = _tensor(sizes, model, micro_batches) + _rows(sizes, model, micro_batches)
    terms += _experts(sizes, model, micro_batches) if sizes.ep > 1 else []
    return terms + (_pipeline(kind, sizes, chunks, model, steps, warm) if sizes.pp > 1 else [])


def _in_order(terms: Sequence[Term]) -> list[str]:
    return list(dict.fromkeys(term.collective for term in terms))


def _together(terms: Sequence[Term]) -> Term:
    """Merges the terms of one collective."""
    formula = " + ".join(term.formula for term in terms)
    sent, wire, calls = (sum(getattr(term, name) for term in terms) for name in ("bytes", "wire", "calls"))
    return Term(terms[0].collective, formula, sent, wire, terms[0].axes, calls)


def casts_before_gathers(strategy: Strategy, config: TrainConfig) -> bool:
    """Whether FSDP and ZeRO 3 gather the matrices of layers in the compute dtype, if the model's layers allow it.

    See `trainers/model/casts.py`. Layers with experts do not.
    """
    sizes = strategy.sizes
    alone = strategy.sharded and sizes.tp * sizes.pp == 1 and not config.torch_compile
    half = config.mixed_precision in ("bf16", "fp16") and config.master_weights
    return alone and half and config.method == "full"


def weight_terms(kind: str, sizes: MeshSizes, model: ModelSizes, steps: int, micro_batches: int) -> list[Term]:
    """Returns the traffic of gradients and gathered weights.

    FSDP keeps the weights outside the layers gathered from forward to backward. Under pipelining it keeps all weights
    of a stage gathered, and reduces gradients once per step.
    """
    ways, copies = sizes.dp_shard * sizes.sequence_shards, sizes.dp_replicate
    local = model.local_parameters(sizes)
    reduced, full = local * model.trained_share * model.gradient_bytes, local * model.gathered_bytes
    if kind.startswith("ZERO"):
        if kind == "ZERO3":
            if model.casts_layers:
                cast = (model.parameters - model.outside) / model.parameters
                model = replace(model, gathered_bytes=model.gathered_bytes * (1 - cast) + model.matmul_bytes * cast)
                full = local * model.gathered_bytes
            return _zero3(model, reduced, full, ways, steps, micro_batches)
        return _zero(int(kind[-1]), reduced, ways, steps, micro_batches)
    if kind not in ("FSDP", "GRAD_OP"):
        if sizes.grad_group_size == 1:
            return []
        if sizes.ep > 1:
            return _divided(sizes, model, reduced, steps)
        buckets = ceil(reduced / _BUCKET) * steps
        return [term("all-reduce", "weights", reduced * steps, sizes.grad_group_size, *_GRADIENTS, calls=buckets)]
    # FSDP. Default: layers are gathered twice per micro-batch (forward and backward), all other weights once. Each
    # layer is a unit, all other weights another.
    layers, again = model.layers / sizes.pp, 0.0
    outside = (model.outside - model.hidden) / sizes.tp + model.hidden
    if model.casts_layers:
        layers *= 2
        full -= (local - outside) * (model.gathered_bytes - model.matmul_bytes)
    if sizes.pp > 1:
        gathered, quantity, times, how = full, "weights", steps, ""
    elif kind == "GRAD_OP":
        gathered, quantity, times, how = full, "weights", micro_batches, " per micro-batch"
    else:
        again = layers
        gathered, quantity = 2 * full - outside * model.gathered_bytes, "(weights + those of layers)"
        times, how = micro_batches, " per micro-batch"
    units = (layers + 1) * times
    terms = [
        term("all-gather", f"{quantity} / shards{how}", gathered / ways * times, ways, *_SHARDS,
             calls=units + again * times),
        term("reduce-scatter", f"weights{how}", reduced * times, ways, *_SHARDS, calls=units),
    ]  # fmt: skip
    if sizes.dp_replicate > 1:  # once per step
        among, calls = reduced / ways * steps, (layers + 1) * steps
        terms.append(term("all-reduce", "weights / shards", among, copies, "dp_replicate", calls=calls))
    return terms


def teacher_terms(kind: str, sizes: MeshSizes, size: float, layers: int, micro_batches: int) -> list[Term]:
    """Returns the traffic of a teacher's weights, which are gathered for its forward pass where they are sharded.

    Args:
        kind: As for `predicted`.
        sizes: Sizes of the mesh.
        size: Bytes of its weights, of the part that tensor parallelism leaves a rank.
        layers: Number of its layers.
        micro_batches: Number of micro-batches.
    """
    ways = sizes.dp_shard * sizes.sequence_shards
    if kind not in ("FSDP", "GRAD_OP", "ZERO3"):
        return []
    gathered, calls = size / ways * micro_batches, (layers + 1) * micro_batches
    return [term("all-gather", "teacher's weights / shards per micro-batch", gathered, ways, *_SHARDS, calls=calls)]


def muon_terms(kind: str, sizes: MeshSizes, counts: Mapping[str, float]) -> list[Term]:
    """Returns the traffic of Muon in a step: each matrix is summed on a rank in turn, and its update sent to all.

    Args:
        kind: As for `predicted`.
        sizes: Sizes of the mesh.
        counts: `hidden_matrices` of the model, and the `hidden_matrix_weights` in them.
    """
    matrices, size = counts.get("hidden_matrices", 0.0), counts.get("hidden_matrix_weights", 0.0) * FP32
    divided = kind in ("FSDP", "GRAD_OP") or kind.startswith("ZERO") or sizes.tp * sizes.pp > 1
    if sizes.world == 1 or not matrices:
        return []
    terms = [term("broadcast", "matrices", size, sizes.world, *AXES, calls=matrices)]
    if divided:
        terms.append(term("reduce", "matrices", size, sizes.world, *AXES, calls=matrices))
    return terms


def _divided(sizes: MeshSizes, model: ModelSizes, reduced: float, steps: int) -> list[Term]:
    """Gradients of divided experts, among the ranks that hold the same, and those of all other weights.

    Args:
        reduced: Bytes of all gradients.
    """
    experts, copies = model.experts * model.gradient_bytes, sizes.dp_replicate // sizes.ep
    others = reduced - experts
    calls = ceil(others / _BUCKET) * steps
    terms = [term("all-reduce", "weights but experts", others * steps, sizes.grad_group_size, *_GRADIENTS, calls=calls)]
    if copies > 1 and experts:
        calls = 2 * model.expert_layers * steps
        terms.append(
            term("all-reduce", "experts / ep", experts / sizes.ep * steps, copies, "dp_replicate", calls=calls)
        )
    return terms


def _experts(sizes: MeshSizes, model: ModelSizes, micro_batches: Sequence[TokenCounts]) -> list[Term]:
    """Tokens sent to their experts and back, and the gradients of both; as many to each rank, if routing is even."""
    slots = sum(counts[0] for counts in micro_batches)
    sent = 4 * model.expert_layers * slots * model.chosen * model.hidden * model.hidden_bytes
    calls = 5 * model.expert_layers * len(micro_batches)  # the counts of tokens are sent once more
    formula = "4 x layers x experts per token x hidden states"
    return [term("all-to-all", formula, sent, sizes.ep, "ep", calls=calls)]


def _zero(stage: int, held: float, ways: int, steps: int, micro_batches: int) -> list[Term]:
    """Gradients, per step or per micro-batch, each summed on the rank that has its share; and updated weights."""
    times, how = (steps, "") if stage == 1 else (micro_batches, " per micro-batch")
    return [
        term("reduce", f"weights{how}", held * times, ways, *_SHARDS, calls=ways * times),
        # The weights with and those without weight decay.
        term("all-gather", "weights / shards", held / ways * steps, ways, *_SHARDS, calls=2 * steps),
    ]


def _zero3(model: ModelSizes, reduced: float, full: float, ways: int, steps: int, micro_batches: int) -> list[Term]:
    """Small weights are gathered after the update, all others before their use: once, if the backward pass is near.

    Args:
        reduced: Bytes of all gradients.
        full: Bytes of all weights on a rank, gathered.
    """
    narrow = model.matmul_bytes if model.casts_layers else model.gathered_bytes
    persistent = full / model.gathered_bytes * narrow * model.persistent / model.parameters
    again = max(0.0, full - persistent - _REUSED * model.gathered_bytes)
    gathered = (persistent * steps + (full - persistent + again) * micro_batches) / ways
    buckets = 1 + ceil((full - persistent + again) / model.gathered_bytes / _PREFETCHED)
    formula = "(" + "2 x " * (again > 0) + "large weights per micro-batch + small weights) / shards"
    calls = model.persistent_weights * steps + buckets * micro_batches
    return [
        term("all-gather", formula, gathered, ways, *_SHARDS, calls=calls),
        term("reduce-scatter", "weights per micro-batch", reduced * micro_batches, ways, *_SHARDS, calls=micro_batches),
    ]


def _tensor(sizes: MeshSizes, model: ModelSizes, micro_batches: Sequence[TokenCounts]) -> list[Term]:
    """For each block, inputs gathered and outputs summed and scattered, and their gradients the other way round.

    One sum after the embedding, whose gradient is gathered; hidden states gathered for the head, and two sums and a
    gradient in the loss; sums of the gradients of norms. Without division of tokens, sums in place of all but the last.
    """
    if sizes.tp == 1:
        return []
    slots, trained = (sum(counts[column] for counts in micro_batches) for column in (0, 1))
    blocks, passes = 2 * model.layers, len(micro_batches) / sizes.pp
    activations, hidden = slots * model.hidden / sizes.pp, model.hidden_bytes
    loss = trained * (model.hidden + 3) * FP32 / sizes.pp
    both = blocks * activations * (model.matmul_bytes + hidden)
    if not model.divides_tokens:
        formula = "(4 x layers + 1) x activations + trained tokens x (hidden + 3)"
        summed = both + activations * hidden + loss
        return [term("all-reduce", formula, summed, sizes.tp, "tp", calls=(2 * blocks + 4) * passes)]
    # Each stage of a pipeline divides its tokens anew.
    ends = 2 * sizes.pp * activations * hidden
    vectors = model.vectors * FP32 * model.trained_share * len(micro_batches) / sizes.pp
    return [
        term("all-reduce", "activations + norms + trained tokens x (hidden + 3)", activations * hidden + vectors + loss,
             sizes.tp, "tp", calls=(blocks + 5) * passes),
        term("all-gather", "(4 x layers + 2) x activations / tp", (both + ends) / sizes.tp, sizes.tp, "tp",
             calls=(2 * blocks + 2 * sizes.pp) * passes),
        term("reduce-scatter", "4 x layers x activations", both, sizes.tp, "tp", calls=2 * blocks * passes),
    ]  # fmt: skip


def _rows(sizes: MeshSizes, model: ModelSizes, micro_batches: Sequence[TokenCounts]) -> list[Term]:
    """In attention: heads for parts of rows and back (sp), or keys and values gathered, their gradients summed (cp)."""
    slots, terms = sum(counts[0] for counts in micro_batches), list[Term]()
    passes = model.layers * len(micro_batches) / sizes.pp
    vector = slots * model.head_size * model.matmul_bytes
    heads, key_heads = model.heads // sizes.tp, model.key_heads // sizes.tp
    if sizes.sp > 1:
        exchanged = 2 * heads + 2 * lcm(key_heads, sizes.sp)
        formula = "2 x layers x (Q + K + V + output)"
        heads_sent = 2 * model.layers * exchanged * vector / sizes.pp
        terms.append(term("all-to-all", formula, heads_sent, sizes.sp, "sp", calls=8 * passes))
    if sizes.cp > 1:
        both = model.layers * 2 * key_heads * vector / sizes.pp
        back = sizes.cp * both / model.matmul_bytes * FP32
        terms.append(term("all-gather", "layers x (K + V)", both, sizes.cp, "cp", calls=passes))
        terms.append(term("reduce-scatter", "cp x layers x (K + V)", back, sizes.cp, "cp", calls=passes))
    return terms


def _pipeline(
    kind: str, sizes: MeshSizes, chunks: int, model: ModelSizes, steps: Sequence[Sequence[TokenCounts]], warm: int
) -> list[Term]:
    """Hidden states and their gradients at each stage boundary, in buffers as large as the largest micro-batch so far.

    If embedding and head are tied, the ranks that hold them also exchange the gradient of that weight.
    """
    # Buffers only grow: a micro-batch is sent in a buffer as large as the largest one up to its step.
    room, elements = 0, 0
    for number, step in enumerate(steps):
        room = max(room, *(counts[0] for counts in step))
        elements += len(step) * room * model.hidden if number >= warm else 0
    borders = sizes.pp * chunks - 1
    formula, sent = "2 x borders x hidden states per micro-batch", 2.0 * borders * elements * model.hidden_bytes
    messages = 2 * borders * sum(map(len, steps[warm:]))
    if model.tied:
        shards = sizes.dp_shard if kind in ("FSDP", "GRAD_OP") else 1
        formula += ", 2 x tied weight" + (" / shards" if shards > 1 else "")
        sent += 2 * model.vocab_size * model.hidden * model.gradient_bytes / sizes.tp / shards * (len(steps) - warm)
        messages += 2 * (len(steps) - warm)
    return [term("send", f"({formula}) / stages' ranks", sent / sizes.pp, 2, "pp", calls=messages / sizes.pp)]
