"""A loss from a file of one's own is the one that is computed; a file that fails is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.config.test_objective_file import MARGIN, config
from trainers.config.mistakes import ConfigError
from trainers.data.layout import Scales, ScoredDocuments
from trainers.objectives.objective import document_loss


def written(folder: Path, source: str) -> str:
    (folder / "margin.py").write_text(source)
    return f"{folder}/margin.py:Margin"


def test_its_loss_is_computed(tmp_path: Path) -> None:
    log_probs, reference = torch.tensor([-3.0, -5.0, -2.0, -2.5]), torch.tensor([-4.0, -4.0, -3.0, -2.0])
    documents = ScoredDocuments(torch.zeros(0), torch.ones(4), reference, Scales(), np.arange(4))
    rewards = 0.3 * (log_probs - reference)
    margins = rewards[::2] - rewards[1::2]
    loss, metrics = document_loss(config(written(tmp_path, MARGIN), beta=0.3))(log_probs, documents)  # type: ignore[misc]
    assert loss.item() == pytest.approx(-torch.nn.functional.logsigmoid(margins - 0.5).sum().item())
    assert metrics[1].item() == pytest.approx(margins.sum().item())
    plain, _ = document_loss(config("dpo", beta=0.3))(log_probs, documents)  # type: ignore[misc]
    assert plain.item() != pytest.approx(loss.item(), abs=1e-3), "control: without the margin it is another loss"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (MARGIN.replace("import torch", "import nowhere"), "fails when it is imported: ModuleNotFoundError"),
        (
            MARGIN.replace("def losses", "def loses"),
            "is no class of losses, or lacks a method; derive it from PairLoss",
        ),
        ("1 / 0\n" + MARGIN, "fails when it is imported: ZeroDivisionError"),
    ],
)
def test_a_file_that_fails_is_refused(tmp_path: Path, source: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        document_loss(config(written(tmp_path, source)))
    assert problem in str(caught.value)
