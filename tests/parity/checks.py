"""What the promises mean for finished runs: the same bits, the same after a resume, the same from an export."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from tests.launching import Finished, launch_well
from tests.parity import plain
from tests.parity.runs import HALF, STEPS, config, options
from tests.shared import once
from trainers.checkpoint.weights import saved_tensors
from trainers.config.options import TrainConfig
from trainers.data.prepare import prepare


@functools.cache
def reference(method: str, packing: bool, build: Callable[[TrainConfig], nn.Module] = plain.build) -> plain.Curve:
    """The plain page's curve."""

    def train(folder: Path) -> None:
        found = plain.train(config(method, packing), build=build)
        (folder / "curve.json").write_text(json.dumps(asdict(found)))

    folder = once(f"reference-{method}-{packing}", train)
    return plain.Curve(**json.loads((folder / "curve.json").read_text()))


def weights(finished: Finished) -> dict[str, torch.Tensor]:
    """The exported weights by name."""
    tensors: dict[str, torch.Tensor] = {}
    for file in finished.run.model.glob("*.safetensors"):
        tensors |= load_file(file)
    assert tensors
    return tensors


def same_bits(one: Finished, other: Finished) -> bool:
    """Losses, gradient norms, rates and exported weights, bit for bit."""
    series = all(one.series(key) == other.series(key) for key in ("loss", "grad_norm", "learning_rate"))
    mine, theirs = weights(one), weights(other)
    return series and set(mine) == set(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


def resumed(folder: Path, processes: int, method: str, checkpoint: Path, strategy: str | None = None) -> Finished:
    """A packed run that goes on from a checkpoint of another run."""
    more = {"resume_from_checkpoint": checkpoint}
    return launch_well(folder, processes, options(method, True) | more, strategy=strategy)


def equal_after_resume(undisturbed: Finished, again: Finished) -> bool:
    """The second half's series and the final weights, bit for bit."""
    assert [row["step"] for row in again.rows()] == list(range(HALF + 1, STEPS + 1))
    tail = all(undisturbed.series(key)[HALF:] == again.series(key) for key in ("loss", "grad_norm", "learning_rate"))
    mine, theirs = weights(undisturbed), weights(again)
    return tail and all(torch.equal(mine[name], theirs[name]) for name in mine)


def check_export(finished: Finished, method: str, packing: bool) -> None:
    """Stock transformers or peft load the export; its weights are the checkpoint's, its loss is the trainer's."""
    loader = AutoModelForCausalLM if method == "full" else AutoPeftModelForCausalLM
    model = loader.from_pretrained(finished.run.model, attn_implementation="eager").eval()
    saved: dict[str, torch.Tensor] = {}
    for file in finished.checkpoints[-1].glob("*.safetensors"):
        saved |= {name: one for name, one in load_file(file).items() if name.startswith("model.")}
    loaded = saved_tensors(model) if method == "full" else dict(model.named_parameters())
    assert saved
    assert all(torch.equal(one, loaded[name.removeprefix("model.")]) for name, one in saved.items())
    assert stock_loss(model, method, packing) == pytest.approx(finished.series("eval_loss")[-1], abs=1e-5)


@torch.no_grad()
def stock_loss(model: torch.nn.Module, method: str, packing: bool = False) -> float:
    """Mean loss over the trained tokens of the evaluation rows by the stock model, one document at a time."""
    documents = prepare(config(method, packing), "eval")
    total = count = 0.0
    for index in range(len(documents)):
        tokens, mask = documents.document(index)
        ids, wanted = torch.from_numpy(np.array(tokens, dtype=np.int64))[None], torch.from_numpy(np.array(mask))[1:]
        logits = model(input_ids=ids).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits[wanted], ids[0, 1:][wanted], reduction="sum").item()
        count += int(wanted.sum())
    return total / count
