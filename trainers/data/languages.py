"""The languages of the trained text, by py3langid, of a sample of the documents. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trainers.config.mistakes import ConfigError
from trainers.data.cache import TokenSet
from trainers.data.progress import Progress

UNCLEAR = "unclear"
_TOKENS = 500  # of a document that are looked at
_LETTERS = 12  # in shorter texts, languages cannot be told apart
_CONFIDENCE = 0.5


def language_table(
    documents: TokenSet, decode: Callable[[npt.NDArray[np.int32]], str], count: int, seed: int
) -> dict[str, Any]:
    """How many documents, and how many of their trained tokens, are in each language.

    A document counts for the language of the trained text at its start (of all its text, if none is trained).

    Args:
        documents: The data.
        decode: Text of token ids, without special tokens.
        count: Documents to look at, drawn at random.
        seed: Seed of the draw.

    Returns:
        `sampled` and `documents`, counts; the `seed`; `languages`: of each its `language` as an ISO 639-1 code, or
        `unclear`, `documents` and `tokens` of the sample and their `share` and `token_share`; the largest first.

    Raises:
        ConfigError: if py3langid is not installed.
    """
    identify = _identifier()
    total = len(documents)
    drawn = np.random.Generator(np.random.PCG64(seed)).choice(total, min(count, total), replace=False)
    sample = np.sort(drawn).tolist()
    counts, tokens = Counter[str](), Counter[str]()
    with Progress("telling languages apart", len(sample)) as progress:
        for number in sample:
            ids, mask = documents.document(number)
            trained = ids[mask] if mask.any() else ids
            language = identify(decode(trained[:_TOKENS]))
            counts[language] += 1
            tokens[language] += len(trained)
            progress.add(1)
    table = [
        {
            "language": language,
            "documents": count_of,
            "share": count_of / len(sample),
            "tokens": tokens[language],
            "token_share": tokens[language] / tokens.total(),
        }
        for language, count_of in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    ]
    return {"sampled": len(sample), "documents": total, "seed": seed, "languages": table}


def _identifier() -> Callable[[str], str]:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise ConfigError("languages are told apart by py3langid; run `pip install 'tunesmith[data]'`") from None
    model = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=_CONFIDENCE)

    def identify(text: str) -> str:
        if sum(map(str.isalpha, text)) < _LETTERS and not any(ord(letter) > 0x2E80 for letter in text):
            return UNCLEAR
        language = str(model.classify(text)[0])
        return UNCLEAR if language == "und" else language

    return identify
