"""Loads an export back with plain transformers or peft, and compares its loss and greedy text with the trainer's.

Of a reward model, the mean score of a few documents takes the place of the loss, and there is no text.

Only one model is there at a time: the trainer's loss is computed before the export is written, and its model is freed
before the export is read. Both compute in the same dtype, so that only the storage of the weights differs; what
their rounding changes is measured on the trainer's model.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from trainers.checkpoint.gguf_file import GgufFile
from trainers.checkpoint.scratch import Scratch
from trainers.config.byte_text import byte_text
from trainers.config.options import TrainConfig
from trainers.data.prepare import cached
from trainers.model.attention import KERNELS
from trainers.model.load import LOADER, base_dtype, element_counts, load_model_config, model_path, weight_files
from trainers.model.quantization import keep_compute_dtype, loading_options, many_threads
from trainers.model.reachability import without_log
from trainers.model.rope_scaling import position_limit
from trainers.model.scalar_head import model_family
from trainers.model.stored import DTYPES
from trainers.objectives.loss_module import LossModule, inner_model
from trainers.objectives.output_head import scalar_head
from trainers.objectives.sampling import SampleRequest
from trainers.objectives.sampling import sample as sample_answers
from trainers.run.host_memory import available
from trainers.run.lineage import FAILED, PASSED, UNCHECKED
from trainers.run.weight_headers import read_header

BASE = "base"
"""Folder in an exported adapter for the config.json of its base with scaled RoPE. Not beside the adapter: transformers
would look for the base's weights there."""
TOKENS = 256
GREEDY_TOKENS = 16
_SMALL = 1 << 28
_WIDENED = {torch.float32: (torch.bfloat16, torch.float16), torch.bfloat16: (), torch.float16: ()}
"""By dtype, the narrower ones of which it holds every value."""
EXACT = 1e-4
"""Relative tolerance of the mean loss over `TOKENS` tokens in fp32 (absolute for losses below 1), as our attention sums
in a different order from transformers'. In a narrower dtype, the tolerance is twice its epsilon."""


@dataclass(frozen=True)
class Expected:
    """What the trainer's model computes.

    Args:
        loss: mean loss per trained token (or score) before the export is written.
        rounding: how much that loss changes when the weights are rounded to the dtype of the export.
        text: the most likely tokens after a prompt; None if they were not computed.
    """

    loss: float
    rounding: float
    text: list[int] | None


@dataclass(frozen=True)
class LoadedBack:
    """The result of loading an export back.

    Args:
        dtype: dtype of the exported weights, such as `bfloat16`.
        tokens: number of trained tokens that the losses average over.
        trainer_loss: loss of the model that was exported.
        loss: loss of the export; None if it was not computed.
        limit: largest deviation from the trainer's loss that other kernels explain.
        rounding: change of the trainer's loss by rounding the weights to `dtype`.
        problem: why the loss was not computed.
        skipped: whether the export was not loaded for lack of memory.
        scores: whether the losses are mean scores, and `tokens` the number of scored documents.
        texts: greedy tokens of the trainer's model and of the export; None if they were not compared. Rounding to
            `dtype` may change them, so that a difference is no failure.
        gguf: the GGUF files that were written beside it.
    """

    dtype: str
    tokens: int
    trainer_loss: float
    loss: float | None
    limit: float
    rounding: float = 0.0
    problem: str | None = None
    skipped: bool = False
    scores: bool = False
    texts: tuple[list[int], list[int]] | None = None
    gguf: tuple[GgufFile, ...] = ()

    @property
    def difference(self) -> float | None:
        """Absolute difference of the two losses; None if they were not compared."""
        return None if self.loss is None else abs(self.loss - self.trainer_loss)

    @property
    def deviation(self) -> float | None:
        """The part of the difference that rounding does not explain; None if they were not compared."""
        return None if self.loss is None else abs(self.loss - self.trainer_loss - self.rounding)

    @property
    def failed(self) -> bool:
        """Whether the export is not the model that was trained."""
        if self.skipped:
            return False
        return self.deviation is None or not self.deviation <= self.limit  # NaN fails

    @property
    def verdict(self) -> str:
        """What the export's record says of it."""
        return UNCHECKED if self.skipped else FAILED if self.failed else PASSED

    def __str__(self) -> str:
        if self.skipped:
            return f"export in {self.dtype}: not loaded back, {self.problem}"
        if self.loss is None:
            return f"the export cannot be loaded back: {self.problem}"
        scored, trained = f"mean score of {self.tokens} documents", f"loss on {self.tokens} trained tokens"
        measured = scored if self.scores else trained
        return (
            f"export in {self.dtype}: loaded back, its {measured} is {self.loss:.6f}, "
            f"the trainer's {self.trainer_loss:.6f}; difference {self.difference:.1e}, "
            f"{f'beyond rounding {self.deviation:.1e}, ' if self.rounding else ''}limit {self.limit:.1e}"
            f"{self._about_text()}"
        )

    def _about_text(self) -> str:
        if self.texts is None:
            return ""
        equal = list(takewhile(lambda pair: pair[0] == pair[1], zip(*self.texts, strict=True)))
        if len(equal) == len(self.texts[0]):
            return f"; the greedy text of {len(equal)} tokens is the same"
        return f"; the greedy texts part at token {len(equal) + 1} of {len(self.texts[0])}"


@dataclass(frozen=True)
class Probe:
    """A document, or its beginning, on which losses are compared.

    Args:
        ids: `[1, length]` token ids.
        positions: `[trained]` index of the token before each trained one; of the last token, if that is scored.
    """

    ids: torch.Tensor
    positions: torch.Tensor

    @property
    def labels(self) -> torch.Tensor:
        """`[trained]` ids of the trained tokens; of the last token, if that is scored."""
        return self.ids[0, (self.positions + 1).clamp(max=self.ids.shape[1] - 1)]


def sample(config: TrainConfig, tokenizer: Any, text: str) -> list[Probe]:
    """Samples `TOKENS` tokens of the run's data, or of `text` if the data is gone."""
    data = cached(config, "eval" if config.has_evaluation() else "train")
    probes, room = [], TOKENS
    for index in range(0 if data is None else len(data)):
        assert data is not None
        # Take documents, the last one truncated, until `TOKENS` are used up; skip those without trained tokens.
        ids, mask = (torch.from_numpy(np.array(values[:room])) for values in data.document(index))
        room -= len(ids)
        if mask[1:].any():
            probes.append(_probe(config, ids.long(), mask[1:].nonzero()[:, 0]))
        if room < 2:
            break
    if probes:
        return probes
    model_config = load_model_config(config).get_text_config()
    longest = min(
        TOKENS, getattr(model_config, "max_position_embeddings", None) or TOKENS
    )  # learned positions are limited
    ids = torch.tensor(tokenizer(text[: 4 * TOKENS], add_special_tokens=False)["input_ids"][:longest])
    return [_probe(config, ids, torch.arange(len(ids) - 1))]


def _probe(config: TrainConfig, ids: torch.Tensor, positions: torch.Tensor) -> Probe:
    """The probe of a document, of which a reward model scores the last token."""
    return Probe(ids[None], torch.tensor([len(ids) - 1]) if config.objective_spec.scalar_head else positions)


def held_dtype(config: TrainConfig, kind: str) -> torch.dtype:
    """Dtype in which both models hold their weights and compute the loss."""
    return torch.float32 if kind == "merged" else base_dtype(config)


@torch.no_grad()
def trainer_loss(model: nn.Module, probes: Sequence[Probe], compute: torch.dtype) -> float:
    """Mean loss per trained token (or score) of the model before export, computed by the training code."""
    loss = LossModule(model, compute)
    before = loss.base.config._attn_implementation
    if before in KERNELS.values():  # otherwise keep the model's own attention, which may not be plain softmax
        loss.base.set_attn_implementation(KERNELS["eager"])
    was_training = model.training
    model.eval()
    total = 0.0
    with _threads(model):
        for probe in probes:
            position_ids = torch.arange(probe.ids.shape[1])[None]
            total += loss(probe.ids, position_ids, None, probe.positions, probe.labels)[0].item()
    model.train(was_training)
    loss.base.set_attn_implementation(before)
    return total / _trained_tokens(probes)


def greedy_text(model: nn.Module, probes: Sequence[Probe], compute: torch.dtype) -> list[int] | None:
    """The `GREEDY_TOKENS` most likely tokens after the prompt of the first probe, whatever ends an answer.

    Returns:
        Their ids; None of a reward model, without room in the model's positions, of weights that do not fit in memory,
        which would be read from their files for each token, and where transformers cannot generate.
    """
    base = inner_model(model)
    prompt = probes[0].ids[0, : int(probes[0].positions[0]) + 1].numpy()
    limit = position_limit(base.config.get_text_config())
    if scalar_head(base) is not None or _size(model) > available() or len(prompt) + GREEDY_TOKENS > (limit or math.inf):
        return None
    request = SampleRequest([prompt], None, 1.0, GREEDY_TOKENS, stops=(), pad=0, synchronized=False)
    was_training = model.training
    model.eval()
    with _threads(model), torch.autocast("cpu", compute, enabled=compute != torch.float32):
        try:
            sampled = sample_answers(base, request, torch.device("cpu"))
        except Exception:  # of any kind, as from hybrids without an attention layer
            logging.getLogger(__name__).debug("transformers cannot generate with this model", exc_info=True)
            return None
        finally:
            model.train(was_training)
    return [int(token) for token in sampled.tokens[0]]


def _size(model: nn.Module) -> int:
    """Bytes of the weights."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def _threads(model: nn.Module) -> AbstractContextManager[Any]:
    """This rank's share of the cores; of a small model, whose products are short, threads only wait for each other."""
    return many_threads() if _size(model) > _SMALL else nullcontext()


def load_back(
    folder: Path,
    config: TrainConfig,
    kind: str,
    probes: Sequence[Probe],
    expected: Expected,
    dtype: torch.dtype,
) -> LoadedBack:
    """Loads an export as its users will, and compares its loss and its greedy text.

    Args:
        folder: the export.
        kind: `adapter`, `merged` or `full`.
        probes: the samples that `trainer_loss` was computed on.
        expected: what the trainer's model computes on them.
        dtype: dtype of the exported weights.
    """
    gc.collect()
    compute = held_dtype(config, kind)
    tokens, name = _trained_tokens(probes), str(dtype).removeprefix("torch.")
    limit, facts, rounding = tolerance(expected.loss, tokens, compute), (name, tokens, expected.loss), expected.rounding
    scores = config.objective_spec.scalar_head
    try:
        needed, free = _bytes(folder, config, kind, compute), available()
        if needed > free:
            problem = (
                f"which takes {byte_text(needed)} of memory where {byte_text(free)} are free; "
                "run `tunesmith export` on a machine with more memory to check it"
            )
            return LoadedBack(*facts, None, limit, rounding, problem, skipped=True, scores=scores)
        model = _load(folder, config, kind, compute)
        loss = _stock_loss(model, probes, compute)
        text = None if expected.text is None else greedy_text(model, probes, compute)
    except Exception as error:  # any error that users of the export would get
        line = str(error).strip().partition("\n")[0][:300]
        return LoadedBack(*facts, None, limit, rounding, f"{type(error).__name__}: {line}")
    texts = None if expected.text is None or text is None else (expected.text, text)
    return LoadedBack(*facts, loss, limit, rounding, scores=scores, texts=texts)


def tolerance(expected: float, tokens: int, compute: torch.dtype) -> float:
    """The tolerance of a mean loss. Rounding errors are random, so it grows with 1/sqrt(tokens) below `TOKENS`.

    Data with one-word answers may have only two or three trained tokens.
    """
    return (
        max(EXACT, 0.0 if compute == torch.float32 else 2 * torch.finfo(compute).eps)
        * max(1.0, abs(expected))
        * math.sqrt(max(1.0, TOKENS / tokens))
    )


def _trained_tokens(probes: Sequence[Probe]) -> int:
    return sum(len(probe.positions) for probe in probes)


def _bytes(folder: Path, config: TrainConfig, kind: str, compute: torch.dtype) -> int:
    """Memory of the loaded weights in bytes, including the base of an adapter; of mapped ones, that of the largest."""
    counts = [math.prod(shape) for file in _files(folder, config, kind) for _, shape in read_header(file).values()]
    held, total = _mappable_dtype(folder, config, kind, compute), sum(counts) * compute.itemsize
    mapped = held == compute or (held is not None and Scratch(folder.parent).has_room(total))
    return max(counts) * compute.itemsize if mapped else total


def _files(folder: Path, config: TrainConfig, kind: str) -> list[Path]:
    return [*folder.glob("*.safetensors"), *(weight_files(config) if kind == "adapter" else [])]


def _mappable_dtype(folder: Path, config: TrainConfig, kind: str, compute: torch.dtype) -> torch.dtype | None:
    """The one dtype of the files, in which transformers maps them; None if its weights must be loaded into memory.

    They can be widened afterwards, which is exact.
    """
    files = weight_files(config) if kind == "adapter" else list(folder.glob("*.safetensors"))
    names = set(element_counts(files))
    held = DTYPES.get(next(iter(names))) if len(names) == 1 else None
    return held if config.method != "qlora" and held in (compute, *_WIDENED[compute]) else None


def _load(folder: Path, config: TrainConfig, kind: str, compute: torch.dtype) -> Any:
    held = _mappable_dtype(folder, config, kind, compute) or compute
    settings: dict[str, Any] = {"dtype": held, "attn_implementation": "eager", "use_safetensors": True}
    settings["trust_remote_code"] = config.trust_remote_code
    if kind != "adapter":
        return _widened(model_family(config).from_pretrained(folder, **settings), held, compute, folder)
    from peft import PeftModel  # takes long, and every rank imports this module

    if config.method == "qlora":
        settings |= loading_options(compute)
        settings["quantization_config"].bnb_4bit_use_double_quant = True
    if config.num_hidden_layers is not None:  # the adapter fits the base with fewer layers
        settings["config"] = load_model_config(config)
    elif (folder / BASE).is_dir():
        settings["config"] = AutoConfig.from_pretrained(folder, subfolder=BASE)
    elif config.objective_spec.scalar_head:
        settings["num_labels"] = 1
    quiet = without_log(LOADER) if config.objective_spec.scalar_head else nullcontext()  # the adapter has the head
    with quiet:
        base = model_family(config).from_pretrained(model_path(config), revision=config.model_revision, **settings)
    keep_compute_dtype(base)
    if config.new_tokens:  # as `AutoPeftModel` does
        tokens = len(AutoTokenizer.from_pretrained(folder))
        if tokens > base.get_input_embeddings().weight.shape[0]:
            base.resize_token_embeddings(tokens, mean_resizing=False)
    return PeftModel.from_pretrained(_widened(base, held, compute, folder), str(folder))


def _widened(model: Any, held: torch.dtype, compute: torch.dtype, folder: Path) -> Any:
    if held == compute:
        return model
    Scratch(folder.parent).copy_weights(model, compute)
    return model.to(compute)  # its buffers


@torch.no_grad()
def _stock_loss(model: Any, probes: Sequence[Probe], compute: torch.dtype) -> float:
    """Mean loss per trained token (or score), computed by the model's own forward pass."""
    model.eval()
    total, scores = 0.0, scalar_head(inner_model(model)) is not None
    with _threads(model), torch.autocast("cpu", compute, enabled=compute != torch.float32):
        for probe in probes:
            logits = model(input_ids=probe.ids, use_cache=False).logits
            if scores:
                total += logits.float().item()
                continue
            logits = logits[0, probe.positions].float()
            total += nn.functional.cross_entropy(logits, probe.labels, reduction="sum").item()
    return total / _trained_tokens(probes)
