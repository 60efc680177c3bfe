"""The documents of packed rows reach attention as an argument, or by a variable in families that drop it on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.families import FAMILIES
from trainers.config.mistakes import ConfigError
from trainers.data.layout import AttentionMetadata, DocumentLayout, MetadataRoute
from trainers.model.attention import KERNELS
from trainers.model.small_model import choose_attention, small_config
from trainers.objectives.loss_module import LossModule

DROPS = {"stablelm"}
"""Families whose layers do not hand the arguments of the model call on to attention."""
ODD = {"bailing_hybrid", "longcat_flash", "xlstm", "zamba2", "blt"}
"""Families whose small copy fails by itself in a forward pass, or that bring a mask of their own."""
LEAST_HELD = 75
"""So that the test of all families cannot pass by leaving them out."""
SAMPLE = ("llama", "gpt2", "gemma3_text", "qwen3_moe", "stablelm")
BORDERS = (0, 5, 12, 20)


def small_loss(family: str) -> LossModule:
    """Of a small random model with our plain attention.

    Raises:
        Exception: of any kind, where the family's sizes are bound to each other in another way.
    """
    config = small_config(AutoConfig.for_model(family))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=KERNELS["eager"])
    return LossModule(model).eval()


def inputs(first_token: int = 1, packed: bool = True, borders: tuple[int, ...] = BORDERS) -> dict[str, Any]:
    """A row of documents; the loss is that of all but the first.

    Args:
        first_token: of the first document.
        packed: False for a fault on purpose: the documents are not told apart.
    """
    ids = torch.arange(borders[-1])[None] * 3 % 50 + 1
    ids[0, 0] = first_token
    starts = np.repeat(borders[:-1], np.diff(borders))
    positions = torch.tensor([index for index in range(borders[1], borders[-1] - 1) if index + 1 not in borders])
    layout = DocumentLayout.of(np.array(borders), 1)
    position_ids = torch.from_numpy(np.arange(borders[-1]) - starts)[None]
    return {"input_ids": ids, "position_ids": position_ids, "documents": layout if packed else None,
            "positions": positions, "labels": ids[0, positions + 1]}  # fmt: skip


def outcome(loss: LossModule, by_argument: bool | None, **changes: Any) -> list[torch.Tensor]:
    """Loss and gradients, with the documents handed over in one way."""
    loss.route.by_argument = by_argument
    loss.zero_grad()
    total, _ = loss(**inputs(**changes))
    total.backward()
    return [total.detach(), *(weight.grad.clone() for weight in loss.parameters() if weight.grad is not None)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


def alike(loss: torch.Tensor, other: torch.Tensor) -> bool:
    """But for the order of sums, which follows the number of tokens of each expert."""
    return torch.allclose(loss, other, rtol=1e-6, atol=0)


def hold(family: str) -> None:
    """Asserts that a family goes the way that is known of it, with the same loss and gradients as by the other way."""
    loss = small_loss(family)
    first = outcome(loss, None)
    assert loss.route.by_argument is (family not in DROPS)
    ways = [False, True] if loss.route.by_argument else [False]
    for by_argument in ways:
        assert same(first, outcome(loss, by_argument)), "both ways are one"
        changed = outcome(loss, by_argument, first_token=40)
        assert alike(first[0], changed[0]), "no document sees another"
    leaking = [outcome(loss, ways[-1], first_token=token, packed=False)[0] for token in (1, 40)]
    assert not alike(*leaking), "control: without their borders they do"


@pytest.mark.parametrize("family", SAMPLE)
def test_both_ways_give_the_same_loss(family: str) -> None:
    hold(family)


@pytest.mark.long
def test_both_ways_give_the_same_loss_in_every_family() -> None:
    held, refused, unsized, failed = list[str](), list[str](), list[str](), dict[str, str]()
    for family in set(FAMILIES) - set(SAMPLE):
        try:
            small_loss(family)
        except Exception:  # the sizes of its small copy do not go together; families raise what they like
            unsized.append(family)
            continue
        try:
            assert choose_attention(AutoConfig.for_model(family), packing=True) in KERNELS.values()
            hold(family)
            held.append(family)
        except ConfigError:  # it is not trained packed
            refused.append(family)
        except Exception as error:
            failed[family] = f"{type(error).__name__}: {error}"
    assert failed.keys() == ODD, f"{failed}"
    assert len(held) >= LEAST_HELD, f"held: {sorted(held)}; refused: {sorted(refused)}; no small copy: {unsized}"


def drop_argument(loss: LossModule) -> None:
    """Gives a model a layer that takes any argument and does not hand it on."""
    for layer in loss.base.get_decoder().layers[1:]:
        layer.register_forward_pre_hook(_without_metadata, with_kwargs=True)


def _without_metadata(layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, {name: value for name, value in kwargs.items() if name != "attention_metadata"}


def test_one_layer_that_drops_the_argument_is_enough_for_the_variable() -> None:
    expected = outcome(small_loss("llama"), None)
    loss = small_loss("llama")
    drop_argument(loss)
    assert same(expected, outcome(loss, None))
    assert loss.route.by_argument is False


def test_an_argument_that_is_lost_later_is_an_error_and_no_leak() -> None:
    loss = small_loss("llama")
    outcome(loss, None)
    assert (loss.route.by_argument, MetadataRoute.current) == (True, None)
    drop_argument(loss)
    with pytest.raises(RuntimeError, match="attention_metadata did not reach this attention layer"):
        outcome(loss, True)


def test_a_model_that_takes_no_further_arguments_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, loss = outcome(small_loss("llama"), None), small_loss("llama")
    decoder = loss.base.get_decoder()
    forward: Callable[..., Any] = decoder.forward

    def strict(input_ids: torch.Tensor, position_ids: torch.Tensor, use_cache: bool) -> Any:
        return forward(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)

    monkeypatch.setattr(decoder, "forward", strict)
    strict_loss = LossModule(loss.model).eval()
    assert strict_loss.route.by_argument is False
    assert same(expected, outcome(strict_loss, False))


@pytest.mark.parametrize("by_argument", [True, False])
def test_layers_that_are_computed_again_see_the_documents_of_their_own_micro_batch(by_argument: bool) -> None:
    """As in a pipeline, where another micro-batch's forward pass comes before the backward pass of the first."""
    loss = small_loss("llama")
    expected = outcome(loss, True)
    loss.train().base.gradient_checkpointing_enable()
    assert same(expected, outcome(loss, by_argument)), "it is the same model, without dropout"
    loss.zero_grad()
    total, _ = loss(**inputs())
    loss(**inputs(borders=(0, 9, 12, 20)))
    total.backward()
    gradients = [weight.grad for weight in loss.parameters() if weight.grad is not None]
    # Control: by the variable alone they would see those of the other, which a pipeline has to prevent.
    assert same(expected[1:], gradients) is by_argument


def test_metadata_says_which_way_it_came() -> None:
    """A route is decided by all layers, and by none of a model whose attention is its own."""
    loss = small_loss("llama")
    loss.base.set_attn_implementation("eager")
    with loss.route.hand_over(AttentionMetadata()) as arguments:
        assert arguments == {}
    assert loss.route.by_argument is None
