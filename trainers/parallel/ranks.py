"""The processes of a run and simple collectives between them."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from trainers.run.errors import TrainingError


class Ranks:
    """This process among those of the run; also works for a single process without a process group.

    Args:
        device: device of the tensors in collectives.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.grouped = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if self.grouped else 0
        self.world = distributed.get_world_size() if self.grouped else 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums `values` over all ranks, in place."""
        if self.grouped:
            distributed.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Gathers a small object from every rank onto every rank, in rank order."""
        if not self.grouped:
            return [value]
        gathered: list[Any] = [None] * self.world
        distributed.all_gather_object(gathered, value)
        return gathered

    def broadcast(self, value: Any) -> Any:
        """Returns rank 0's small object on every rank."""
        if not self.grouped:
            return value
        values = [value]
        distributed.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Raises on every rank if any rank failed, so that none is left waiting in a collective. Collective.

        Args:
            error: this rank's error; None if it succeeded.
            doing: the action, for the message.

        Raises:
            TrainingError: listing the failed ranks and their errors.
        """
        message = None if error is None else str(error) or type(error).__name__
        failures = [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(message)) if text is not None]
        if failures:
            raise TrainingError(f"{doing} failed: {'; '.join(failures)}") from error

    def close(self) -> None:
        """Destroys the process group once every rank has arrived here."""
        if self.grouped:
            distributed.barrier()
            distributed.destroy_process_group()
            self.grouped = False
