"""The process groups of a tensor-parallel model as DeepSpeed asks for them."""

from __future__ import annotations

from typing import Any

from torch import distributed

from trainers.strategy.mesh import Mesh


class TensorGroups:
    """Process groups of a tensor-parallel model, with the interface that DeepSpeed expects (Megatron's `mpu`).

    Args:
        mesh: the mesh of all ranks.
    """

    def __init__(self, mesh: Mesh):
        self.tensor, self.data = mesh.group("tp"), mesh.group("grad_group")

    def get_model_parallel_group(self) -> Any:
        """The ranks that share each split weight."""
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        """Index of this rank in that group."""
        return distributed.get_rank(self.tensor)

    def get_model_parallel_world_size(self) -> int:
        """Size of that group."""
        return distributed.get_world_size(self.tensor)

    def get_data_parallel_group(self) -> Any:
        """The ranks with the same slice of the weights, over which gradients are averaged and ZeRO shards."""
        return self.data

    def get_data_parallel_rank(self) -> int:
        """Index of this rank in that group."""
        return distributed.get_rank(self.data)

    def get_data_parallel_world_size(self) -> int:
        """Size of that group."""
        return distributed.get_world_size(self.data)

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Global ranks of that group."""
        return distributed.get_process_group_ranks(self.data)
