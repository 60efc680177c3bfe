"""The ranks of tests/unit/parallel/test_tensor_parallel.py: one launch checks many models against one process."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

from tests.rounding import ORDERS, STEADY, bound, relative, reordered
from tests.unit.objectives.test_sft_loss import HostSyncs
from trainers.checkpoint.checkpoint import Checkpoints
from trainers.config.validation import build
from trainers.data.layout import AttentionMetadata, DocumentLayout
from trainers.model.attention import KERNELS
from trainers.model.load import _keep_products
from trainers.model.rotary import choose_by_document
from trainers.objectives.loss_module import LossModule
from trainers.parallel import tensor as tensor_parallel
from trainers.parallel import tensor_loss, tensor_sequence
from trainers.parallel.fsdp import FullySharded
from trainers.parallel.norm import clip_grad_norm
from trainers.parallel.ranks import Ranks
from trainers.parallel.replicated import Replicated
from trainers.parallel.shards import WEIGHT, TensorSlice, check_coverage, gather_full_tensors
from trainers.run.compatibility import plain
from trainers.run.manifest import Origin, Progress
from trainers.strategy.mesh import Mesh, MeshSizes

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 4},
    "qwen3": {"tie_word_embeddings": True},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "phi": {"hidden_size": 64, "num_key_value_heads": 8},
}
FAMILIES = [
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3"),
    *("olmo", "olmo2", "smollm3", "granite", "cohere"),
]
ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0,
                                                                  "factor": 4.0}},
    "longrope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0,
                                     "original_max_position_embeddings": 8, "short_factor": [1.0] * 4,
                                     "long_factor": [1.0, 2.0, 4.0, 8.0]}},
}  # fmt: skip
"""Frequencies that depend on the length of a document: some are longer than 8 tokens, some are not."""
CONFIG = build({"model_name_or_path": "embedded", "dataset_name": "embedded", **STEADY})
CPU = torch.device("cpu")


def whole_loss(family: str, lora: bool = False, dtype: torch.dtype = torch.float32, **more: Any) -> LossModule:
    """A small random model with its loss, the same on every rank."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **EXTRA.get(family, {}), **more})
    kernel = "eager" if family == "gemma2" else "documents"
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=KERNELS[kernel])
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, weight in model.named_parameters():  # biases and second factors of adapters are zero otherwise
        nn.init.normal_(weight, mean=1.0 if "norm" in name else 0.0, std=0.15)
    return LossModule(model.to(dtype))


def batches(seed: int = 0) -> list[dict[str, Any]]:
    """Two micro-batches: packed documents, and rows of one document."""
    made = torch.Generator().manual_seed(seed)
    packed = torch.randint(3, 97, (2, 13), generator=made)
    starts = [0, 6, 13, 16, 26]
    place = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)]).view(2, 13)
    trained = torch.tensor([i for i in range(25) if i + 1 not in starts])
    first = {"input_ids": packed, "position_ids": place, "documents": DocumentLayout.of(np.array(starts), 2),
             "positions": trained, "labels": packed.flatten()[trained + 1]}  # fmt: skip
    rows = torch.randint(0, 97, (3, 8), generator=made)  # with the padding token, whose embedding gets no gradient
    chosen = torch.tensor([0, 1, 5, 9, 18])
    second = {"input_ids": rows, "position_ids": torch.arange(8).expand(3, 8), "documents": None,
              "positions": chosen, "labels": rows.flatten()[chosen + 1]}  # fmt: skip
    return [first, second]


def gradients(module: nn.Module, loss: LossModule, micro: list[dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """Summed loss and accumulated gradients by name."""
    total = 0.0
    for one in micro:
        value, _ = module(**one)
        total += float(value.detach())
        (value * 0.01).backward()
    return total, {name: one.grad.clone() for name, one in loss.model.named_parameters() if one.requires_grad}


def together(parts: dict[str, torch.Tensor], cuts: dict[str, TensorSlice], group: Any) -> tuple[dict[str, Any], bool]:
    """Whole tensors out of every rank's part, and whether what is not cut has the same bits on all."""
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, ({k: v.clone() for k, v in parts.items()}, cuts), group=group)
    made, alike = {}, True
    for name, part in parts.items():
        if name not in cuts:
            made[name] = part
            alike &= all(torch.equal(part, other[name]) for other, _ in found)
            continue
        made[name] = torch.full(cuts[name].shape, torch.nan, dtype=part.dtype)
        for other, boxes in found:
            made[name][boxes[name].slices] = other[name]
    return made, alike


def one_process(loss: LossModule, micro: list[dict[str, Any]], limit: float | None = None) -> dict[str, Any]:
    """Loss, gradients, their norm, and what clipping leaves of them.

    Args:
        limit: of the norm; None for half of it.
    """
    total, found = gradients(loss, loss, micro)
    trained = {name: one for name, one in loss.model.named_parameters() if one.requires_grad}
    limit = limit or 0.5 * float(nn.utils.get_total_norm(list(found.values())))
    norm = float(nn.utils.clip_grad_norm_(list(trained.values()), limit))
    clipped = {name: one.grad for name, one in trained.items()}
    return {"loss": total, "gradients": found, "norm": norm, "clipped": clipped, "limit": limit}


def apart(mine: Any, wanted: Any) -> float:
    """The relative difference of two numbers; of tensors by name, the largest."""
    if isinstance(wanted, dict):
        return max(relative(mine[name], one) for name, one in wanted.items())
    return abs(mine / wanted - 1)


def model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Of a model without its loss."""
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    return {**inputs, "attention_metadata": AttentionMetadata(batch["documents"])}


def compared(whole: LossModule, group: Any) -> dict[str, Any]:
    """One model, whole and cut: loss, gradients, what is counted in evaluation, norm and clipped gradients."""
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    loss = copy.deepcopy(whole)
    cuts = tensor_parallel.split_model(loss, group, rank, size)
    with torch.no_grad():
        guessed = batches()[0]
        logits = whole.model(**model_inputs(guessed)).logits
        guessed["labels"][::2] = logits.flatten(0, 1)[guessed["positions"][::2]].argmax(-1)
        counted = [int(module(**guessed)[1]) for module in (whole, loss)]
    controls = [copy.deepcopy(whole) for _ in ORDERS]
    wanted = one_process(whole, batches())
    bounds = dict.fromkeys(("loss", "gradients", "norm", "clipped"), 0.0)
    for order, control in zip(ORDERS, controls, strict=True):
        with reordered(order):
            other = one_process(control, batches()[::-1], wanted["limit"])
        bounds = {name: max(value, bound(apart(other[name], wanted[name]))) for name, value in bounds.items()}
    got, mine = gradients(loss, loss, batches())
    found, alike = together(mine, cuts, group)
    trained = [(name, one) for name, one in loss.model.named_parameters() if one.requires_grad]
    norm = float(clip_grad_norm(trained, cuts, group, wanted["limit"]))
    clipped, _ = together({name: one.grad for name, one in trained}, cuts, group)
    return {
        "loss": apart(got, wanted["loss"]),
        "gradients": {name: relative(found[name], one) for name, one in wanted["gradients"].items()},
        "clipped": apart(clipped, wanted["clipped"]),
        "norm": apart(norm, wanted["norm"]),
        "bounds": bounds,
        "counted": counted,
        "alike": alike,
        "shares": loss.tensor.shards is not None,
        "here": sum(one.numel() for one in loss.parameters()) / sum(one.numel() for one in whole.parameters()),
        "cut": sorted(cuts),
    }


def exact(group: Any) -> dict[str, float]:
    """fp64: every kind of layer (Phi, whose norms are fp64 too), and the loss with scale, cap and bias."""
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    whole = whole_loss("phi", dtype=torch.float64)
    loss = copy.deepcopy(whole)
    cuts = tensor_parallel.split_model(loss, group, rank, size)
    one = batches()[0]
    logits = whole.model(**model_inputs(one)).logits.flatten(0, 1)
    functional.cross_entropy(logits[one["positions"]], one["labels"], reduction="sum").backward()
    hidden = loss.base.get_decoder()(**model_inputs(one)).last_hidden_state
    head = loss.base.get_output_embeddings()
    loss.cross_entropy(hidden.flatten(0, 1)[one["positions"]], head.weight, head.bias, one["labels"])[0].backward()
    found, _ = together({name: weight.grad for name, weight in loss.model.named_parameters()}, cuts, group)
    model = max(relative(found[name], weight.grad) for name, weight in whole.model.named_parameters())

    torch.manual_seed(2)
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((150, 8), (11, 8), (11,))]
    labels = torch.randint(0, 11, (150,))
    hidden, weight, bias = leaves
    start, stop = 11 * rank // size, 11 * (rank + 1) // size
    with mock.patch.object(tensor_loss.sft, "LOGITS_PER_CHUNK", 1):
        got, _ = tensor_loss.vocabulary_cross_entropy(
            hidden, weight[start:stop], bias[start:stop], labels, 0.7, 5.0, group=group, start=start, vocab_size=11
        )
    mine = torch.autograd.grad(got * 1.5, leaves)
    capped = torch.tanh((hidden @ weight.t() + bias) * 0.7 / 5.0) * 5.0
    plain_loss = functional.cross_entropy(capped, labels, reduction="sum")
    wanted = torch.autograd.grad(plain_loss * 1.5, leaves)
    for summed in mine[1:]:
        distributed.all_reduce(summed, group=group)
    worst = max(relative(a, b) for a, b in zip(mine, wanted, strict=True))
    return {"model": model, "loss": max(worst, abs(float(got.detach() / plain_loss.detach()) - 1))}


def without_rows(group: Any) -> float:
    """The gradients' largest value where no token is trained; every rank still takes part."""
    loss = whole_loss("qwen3")
    tensor_parallel.split_model(loss, group, distributed.get_rank(group), distributed.get_world_size(group))
    nothing, one = torch.zeros(0, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    value, _ = loss(one, one, None, nothing, nothing)
    value.backward()
    return float(value) + max(float(weight.grad.abs().max()) for weight in loss.parameters())


def spent(group: Any, lora: bool = False) -> dict[str, Any]:
    """What a micro-batch and a clip cost: collectives by name, and how often a GPU's host would wait."""
    loss = whole_loss("llama", lora)
    cuts = tensor_parallel.split_model(loss, group, distributed.get_rank(group), distributed.get_world_size(group))
    trained = [(name, one) for name, one in loss.model.named_parameters() if one.requires_grad]
    counts: dict[str, int] = {}

    def counting(name: str) -> Any:
        real = getattr(distributed, name)

        def counted(*inputs: Any, **rest: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return real(*inputs, **rest)

        return mock.patch.object(distributed, name, counted)

    named = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")
    with ExitStack() as stack, HostSyncs() as seen:
        for name in named:
            stack.enter_context(counting(name))
        (loss(**batches()[0])[0] * 0.01).backward()
        passes = dict(counts)
        clip_grad_norm(trained, cuts, group, 1e-3)
    return {"passes": passes, "all": counts, "waits": seen.names}


@contextmanager
def broken(what: str) -> Iterator[None]:
    """A mistake that tensor parallelism could make."""
    ours = tensor_parallel._Splitter
    if what == "q_norm is not summed":
        with mock.patch.object(ours, "share", return_value=None):
            yield
    elif what == "a block's input is not copied":
        alone = staticmethod(lambda ctx, upstream: (ctx.shards.own(upstream, fill=False), None))
        with mock.patch.object(tensor_sequence._EnterBlock, "backward", alone):
            yield
    elif what == "nothing is divided between blocks":
        with mock.patch.object(tensor_parallel, "norms_between", return_value=None):
            yield
    elif what == "the loss is counted on every rank":
        entropy = tensor_parallel.vocabulary_cross_entropy

        def twice(*inputs: Any, group: Any, **rest: Any) -> Any:
            value, correct = entropy(*inputs, group=group, **rest)
            return tensor_parallel._Reduce.apply(value, group), correct

        with mock.patch.object(tensor_parallel, "vocabulary_cross_entropy", twice):
            yield


class Accelerating:
    """What a backend asks of an Accelerator, with the wrapper of our choice."""

    def __init__(self, wrap: Any = None):
        self.device, self.num_processes, self.scaler, self.ddp_handler, self.wrap = CPU, 1, None, None, wrap

    def prepare(self, loss: nn.Module, optimizer: Any) -> Any:
        return self.wrap(loss) if self.wrap else loss, optimizer

    def unscale_gradients(self) -> None:
        """fp32 has nothing to scale back."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip_grad_norm_(self, weights: list[nn.Parameter], limit: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(weights, limit)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        yield


def trained_steps(backend: Any, micro: list[dict[str, Any]], scale: float, steps: int = 4) -> list[float]:
    """Some updates; the norms before clipping."""
    norms = []
    for _ in range(steps):
        for one in micro:
            backend.backward(backend.model(**one)[0] * scale)
        norms.append(float(backend.clip_grad_norm(1.0)))
        backend.step()
    return norms


def put_together(backend: Any, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Every tensor that a checkpoint would hold, on every rank."""
    shards = backend.shards()
    check_coverage(shards, ranks)
    steps = {one.name: one.step for one in shards if one.step is not None}
    mine = {
        (name, key): one.clone()
        for name, key, owner, one in gather_full_tensors(shards, steps, ranks)
        if one is not None
    }
    return {f"{name}.{key}": one for part in ranks.gather(mine) for (name, key), one in part.items()}


def filled_back(backend: Any, whole: dict[str, torch.Tensor], ranks: Ranks) -> bool:
    """Whether shards put together, wiped out and filled again are what they were, bit for bit."""
    shards = backend.shards()
    before = [one.copied() for one in shards]
    for one in shards:
        for key, part in one.tensors.items():
            part.fill_(-1)
            one.fill(key, whole[f"{one.name}.{key}"])
    backend.write_shards(shards)
    return all(ranks.gather(all(torch.equal(a.tensors[key], b.tensors[key]) for a, b in
                                zip(before, backend.shards(), strict=True) for key in a.tensors)))  # fmt: skip


def furthest(norms: list[float], expected: list[float]) -> float:
    """The largest relative difference of gradient norms."""
    return max(abs(a / b - 1) for a, b in zip(norms, expected, strict=True))


def weights_apart(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of weights."""
    return max(relative(mine[name], one) for name, one in expected.items() if name.endswith(f".{WEIGHT}"))


def mixed(mesh: DeviceMesh, family: str, how: str, folder: Path) -> dict[str, Any]:
    """TP alone (2 ranks) or with DDP, FSDP 2 or HSDP (4 ranks): steps, checkpoint, and the way back from it.

    Args:
        mesh: of `dp_replicate`, `dp_shard` and `tp`.
    """
    ranks = Ranks(CPU)
    dp, place = mesh.size() // 2, ranks.rank // 2
    alone = Replicated(whole_loss(family), CONFIG, Accelerating())
    wanted = trained_steps(alone, batches(), 0.01)
    expected = put_together(alone, Ranks.__new__(Alone))
    backend = spread(whole_loss(family), mesh, how)
    share = batches() if dp == 1 else [batches()[place]]
    got = trained_steps(backend, share, 0.01 * dp)
    whole = put_together(backend, ranks)
    spreads = {"norms": 0.0, "weights": 0.0}
    for order in ORDERS:
        control = Replicated(whole_loss(family), CONFIG, Accelerating())
        with reordered(order):
            other = trained_steps(control, batches()[::-1], 0.01)
        spreads["norms"] = max(spreads["norms"], furthest(other, wanted))
        spreads["weights"] = max(
            spreads["weights"], weights_apart(put_together(control, Ranks.__new__(Alone)), expected)
        )
    report = {
        "bounds": {name: bound(one) for name, one in spreads.items()},
        "norms": furthest(got, wanted),
        "names": sorted(whole) == sorted(expected),
        "weights": weights_apart(whole, expected),
        "filled": filled_back(backend, whole, ranks),
        "held": list(backend.local_and_total_numel()),
        "whole": sum(one.numel() for one in whole_loss(family).parameters()),
    }
    store = Checkpoints(folder / f"{family}-{how}", ranks, Origin(how, plain(CONFIG), "data"))
    store.begin(backend, {}, Progress(step=4))
    store.finish()
    again = whole_loss(family)
    with torch.no_grad():
        for weight in again.parameters():
            weight.zero_()
    store.load(store.path(4), again.model)
    report["loaded"] = all(torch.equal(one, whole[f"{n}.{WEIGHT}"]) for n, one in again.model.named_parameters())
    other = spread(again, mesh, how)
    store.restore(store.path(4), other, seed=0)
    back = put_together(other, ranks)
    report["restored"] = all(torch.equal(back[name], whole[name]) for name in whole)
    return report


class Alone(Ranks):
    """One process that asks nobody."""

    rank, world, grouped, device = 0, 1, False, CPU


def spread(loss: LossModule, mesh: DeviceMesh, how: str) -> Any:
    """A backend as a run would have it, built without an Accelerator."""
    place = mesh["tp"]
    tensor_parallel.split_model(loss, place.get_group(), place.get_local_rank(), place.size())
    if how == "tp":
        return Replicated(loss, CONFIG, Accelerating())
    if how == "tp_ddp":
        group = mesh["dp_replicate"].get_group()
        return Replicated(loss, CONFIG, Accelerating(lambda one: DistributedDataParallel(one, process_group=group)))

    parts = mesh["dp_shard"] if how == "tp_fsdp2" else mesh["dp_replicate", "dp_shard"]

    def shard(one: LossModule) -> None:
        for layer in one.base.get_decoder().layers:
            fully_shard(layer, mesh=parts)
        fully_shard(one, mesh=parts)

    wrapped = SimpleNamespace(fsdp_plugin=SimpleNamespace(cpu_offload=None))
    made = Accelerating()
    made.state, made.is_fsdp2 = wrapped, True

    def prepare(one: Any, unused: Any) -> Any:
        shard(one)
        return one, unused

    made.prepare = prepare
    with mock.patch("trainers.parallel.fsdp._set_wrap_policy"):
        sizes = MeshSizes(dp_replicate=mesh["dp_replicate"].size(), dp_shard=mesh["dp_shard"].size(), tp=place.size())
        return FullySharded(loss, CONFIG, made, Ranks(CPU), Mesh(sizes, distributed.get_rank(), "cpu"))


def check_two(group: Any) -> dict[str, Any]:
    """All that two ranks are asked for."""
    found: dict[str, Any] = {family: compared(whole_loss(family), group) for family in FAMILIES}
    for family in ("llama", "qwen3", "phi", "phi3"):
        found[f"{family}-lora"] = compared(whole_loss(family, lora=True), group)
    spare = whole_loss("qwen3")
    spare.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found["checkpointing"] = compared(spare.train(), group)
    spare = whole_loss("llama")
    choices = {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _keep_products)}
    spare.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=choices)
    found["selective"] = compared(spare.train(), group)
    with broken("nothing is divided between blocks"):
        found["plain"] = compared(whole_loss("qwen3"), group)
        found["plain-lora"] = compared(whole_loss("phi", lora=True), group)
    for kind, changes in ROPE.items():
        spare, stock = (whole_loss("llama", **changes) for _ in range(2))
        choose_by_document(spare.base)
        by_longest, by_document = (one_process(copy.deepcopy(one), batches())["loss"] for one in (stock, spare))
        found[kind] = compared(spare, group) | {"by longest": apart(by_longest, by_document)}
    for what in ("q_norm is not summed", "a block's input is not copied", "the loss is counted on every rank"):
        with broken(what):
            found[what] = compared(whole_loss("qwen3"), group)
    costs = {"spent": spent(group), "spent-lora": spent(group, lora=True)}
    return found | costs | {"exact": exact(group), "without rows": without_rows(group)}


def main(store: str, rank: str, world: str, out: str) -> None:
    """One rank; the first one writes what was found."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    folder, group = Path(out).parent, distributed.group.WORLD
    if world == "2":
        found = check_two(group)
        kinds = {"tp": (1, 1, 2)}
    else:
        found = {family: compared(whole_loss(family), group) for family in ("llama", "qwen3", "gemma2", "olmo2")}
        found["qwen3-lora"] = compared(whole_loss("qwen3", lora=True), group)
        kinds = {"tp_ddp": (2, 1, 2), "tp_fsdp2": (1, 2, 2), "tp_hsdp": (2, 1, 2)}
    for how, sizes in kinds.items():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
        found |= {f"{one}-{how}": mixed(mesh, one, how, folder) for one in ("qwen3", "llama")}
    if rank == "0":
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
