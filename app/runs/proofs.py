"""The proofs of a run, `tunesmith prove` on its own config and strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.runs.run_work import RunWork
from app.runs.work_folder import WorkFolder, read_object


class ProofFolder(WorkFolder):
    """One proof. Its note also has `control`."""

    note_name = "proof.json"

    @property
    def number(self) -> int:
        """Its place among the proofs of the run, from 1."""
        return int(self.path.name)

    @property
    def report(self) -> Path:
        """The folder that `prove` writes."""
        return self.path / "report"

    def document(self) -> dict[str, Any]:
        """The JSON document of `prove` so far, without validation; {} if missing."""
        return read_object(self.report / "report.json")


PROOFS = RunWork("proofs", ProofFolder, "a proof")
