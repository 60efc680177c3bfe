"""A page of plain PyTorch on a transformers model: what any training tool is held against.

`torchrun benchmarks/bare_loop.py --model FOLDER --batches FILE --micro N --steps N --warm N --out FILE`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.rows import Batches


def arguments() -> argparse.Namespace:
    """The words that all contenders take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=Path, required=True)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--micro", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def collate(batches: Batches, rows: range) -> dict[str, torch.Tensor]:
    """Some rows, padded to the longest of them."""
    found = [batches.row(row) for row in rows]
    shape = (len(found), max(len(ids) for ids, _, _ in found))
    ids, labels, places = torch.zeros(shape).long(), torch.full(shape, -100), torch.arange(shape[1]).repeat(shape[0], 1)
    for line, (tokens, trained, position) in enumerate(found):
        ids[line, : len(tokens)] = torch.from_numpy(tokens)
        labels[line, : len(tokens)] = torch.from_numpy(tokens).where(torch.from_numpy(trained), torch.tensor(-100))
        places[line, : len(tokens)] = torch.from_numpy(position)
    return {"ids": ids, "labels": labels, "places": places}


def main() -> None:
    """Trains, and writes seconds of the steps after the warm ones, and the first and last loss."""
    asked = arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    batches = Batches.load(asked.batches)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float32, attn_implementation="sdpa").train()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False) if world > 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.rate, weight_decay=0.0, fused=True)
    size, losses, began = batches.global_batch_size, [], 0.0
    for step in range(asked.steps):
        if step == asked.warm:
            began = time.perf_counter()
        starts = range(step * size + rank * asked.micro, (step + 1) * size, world * asked.micro)
        trained = sum(int(batches.row(row)[1].sum()) for row in range(step * size, (step + 1) * size))
        total = torch.zeros(())
        for start in starts:
            micro = collate(batches, range(start, start + asked.micro))
            last = start == starts[-1]
            with ddp.no_sync() if ddp is not None and not last else contextlib.nullcontext():
                # Without a mask transformers takes positions that start again for packed documents.
                places = {"position_ids": micro["places"]} if asked.packed else {}
                logits = (ddp or model)(input_ids=micro["ids"], use_cache=False, **places).logits[:, :-1].float()
                labels = micro["labels"][:, 1:]
                loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                (loss * world / trained).backward()
            total += loss.detach() / trained
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    seconds = time.perf_counter() - began
    told = torch.stack([losses[0], losses[-1]])
    if world > 1:
        dist.all_reduce(told)
    if rank == 0:
        first, last = told.tolist()
        asked.out.write_text(json.dumps({"seconds": seconds, "first_loss": first, "last_loss": last}))
    if world > 1:
        del ddp
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
