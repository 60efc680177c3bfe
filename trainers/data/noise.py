"""NEFTune (https://arxiv.org/abs/2310.05914): uniform noise on the embeddings of training tokens.

The noise of a token is a function of seed, step, document, position and channel, so that packing, micro-batches and
strategies have no part in it. Imports no torch until a batch is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainers.data.layout import to_device

if TYPE_CHECKING:  # the pre-flight check plans batches without waiting for torch
    import torch

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64."""
_AT_ONCE = 2**22
"""Random numbers to make at once; each takes 16 bytes for a moment."""


@dataclass(frozen=True)
class NoiseRule:
    """Which noise a run adds.

    Args:
        alpha: the noise is uniform in plus or minus alpha / sqrt(tokens of the document x channels).
        seed: the run's seed.
    """

    alpha: float
    seed: int

    def keys(self, step: int, documents: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """`[tokens]` int64 key of each token.

        Args:
            step: the step, from 0.
            documents: `[tokens]` number of the document of each token.
            positions: `[tokens]` its position there.
        """
        keys = np.full(len(positions), self.seed, dtype=np.uint64)
        steps = np.full(len(positions), step, dtype=np.uint64)  # arrays wrap around without a warning
        for numbers in (steps, documents.astype(np.uint64), positions.astype(np.uint64)):
            keys = _mixed(keys + numbers * np.uint64(_STEP))
        return keys.view(np.int64)


def _mixed(keys: np.ndarray) -> np.ndarray:
    """SplitMix64's bijection of 64-bit numbers."""
    keys = (keys + np.uint64(_STEP)).astype(np.uint64)
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(_FIRST)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(_SECOND)
    return keys ^ (keys >> np.uint64(31))


class TokenNoise(NamedTuple):
    """The noise of a micro-batch. Integers, as wrappers round floating-point arguments.

    Args:
        keys: `[batch, sequence]` from `NoiseRule.keys`; any value for padding.
        lengths: `[batch, sequence]` tokens of the document of each token; 0 for padding, which gets no noise.
        alpha: see `NoiseRule`.
    """

    keys: torch.Tensor
    lengths: torch.Tensor
    alpha: float

    def to(self, device: torch.device) -> TokenNoise:
        """The same on a device."""
        return TokenNoise(to_device(self.keys, device), to_device(self.lengths, device), self.alpha)

    def added_to(self, embeddings: torch.Tensor) -> torch.Tensor:
        """`[batch, sequence, channels]` embeddings with noise."""
        import torch

        channels = embeddings.shape[-1]
        steps = _wrapped(torch.arange(1, channels + 1, device=embeddings.device), _STEP)
        flat, keys = torch.empty_like(embeddings).view(-1, channels), self.keys.reshape(-1, 1)
        size = max(1, _AT_ONCE // channels)
        for start in range(0, len(keys), size):
            bits = _wrapped(_shifted(keys[start : start + size] + steps, 30), _FIRST)
            bits = _wrapped(_shifted(bits, 27), _SECOND)
            # The upper 24 bits are a fraction that fp32 holds exactly.
            uniform = ((bits >> 40) & 0xFFFFFF).float() / 2**23 - 1
            lengths = self.lengths.reshape(-1, 1)[start : start + size].float()
            scale = torch.where(lengths > 0, self.alpha * torch.rsqrt(lengths * channels), 0.0)
            flat[start : start + size] = (uniform * scale).to(flat.dtype)
        return embeddings + flat.view_as(embeddings)


def _wrapped(numbers: torch.Tensor, factor: int) -> torch.Tensor:
    """The lower 64 bits of a product, in int64."""
    return numbers * (factor - 2**64 if factor >= 2**63 else factor)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """`x ^ (x >> bits)`, as of unsigned numbers."""
    return numbers ^ ((numbers >> bits) & ((1 << (64 - bits)) - 1))
