"""How a run ends, as a value: rank 0 hands it to the supervisor, which acts on it or publishes it. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Retry = Literal["never", "again", "roll_back"]


@dataclass(frozen=True)
class Ending:
    """How one launch of a run ended.

    Args:
        state: `done`, `stopped` or `failed`.
        cause: why, in one sentence; None for a run that reached its last step.
        retry: what a supervisor does with a failed launch. `never`: it would fail the same way again. `again`: it
            crashed, and is restarted up to `max_restarts` times. `roll_back`: it met a loss spike, and goes on from an
            earlier checkpoint without those batches; that is not a crash.
        step: optimizer steps done; None leaves the step that the state file has.
        export_dir: folder of the exported model.
    """

    state: str
    cause: str | None = None
    retry: Retry = "never"
    step: int | None = None
    export_dir: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The value of `ending` in `state.json`, by which rank 0 hands it to the supervisor."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Ending:
        """Reads what `as_json` wrote; keys of other versions are ignored."""
        return cls(**{key: values[key] for key in cls.__dataclass_fields__ if key in values})

    def published(self) -> dict[str, Any]:
        """The keys of `state.json` that say so once nothing of the launch lives."""
        ending = self.as_json()
        del ending["retry"]
        return {"cause": None, **ending}
