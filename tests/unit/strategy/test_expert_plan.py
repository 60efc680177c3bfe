"""Which models' experts can be divided, and where a file says over how many ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainers.config.mistakes import ConfigError
from trainers.strategy.expert_plan import expert_refusals
from trainers.strategy.mesh import Mesh, MeshSizes
from trainers.strategy.strategy import STRATEGIES_DIR, load_strategy

PLAN = {"layers.*.experts": "ep_dispatch_experts", "layers.*.experts.down_proj": "grouped_gemm"}


def config(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"model_type": "mixture", "num_experts": 12, "base_model_ep_plan": PLAN, **values})


@pytest.mark.parametrize(
    ("values", "size", "reason"),
    [
        ({}, 4, None),
        ({"num_experts": 1}, 1, None),
        ({}, 5, "ep_size=5 does not divide the 12 experts of mixture; use 2 or 3 or 4 or 6 or 12"),
        ({"base_model_ep_plan": None}, 2, "transformers has no expert-parallel plan for mixture; use ddp or fsdp2"),
        ({"num_experts": None, "base_model_ep_plan": None}, 2, "ep divides experts, and mixture has none; use ddp"),
        ({"num_experts": None}, 2, "ep divides experts, and this mixture has none; use ddp"),
        ({"base_model_ep_plan": {**PLAN, "layers.*.mlp": "colwise"}}, 2, "the plan of mixture has colwise, which is"),
    ],
)
def test_what_cannot_be_divided_is_refused(values: dict[str, Any], size: int, reason: str | None) -> None:
    lines = expert_refusals(config(**values), size)
    assert (lines == []) if reason is None else (len(lines) == 1 and reason in lines[0])


@pytest.mark.parametrize("value", ["0", "two", "-1", "2.0", "9" * 12])
def test_a_size_in_a_file_is_a_number(value: str, tmp_path: Path) -> None:
    text = (STRATEGIES_DIR / "ep.yaml").read_text()
    assert load_strategy("ep").ep_size == 2
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace("# ep_size: 2", f"# ep_size: {value}"))
    with pytest.raises(ConfigError, match=f"ep_size={value} is not a number of ranks"):
        load_strategy(str(file))


def test_neighbors_divide_the_experts() -> None:
    groups = [(mesh.index("ep_replicate"), mesh.index("ep")) for mesh in
              (Mesh(MeshSizes(dp_replicate=6, ep=3), rank) for rank in range(6))]  # fmt: skip
    assert groups == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
