"""The rule from hidden states to logits is found by running the model's own head, for weights on any device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from tests.unit.objectives.test_sft_loss import packed_inputs, some_documents
from trainers.model.attention import KERNELS
from trainers.model.small_model import small_config
from trainers.objectives.loss_module import LossModule, inner_model
from trainers.objectives.output_head import HeadRule, find_head_rule

PLAIN = HeadRule()
RULES = {
    "llama": PLAIN, "qwen3_moe": PLAIN, "gpt2": PLAIN, "gpt_neox": PLAIN, "bloom": PLAIN, "mamba": PLAIN, "phi": PLAIN,
    "gpt_oss": PLAIN, "deepseek_v3": PLAIN, "falcon_h1": PLAIN, "qwen3_next": PLAIN, "gemma2": HeadRule(cap=30.0),
    "nanochat": HeadRule(cap=15.0), "cohere2": HeadRule(0.0625), "granitemoe": HeadRule(0.25),
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {"granitemoe": {"logits_scaling": 4.0}}
OTHERS = ["bert", "roberta", "modernbert-decoder"]
"""Families that transform hidden states before the head."""
TRAINED = ["gpt_oss", "gpt_neox", "gpt2", "qwen2_moe", "glm4", "cohere2", "granitemoe"]
"""Their small copies train packed."""


def model_of(family: str, device: str = "meta", **settings: Any) -> Any:
    config = small_config(AutoConfig.for_model(family, **CHANGES.get(family, {})))
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, **settings)


@pytest.mark.parametrize("family", RULES)
def test_the_rule_of_a_family(family: str) -> None:
    assert find_head_rule(model_of(family)) == RULES[family]


def test_a_scale_that_the_config_does_not_state_is_measured() -> None:
    model = model_of("minicpm3")
    rule = find_head_rule(model)
    assert rule is not None
    assert rule.cap is None
    assert rule.scale == pytest.approx(model.config.dim_model_base / model.config.hidden_size, rel=1e-6)


def test_the_rule_of_a_model_of_fake_tensors() -> None:
    """As the memory estimate builds it."""
    with FakeTensorMode():
        assert find_head_rule(model_of("cohere2", "cpu")) == RULES["cohere2"]


@pytest.mark.parametrize("family", OTHERS)
def test_other_heads_are_left_to_the_model(family: str) -> None:
    assert find_head_rule(model_of(family)) is None


class Squared(LlamaForCausalLM):
    """Its logits are no rule of the head's output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.square()
        return output


class Embedding(LlamaForCausalLM):
    """Scales its embeddings before its decoder gets them."""

    def forward(self, input_ids: Any, **kwargs: Any) -> Any:
        return super().forward(inputs_embeds=3 * torch.zeros(*input_ids.shape, 32), **kwargs)


@pytest.mark.parametrize("kind", [LlamaForCausalLM, Squared, Embedding])
def test_a_model_with_a_forward_of_its_own(kind: Any) -> None:
    rule = find_head_rule(kind(small_config(AutoConfig.for_model("llama"))))
    assert rule == (PLAIN if kind is LlamaForCausalLM else None)


def test_an_adapted_head_is_left_to_the_model() -> None:
    adapted: Any = get_peft_model(model_of("llama", "cpu"), LoraConfig(target_modules=["lm_head", "q_proj"]))
    assert find_head_rule(inner_model(adapted)) is None


def test_nothing_of_the_model_changes() -> None:
    model = model_of("phi", "cpu")
    before, state = {name: id(weight) for name, weight in model.named_parameters()}, torch.get_rng_state()
    assert find_head_rule(model) == PLAIN
    assert {name: id(weight) for name, weight in model.named_parameters()} == before
    assert torch.equal(torch.get_rng_state(), state), "later random numbers would differ"
    assert "forward" not in vars(model.get_decoder())


@pytest.mark.parametrize("family", TRAINED)
def test_the_loss_and_its_gradients_are_the_models_own(family: str) -> None:
    ours = LossModule(model_of(family, "cpu", attn_implementation=KERNELS["sdpa"], dtype=torch.float32).eval())
    assert ours.chunked
    stock = model_of(family, "cpu", dtype=torch.float32).eval()
    inputs = packed_inputs([[token % 64 for token in one] for one in some_documents()])
    loss, _ = ours(**inputs)
    loss.backward()
    total = torch.zeros(())
    for document in some_documents():
        ids = torch.tensor([[token % 64 for token in document]])
        logits = stock(ids).logits[0, :-1].float()
        total = total + functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    total.backward()
    torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-5)
    expected = {name: weight.grad for name, weight in stock.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    for name, weight in ours.model.named_parameters():
        if expected[name] is not None:
            torch.testing.assert_close(weight.grad, expected[name], rtol=1e-3, atol=1e-5 * largest, msg=name)


def test_a_wrong_scale_would_be_seen() -> None:
    """Control of the test above."""
    ours = LossModule(model_of("cohere2", "cpu", attn_implementation=KERNELS["sdpa"]).eval())
    right, _ = ours(**packed_inputs([[1, 2, 3], [4, 5]]))
    ours.rule = HeadRule(0.065)
    wrong, _ = ours(**packed_inputs([[1, 2, 3], [4, 5]]))
    assert not torch.isclose(right, wrong, rtol=1e-5)


def test_full_logits_are_never_made() -> None:
    """For a family that no list names: the head is called in chunks by the loss, never by the model."""
    ours = LossModule(model_of("gpt_neox", "cpu", attn_implementation=KERNELS["sdpa"]).eval())
    called: list[nn.Module] = []
    ours.base.get_output_embeddings().register_forward_hook(lambda module, inputs, output: called.append(module))
    ours(**packed_inputs([[1, 2, 3], [4, 5]]))
    assert called == []
    ours.chunked = False  # control
    ours(**packed_inputs([[1, 2, 3], [4, 5]]))
    assert len(called) == 1
