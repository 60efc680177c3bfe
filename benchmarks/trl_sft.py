"""TRL's SFTTrainer on the same batches, as fast as it goes on this machine. Words as in `bare_loop.py`."""

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
    """Seconds of the steps after the warm ones."""

    def __init__(self, warm: int, last: int, device: torch.device):
        self.warm, self.last, self.device = warm, last, device
        self.began = self.seconds = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        """Called by the trainer after each optimizer step."""
        if state.global_step == self.warm:
            self.began = moment(self.device)
        if state.global_step == self.last:
            self.seconds = moment(self.device) - self.began


class Timed(SFTTrainer):
    """Keeps each micro-batch's loss, without looking at it."""

    losses: list[torch.Tensor]

    def training_step(self, *args: Any, **more: Any) -> torch.Tensor:
        """See `transformers.Trainer`."""
        loss = super().training_step(*args, **more)
        self.losses.append(loss)
        return loss


def main() -> None:
    """Trains, and writes seconds of the steps after the warm ones, and the first and last loss."""
    asked, device = arguments(), device_here()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    batches = Batches.load(asked.batches)
    found = [batches.row(row) for row in range(asked.steps * batches.global_batch_size)]
    labels = [[int(one) if wanted else -100 for one, wanted in zip(ids, trained, strict=True)]
              for ids, trained, _ in found]  # fmt: skip
    accumulation = batches.global_batch_size // (asked.micro * world)
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, max_steps=asked.steps, per_device_train_batch_size=asked.micro,
            gradient_accumulation_steps=accumulation, learning_rate=asked.rate, lr_scheduler_type="constant",
            weight_decay=0.0, max_grad_norm=1.0, optim="adamw_torch_fused", bf16=asked.bf16,
            use_cpu=device.type == "cpu", gradient_checkpointing=asked.checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False}, dataloader_pin_memory=device.type == "cuda",
            train_sampling_strategy="sequential",
            max_length=batches.longest(), dataset_kwargs={"skip_prepare_dataset": True}, logging_steps=10,
            save_strategy="no", report_to="none", disable_tqdm=True, ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,
        )  # fmt: skip
        clock = Clock(asked.warm, asked.steps, device)
        trainer = Timed(
            model=load_model(asked), args=config, callbacks=[clock],
            processing_class=AutoTokenizer.from_pretrained(asked.model),
            train_dataset=Dataset.from_dict({"input_ids": [ids.tolist() for ids, _, _ in found], "labels": labels}),
        )  # fmt: skip
        trainer.losses = []
        trainer.train()
    told = torch.stack([sum(trainer.losses[:accumulation]), sum(trainer.losses[-accumulation:])])
    if world > 1:
        dist.all_reduce(told)
        told /= world  # each rank's was scaled up for the average over them
    if rank == 0:
        write_result(asked, clock.seconds, told)


if __name__ == "__main__":
    main()
