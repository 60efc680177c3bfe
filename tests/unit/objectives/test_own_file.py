"""A loss from a file of one's own is the one that is computed; a file that fails is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.config.test_objective_file import MARGIN, config
from trainers.config.mistakes import ConfigError
from trainers.data.layout import Scales, ScoredDocuments
from trainers.objectives.objective import document_loss

DIRECT = """import torch

class Direct:
    def __init__(self, **options):
        pass

    def __call__(self, log_probs, documents):
        return log_probs.sum(), log_probs.detach().sum().reshape(1)
"""


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


@pytest.mark.parametrize(("like", "kind"), [("dpo", "Dpo"), ("cpo", "Cpo"), ("kto", "Kto"), ("simpo", "Simpo")])
def test_a_class_may_derive_from_one_of_tunesmiths(tmp_path: Path, like: str, kind: str) -> None:
    source = f"""from typing import Any, ClassVar

from trainers.objectives.{like} import {kind}

class Margin({kind}):
    spec: ClassVar[dict[str, Any]] = {{"like": "{like}"}}

    def __call__(self, log_probs, documents):
        loss, metrics = super().__call__(log_probs, documents)
        return 2 * loss, metrics
"""
    log_probs, documents = scored()
    documents = replace(documents, desirable=torch.tensor([True, False, True, False]), kl=torch.tensor(0.1))
    doubled, _ = document_loss(config(written(tmp_path, source)))(log_probs, documents)  # type: ignore[misc]
    loss, _ = document_loss(config(like))(log_probs, documents)  # type: ignore[misc]
    assert doubled.item() == pytest.approx(2 * loss.item())
    assert loss.item() > 0


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


WEIGHTED = (
    MARGIN.replace('"like": "dpo",', '"like": "dpo", "columns": ["weight"], "metrics": ["gap", "wins"],').replace(
        "return -torch.nn", "return -pairs.columns['weight'] * torch.nn"
    )
    + """
    def metrics(self, pairs):
        difference = pairs.chosen - pairs.rejected
        return difference * pairs.columns["weight"], difference > 0
"""
)
"""The same, each pair weighted, with two metrics of its own."""


def scored(*weights: float, **more: Any) -> tuple[torch.Tensor, ScoredDocuments]:
    log_probs, reference = torch.tensor([-3.0, -5.0, -2.0, -2.5]), torch.tensor([-4.0, -4.0, -3.0, -2.0])
    columns = {"weight": torch.tensor(weights).repeat_interleave(2)} if weights else {}
    return log_probs, ScoredDocuments(torch.zeros(0), torch.ones(4), reference, Scales(), np.arange(4), columns=columns)


def test_it_gets_its_columns_and_reports_its_metrics(tmp_path: Path) -> None:
    log_probs, documents = scored(2.0, 0.5)
    loss, metrics = document_loss(config(written(tmp_path, WEIGHTED), beta=0.3))(log_probs, documents)  # type: ignore[misc]
    rewards = 0.3 * (log_probs - documents.reference)  # type: ignore[operator]
    terms = -torch.nn.functional.logsigmoid(rewards[::2] - rewards[1::2] - 0.5)
    assert loss.item() == pytest.approx(2 * terms[0].item() + 0.5 * terms[1].item())
    assert metrics.tolist()[4:] == pytest.approx([2 * 2.0 + 0.5 * 0.5, 2])
    swapped, _ = document_loss(config(written(tmp_path, WEIGHTED), beta=0.3))(*scored(0.5, 2.0))  # type: ignore[misc]
    assert swapped.item() != pytest.approx(loss.item(), abs=1e-3), "control: the weights of other pairs"


def test_a_loss_that_is_no_sum_or_has_no_gradient_is_refused(tmp_path: Path) -> None:
    source = MARGIN.replace("class Margin(PairLoss)", "class Margin(Direct)").replace("import torch", DIRECT)
    source = source.replace(".reshape(1)", ".expand(4)")
    log_probs, documents = scored()
    leaf = log_probs.requires_grad_()
    document_loss(config(written(tmp_path, source)))(leaf, documents)  # type: ignore[misc]  # control
    for wrong, problem in (
        ("log_probs", "of shape [4], not a sum"),
        ("log_probs.detach().sum()", "without a gradient"),
        ("1.0", "returns tuple, not a tuple of two tensors, the loss and the metrics"),
        ("None", "returns tuple, not a tuple of two tensors"),
    ):
        loss = document_loss(config(written(tmp_path, source.replace("return log_probs.sum()", f"return {wrong}"))))
        with pytest.raises(ConfigError) as caught:
            loss(leaf, documents)  # type: ignore[misc]
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            WEIGHTED.replace(", difference > 0", ","),
            "objective=Margin returns 5 metrics, and its spec has 6: reward_accuracy, reward_margin, reward_chosen, "
            "reward_rejected, gap, wins; return as many",
        ),
        (MARGIN.replace('"dpo",', '"dpo", "metrics": ["gap"],'), "returns 4 metrics, and its spec has 5"),
        (WEIGHTED.replace('["gap", "wins"]', '["gap"]'), "returns 6 metrics, and its spec has 5"),
        (WEIGHTED.replace("difference > 0", "difference.mean()"), "of shape [] from metrics, not one number"),
        (WEIGHTED.replace("difference > 0", "0.5"), "returns a value a float from metrics"),
        (MARGIN.replace("- 0.5)", "- 0.5).mean()"), "of shape [] from losses, not one number for each of 2 pairs"),
        (MARGIN.replace("class Margin(PairLoss)", "class Margin(Direct)").replace("import torch", DIRECT),
         "returns 1 metrics, and its spec has 4"),
    ],
)  # fmt: skip
def test_other_metrics_than_those_of_its_spec_are_refused(tmp_path: Path, source: str, problem: str) -> None:
    loss = document_loss(config(written(tmp_path, source)))
    with pytest.raises(ConfigError) as caught:
        loss(*scored(2.0, 0.5))  # type: ignore[misc]
    assert problem in str(caught.value)
