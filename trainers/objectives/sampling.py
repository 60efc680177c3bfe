"""Answers sampled from the model that is trained, inside the module that the strategy wraps.

There FSDP and ZeRO 3 gather the weights for each token as they do in training, so every data-parallel strategy samples
with transformers' `generate`. Each answer has its own random numbers: which rank samples it, beside which others,
changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from trainers.data.layout import MetadataRoute

_SEED = 2402_03300


@dataclass(frozen=True)
class SampleRequest:
    """What a rank samples in one forward pass.

    Args:
        prompts: token ids of each prompt; as many on every rank.
        uniforms: `[prompts, most tokens]` in [0, 1), a random number for each token of each answer; None for the most
            likely tokens.
        temperature: divides the logits.
        most_tokens: tokens of an answer, at most.
        stops: token ids that end an answer.
        pad: token id for padding.
        synchronized: whether other ranks sample at the same time, and take part in each other's forward passes.
    """

    prompts: Sequence[np.ndarray]
    uniforms: np.ndarray | None
    temperature: float
    most_tokens: int
    stops: Sequence[int]
    pad: int
    synchronized: bool


@dataclass(frozen=True)
class Sampled:
    """Answers to the prompts of a `SampleRequest`, in host memory.

    Args:
        tokens: token ids of each answer, the one that ends it included.
        log_probs: fp32 log-probability of each of these tokens, as the sampler computed it.
        ended: whether each answer came to its end.
    """

    tokens: list[np.ndarray]
    log_probs: list[np.ndarray]
    ended: list[bool]


def uniforms(seed: int, step: int, answers: np.ndarray, most_tokens: int) -> np.ndarray:
    """`[answers, most_tokens]` fp64 random numbers in [0, 1): a pure function of its arguments.

    Args:
        seed: seed of the run.
        step: step of the run.
        answers: number of each answer in the step.
        most_tokens: tokens of an answer, at most.
    """
    generators = (np.random.Generator(np.random.Philox(np.random.SeedSequence([_SEED, seed, step, int(answer)])))
                  for answer in answers)  # fmt: skip
    return np.stack([generator.random(most_tokens) for generator in generators])


class _Choose(LogitsProcessor):
    """Leaves only the chosen token possible, so that greedy search takes it; keeps its log-probability.

    A token is chosen by inversion: the first at which the summed probability exceeds the uniform number.
    """

    def __init__(self, uniform: torch.Tensor | None, temperature: float):
        self.uniform, self.temperature, self.log_probs = uniform, temperature, list[torch.Tensor]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        log_probs = torch.log_softmax(scores.float() / self.temperature, -1)
        if self.uniform is None:
            chosen = scores.argmax(-1, keepdim=True)
        else:
            cumulative = running_sum(log_probs.double().exp())
            threshold = self.uniform[:, len(self.log_probs), None] * cumulative[:, -1:]
            chosen = torch.searchsorted(cumulative, threshold, right=True).clamp(max=scores.shape[-1] - 1)
        self.log_probs.append(log_probs.gather(1, chosen))
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def running_sum(values: torch.Tensor) -> torch.Tensor:
    """Running sums over the last dimension, by matrix products: `cumsum` on a GPU is not deterministic."""
    size, count = 64, values.shape[-1]
    upper = torch.ones(size, size, dtype=values.dtype, device=values.device).triu()
    blocks = nn.functional.pad(values, (0, -count % size)).unflatten(-1, (-1, size)) @ upper
    if blocks.shape[-2] > 1:
        before = nn.functional.pad(running_sum(blocks[..., -1])[..., :-1], (1, 0))
        blocks = blocks + before[..., None]
    return blocks.flatten(-2)[..., :count]


@contextmanager
def _stock(base: Any) -> Iterator[None]:
    """Lets the model attend as transformers does, which knows caches and padding, and ignores its own defaults."""
    attention, generation = base.config._attn_implementation, base.generation_config
    config = base.config.get_text_config()
    routers = getattr(config, "output_router_logits", None)
    MetadataRoute.current = None  # layers that do not get the argument would see the last micro-batch's documents
    try:
        if routers:
            config.output_router_logits = False  # only training balances experts
        base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")
        base.generation_config = GenerationConfig()
        yield
    finally:
        base.set_attn_implementation(attention)
        base.generation_config = generation
        if routers:
            config.output_router_logits = routers


@torch.no_grad()
def sample(base: Any, request: SampleRequest, device: torch.device) -> Sampled:
    """Samples an answer to each prompt. Collective, if `synchronized`.

    Args:
        base: the transformers model, in evaluation mode.
        request: the prompts.
        device: the device of the model.
    """
    width = max(map(len, request.prompts))
    ids = np.full((len(request.prompts), width), request.pad, dtype=np.int64)
    real = np.zeros_like(ids)
    for line, prompt in enumerate(request.prompts):
        ids[line, width - len(prompt) :], real[line, width - len(prompt) :] = prompt, 1
    uniform = None if request.uniforms is None else torch.from_numpy(request.uniforms).to(device)
    choose = _Choose(uniform, request.temperature)
    config = GenerationConfig(
        max_new_tokens=request.most_tokens, do_sample=False, num_beams=1, use_cache=True,
        eos_token_id=list(request.stops), pad_token_id=request.pad,
    )  # fmt: skip
    with _stock(base):
        output = base.generate(
            input_ids=torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(real).to(device),
            generation_config=config, logits_processor=LogitsProcessorList([choose]),
            synced_gpus=request.synchronized,
        )  # fmt: skip
    answers = output[:, width:].cpu().numpy()
    log_probs = torch.cat(choose.log_probs[: answers.shape[1]], 1).float().cpu().numpy()
    return _cut(answers, log_probs, request)


def _cut(answers: np.ndarray, log_probs: np.ndarray, request: SampleRequest) -> Sampled:
    """The answers without what follows the token that ends them."""
    stops = np.isin(answers, np.array(request.stops))
    ended = np.asarray(stops.any(1))
    lengths = np.where(ended, stops.argmax(1) + 1, min(answers.shape[1], request.most_tokens)).tolist()
    cut = [(answer[:length].astype(np.int32), values[:length])
           for answer, values, length in zip(answers, log_probs, lengths, strict=True)]  # fmt: skip
    return Sampled([tokens for tokens, _ in cut], [values for _, values in cut], ended.tolist())
