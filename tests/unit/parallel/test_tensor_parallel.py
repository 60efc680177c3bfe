"""Tensor parallelism gives one process's model: loss, every gradient, norm, steps, and checkpoints put together.

The ranks are real processes, which `tensor_parallel_ranks.py` runs; each launch checks many models, for speed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.parallel.tensor_parallel_ranks import FAMILIES, ROPE, whole_loss
from trainers.config.mistakes import ConfigError
from trainers.parallel import pipeline_split
from trainers.parallel.norm import scale_gradients
from trainers.parallel.ranks import Ranks
from trainers.parallel.shards import WEIGHT, Shard, check_coverage
from trainers.parallel.tensor import split_model
from trainers.run.errors import TrainingError
from trainers.strategy.tensor_plan import refusals

ROOT = Path(__file__).resolve().parents[3]
LORA = ["llama-lora", "qwen3-lora", "phi-lora", "phi3-lora"]
ON_TWO = [*FAMILIES, *LORA, "checkpointing", "selective", "plain", "plain-lora", *ROPE]
ON_FOUR = ["llama", "qwen3", "gemma2", "olmo2", "qwen3-lora"]
CASES = [*((2, name) for name in ON_TWO), *((4, name) for name in ON_FOUR)]
MIXES = [(2, "tp"), (4, "tp_ddp"), (4, "tp_fsdp2"), (4, "tp_hsdp")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What 2 and 4 ranks found."""
    launches = {world: launched(world, tmp_path_factory.mktemp(f"ranks{world}")) for world in (2, 4)}
    answers = {}
    for world, (folder, ranks) in launches.items():
        failed = [number for number, rank in enumerate(ranks) if rank.wait(timeout=500)]
        assert not failed, (folder / f"log-{failed[0]}.txt").read_text(encoding="utf-8")
        answers[world] = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return answers


def launched(world: int, folder: Path) -> tuple[Path, list[subprocess.Popen[bytes]]]:
    """The ranks' processes, each with a log of its own."""
    ranks = []
    for rank in range(world):
        told = [str(folder / "store"), str(rank), str(world), str(folder / "found.json")]
        command = [sys.executable, "-m", "tests.unit.parallel.tensor_parallel_ranks", *told]
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (folder / f"log-{rank}.txt").open("wb") as log:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=alone, stdout=log, stderr=subprocess.STDOUT))
    return folder, ranks


@pytest.mark.parametrize(("world", "name"), CASES)
def test_a_cut_model_is_the_model(world: int, name: str, found: dict[int, dict[str, Any]]) -> None:
    """Two micro-batches: packed documents, and rows of one document each."""
    one, bounds = found[world][name], found[world][name]["bounds"]
    assert one["loss"] <= bounds["loss"]
    wrong = {weight: value for weight, value in one["gradients"].items() if not value <= bounds["gradients"]}
    assert not wrong, bounds
    assert one["norm"] <= bounds["norm"]
    assert one["clipped"] <= bounds["clipped"]
    assert one["alike"], "what every rank holds has the same bits"
    mine, expected = one["counted"]
    assert mine == expected >= 10


@pytest.mark.parametrize("kind", ROPE)
def test_frequencies_by_document_are_others(kind: str, found: dict[int, dict[str, Any]]) -> None:
    """The control of its comparison: a rank that went by the longest document would be seen."""
    assert found[2][kind]["by longest"] > 100 * found[2][kind]["bounds"]["loss"]


@pytest.mark.parametrize(("world", "name"), CASES)
def test_a_rank_holds_its_share(world: int, name: str, found: dict[int, dict[str, Any]]) -> None:
    """All but the norms, and of an adapter the factor that is small."""
    one = found[world][name]
    assert 1 / world - 0.01 < one["here"] < 1 / world + 0.06
    assert any("embed_tokens" in weight for weight in one["cut"])
    assert not any("norm" in weight for weight in one["cut"])


def test_in_fp64_nothing_but_rounding_is_left(found: dict[int, dict[str, Any]]) -> None:
    assert found[2]["exact"]["model"] < 1e-12
    assert found[2]["exact"]["loss"] < 1e-12


@pytest.mark.parametrize(
    ("mistake", "shows"),
    [
        ("q_norm is not summed", lambda one: one["gradients"]["model.layers.0.self_attn.q_norm.weight"]),
        ("a block's input is not copied", lambda one: one["gradients"]["model.embed_tokens.weight"]),
        ("the loss is counted on every rank", lambda one: one["loss"]),
    ],
)
def test_a_mistake_would_be_seen(mistake: str, shows: Any, found: dict[int, dict[str, Any]]) -> None:
    """Control: each leaves the forward pass or most gradients as they were."""
    assert shows(found[2][mistake]) > 0.1


@pytest.mark.parametrize(("world", "name"), CASES)
def test_tokens_are_divided_between_blocks(world: int, name: str, found: dict[int, dict[str, Any]]) -> None:
    """But where it was not to be, or frequencies depend on values, which the pass that finds it out has not."""
    assert found[world][name]["shares"] is (name not in ("plain", "plain-lora", *ROPE))


def test_a_row_of_weight_zero_adds_nothing(found: dict[int, dict[str, Any]]) -> None:
    assert found[2]["without rows"] == 0


def test_what_it_costs(found: dict[int, dict[str, Any]]) -> None:
    """Two collectives a block and direction, which send as much as one sum; and a small one for each norm.

    One for the embedding, three for the loss, one for the norm of the gradients, and one at either end of the layers.
    """
    layers, embedding, loss = 2, 1, 3
    norms = 2 * layers + 1
    one = found[2]["spent"]
    gathers, scatters = 4 * layers + 2, 4 * layers
    assert one["passes"] == {"all_reduce": norms + embedding + loss, "all_gather_into_tensor": gathers,
                             "reduce_scatter_tensor": scatters}  # fmt: skip
    assert one["all"]["all_reduce"] == one["passes"]["all_reduce"] + 1
    assert one["waits"] == found[2]["spent-lora"]["waits"] == []
    # Adapters: the small factor's gradient for each of 5 column-parallel layers, an activation for each of 2 others,
    # whose second factor meets a share of the tokens. Nothing needs the gradient of the first layer's attention input.
    assert found[2]["spent-lora"]["passes"] == {
        "all_reduce": layers * 7 + embedding + loss,
        "all_gather_into_tensor": gathers - 1 + 2 * layers,
        "reduce_scatter_tensor": scatters - 1 + 2 * layers,
    }


@pytest.mark.parametrize(("world", "mix"), MIXES)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_updates_and_checkpoints_of_a_mix(world: int, mix: str, family: str, found: dict[int, dict[str, Any]]) -> None:
    one = found[world][f"{family}-{mix}"]
    assert one["norms"] <= one["bounds"]["norms"], "the norm of each of 4 updates"
    assert one["names"], "weights and optimizer state have the names of one process"
    assert one["weights"] <= one["bounds"]["weights"]
    assert one["filled"], "shards put together and filled back, bit for bit"
    assert one["loaded"], "a whole model reads the checkpoint"
    assert one["restored"], "the same mix goes on from it, bit for bit"
    here, whole, ways = one["held"]
    assert whole == one["whole"]
    assert 1 <= here * ways / whole < 1.02
    assert ways == (4 if mix == "tp_fsdp2" else 2)


class Told(Ranks):
    """Ranks whose shards are known here."""

    def __init__(self, everyone: list[list[Shard]]):
        self.everyone, self.world, self.rank = everyone, len(everyone), 0

    def gather(self, value: Any) -> list[Any]:
        from trainers.parallel.shards import _piece

        return [{one.name: _piece(one) for one in shards} for shards in self.everyone]


def piece(rows: slice, columns: slice, start: int, size: int, primary: bool = True) -> list[Shard]:
    return [Shard("w", torch.Size([4, 6]), start, {WEIGHT: torch.zeros(size)}, None, primary, (rows, columns))]


LEFT, RIGHT, ALL = slice(0, 3), slice(3, 6), slice(0, 4)


def test_rectangles_cut_again_are_whole() -> None:
    quarters = [piece(ALL, LEFT, 0, 5), piece(ALL, RIGHT, 0, 7), piece(ALL, LEFT, 5, 7), piece(ALL, RIGHT, 7, 5)]
    check_coverage(quarters[0], Told(quarters))
    check_coverage(quarters[0], Told([*quarters, *(piece(ALL, LEFT, 0, 12, primary=False) for _ in range(2))]))


@pytest.mark.parametrize(
    "ranks",
    [
        [piece(ALL, LEFT, 0, 12), piece(ALL, LEFT, 0, 12)],
        [piece(ALL, LEFT, 0, 12), piece(ALL, RIGHT, 0, 11)],
        [piece(ALL, LEFT, 0, 12), piece(ALL, slice(2, 5), 0, 12)],
        [piece(ALL, LEFT, 0, 12), piece(ALL, RIGHT, 0, 7), piece(ALL, RIGHT, 4, 5)],
        [piece(ALL, LEFT, 0, 12), piece(ALL, RIGHT, 0, 12), piece(ALL, RIGHT, 0, 12)],
    ],
)
def test_too_little_or_twice_is_seen(ranks: list[list[Shard]]) -> None:
    """Control: the elements may even add up."""
    with pytest.raises(TrainingError, match="w has 24 elements, the ranks hold"):
        check_coverage(ranks[0], Told(ranks))


def shape(**changes: Any) -> Any:
    plan = {"layers.*.self_attn.q_proj": "colwise"}
    known = {"model_type": "qwen3", "num_attention_heads": 12, "num_key_value_heads": 6, "intermediate_size": 96,
             "base_model_tp_plan": plan}  # fmt: skip
    return SimpleNamespace(**{**known, **changes})


@pytest.mark.parametrize(
    ("size", "changes", "lines"),
    [
        (3, {}, []),
        (2, {"base_model_tp_plan": {"layers.*.mlp.up_proj": "colwise", "embed_tokens": "embedding_rowwise"}}, []),
        (1, {"base_model_tp_plan": None}, []),
        (4, {}, ["tp_size=4: qwen3 has 6 key-value heads; use 1, 2, 3 or 6"]),
        (2, {"num_key_value_heads": 1}, ["tp_size=2: qwen3 has 1 key-value heads; use 1"]),
        (3, {"intermediate_size": 100}, ["tp_size=3: qwen3 has an intermediate_size of 100; use 1 or 2"]),
        (5, {"num_key_value_heads": None, "intermediate_size": 10},
         ["tp_size=5: qwen3 has 12 attention heads; use 1 or 2",
          "tp_size=5: qwen3 has 12 key-value heads; use 1 or 2"]),
        (2, {"base_model_tp_plan": {"embed_tokens": "embedding_rowwise"}}, ["tp_size=2: transformers has no "
         "tensor-parallel plan for qwen3; use tp_size=1, with fsdp2 for instance, which cuts any model"]),
        (2, {"base_model_tp_plan": None}, ["tp_size=2: transformers has no tensor-parallel plan for qwen3; use "
         "tp_size=1, with fsdp2 for instance, which cuts any model"]),
        (2, {"base_model_tp_plan": {"experts": "grouped_gemm"}}, ["tp_size=2: the plan of qwen3 has grouped_gemm, "
         "which is not supported; use tp_size=1, with fsdp2 for instance, which cuts any model"]),
    ],
)  # fmt: skip
def test_sizes_and_plans_are_judged_by_the_config(size: int, changes: dict[str, Any], lines: list[str]) -> None:
    assert refusals(shape(**changes), size) == lines


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("cohere", {"use_qk_norm": True}, "has weights at layers.0.self_attn.q_norm which its plan leaves out"),
        ("phi", {"qk_layernorm": True}, "has weights at layers.0.self_attn.q_layernorm which its plan leaves out"),
        ("stablelm", {}, "transformers has no tensor-parallel plan for stablelm"),
    ],
)
def test_a_model_that_would_come_out_wrong_is_refused(family: str, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"tp_size=2: .*{reason}.*; use tp_size=1"):
        split_model(whole_loss(family, **more), None, 0, 2, first=True)


def test_a_model_with_logits_of_its_own_is_refused() -> None:
    loss = whole_loss("llama")
    forward = loss.base.forward

    def squared(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits.square()
        return output

    loss.base.forward = squared
    with pytest.raises(ConfigError, match=r"llama computes its logits in its own way.*; use tp_size=1"):
        split_model(type(loss)(loss.model), None, 0, 2, first=True)


@pytest.mark.parametrize(("target", "what"), [("embed_tokens", "embedding"), ("lm_head", "output head")])
def test_an_adapter_on_words_is_refused(target: str, what: str) -> None:
    from peft import LoraConfig, get_peft_model

    loss = whole_loss("llama")
    adapters = LoraConfig(r=2, target_modules=[target, "q_proj"], task_type="CAUSAL_LM")
    adapted = type(loss)(get_peft_model(loss.model, adapters))
    with pytest.raises(ConfigError, match=f"has an adapter on its {what}.*; leave it out of lora_target_modules"):
        split_model(adapted, None, 0, 2, first=True)


def test_a_layer_that_is_not_plain_is_refused() -> None:
    loss = whole_loss("llama")
    attention = loss.base.model.layers[1].self_attn
    attention.o_proj.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    with pytest.raises(ConfigError, match=r"has a Linear4bit at layers\.1\.self_attn\.o_proj, .*; use method=full or"):
        split_model(loss, None, 0, 2, first=True)


def test_every_family_of_pipelines_was_tried_but_the_one_without_a_plan() -> None:
    assert set(FAMILIES) == pipeline_split.FAMILIES - {"stablelm"}


def test_one_part_is_the_whole() -> None:
    loss = whole_loss("llama")
    assert split_model(loss, None, 0, 1) == {}
    assert loss.tensor is None
    assert type(loss.base.model.layers[0].mlp.up_proj) is torch.nn.Linear


@pytest.mark.parametrize(("norm", "limit", "factor"), [(4.0, 1.0, 0.25), (0.5, 1.0, 1.0), (math.inf, math.inf, 1.0)])
def test_gradients_are_scaled_to_a_finite_limit_alone(norm: float, limit: float, factor: float) -> None:
    """Infinity over infinity is not a number, and would stay in the gradients."""
    gradients = [torch.ones(3), torch.full((2, 2), 2.0)]
    scale_gradients(gradients, torch.tensor(norm), limit)
    torch.testing.assert_close(gradients, [torch.full((3,), factor), torch.full((2, 2), 2 * factor)])
