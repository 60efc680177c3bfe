"""Host memory to load and to export a model of 1.1B weights: `python -m benchmarks.host_memory [--only fsdp2 export]`.

The weights are random and stored in bf16. Memory is the peak of `RssAnon` above what the process had before: while
loading, up to the last weight read; in an export, of all of it.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.launching import ROOT, environment
from tests.unit.checkpoint.exporting_rank import write_checkpoint
from tests.unit.parallel.test_loading import loaded
from trainers.config.validation import build
from trainers.embedded import BASE_DIR

SHAPE = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
"""TinyLlama 1.1B, https://huggingface.co/TinyLlama/TinyLlama-1.1B-Chat-v1.0"""
LOADS = [("single", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("tp", 2), ("pp", 2), ("zero3", 2), ("fsdp1", 2)]
EXPORTS = [("lora", "adapter"), ("lora", "merged"), ("full", "full")]
RESULTS = Path(__file__).parent / "results"
GIB = 2**30


def model(folder: Path, shape: dict[str, Any]) -> dict[str, float]:
    """Writes the model with the tokenizer of the embedded one; returns its size and that of its largest tensor."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape), dtype=torch.bfloat16)
    made.save_pretrained(folder, max_shard_size="500MB")
    for path in [*BASE_DIR.glob("tokenizer*"), BASE_DIR / "chat_template.jinja"]:
        shutil.copy(path, folder)
    counts = [weight.numel() for weight in made.parameters()]
    return {"weights": sum(counts), "largest_gib": 4 * max(counts) / GIB}


def load(base: Path, strategy: str, processes: int, method: str) -> dict[str, Any]:
    """Memory and reading of the fullest rank of a strategy."""
    with tempfile.TemporaryDirectory() as folder:
        precision = "no" if method == "full" else "bf16"
        options = {"model_name_or_path": str(base), "method": method, "mixed_precision": precision}
        ranks = loaded(Path(folder), processes, strategy, alone=True, **options)
    fullest = max(ranks, key=lambda rank: rank["peak"])
    found = {f"{key}_gib": fullest[key] / GIB for key in ("kept", "peak")}
    return {"strategy": strategy, "processes": processes, "method": method, **found,
            "read_gib": max(rank["read"] for rank in ranks) / GIB}  # fmt: skip


def exported(base: Path, method: str, kind: str, whole: bool) -> dict[str, Any]:
    """Memory and time of an export; `whole` keeps tensors in memory instead of files."""
    options = {"model_name_or_path": str(base), "dataset_name": "embedded", "max_train_samples": 20, "method": method,
               "mixed_precision": "bf16"}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "step", build(options))
        command = [sys.executable, str(ROOT / "tests/unit/checkpoint/exporting_rank.py"), f"{folder}/step"]
        command += [f"{folder}/model", json.dumps(options), kind, *(["whole"] if whole else [])]
        start = time.perf_counter()
        done = subprocess.run(command, env=environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
        seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return {"kind": kind, "in_memory": whole, "peak_gib": int(done.stdout.splitlines()[-1]) / GIB, "seconds": seconds}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_memory")
    parser.add_argument("--only", nargs="+", default=[], help="strategies, `export`, or both; default: all")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--methods", nargs="+", default=["full", "lora", "qlora"])
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/DATE-host-memory.json")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        facts = model(Path(folder), {**SHAPE, "num_hidden_layers": chosen.layers})
        print(f"{facts['weights']:,} weights; the largest takes {facts['largest_gib']:.2f} GiB in fp32\n")
        print("| strategy, ranks | method | kept | peak | read |\n|---|---|---|---|---|")
        loads, exports = [], []
        for method in chosen.methods:
            for strategy, processes in LOADS:
                possible = method != "qlora" or strategy not in ("tp", "pp", "zero3", "fsdp1")
                if possible and (not chosen.only or strategy in chosen.only):
                    loads.append(row := load(Path(folder), strategy, processes, method))
                    print(f"| `{strategy}`, {processes} | {method} | {row['kept_gib']:.2f} | {row['peak_gib']:.2f} | "
                          f"{row['read_gib']:.2f} |", flush=True)  # fmt: skip
        print("\n| export | tensors | peak | seconds |\n|---|---|---|---|")
        for method, kind in EXPORTS if not chosen.only or "export" in chosen.only else []:
            for whole in (False, True):
                exports.append(row := exported(Path(folder), method, kind, whole))
                print(f"| {kind} | {'in memory' if whole else 'in files'} | {row['peak_gib']:.2f} | "
                      f"{row['seconds']:.0f} |", flush=True)  # fmt: skip
    if chosen.json:
        result = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "torch": version("torch"), "machine": platform.machine(),
                  **facts, "loads": loads, "exports": exports}  # fmt: skip
        path = RESULTS / f"{result['date']}-host-memory.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
