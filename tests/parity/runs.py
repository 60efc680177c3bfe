"""The runs that the parity tests compare; each is launched once and shared."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Finished, launch_well
from tests.parity.plain import Curve
from tests.shared import once
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.run.folder import RunFolder

STEPS = 14
HALF = STEPS // 2
"""The step of the first checkpoint; within the steps of a generation of three."""
long = pytest.mark.long


def mostly_long(values: Iterable[Any], short: Iterable[Any], quick: Iterable[Any] = ()) -> list[Any]:
    """Parameters of a test: all run under `make parity`, `short` under `make check` too, `quick` under `make test`."""
    in_check, in_test = list(short), list(quick)

    def mark(value: Any) -> list[pytest.MarkDecorator]:
        return [pytest.mark.quick] if value in in_test else [] if value in in_check else [long]

    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark(value)) for value in values]


OPTIONS: dict[str, Any] = {
    "model_name_or_path": "embedded",
    "dataset_name": "embedded",
    "eval_dataset_name": "embedded",
    "max_eval_samples": 37,  # a remainder on every number of ranks
    "max_length": 192,
    "global_batch_size": 8,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 4,
    "max_steps": STEPS,
    "learning_rate": 5e-4,
    "weight_decay": 0.1,
    "logging_steps": 1,
    "save_steps": HALF,
}
# Epochs of a few steps with a partial last batch, so that the steps cross epochs' ends.
SAMPLES = {True: 105, False: 43}


def options(method: str, packing: bool, **changes: Any) -> dict[str, Any]:
    """Options of a parity run."""
    return {**OPTIONS, "method": method, "packing": packing, "max_train_samples": SAMPLES[packing], **changes}


def config(method: str, packing: bool, **changes: Any) -> TrainConfig:
    """The same as a config."""
    return build(options(method, packing, **changes))


@functools.cache
def _run(processes: int, strategy: str | None, again: int, items: tuple[tuple[str, Any], ...]) -> Finished:
    def start(folder: Path) -> None:
        more: dict[str, Any] = {"strategy": strategy, "timeout": 600}
        more |= {"by_hand": True, "PYTHONPROFILEIMPORTTIME": "1"} if again else {}
        finished = launch_well(folder / "run", processes, dict(items), **more)
        (folder / "output").write_text(finished.output)

    what = json.dumps([processes, strategy, again, items], default=str)
    folder = once(f"run-{hashlib.sha256(what.encode()).hexdigest()[:16]}", start)
    return Finished(RunFolder(folder / "run"), 0, (folder / "output").read_text())


def run(
    processes: int, method: str, packing: bool, strategy: str | None = None, again: int = 0, **changes: Any
) -> Finished:
    """A finished run; the same arguments give the same run, another `again` gives another, launched by hand.

    The log of the latter lists what is imported.
    """
    return _run(processes, strategy, again, tuple(sorted(options(method, packing, **changes).items())))


def curve(finished: Finished) -> Curve:
    """Loss and gradient norm by step."""
    return Curve(finished.series("loss"), finished.series("grad_norm"))
