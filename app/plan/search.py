"""Searches the mesh of each strategy: the sizes that divide model, batch and processes, and of those the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from app.plan.estimate import Row, best_first, candidate, plan_row
from app.plan.hardware import Hardware
from trainers.config.mistakes import ConfigError
from trainers.config.options import TrainConfig
from trainers.strategy.mesh import MeshSizes, data_axis
from trainers.strategy.micro_batch import OPTION
from trainers.strategy.pipeline_schedules import micro_batch_mistake
from trainers.strategy.strategy import Strategy


@dataclass(frozen=True)
class Request:
    """What to search for.

    Args:
        config: the user's config.
        hardware: the hardware to plan for.
        counted: the counts of `trainers/tools/memory_estimate.py`.
        sizes: sizes that the user fixed, by axis.
    """

    config: TrainConfig
    hardware: Hardware
    counted: Mapping[str, Any]
    sizes: Mapping[str, int] = field(default_factory=dict)


def best_rows(strategies: Sequence[Strategy], request: Request) -> list[Row]:
    """The best mesh of each strategy, best strategy first."""
    return best_first([best_row(strategy, request) for strategy in strategies])


def best_row(strategy: Strategy, request: Request) -> Row:
    """The best mesh of a strategy, or why it cannot be used.

    Tensor parallelism stays inside a machine unless nothing else fits. A strategy that cannot use all processes gets as
    many as it can, as `train` does.
    """
    first: ConfigError | None = None
    refused: Row | None = None
    for count in request.hardware.usable_counts():
        part = replace(request, hardware=request.hardware.resized(count))
        meshes = list(_meshes(strategy, part))
        local = [sizes for sizes in meshes if sizes.get("tp", 1) <= part.hardware.per_machine]
        rows, tried = list[Row](), dict[int, Mapping[str, int]]()
        for group in (local, [sizes for sizes in meshes if sizes not in local]):
            if rows and rows[0].fits is not False:
                break
            for sizes in group:
                try:
                    rows.append(_row(strategy, part, sizes))
                    tried[id(rows[-1])] = sizes
                except ConfigError as error:
                    first = first or error
            rows = best_first(rows)
        if rows and rows[0].seconds is None:  # refused by the model, on every mesh
            refused = refused or rows[0]
        elif rows:
            rows[0].largest = _largest(strategy, part, rows[0], tried[id(rows[0])])
            return rows[0]
    if refused:
        return refused
    reason = "; ".join(str(replace(mistake, source="")) for mistake in first.mistakes) if first else ""
    return Row(strategy.name, MeshSizes(dp_replicate=request.hardware.processes), reason=reason)


def _meshes(strategy: Strategy, request: Request) -> Iterator[dict[str, int]]:
    """Sizes of the axes that the strategy's file uses; the data-parallel axis takes the remaining processes."""
    world, written = request.hardware.processes, strategy.mesh
    open_axis = next((axis for axis, size in written.items() if size == -1), data_axis(strategy.distributed_type))
    axes = [axis for axis, size in written.items() if size > 1 and axis != open_axis]
    axes += ["pp"] if strategy.pp_size > 1 else []
    axes += ["ep"] if strategy.ep_size > 1 else []
    fixed = {**request.sizes, **({"pp": request.config.pp_size} if request.config.pp_size else {})}
    divisors = [size for size in range(2, world + 1) if world % size == 0]
    choices = {**dict.fromkeys(axes, divisors), **{axis: [size] for axis, size in fixed.items()}}
    combined = [dict(zip(choices, sizes, strict=True)) for sizes in product(*choices.values())]
    dividing = [sizes for sizes in combined if world % prod(sizes.values()) == 0]
    # Without any, the sizes of the file give the reason.
    yield from dividing or [{axis: size for axis, size in fixed.items() if size}]


def _row(strategy: Strategy, request: Request, sizes: Mapping[str, int]) -> Row:
    """The estimate for a mesh: with the user's micro-batch, or if that does not fit, the largest one that does.

    Raises:
        ConfigError: if the strategy cannot train the config on this mesh.
    """
    resolved, config = candidate(strategy, request.config, request.hardware, sizes)
    row = plan_row(resolved, config, request.counted, request.hardware)
    for size in reversed(_micro_batches(config, resolved)):
        if row.fits is not False:
            break
        if size < config.per_device_train_batch_size:
            at_size = config.model_copy(update={OPTION: size})
            smaller = plan_row(resolved, at_size, request.counted, request.hardware)
            row = smaller if smaller.fits else row
    return row


def _largest(strategy: Strategy, request: Request, row: Row, sizes: Mapping[str, int]) -> int | None:
    """The largest micro-batch that fits on the mesh of a row; None if none does, or it is unknown."""
    if not row.fits:
        return None
    resolved, config = candidate(strategy, request.config, request.hardware, sizes)
    largest = row.micro_batch
    for size in _micro_batches(config, resolved):
        if size > (largest or 0):
            at_size = config.model_copy(update={OPTION: size})
            if not plan_row(resolved, at_size, request.counted, request.hardware).fits:
                break
            largest = size
    return largest


def _micro_batches(config: TrainConfig, strategy: Strategy) -> list[int]:
    """The micro-batches that divide the global batch, in ascending order."""
    rows, stages = config.global_batch_size // strategy.data_parallel_size, strategy.pp_size
    return [
        size
        for size in range(1, rows + 1)
        if rows % size == 0 and not (stages > 1 and micro_batch_mistake(strategy.pp_schedule, stages, rows // size))
    ]


def fewest_gpus(strategies: Sequence[Strategy], request: Request) -> tuple[Row, int] | None:
    """The best row on the first of `Hardware.larger_counts` on which anything fits, and the global batch; None if none.

    Where the global batch is too small to go round, tries one that is as large as the number of GPUs.
    """
    hardware = request.hardware
    for count in hardware.larger_counts():
        larger = replace(hardware, processes=count, machines=max(1, count // hardware.full_machine), gpu_ids=())
        own = request.config.global_batch_size
        for batch in (own, -(-max(own, count) // count) * count):
            config = request.config.model_copy(update={"global_batch_size": batch})
            best = best_rows(strategies, replace(request, hardware=larger, config=config))[0]
            if best.fits:
                return best, batch
    return None
