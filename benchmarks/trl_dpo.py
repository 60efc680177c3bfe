"""TRL's DPOTrainer on the pairs of Tunesmith's steps, reference log-probabilities computed before the first step.

`python benchmarks/trl_dpo.py --model FOLDER --pairs FILE --warm N --rate R --out FILE`
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.trl_sft import Clock


class StepByStep(DPOTrainer):
    """Takes token ids as they are, and the pairs of each step as one batch."""

    steps: list[list[int]]

    def _prepare_dataset(self, dataset: Dataset, *others: Any, **more: Any) -> Dataset:
        return dataset

    def get_train_dataloader(self) -> DataLoader:
        """See `transformers.Trainer`."""
        return DataLoader(self.train_dataset, batch_sampler=self.steps, collate_fn=self.data_collator)


def main() -> None:
    """Trains; writes the time of the steps after the warm-up steps, and the first and last loss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--warm", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    steps = json.loads(args.pairs.read_text())
    pairs = [pair for step in steps for pair in step]
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder, max_steps=len(steps), per_device_train_batch_size=len(steps[0]),
            precompute_ref_log_probs=True, learning_rate=args.rate, lr_scheduler_type="constant", weight_decay=0.0,
            max_grad_norm=1.0, optim="adamw_torch_fused", bf16=False, use_cpu=True, gradient_checkpointing=False,
            dataloader_pin_memory=False, max_length=None, logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True,
        )  # fmt: skip
        clock = Clock(args.warm, len(steps), torch.device("cpu"))
        trainer = StepByStep(
            AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32), args=config, callbacks=[clock],
            train_dataset=Dataset.from_list(pairs), processing_class=AutoTokenizer.from_pretrained(args.model),
        )  # fmt: skip
        numbers = iter(range(len(pairs)))
        trainer.steps = [[next(numbers) for _ in step] for step in steps]
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    result = {"seconds": clock.seconds, "first_loss": losses[0], "last_loss": losses[-1], "gpu_peak_mib": None}
    args.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
