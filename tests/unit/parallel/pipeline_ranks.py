"""The ranks of tests/unit/parallel/test_pipeline.py: one launch checks many cases against one process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.rounding import ORDERS, STEADY, bound, relative, reordered
from tests.unit.objectives.test_sft_loss import EXTRA, TINY
from tests.unit.parallel.tensor_parallel_ranks import ROPE
from trainers.checkpoint.checkpoint import Checkpoints
from trainers.config.options import TrainConfig
from trainers.data.layout import AttentionMetadata
from trainers.data.micro_batch import MicroBatch
from trainers.data.rows import Rows
from trainers.model.attention import KERNELS
from trainers.model.lora import add_adapters
from trainers.model.rotary import choose_by_document
from trainers.objectives.loss_module import LossModule
from trainers.parallel.backend import trained_weights
from trainers.parallel.optimizer import build_optimizer, parameter_groups
from trainers.parallel.pipeline import Pipelined
from trainers.parallel.pipeline_split import Chunk
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, check_coverage, gather_full_tensors, steps_of
from trainers.parallel.tensor import split_model
from trainers.run.compatibility import plain as plain_config
from trainers.run.errors import TrainingError
from trainers.run.manifest import Origin, Progress
from trainers.strategy.mesh import Mesh, MeshSizes

STEPS, CLIP = 2, 0.5
MOMENTS = ("exp_avg", "exp_avg_sq")
MORE = {**EXTRA, "granite": {**EXTRA["granite"], "embedding_multiplier": 2.5}}


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of a pipeline beside one process."""

    family: str
    schedule: str
    packed: bool = True
    lora: bool = False
    checkpointed: bool = False
    replicas: int = 1
    sharded: bool = False
    tensor: int = 1
    half: bool = False
    rope: str = ""
    breaks: str = ""

    def stages(self, world: int) -> int:
        """Stages of a pipeline on so many ranks."""
        return world // self.replicas // self.tensor

    def layers(self, world: int) -> int:
        """Layers of its model, one more than the stages share evenly."""
        return 2 * self.stages(world) + 1

    def micro_batches(self, world: int) -> int:
        """Micro-batches of a step in each pipeline."""
        return 2 * self.stages(world) if self.stages(world) == 4 else 4

    def __str__(self) -> str:
        marks = [self.family, self.schedule, "packed" if self.packed else "unpacked"]
        marks += ["lora"] * self.lora + ["checkpointed"] * self.checkpointed + ["bf16"] * self.half
        marks += [f"fsdp{self.replicas}" if self.sharded else f"dp{self.replicas}"] * (self.replicas > 1)
        marks += [f"tp{self.tensor}"] * (self.tensor > 1)
        marks += [self.rope] * bool(self.rope)
        return "-".join([*marks, self.breaks]).rstrip("-")


class Words:
    """Documents of random lengths and tokens, some tokens trained."""

    def __init__(self) -> None:
        rng = np.random.Generator(np.random.PCG64(7))
        self.lengths = rng.integers(3, 20, 64)
        self.tokens = [rng.integers(3, TINY["vocab_size"], size) for size in self.lengths]
        self.masks = [rng.random(size) < 0.7 for size in self.lengths]
        self.trained = np.array([mask[1:].sum() for mask in self.masks])
        self.fingerprint = "words"

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens[index], self.masks[index]

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        tokens, masks = zip(*(self.document(int(index)) for index in indices), strict=True)
        return np.concatenate(tokens), np.concatenate(masks)

    def where(self, index: int) -> str:
        return str(index)


def step_micros(case: Case, step: int, count: int) -> list[MicroBatch]:
    """The micro-batches of a step, of unlike widths, the last without a row; of one shape where a mistake is made."""
    rows = Rows(Words(), 24, case.packed, fixed_length=bool(case.breaks))
    order = np.random.Generator(np.random.PCG64(step)).permutation(len(rows))
    shares = [order[2 * number : 2 * number + 2] for number in range(count)]
    return [rows.collate(share) for share in (shares if case.breaks else [*shares[:-1], order[:0]])]


def config_of(case: Case) -> TrainConfig:
    targets = ["q_proj", "v_proj", "down_proj"]
    extra: dict[str, Any] = {"method": "lora", "lora_r": 4, "lora_target_modules": targets} if case.lora else {}
    return TrainConfig(model_name_or_path="embedded", dataset_name="none", weight_decay=0.1, **STEADY, **extra)


def make_loss(case: Case, layers: int, broken: bool = False) -> LossModule:
    torch.manual_seed(0)
    tied = case.family in ("qwen3", "gemma2", "gemma3_text")
    more = {**TINY, **MORE.get(case.family, {}), "num_hidden_layers": layers, "tie_word_embeddings": tied}
    more |= ROPE.get(case.rope, {})
    kernel = KERNELS["eager" if case.family == "gemma2" else "sdpa" if case.breaks else "documents"]
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.family, **more), attn_implementation=kernel)
    for weight in base.parameters():
        nn.init.normal_(weight, std=0.2)
    base.config.use_cache = False
    if case.breaks != "rope" or not broken:
        choose_by_document(base)
    if case.checkpointed:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if case.half and case.lora:  # a frozen base is kept in the compute dtype
        base.to(torch.bfloat16)
    model = add_adapters(base, config_of(case)) if case.lora else base
    if case.lora:  # adapters that begin with nought would leave half of the gradients at nought
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.2)
    return LossModule(model.train(), torch.bfloat16 if case.half else torch.float32)


class Alone:
    """One process on the whole model.

    Args:
        order: for a control, the order of sums in matrix products, one of `tests.rounding.ORDERS`.
        backwards: for a control, take the micro-batches from the last to the first.
    """

    def __init__(self, case: Case, layers: int, order: str | None = None, backwards: bool = False):
        self.loss, self.order, self.backwards = make_loss(case, layers), order, backwards
        self.trained, config = trained_weights(self.loss.model), config_of(case)
        groups = parameter_groups(self.trained, {name: one.shape for name, one in self.trained}, config)
        self.optimizer = build_optimizer(groups, config)

    def forward(self, micros: list[MicroBatch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Loss and tokens predicted right of each micro-batch; a backward pass in between has the same order."""
        with reordered(self.order):
            for micro in reversed(micros) if self.backwards else micros:
                yield self.loss(**micro.inputs(torch.device("cpu")))

    def step(self, micros: list[MicroBatch]) -> dict[str, Any]:
        """Trains; the loss, and gradient norm and gradients before clipping."""
        self.optimizer.zero_grad()
        share, total = 1 / sum(len(micro.labels) for micro in micros), 0.0
        for loss, _ in self.forward(micros):
            (loss * share).backward()
            total += float(loss.detach())
        gradients = {name: weight.grad.clone() for name, weight in self.trained if weight.grad is not None}
        norm = float(nn.utils.clip_grad_norm_([one for _, one in self.trained], CLIP))
        self.optimizer.step()
        return {"loss": total, "norm": norm, "gradient": gradients}

    def evaluate(self, micros: list[MicroBatch]) -> dict[str, Any]:
        self.loss.eval()
        with torch.no_grad():
            losses, correct = zip(*self.forward(micros), strict=True)
        self.loss.train()
        return {"evaluation": float(sum(losses)), "counted": int(sum(correct))}

    def saved(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a checkpoint holds: weights and optimizer state by name."""
        states = {f"{name}.{key}": self.optimizer.state[one][key] for name, one in self.trained for key in MOMENTS}
        return {"weight": {name: one.detach() for name, one in self.trained}, "state": states}

    def labelled_anew(self, micro: MicroBatch) -> MicroBatch:
        """With every other label replaced by what the model says, so that there is something to count."""
        half = torch.autocast("cpu", torch.bfloat16, enabled=self.loss.compute == torch.bfloat16)
        with torch.no_grad(), half, self.loss.route.hand_over(AttentionMetadata(micro.documents)) as more:
            inputs = {"input_ids": micro.input_ids, "position_ids": micro.position_ids, **more}
            logits = self.loss.model(**inputs).logits.flatten(0, 1)
        labels = micro.labels.clone()
        labels[::2] = logits[micro.positions[::2]].argmax(-1)
        return dataclasses.replace(micro, labels=labels)


def apart(one: Any, other: Any) -> float:
    """The relative difference of two numbers; of tensors by name, the largest."""
    if isinstance(one, dict):
        return max(relative(one[name], tensor) for name, tensor in other.items())
    return abs(one / other - 1)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What one process comes to.

    Args:
        steps: of each step its micro-batches, loss, norm and gradients.
        bounds: by what is compared, the largest difference that rounding explains.
    """

    steps: list[tuple[list[MicroBatch], dict[str, Any]]]
    micros: list[MicroBatch]
    evaluated: dict[str, Any]
    saved: dict[str, dict[str, torch.Tensor]]
    bounds: dict[str, float]


def make_reference(case: Case, layers: int, count: int) -> Reference:
    """One process, and controls of it with the sums in another order.

    Without tensor parallelism nothing but the order of micro-batches and ranks differs. In fp32 the control sums the
    products in another order too, as a machine's kernels may; in bf16 that would hide nearly all mistakes.
    """
    orders = list(ORDERS) if case.tensor > 1 else [None] if case.half else ["backwards"]
    alone, controls = Alone(case, layers), [Alone(case, layers, order, backwards=True) for order in orders]
    spreads = dict.fromkeys(("loss", "norm", "gradient", "evaluation", "weight", "state"), 0.0)

    def note(found: dict[str, Any], others: list[dict[str, Any]]) -> None:
        for name in found.keys() & spreads.keys():
            spreads[name] = max(spreads[name], *(apart(other[name], found[name]) for other in others))

    steps = []
    for number in range(STEPS):
        micros = step_micros(case, number, count)
        steps.append((micros, alone.step(micros)))
        note(steps[-1][1], [control.step(micros) for control in controls])
    micros = [alone.labelled_anew(micro) for micros, _ in steps for micro in micros]
    evaluated, others = alone.evaluate(micros), [control.evaluate(micros) for control in controls]
    note(evaluated, others)
    note(alone.saved(), [control.saved() for control in controls])
    near_ties = max(abs(other["counted"] - evaluated["counted"]) for other in others)
    bounds = {name: bound(spread) for name, spread in spreads.items()} | {"counted": 1.0 + near_ties}
    return Reference(steps, micros, evaluated, alone.saved(), bounds)


def plain(tensor: Any) -> torch.Tensor:
    """The whole tensor. Collective where it is cut."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def part_of(whole: torch.Tensor, name: str, backend: Pipelined) -> torch.Tensor:
    """What tensor parallelism leaves this rank of a whole tensor."""
    cut = backend.tensor.slices.get(name) if backend.tensor else None
    return whole if cut is None else whole[cut.slices]


def sabotage(backend: Pipelined, what: str) -> None:
    """Makes one of the mistakes that the comparison must see."""
    if what == "tied":
        backend._sum_tied = lambda: None  # type: ignore[method-assign]
    for chunk in backend.local.chunks if "documents" in what else ():
        take_up = chunk.take_up

        def wrong(number: int, section: str, chunk: Chunk = chunk, take_up: Any = take_up) -> None:
            if what == "documents" and section == "forward":
                take_up(0, section)
                chunk.number = number
            elif what == "documents" or section == "forward":
                take_up(number, section)

        chunk.take_up = wrong  # type: ignore[method-assign]


class Place:
    """This rank's groups in a case, and what is built on them."""

    def __init__(self, case: Case, world: int):
        self.case, self.layers, self.count = case, case.layers(world), case.micro_batches(world)
        copies = case.replicas // 2 if case.sharded and case.replicas > 2 else 1
        data = (copies, case.replicas // copies) if case.sharded else (case.replicas, 1)
        sizes = MeshSizes(case.stages(world), *data, tp=case.tensor)
        self.mesh = Mesh(sizes, distributed.get_rank(), "cpu")
        self.replicas = self.mesh.group("grad_group")

    def backend(self, loss: LossModule) -> Pipelined:
        split_model(loss, self.mesh.group("tp"), self.mesh.index("tp"), self.case.tensor)
        return Pipelined.on(self.mesh, loss, config_of(self.case), torch.device("cpu"), self.case.schedule)

    def run(self, backend: Pipelined, micros: list[MicroBatch]) -> float:
        """Forward and backward of this rank's micro-batches; the loss of all of them."""
        share = self.case.replicas / sum(len(micro.labels) for micro in micros)
        mine = micros[self.mesh.data_rank :: self.case.replicas]
        total, _ = backend.forward_backward(mine, [share] * self.count)
        if self.replicas is not None:
            distributed.all_reduce(total, group=self.replicas)
        return float(total)


def reference_of(case: Case, world: int) -> tuple[Case, int, int]:
    """The arguments of `make_reference`, the same for cases that differ in what one process does not know."""
    plainly = dataclasses.replace(case, schedule="", checkpointed=False, sharded=False)
    return plainly, case.layers(world), case.micro_batches(world) * case.replicas


def compare(case: Case, wanted: Reference, ranks: Ranks, folder: Path) -> dict[str, tuple[float, float]]:
    """Runs a case on every rank; returns this rank's largest differences from one process, each with its bound."""
    place = Place(case, ranks.world)
    backend = place.backend(make_loss(case, place.layers, broken=True))
    sabotage(backend, case.breaks)
    found = dict.fromkeys(("loss", "gradient", "norm", "weight"), 0.0)
    for micros, step in wanted.steps:
        found["loss"] = max(found["loss"], apart(place.run(backend, micros), step["loss"]))
        for name, weight in backend.trained:
            whole = part_of(step["gradient"][name], name, backend)
            found["gradient"] = max(found["gradient"], relative(plain(weight.grad), whole))
        found["norm"] = max(found["norm"], apart(float(backend.clip_grad_norm(CLIP)), step["norm"]))
        backend.step()
    for name, weight in backend.trained:
        whole = part_of(wanted.saved["weight"][name], name, backend)
        found["weight"] = max(found["weight"], relative(plain(weight), whole))
    if backend.tied is not None:
        rows = backend.tensor.rank if backend.tensor else 0
        held = [(rows, plain(one).numpy().tobytes()) for name, one in backend.trained if name == backend.tied]
        found["tied"] = float(len({one for part in ranks.gather(held) for one in part}) - case.tensor)
    if not case.breaks:
        found |= evaluation_apart(backend, wanted)
        found["state"] = saved_apart(backend, wanted, ranks)
        if case.family == "qwen3" and ranks.world == 4:
            found["resumed"] = resumed_apart(place, backend, ranks, folder / str(case))
    bit_by_bit = {"tied": 0.0, "resumed": 0.0}
    return {name: (value, (wanted.bounds | bit_by_bit)[name]) for name, value in found.items()}


def resumed_apart(place: Place, backend: Pipelined, ranks: Ranks, folder: Path) -> float:
    """Saves, resumes from the checkpoint in a backend made anew, and takes another step with both."""
    checkpoints = Checkpoints(folder, ranks, Origin("pp", plain_config(config_of(place.case)), "words"))
    checkpoints.begin(backend, {}, Progress(step=STEPS))
    checkpoints.finish()
    loss = make_loss(place.case, place.layers)
    nn.init.zeros_(loss.base.get_input_embeddings().weight)
    checkpoints.load(checkpoints.path(STEPS), loss.model)
    again = place.backend(loss)
    checkpoints.restore(checkpoints.path(STEPS), again, 1)
    for one in (backend, again):
        place.run(one, step_micros(place.case, STEPS, place.count * place.case.replicas))
        one.clip_grad_norm(CLIP)
        one.step()
    pairs = zip(backend.trained, again.trained, strict=True)
    return float(sum(not torch.equal(plain(one), plain(other)) for (_, one), (_, other) in pairs))


def evaluation_apart(backend: Pipelined, wanted: Reference) -> dict[str, float]:
    backend.model.eval()
    loss, correct = backend.evaluate(wanted.micros)
    backend.model.train()
    right = wanted.evaluated["counted"]
    assert right > 30
    return {
        "evaluation": apart(float(loss), wanted.evaluated["evaluation"]),
        "counted": float(abs(int(correct) - right)),
    }


def saved_apart(backend: Pipelined, wanted: Reference, ranks: Ranks) -> float:
    """What a checkpoint would hold, put together from all ranks, beside the weights and states of one process."""
    weights, states = wanted.saved["weight"], wanted.saved["state"]
    shards, worst, seen = backend.shards(), 0.0, 0
    assert [one.name for one in shards] == list(weights)
    here, all_of_it, parts = backend.local_and_total_numel()
    assert 0.9 * all_of_it < here * parts < 1.1 * all_of_it
    assert backend.busy.seconds() > 0 == backend.busy.seconds()
    check_coverage(shards, ranks)
    for name, key, owner, tensor in gather_full_tensors(shards, steps_of(shards, ranks), ranks):
        seen += 1
        if owner == ranks.rank:
            assert tensor is not None
            worst = max(worst, relative(tensor, weights[name] if key == WEIGHT else states[f"{name}.{key}"]))
    assert seen == 3 * len(weights)  # the weight and AdamW's two states
    if backend.tied is not None and backend.ranks > 2:  # among two ranks both may hold all
        with pytest.raises(TrainingError, match="elements, the ranks hold"):
            check_coverage([dataclasses.replace(one, primary=True) for one in shards], ranks)
    return worst


def work(rank: int, world: int, folder: str, cases: list[Case]) -> None:
    """One process of a launch: writes what it found in each case."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    ranks = Ranks(torch.device("cpu"))
    wanted = {case: reference_of(case, world) for case in cases}
    unlike = list(dict.fromkeys(wanted.values()))
    shares = ranks.gather({one: make_reference(*one) for one in unlike[rank::world]})  # each is made by one rank
    references = {one: reference for share in shares for one, reference in share.items()}
    found = {str(case): ranks.gather(compare(case, references[wanted[case]], ranks, Path(folder))) for case in cases}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()
