"""Proof on one GPU, in at most nine minutes: `make gpu`, or `python -m benchmarks.gpu_proof [--only PART ...]`.

tests of tests/gpu -> tunesmith prove in bf16 -> plans against reserved memory -> rates (benchmarks/gpu.py)
    -> benchmarks/results/DATE-gpu.json, written after each part -> docs/verified.md (benchmarks/gpu_verified.py)

Each part is a process of its own with a time limit. What lacks a package is reported as "not run: needs NAME", and does
not count as passed. It uses the packages of the Python that runs it and installs nothing; Tunesmith itself need not be
installed. Nothing is downloaded. Exit status: 0 something passed and nothing failed, 1 otherwise, 2 no GPU.

`--only PART ...` runs some parts, and `--tiny` the program on the CPU with tiny shapes, to test the program: then a
result is written only where `--out` says.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BUDGET = 530.0
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
REQUIRED = (
    "torch", "accelerate", "transformers", "peft", "safetensors", "pydantic", "yaml", "typer", "psutil", "pynvml",
    "filelock", "fsspec", "pyarrow", "numpy", "packaging",
)  # fmt: skip
"""Modules that every part imports; `datasets` is only for data from the Hub, `trl` for templates of other models."""
VERSIONS = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "torchao", "trl", "deepspeed", "datasets")
TINY_TESTS = "rerun or scaler"
_TAIL = 3000
"""Characters of a failed part's output in the result."""
DEVICE = """
import json, torch
properties = torch.cuda.get_device_properties(0)
name, total = properties.name, properties.total_memory / 2**30
try:
    import pynvml
    pynvml.nvmlInit()
    driver = str(pynvml.nvmlSystemGetDriverVersion())
except Exception:
    driver = "unknown"
capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
print(json.dumps({"device": name, "memory_gib": round(total, 1), "capability": capability, "driver": driver,
                  "cuda": torch.version.cuda, "gpus": torch.cuda.device_count()}))
"""
"""In a process of its own, so that this one takes no memory of the GPU."""


@dataclass(frozen=True)
class Part:
    """One part of the proof.

    Args:
        name: for `--only` and the result.
        seconds: its time limit.
        argv: Python's arguments, given its results file and its time limit.
        judge: outcome, reason and details, from exit status, results (None if it wrote none) and output.
        needs: modules beside `REQUIRED`.
    """

    name: str
    seconds: float
    argv: Callable[[Path, float], list[str]]
    judge: Callable[[int, Any], tuple[str, str | None]]
    needs: tuple[str, ...] = ()


def parts(tiny: bool) -> list[Part]:
    """The parts in order; the last takes the time that is left."""

    def tests(results: Path, limit: float) -> list[str]:
        # addopts of pyproject.toml needs pytest-xdist.
        plain = ["-o", "addopts=", "-p", "no:cacheprovider", "-q", "-ra", "--results", str(results)]
        return ["-m", "pytest", "tests/gpu", *plain, *(["--on_cpu", "-k", TINY_TESTS] if tiny else [])]

    def prove(results: Path, limit: float) -> list[str]:
        folder = str(results.with_suffix(""))
        strategies, steps = ("single", "2") if tiny else ("single,fsdp2_offload:1", "6")
        return ["-m", "app.cli", "prove", "tiny-full", "--bf16", "--strategies", strategies, "--steps", steps, "--json",
                "--max_train_samples", "200", "--output_dir", folder]  # fmt: skip

    def memory(results: Path, limit: float) -> list[str]:
        return ["-m", "benchmarks.gpu_memory", "--json", *(["--tiny"] if tiny else [])]

    def rates(results: Path, limit: float) -> list[str]:
        cases = ["--tiny", "--only", "8b, lora, packed, bf16, 1"] if tiny else []
        return ["-m", "benchmarks.gpu", "--json", "--budget", f"{max(limit - 10, 0):.0f}", *cases]

    return [
        Part("tests", 200, tests, judge_tests, ("pytest",)),
        Part("prove", 110, prove, judge_prove),
        Part("memory", 120, memory, judge_memory),
        Part("rates", BUDGET, rates, judge_rates),
    ]


# -- what a part says ------------------------------------------------------------------------------------------------


def judge_tests(status: int, results: Any) -> tuple[str, str | None]:
    """Fails with the names of tests that failed; skipped tests are no success."""
    outcomes = [test["outcome"] for test in (results or {}).get("tests", [])]
    failed = [test["name"] for test in (results or {}).get("tests", []) if test["outcome"] == FAILED]
    if failed:
        return FAILED, f"{len(failed)} of {len(outcomes)} failed: {', '.join(failed[:5])}"
    if status or PASSED not in outcomes:
        return FAILED, f"pytest ended with status {status}, {outcomes.count(PASSED)} tests passed"
    return PASSED, None


def judge_prove(status: int, results: Any) -> tuple[str, str | None]:
    """Passes as `prove` does: a row passed, and none failed."""
    rows = (results or {}).get("rows", [])
    wrong = [f"{row['strategy']}: {row['reason']}" for row in rows if row["passed"] is False]
    if status == 0 and any(row["passed"] for row in rows) and not wrong:
        return PASSED, None
    reference = ((results or {}).get("reference") or {}).get("cause")
    return FAILED, "; ".join(wrong) or reference or f"prove ended with status {status}"


def judge_memory(status: int, results: Any) -> tuple[str, str | None]:
    """Fails with the plans that are off, or runs that failed."""
    rows = (results or {}).get("rows", [])
    wrong = [f"{row['name']}: {row['reason']}" for row in rows if row["reason"]]
    if wrong or status or not rows:
        return FAILED, "; ".join(wrong) or f"it ended with status {status}"
    return PASSED, None


def judge_rates(status: int, results: Any) -> tuple[str, str | None]:
    """Fails if a run of Tunesmith does, other than for want of time or a package; goals are reported, not judged."""
    causes = {case["name"]: case["tools"]["tunesmith"].get("failed") for case in (results or {}).get("cases", [])}
    excused = ("needs ", "no time left", "stopped at the deadline")
    wrong = [f"{name}: {cause}" for name, cause in causes.items() if cause and not _is_excused(cause, excused)]
    if wrong or status or None not in causes.values():
        return FAILED, "; ".join(wrong) or (f"it ended with status {status}" if status else "nothing was measured")
    return PASSED, None


def _is_excused(cause: str, excused: Sequence[str]) -> bool:
    return cause.startswith(tuple(excused)) or "which is not installed" in cause


# -- running ---------------------------------------------------------------------------------------------------------


def missing(modules: Sequence[str]) -> list[str]:
    """The modules that are not installed."""
    return [name for name in modules if find_spec(name) is None]


def run_part(part: Part, folder: Path, remaining: float, tiny: bool = False) -> dict[str, Any]:
    """Runs a part in a process of its own, for at most its time limit and what remains.

    Returns:
        `name`, `outcome`, `reason`, `seconds`, `results` (what the part wrote or printed as JSON), and if it failed
        `output`, the end of what it printed.
    """
    entry: dict[str, Any] = {"name": part.name, "outcome": NOT_RUN, "reason": None, "seconds": 0.0, "results": None}
    if lacking := missing((*REQUIRED, *part.needs)):
        return {**entry, "reason": f"needs {', '.join(lacking)}"}
    limit = min(part.seconds, remaining)
    if limit < 1:
        return {**entry, "reason": "no time left"}
    began, file, printed = time.monotonic(), folder / f"{part.name}.json", folder / f"{part.name}.txt"
    status = _run(part.argv(file, limit), limit, folder, printed, tiny)
    out = printed.read_text(encoding="utf-8", errors="replace")
    results = _json_of(file.read_text(encoding="utf-8") if file.exists() else out)
    outcome, reason = part.judge(-1 if status is None else status, results)
    if status is None:
        outcome, reason = FAILED, f"stopped after {limit:.0f} s" + (f"; {reason}" if reason else "")
    entry |= {"outcome": outcome, "reason": reason, "results": results, "seconds": round(time.monotonic() - began, 1)}
    if outcome == FAILED:
        errors = printed.with_suffix(".err").read_text(encoding="utf-8", errors="replace")
        entry["output"] = (out[-_TAIL:] if file.exists() or results is None else "") + errors[-_TAIL:]
    return entry


def _run(argv: list[str], limit: float, folder: Path, printed: Path, on_cpu: bool) -> int | None:
    """Runs Python; returns its exit status, or None if it was killed after `limit` seconds."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
           "XDG_STATE_HOME": str(folder / "state"), "XDG_CACHE_HOME": str(folder / "cache"),
           **({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})}  # fmt: skip
    with open(printed, "w") as output, open(printed.with_suffix(".err"), "w") as errors:
        process = subprocess.Popen(
            [sys.executable, *argv], cwd=ROOT, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=errors,
        )  # fmt: skip
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.returncode is None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its descendants, in any session, and waits until they have left the GPU's memory."""
    import psutil  # not at the top: without it, this program still says what is missing

    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(family, timeout=10)


def _json_of(text: str) -> Any:
    """The JSON document in a text, None if there is none; libraries may print before it."""
    start = text.find("{")
    try:
        return json.loads(text[start:]) if start >= 0 else None
    except ValueError:
        return None


def machine(tiny: bool) -> dict[str, Any] | str:
    """Device, driver and versions; or, in a line, why nothing can be proven here."""
    if lacking := missing(["torch"]):
        return f"needs {lacking[0]}, which {sys.executable} does not have; choose another with `make gpu PYTHON=...`"
    about: dict[str, Any] = {"device": f"CPU ({platform.machine()})"}
    if not tiny:
        done = subprocess.run([sys.executable, "-c", DEVICE], capture_output=True, text=True, timeout=120)
        if done.returncode:
            return f"no NVIDIA GPU that torch of {sys.executable} can use ({_last_line(done.stderr)})"
        about = json.loads(done.stdout.splitlines()[-1])
    versions = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return {**about, "versions": versions}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1][:200]


def prove_all(chosen: Sequence[str], tiny: bool, budget: float, file: Path | None) -> dict[str, Any] | str:
    """Runs the parts and returns the result, which is also written after each; or why nothing can be proven here."""
    about = machine(tiny)
    if isinstance(about, str):
        return about
    began, entries = time.monotonic(), list[dict[str, Any]]()
    moment = datetime.now(UTC).isoformat(timespec="seconds")
    result = {"date": moment[:10], "began": moment, "tiny": tiny, **about, "complete": False, "parts": entries}
    with tempfile.TemporaryDirectory(prefix="tunesmith-gpu-") as folder:
        for part in parts(tiny):
            if chosen and part.name not in chosen:
                entries.append({"name": part.name, "outcome": NOT_RUN, "reason": "not asked for (--only)"})
                continue
            entries.append(run_part(part, Path(folder), budget - (time.monotonic() - began), tiny))
            print("\n".join(lines(entries[-1])), flush=True)
            _write(result, file)
    result |= {"complete": True, "seconds": round(time.monotonic() - began, 1)}
    _write(result, file)
    return result


def _write(result: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".tmp").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        file.with_suffix(".tmp").replace(file)


def lines(entry: dict[str, Any]) -> list[str]:
    """What is shown of a part: its outcome, and each test that was not run."""
    said = f"{entry['name']}: {entry['outcome']}" + (f": {entry['reason']}" if entry["reason"] else "")
    tests = (entry.get("results") or {}).get("tests", []) if entry["name"] == "tests" else []
    skipped = [f"  {test['name']} not run: {test['reason']}" for test in tests if test["outcome"] == NOT_RUN]
    counts = f", {sum(test['outcome'] == PASSED for test in tests)} tests passed" if tests else ""
    return [f"{said} ({entry['seconds']:.0f} s{counts})", *skipped, *([entry["output"]] if "output" in entry else [])]


def main(argv: Sequence[str]) -> int:
    """Runs the proof; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in parts(False)]
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all parts")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: benchmarks/results)")
    args = parser.parse_args(argv)
    folder = args.out or (None if args.tiny or args.only else RESULTS)
    file = folder / f"{datetime.now(UTC).date().isoformat()}-gpu.json" if folder else None
    result = prove_all(args.only, args.tiny, args.budget, file)
    if isinstance(result, str):
        print(f"make gpu: {result}", file=sys.stderr)
        return 2
    outcomes = [entry["outcome"] for entry in result["parts"]]
    totals = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in (PASSED, FAILED, NOT_RUN))
    print(f"{result['device']}: {totals}; {result['seconds']:.0f} s; {file or 'no result file'}", flush=True)
    return 0 if PASSED in outcomes and FAILED not in outcomes else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
