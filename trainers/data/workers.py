"""Worker processes that tokenise: fresh interpreters that take tasks as JSON lines. Imports no torch.

All data is tokenised here, even with a single process: a tokenizer or template that takes too much time or memory ends
its process, and the parent reports it.

Not multiprocessing: its spawn imports the parent's main module again, which would be the training script with all of
torch. A worker exits when its standard input closes, so none outlives its parent by more than a task.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from trainers.config.mistakes import ConfigError
from trainers.data.report import Report
from trainers.data.template import Encoder
from trainers.data.tokenise import Options, TokenizeTask, run_task
from trainers.run.import_path import child_environment
from trainers.run.process_limits import expect_death, why_it_died

ROOT = Path(__file__).resolve().parents[2]
_ROWS = "rows "  # begins a line with the number of rows done, among the answers


class Pool:
    """Worker processes, started on entering the `with` block and ended on leaving it.

    Args:
        processes: number of processes; a single one uses threads.
        folder: folder for the files that workers read.
        encoder: tokenises documents.
        options: how rows become documents.
        model: name of the model whose tokenizer it is, for messages.
    """

    def __init__(self, processes: int, folder: Path, encoder: Encoder, options: Options, model: str):
        encoder.save(folder)
        (folder / "options.json").write_text(json.dumps(asdict(options)), encoding="utf-8")
        self._folder = folder
        self._processes = processes
        self._model = model
        self._errors: dict[int, Path] = {}
        self._rows: SimpleQueue[int] = SimpleQueue()
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

    def run(
        self, tasks: Iterable[TokenizeTask], progress: Callable[[int], None]
    ) -> Iterator[tuple[TokenizeTask, Report]]:
        """Yields each task with its report, in order; a few tasks run ahead.

        Args:
            tasks: what to tokenise.
            progress: called with the number of rows done since the last call.

        Raises:
            ConfigError: raised in a worker, or if a worker dies.
        """
        pending: deque[tuple[TokenizeTask, Future[Report]]] = deque()
        for task in tasks:
            pending.append((task, self._submit(task)))
            if len(pending) >= 2 * self._processes:
                first, future = pending.popleft()
                yield first, self._wait(future, progress)
        while pending:
            first, future = pending.popleft()
            yield first, self._wait(future, progress)

    def _submit(self, task: TokenizeTask) -> Future[Report]:
        future = self._threads.submit(self._run, task)
        future.add_done_callback(lambda _: self._rows.put(0))  # wakes `_wait`
        return future

    def _wait(self, future: Future[Report], progress: Callable[[int], None]) -> Report:
        """The report of a task; calls `progress`, in this thread, for rows that any worker finishes meanwhile."""
        while not (future.done() and self._rows.empty()):
            if rows := self._rows.get():
                progress(rows)
        return future.result()

    def _start(self) -> subprocess.Popen[str]:
        threads = 1 if self._processes > 1 else min(8, os.cpu_count() or 1)  # each takes address space
        environment = {
            **child_environment(os.environ, str(ROOT)),
            "TOKENIZERS_PARALLELISM": str(threads > 1).lower(),
            "RAYON_NUM_THREADS": str(threads),
        }
        command = [sys.executable, "-P", "-m", "trainers.data.workers", str(self._folder)]
        pipe = subprocess.PIPE
        errors_file = self._folder / f"errors-{len(self._all)}"
        with errors_file.open("wb") as errors:
            worker = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=errors, env=environment, text=True, encoding="utf-8"
            )
        self._errors[worker.pid] = errors_file
        return worker

    def _run(self, task: TokenizeTask) -> Report:
        worker = self._idle.get()
        answer = ""
        try:
            if worker.stdin and worker.stdout:
                worker.stdin.write(json.dumps(task.to_json()) + "\n")
                worker.stdin.flush()
                while (answer := worker.stdout.readline()).startswith(_ROWS):
                    self._rows.put(int(answer.removeprefix(_ROWS)))
        except (OSError, ValueError):
            pass  # the worker died: there is no answer, which is reported below
        self._idle.put(worker)
        if not answer:
            raise ConfigError(self._death(worker))
        values = json.loads(answer)
        if "mistakes" in values:
            raise ConfigError.from_json(values["mistakes"])
        return Report.from_json(values)

    def _death(self, worker: subprocess.Popen[str]) -> str:
        status = worker.wait()
        errors = self._errors[worker.pid].read_text(encoding="utf-8", errors="replace")
        hint = f"; or set dataset_num_proc below {self._processes}" if self._processes > 1 else ""
        return (
            f"the tokenizer or chat template of model_name_or_path={self._model} {why_it_died(status, errors)} "
            f"on a few rows; use a model you trust, or another --chat_template FILE{hint}"
        )


def main(folder: Path) -> None:
    """Runs tasks from standard input until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its workers
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    expect_death()
    encoder = Encoder.load(folder)
    encoder.may_die = True
    options = json.loads((folder / "options.json").read_text(encoding="utf-8"))
    chosen = Options(**options)

    def write(line: str) -> None:
        answers.write(line + "\n")
        answers.flush()

    for line in sys.stdin:
        task = TokenizeTask.from_json(json.loads(line))
        write(json.dumps(_answer(task, encoder, chosen, lambda rows: write(f"{_ROWS}{rows}"))))


def _answer(task: TokenizeTask, encoder: Encoder, options: Options, progress: Callable[[int], None]) -> dict[str, Any]:
    try:
        return run_task(task, encoder, options, progress).to_json()
    except ConfigError as error:
        return {"mistakes": error.as_json()}
    except OSError as error:
        mistake = f"cannot write {task.part}: {error.strerror}; free space, or set cache_dir"
        return {"mistakes": ConfigError(mistake).as_json()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
