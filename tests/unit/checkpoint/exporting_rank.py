"""Exports a checkpoint in a process of its own, and prints its peak of RssAnon in bytes above what it began with.

    python tests/unit/checkpoint/exporting_rank.py CHECKPOINT OUTPUT OPTIONS KIND [whole]

`whole` is the control: tensors are kept in memory instead of files.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainers.checkpoint import export, scratch
from trainers.checkpoint.weights import base_digest, saved_tensors
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.model.load import build_model
from trainers.parallel.shards import WEIGHT
from trainers.run.folder import write_json
from trainers.run.manifest import FORMAT, seal


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def write_checkpoint(folder: Path, config: TrainConfig) -> None:
    """A checkpoint of a model whose trained weights are not those that it began with."""
    model = build_model(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += torch.randn(weight.shape, generator=generator) * 0.02
    folder.mkdir()
    save_file({f"{WEIGHT}.{name}": tensor for name, tensor in saved_tensors(model).items()}, folder / "w.safetensors")
    manifest = {"format": FORMAT, "step": 3, "world": 1, "progress": {}, "files": {"w.safetensors": {}}, "config": {},
                "versions": {}, "base": base_digest(model), "data_fingerprint": "", "tensors": {}}  # fmt: skip
    write_json(folder / "manifest.json", {**manifest, "seal": seal(manifest)})


def main(checkpoint: Path, output: Path, options: str, kind: str, whole: bool) -> None:
    config, ended = build(json.loads(options)), threading.Event()
    if whole:
        scratch.SMALL = sys.maxsize
    start = peak = anonymous()

    def look() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, anonymous())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    export.export_checkpoint(checkpoint, config, output, kind, {}, None)
    ended.set()
    thread.join()
    print(json.dumps(peak - start))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], len(sys.argv) > 5)
