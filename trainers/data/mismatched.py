"""Prompts with the answers of other examples, on which KTO estimates how far the model is from the initial one.

Which answer a prompt gets depends on the data set alone, and each answer is taken once. So the log-probabilities under
the initial model can be computed once, before the first step, and are the same under every strategy, batch size and
seed. Examples side by side in the data often share a prompt, and a step has too few examples to choose from if rows are
long: answers rotate by one along a permutation of the full data set; in a stream, of the window. Imports no torch.
"""

from __future__ import annotations

import hashlib

import numpy as np

from trainers.config.mistakes import ConfigError
from trainers.data.cache import TokenSet

_SEED = 2402_01306


class Mismatched:
    """The mismatched document of each example, built from its prompt and another answer when it is read.

    A document ends where the longest one of the data does, so that what fits the data fits these. What comes before the
    first trained token is the prompt.

    Args:
        base: the examples, one document each.

    Raises:
        ConfigError: if there is no other example.
    """

    def __init__(self, base: TokenSet):
        count = len(base)
        if count < 2:
            raise ConfigError(
                f"{base.where(0)}: objective=kto compares with the answers of other examples, and this is the only "
                "one (of its window, if streamed); add data, raise streaming_window, or use "
                "loss_type=apo_zero_unpaired"
            )
        self.base = base
        order = np.random.Generator(np.random.PCG64(_SEED)).permutation(count)
        self.partners = np.empty(count, dtype=np.int64)
        self.partners[order] = np.roll(order, 1)
        self.prompts = base.first_trained()
        answers = (base.lengths - self.prompts)[self.partners]
        self.lengths = np.minimum(self.prompts + answers, base.lengths.max())
        self.trained = base.trained[self.partners]
        for index in np.flatnonzero(self.lengths < self.prompts + answers).tolist():
            self.trained[index] = self.document(index)[1].sum()
        self.fingerprint = hashlib.sha256(f"mismatched {base.fingerprint}".encode()).hexdigest()

    def document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and the mask of trained tokens of one document."""
        prompt, partner = int(self.prompts[index]), int(self.partners[index])
        start = int(self.prompts[partner])
        answer = slice(start, start + int(self.lengths[index]) - prompt)
        pairs = zip(self.base.document(index), self.base.document(partner), strict=True)
        tokens, mask = (np.concatenate([own[:prompt], other[answer]]) for own, other in pairs)
        return tokens, mask

    def gather(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same for several documents, concatenated."""
        tokens, masks = zip(*map(self.document, indices.tolist()), strict=True)
        return np.concatenate(tokens), np.concatenate(masks)

    def where(self, index: int) -> str:
        """File and line of the prompt."""
        return self.base.where(index)
