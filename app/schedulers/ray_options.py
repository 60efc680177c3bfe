"""The options of a run on Ray, and what they ask the cluster for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.console import counted, shortened
from trainers.config.mistakes import ConfigError, Mistake


class RayOptions(BaseModel):
    """The options of a run on Ray.

    Args:
        nodes: number of nodes.
        gpus_per_node: GPUs, and processes, on each node; 0: processes on the CPU.
        cpus_per_node: CPUs of each node that the run gets; default: one for each of its processes there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: int = Field(default=1, ge=1, le=128)
    gpus_per_node: int = Field(default=1, ge=0, le=64)
    cpus_per_node: int | None = Field(default=None, ge=1, le=4096)

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Self:
        """The options with these values.

        Raises:
            ConfigError: with every mistake.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError([
                Mistake(str(part["loc"][0]), shortened(str(values.get(str(part["loc"][0])))),
                        f"is refused: {part['msg'][0].lower()}{part['msg'][1:]}", "check the value")
                for part in error.errors()
            ]) from None  # fmt: skip

    def resources(self, processes: int) -> dict[str, int]:
        """What the run reserves on each node, by Ray's names.

        Args:
            processes: number of its processes on all nodes.
        """
        cpus = self.cpus_per_node or max(1, processes // self.nodes)
        return {"CPU": cpus, **({"GPU": self.gpus_per_node} if self.gpus_per_node else {})}

    def needs(self, processes: int) -> str:
        """What the run needs, as text, such as `2 nodes with 4 GPUs and 4 CPUs`."""
        resources = self.resources(processes)
        parts = [counted(resources[name], name, f"{name}s") for name in ("GPU", "CPU") if name in resources]
        return f"{counted(self.nodes, 'node', 'nodes')} with {' and '.join(parts)}{' each' * (self.nodes > 1)}"
