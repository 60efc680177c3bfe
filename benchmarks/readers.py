"""Reading each format by Tunesmith and by `datasets`: `python -m benchmarks.readers [--rows 200000]`.

Prints two Markdown tables: rows/s with private memory above the interpreter's, each measured in a process of its own,
and what each side says of a file that is broken.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.data import own_memory
from benchmarks.rows import write_chat
from tests.launching import ROOT, environment

KINDS = {"jsonl": "JSONL", "json": "JSON list", "csv": "CSV", "parquet": "Parquet", "text": "text"}
SIDES = ("ours", "datasets", "streamed")
BROKEN = {
    "a broken JSON line": ("jsonl", b'{"text": "a"}\n{"text": \n{"text": "b"}\n'),
    "a missing CSV field": ("csv", b"prompt,completion\na,b\nc\nd,e\n"),
    "invalid UTF-8": ("jsonl", b'{"text": "a"}\n{"text": "\xff"}\n'),
    "a truncated Parquet file": ("parquet", b""),
}


def write_formats(folder: Path, rows: int) -> dict[str, Path]:
    """The same chat rows in each format; in CSV and text, what the messages say."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = {kind: folder / f"data.{'txt' if kind == 'text' else kind}" for kind in KINDS}
    write_chat(files["jsonl"], rows, seed=1)
    data = [json.loads(line) for line in files["jsonl"].open()]
    files["json"].write_text(json.dumps(data))
    pq.write_table(pa.Table.from_pylist(data), files["parquet"])
    texts = [[message["content"].replace("\n", " ") for message in row["messages"][-2:]] for row in data]
    with files["csv"].open("w", newline="") as stream:
        csv.writer(stream).writerows([["prompt", "completion"], *texts])
    files["text"].write_text("".join(f"{answer}\n" for _, answer in texts))
    return files


def read_all(side: str, kind: str, path: Path) -> int:
    """Reads a file to its end; returns the number of rows.

    Raises:
        ValueError: with what our reader says of the first bad row.
    """
    if side == "ours":
        from trainers.data.data_file import DataFile
        from trainers.data.shards import BadRow
        from trainers.data.sources import plan, read

        count = 0
        for shard in plan([DataFile(str(path), path.name, path.name, kind, os.stat(path).st_size)], "line"):
            for line, row in read(shard, "line"):
                if isinstance(row, BadRow):
                    raise ValueError(f"{path.name}:{line}: {row.kind}: {row.detail}")
                count += 1
        return count
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as cache:
        data: Any = datasets.load_dataset(
            kind.removesuffix("l"), data_files=str(path), split="train", cache_dir=cache, streaming=side == "streamed"
        )
        return sum(1 for _ in data)


def sentence(side: str, kind: str, path: Path) -> str:
    """What is said of a broken file: the error, with that of its cause; or how many rows are read all the same."""
    try:
        return f"nothing: {read_all(side, kind, path)} rows are read"
    except Exception as error:
        texts = [f"{text}".partition("\n")[0] for text in (error, error.__cause__) if text is not None]
        return " / ".join(texts)[:300].replace("|", r"\|")


def measured(side: str, kind: str, path: Path) -> dict[str, float]:
    """Rows per second, and MiB of private memory above those of the imported interpreter, of a new process."""
    argv = [sys.executable, "-m", "benchmarks.readers", "--here", side, kind, str(path)]
    child = subprocess.Popen(argv, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    peak, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, own_memory(psutil.Process(child.pid)) if psutil.pid_exists(child.pid) else 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output = child.communicate()[0]
    ended.set()
    watcher.join()
    if child.returncode != 0:
        raise SystemExit(f"the measurement ended with {child.returncode}")
    measured_now: dict[str, float] = json.loads(output.splitlines()[-1])
    return {"rate": measured_now["rate"], "mib": max(0.0, peak - measured_now["before_mib"])}


def measured_here(side: str, kind: str, path: Path) -> dict[str, float]:
    """Rows per second in this process, and its private memory before in MiB."""
    if side == "ours":
        import trainers.data.sources  # noqa: F401 - not timed
    else:
        import datasets  # noqa: F401
    before = own_memory(psutil.Process())
    began = time.perf_counter()
    rows = read_all(side, kind, path)
    return {"rate": rows / (time.perf_counter() - began), "before_mib": before}


def print_speeds(rows: int) -> None:
    """The table of rates and memory."""
    print("| format | ours, rows/s | MiB | `datasets`, rows/s | MiB | its streaming, rows/s | MiB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for kind, path in write_formats(Path(folder), rows).items():
            cells = [measured(side, kind, path) for side in SIDES]
            values = " | ".join(f"{cell['rate']:,.0f} | {cell['mib']:,.0f}" for cell in cells)
            print(f"| {KINDS[kind]} | {values} |", flush=True)


def print_sentences() -> None:
    """The table of what is said of broken files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    print("\n| what is broken | ours | `datasets` |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for title, (kind, content) in BROKEN.items():
            path = Path(folder) / f"data.{kind}"
            path.write_bytes(content)
            if kind == "parquet":
                pq.write_table(pa.table({"text": ["a"] * 100}), path)
                path.write_bytes(path.read_bytes()[:-20])
            sides = [sentence(side, kind, path) for side in SIDES[:2]]
            print(f"| {title} | {' | '.join(text.replace(folder + '/', '') for text in sides)} |")


def main() -> None:
    """The command line; `--here` is internal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="0: no speeds")
    parser.add_argument("--here", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        side, kind, path = args.here
        print(json.dumps(measured_here(side, kind, Path(path))))
        return
    if args.rows:
        print_speeds(args.rows)
    print_sentences()


if __name__ == "__main__":
    main()
