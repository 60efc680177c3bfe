"""Memory per rank as rows are split over more ranks: `python -m benchmarks.long_rows [--lengths 8192] [--ways sp cp]`.

All weights of a random model are trained on one packed row per step; the 6 heads of `24M` allow 2 or 3 ranks under sp.
Memory is the peak of `RssAnon` of each rank's process while it trains, less what it had before the model was loaded, as
`benchmarks.plan` measures it. Rows of one length must have equal losses. With `--document`, the row is made of
documents of about that many tokens, and a model with fewer positions is extended by YaRN. 0 stands for one document
per row, here in a model of one layer, as attention to 131,072 tokens takes minutes per layer on a CPU:
`python -m benchmarks.long_rows --model tiny-135M --layers 1 --lengths 131072 --document 0 --steps 1 --ways cp sp`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any

from app.plan.hardware import GIB
from benchmarks.plan import SITE
from benchmarks.rows import write_chat
from benchmarks.shapes import ARCHITECTURES, NAMES, TINY, model_folder
from tests.launching import ROOT, launch_well
from trainers.embedded import BASE_DIR
from trainers.strategy.strategy import STRATEGIES_DIR

STEPS = 3
RESULTS = Path(__file__).parent / "results"
SAME_LOSS = 1e-5
"""Largest difference of the losses of rows of one length."""


def strategy_file(name: str, ranks: int, folder: Path) -> str:
    """The strategy's file, changed to this many sequence shards; `single` for one process."""
    if ranks == 1:
        return "single"
    text = (STRATEGIES_DIR / f"{name}.yaml").read_text()
    file = folder / f"{name}-{ranks}.yaml"
    file.write_text(
        text.replace(f"{name}_size: 2", f"{name}_size: {ranks}").replace("processes: 2", f"processes: {ranks}")
    )
    return str(file)


def write_documents(path: Path, tokens: int, count: int) -> Path:
    """Writes plain text documents of at most `tokens` tokens of the embedded tokenizer, and few less.

    Args:
        path: the JSONL file.
        tokens: length of a document.
        count: number of documents.
    """
    from transformers import AutoTokenizer

    tokenizer, rng = AutoTokenizer.from_pretrained(BASE_DIR), random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(count):
            # Random ids may merge when they are tokenized again: decode, cut, and leave room for an end token.
            text = tokenizer.decode([rng.randrange(300, 1000) for _ in range(tokens)], skip_special_tokens=True)
            encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
            ends = encoded["offset_mapping"][: tokens - 8]
            file.write(json.dumps({"text": text[: ends[-1][1]]}) + "\n")
    return path


def rope_options(model: Path, document: int) -> dict[str, Any]:
    """Options that make room for a document in a model with fewer positions."""
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    factor = ceil(document / positions)
    return {"rope_scaling": "yarn", "rope_factor": factor} if factor > 1 else {}


def measure(name: str, ranks: int, length: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row of the table; `gib` is each rank's peak above its baseline."""
    peaks = folder / f"{name}-{ranks}"
    peaks.mkdir()
    (peaks / "sitecustomize.py").write_text(SITE.format(folder=str(peaks)))
    model = model_folder(args.model, folder, args.layers)
    options = {
        "model_name_or_path": model, "dataset_name": folder / "train.jsonl",
        "method": "full", "max_length": length, "global_batch_size": 1, "max_steps": args.steps, "logging_steps": 1,
        "save_steps": 0, "hang_timeout": 0, "learning_rate": 1e-4, "cache_dir": folder / "cache",
        **rope_options(model, document_tokens(args, length) or 1),
    }  # fmt: skip
    run = launch_well(folder / f"run-{name}-{ranks}", ranks, options, strategy=strategy_file(name, ranks, folder),
                      timeout=3000, by_hand=True, PYTHONPATH=f"{peaks}{os.pathsep}{ROOT}")  # fmt: skip
    ranked = [json.loads((peaks / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    return {
        "strategy": name if ranks > 1 else "single",
        "ranks": ranks,
        "tokens": length,
        "gib": [round(phases["train"][0] / GIB, 3) for phases in ranked],
        "seconds_per_step": round(run.rows("loss")[-1]["elapsed_s"] / args.steps, 1),
        "losses": run.series("loss"),
    }


def document_tokens(args: argparse.Namespace, length: int) -> int | None:
    """Tokens of a document in rows of this length; None for short chats."""
    return length if args.document == 0 else args.document


def measure_length(length: int, args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields all rows of one length, each printed when it is measured.

    Raises:
        SystemExit: if their losses differ.
    """
    folder.mkdir()
    if document := document_tokens(args, length):
        write_documents(folder / "train.jsonl", document, args.steps * length // document)
    else:
        write_chat(folder / "train.jsonl", 4000, seed=1)
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        for strategy in args.ways if ranks > 1 else args.ways[:1]:
            rows.append(measure(strategy, ranks, length, args, folder))
            refuse_unequal(rows)
            print(line(rows[-1]), flush=True)
            yield rows[-1]


def refuse_unequal(rows: list[dict[str, Any]]) -> None:
    """Raises SystemExit if the losses of a row differ from those of the first: its work would not be comparable."""
    for row in rows:
        pairs = zip(row["losses"], rows[0]["losses"], strict=True)
        if not all(abs(loss - expected) <= SAME_LOSS for loss, expected in pairs):
            raise SystemExit(f"{row['strategy']} on {row['ranks']} has losses {row['losses']}, not {rows[0]['losses']}")


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    peaks, losses = (" ".join(f"{peak:.2f}" for peak in row["gib"]), " ".join(f"{loss:.6f}" for loss in row["losses"]))
    return f"| {row['strategy']} | {row['ranks']} | {row['tokens']} | {peaks} | {row['seconds_per_step']} | {losses} |"


def main(argv: list[str] | None = None) -> None:
    """Prints a Markdown table, and writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*NAMES, *(TINY + name for name in ARCHITECTURES)], default="24M")
    parser.add_argument("--layers", type=int, help="number of layers; default: the model's")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192], help="tokens in a row")
    parser.add_argument("--document", type=int, help="tokens in a document, 0 for all of a row; default: short chats")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ways", nargs="+", choices=["sp", "cp"], default=["cp"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", action="store_true", help="also write a dated file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="its folder; default: benchmarks/results")
    args = parser.parse_args(argv)
    print("| strategy | ranks | tokens in a row | GiB of each rank | s per step | losses |\n|---|---|---|---|---|---|",
          flush=True)  # fmt: skip
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for length in args.lengths:
            for row in measure_length(length, args, Path(name) / str(length)):
                rows.append(row)
                if args.json:
                    write_result(args, rows)


def write_result(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Writes the dated file, after each row, as one may take long."""
    now, versions = datetime.now(UTC), {name: version(name) for name in ("torch", "accelerate", "transformers")}
    options = {name: value for name, value in vars(args).items() if name not in ("json", "out")}
    document = {"at": f"{now:%F %T}", "options": options, **versions, "cores": os.cpu_count(), "rows": rows}
    kind = "long-context" if args.document == 0 else f"long-rows-{'-'.join(map(str, args.lengths))}"
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{now:%F}-{kind}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
