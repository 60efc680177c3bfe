"""The verb `doctor`: reads the request, examines, and prints a line for each check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from app.console import clean, report, report_json, say, shortened
from app.doctor.check import Check
from app.doctor.examine import Request, examine
from app.hardware import Devices
from app.launch.foreground import interruptible
from app.launch.machines import choose_machines, devices_here
from trainers.config.mistakes import Mistake, Mistakes
from trainers.config.parse import whole_number
from trainers.strategy.mesh_options import read_sizes, refuse_other_sizes, with_sizes
from trainers.strategy.schema import MAX_PROCESSES
from trainers.strategy.strategy import Strategy, default_strategy, load_strategy, over_machines, resolve

TIMEOUT, LEAST_TIMEOUT, MOST_TIMEOUT = "120", 5, 3600
_MARKS = {True: "ok", False: "FAULT", None: "-"}


def doctor_verb(
    launch: Mapping[str, str], runs_dir: Path, timeout: str = TIMEOUT, quick: bool = False, as_json: bool = False
) -> int:
    """`tunesmith doctor`.

    Args:
        launch: the given values of `--strategy`, `--gpus`, `--num_processes`, `--pp_size`, the mesh and the machines.
        runs_dir: folder of run folders.
        timeout: seconds that other machines and each step may take, as typed.
        quick: leave out all measurements of speed.
        as_json: print one JSON document.

    Returns:
        The exit status: 0 without a fault, 1 with one.

    Raises:
        ConfigError: with every mistake in the request.
    """
    request = read_request(launch, runs_dir, timeout, quick)
    with interruptible():
        result = examine(request, (lambda check: None) if as_json else show)
    if as_json:
        report_json(result.document(request))
    else:
        verdicts = [check.passed for check in result.checks]
        counts = [f"{verdicts.count(passed)} {label}" for passed, label in
                  ((True, "ok"), (False, "faulty"), (None, "not checked here"))]  # fmt: skip
        say(", ".join(counts))
    return 0 if result.is_healthy else 1


def read_request(launch: Mapping[str, str], runs_dir: Path, timeout: str = TIMEOUT, quick: bool = False) -> Request:
    """The request of a command line; see `doctor_verb` for the arguments.

    Raises:
        ConfigError: with every mistake at once.
    """
    mistakes = Mistakes()
    strategy: Strategy | None = None
    devices: Devices | None = None
    sizes: dict[str, int] | None = None
    with mistakes:
        strategy = load_strategy(launch["strategy"]) if "strategy" in launch else None
    with mistakes:
        machines = choose_machines(launch, strategy.values if strategy else {})
        devices = devices_here(launch, machines, strategy.num_processes if strategy else None)
    with mistakes:
        sizes = read_sizes(launch)
    pp_size = whole_number(launch["pp_size"], 1, MAX_PROCESSES) if "pp_size" in launch else None
    if "pp_size" in launch and pp_size is None:
        problem = f"is not a whole number from 1 to {MAX_PROCESSES}"
        mistakes.append(Mistake("pp_size", shortened(launch["pp_size"]), problem, "write one, e.g. 2"))
    if (seconds := whole_number(timeout, LEAST_TIMEOUT, MOST_TIMEOUT)) is None:
        problem = f"is not a whole number from {LEAST_TIMEOUT} to {MOST_TIMEOUT}"
        mistakes.append(Mistake("timeout", shortened(timeout), problem, f"write e.g. --timeout {TIMEOUT}"))
    mistakes.refuse()
    assert devices is not None
    assert seconds is not None
    assert sizes is not None
    strategy = strategy or load_strategy(default_strategy(devices.num_processes))
    precision = str(strategy.values.get("mixed_precision") or "no")
    spread = over_machines(with_sizes(strategy, sizes, pp_size), devices.machines)
    resolved = resolve(spread, devices.num_processes, precision, pp_size)
    refuse_other_sizes(resolved, sizes)
    return Request(resolved, devices, runs_dir, float(seconds), quick)


def show(check: Check) -> None:
    """Prints the line of a check."""
    remedy = f"; {check.remedy}" if check.remedy else ""
    report(clean(f"{_MARKS[check.passed]:5}  {check.name}: {check.value}{remedy}").replace("\n", " "))
