"""Scaled RoPE is part of the model: the same under a sharded strategy, and in what stock transformers loads."""

from __future__ import annotations

import copy

import pytest
from transformers import AutoModelForCausalLM

from tests.launching import Finished
from tests.parity.checks import stock_loss
from tests.parity.plain import LOSS_TOLERANCE, NORM_TOLERANCE
from tests.parity.runs import run


def scaled(processes: int, strategy: str) -> Finished:
    changes = {"max_steps": 3, "save_steps": 0, "rope_scaling": "yarn", "rope_factor": 4}
    return run(processes, "full", True, strategy, **changes)


def test_yarn_under_fsdp2_follows_one_process_and_its_export_is_the_trained_model() -> None:
    sharded, single = scaled(2, "fsdp2"), scaled(1, "single")
    for name, tolerance in (("loss", LOSS_TOLERANCE), ("grad_norm", NORM_TOLERANCE)):
        assert len(single.series(name)) == 3
        assert sharded.series(name) == pytest.approx(single.series(name), rel=0, abs=tolerance)
    assert "rope_scaling=yarn: 1,024 positions x 4 = 4,096" in sharded.output
    model = AutoModelForCausalLM.from_pretrained(sharded.run.model, attn_implementation="eager").eval()
    trained = sharded.series("eval_loss")[-1]
    assert stock_loss(model, "full", True) == pytest.approx(trained, abs=1e-5)
    plainly = copy.deepcopy(model.config)
    plainly.rope_parameters = {"rope_type": "default", "rope_theta": plainly.rope_parameters["rope_theta"]}
    unscaled = AutoModelForCausalLM.from_pretrained(sharded.run.model, config=plainly, attn_implementation="eager")
    assert abs(stock_loss(unscaled.eval(), "full", True) - trained) > 1e-3, "control: the weights without it"
