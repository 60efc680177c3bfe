"""What a document learns does not depend on what stands beside it, whatever its rotary embedding."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.rounding import bound, reordered
from tests.unit.objectives.test_sft_loss import TINY, packed_inputs
from trainers.config.validation import build
from trainers.model.attention import KERNELS
from trainers.model.load import compile_blocks, use_checkpointing
from trainers.model.rotary import choose_by_document, document_lengths
from trainers.objectives.loss_module import LossModule

CONTEXT = 16
LENGTHS = (5, 20, 30, 16, 17)
"""Within the original context, and beyond it by more and by less; the longest is not the last."""
ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": CONTEXT},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": CONTEXT, "short_factor": [1.0] * 4,
                 "long_factor": [1.0, 2.0, 4.0, 8.0]},
    "llama3": {"factor": 4.0, "original_max_position_embeddings": CONTEXT, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}  # fmt: skip
BY_LENGTH = {"dynamic", "longrope"}


def rope_model(kind: str, family: str = "llama") -> Any:
    torch.manual_seed(0)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 100.0, **ROPE[kind]}
    changes: dict[str, Any] = {"max_position_embeddings": CONTEXT if kind == "dynamic" else 4 * CONTEXT}
    if family == "gemma3_text":
        plain = {"rope_type": "default", "rope_theta": 100.0}
        changes |= {"rope_parameters": {"full_attention": rope, "sliding_attention": plain}, "sliding_window": 64,
                    "layer_types": ["sliding_attention", "full_attention", "full_attention"]}  # fmt: skip
    else:
        changes |= {"rope_parameters": rope}
    if "longrope" in kind and family == "phi3":
        changes |= {"original_max_position_embeddings": CONTEXT}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**TINY, **changes}))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 97, (size,), generator=generator).tolist() for size in LENGTHS]


@functools.cache
def one_at_a_time(kind: str, family: str, order: str | None = None) -> tuple[float, torch.Tensor]:
    """Summed loss and gradients of the stock model, which has seen nothing before each document."""
    model, loss, gradient = rope_model(kind, family), 0.0, torch.zeros(())
    for one in documents():
        fresh, ids = copy.deepcopy(model), torch.tensor([one])
        with reordered(order):
            logits = fresh(input_ids=ids, use_cache=False).logits[0, :-1]
            summed = functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            summed.backward()
        loss, gradient = loss + summed.item(), gradient + gradients(fresh)
    return loss, gradient


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def padded_inputs() -> dict[str, Any]:
    """One document per row, padded on the right by a document of its own."""
    width, rows = max(LENGTHS), documents()
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    place = torch.tensor([[*range(len(row)), *range(width - len(row))] for row in rows])
    positions = torch.tensor([line * width + at for line, row in enumerate(rows) for at in range(len(row) - 1)])
    return {"input_ids": ids, "position_ids": place, "documents": None, "positions": positions,
            "labels": ids.flatten()[positions + 1]}  # fmt: skip


def together(model: Any, packed: bool) -> tuple[float, torch.Tensor]:
    model.set_attn_implementation(KERNELS["eager"])
    loss, _ = LossModule(model)(**(packed_inputs(documents()) if packed else padded_inputs()))
    loss.backward()
    return loss.item(), gradients(model)


def apart(one: tuple[float, torch.Tensor], other: tuple[float, torch.Tensor]) -> tuple[float, float]:
    """Relative differences of losses and of gradients."""
    return abs(one[0] - other[0]) / other[0], ((one[1] - other[1]).norm() / other[1].norm()).item()


CASES = [(kind, "llama") for kind in ["default", *ROPE_INIT_FUNCTIONS]]
CASES += [("longrope", "phi3"), ("dynamic", "gemma3_text"), ("longrope", "gemma3_text")]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(("kind", "family"), CASES)
def test_documents_side_by_side_train_as_one_at_a_time(kind: str, family: str, packed: bool) -> None:
    model = rope_model(kind, family)
    wanted, stock = one_at_a_time(kind, family), together(copy.deepcopy(model), packed)
    choose_by_document(model)
    ours = together(model, packed)
    spreads = apart(one_at_a_time(kind, family, "backwards"), wanted)
    assert all(found <= bound(spread) for found, spread in zip(apart(ours, wanted), spreads, strict=True))
    again = together_again(model, packed)
    assert again == ours[0], "what was seen before changes nothing"
    if kind in BY_LENGTH:
        assert max(apart(stock, wanted)) > 1e-2, "the control: transformers goes by the longest"


def together_again(model: Any, packed: bool) -> float:
    model.zero_grad()
    return together(model, packed)[0]


def made_ready(model: Any, way: str) -> Any:
    if way == "compiled":
        compile_blocks(model)
    else:
        options = {"gradient_checkpointing": True, "selective_checkpointing": way == "selective"}
        use_checkpointing(model, build({"model_name_or_path": "embedded", "dataset_name": "embedded", **options}))
    return model


WAYS = [(way, packed) for way in ("checkpointed", "selective") for packed in (True, False)]


@pytest.mark.parametrize(("way", "packed"), [*WAYS, ("compiled", True)])
@pytest.mark.parametrize("kind", sorted(BY_LENGTH))
def test_they_do_however_the_layers_are_run(kind: str, way: str, packed: bool) -> None:
    model, wanted = rope_model(kind), one_at_a_time(kind, "llama")
    stock = together(made_ready(copy.deepcopy(model), way), packed)
    choose_by_document(model)
    ours = together(made_ready(model, way), packed)
    spreads = apart(one_at_a_time(kind, "llama", "backwards"), wanted)
    assert all(found <= bound(spread) for found, spread in zip(apart(ours, wanted), spreads, strict=True))
    assert max(apart(stock, wanted)) > 1e-2, "the control: transformers goes by the longest"


def test_the_length_of_each_document() -> None:
    position_ids = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5], [7, 8, 0, 1, 0, 1]])
    wanted = [[3, 3, 3, 1, 2, 2], [6] * 6, [9, 9, 2, 2, 2, 2]]
    assert document_lengths(position_ids).tolist() == wanted
