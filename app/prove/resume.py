"""`tunesmith prove --resume`: resumes a checkpoint of each strategy under every strategy.

Each strategy trains all steps and saves a checkpoint half-way. From it, every strategy trains the remaining steps,
which are compared with the uninterrupted reference. A resume under the strategy that saved the checkpoint must be
bitwise equal to the run that saved it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.console import clean, say
from app.launch.foreground import CheckBroke
from app.launch.job import TrainJob
from app.prove.plan import Plan, Row
from app.prove.proof import Curve, Proof, blank, compare, curve_of, failure
from app.prove.report import facts, verdict
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder


class ResumeProof(Proof):
    """Runs a plan for pairs of strategies; a row of `document` is a pair, with `from` and `to`.

    Raises:
        ConfigError: if there is only one step, or a control is given.
    """

    def __init__(self, plan: Plan, argv: Sequence[str], quiet: bool):
        super().__init__(plan, argv, quiet)
        self.middle = plan.steps // 2
        if not self.middle:
            raise ConfigError("steps=1 has no middle to resume from; use --steps 2 or more")
        if plan.control != "none":
            raise ConfigError.about(
                "control", plan.control, "is not a fault of a resume", "leave out --resume, or the control"
            )
        method = plan.reference.config.method
        self.pairs = [(first, second) for first in plan.rows for second in plan.rows]
        self.rows = [_blank(first, second, method) for first, second in self.pairs]
        self.document |= {"rows": self.rows, "resumed_at": self.middle}

    def _train_all(self) -> None:
        able = [row for row in self.plan.rows if row.job]
        if not able:
            return
        self.count, self.total = 1, 1 + len(able) + len(able) ** 2
        fault = self._train_reference(self.total)
        self.document |= facts(self.plan.reference.config)
        for entry in self._open() if fault else []:
            entry["reason"] = entry["reason"] or f"not run: the reference failed: {fault}"
        self._write()
        for row in [] if fault else able:
            self._resume_from(row)

    def _label(self, text: str) -> str:
        """The label of the next run, with its number."""
        self.count += 1
        return f"[{self.count}/{self.total}] {text}"

    def _resume_from(self, row: Row) -> None:
        """Trains all steps under one strategy, then resumes its checkpoint under every strategy that can run."""
        assert row.job is not None
        job, scratch = self._saving(row.job), dict[str, Any]()
        resumed = [
            (second, entry)
            for (first, second), entry in zip(self.pairs, self.rows, strict=True)
            if first is row and second.job
        ]
        checkpoint = job.run.checkpoints / f"step-{self.middle:08d}"
        try:
            fault = self._trained(job, scratch, self._label(row.strategy), keep=True)
            curve = curve_of(job.run)
            fault = fault or compare(self.curve, curve, self.plan.steps).fault
            fault = fault or (None if checkpoint.is_dir() else f"it left no {checkpoint.name}")
            for second, entry in resumed:
                if fault:
                    entry |= {"passed": False, "reason": f"{row.strategy} itself: {fault}"}
                    continue
                same = (curve, scratch["weights_sha256"]) if second is row else None
                self._resume_to(second, entry, checkpoint, same)
                self._write()
        finally:
            shutil.rmtree(job.run.checkpoints, ignore_errors=True)

    def _resume_to(self, row: Row, entry: dict[str, Any], checkpoint: Path, same: tuple[Curve, str] | None) -> None:
        """Resumes a checkpoint under one strategy and judges the result.

        Args:
            row: the strategy.
            entry: the pair's row of the document.
            checkpoint: the checkpoint.
            same: if the strategy itself saved the checkpoint, the curve and digest of the weights of that run.
        """
        assert row.job is not None
        text = f"{entry['from']} -> {entry['to']}"
        job = _moved(self._saving(row.job), checkpoint, self.plan.folder / _folder(entry))
        fault = self._trained(job, entry, self._label(text))
        comparison = self._compared(row, entry, self.middle + 1)
        entry |= {"max_loss_difference": comparison.loss, "max_grad_norm_difference": comparison.norm}
        reason = (
            fault or comparison.fault or comparison.apart or ("" if same is None else self._not_exact(entry, *same))
        )
        entry |= {"bit_equal_steps": comparison.bit_equal, "passed": not reason, "reason": reason or None}
        if not self.quiet:
            say(clean(f"      {verdict(entry, False)}"))

    def _saving(self, job: TrainJob) -> TrainJob:
        """The job, with a checkpoint half-way that is kept."""
        return replace(job, config=job.config.model_copy(update={"save_steps": self.middle, "save_total_limit": 100}))

    def _trained(self, job: TrainJob, entry: dict[str, Any], label: str, keep: bool = False) -> str | None:
        """Trains one job; returns why it failed, or None."""
        try:
            return failure(self._train(job, entry, label, keep))
        except ConfigError as error:
            return "; ".join(error.lines)
        except CheckBroke as error:
            return error.cause

    def _not_exact(self, entry: Mapping[str, Any], same: Curve, weights: str) -> str:
        """Why a resume is not bitwise equal to the run that saved the checkpoint; empty if it is.

        Args:
            entry: the pair's row of the document.
            same: curve of the run that saved the checkpoint.
            weights: digest of its exported weights.
        """
        comparison = compare(same, curve_of(RunFolder(entry["run_dir"])), self.plan.steps, self.middle + 1)
        remaining = self.plan.steps - self.middle
        if comparison.bit_equal == remaining:
            must = "a resume on the same topology must be bit-identical; the exported weights differ"
            return "" if entry["weights_sha256"] == weights else must
        return f"a resume on the same topology must be bit-identical; {comparison.bit_equal} of {remaining} steps are"


def _blank(first: Row, second: Row, method: str) -> dict[str, Any]:
    reason = first.reason or second.reason
    return {"from": first.strategy, "to": second.strategy, **blank(second, method), "reason": reason}


def _folder(entry: Mapping[str, Any]) -> str:
    return f"{entry['from']}-to-{entry['to']}".replace(":", "-")


def _moved(job: TrainJob, checkpoint: Path, folder: Path) -> TrainJob:
    """The job of one strategy that resumes from a checkpoint, in a folder of its own."""
    config = job.config.model_copy(update={"output_dir": str(folder), "resume_from_checkpoint": str(checkpoint)})
    return replace(job, config=config, run=RunFolder(folder), resume_from=str(checkpoint))
