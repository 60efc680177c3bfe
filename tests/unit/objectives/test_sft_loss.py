"""The chunked loss equals each model's own forward pass, and packed documents never see one another."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.rounding import bound, relative, reordered
from trainers.data.layout import AttentionMetadata, DocumentLayout
from trainers.model.attention import KERNELS
from trainers.objectives import sft
from trainers.objectives.loss_module import LossModule
from trainers.objectives.sft import linear_cross_entropy
from trainers.parallel.pipeline_split import FAMILIES

TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "mistral": {"sliding_window": 4},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "phi": {"num_key_value_heads": 4},
}


CASES = [
    (family, KERNELS[kernel])
    for family in sorted(FAMILIES)
    for kernel in (("eager",) if "attn_logit_softcapping" in EXTRA.get(family, {}) else ("documents", "sdpa", "eager"))
]
"""Families, and the kernels that train them on a CPU."""


def tiny_model(family: str, kernel: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **EXTRA.get(family, {})})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel)
    for weight in model.parameters():  # large enough that caps, scales and biases matter
        torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def packed_inputs(documents: list[list[int]]) -> dict[str, Any]:
    ids = torch.tensor([[token for one in documents for token in one]])
    place = torch.tensor([[index for one in documents for index in range(len(one))]])
    starts = [sum(len(one) for one in documents[:index]) for index in range(len(documents) + 1)]
    positions = [start + index for start, one in zip(starts, documents, strict=False) for index in range(len(one) - 1)]
    chosen = torch.tensor(positions)
    return {"input_ids": ids, "position_ids": place, "documents": DocumentLayout.of(np.array(starts), 1),
            "positions": chosen, "labels": ids[0, chosen + 1]}  # fmt: skip


def some_documents(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (size,), generator=generator).tolist() for size in (9, 5, 12)]


@functools.cache
def stock_pass(family: str, order: str | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss and gradients of the model's own forward pass, one document at a time."""
    stock, total = tiny_model(family, "eager"), torch.zeros(())
    with reordered(order):
        for one in some_documents():
            logits = stock(torch.tensor([one])).logits[0, :-1].float()
            total = total + functional.cross_entropy(logits, torch.tensor(one[1:]), reduction="sum")
        total.backward()
    return total.detach(), {name: weight.grad for name, weight in stock.named_parameters()}


@pytest.mark.parametrize(("family", "kernel"), CASES)
def test_equals_the_models_own_forward_pass(family: str, kernel: str) -> None:
    ours = LossModule(tiny_model(family, kernel))
    assert ours.chunked
    loss, _ = ours(**packed_inputs(some_documents()))
    loss.backward()
    (expected, gradients), (other, others) = stock_pass(family), stock_pass(family, "backwards")
    assert relative(loss, expected) <= bound(relative(other, expected))
    floor = 1e-3 * max(float(one.abs().max()) for one in gradients.values())  # a bias of keys has no gradient at all
    limit = bound(*(relative(others[name], one, floor) for name, one in gradients.items()))
    found = {name: relative(weight.grad, gradients[name], floor) for name, weight in ours.model.named_parameters()}
    assert {name: value for name, value in found.items() if not value <= limit} == {}, limit


def test_own_forward_of_other_models_is_the_same_number() -> None:
    module = LossModule(tiny_model("llama", KERNELS["sdpa"]))
    chunked, _ = module(**packed_inputs(some_documents()))
    module.chunked = False
    own, _ = module(**packed_inputs(some_documents()))
    assert relative(chunked, own) <= bound(relative(stock_pass("llama", "backwards")[0], stock_pass("llama")[0]))


def logits_of_second(documents: list[list[int]], family: str, kernel: str, numbers: bool = True) -> torch.Tensor:
    model = tiny_model(family, kernel)
    inputs = packed_inputs(documents)
    metadata = AttentionMetadata(inputs["documents"] if numbers else None)
    with LossModule(model).route.hand_over(metadata) as more, torch.no_grad():
        logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], **more).logits
    start = len(documents[0])
    return logits[0, start : start + len(documents[1])]


@pytest.mark.parametrize(("family", "kernel"), CASES)
def test_no_document_sees_another(family: str, kernel: str) -> None:
    first, second, third = some_documents()
    changed = [(token + 7) % 90 + 3 for token in first]
    before = logits_of_second([first, second, third], family, kernel)
    after = logits_of_second([changed, second, third], family, kernel)
    assert torch.equal(before, after)


def test_contamination_would_be_seen() -> None:
    """Negative control: without document numbers the second document's logits move."""
    first, second, third = some_documents()
    changed = [(token + 7) % 90 + 3 for token in first]
    before = logits_of_second([first, second, third], "llama", KERNELS["sdpa"], numbers=False)
    after = logits_of_second([changed, second, third], "llama", KERNELS["sdpa"], numbers=False)
    assert (before - after).abs().max() > 1e-3


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_by_finite_differences(cap: float | None, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients taken in the forward pass, against the plain formula in fp64; several chunks."""
    monkeypatch.setattr(sft, "LOGITS_PER_CHUNK", 1)
    torch.manual_seed(1)
    hidden = torch.randn(150, 8, requires_grad=True)
    weight = torch.randn(11, 8, requires_grad=True)
    offset = torch.randn(11, requires_grad=True) if bias else None
    labels = torch.randint(0, 11, (150,))
    leaves = [hidden, weight] + ([offset] if offset is not None else [])

    loss, _ = linear_cross_entropy(hidden, weight, offset, labels, 0.7, cap)
    mine = [loss, *torch.autograd.grad(loss * 1.5, leaves)]

    def plain(hidden: torch.Tensor, weight: torch.Tensor, *offset: torch.Tensor) -> list[torch.Tensor]:
        logits = functional.linear(hidden, weight, *offset) * 0.7
        logits = torch.tanh(logits / cap) * cap if cap else logits
        total = functional.cross_entropy(logits, labels, reduction="sum")
        return [total, *torch.autograd.grad(total * 1.5, (hidden, weight, *offset))]

    exact = plain(*(one.detach().double().requires_grad_() for one in leaves))
    for one, rounded, expected in zip(mine, plain(*leaves), exact, strict=True):
        assert relative(one, expected) <= bound(relative(rounded, expected))


def test_a_row_of_weight_zero_has_zero_gradients() -> None:
    """A rank without rows still takes part in the backward pass, and adds nothing."""
    module = LossModule(tiny_model("llama", KERNELS["sdpa"]))
    nothing = torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, 1, dtype=torch.int64)
    loss, _ = module(one, one, None, nothing, nothing)
    loss.backward()
    assert loss.item() == 0
    assert all(weight.grad is not None and not weight.grad.any() for weight in module.parameters())


def test_predicted_right_is_counted_in_evaluation() -> None:
    module = LossModule(tiny_model("llama", KERNELS["sdpa"]))
    inputs = packed_inputs(some_documents())
    with torch.no_grad():
        _, correct = module(**inputs)
        arguments = {name: inputs[name] for name in ("input_ids", "position_ids")}
        arguments["attention_metadata"] = AttentionMetadata(inputs["documents"])
        logits = module.model(**arguments).logits[0]
    expected = (logits[inputs["positions"]].argmax(-1) == inputs["labels"]).sum()
    assert correct == expected


class HostSyncs(TorchDispatchMode):
    """Counts the operations that make a GPU's host wait: reading a value, or a shape that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket._qualified_op_name.partition("::")[2]
        masks = name == "index" and any(one is not None and one.dtype == torch.bool for one in arguments[1])
        if masks or name in ("_local_scalar_dense", "nonzero", "equal"):
            self.names.append(str(function))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("packed", [True, False])
def test_a_micro_batch_never_waits_for_the_device(packed: bool) -> None:
    module = LossModule(tiny_model("llama", KERNELS["sdpa"]))
    inputs = packed_inputs(some_documents()) | ({} if packed else {"documents": None})
    with HostSyncs() as seen:
        loss, _ = module(**inputs)
        (loss * 0.5).backward()
    assert seen.names == []


@pytest.mark.parametrize("wait", [torch.Tensor.item, bool, lambda one: torch.ones(3)[torch.ones(3) > one]])
def test_a_wait_for_the_device_would_be_seen(wait: Any) -> None:
    """Control: reading a loss, deciding by it, and picking rows by a mask are each counted."""
    with HostSyncs() as seen:
        wait(torch.zeros(()))
    assert seen.names
