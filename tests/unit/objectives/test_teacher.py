"""A step of distillation: teachers of other families, heads that only the model can apply, what is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import save_small
from tests.steps import steps
from trainers.embedded import BASE_DIR
from trainers.loop import StepResult
from trainers.objectives import loss_module


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 2, which caps its logits; its vocabulary is padded."""
    return save_small(tmp_path_factory.mktemp("gemma"), "gemma2", final_logit_softcapping=0.5)


def step(folder: Path, teacher: Path, packing: bool = True, **changes: Any) -> StepResult:
    """The first step of a full fine-tuning."""
    options = {"objective": "distill", "teacher": str(teacher), "method": "full", **changes}
    with steps(folder, 4, packing, **options) as taken:
        return taken.take(0)


def same(first: StepResult, second: StepResult) -> bool:
    numbers = ((result.loss, result.grad_norm) for result in (first, second))
    return bool(np.allclose(*numbers, rtol=1e-5, atol=0))


def test_a_step_has_the_loss_of_the_stock_models(gemma: Path, tmp_path: Path) -> None:
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (BASE_DIR, gemma)]
    with steps(tmp_path, 4, True, objective="distill", teacher=str(gemma), method="full") as taken:
        rows, total = taken.context.plan.rows, 0.0
        for member in rows.members_of(taken.context.plan.rows_of(0)):
            tokens, mask = rows.documents.document(int(member))
            trained = torch.from_numpy(np.array(mask))[1:]
            ids = torch.from_numpy(tokens.astype(np.int64))[None]
            with torch.no_grad():
                own, other = (model(ids).logits[0, :-1][trained][:, :1024].log_softmax(-1) for model in models)
            total += float((other.exp() * (other - own)).sum())
        result = taken.take(0)
        assert result.loss == pytest.approx(total / rows.divisor(taken.context.plan.rows_of(0)), rel=1e-5)


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.long)])
def test_models_that_apply_their_head_themselves_get_the_same_gradients(
    packing: bool, gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks = step(tmp_path, gemma, packing)
    monkeypatch.setattr(loss_module, "find_head_rule", lambda model: None)
    assert same(step(tmp_path, gemma, packing), in_chunks)
    assert not same(step(tmp_path, gemma, packing, loss_type="reverse_kl"), in_chunks)  # control


@pytest.mark.long
def test_recomputing_and_padded_rows_change_nothing(gemma: Path, tmp_path: Path) -> None:
    plain = step(tmp_path, gemma)
    assert same(step(tmp_path, gemma, gradient_checkpointing=True), plain)
    one_by_one, padded = (step(tmp_path, gemma, False, per_device_train_batch_size=size) for size in (1, 4))
    assert same(one_by_one, padded)


def test_the_teacher_is_frozen_and_in_evaluation_mode(gemma: Path, tmp_path: Path) -> None:
    options = {"objective": "distill", "teacher": str(gemma), "mixed_precision": "bf16", "method": "full"}
    with steps(tmp_path, 2, True, **options) as taken:
        taken.context.backend.model.train()
        teacher, student = taken.loss.teacher, taken.loss.model
        before = [weight.clone() for weight in teacher.parameters()]
        taken.take(0)
        assert student.training
        assert not any(module.training for module in teacher.modules())
        assert {weight.dtype for weight in teacher.parameters()} == {torch.bfloat16}
        assert not any(weight.requires_grad or weight.grad is not None for weight in teacher.parameters())
        assert all(map(torch.equal, before, teacher.parameters()))
        updated = {id(weight) for group in taken.context.backend.optimizer.param_groups for weight in group["params"]}
        assert updated == {id(weight) for weight in student.parameters()}
