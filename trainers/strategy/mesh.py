"""The device mesh shared by all kinds of parallelism: its sizes, valid combinations of axes, and process groups.

    pp x dp_replicate x dp_shard x cp x sp x tp = processes

The last axis is the innermost: its ranks are adjacent, and so on the same machine. Expert parallelism (ep) is not an
axis: it groups neighbors along dp_replicate. Imports torch only to build groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

from trainers.config.mistakes import ConfigError, Mistake
from trainers.strategy import topics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""Outermost first."""
MEANS = {
    "pp": "pipeline: each rank has some of the layers",
    "dp_replicate": "data parallel: whole copies of the weights",
    "dp_shard": "data parallel: weights, gradients and optimizer state sharded (FSDP, and what ZeRO's stage says)",
    "cp": "context: each rank has a part of every row, keys and values are gathered",
    "sp": "sequence (Ulysses): each rank has a part of every row, in attention some heads of all of it",
    "tp": "tensor: each rank has a part of every matrix",
}
EXPERT_GROUPS = "expert: neighbors along dp_replicate divide the experts of each layer, and send each other tokens"
"""What ep means, which is not an axis."""
BACKENDS = {
    "NO": frozenset[str](),
    "MULTI_GPU": frozenset({"pp", "dp_replicate", "cp", "sp", "tp"}),
    "FSDP": frozenset({"pp", "dp_replicate", "dp_shard", "cp", "sp", "tp"}),
    "DEEPSPEED": frozenset({"dp_shard", "cp", "sp", "tp"}),
}
"""The axes that each `distributed_type` supports."""
APART = {
    frozenset({"cp", "sp"}): "both split the rows",
}
"""Pairs of axes that cannot be combined, and why."""


@dataclass(frozen=True)
class MeshSizes:
    """Processes along each axis.

    Args:
        ep: Neighbors along dp_replicate that divide the experts of each layer; a factor of its size.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def by_axis(self) -> dict[str, int]:
        """Size of every axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world(self) -> int:
        """Total number of processes."""
        return prod(self.by_axis.values())

    @property
    def data(self) -> int:
        """Number of processes, or groups of them, that see different rows of a global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def grad_group_size(self) -> int:
        """Number of processes that gradients are averaged over: those with different rows or parts of rows."""
        return self.data * self.cp * self.sp

    @property
    def sequence_shards(self) -> int:
        """Number of shards that each row is split into."""
        return self.cp * self.sp

    def __str__(self) -> str:
        used = [f"{axis} {size}" for axis, size in self.by_axis.items() if size > 1]
        return (" x ".join(used) or "1") + (f" (ep {self.ep})" if self.ep > 1 else "")


def fitted(sizes: Mapping[str, int], processes: int) -> MeshSizes:
    """Completes the sizes for a number of processes.

    Args:
        sizes: Size by axis; missing axes are 1, and one may be -1 to take the remaining processes.
        processes: Processes of the run.

    Raises:
        ConfigError: If two sizes are -1, one is below 1, or the product is not the number of processes.
    """
    option = "pp_size" if sizes.get("pp", 1) > 1 else "parallelism_config"
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(Mistake(option, None, f": {' and '.join(open_axes)} are both -1, the rest", "write -1 once"))
    if bad := [f"{axis}={size}" for axis, size in sizes.items() if size < 1 and size != -1]:
        raise ConfigError(
            Mistake(option, None, f": {', '.join(bad)} is not a size", "write at least 1, or -1 for the rest")
        )
    # The sizes must multiply to the number of processes; an axis of -1 takes the quotient.
    fixed = {axis: size for axis, size in sizes.items() if size != -1}
    product = prod(fixed.values())
    replicas, remainder = divmod(processes, product)
    if remainder or (not open_axes and replicas != 1):
        factors = " x ".join(f"{axis} {size}" for axis, size in fixed.items() if size > 1 or axis != "pp")
        remedy = "use a multiple of that" if open_axes else "make them equal, or write -1 for one size, the rest"
        raise ConfigError(Mistake(option, None, f": {factors} = {product}, but num_processes={processes}", remedy))
    return MeshSizes(**fixed, **dict.fromkeys(open_axes, replicas))


def data_axis(kind: str) -> str:
    """Returns the data-parallel axis that takes the processes which no other axis uses."""
    return "dp_replicate" if kind == "MULTI_GPU" else "dp_shard"


def size_option(axis: str) -> str:
    """Returns the option, or the Accelerate key, that sets the size of an axis."""
    return f"{axis}_size" if axis in ("pp", "ep") else f"parallelism_config_{axis}_size"


def combination_mistakes(kind: str, sizes: MeshSizes) -> list[Mistake]:
    """Returns a mistake for each axis that does not support a `distributed_type` or another axis in use."""
    used = {axis: size for axis, size in sizes.by_axis.items() if size > 1}
    mistakes = [
        Mistake(
            size_option(axis),
            size,
            f"cannot be combined with distributed_type={kind}",
            f"use {_kinds(axis)}; {topics.MIXES}",
        )
        for axis, size in used.items()
        if axis not in BACKENDS[kind]
    ]
    # Axes that the type supports one by one may still exclude each other.
    for pair in combinations(used, 2):
        if reason := APART.get(frozenset(pair)):
            mistakes.append(
                Mistake(
                    "parallelism_config",
                    None,
                    f": {pair[0]} and {pair[1]} {reason}",
                    f"use one of them; {topics.MIXES}",
                )
            )
    return mistakes + (_expert_mistakes(kind, sizes) if sizes.ep > 1 else [])


def _expert_mistakes(kind: str, sizes: MeshSizes) -> list[Mistake]:
    """Returns a mistake if experts cannot be divided over the ranks of this mesh."""
    others = [f"{axis}={size}" for axis, size in sizes.by_axis.items() if size > 1 and axis != "dp_replicate"]
    if kind != "MULTI_GPU":
        problem, remedy = f"cannot be combined with distributed_type={kind}", "use --strategy ep, or leave it out"
    elif others:
        problem, remedy = f"cannot be combined with {', '.join(others)}", "use one of them"
    elif sizes.dp_replicate % sizes.ep:
        problem = f"does not divide the {sizes.dp_replicate} processes"
        remedy = f"use a multiple of {sizes.ep} processes, or another size"
    else:
        return []
    return [Mistake("ep_size", sizes.ep, problem, remedy)]


def heads_mistake(sizes: MeshSizes, heads: int, model_type: str) -> str | None:
    """Returns why Ulysses (sp) cannot split the attention heads that tp leaves to a rank; None if it can."""
    left = heads // sizes.tp
    if left % sizes.sp == 0:
        return None
    ways = ", ".join(str(size) for size in range(2, left + 1) if left % size == 0)
    which = f"{heads} attention heads" if sizes.tp == 1 else f"{left} attention heads that tp={sizes.tp} leaves a rank"
    return f"sp={sizes.sp} does not divide the {which} of {model_type}; use {ways + ', or ' if ways else ''}cp"


def _kinds(axis: str) -> str:
    kinds = " or ".join(kind for kind, axes in BACKENDS.items() if axis in axes)
    # pp may be set by an option instead of the strategy's file.
    return f"{kinds}, or pp_size=1" if axis == "pp" else kinds or "another strategy"


def matrix() -> str:
    """Returns the combinations that are supported, as the Markdown table in docs/strategies.md."""
    backends = [kind for kind, axes in BACKENDS.items() if axes]
    lines = [f"| | {' | '.join((*backends, *AXES))} |", f"|---{'|---' * (len(backends) + len(AXES))}|"]
    for axis in AXES:
        cells = ["yes" if axis in BACKENDS[kind] else "no" for kind in backends]
        cells += ["" if other == axis else "no" if _apart(axis, other) else "yes" for other in AXES]
        lines.append(f"| {axis} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _apart(first: str, other: str) -> bool:
    together = any({first, other} <= axes for axes in BACKENDS.values())
    return not together or frozenset({first, other}) in APART


class Mesh:
    """The coordinates and process groups of one process in the mesh.

    Args:
        sizes: Validated sizes.
        rank: Global rank of this process.
        device_type: `cpu` or `cuda`; None to build no groups, for a single process.
    """

    def __init__(self, sizes: MeshSizes, rank: int = 0, device_type: str | None = None):
        self.sizes, self.rank, self.device_mesh, self.expert_mesh = sizes, rank, None, None
        self._index = dict(zip(("ep_replicate", "ep"), divmod(rank, sizes.ep), strict=True))
        for axis in reversed(AXES):  # innermost first: it varies fastest with the rank
            rank, self._index[axis] = divmod(rank, getattr(sizes, axis))
        if device_type is not None:
            self.device_mesh = _device_mesh(sizes, device_type)
            self.expert_mesh = _expert_mesh(sizes, device_type) if sizes.ep > 1 else None

    def index(self, axis: str) -> int:
        """Returns the index of this process along an axis, in its expert group (`ep`), or of that (`ep_replicate`)."""
        return self._index[axis]

    def group(self, axis: str) -> ProcessGroup | None:
        """Returns the group of processes that differ from this one only along an axis; None if its size is 1.

        Args:
            axis: One of `AXES`; `grad_group` for all processes that gradients are averaged over; `ep` for those that
                divide the experts, `ep_replicate` for those with the same experts.
        """
        if axis in ("ep", "ep_replicate"):
            return None if self.expert_mesh is None else self.expert_mesh[axis].get_group()
        if self.device_mesh is None or (axis in AXES and getattr(self.sizes, axis) == 1):
            return None
        group: ProcessGroup = self.device_mesh[axis].get_group()
        return group

    @property
    def data_rank(self) -> int:
        """Index of this process's share of the rows of a global batch."""
        return self.index("dp_replicate") * self.sizes.dp_shard + self.index("dp_shard")

    @property
    def sequence_shard(self) -> int:
        """Index of this process's shard of each row."""
        return self.index("cp") * self.sizes.sp + self.index("sp")

    @property
    def contributes_loss(self) -> bool:
        """Whether this process's loss is summed; the other ranks of its tensor group and pipeline have the same one."""
        return self.index("tp") == self.index("pp") == 0


def _device_mesh(sizes: MeshSizes, device_type: str) -> Any:
    """Builds torch's mesh of the axes in use, with two flattened axes: `dp_shard_cp` for FSDP, `grad_group` for DDP.

    Accelerate reads FSDP's axis from this mesh, so the names match those that Accelerate uses.
    """
    from torch.distributed.device_mesh import init_device_mesh

    # DDP always needs a group, even of one process.
    used = [axis for axis in AXES if getattr(sizes, axis) > 1 or axis == "dp_replicate"]
    mesh = init_device_mesh(device_type, tuple(getattr(sizes, axis) for axis in used), mesh_dim_names=tuple(used))
    for name, parts in (
        ("dp_shard_cp", ("dp_shard", "cp", "sp")),
        ("grad_group", ("dp_replicate", "dp_shard", "cp", "sp")),
    ):
        if axes := tuple(axis for axis in parts if axis in used):
            mesh[axes]._flatten(name)
    return mesh


def _expert_mesh(sizes: MeshSizes, device_type: str) -> Any:
    """Builds the expert groups and those with the same experts; `alone` is the group of a rank with its own tokens."""
    from torch.distributed.device_mesh import init_device_mesh

    names = ("ep_replicate", "ep", "alone")
    return init_device_mesh(device_type, (sizes.world // sizes.ep, sizes.ep, 1), mesh_dim_names=names)
