"""The outcome of a run as a value, which rank 0 passes to the supervisor to act on or publish. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Retry = Literal["never", "again", "roll_back"]


@dataclass(frozen=True)
class Ending:
    """How one launch of a run ended.

    Args:
        state: `done`, `stopped` or `failed`.
        cause: The reason in one sentence; None for a run that reached its last step.
        retry: What the supervisor does after a failed launch. `never`: it would fail again in the same way. `again`: it
            crashed, and is restarted up to `max_restarts` times. `roll_back`: after a loss spike, training continues
            from an earlier checkpoint without those batches, which does not count as a crash.
        step: Completed optimizer steps; None keeps the step in the state file.
        export_dir: Folder of the exported model.
    """

    state: str
    cause: str | None = None
    retry: Retry = "never"
    step: int | None = None
    export_dir: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the value of `ending` in `state.json`, through which rank 0 passes it to the supervisor."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Ending:
        """Rebuilds an ending from `as_json`; unknown keys, written by other versions, are ignored."""
        return cls(**{key: values[key] for key in cls.__dataclass_fields__ if key in values})

    def published(self) -> dict[str, Any]:
        """Returns the keys of `state.json` to publish once all processes of the launch have ended."""
        ending = self.as_json()
        del ending["retry"]
        return {"cause": None, **ending}
