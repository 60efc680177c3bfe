"""Loads an export back with plain transformers or peft, and holds its loss against the trainer's.

One model at a time is in memory: the trainer's loss is taken before the export is written, and its model is let go
before the export is read. Both compute in the same dtype, so that what differs is how the weights are stored.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from trainers.config.options import TrainConfig
from trainers.data.prepare import cached
from trainers.model.attention import KERNELS
from trainers.model.load import base_dtype, element_counts, load_shape, model_path, weight_files
from trainers.model.quantization import keep_compute_dtype, loading_options, many_threads
from trainers.objectives.sft import SupervisedLoss
from trainers.run.host_memory import available

TOKENS = 256
EXACT = 1e-4
"""How far the mean loss over `TOKENS` tokens may move in fp32, as a share of it (of 1 below 1): our attention sums in
another order than transformers' does. In a narrower dtype it is two steps of that dtype."""


@dataclass(frozen=True)
class LoadedBack:
    """What came of loading an export back.

    Args:
        dtype: of the exported weights, such as `bfloat16`.
        tokens: trained ones, over which the losses are means.
        trainer_loss: of the model that was exported.
        loss: of the export; None when it was not compared.
        limit: the largest difference that rounding to `dtype` explains.
        problem: why it was not compared, or could not be loaded.
    """

    dtype: str
    tokens: int
    trainer_loss: float
    loss: float | None
    limit: float
    problem: str | None = None
    skipped: bool = False

    @property
    def difference(self) -> float | None:
        """Of the two losses; None when they were not compared."""
        return None if self.loss is None else abs(self.loss - self.trainer_loss)

    @property
    def failed(self) -> bool:
        """Whether the export is not the model that was trained."""
        if self.skipped:
            return False
        return self.difference is None or not self.difference <= self.limit  # NaN is no match

    def __str__(self) -> str:
        if self.skipped:
            return f"export in {self.dtype}: not loaded back, {self.problem}"
        if self.loss is None:
            return f"the export cannot be loaded back: {self.problem}"
        return (
            f"export in {self.dtype}: loaded back, its loss on {self.tokens} trained tokens is {self.loss:.6f}, "
            f"the trainer's {self.trainer_loss:.6f}; difference {self.difference:.1e}, limit {self.limit:.1e}"
        )


@dataclass(frozen=True)
class Probe:
    """One document, or its beginning.

    Args:
        ids: `[1, length]`.
        positions: `[trained]`, of the token before each trained one.
    """

    ids: torch.Tensor
    positions: torch.Tensor

    @property
    def labels(self) -> torch.Tensor:
        """`[trained]`, the trained tokens."""
        return self.ids[0, self.positions + 1]


def sample(config: TrainConfig, tokenizer: Any, text: str) -> list[Probe]:
    """Some of the run's data, `TOKENS` tokens in all; some of a text where the data are gone."""
    data = cached(config, "eval" if config.has_evaluation() else "train")
    probes, room = [], TOKENS
    for index in range(0 if data is None else len(data)):
        assert data is not None
        ids, mask = (torch.from_numpy(np.array(values[:room])) for values in data.document(index))
        room -= len(ids)
        if mask[1:].any():
            probes.append(Probe(ids.long()[None], mask[1:].nonzero()[:, 0]))
        if room < 2:
            break
    if probes:
        return probes
    shape = load_shape(config).get_text_config()
    longest = min(TOKENS, getattr(shape, "max_position_embeddings", None) or TOKENS)  # learned positions end there
    ids = torch.tensor(tokenizer(text[: 4 * TOKENS], add_special_tokens=False)["input_ids"][:longest])
    return [Probe(ids[None], torch.arange(len(ids) - 1))]


def held_dtype(config: TrainConfig, kind: str) -> torch.dtype:
    """Dtype of the weights, and of the sums, in which both models compute their loss."""
    return torch.float32 if kind == "merged" else base_dtype(config)


@torch.no_grad()
def trainer_loss(model: nn.Module, probes: Sequence[Probe], compute: torch.dtype) -> float:
    """Mean loss per trained token of the model that is about to be exported, by the code that trains."""
    loss = SupervisedLoss(model, compute)
    before = loss.base.config._attn_implementation
    if before in KERNELS.values():  # the others compute with the model's own, which may be no plain softmax
        loss.base.set_attn_implementation(KERNELS["eager"])
    was_training = model.training
    model.eval()
    total = 0.0
    with many_threads():
        for probe in probes:
            position_ids = torch.arange(probe.ids.shape[1])[None]
            total += loss(probe.ids, position_ids, None, probe.positions, probe.labels)[0].item()
    model.train(was_training)
    loss.base.set_attn_implementation(before)
    return total / _trained_tokens(probes)


def load_back(
    folder: Path, config: TrainConfig, kind: str, probes: Sequence[Probe], expected: float, dtype: torch.dtype
) -> LoadedBack:
    """Loads an export as its users do, and compares.

    Args:
        folder: the export.
        kind: `adapter`, `merged` or `full`.
        probes: what `trainer_loss` was taken on.
        expected: that loss.
        dtype: of the exported weights.
    """
    gc.collect()
    compute = held_dtype(config, kind)
    tokens, name = _trained_tokens(probes), str(dtype).removeprefix("torch.")
    limit, facts = largest_difference(expected, tokens, dtype, compute), (name, tokens, expected)
    try:
        needed, free = _bytes(folder, config, kind, compute), available()
        if needed > free:
            problem = (
                f"which takes {needed / 2**30:.1f} GiB of memory where {free / 2**30:.1f} are free; "
                "`tunesmith export` on a machine with more compares it"
            )
            return LoadedBack(*facts, None, limit, problem, skipped=True)
        model = _load(folder, config, kind, compute)
        loss = _stock_loss(model, probes, compute)
    except Exception as error:  # whatever its users would meet
        line = str(error).strip().partition("\n")[0][:300]
        return LoadedBack(*facts, None, limit, f"{type(error).__name__}: {line}")
    return LoadedBack(*facts, loss, limit)


def largest_difference(expected: float, tokens: int, dtype: torch.dtype, compute: torch.dtype) -> float:
    """How far rounding may move a mean loss over some tokens, each of which it moves by chance: of few ones further.

    Data with answers of one word give two or three trained tokens.
    """
    steps = [2 * torch.finfo(one).eps for one in (dtype, compute) if one != torch.float32]
    return max([EXACT, *steps]) * max(1.0, abs(expected)) * math.sqrt(max(1.0, TOKENS / tokens))


def _trained_tokens(probes: Sequence[Probe]) -> int:
    return sum(len(probe.positions) for probe in probes)


def _bytes(folder: Path, config: TrainConfig, kind: str, compute: torch.dtype) -> int:
    """Memory of the weights once they are loaded; of an adapter, the base's too."""
    files = [*folder.glob("*.safetensors"), *(weight_files(config) if kind == "adapter" else [])]
    return sum(element_counts(files).values()) * compute.itemsize


def _load(folder: Path, config: TrainConfig, kind: str, compute: torch.dtype) -> Any:
    settings: dict[str, Any] = {"dtype": compute, "attn_implementation": "eager", "use_safetensors": True}
    settings["trust_remote_code"] = config.trust_remote_code
    if kind != "adapter":
        return AutoModelForCausalLM.from_pretrained(folder, **settings)
    if config.method == "qlora":
        settings |= loading_options(compute)
        settings["quantization_config"].bnb_4bit_use_double_quant = True
    if config.num_hidden_layers is not None:  # the adapter is for the base that was cut
        settings["config"] = load_shape(config)
    base = AutoModelForCausalLM.from_pretrained(model_path(config), revision=config.model_revision, **settings)
    keep_compute_dtype(base)
    return PeftModel.from_pretrained(base, str(folder))


@torch.no_grad()
def _stock_loss(model: Any, probes: Sequence[Probe], compute: torch.dtype) -> float:
    """Mean loss per trained token by the model's own forward pass."""
    model.eval()
    total = 0.0
    with many_threads(), torch.autocast("cpu", compute, enabled=compute != torch.float32):
        for probe in probes:
            logits = model(input_ids=probe.ids, use_cache=False).logits[0, probe.positions].float()
            total += nn.functional.cross_entropy(logits, probe.labels, reduction="sum").item()
    return total / _trained_tokens(probes)
