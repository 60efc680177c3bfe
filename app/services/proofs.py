"""Proves a run's strategy on its own model and data: `tunesmith prove` in the background, started from the run's page.

A proof outlives the server and the browser; all that is told of it comes from its files.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.console import clean, counted
from app.hardware import Devices
from app.launch.background_work import start_run_work, stop_work
from app.launch.restarts import need_of
from app.prove.plan import PROVE, REFERENCE, STEPS, make_plan
from app.runs.proofs import PROOFS, ProofFolder
from app.runs.runs import config_values, gpu_ids, strategy_name, true_state, world_size
from app.runs.safe_read import Stamp, read_span, stamp
from trainers.config.mistakes import ConfigError
from trainers.config.yaml_file import read_yaml
from trainers.run import device_locks
from trainers.run.folder import RunFolder, read_json

CONTROL = "mean-of-means"
_MAX_TEXT_BYTES = 1 << 16
"""Bytes shown of a report, and of the end of an output."""
_MAX_REASON = 400

Entry = dict[str, Any]


# -- what can be proved ----------------------------------------------------------------------------------------------


def refusal(run: RunFolder) -> str:
    """Why a run cannot be proved at all, as a clause about the run; empty if it can. `start` checks the remainder."""
    if "," in str(run.path):
        return "its path has a comma, which separates strategies on the command line; rename the folder"
    return _refusal(run.path, stamp(run.config), stamp(run.accelerate))


@functools.lru_cache(maxsize=256)
def _refusal(path: Path, config: Stamp | None, accelerate: Stamp | None) -> str:
    run = RunFolder(path)
    if not (config and accelerate):
        return "it has no config.yaml and accelerate.yaml"
    try:
        values, machines = read_yaml(run.config), read_yaml(run.accelerate).get("num_machines") or 1
    except ConfigError as error:
        return "; ".join(error.lines)
    if machines != 1:
        return f"it trains on {machines} machines, and a proof uses one; prove a clone of it on one machine"
    if world_size(run) == 1:
        return "it trains in one process, which is what a proof compares with, so there is nothing to prove"
    if values.get("resume_from_checkpoint") is not None:
        return "it starts from a checkpoint, and a proof from the base model; prove a clone without it"
    return ""


def subject(run: RunFolder) -> str:
    """What is proved, such as `ddp on 2 processes`."""
    name, world = _strategy(run.path, stamp(run.accelerate))
    return f"{name or 'the strategy'} on {counted(world or 0, 'process', 'processes')}"


@functools.lru_cache(maxsize=256)
def _strategy(path: Path, version: Stamp | None) -> tuple[str, int | None]:
    """Name and processes of a run's strategy, read again when its file changes."""
    run = RunFolder(path)
    return strategy_name(run), world_size(run)


def arguments(run: RunFolder, control: bool = False) -> list[str]:
    """The arguments of `tunesmith prove` for a run, without the folder of the report.

    Args:
        run: the run.
        control: whether to train the run's strategy with a known fault.
    """
    ids = gpu_ids(run)
    devices = (
        ["--gpus", ",".join(map(str, ids))]
        if ids
        else ["--num_processes", str(_strategy(run.path, stamp(run.accelerate))[1])]
    )
    fault = ["--control", CONTROL] if control else []
    return ["--config", str(run.config), "--strategies", str(run.accelerate), *devices, *fault]


def command(run: RunFolder) -> str:
    """The command that proves a run in a terminal."""
    return shlex.join(["tunesmith", "prove", *arguments(run)])


def _argv(run: RunFolder, proof: ProofFolder, control: bool) -> list[str]:
    return ["prove", *arguments(run, control), "--output_dir", str(proof.report)]


# -- starting and stopping -------------------------------------------------------------------------------------------


def start(run: RunFolder, control: bool = False) -> ProofFolder:
    """Starts a proof in the background.

    Args:
        run: the run.
        control: whether to train the run's strategy with a known fault, which the comparison must see.

    Raises:
        ConfigError: if a proof of the run is running, its devices are in use, or with what `tunesmith prove` refuses.
    """
    if reason := refusal(run):
        raise ConfigError(f"run {run.id} cannot be proved: {reason}")
    if PROOFS.running(run) is None:
        _refuse_request(run, _argv(run, PROOFS.following(run), control))
    return start_run_work(PROOFS, run, lambda proof: _argv(run, proof, control), {"control": control}, "proved")


def _refuse_request(run: RunFolder, argv: list[str]) -> None:
    """Raises ConfigError with what `prove` refuses, why the strategy cannot run here, or who holds its devices."""
    args = PROVE.read(argv[1:])
    if args is None:
        raise AssertionError("no help was requested")
    reasons = [row.reason for row in make_plan(args).rows if row.reason]
    if reasons:
        raise ConfigError(f"{strategy_name(run)} cannot run on this machine: {'; '.join(reasons)}")
    if config_values(run).get("share_gpus") is not True and (holders := _holders(run)):
        raise ConfigError(f"the devices of run {run.id} are in use ({holders}); prove it once they are free")


def _holders(run: RunFolder) -> str:
    """Who holds the devices that a proof needs; empty if enough of them are free."""
    need = need_of(Devices(gpu_ids(run), world_size(run) or 1))
    if need.cpu_slots:
        slots = device_locks.cpu_slots()
        free = set(slots) - device_locks.holders().keys()
        if len(free) >= min(need.cpu_slots, len(slots)):
            return ""
    return device_locks.who_has(need)


def stop(run: RunFolder) -> None:
    """Asks the running proof of a run to end, and returns immediately.

    Raises:
        ConfigError: if no proof is running, or none that this machine can stop.
    """
    proof = PROOFS.running(run)
    if proof is None:
        raise ConfigError(f"no proof of run {run.id} is running")
    stop_work(proof, "proof", to_group=True)


# -- what is told of it ----------------------------------------------------------------------------------------------


def entries(run: RunFolder) -> list[Entry]:
    """The proofs of a run, newest first; see `entry`."""
    running = PROOFS.running(run)
    return [entry(run, proof, proof == running) for proof in PROOFS.of(run)]


def newest(run: RunFolder) -> list[Entry]:
    """The running proof of a run if there is one; then, without and with the fault, the newest that has ended.

    If that has no verdict, the newest that has one follows.
    """
    running = PROOFS.running(run)
    chosen = [entry(run, running, True)] if running else []
    for control in (False, True):
        kind = [proof for proof in PROOFS.of(run) if proof != running and _is_control(proof) is control]
        ended = (entry(run, proof, False) for proof in kind)
        chosen += itertools.islice(ended, 1)
        if kind and not chosen[-1]["verdict"]:
            chosen += itertools.islice((judged for judged in ended if judged["verdict"]), 1)
    return chosen


def _is_control(proof: ProofFolder) -> bool:
    return proof.note().get("control") is True


def entry(run: RunFolder, proof: ProofFolder, is_running: bool) -> Entry:
    """One proof.

    Returns:
        `number`, `control` (whether the strategy was trained with a known fault), `running`, `verdict` (`agrees`,
        `differs`, `fault seen`, `fault not seen`, `failed`; None without one), `reason` and `sentence` (the verdict in
        words); `max_loss_difference`, `max_grad_norm_difference`, `bit_equal_steps`, `steps`, `tolerance`;
        `started_at`, `seconds`, `stopping`, `doing` and `progress` (while it runs, else empty and None), and the
        paths `report` and `output`.
    """
    note, document = proof.note(), proof.document()
    row, limits, control = _row(document), _part(document, "tolerance"), _is_control(proof)
    tolerance = {name: _number(limits.get(name)) for name in ("loss", "grad_norm")}
    numbers = {name: _number(row.get(name)) for name in ("max_loss_difference", "max_grad_norm_difference")}
    verdict, reason = (None, "") if is_running else _verdict(proof, control, numbers, tolerance)
    seconds = [
        taken for part in (_part(document, "reference"), row) if (taken := _number(part.get("seconds"))) is not None
    ]
    return {
        "number": proof.number, "control": control, "running": is_running, "verdict": verdict, "reason": reason,
        "sentence": "" if is_running else _sentence(run, verdict, reason),
        **numbers, "bit_equal_steps": _number(row.get("bit_equal_steps")), "steps": _number(document.get("steps")),
        "tolerance": tolerance, "started_at": _text(note.get("started_at"))[:40],
        "seconds": sum(seconds) if seconds else None,
        **_progress(proof, is_running), "stopping": is_running and bool(note.get("stopped_at")),
        "report": str(proof.report / "report.md"), "output": str(proof.output),
    }  # fmt: skip


def _row(document: Mapping[str, Any]) -> dict[str, Any]:
    rows = document.get("rows")
    return rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}


def _part(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = document.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e300 and math.isfinite(value) else None


def _text(value: Any) -> str:
    return clean(value)[:_MAX_REASON] if isinstance(value, str) else ""


def _verdict(
    proof: ProofFolder, control: bool, numbers: Mapping[str, float | None], tolerance: Mapping[str, float | None]
) -> tuple[str | None, str]:
    """The verdict of a proof that has ended, and its reason."""
    document = proof.document()
    row, cause = _row(document), _text(_part(document, "reference").get("cause"))
    passed, reason = row.get("passed"), _text(row.get("reason"))
    if isinstance(passed, bool):
        pairs = zip(numbers.values(), tolerance.values(), strict=True)
        is_apart = any(number is not None and most is not None and number > most for number, most in pairs)
        if not passed and not (row.get("fault_seen") if control else is_apart):
            return "failed", reason  # it crashed, or a number is not finite
        return ("fault not seen" if passed else "fault seen") if control else "agrees" if passed else "differs", reason
    if document.get("interrupted") is True or proof.note().get("stopped_at"):
        return None, "it was stopped"
    if cause:
        return None, f"the single process failed: {cause}"
    return None, reason or ("it ended early" if document else _last_words(proof))


def _last_words(proof: ProofFolder) -> str:
    """Why a proof left no report: the last error that it printed."""
    lines = [line.strip() for line in _end_of_output(proof).splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    last = f"it ended early; its last line is: {lines[-1]}" if lines else "it ended early"
    return _text(errors[-1] if errors else last)


def _sentence(run: RunFolder, verdict: str | None, reason: str) -> str:
    name, why = subject(run), f": {reason.rstrip('.')}" if reason.rstrip(".") else ""
    return {
        "agrees": f"{name} trains the same model as one process.",
        "differs": f"{name} does not train the same model as one process{why}.",
        "failed": f"{name} did not train as one process did{why}.",
        "fault seen": f"A known fault in {name} is seen, so the comparison can fail.",
        "fault not seen": f"A known fault in {name} is not seen, so a proof says nothing here.",
    }.get(verdict or "", f"No verdict{why}.")


def proof_line(proof: Entry) -> str:
    """A proof in one line: what it is doing, or the verdict with the largest differences."""
    if proof["running"]:
        return f"running, {'stopping' if proof['stopping'] else proof['doing']}"
    if not proof["verdict"]:
        return str(proof["sentence"])
    names = ("max_loss_difference", "max_grad_norm_difference")
    loss, norm, most_loss, most_norm = (
        "-" if value is None else f"{value:.2g}"
        for value in (*(proof[name] for name in names), *proof["tolerance"].values())
    )
    differences = f"loss {loss} (at most {most_loss}), gradient norm {norm} (at most {most_norm})"
    return f"{proof['sentence']} Largest differences: {differences}."


def _progress(proof: ProofFolder, is_running: bool) -> Entry:
    """What a running proof is doing, and the share of its steps that are done: the reference first, then the run's."""
    if not is_running:
        return {"doing": "", "progress": None}
    folders = [proof.report / REFERENCE]
    with contextlib.suppress(OSError):
        folders += sorted(path for path in proof.report.iterdir() if path.is_dir() and path.name != REFERENCE)
    begun = [(number, run) for number, run in enumerate(map(RunFolder, folders[:2])) if run.state_file.exists()]
    if not begun:
        return {"doing": "checking data and model", "progress": 0.0}
    number, run = begun[-1]
    name = "one process" if run.id == REFERENCE else run.id
    if true_state(run)["state"] == "queued":
        return {"doing": f"{name} waits for its devices", "progress": number / 2}
    step = _number((read_json(run.heartbeats / "rank-0.json") or {}).get("step")) or 0
    doing = f"{name}, step {step:,.0f} of {STEPS}" if step else f"{name} is starting"
    return {"doing": doing, "progress": (number + min(1.0, step / STEPS)) / 2}


def files(run: RunFolder, number: int) -> dict[str, str]:
    """The `Report` (Markdown) and the end of the `Output` of a proof; empty where a file is missing."""
    proof = ProofFolder(run.path / PROOFS.folder / str(number))
    report = read_span(proof.report / "report.md", 0, _MAX_TEXT_BYTES)[0]
    return {"Report": report.decode("utf-8", "replace"), "Output": _end_of_output(proof)}


def _end_of_output(proof: ProofFolder) -> str:
    _, size = read_span(proof.output, 0, 0)
    return read_span(proof.output, max(0, size - _MAX_TEXT_BYTES), _MAX_TEXT_BYTES)[0].decode("utf-8", "replace")
