"""Processes that tokenise in parallel: fresh interpreters that take jobs as JSON lines. Imports no torch.

Not multiprocessing: its spawn imports the parent's main module again, which here would be the training script with all
of torch. A worker ends when its standard input closes, so none outlives its parent by more than a job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from trainers.config import ConfigError
from trainers.data.report import Report
from trainers.data.template import Encoder
from trainers.data.tokenise import Job, Options, Selection, run_job

ROOT = Path(__file__).resolve().parents[2]


class Pool:
    """Worker processes, started as jobs come in, ended on leaving the `with` block."""

    def __init__(self, processes: int, folder: Path, encoder: Encoder, options: Options):
        encoder.save(folder)
        (folder / "options.json").write_text(json.dumps(asdict(options)), encoding="utf-8")
        self._folder, self._processes = folder, processes
        self._threads = ThreadPoolExecutor(processes)
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        self._all: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Pool:
        for _ in range(self._processes):
            worker = self._start()
            self._all.append(worker)
            self._idle.put(worker)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._all:
            if kind is not None:
                worker.kill()
            if worker.stdin and not worker.stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    worker.stdin.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.wait()
            if worker.stdout:
                worker.stdout.close()

    def run(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Report]]:
        """Each job with its report, in the order given; a few jobs are under way ahead of it.

        Raises:
            ConfigError: of the worker, or when a worker dies.
        """
        pending: deque[tuple[Job, Future[Report]]] = deque()
        for job in jobs:
            pending.append((job, self._threads.submit(self._run, job)))
            if len(pending) >= 2 * self._processes:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()

    def _start(self) -> subprocess.Popen[str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-P", "-m", "trainers.data.workers", str(self._folder)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True, encoding="utf-8")

    def _run(self, job: Job) -> Report:
        worker = self._idle.get()
        answer = ""
        try:
            if worker.stdin and worker.stdout:
                worker.stdin.write(json.dumps(job.to_json()) + "\n")
                worker.stdin.flush()
                answer = worker.stdout.readline()
        except (OSError, ValueError):
            pass
        self._idle.put(worker)
        if not answer:
            raise ConfigError(
                f"a process that tokenises has died (status {worker.poll()}), perhaps for lack of memory; "
                f"set dataset_num_proc below {self._processes}"
            )
        values = json.loads(answer)
        if "mistakes" in values:
            raise ConfigError(values["mistakes"])
        return Report.from_json(values)


def main(folder: Path) -> None:
    """Serves jobs from standard input until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its workers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    encoder = Encoder.load(folder)
    options = json.loads((folder / "options.json").read_text(encoding="utf-8"))
    chosen = Options(**{**options, "selection": Selection(**options["selection"])})
    for line in sys.stdin:
        answers.write(json.dumps(_answer(Job.from_json(json.loads(line)), encoder, chosen)) + "\n")
        answers.flush()


def _answer(job: Job, encoder: Encoder, options: Options) -> dict[str, Any]:
    try:
        return run_job(job, encoder, options).to_json()
    except ConfigError as error:
        return {"mistakes": error.mistakes}
    except OSError as error:
        return {"mistakes": [f"cannot write {job.part}: {error.strerror}; free space, or set cache_dir"]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
