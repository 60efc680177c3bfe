"""Times the server's work for the UI's run pages, on real run folders: `python -m benchmarks.ui_views [FOLDER]`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.runs.detail import run_view
from app.runs.history import History, page
from app.runs.log import find_in_log, read_log
from app.runs.metrics import Curves
from tests.made_runs import log_lines, made_run, metric_lines
from trainers.run.folder import RunFolder, write_json

RUNS, LOG_LINES, STEPS = 1_000, 100_000, 100_000


def timed(name: str, work: Callable[[], Any]) -> Any:
    """Calls `work`; prints its wall time, CPU time and the bytes of its result as JSON; returns the result."""
    began, busy = time.perf_counter(), time.process_time()
    answer = work()
    took, used = 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - busy)
    print(f"{name:<46} {took:>9.1f} ms {used:>9.1f} ms CPU {len(json.dumps(answer)):>10,} bytes", flush=True)
    return answer


def history(folder: Path) -> None:
    """Times the history page with `RUNS` runs of 300 logged steps each."""
    first = made_run(folder, "run-0000", steps=300)
    state = first.read_state() or {}
    for number in range(1, RUNS):
        run = RunFolder(folder / f"run-{number:04}")
        shutil.copytree(first.path, run.path)
        state_of_run = {**state, "id": run.id, "state": ("done", "failed", "stopped")[number % 3]}
        run.state_file.write_text(json.dumps(state_of_run), encoding="utf-8")
    table = History(folder)
    first_page = timed(f"history of {RUNS:,} runs, first time", lambda: page(table, {}))
    timed("history, nothing has changed", lambda: page(table, {"digest": first_page["digest"]}))
    newest = RunFolder(folder / f"run-{RUNS - 1:04}")
    write_json(newest.state_file, {**(newest.read_state() or {}), "step": 1})
    timed("history, one run has changed", lambda: page(table, {"digest": first_page["digest"]}))
    timed("history, search and sort", lambda: page(table, {"words": "ddp tiny", "sort": "value"}))


def log(run: RunFolder) -> None:
    """Times the log page with a log of `LOG_LINES` lines."""
    lines = log_lines(LOG_LINES // 2)
    run.log.write_text("".join(lines), encoding="utf-8")
    first = timed(f"log of {LOG_LINES:,} lines, its end", lambda: read_log(run, {}))
    timed("log, nothing is new", lambda: read_log(run, {"after": first["end"], "follow": True}))
    with open(run.log, "a", encoding="utf-8") as file:
        file.write(lines[-1])
    timed("log, one line is new", lambda: read_log(run, {"after": first["end"], "follow": True}))
    timed("log, an older piece", lambda: read_log(run, {"before": first["start"]}))
    timed("log, a rank that wrote nothing", lambda: read_log(run, {"who": "7"}))
    timed("log, a look for an error (1 MiB)", lambda: find_in_log(run, {"start": 0}))
    run.log.write_bytes(b"x" * 1_000_000 + b"\n" + bytes(range(256)) * 4000 + b"\n")
    timed("log of one line of 1 MB, and 1 MB of binary", lambda: read_log(run, {}))


def metrics(run: RunFolder) -> None:
    """Times the charts with metrics of `STEPS` steps."""
    lines = metric_lines(STEPS)
    run.metrics.write_text("".join(lines), encoding="utf-8")
    curves, calls, worst, token, began, busy = Curves(), 0, 0.0, "", time.perf_counter(), time.process_time()
    more = True
    while more:
        start = time.perf_counter()
        seen = curves.view(run, token)
        worst, calls = max(worst, time.perf_counter() - start), calls + 1
        more, token = seen["more"], seen["token"]
    took, used = 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - busy)
    summary = f"{calls} calls, {took:.0f} ms, {used:.0f} ms CPU, the slowest {1000 * worst:.1f} ms"
    print(f"metrics of {STEPS:,} steps, first time: {summary}", flush=True)
    timed("metrics, nothing is new", lambda: curves.view(run, token))
    with open(run.metrics, "a", encoding="utf-8") as file:
        file.write(lines[-2].replace(f'"step": {STEPS}', f'"step": {STEPS + 1}'))
    timed("metrics, one step is new", lambda: curves.view(run, token))
    timed("metrics, another tab opens", lambda: curves.view(run))
    timed("the run's numbers of now", lambda: run_view(run, curves))


def main(folder: Path) -> None:
    """Creates the run folders, and prints a line per measurement."""
    os.environ["XDG_STATE_HOME"] = str(folder / "state")  # without runs registered elsewhere on this machine
    history(folder / "history")
    run = made_run(folder / "large", "large", steps=10)
    log(run)
    metrics(run)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
