"""The mesh sizes that the command line overrides in a strategy's Accelerate file. Imports no torch.

A run's `accelerate.yaml` has the sizes that result, so the file alone says the strategy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trainers.config.mistakes import ConfigError, Mistake
from trainers.config.options import MESH_OPTIONS
from trainers.config.parse import whole_number
from trainers.strategy.mesh import MeshSizes, combination_mistakes, size_option
from trainers.strategy.schema import MAX_PROCESSES
from trainers.strategy.strategy import Strategy

_PREFIX = "parallelism_config_"


def read_sizes(options: Mapping[str, str]) -> dict[str, int]:
    """Returns the sizes given on the command line, by axis.

    Args:
        options: Values by option; those that are no `MESH_OPTIONS` are ignored.

    Raises:
        ConfigError: With every mistake.
    """
    texts = {name: str(options[name]) for name in MESH_OPTIONS if name in options}
    sizes = {name.removesuffix("_size"): whole_number(text, 1, MAX_PROCESSES) for name, text in texts.items()}
    problem, remedy = f"is not a whole number from 1 to {MAX_PROCESSES}", "write one, e.g. 2"
    if bad := [name for name in texts if sizes[name.removesuffix("_size")] is None]:
        raise ConfigError(Mistake(name, repr(texts[name][:40]), problem, remedy) for name in bad)
    return {axis: size for axis, size in sizes.items() if size is not None}


def with_sizes(strategy: Strategy, sizes: Mapping[str, int], pp_size: int | None = None) -> Strategy:
    """Returns the strategy with sizes of the command line in place of those in its file.

    Args:
        strategy: The strategy, not yet resolved.
        sizes: Sizes by axis.
        pp_size: Pipeline stages; None for the value in the file.

    Raises:
        ConfigError: If the strategy does not support an axis, or two of them exclude each other.
    """
    written = strategy.mesh
    experts = sizes.get("ep", strategy.ep_size)
    strategy, sizes = replace(strategy, ep_size=experts), {axis: size for axis, size in sizes.items() if axis != "ep"}
    # An axis of one process needs no entry, so that `--tp_size 1` is also valid for strategies without a mesh.
    changed = {axis: size for axis, size in sizes.items() if size > 1 or axis in written}
    if not changed:
        return strategy
    merged = {axis: size for axis, size in {**written, **changed}.items() if size > 0}
    mesh = MeshSizes(**{**merged, "pp": pp_size or strategy.pp_size})
    if mistakes := combination_mistakes(strategy.distributed_type, mesh):
        renamed = [replace(mistake, option=mistake.option.removeprefix(_PREFIX)) for mistake in mistakes]
        raise ConfigError(renamed, f"strategy {strategy.name}")
    keys = {size_option(axis): size for axis, size in changed.items()}
    section = {**(strategy.values.get("parallelism_config") or {}), **keys}
    return replace(strategy, values={**strategy.values, "parallelism_config": section})


def refuse_other_sizes(strategy: Strategy, sizes: Mapping[str, int]) -> None:
    """Raises ConfigError if a resolved strategy has other sizes, because its data axis takes the remaining processes.

    Args:
        strategy: The resolved strategy.
        sizes: The requested sizes by axis.
    """
    got = strategy.sizes
    if wrong := [axis for axis, size in sizes.items() if getattr(got, axis) != size]:
        problem = f": num_processes={got.world} makes it {got}"
        raise ConfigError(
            [Mistake(f"{axis}_size", sizes[axis], problem, "change num_processes or another size") for axis in wrong],
            f"strategy {strategy.name}",
        )
