"""What the planner says of a mixture of experts under `ep`."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from app.plan.cases import split_mistake
from app.plan.memory import shares_of
from trainers.config.validation import build
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.mesh_options import with_sizes
from trainers.strategy.strategy import load_strategy, resolve
from trainers.tools.memory_estimate import empty_model, refused, weights

SHAPE = AutoConfig.for_model("qwen3_moe", hidden_size=64, num_hidden_layers=4, num_experts=8, num_experts_per_tok=2,
                             moe_intermediate_size=32, vocab_size=512)  # fmt: skip
EXPERTS = 4 * 8 * 3 * 64 * 32


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_rank_holds_its_experts_and_all_else(method: str) -> None:
    config = build({"model_name_or_path": "embedded", "dataset_name": "embedded", "method": method})
    counted = weights(config, empty_model(config, SHAPE))
    assert counted["experts"] == EXPERTS
    whole, divided = (
        shares_of(resolve(load_strategy(name), 4, "no"), config, {"layers": 4}, counted)[0] for name in ("ddp", "ep")
    )
    assert whole.parameters - divided.parameters == EXPERTS / 2
    if method == "full":
        assert whole.trained - divided.trained == EXPERTS / 2
        assert (whole.experts, divided.experts) == (0, EXPERTS / 2)
    else:
        assert (whole.trained, whole.frozen - divided.frozen) == (divided.trained, EXPERTS / 2 * 4)


def test_sizes_that_do_not_divide_are_known() -> None:
    reasons = {str(size): refused(SHAPE, MeshSizes(ep=size), 1) for size in range(2, 10)}
    assert [size for size, reason in reasons.items() if reason is None] == ["2", "4", "8"]
    limits = {"tp": {}, "cp": {}, "sp": {}, "ep": reasons, "stages": {}}
    for size in (2, 3):
        strategy = resolve(with_sizes(load_strategy("ep"), {"ep": size}), 6, "no")
        assert split_mistake(strategy, {"limits": limits, "heads": 4}) == reasons[str(size)]
