"""Which options an optimizer reads, where it is refused, and what it costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.runs import config
from trainers.config.mistakes import ConfigError
from trainers.config.options import optimizer_lines
from trainers.config.validation import ignored_choices
from trainers.run.compatibility import refusals
from trainers.run.disk import Tensor, bytes_needed
from trainers.strategy.strategy import load_strategy, refusal


def ignored(**changes: Any) -> list[str]:
    return [str(line) for line in ignored_choices(config("full", True, **changes))]


def test_settings_of_another_optimizer_are_named_as_ignored() -> None:
    assert ignored(optim="lion", adam_epsilon=1e-6, adam_beta1=0.8, lion_beta1=0.8) == [
        "adam_beta1 is ignored: optim=lion does not read it",
        "adam_epsilon is ignored: optim=lion does not read it",
    ]
    assert ignored(lion_beta2=0.95) == ["lion_beta2 is ignored: optim=adamw does not read it"]
    assert ignored(optim="adamw_8bit", adam_beta1=0.8) == []


def test_what_an_optimizer_reads_is_shown_and_what_is_exact_is_within_the_promise() -> None:
    lion = config("full", True, optim="lion", lion_beta1=0.95)
    assert optimizer_lines(lion) == ["optim=lion: lion_beta1=0.95, lion_beta2=0.99"]
    assert optimizer_lines(config("full", True)) == []
    assert lion.outside_parity() == []
    assert config("full", True, optim="adamw_8bit").outside_parity() == ["optim=adamw_8bit"]


def test_bf16_weights_are_for_adamw_alone() -> None:
    half = {"mixed_precision": "bf16", "master_weights": False}
    config("full", True, **half)
    with pytest.raises(ConfigError, match="master_weights=false with optim=lion: AdamW alone"):
        config("full", True, optim="lion", **half)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp1", "fsdp2", "zero1", "zero3", "tp", "pp"])
def test_lion_is_refused_nowhere_but_where_deepspeed_updates(name: str) -> None:
    strategy, lion = load_strategy(name), config("full", True, optim="lion")
    assert refusal(strategy, lion, has_gpu=False) is None
    own = replace(strategy, deepspeed_json={**strategy.deepspeed_json, "optimizer": {"type": "AdamW"}})
    assert (refusal(own, lion, has_gpu=False) is None) == (not name.startswith("zero"))


def test_deepspeeds_offload_is_refused() -> None:
    strategy = load_strategy("zero3_offload")
    assert refusal(strategy, config("full", True), has_gpu=False) is None
    reason = refusal(strategy, config("full", True, optim="lion"), has_gpu=False)
    assert "optim=lion: DeepSpeed's offload updates by its own Adam" in str(reason)


def test_a_checkpoint_has_one_momentum() -> None:
    tensors = [Tensor("model.layers.0.mlp.up_proj.weight", (1000, 1000), "F32")]
    sizes = {optim: bytes_needed(config("full", True, optim=optim), tensors, 1) for optim in ("adamw", "lion")}
    assert sizes["adamw"] - sizes["lion"] == 4_000_000


def test_states_of_another_optimizer_do_not_fit_even_by_force() -> None:
    then, now = (config("full", True, optim=optim).model_dump() for optim in ("adamw", "lion"))
    (refused,) = refusals({"config": then, "versions": {}, "step": 5}, now, {}, force=True)
    assert str(refused).startswith("optim=lion, and adamw when the checkpoint of step 5 was saved")
    assert "start a new run" in str(refused)
    eight_bit = config("full", True, optim="adamw_8bit").model_dump()
    assert refusals({"config": then, "versions": {}, "step": 5}, eight_bit, {}, force=True) == []
    assert refusals({"config": then, "versions": {}, "step": 5}, eight_bit, {}) != []
