"""Answers to prompts that all ranks share: each rank generates some of them, and every rank gets all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import GenerationConfig

from trainers.checkpoint.export import stop_tokens
from trainers.config.options import TrainConfig
from trainers.data.tokenizer import tokenizer_folder
from trainers.data.training_template import stop_token_ids
from trainers.monitor.heartbeat import LONG_LIMIT
from trainers.objectives.sampling import Sampled, SampleRequest
from trainers.parallel.backend import Backend
from trainers.parallel.ranks import Ranks
from trainers.strategy.mesh import Mesh


@dataclass(frozen=True)
class Generation:
    """How answers are generated.

    Args:
        batch_size: prompts of each batch on a rank.
        most_tokens: tokens of an answer, at most.
        stops: token ids that end an answer.
        temperature: divides the logits where random numbers choose the tokens.
    """

    batch_size: int
    most_tokens: int
    stops: Sequence[int]
    temperature: float = 1.0


def stop_ids(config: TrainConfig, tokenizer: Any, base: Any) -> list[int]:
    """Token ids that end an answer: those of the model, and those that its chat template ends a reply with.

    Args:
        config: the run's config.
        tokenizer: its tokenizer.
        base: the transformers model.
    """
    ends = stop_tokens(tokenizer, base.generation_config or GenerationConfig())
    return sorted({*ends, *stop_token_ids(tokenizer_folder(config))})


def generate(
    backend: Backend, mesh: Mesh, ranks: Ranks, prompts: Sequence[np.ndarray], settings: Generation,
    beat: Callable[..., None], randoms: np.ndarray | None = None,
) -> Sampled:  # fmt: skip
    """Answers to all prompts, equal on every rank. Collective.

    Args:
        backend: the wrapped model.
        mesh: this rank's position in the mesh, which divides nothing but the data.
        ranks: all ranks.
        prompts: token ids of each prompt; at least one.
        settings: how answers are generated.
        beat: called with the section while it works.
        randoms: `[prompts, most_tokens]` in [0, 1), a random number for each token; None for the most likely tokens.
    """
    size, world, rank = settings.batch_size, mesh.sizes.data, mesh.data_rank
    own: list[tuple[int, np.ndarray, np.ndarray, bool]] = []
    backend.model.eval()
    for start in range(0, len(prompts), size * world):
        beat("sampling", allowed=LONG_LIMIT)
        numbers = np.arange(start + rank, min(start + size * world, len(prompts)), world)
        own_numbers = numbers if len(numbers) else np.zeros(1, dtype=np.int64)  # every rank must do the same passes
        request = SampleRequest(
            [prompts[number] for number in own_numbers.tolist()], None if randoms is None else randoms[own_numbers],
            1.0 if randoms is None else settings.temperature, settings.most_tokens, settings.stops,
            settings.stops[0], ranks.world > 1,
        )  # fmt: skip
        answers = backend.sample(request)
        own += list(zip(numbers.tolist(), answers.tokens, answers.log_probs, answers.ended, strict=False))
    backend.model.train()
    everyone = sorted((entry for entries in ranks.gather(own) for entry in entries), key=lambda entry: entry[0])
    _, tokens, log_probs, ended = zip(*everyone, strict=True)
    return Sampled(list(tokens), list(log_probs), list(ended))
