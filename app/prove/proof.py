"""`tunesmith prove`: trains the user's model and data under each strategy, and compares each with a single process.

Every run takes the path of `tunesmith train`: pre-flight check, run folder, launcher, supervisor. The runs follow one
another, as they would otherwise share cores and memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.console import clean, say
from app.hardware import cpu_count
from app.launch.foreground import CheckBroke, interruptible, launch, preflight, where
from app.launch.job import TrainJob
from app.launch.progress import progress_display
from app.launch.supervisor import Listener
from app.prove.plan import Plan, Row
from app.prove.report import facts, verdict, write_report
from app.runs.runs import metrics
from trainers.config.mistakes import ConfigError
from trainers.run.folder import RunFolder, read_json, register_outside, unregister
from trainers.run.unfinished import held_alone

LOSS_TOLERANCE = 1e-5
"""Largest allowed absolute difference in the loss of a step, in fp32."""
NORM_TOLERANCE = 1e-4
"""Largest allowed difference in the gradient norm of a step, relative to the reference's, in fp32."""
TOLERANCE = (LOSS_TOLERANCE, NORM_TOLERANCE)
BF16_TOLERANCE = (1e-2, 1e-1)
"""Both in bf16, whose rounding each update amplifies; measured on a CPU: 1.7e-3 and 2.4e-2 (six steps, under `tp`)."""
_TINY = 1e-30

Curve = dict[int, tuple[float | None, float | None]]
"""Loss and gradient norm by step; None if not finite."""


# -- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The difference between a run and the reference.

    Args:
        loss: largest absolute difference of the loss; None if no step can be compared.
        norm: largest relative difference of the gradient norm; None likewise.
        bit_equal: number of steps whose loss and gradient norm are bitwise equal.
        fault: why the run is not complete; None if it is.
        apart: the first difference out of tolerance; None if there is none.
    """

    loss: float | None
    norm: float | None
    bit_equal: int
    fault: str | None
    apart: str | None

    @property
    def passed(self) -> bool:
        return self.fault is None and self.apart is None


def curve_of(run: RunFolder) -> Curve:
    """The logged steps of a run; if a step was logged twice, its last values."""
    return {row["step"]: (row.get("loss"), row.get("grad_norm")) for row in metrics(run) if "loss" in row}


def incomplete(curve: Curve, steps: int, first: int = 1) -> str | None:
    """Why a curve is not complete from step `first` to `steps`: a step is missing, or a number is not finite.

    None if it is complete.
    """
    wanted = range(first, steps + 1)
    missing = [step for step in wanted if step not in curve]
    if missing:
        logged = len(wanted) - len(missing)
        return f"logged {logged} of {len(wanted)} steps; the first missing one is step {missing[0]}"
    for step in wanted:
        for name, value in zip(("loss", "gradient norm"), curve[step], strict=True):
            if not _is_finite(value):
                return f"the {name} of step {step} is not finite"
    return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < float("inf")


def compare(
    reference: Curve, row: Curve, steps: int, first: int = 1, tolerance: tuple[float, float] = TOLERANCE,
    at_first: tuple[float, float] | None = None,
) -> Comparison:  # fmt: skip
    """Compares two curves step by step.

    Args:
        reference: a complete curve.
        row: the curve to judge.
        steps: last step of both.
        first: step at which the comparison begins.
        tolerance: of the loss, absolute, and of the gradient norm, relative.
        at_first: those of step 1, before any update; None for the same.
    """
    losses: dict[int, float] = {}
    norms: dict[int, float] = {}
    for step in range(first, steps + 1):
        (loss, norm), (right_loss, right_norm) = row.get(step, (None, None)), reference[step]
        if _is_finite(loss) and _is_finite(norm):
            losses[step] = abs(loss - right_loss)  # type: ignore[operator]
            norms[step] = abs(norm - right_norm) / max(abs(right_norm), _TINY)  # type: ignore[operator, arg-type]
    equal = sum(row.get(step) == reference[step] for step in range(first, steps + 1))
    limits = tolerance if at_first is None else at_first, tolerance
    apart = _apart("loss", losses, *(limit[0] for limit in limits))
    apart = apart or _apart("gradient norm", norms, *(limit[1] for limit in limits))
    largest = max(losses.values(), default=None), max(norms.values(), default=None)
    return Comparison(*largest, equal, incomplete(row, steps, first), apart)


def _apart(name: str, differences: Mapping[int, float], at_first: float, later: float) -> str | None:
    for step, difference in differences.items():
        most = at_first if step == 1 else later
        if not difference <= most:
            return f"the {name} differs by {difference:.2g} at step {step}, at most {most:g}"
    return None


# -- the runs --------------------------------------------------------------------------------------------------------


class Proof:
    """Runs a plan. `document` is updated after every run, and written to the folder as `report.json` and `report.md`.

    Args:
        plan: the plan.
        argv: the command line, for the report.
        quiet: show only warnings.
    """

    def __init__(self, plan: Plan, argv: Sequence[str], quiet: bool):
        self.plan, self.quiet = plan, quiet
        self.curve: Curve = {}
        self.weights: str | None = None
        in_bf16 = plan.reference.config.mixed_precision == "bf16"
        self.tolerance = BF16_TOLERANCE if in_bf16 else TOLERANCE
        # The same number of threads for every run, as it affects the order of summation: only the strategy may differ.
        most = max([row.world_size for row in plan.rows if row.job] or [1])
        self.outer = {"OMP_NUM_THREADS": str(max(1, cpu_count() // most)), **os.environ}
        config = plan.reference.config
        control = None if plan.control == "none" else {"fault": plan.control, "seen": 0, "rows": 0}
        self.rows = [blank(row, config.method) for row in plan.rows]
        reference = {"strategy": plan.reference.strategy.name, "world_size": 1, "state": None, "cause": None}
        self.document: dict[str, Any] = {
            "reference": reference, "steps": plan.steps, "rows": self.rows, "control": control, "interrupted": False,
            "tolerance": dict(zip(("loss", "grad_norm"), self.tolerance, strict=True)), "preset": config.preset,
            "global_batch_size": config.global_batch_size,
            "per_device_train_batch_size": config.per_device_train_batch_size, "overrides": plan.overrides,
            "command": ["tunesmith", "prove", *argv], "report_dir": str(plan.folder),
        }  # fmt: skip

    def run(self) -> None:
        """Trains the reference and every row that can run; on an interrupt, reports what was done so far.

        Raises:
            ConfigError: if the pre-flight check refuses the reference, or another proof is using the folder.
            CheckBroke: if that check crashes.
        """
        with held_folder(self.plan.folder):
            self._announce()
            with interruptible():
                try:
                    self._train_all()
                except KeyboardInterrupt:
                    self.document["interrupted"] = True
                    for row in self._open():
                        row["reason"] = row["reason"] or "not run: interrupted"
                self._note_control()
                self._write()

    def _announce(self) -> None:
        for line in [] if self.quiet else self.plan.overrides:
            why = f" ({line['why']})" if "why" in line else ""
            say(clean(f"prove sets {line['option']}={line['used']} instead of {line['given']}{why}"))
        for warning in self.plan.warnings:
            say("warning: " + clean(warning))
        for row in self.plan.rows:
            for warning in row.warnings:
                say("warning: " + clean(f"{row.strategy}: {warning}"))
            if row.reason and not self.quiet:
                say(clean(f"{row.strategy} cannot run on this machine: {row.reason}"))

    def _train_all(self) -> None:
        waiting = [(row, entry) for row, entry in zip(self.plan.rows, self.rows, strict=True) if row.job]
        if not waiting:
            return
        fault = self._train_reference(len(waiting) + 1)
        self.document |= facts(self.plan.reference.config)
        for _, entry in waiting:
            if fault:
                entry["reason"] = f"not run: the reference failed: {fault}"
        self._write()
        for number, (row, entry) in enumerate([] if fault else waiting, 2):
            self._train_row(row, entry, f"[{number}/{len(waiting) + 1}]")
            self._write()

    def _train_reference(self, count: int) -> str | None:
        """Trains the reference; returns why it failed, or None."""
        job, entry = self.plan.reference, self.document["reference"]
        state = self._train(job, entry, f"[1/{count}] reference")
        self.curve, self.weights = curve_of(job.run), entry["weights_sha256"]
        fault = failure(state) or incomplete(self.curve, self.plan.steps)
        entry["cause"] = fault
        entry["losses"], entry["grad_norms"] = ([values[at] for values in self.curve.values()] for at in (0, 1))
        return fault

    def _train_row(self, row: Row, entry: dict[str, Any], label: str) -> None:
        """Trains one row and judges it; if the pre-flight check refuses it, the strategy cannot run here."""
        if row.job is None:
            raise AssertionError(f"{row.strategy} cannot run")
        try:
            state = self._train(row.job, entry, f"{label} {row.strategy}")
        except ConfigError as error:
            entry["reason"] = "; ".join(error.lines)
        except CheckBroke as error:
            entry |= {"passed": False, "reason": error.cause}
        else:
            self._judge(row, entry, state)
        if not self.quiet:
            say(clean(f"      {verdict(entry, self.plan.control != 'none')}"))

    def _train(self, job: TrainJob, entry: dict[str, Any], label: str, keep: bool = False) -> dict[str, Any]:
        """Trains one job from its pre-flight check to its end; returns the final state.

        Its export is always deleted, its checkpoints unless `keep`.

        Args:
            job: the job.
            entry: the row of the document to update.
            label: prefix of the progress line.
            keep: whether to keep the checkpoints.

        Raises:
            ConfigError: if the pre-flight check refuses the job.
            CheckBroke: if that check crashes.
            KeyboardInterrupt: if the run was stopped.
        """
        if not self.quiet:
            say(f"{label} on {where(job)}")
        began = time.monotonic()
        preflight(job, quiet=True)
        try:
            # Lists of runs skip report folders. Register the run while it is live, so that it can be found and
            # stopped if this process is killed.
            register_outside(job.run, job.run.path)
            state = launch(job, self._display(job), self.outer, bound=True)
            entry |= {"seconds": round(time.monotonic() - began, 1), "run_dir": str(job.run.path)}
            entry["weights_sha256"] = _weights_digest(job.run)
            if job is self.plan.reference:
                entry["state"] = state["state"]
                self._note_origin(job.run)
            if state["state"] == "stopped":
                entry["reason"] = f"interrupted: {_interruption(state)}"
                raise KeyboardInterrupt
            return state
        finally:
            unregister(job.run)
            _tidy(job.run, keep)

    def _display(self, job: TrainJob) -> AbstractContextManager[Listener]:
        return progress_display(job.run, self.quiet or not sys.stderr.isatty(), job.warnings)

    def _judge(self, row: Row, entry: dict[str, Any], state: Mapping[str, Any]) -> None:
        comparison = self._compared(row, entry)
        entry |= {"max_loss_difference": comparison.loss, "max_grad_norm_difference": comparison.norm}
        fault, control = failure(state) or comparison.fault, self.plan.control != "none"
        alone = row.job is not None and row.job.strategy.distributed_type == "NO"
        rerun = "" if control or not alone else self._not_repeated(comparison, entry["weights_sha256"])
        reason = fault or comparison.apart or rerun
        entry |= {"bit_equal_steps": comparison.bit_equal, "passed": not reason, "reason": reason or None}
        if control:
            entry["fault_seen"] = fault is None and comparison.apart is not None

    def _compared(self, row: Row, entry: Mapping[str, Any], first: int = 1) -> Comparison:
        """Compares a row's run with the reference, from step `first`.

        Before the first update, bf16 rounds alike in all layouts that cut neither matrices nor rows: fp32's limits hold
        there, by which a fault is seen that the rounding of later steps would hide.
        """
        curve = curve_of(RunFolder(entry["run_dir"])) if "run_dir" in entry else {}
        cut = row.job is None or row.job.strategy.sizes.tp * row.job.strategy.sizes.sequence_shards > 1
        at_first = None if cut else TOLERANCE
        return compare(self.curve, curve, self.plan.steps, first, self.tolerance, at_first)

    def _not_repeated(self, comparison: Comparison, weights: str | None) -> str:
        """Why a run on one process is not an exact repetition of the reference; empty if it is."""
        if comparison.bit_equal < self.plan.steps:
            return f"a rerun must be bit-identical; {comparison.bit_equal} of {self.plan.steps} steps are"
        return "" if weights == self.weights else "a rerun must be bit-identical; the exported weights differ"

    def _note_origin(self, run: RunFolder) -> None:
        """Records the data fingerprint from the reference's checkpoint."""
        manifests = sorted(run.checkpoints.glob("step-*/manifest.json"))
        manifest = (read_json(manifests[-1]) if manifests else None) or {}
        self.document["data_fingerprint"] = manifest.get("data_fingerprint")

    def _note_control(self) -> None:
        if self.plan.control != "none":
            seen = [row.get("fault_seen", False) for row in self.rows if row["passed"] is not None]
            self.document["control"] |= {"seen": sum(seen), "rows": len(seen)}

    def _open(self) -> list[dict[str, Any]]:
        """The rows without a verdict."""
        return [row for row in self.rows if row["passed"] is None]

    def _write(self) -> None:
        if any(self.plan.folder.iterdir()):  # a run was started
            write_report(self.plan.folder, self.document, self.plan.reference.config)


@contextlib.contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Makes the folder of a report, and holds its lock; removes it if nothing was written.

    Raises:
        ConfigError: if another proof holds it, or has written to it since the plan was made, or it cannot be made.
    """
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        raise ConfigError.about("output_dir", folder, problem, "name another folder") from None
    with held_alone(folder, f"output_dir={folder} holds a proof that is running; name a new folder"):
        if any(folder.iterdir()):
            raise ConfigError.about("output_dir", folder, "holds other files", "name a new folder for the report")
        try:
            yield
        finally:
            if is_new:
                with contextlib.suppress(OSError):  # a report is in it
                    folder.rmdir()


def blank(row: Row, method: str) -> dict[str, Any]:
    """A row of the document before its run."""
    numbers = dict.fromkeys(("max_loss_difference", "max_grad_norm_difference", "bit_equal_steps", "passed"))
    failed = {"strategy": row.strategy, "world_size": row.world_size, "method": method}
    return {**failed, **numbers, "reason": row.reason, "warnings": row.warnings}


def failure(state: Mapping[str, Any]) -> str | None:
    """Why a run is not done; None if it is."""
    return None if state["state"] == "done" else str(state.get("cause") or state["state"])


def _weights_digest(run: RunFolder) -> str | None:
    """SHA-256 over the digests of the exported weight files; None if there are none."""
    digest = hashlib.sha256()
    files = sorted(run.model.glob("*.safetensors"))
    for path in files:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest() if files else None


def _tidy(run: RunFolder, keep: bool) -> None:
    """Deletes exports, and unless `keep` checkpoints: they are as large as the model and no longer needed."""
    for folder in (*([] if keep else [run.checkpoints]), run.model, *run.path.glob("export-*")):
        shutil.rmtree(folder, ignore_errors=True)
    if state := run.read_state():
        cause = _interruption(state) if state["state"] == "stopped" else state.get("cause")
        run.write_state(export_dir=None, cause=cause)


def _interruption(state: Mapping[str, Any]) -> str:
    """The cause of a stop; the run's own promises to resume from a checkpoint, which `prove` does not keep."""
    return f"stopped at step {state.get('step')}; prove keeps no checkpoint of it, run prove again"
