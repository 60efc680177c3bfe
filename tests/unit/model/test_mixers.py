"""Layers that mix tokens without attention see one document at a time, and train as the stock model on each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from tests.unit.objectives.test_sft_loss import packed_inputs
from trainers.config.mistakes import ConfigError
from trainers.model import mixers, small_model
from trainers.model.attention import KERNELS
from trainers.model.small_model import choose_attention, small_config
from trainers.objectives.loss_module import LossModule
from trainers.parallel.sequence import refuse_unsplittable_rows
from trainers.strategy.mesh import MeshSizes

HYBRIDS = ["qwen3_next", "falcon_h1", "mamba2", "lfm2_moe", "olmo_hybrid", "jamba", "zaya"]
"""Gated linear attention, Mamba 2 beside attention and alone, short convolutions, both with experts, and queries and
keys that a convolution mixes."""
DOCUMENTS = [[5, 3, 9, 60, 2, 8, 8, 1, 4], [7], [11, 12, 13, 14, 15], [31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20]]


def config_of(family: str) -> Any:
    """The family's default config; LFM2's states no layer types."""
    more = {"layer_types": ["conv", "full_attention"] * 16} if family == "lfm2_moe" else {}
    return AutoConfig.for_model(family, **more)


def model_of(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = small_config(config_of(family))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **settings).eval()


def packed_loss(family: str, checkpointing: bool = False) -> LossModule:
    model = model_of(family, attn_implementation=KERNELS["sdpa"])
    mixers.split_mixers(model)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return LossModule(model)


def stock_loss(family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Summed loss and gradients of the model's own forward pass, one document at a time."""
    stock, total = model_of(family), torch.zeros(())
    for document in DOCUMENTS:
        ids = torch.tensor([document])
        logits = stock(ids, use_cache=False).logits[0, :-1].float()
        total = total + functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    total.backward()
    return total.detach(), {name: weight.grad for name, weight in stock.named_parameters()}


def far(ours: LossModule, family: str) -> float:
    """The largest difference of loss and gradients, relative to the largest of their kind."""
    loss, _ = ours(**packed_inputs(DOCUMENTS))
    loss.backward()
    expected, gradients = stock_loss(family)
    largest = max(float(grad.abs().max()) for grad in gradients.values() if grad is not None)
    worst = float((loss.detach() - expected).abs() / expected)
    for name, weight in ours.model.named_parameters():
        if gradients[name] is not None:
            worst = max(worst, float((weight.grad - gradients[name]).abs().max()) / largest)
    return worst


@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_rows_give_the_loss_and_gradients_of_each_document(family: str) -> None:
    ours = packed_loss(family)
    assert ours.mixers
    assert far(ours, family) < 2e-5


def test_recomputed_layers_see_the_documents_too() -> None:
    assert far(packed_loss("qwen3_next", checkpointing=True), "qwen3_next") < 2e-5


@pytest.mark.parametrize("family", HYBRIDS)
def test_without_it_documents_would_run_into_each_other(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the tests above, and the probe refuses such a model."""
    monkeypatch.setattr(mixers, "split_mixers", lambda model: None)
    monkeypatch.setattr(small_model, "split_mixers", lambda model: None)
    assert far(packed_loss(family), family) > 1e-3
    with pytest.raises(ConfigError, match=r"see later tokens or another document|attention or layers of their own"):
        choose_attention(config_of(family), packing=True)


def test_a_copy_runs_its_own_layers() -> None:
    """Pipelines and tests copy models: a patch bound to the original would train the original's weights."""
    loss = packed_loss("lfm2_moe")
    other = copy.deepcopy(loss)
    for weight in other.parameters():
        torch.nn.init.zeros_(weight)
    assert not torch.equal(loss(**packed_inputs(DOCUMENTS))[0], other(**packed_inputs(DOCUMENTS))[0])


def test_models_without_such_layers_are_left_alone() -> None:
    loss = packed_loss("llama")
    assert loss.mixers == []
    assert not any("forward" in vars(module) for module in loss.base.modules())


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "jamba"])
def test_their_rows_are_not_shared_by_ranks(family: str) -> None:
    text = AutoConfig.for_model(family)
    with pytest.raises(ConfigError, match=r"without attention|carry state|no attention heads"):
        refuse_unsplittable_rows(text, MeshSizes(cp=2))
