"""Describes a strategy: what it does, what each rank holds (as a picture in text), and its memory and traffic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from app.plan.memory import shard_counts
from app.plan.speed import traffic_kind
from trainers.config.options import EMBEDDED
from trainers.config.validation import build
from trainers.strategy.mesh import EXPERT_GROUPS, MEANS, Mesh
from trainers.strategy.pipeline_schedules import SCHEDULES, stages_of
from trainers.strategy.strategy import STRATEGIES_DIR, Strategy, load_strategy, strategy_names
from trainers.strategy.traffic import ModelSizes, predicted

_BYTES = {"weights": 4, "gradients": 4, "optimizer": 8}
"""Bytes per trained parameter: fp32 weights and gradients, and AdamW's two moments."""
_FLAT_COPY = 4
"""Bytes per parameter of the flat fp32 copy that DeepSpeed updates."""
_EXAMPLE = 7e9
_MOST_RANKS = 8
_MOST_CELLS = 16
_SIZES = ModelSizes(int(_EXAMPLE), 270_000, 262_000_000, 32, 4096, 32, 8, 128, 32_000, False)
"""A model of 7 billion parameters, for the formulas of the traffic."""
_EXPERTS = 0.93
"""Share of the experts in the parameters of a mixture of experts of that size, OLMoE."""


def describe(name: str) -> dict[str, Any]:
    """What there is to say about a strategy.

    Args:
        name: name of a strategy, or path of an Accelerate file.

    Returns:
        `name`, `summary`, `about` (the lines at the head of its file), `world_size` (the processes of the file),
        `axes` (size and meaning of each mesh axis in use), `picture` (lines), `memory` (`use`, `formula` and `gb`, for
        a rank and 7 billion trained parameters), and `traffic` (`collective` and `formula`, in bytes of each step).

    Raises:
        ConfigError: if there is no such strategy.
    """
    strategy = load_strategy(name)
    sizes = strategy.sizes
    return {
        "name": strategy.name,
        "summary": strategy.summary,
        "about": _about(name),
        "world_size": sizes.world,
        "axes": [{"axis": axis, "size": size, "meaning": MEANS.get(axis, EXPERT_GROUPS)}
                 for axis, size in {**sizes.by_axis, "ep": sizes.ep}.items() if size > 1],
        "picture": list(_picture(strategy)),
        "memory": list(_memory(strategy)),
        "traffic": _traffic(strategy),
    }  # fmt: skip


def _about(name: str) -> list[str]:
    """The comment at the head of a shipped file, without its summary and command."""
    if name not in strategy_names():
        return []
    lines = (STRATEGIES_DIR / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[1:]
    head = [line.lstrip("# ").rstrip() for line in lines if line.startswith("#")]
    return [line for line in head if line and not line.startswith(("Command:", "pp_size:", "pp_schedule:", "ep_size:"))]


def _picture(strategy: Strategy) -> Iterator[str]:
    """One line per use, one column per rank: filled cells are held by the rank, dots by others."""
    ranks, shards = range(min(strategy.sizes.world, _MOST_RANKS)), shard_counts(strategy)
    cells = _stages(strategy) * strategy.sizes.tp * max(shards.values())
    cells = 2 * strategy.sizes.ep + 1 if strategy.sizes.ep > 1 else cells
    width = max(4, min(cells, _MOST_CELLS))
    yield "  ".join([" " * 9, *(f"rank {rank}".ljust(width) for rank in ranks)]).rstrip()
    for use, count in shards.items():
        yield "  ".join([use.ljust(9), *(_held(strategy, rank, count, width).ljust(6) for rank in ranks)]).rstrip()


def _stages(strategy: Strategy) -> int:
    return strategy.pp_size * SCHEDULES[strategy.pp_schedule].chunks if strategy.pp_size > 1 else 1


def _held(strategy: Strategy, rank: int, shards: int, width: int) -> str:
    """The cells that a rank holds of something that its data-parallel group splits into `shards`."""
    sizes, mesh, held = strategy.sizes, Mesh(strategy.sizes, rank), set[int]()
    stages = stages_of(strategy.pp_schedule, sizes.pp, mesh.index("pp")) if sizes.pp > 1 else [0]
    shard = mesh.index("dp_shard") * sizes.sequence_shards + mesh.sequence_shard if shards > 1 else 0
    if sizes.ep > 1:  # the first cell stands for all but the experts
        first, end = (1 + (width - 1) * (mesh.index("ep") + more) // sizes.ep for more in (0, 1))
        return "".join("█" if cell == 0 or first <= cell < max(first + 1, end) else "·" for cell in range(width))
    parts = _stages(strategy) * sizes.tp * shards
    for stage in stages:
        part = (stage * sizes.tp + mesh.index("tp")) * shards + shard
        first = part * width // parts
        held |= set(range(first, max(first + 1, (part + 1) * width // parts)))
    return "".join("█" if cell in held else "·" for cell in range(width))


def _memory(strategy: Strategy) -> Iterator[dict[str, Any]]:
    """The formula and the size of each use on a rank, beside activations and what is gathered for a moment."""
    sizes, shards = strategy.sizes, shard_counts(strategy)
    for use, each in _BYTES.items():
        size = each + (_FLAT_COPY if use == "optimizer" and strategy.zero_stage else 0)
        axes = {"tp": sizes.tp, "pp": sizes.pp, "shards": shards[use]}
        divisors = [f"{axis} {count}" for axis, count in axes.items() if count > 1]
        formula = f"{size} bytes x parameters" + "".join(f" / {divisor}" for divisor in divisors)
        part = 1 / prod(axes.values())
        if sizes.ep > 1:
            formula = f"{size} bytes x (parameters - experts + experts / ep {sizes.ep}), experts {_EXPERTS:.0%} of them"
            part = 1 - _EXPERTS + _EXPERTS / sizes.ep
        target = "param" if use == "weights" else "optimizer"
        offloaded = strategy.offload_of(target) != "none" and (use != "weights" or strategy.sharded)
        note = f", in {'NVMe' if strategy.offload_of(target) == 'nvme' else 'host memory'}" if offloaded else ""
        yield {"use": use, "formula": formula + note, "gb": size * _EXAMPLE * part / 1e9}


def _traffic(strategy: Strategy) -> list[dict[str, str]]:
    """The collectives of a step, with how many bytes a rank passes to each."""
    config = build({"model_name_or_path": EMBEDDED, "dataset_name": EMBEDDED})
    chunks = SCHEDULES[strategy.pp_schedule].chunks
    step = [(config.max_length, config.max_length)] * max(1, strategy.sizes.pp)
    mixture = replace(_SIZES, experts=_EXAMPLE * _EXPERTS, expert_layers=_SIZES.layers, chosen=2)
    model = mixture if strategy.sizes.ep > 1 else _SIZES
    terms = predicted(traffic_kind(strategy), strategy.sizes, chunks, model, [step], 0)
    return [{"collective": term.collective, "formula": term.formula} for term in terms]
