"""A pipeline trains as one process does: loss, gradients, norm, weights, checkpoints; and what is counted about it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, multiprocessing, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.test_sft_loss import EXTRA, TINY
from trainers.attention import KERNELS, use_documents
from trainers.checkpoint import Checkpoints
from trainers.config import ConfigError, TrainConfig
from trainers.data.batches import MicroBatch, Rows
from trainers.differences import plain as plain_config
from trainers.errors import TrainingError
from trainers.manifest import Origin, Progress
from trainers.models import add_adapters, probe_attention
from trainers.objectives.sft import LINEAR_HEADS, SupervisedLoss
from trainers.optimizers import build_optimizer, parameter_groups
from trainers.parallel import cutting
from trainers.parallel.backend import trained_names
from trainers.parallel.cutting import Chunk, PipelineStages, Work, cut
from trainers.parallel.mesh import Mesh, MeshSizes
from trainers.parallel.pipeline import Pipelined
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, check_whole, steps_of, wholes
from trainers.parallel.stages import SCHEDULES
from trainers.parallel.tensor import cut as cut_layers

STEPS = 3
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
    breaks: str = ""

    def __str__(self) -> str:
        marks = [self.family, self.schedule, "packed" if self.packed else "unpacked"]
        marks += ["lora"] * self.lora + ["checkpointed"] * self.checkpointed + ["bf16"] * self.half
        marks += [f"fsdp{self.replicas}" if self.sharded else f"dp{self.replicas}"] * (self.replicas > 1)
        marks += [f"tp{self.tensor}"] * (self.tensor > 1)
        return "-".join([*marks, self.breaks]).rstrip("-")


TWO = [
    *(Case("llama", schedule) for schedule in SCHEDULES),
    *(Case("qwen3", schedule) for schedule in SCHEDULES),
    *(Case("llama", schedule, packed=False) for schedule in ("gpipe", "interleaved")),
    *(Case("llama", schedule, lora=True) for schedule in ("1f1b", "zero_bubble")),
    *(Case("qwen3", schedule, checkpointed=True) for schedule in ("1f1b", "zero_bubble", "zbv")),
    Case("llama", "gpipe", lora=True, checkpointed=True),
    Case("qwen3", "zbv", half=True),
    Case("llama", "interleaved", lora=True, half=True),
    Case("gemma2", "1f1b"),
    Case("gemma3_text", "interleaved", packed=False),
    Case("granite", "1f1b"),
]
FOUR = [
    Case("qwen3", "1f1b"),
    Case("llama", "zero_bubble"),
    Case("qwen3", "interleaved", replicas=2),
    Case("llama", "zbv", packed=False, replicas=2),
    Case("qwen3", "1f1b", replicas=2, sharded=True),
    Case("llama", "interleaved", packed=False, replicas=2, sharded=True),
    Case("llama", "1f1b", lora=True, checkpointed=True, replicas=2, sharded=True),
    Case("qwen3", "1f1b", tensor=2),
    Case("llama", "zero_bubble", checkpointed=True, tensor=2),
]
CONTROLS = [
    Case("llama", "1f1b", breaks="documents"),
    Case("llama", "1f1b", checkpointed=True, breaks="recomputed documents"),
    Case("qwen3", "1f1b", breaks="tied"),
]


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
    rows = Rows(Words(), 24, case.packed, 0, fixed_length=bool(case.breaks))
    order = np.random.Generator(np.random.PCG64(step)).permutation(len(rows))
    shares = [order[2 * number : 2 * number + 2] for number in range(count)]
    return [rows.collate(share) for share in (shares if case.breaks else [*shares[:-1], order[:0]])]


def config_of(case: Case) -> TrainConfig:
    targets = ["q_proj", "v_proj", "down_proj"]
    extra: dict[str, Any] = {"method": "lora", "lora_r": 4, "lora_target_modules": targets} if case.lora else {}
    return TrainConfig(
        model_name_or_path="embedded", dataset_name="none", learning_rate=1e-2, weight_decay=0.1, **extra
    )


def make_loss(case: Case, layers: int) -> SupervisedLoss:
    torch.manual_seed(0)
    tied = case.family in ("qwen3", "gemma2", "gemma3_text")
    more = {**TINY, **MORE.get(case.family, {}), "num_hidden_layers": layers, "tie_word_embeddings": tied}
    kernel = KERNELS["eager" if case.family == "gemma2" else "sdpa" if case.breaks else "documents"]
    base: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.family, **more), attn_implementation=kernel)
    for weight in base.parameters():
        nn.init.normal_(weight, std=0.2)
    base.config.use_cache = False
    if case.checkpointed:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if case.half and case.lora:  # a frozen base is kept in the compute dtype
        base.to(torch.bfloat16)
    model = add_adapters(base, config_of(case)) if case.lora else base
    if case.lora:  # adapters that begin with nought would leave half of the gradients at nought
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight, std=0.2)
    return SupervisedLoss(model.train(), torch.bfloat16 if case.half else torch.float32)


class Alone:
    """One process on the whole model."""

    def __init__(self, loss: SupervisedLoss, config: TrainConfig):
        self.loss, self.trained = loss, trained_names(loss.model)
        groups = parameter_groups(self.trained, {name: one.shape for name, one in self.trained}, config)
        self.optimizer = build_optimizer(groups, config)

    def run(self, micros: list[MicroBatch], share: float) -> float:
        total = 0.0
        for micro in micros:
            loss, _ = self.loss(**micro.inputs(torch.device("cpu")))
            (loss * share).backward()
            total += float(loss.detach())
        return total

    def clip(self, limit: float) -> float:
        return float(nn.utils.clip_grad_norm_([one for _, one in self.trained], limit))


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference beside the largest number."""
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))


def plain(tensor: Any) -> torch.Tensor:
    """The whole tensor. Collective where it is cut."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def part_of(whole: torch.Tensor, name: str, backend: Pipelined) -> torch.Tensor:
    """What tensor parallelism leaves this rank of a whole tensor."""
    cut = backend.tensor.cuts.get(name) if backend.tensor else None
    return whole if cut is None else whole[cut.box]


def sabotage(backend: Pipelined, what: str) -> None:
    """Makes one of the mistakes that the comparison must see."""
    if what == "tied":
        backend._sum_tied = lambda: None  # type: ignore[method-assign]
    for chunk in backend.part.chunks if "documents" in what else ():
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
        self.case, self.stages = case, world // case.replicas // case.tensor
        self.count = 2 * self.stages if self.stages == 4 else 4
        copies = case.replicas // 2 if case.sharded and case.replicas > 2 else 1
        data = (copies, case.replicas // copies) if case.sharded else (case.replicas, 1)
        sizes = MeshSizes(self.stages, *data, tp=case.tensor)
        self.mesh = Mesh(sizes, distributed.get_rank(), "cpu")
        self.replicas = self.mesh.group("averaged")

    def backend(self, loss: SupervisedLoss) -> Pipelined:
        cut_layers(loss, self.mesh.group("tp"), self.mesh.index("tp"), self.case.tensor)
        return Pipelined.on(self.mesh, loss, config_of(self.case), torch.device("cpu"), self.case.schedule)

    def run(self, backend: Pipelined, micros: list[MicroBatch]) -> float:
        """Forward and backward of this rank's micro-batches; the loss of all of them."""
        share = self.case.replicas / sum(len(micro.labels) for micro in micros)
        mine = micros[self.mesh.data_rank :: self.case.replicas]
        total = backend.run(mine, [share] * self.count)
        if self.replicas is not None:
            distributed.all_reduce(total, group=self.replicas)
        return float(total)


def compare(case: Case, ranks: Ranks, folder: Path) -> dict[str, float]:
    """Runs a case on every rank; returns this rank's largest differences from one process."""
    place = Place(case, ranks.world)
    loss = make_loss(case, 2 * place.stages + 1)
    alone, backend = Alone(copy.deepcopy(loss), config_of(case)), place.backend(loss)
    sabotage(backend, case.breaks)
    found = dict.fromkeys(("loss", "gradient", "norm", "weight", "evaluation"), 0.0)
    for step in range(STEPS):
        micros = step_micros(case, step, place.count * case.replicas)
        total = place.run(backend, micros)
        sum_alone = alone.run(micros, 1 / sum(len(micro.labels) for micro in micros))
        found["loss"] = max(found["loss"], abs(total - sum_alone) / sum_alone)
        whole = dict(alone.trained)
        for name, weight in backend.trained:
            assert weight.grad is not None
            wanted = part_of(plain(whole[name].grad), name, backend)
            found["gradient"] = max(found["gradient"], apart(plain(weight.grad), wanted))
        norm = alone.clip(0.5)
        found["norm"] = max(found["norm"], abs(float(backend.clip(0.5)) - norm) / norm)
        backend.step()
        alone.optimizer.step()
        alone.optimizer.zero_grad()
    for name, weight in backend.trained:
        found["weight"] = max(found["weight"], apart(plain(weight), part_of(plain(whole[name]), name, backend)))
    if backend.tied is not None:
        rows = backend.tensor.rank if backend.tensor else 0
        held = [(rows, plain(one).numpy().tobytes()) for name, one in backend.trained if name == backend.tied]
        found["tied"] = float(len({one for part in ranks.gather(held) for one in part}) - case.tensor)
    if not case.breaks:
        found["evaluation"] = evaluation_apart(case, backend, alone, place.count)
        found["saved"] = saved_apart(backend, alone, ranks)
        if case.family == "qwen3" and ranks.world == 4:
            found["resumed"] = resumed_apart(place, backend, ranks, folder / str(case))
    return found


def resumed_apart(place: Place, backend: Pipelined, ranks: Ranks, folder: Path) -> float:
    """Saves, resumes from the checkpoint in a backend made anew, and takes another step with both."""
    checkpoints = Checkpoints(folder, ranks, Origin("pp", plain_config(config_of(place.case)), "words"))
    checkpoints.begin(backend, {}, Progress(step=STEPS))
    checkpoints.finish()
    loss = make_loss(place.case, 2 * place.stages + 1)
    nn.init.zeros_(loss.base.get_input_embeddings().weight)
    checkpoints.load(checkpoints.path(STEPS), loss.model)
    again = place.backend(loss)
    checkpoints.restore(checkpoints.path(STEPS), again, 1)
    for one in (backend, again):
        place.run(one, step_micros(place.case, STEPS, place.count * place.case.replicas))
        one.clip(0.5)
        one.step()
    pairs = zip(backend.trained, again.trained, strict=True)
    return float(sum(not torch.equal(plain(one), plain(other)) for (_, one), (_, other) in pairs))


def evaluation_apart(case: Case, backend: Pipelined, alone: Alone, count: int) -> float:
    micros = [micro for step in range(STEPS) for micro in step_micros(case, step, count)]
    backend.model.eval()
    loss, correct = backend.evaluate(micros)
    backend.model.train()
    with torch.no_grad():
        wanted = [alone.loss.eval()(**micro.inputs(torch.device("cpu"))) for micro in micros]
    assert (int(correct), True) == (sum(int(one) for _, one in wanted), correct > 0)
    total = sum(float(one) for one, _ in wanted)
    return abs(float(loss) - total) / total


def saved_apart(backend: Pipelined, alone: Alone, ranks: Ranks) -> float:
    """What a checkpoint would hold, put together from all ranks, beside the weights and states of one process."""
    shards, whole, worst, seen = backend.shards(), dict(alone.trained), 0.0, 0
    assert [one.name for one in shards] == [name for name, _ in alone.trained]
    here, all_of_it, parts = backend.held()
    assert 0.9 * all_of_it < here * parts < 1.1 * all_of_it
    assert backend.busy.seconds() > 0 == backend.busy.seconds()
    check_whole(shards, ranks)
    for name, key, owner, tensor in wholes(shards, steps_of(shards, ranks), ranks):
        seen += 1
        if owner == ranks.rank:
            assert tensor is not None
            wanted = whole[name] if key == WEIGHT else alone.optimizer.state[whole[name]][key]
            worst = max(worst, apart(tensor, wanted.detach()))
    assert seen == 3 * len(whole)  # the weight and AdamW's two states
    if backend.tied is not None and backend.ranks > 2:  # among two ranks both may hold all
        with pytest.raises(TrainingError, match="elements, the ranks hold"):
            check_whole([dataclasses.replace(one, primary=True) for one in shards], ranks)
    return worst


def work(rank: int, world: int, folder: str, cases: list[Case]) -> None:
    """One process of a launch: writes what it found in each case."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    ranks = Ranks(torch.device("cpu"))
    found = {str(case): ranks.gather(compare(case, ranks, Path(folder))) for case in cases}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def launch(folder: Path, world: int, cases: list[Case]) -> dict[str, list[dict[str, float]]]:
    multiprocessing.spawn(work, (world, str(folder), cases), world)
    found: dict[str, list[dict[str, float]]] = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    return launch(tmp_path_factory.mktemp("two"), 2, TWO + CONTROLS)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    return launch(tmp_path_factory.mktemp("four"), 4, FOUR)


def assert_alike(case: Case, found: list[dict[str, float]]) -> None:
    # Tensor parallelism adds up in another order, and AdamW makes more of that where gradients are near nought.
    exact = {"loss", "norm", "evaluation"}
    for one in found:
        limits = {name: 1e-5 if name in exact or case.tensor == 1 else 1e-4 for name in one}
        assert {name: value for name, value in one.items() if value > limits[name]} == {}


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_stages_train_as_one_process(case: Case, two: dict[str, list[dict[str, float]]]) -> None:
    assert_alike(case, two[str(case)])


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_train_as_one_process(case: Case, four: dict[str, list[dict[str, float]]]) -> None:
    assert_alike(case, four[str(case)])


@pytest.mark.parametrize("case", CONTROLS, ids=str)
def test_a_mistake_would_be_seen(case: Case, two: dict[str, list[dict[str, float]]]) -> None:
    assert max(one["gradient"] for one in two[str(case)]) > 1e-2


@pytest.mark.parametrize("family", sorted(LINEAR_HEADS))
def test_stages_one_after_the_other_are_the_model(family: str) -> None:
    case = Case(family, "interleaved")
    loss = make_loss(case, 3)
    whole, micro = copy.deepcopy(loss), step_micros(case, 0, 2)[0]
    wanted, _ = whole(**micro.inputs(torch.device("cpu")))
    (wanted * 0.5).backward()
    work = Work(room=micro.slots + 3)
    part = cut(loss, "interleaved", 1, 0, work)
    work.take([micro.inputs(torch.device("cpu"))], [0.5], torch.device("cpu"))
    carried = torch.zeros(1)
    for chunk in part.chunks:
        chunk.take_up(0, "forward")
        carried = chunk(carried)
    carried.backward()
    assert float(work.loss) == float(wanted.detach())
    for name, weight in whole.model.named_parameters():
        assert torch.equal(dict(part.trained)[name].grad, weight.grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_weight_is_on_some_rank_under_its_name(schedule: str) -> None:
    case, held = Case("qwen3", schedule), list[str]()
    whole = {name for name, _ in make_loss(case, 9).model.named_parameters()}
    for rank in range(4):
        loss = make_loss(case, 9)
        part = cut(loss, schedule, 4, rank, Work())
        held += [name for name, _ in part.trained]
        assert {id(one) for one in loss.model.parameters()} == {id(one) for _, one in part.trained}
        assert list(part.shapes) == [name for name, _ in make_loss(case, 9).model.named_parameters()]
    twice = {name for name in held if held.count(name) > 1}
    assert set(held) == whole
    assert twice == (set() if SCHEDULES[schedule].turns else {"model.embed_tokens.weight"})


def test_the_layers_of_other_ranks_are_gone_from_memory() -> None:
    loss = make_loss(Case("llama", "interleaved"), 9)
    layers = [weakref.ref(one.mlp.up_proj.weight) for one in loss.base.get_decoder().layers]
    part = cut(loss, "interleaved", 2, 0, Work())
    gc.collect()
    here = {layer for stage in part.stages for layer in part.kept[stage]}
    assert {number for number, one in enumerate(layers) if one() is not None} == here != set(range(9))


def test_what_cannot_be_cut_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="pp_size=4 with pp_schedule=interleaved: 8 stages for 3 layers"):
        cut(make_loss(Case("llama", "interleaved"), 3), "interleaved", 4, 0, Work())
    shape = AutoConfig.for_model("gpt2", n_embd=32, n_head=4, n_layer=2, vocab_size=97)
    with pytest.raises(ConfigError, match="gpt2 models cannot be cut into pipeline stages"):
        cut(SupervisedLoss(AutoModelForCausalLM.from_config(shape)), "1f1b", 2, 0, Work())
    base: Any = make_loss(Case("llama", "1f1b"), 3).model
    config = config_of(Case("llama", "1f1b", lora=True)).model_copy(update={"lora_target_modules": ["lm_head"]})
    with pytest.raises(ConfigError, match="leave lm_head out of lora_target_modules"):
        cut(SupervisedLoss(add_adapters(base, config)), "1f1b", 2, 0, Work())


@pytest.mark.parametrize("rank", [0, 1])
def test_each_stage_is_asked_what_it_sees(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, work = make_loss(Case("qwen3", "1f1b"), 3), Work()
    part = cut(loss, "1f1b", 2, rank, work)
    local = PipelineStages(loss, part.chunks, part.hidden_size, part.dtype)
    probe_attention(local, loss.base, True, torch.device("cpu"))
    use_documents(None)
    monkeypatch.setattr(cutting, "use_documents", lambda *documents: None)
    with pytest.raises(ConfigError, match="another document"):
        probe_attention(local, loss.base, True, torch.device("cpu"))
