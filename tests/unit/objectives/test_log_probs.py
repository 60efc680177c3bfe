"""Losses of log-probabilities in chunks, held against one softmax over all tokens."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from trainers.objectives import log_probs
from trainers.objectives.log_probs import VocabularyShard, scored_log_probs
from trainers.objectives.output_head import HeadRule

LABELS, HIDDEN, VOCABULARY = 300, 12, 40


def tensors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight, bias and labels."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(LABELS, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, weight, bias, torch.randint(VOCABULARY, (LABELS,), generator=generator)


def score(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Not a sum over tokens: a token's gradient depends on all others."""
    return torch.sigmoid(values[::2].sum() / 40 - values[1::2].sum() / 40), values.detach()[:3]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("with_bias", [True, False])
def test_loss_and_gradients_equal_one_softmax_over_all_tokens(
    temperature: float, cap: float | None, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_probs, "LOGITS_PER_CHUNK", VOCABULARY)  # five chunks of 64 tokens, the least
    hidden, weight, bias, labels = tensors()
    used = [hidden, weight, *([bias] if with_bias else [])]
    rule, part = HeadRule(0.7, cap), VocabularyShard(0, VOCABULARY)
    chosen = bias if with_bias else None
    loss, metrics = scored_log_probs(hidden, weight, chosen, labels, rule, part, score, temperature)
    ours = torch.autograd.grad(loss * 3, used)

    logits = rule(functional.linear(hidden, weight, chosen)) / temperature
    wanted, of_plain = score(logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1))
    theirs = torch.autograd.grad(wanted * 3, used)
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(metrics, of_plain)
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-14)


def test_a_gradient_that_ignores_the_other_tokens_would_be_seen() -> None:
    """Control: with an upstream gradient of one for each token, as in supervised training, the gradients differ."""
    hidden, weight, _, labels = tensors()
    rule, part = HeadRule(), VocabularyShard(0, VOCABULARY)
    loss, _ = scored_log_probs(hidden, weight, None, labels, rule, part, score)
    summed, _ = scored_log_probs(hidden, weight, None, labels, rule, part, lambda values: (values.sum(), values[:0]))
    (ours,), (other,) = torch.autograd.grad(loss, hidden), torch.autograd.grad(summed, hidden)
    assert not torch.allclose(ours / ours.norm(), other / other.norm(), atol=0.1)


def test_no_label_gives_a_loss_with_zero_gradients() -> None:
    """A rank without a row does the same passes as the others."""
    hidden, weight, _, labels = tensors()
    empty = hidden[:0]
    loss, _ = scored_log_probs(
        empty,
        weight,
        None,
        labels[:0],
        HeadRule(),
        VocabularyShard(0, VOCABULARY),
        lambda values: (values.sum(), values),
    )
    (gradient,) = torch.autograd.grad(loss, weight)
    assert float(loss) == 0
    assert not gradient.any()


def test_without_gradients_there_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation computes no logits twice. Control: training does."""
    made: list[int] = []

    class Counted(log_probs._Chunk):
        def __init__(self, *args: object):
            made.append(1)
            super().__init__(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(log_probs, "_Chunk", Counted)
    hidden, weight, _, labels = tensors()
    arguments = (hidden, weight, None, labels, HeadRule(), VocabularyShard(0, VOCABULARY), score)
    with torch.no_grad():
        scored_log_probs(*arguments)
    evaluated = len(made)
    scored_log_probs(*arguments)
    assert (evaluated, len(made)) == (1, 3)
