"""KTO's loss against its paper's formula in fp64, and its divergence over the global batch, however that is split."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.steps import steps
from tests.unit.objectives.test_pairs import config, loss_of, sigmoid
from trainers.config.objectives import OBJECTIVES
from trainers.data.layout import Scales, ScoredDocuments
from trainers.objectives.global_terms import divergence
from trainers.reference import set_reference
from trainers.strategy.strategy import load_strategy

LABELS = [True, False, True, True, False]
KL = 0.7


def documents(labels: list[bool] | None = LABELS) -> tuple[torch.Tensor, ScoredDocuments]:
    """Log-probabilities of examples, and their documents, of which some are likelier than under the initial model."""
    generator = torch.Generator().manual_seed(2)
    log_probs, initial = (-20 * torch.rand(5, generator=generator, dtype=torch.float64) for _ in range(2))
    desirable = None if labels is None else torch.tensor(labels)
    kl = torch.tensor(KL, dtype=torch.float64)
    tokens, of_label = torch.ones(5), torch.zeros(0, dtype=torch.int64)
    scales = Scales(1.0, 5 / 3, 5 / 2)
    scored = ScoredDocuments(of_label, tokens, initial, scales, np.arange(5), desirable, kl)
    return log_probs.requires_grad_(), scored


@pytest.mark.parametrize(
    "options",
    [{}, {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.2}, {"loss_type": "apo_zero_unpaired"}],
)
def test_the_loss_is_its_papers(options: dict[str, Any]) -> None:
    log_probs, scored = documents()
    assert scored.reference is not None
    beta, kl = options.get("beta", 0.1), 0.0 if "loss_type" in options else KL
    wanted = 0.0
    for ratio, good in zip((log_probs.detach() - scored.reference).tolist(), LABELS, strict=True):
        if good:
            wanted += options.get("desirable_weight", 1.0) * (1 - sigmoid(beta * (ratio - kl)))
        else:
            wanted += options.get("undesirable_weight", 1.0) * (1 - sigmoid(beta * (kl - ratio)))
    loss, metrics = loss_of("kto", **options)(log_probs, scored)
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    assert torch.autograd.gradcheck(lambda values: loss_of("kto", **options)(values, scored)[0], log_probs)
    assert len(metrics) == len(config("kto", **options).objective_spec.metrics)
    assert not metrics.requires_grad
    # Controls: one wrong label, another divergence.
    wrong = replace(scored, desirable=torch.tensor([not LABELS[0], *LABELS[1:]]))
    assert loss_of("kto", **options)(log_probs, wrong)[0].item() != pytest.approx(wanted, rel=1e-3)
    further = loss_of("kto", **options)(log_probs, replace(scored, kl=torch.tensor(KL + 1)))[0].item()
    assert (further == pytest.approx(wanted, rel=1e-12)) == ("loss_type" in options)


def test_rewards_are_means_over_the_examples_with_their_label() -> None:
    """Control: divided by all examples, they would be smaller."""
    log_probs, scored = documents()
    assert scored.reference is not None
    rewards = (0.1 * (log_probs.detach() - scored.reference)).numpy()
    good = np.array(LABELS)
    _, metrics = loss_of("kto")(log_probs, scored)
    named = dict(zip(OBJECTIVES["kto"].metrics, (metrics / 5).tolist(), strict=True))
    assert named["reward_desirable"] == pytest.approx(rewards[good].mean()) != rewards[good].sum() / 5
    assert named["reward_undesirable"] == pytest.approx(rewards[~good].mean())
    assert named["reward_margin"] == pytest.approx(rewards[good].mean() - rewards[~good].mean())
    assert named["reward_accuracy"] == ((rewards > 0.1 * KL) == good).mean()
    assert named["kl"] == pytest.approx(KL)


def test_the_divergence_is_a_mean_and_never_negative() -> None:
    log_probs, scored = documents(labels=None)
    assert scored.reference is not None
    total, metrics = loss_of("kto")(log_probs, scored)
    ratios = (log_probs.detach() - scored.reference).tolist()
    assert len(metrics) == 0
    assert total.item() == pytest.approx(sum(ratios))
    assert divergence(total.detach(), 5).item() == pytest.approx(max(sum(ratios) / 5, 0.0))
    assert divergence(torch.tensor(6.0), 4).item() == 1.5
    assert divergence(torch.tensor(-6.0), 4).item() == 0
    assert divergence(torch.tensor(0.0), 0).item() == 0


def first_step(folder: Path, size: int) -> tuple[float, float, float, list[list[tuple[float, float, bool]]]]:
    """Loss, gradient norm and divergence of a step whose examples are likelier than under the initial model.

    Returns:
        Those; and by how much each is, its mismatched document too, with its label, for each micro-batch.
    """
    changes = {"objective": "kto", "method": "full", "max_train_samples": 14, "max_length": 384}
    with steps(folder, 8, True, per_device_train_batch_size=size, **changes) as taken:
        set_reference(taken.context, load_strategy("single"), None)
        rows = taken.context.plan.rows
        assert rows.mismatched is not None
        assert rows.desirable is not None
        rng = np.random.Generator(np.random.PCG64(3))
        apart = []
        for part in (rows, rows.mismatched):
            assert part.reference is not None
            apart.append(rng.random(len(part.reference), dtype=np.float32) * 20)
            part.reference = part.reference - apart[-1]
        result = taken.take(0)
        members = [rows.members_of(share) for share in taken.context.plan.shares(0, 0)]
        values = [[(float(apart[0][one]), float(apart[1][one]), bool(rows.desirable[one])) for one in share]
                  for share in members]  # fmt: skip
        return result.loss, result.grad_norm, result.extra["kl"], values


def by_hand(groups: list[list[tuple[float, float, bool]]]) -> float:
    """The mean loss, with the divergence of each group."""
    losses = []
    for group in groups:
        kl = sum(mismatched for _, mismatched, _ in group) / len(group)
        losses += [1 - sigmoid(0.1 * (ratio - kl) * (1 if good else -1)) for ratio, _, good in group]
    return sum(losses) / len(losses)


def test_the_divergence_is_one_of_the_global_batch(tmp_path: Path) -> None:
    """Micro-batches of one row and of eight. Control: the divergence of each micro-batch is another loss."""
    fine, coarse = first_step(tmp_path, 1), first_step(tmp_path, 8)
    ((*_, groups), (*_, together)) = fine, coarse
    assert len(groups) == 8
    assert max(map(len, groups)) > 1
    examples = [example for group in groups for example in group]
    assert sorted(examples) == sorted(together[0])
    for loss, norm, kl, _ in (fine, coarse):
        assert loss == pytest.approx(by_hand(together), abs=2e-6)
        assert norm == pytest.approx(fine[1], rel=1e-5)
        assert kl == pytest.approx(np.mean([mismatched for _, mismatched, _ in examples]), abs=1e-4)
    assert not math.isclose(by_hand(groups), by_hand(together), abs_tol=1e-3)
