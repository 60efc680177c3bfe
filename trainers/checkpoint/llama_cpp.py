"""Calls llama.cpp, in a process of its own because it aborts on errors: `python -m trainers.checkpoint.llama_cpp`.

Prints a JSON document. `quantise IN OUT TYPE` writes a GGUF file from another; `examine FILE GGUF_PY [--no_bos]` says
what is in one, with llama.cpp's own `gguf` module in the folder GGUF_PY; `measure FILE PROBES` computes the loss.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def main(argv: list[str]) -> int:
    """Runs a command; returns the exit status."""
    command, *arguments = argv
    commands: dict[str, Callable[..., dict[str, Any]]]
    commands = {"quantise": quantise, "examine": examine, "measure": measure}
    document = commands[command](*arguments)
    print(json.dumps(document), flush=True)
    return 0


def quantise(source: str, target: str, kind: str) -> dict[str, Any]:
    """Quantises a GGUF file.

    Args:
        source: File in f32, f16 or bf16.
        target: File to write.
        kind: Type, such as `q4_k_m`.
    """
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = _file_type(kind)
    options.nthread = len(os.sched_getaffinity(0))
    status = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(options))
    if status != 0:
        raise SystemExit(f"llama.cpp cannot quantise {Path(source).name} to {kind} (status {status})")
    return {}


def _file_type(kind: str) -> int:
    import llama_cpp

    names = {name.lower(): name for name in dir(llama_cpp) if name.startswith("LLAMA_FTYPE_MOSTLY_")}
    return int(getattr(llama_cpp, names[f"llama_ftype_mostly_{kind}"]))


def examine(file: str, gguf_py: str, *flags: str) -> dict[str, Any]:
    """Reads a GGUF file.

    Args:
        file: Its path.
        gguf_py: Folder of llama.cpp's `gguf` module.
        flags: `--no_bos` changes the file, so that no prompt begins with the beginning-of-sequence token.

    Returns:
        `architecture`; `matrices`, how many there are of each type; `add_bos`, whether prompts begin with the
        beginning-of-sequence token; `template`, the chat template or None.
    """
    sys.path.insert(0, gguf_py)
    from gguf import GGUFReader

    reader = GGUFReader(file, "r+" if "--no_bos" in flags else "r")

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    adds = value("tokenizer.ggml.add_bos_token")
    if adds and "--no_bos" in flags:
        field = reader.get_field("tokenizer.ggml.add_bos_token")
        field.parts[field.data[0]][0] = adds = False
        reader.data.flush()
    matrices = Counter(
        tensor.tensor_type.name for tensor in reader.tensors if sum(size > 1 for size in tensor.shape) > 1
    )
    return {
        "architecture": value("general.architecture"),
        "matrices": dict(matrices),
        "add_bos": value("tokenizer.ggml.model") == "llama" if adds is None else bool(adds),
        "template": value("tokenizer.chat_template"),
    }


def measure(file: str, probes: str) -> dict[str, Any]:
    """Computes the mean loss of a GGUF file per trained token, and compares its tokenizer.

    Args:
        file: The file.
        probes: JSON file: `documents` have `ids`, their tokens, and `positions`, those before trained tokens; `texts`
            are pairs of a text and its tokens.

    Returns:
        `loss`, and `other_tokens`, the number of texts that llama.cpp splits into other tokens.
    """
    from llama_cpp import Llama

    data = json.loads(Path(probes).read_text(encoding="utf-8"))
    documents = data["documents"]
    longest = max(len(document["ids"]) for document in documents) + 8
    # Keys and values in fp32, so that only the weights are rounded.
    model = Llama(file, n_ctx=longest, n_batch=longest, n_ubatch=longest, logits_all=True, type_k=0, type_v=0,
                  n_gpu_layers=0, verbose=False)  # fmt: skip
    total, count = 0.0, 0
    for document in documents:
        model.reset()
        model.eval(document["ids"])
        for position in document["positions"]:
            logits = np.asarray(model.scores[position], dtype=np.float64)
            top = logits.max()
            total += top + float(np.log(np.exp(logits - top).sum())) - logits[document["ids"][position + 1]]
            count += 1
    split = [model.tokenize(text.encode(), add_bos=False, special=True) for text, _ in data["texts"]]
    others = sum(own != ids for own, (_, ids) in zip(split, data["texts"], strict=True))
    return {"loss": float(total / count), "other_tokens": others}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
