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
import numpy.typing as npt


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
    data = json.loads(Path(probes).read_text(encoding="utf-8"))
    documents = data["documents"]
    reader = _Reader(file, max(len(document["ids"]) for document in documents))
    total, count = 0.0, 0
    for document in documents:
        logits = reader.logits(document["ids"])
        for position in document["positions"]:
            row = logits[position]
            total += row.max() + np.log(np.exp(row - row.max()).sum()) - row[document["ids"][position + 1]]
            count += 1
    others = sum(reader.tokenize(text) != ids for text, ids in data["texts"])
    return {"loss": float(total / count), "other_tokens": others}


class _Reader:
    """A GGUF file in llama.cpp on the CPU; the process that has it ends soon, so nothing is freed.

    By its C interface: the class of llama-cpp-python has no option for weights as they are in the file. Those that
    llama.cpp would arrange for instructions such as AMX give other sums, and crash where a virtual machine lists
    instructions that it cannot run.

    Args:
        file: The file.
        longest: The number of tokens of the longest document.
    """

    def __init__(self, file: str, longest: int):
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers, options.use_extra_bufts = 0, False
        model = llama_cpp.llama_model_load_from_file(os.fsencode(file), options)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = longest
        settings.type_k = settings.type_v = 0  # in fp32, so that only the weights are rounded
        self._context = llama_cpp.llama_init_from_model(model, settings) if model else None
        if not self._context:
            raise SystemExit(f"llama.cpp cannot load {Path(file).name}")
        self._vocabulary = llama_cpp.llama_model_get_vocab(model)
        self._size = llama_cpp.llama_vocab_n_tokens(self._vocabulary)

    def logits(self, ids: list[int]) -> npt.NDArray[np.float64]:
        """`[length, vocabulary]` logits after each token."""
        api = self._api
        api.llama_memory_clear(api.llama_get_memory(self._context), True)
        batch = api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for index, token in enumerate(ids):
            batch.token[index], batch.pos[index], batch.logits[index] = token, index, 1
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
        if (status := api.llama_decode(self._context, batch)) != 0:
            raise SystemExit(f"llama.cpp cannot compute {len(ids)} tokens (status {status})")
        rows = [api.llama_get_logits_ith(self._context, index) for index in range(len(ids))]
        return np.array([np.ctypeslib.as_array(row, shape=(self._size,)) for row in rows], dtype=np.float64)

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a text, special ones included where it spells them."""
        encoded = text.encode()
        room = len(encoded) + 8
        tokens = (self._api.llama_token * room)()
        count = self._api.llama_tokenize(self._vocabulary, encoded, len(encoded), tokens, room, False, True)
        return list(tokens[: max(0, count)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
