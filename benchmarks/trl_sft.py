"""TRL's SFTTrainer on the same batches, with the settings fastest for it. Arguments as in `bare_loop.py`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bare_loop import arguments, device_here, load_model, moment, write_result
from benchmarks.rows import Batches


class Clock(TrainerCallback):
    """Measures the time of the steps after the warm-up steps."""

    def __init__(self, warm: int, last: int, device: torch.device):
        self.warm = warm
        self.last = last
        self.device = device
        self.began = self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the trainer after each optimizer step."""
        if state.global_step == self.warm:
            self.began = moment(self.device)
        if state.global_step == self.last:
            self.seconds = moment(self.device) - self.began


class Timed(SFTTrainer):
    """Keeps the loss of each micro-batch, without a device synchronisation."""

    losses: list[torch.Tensor]

    def training_step(self, *args: Any, **more: Any) -> torch.Tensor:
        """See `transformers.Trainer`."""
        loss = super().training_step(*args, **more)
        self.losses.append(loss)
        return loss


def main() -> None:
    """Trains; writes the time of the steps after the warm-up steps, and the first and last loss."""
    args, device = arguments(), device_here()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    batches = Batches.load(args.batches)
    content = [batches.row(row) for row in range(args.steps * batches.global_batch_size)]
    labels = [[int(token) if wanted else -100 for token, wanted in zip(ids, trained, strict=True)]
              for ids, trained, _ in content]  # fmt: skip
    accumulation = batches.global_batch_size // (args.micro * world)
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, max_steps=args.steps, per_device_train_batch_size=args.micro,
            gradient_accumulation_steps=accumulation, learning_rate=args.rate, lr_scheduler_type="constant",
            weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused", bf16=args.bf16,
            use_cpu=device.type == "cpu", gradient_checkpointing=args.checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False}, dataloader_pin_memory=device.type == "cuda",
            train_sampling_strategy="sequential",
            max_length=batches.longest(), dataset_kwargs={"skip_prepare_dataset": True}, logging_steps=10,
            save_strategy="no", report_to="none", disable_tqdm=True, ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,
        )  # fmt: skip
        clock = Clock(args.warm, args.steps, device)
        trainer = Timed(
            model=load_model(args), args=config, callbacks=[clock],
            processing_class=AutoTokenizer.from_pretrained(args.model),
            train_dataset=Dataset.from_dict({"input_ids": [ids.tolist() for ids, _, _ in content], "labels": labels}),
        )  # fmt: skip
        trainer.losses = []
        trainer.train()
    first_and_last = torch.stack([sum(trainer.losses[:accumulation]), sum(trainer.losses[-accumulation:])])
    if world > 1:
        dist.all_reduce(first_and_last)
        first_and_last /= world  # each rank's loss was scaled for averaging over ranks
    if rank == 0:
        write_result(args, clock.seconds, first_and_last)


if __name__ == "__main__":
    main()
