"""A pipeline trains as one process does: loss, gradients, norm, weights, checkpoints; and what is counted about it."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.parallel.pipeline_ranks import Case, config_of, make_loss, step_micros, work
from trainers.config.mistakes import ConfigError
from trainers.data.layout import AttentionMetadata
from trainers.model.lora import add_adapters
from trainers.model.probe import check_model_computes
from trainers.objectives.loss_module import LossModule
from trainers.parallel import pipeline_split
from trainers.parallel.pipeline_split import FAMILIES, PipelineStages, Work, split_model
from trainers.strategy.pipeline_schedules import SCHEDULES

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
    Case("stablelm", "1f1b", checkpointed=True),
    Case("llama", "1f1b", rope="longrope"),
    Case("llama", "interleaved", packed=False, checkpointed=True, rope="dynamic"),
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
    # Recomputed layers get their documents as an argument, but in families that drop it.
    Case("stablelm", "1f1b", checkpointed=True, breaks="recomputed documents"),
    Case("qwen3", "1f1b", breaks="tied"),
    Case("llama", "1f1b", rope="longrope", breaks="rope"),
    Case("llama", "1f1b", rope="dynamic", breaks="rope"),
]


Found = dict[str, list[dict[str, tuple[float, float]]]]
"""Of each case, what each rank found: differences from one process, each with its bound."""


def launch(folder: Path, world: int, cases: list[Case]) -> Found:
    multiprocessing.start_processes(work, (world, str(folder), cases), world, start_method="forkserver")
    found: Found = json.loads((folder / "found.json").read_text())
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch(tmp_path_factory.mktemp("two"), 2, TWO + CONTROLS)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return launch(tmp_path_factory.mktemp("four"), 4, FOUR)


def assert_alike(found: list[dict[str, tuple[float, float]]]) -> None:
    for one in found:
        assert {name: (value, limit) for name, (value, limit) in one.items() if not value <= limit} == {}


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_stages_train_as_one_process(case: Case, two: Found) -> None:
    assert_alike(two[str(case)])


@pytest.mark.long
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_ranks_train_as_one_process(case: Case, four: Found) -> None:
    assert_alike(four[str(case)])


@pytest.mark.parametrize("case", CONTROLS, ids=str)
def test_a_mistake_would_be_seen(case: Case, two: Found) -> None:
    """Control: far beyond the bound on some rank."""
    assert max(value / limit for value, limit in (one["gradient"] for one in two[str(case)])) > 100


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stages_one_after_the_other_are_the_model(family: str) -> None:
    case = Case(family, "interleaved")
    loss = make_loss(case, 3)
    whole, micro = copy.deepcopy(loss), step_micros(case, 0, 2)[0]
    wanted, _ = whole(**micro.inputs(torch.device("cpu")))
    (wanted * 0.5).backward()
    work = Work(room=micro.slots + 3)
    part = split_model(loss, "interleaved", 1, 0, work)
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
        part = split_model(loss, schedule, 4, rank, Work())
        held += [name for name, _ in part.trained]
        assert {id(one) for one in loss.model.parameters()} == {id(one) for _, one in part.trained}
        assert list(part.shapes) == [name for name, _ in make_loss(case, 9).model.named_parameters()]
    twice = {name for name in held if held.count(name) > 1}
    assert set(held) == whole
    assert twice == (set() if SCHEDULES[schedule].turns else {"model.embed_tokens.weight"})


def test_the_layers_of_other_ranks_are_gone_from_memory() -> None:
    loss = make_loss(Case("llama", "interleaved"), 9)
    layers = [weakref.ref(one.mlp.up_proj.weight) for one in loss.base.get_decoder().layers]
    part = split_model(loss, "interleaved", 2, 0, Work())
    gc.collect()
    here = {layer for stage in part.stages for layer in part.layers[stage]}
    assert {number for number, one in enumerate(layers) if one() is not None} == here != set(range(9))


def test_what_cannot_be_cut_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="pp_size=4 with pp_schedule=interleaved: 8 stages for 3 layers"):
        split_model(make_loss(Case("llama", "interleaved"), 3), "interleaved", 4, 0, Work())
    shape = AutoConfig.for_model("gpt2", n_embd=32, n_head=4, n_layer=2, vocab_size=97)
    with pytest.raises(ConfigError, match="gpt2 models cannot be split into pipeline stages"):
        split_model(LossModule(AutoModelForCausalLM.from_config(shape)), "1f1b", 2, 0, Work())
    base: Any = make_loss(Case("llama", "1f1b"), 3).model
    config = config_of(Case("llama", "1f1b", lora=True)).model_copy(update={"lora_target_modules": ["lm_head"]})
    with pytest.raises(ConfigError, match="leave lm_head out of lora_target_modules"):
        split_model(LossModule(add_adapters(base, config)), "1f1b", 2, 0, Work())


@pytest.mark.parametrize("rank", [0, 1])
def test_each_stage_is_asked_what_it_sees(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, work = make_loss(Case("qwen3", "1f1b"), 3), Work()
    part = split_model(loss, "1f1b", 2, rank, work)
    local = PipelineStages(loss, part.chunks, part.hidden_size, part.dtype)
    check_model_computes(local, loss.base, True, torch.device("cpu"), torch.float32, stock=False)
    monkeypatch.setattr(pipeline_split, "AttentionMetadata", lambda *documents: AttentionMetadata())
    with pytest.raises(ConfigError, match="another document"):
        check_model_computes(local, loss.base, True, torch.device("cpu"), torch.float32, stock=False)
