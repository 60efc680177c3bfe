"""Memory per rank as rows are split over more ranks: `python -m benchmarks.long_rows [--length 8192] [--ways sp cp]`.

All weights of a random model are trained on one packed row per step; the 6 heads of `24M` allow 2 or 3 ranks under sp.
Memory is the peak resident memory of each rank's process. The losses show that the work is equal. With `--document`,
the row is made of documents of about that many tokens, and a model with fewer positions is extended by YaRN:
`python -m benchmarks.long_rows --model tiny-135M --length 131072 --document 4096 --steps 2 --ranks 1 2 --ways cp sp`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.rows import write_chat
from benchmarks.shapes import ARCHITECTURES, NAMES, TINY, model_folder
from tests.launching import ROOT, launch_well
from trainers.embedded import BASE_DIR
from trainers.strategy.strategy import STRATEGIES_DIR

STEPS = 3
RESULTS = Path(__file__).parent / "results"
SITE = """
import atexit, json, os, resource, sys
words = sys.orig_argv
if any(word.endswith("trainers/train.py") for word in words) and "accelerate.commands.launch" not in words:
    def tell():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with open(os.path.join({folder!r}, os.environ.get("RANK", "0") + ".json"), "w") as file:
            json.dump(peak, file)
    atexit.register(tell)
"""


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


def measure(name: str, ranks: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One row of the table."""
    inject, peaks = folder / "inject", folder / f"{name}-{ranks}"
    inject.mkdir(exist_ok=True)
    peaks.mkdir()
    (inject / "sitecustomize.py").write_text(SITE.format(folder=str(peaks)))
    model = model_folder(args.model, folder)
    options = {
        "model_name_or_path": model, "dataset_name": folder / "train.jsonl", "method": "full",
        "max_length": args.length, "global_batch_size": 1, "max_steps": args.steps, "logging_steps": 1, "save_steps": 0,
        "hang_timeout": 0, "learning_rate": 1e-4, "cache_dir": folder / "cache",
        **(rope_options(model, args.document) if args.document else {}),
    }  # fmt: skip
    run = launch_well(folder / f"run-{name}-{ranks}", ranks, options, strategy=strategy_file(name, ranks, folder),
                      timeout=3000, by_hand=True, PYTHONPATH=f"{inject}{os.pathsep}{ROOT}")  # fmt: skip
    return {
        "strategy": name if ranks > 1 else "single",
        "ranks": ranks,
        "tokens": args.length,
        "gib": [round(json.loads((peaks / f"{rank}.json").read_text()) / 2**20, 3) for rank in range(ranks)],
        "seconds_per_step": round(run.rows("loss")[-1]["elapsed_s"] / args.steps, 1),
        "losses": run.series("loss"),
    }


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    peaks, losses = (" ".join(f"{peak:.2f}" for peak in row["gib"]), " ".join(f"{loss:.6f}" for loss in row["losses"]))
    return f"| {row['strategy']} | {row['ranks']} | {row['tokens']} | {peaks} | {row['seconds_per_step']} | {losses} |"


def main() -> None:
    """Prints a Markdown table, and writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*NAMES, *(TINY + name for name in ARCHITECTURES)], default="24M")
    parser.add_argument("--length", type=int, default=8192, help="tokens in a row")
    parser.add_argument("--document", type=int, help="tokens in a document; default: short chats")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--ways", nargs="+", choices=["sp", "cp"], default=["cp"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", action="store_true", help="also write a dated file to benchmarks/results")
    args = parser.parse_args()
    print("| strategy | ranks | tokens in a row | GiB of each rank | s per step | losses |\n|---|---|---|---|---|---|",
          flush=True)  # fmt: skip
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.document:
            write_documents(folder / "train.jsonl", args.document, args.steps * args.length // args.document)
        else:
            write_chat(folder / "train.jsonl", 4000, seed=1)
        single = [(args.ways[0], 1)] if 1 in args.ranks else []
        for strategy, ranks in single + [(way, ranks) for way in args.ways for ranks in args.ranks if ranks > 1]:
            rows.append(measure(strategy, ranks, args, folder))
            print(line(rows[-1]), flush=True)
    if args.json:
        now, versions = datetime.now(UTC), {name: version(name) for name in ("torch", "accelerate", "transformers")}
        document = {"at": f"{now:%F %T}", "options": vars(args), **versions, "cores": os.cpu_count(), "rows": rows}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{now:%F}-long-rows-{args.length}.json").write_text(
            json.dumps(document, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
