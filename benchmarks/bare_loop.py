"""A training loop in plain PyTorch on a transformers model: the baseline of the benchmarks.

`torchrun benchmarks/bare_loop.py --model FOLDER --batches FILE --micro N --steps N --warm N --rate R --out FILE`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.rows import Batches


def arguments() -> argparse.Namespace:
    """The command-line arguments that all contenders take."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=Path, required=True)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--micro", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--method", choices=("full", "lora", "qlora"), default="full")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def device_here() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def moment(device: torch.device) -> float:
    """Returns the clock time in seconds, after the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def load_model(args: argparse.Namespace) -> Any:
    """The model to train, as in Tunesmith: trained weights in fp32, a frozen base in bf16 or quantised to 4 bits."""
    dtype = torch.bfloat16 if args.bf16 and args.method != "full" else torch.float32
    four_bits: dict[str, Any] = {}
    if args.method == "qlora":
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        four_bits = {
            "quantization_config": BitsAndBytesConfig(load_in_4bit=True, **nf4),
            "device_map": {"": device_here()},
        }
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation="sdpa", **four_bits)
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model if args.method == "full" else with_adapters(model)


def with_adapters(model: Any) -> Any:
    """Tunesmith's default adapters, with its default seed."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(42)
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


def write_result(args: argparse.Namespace, seconds: float, losses: torch.Tensor) -> None:
    """Writes the result that the parent process reads.

    Args:
        args: the command line.
        seconds: time of the steps after the warm-up steps.
        losses: `[2]` first and last loss.
    """
    first, last = losses.tolist()
    peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
    args.out.write_text(json.dumps({"seconds": seconds, "first_loss": first, "last_loss": last, "gpu_peak_mib": peak}))


def collate(batches: Batches, rows: range) -> dict[str, torch.Tensor]:
    """Pads rows to the longest of them: `ids`, `labels` (-100 if not trained) and `position_ids`, `[rows, width]`."""
    content = [batches.row(row) for row in rows]
    shape = (len(content), max(len(ids) for ids, _, _ in content))
    ids, labels, position_ids = (
        torch.zeros(shape).long(),
        torch.full(shape, -100),
        torch.arange(shape[1]).repeat(shape[0], 1),
    )
    for line, (tokens, trained, position) in enumerate(content):
        ids[line, : len(tokens)] = torch.from_numpy(tokens)
        labels[line, : len(tokens)] = torch.from_numpy(tokens).where(torch.from_numpy(trained), torch.tensor(-100))
        position_ids[line, : len(tokens)] = torch.from_numpy(position)
    return {"ids": ids, "labels": labels, "position_ids": position_ids}


def main() -> None:
    """Trains; writes the time of the steps after the warm-up steps, and the first and last loss."""
    args, device = arguments(), device_here()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    batches = Batches.load(args.batches)
    model = load_model(args).train()
    model = model if args.method == "qlora" else model.to(device)  # a quantised model is already on the device
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False) if world > 1 else None
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.rate, weight_decay=0.0, fused=True)
    size, losses, began = batches.global_batch_size, [], 0.0
    for step in range(args.steps):
        if step == args.warm:
            began = moment(device)
        starts = range(step * size + rank * args.micro, (step + 1) * size, world * args.micro)
        trained = sum(int(batches.row(row)[1].sum()) for row in range(step * size, (step + 1) * size))
        total = torch.zeros((), device=device)
        for start in starts:
            batch = collate(batches, range(start, start + args.micro))
            micro = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            last = start == starts[-1]
            autocast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
            with ddp.no_sync() if ddp is not None and not last else contextlib.nullcontext():
                # Without a mask, transformers treats positions that restart as packed documents.
                positions = {"position_ids": micro["position_ids"]} if args.packed else {}
                with autocast:
                    logits = (ddp or model)(input_ids=micro["ids"], use_cache=False, **positions).logits
                logits, labels = logits[:, :-1].float(), micro["labels"][:, 1:]
                loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                (loss * world / trained).backward()
            total += loss.detach() / trained
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    seconds = moment(device) - began
    first_and_last = torch.stack([losses[0], losses[-1]])
    if world > 1:
        dist.all_reduce(first_and_last)
    if rank == 0:
        write_result(args, seconds, first_and_last)
    if world > 1:
        del ddp
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
