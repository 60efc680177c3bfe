"""Loads a tokenizer and encodes a sample with it in a process of its own, before any other process does.

A broken or hostile tokenizer then hits the limits of this process, not of the one that needs it. Imports nothing slow.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from trainers.run.json_file import load_json
from trainers.run.process_limits import (
    LOAD_SECONDS,
    OUT_OF_MEMORY,
    TOKENIZER_BYTES,
    expect_death,
    memory_limit,
    time_limit,
)

SAMPLE = "A few words, 3 lines and\n\tsome signs: {\"a\": [1.5, 'b']} # ü 中文 🙂\n" * 20
_CONVERTER_BYTES = 16 << 30  # of address space: libraries that a conversion imports map some GB


def main(folder: Path) -> None:
    """Exits with status 0 if the tokenizer works, or only raises an exception, which any process can handle."""
    expect_death()
    file = folder / "tokenizer.json"
    size = TOKENIZER_BYTES if file.is_file() else TOKENIZER_BYTES + _CONVERTER_BYTES
    # Any other error occurs again in the process that needs the tokenizer, and is reported there.
    with contextlib.suppress(Exception), memory_limit(size), time_limit(LOAD_SECONDS):
        try:
            _use(_load(file) if file.is_file() else _convert(folder))
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
    os._exit(0)  # a large vocabulary takes long to free


def _load(file: Path) -> Any:
    """Loads it as transformers does, with the added tokens that other files list."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    with contextlib.suppress(OSError, ValueError, AttributeError):
        listed = load_json(file.with_name("tokenizer_config.json")).get("added_tokens_decoder", {})
        tokenizer.add_tokens([token["content"] for token in listed.values()])
    with contextlib.suppress(OSError, ValueError):
        tokenizer.add_tokens(list(load_json(file.with_name("added_tokens.json"))))
    return tokenizer


def _convert(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).backend_tokenizer


def _use(tokenizer: Any) -> None:
    tokenizer.decode(tokenizer.encode("a").ids)
    tokenizer.decode(tokenizer.encode(SAMPLE).ids, skip_special_tokens=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
