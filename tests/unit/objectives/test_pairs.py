"""Losses of preference pairs against their papers' formulas, written out here in fp64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from trainers.config.objectives import OBJECTIVES, OWN_OPTIONS
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.data.layout import Scales, ScoredDocuments
from trainers.objectives.objective import DocumentLoss, document_loss

PAIRS = 5
NLL_SCALE = 0.04


def config(objective: str, **options: Any) -> TrainConfig:
    """A valid config with the objective."""
    needed = {"model_name_or_path": "embedded", "dataset_name": "pairs.jsonl"}
    return build({**needed, "objective": objective, **options})


def loss_of(objective: str, **options: Any) -> DocumentLoss:
    """The objective's loss."""
    made = document_loss(config(objective, **options))
    assert made is not None
    return made


def documents(reference: bool = True) -> tuple[torch.Tensor, ScoredDocuments]:
    """Log-probabilities of pairs of different lengths, and their documents."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 30, (2 * PAIRS,), generator=generator).double()
    log_probs = (-torch.rand(2 * PAIRS, generator=generator, dtype=torch.float64) * tokens).requires_grad_()
    initial = -torch.rand(2 * PAIRS, generator=generator, dtype=torch.float64) * tokens
    numbers = np.arange(2 * PAIRS)
    of_label = torch.zeros(0, dtype=torch.int64)
    return log_probs, ScoredDocuments(of_label, tokens, initial if reference else None, Scales(NLL_SCALE), numbers)


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def odds(mean: float) -> float:
    return math.exp(mean) / (1 - math.exp(mean))


# Each takes (chosen, rejected, tokens of both, reference of both), as plain numbers.
FORMULAS = {
    ("dpo", ()): lambda c, r, n, m, a, b: -math.log(sigmoid(0.1 * ((c - a) - (r - b)))),
    ("dpo", (("label_smoothing", 0.2),)): lambda c, r, n, m, a, b: (
        -0.8 * math.log(sigmoid(0.1 * ((c - a) - (r - b)))) - 0.2 * math.log(sigmoid(-0.1 * ((c - a) - (r - b))))
    ),
    ("dpo", (("loss_type", "hinge"), ("beta", 0.5))): lambda c, r, n, m, a, b: max(0, 1 - 0.5 * ((c - a) - (r - b))),
    ("dpo", (("loss_type", "ipo"),)): lambda c, r, n, m, a, b: ((c - a) / n - (r - b) / m - 1 / 0.2) ** 2,
    ("dpo", (("loss_type", "robust"), ("label_smoothing", 0.1))): lambda c, r, n, m, a, b: (
        (-0.9 * math.log(sigmoid(0.1 * ((c - a) - (r - b)))) + 0.1 * math.log(sigmoid(-0.1 * ((c - a) - (r - b)))))
        / 0.8
    ),
    ("dpo", (("loss_type", "sigmoid_norm"), ("beta", 2.0))): lambda c, r, n, m, a, b: (
        -math.log(sigmoid(2.0 * ((c - a) / n - (r - b) / m)))
    ),
    ("dpo", (("nll_weight", 0.2),)): lambda c, r, n, m, a, b: (
        -math.log(sigmoid(0.1 * ((c - a) - (r - b)))) - 0.2 * NLL_SCALE * c
    ),
    ("simpo", ()): lambda c, r, n, m, a, b: -math.log(sigmoid(2.0 * (c / n - r / m) - 1.0)),
    ("simpo", (("simpo_gamma", 0.3), ("beta", 2.5))): lambda c, r, n, m, a, b: (
        -math.log(sigmoid(2.5 * (c / n - r / m) - 0.3))
    ),
    ("cpo", ()): lambda c, r, n, m, a, b: -math.log(sigmoid(0.1 * (c - r))) - NLL_SCALE * c,
    ("cpo", (("loss_type", "hinge"), ("nll_weight", 0.5))): lambda c, r, n, m, a, b: (
        max(0, 1 - 0.1 * (c - r)) - 0.5 * NLL_SCALE * c
    ),
    ("cpo", (("loss_type", "ipo"), ("nll_weight", 0.0))): lambda c, r, n, m, a, b: (c / n - r / m - 1 / 0.2) ** 2,
    ("orpo", ()): lambda c, r, n, m, a, b: (
        -0.1 * math.log(sigmoid(math.log(odds(c / n) / odds(r / m)))) - NLL_SCALE * c
    ),
}


@pytest.mark.parametrize(("objective", "options"), FORMULAS)
def test_the_loss_is_its_papers(objective: str, options: tuple[tuple[str, Any], ...]) -> None:
    log_probs, pairs = documents(reference=OBJECTIVES[objective].reference)
    loss, metrics = loss_of(objective, **dict(options))(log_probs, pairs)
    _, with_reference = documents()
    assert with_reference.reference is not None
    columns = [values.view(-1, 2).tolist() for values in (log_probs, pairs.tokens, with_reference.reference)]
    formula = FORMULAS[objective, options]
    wanted = sum(formula(*one, *tokens, *initial) for one, tokens, initial in zip(*columns, strict=True))
    assert float(loss) == pytest.approx(wanted, rel=1e-12)
    assert torch.autograd.gradcheck(lambda values: loss_of(objective, **dict(options))(values, pairs)[0], log_probs)
    assert len(metrics) == len(OBJECTIVES[objective].metrics)
    assert not metrics.requires_grad


def test_chosen_and_rejected_the_other_way_round_is_another_loss() -> None:
    """Control of the formulas: pairs that are swapped, tokens and reference with them."""
    log_probs, pairs = documents()
    assert pairs.reference is not None
    order = torch.arange(2 * PAIRS).view(-1, 2).flip(1).reshape(-1)
    swapped = ScoredDocuments(
        pairs.of_label, pairs.tokens[order], pairs.reference[order], Scales(NLL_SCALE), pairs.numbers
    )
    for objective in ("dpo", "simpo", "cpo", "orpo"):
        loss = loss_of(objective)
        assert float(loss(log_probs, pairs)[0]) != pytest.approx(float(loss(log_probs[order], swapped)[0]), rel=1e-3)


def test_metrics_are_sums_of_rewards() -> None:
    log_probs, pairs = documents()
    assert pairs.reference is not None
    _, (accuracy, margin, chosen, rejected) = loss_of("dpo", beta=0.5)(log_probs, pairs)
    rewards = 0.5 * (log_probs.detach() - pairs.reference).view(-1, 2)
    assert float(accuracy) == int((rewards[:, 0] > rewards[:, 1]).sum())
    assert float(chosen) == pytest.approx(float(rewards[:, 0].sum()))
    assert float(margin) == pytest.approx(float(chosen - rejected))


def test_the_odds_of_a_certain_answer_are_finite() -> None:
    tokens, numbers = torch.ones(2, dtype=torch.float64), np.arange(2)
    pairs = ScoredDocuments(torch.zeros(0, dtype=torch.int64), tokens, None, Scales(NLL_SCALE), numbers)
    log_probs = torch.tensor([0.0, -200.0], dtype=torch.float64, requires_grad=True)
    loss, _ = loss_of("orpo")(log_probs, pairs)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert torch.isfinite(loss)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("spec", OBJECTIVES.values(), ids=lambda spec: spec.name)
def test_an_objective_reads_exactly_the_options_that_it_names(spec: Any) -> None:
    """Others are reported as ignored; those that it names change its loss, which the formulas show."""
    reads = {*spec.defaults, *(["loss_type"] if spec.loss_types else [])}
    assert reads <= set(OWN_OPTIONS)
    if spec.loss_of == "labels":
        assert not reads
        return
    settings = config(spec.name, **({"teacher": "embedded"} if spec.teacher else {}))
    assert set(settings.objective_options()) == reads
