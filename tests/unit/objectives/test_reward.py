"""The loss of a reward model against its formula in fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.unit.objectives.test_pairs import config, loss_of, sigmoid
from trainers.data.layout import Scales, ScoredDocuments

SCORES = [1.5, -0.5, 0.25, 0.75]
MARGINS = [0.5, 0.5, -1.0, -1.0]


def documents(margins: list[float] | None) -> ScoredDocuments:
    columns = {} if margins is None else {"margin": torch.tensor(margins)}
    of_label, tokens = torch.arange(4), torch.ones(4)
    return ScoredDocuments(of_label, tokens, None, Scales(), np.arange(4), columns=columns)


@pytest.mark.parametrize("margins", [MARGINS, None])
@pytest.mark.parametrize("centering", [0.0, 0.3])
def test_the_loss_is_its_formula(centering: float, margins: list[float] | None) -> None:
    scores = torch.tensor(SCORES, dtype=torch.float64, requires_grad=True)
    loss = loss_of("reward", center_rewards_coefficient=centering)
    wanted = 0.0
    for pair, margin in enumerate((margins or [0.0] * 4)[::2]):
        chosen, rejected = SCORES[2 * pair : 2 * pair + 2]
        wanted += -math.log(sigmoid(chosen - rejected - margin)) + centering * (chosen + rejected) ** 2
    value, metrics = loss(scores, documents(margins))
    assert value.item() == pytest.approx(wanted, rel=1e-12)
    assert torch.autograd.gradcheck(lambda values: loss(values, documents(margins))[0], scores)
    names = config("reward").objective_spec.metrics
    assert dict(zip(names, metrics.tolist(), strict=True)) == {
        "reward_accuracy": 1, "reward_margin": 1.5, "reward_chosen": 1.75, "reward_rejected": 0.25,
    }  # fmt: skip
    assert not metrics.requires_grad
    # Control: another margin is another loss.
    other = replace(documents(margins), columns={"margin": torch.full((4,), 0.7)})
    assert loss(scores, other)[0].item() != pytest.approx(wanted, rel=1e-3)
