"""Saves of a plain loop, for `benchmarks/checkpoint.py`: `torch.save` and DCP, synchronous. Run under torchrun."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

REPEATS = 3


def with_torch_save(model: Any, optimizer: Any, folder: Path) -> None:
    """Saves the full state on rank 0, in one file."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")


def with_dcp(model: Any, optimizer: Any, folder: Path) -> None:
    """Saves each rank's shard in a file of its own."""
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)


def measure(save: Callable[[Any, Any, Path], None], model: Any, optimizer: Any, folder: Path) -> dict[str, float]:
    """Median seconds of a save, from barrier to barrier."""
    seconds = []
    for _ in range(REPEATS):
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        dist.barrier()
        began = time.perf_counter()
        save(model, optimizer, folder)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    took = statistics.median(seconds)
    return {"gib": size / 2**30, "written": took, "stall": took}


def main() -> None:
    """Trains one step, so that Adam has a state, then measures the saves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.strategy == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        for layer in model.get_decoder().layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.arange(64)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    savers = {"torch.save": with_torch_save, "DCP": with_dcp}
    results = {name: measure(save, model, optimizer, args.folder / name) for name, save in savers.items()}
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(results))
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
