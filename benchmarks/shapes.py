"""Models for benchmarks: real shapes, random weights, the embedded model's tokenizer. Downloads nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trainers.config.presets import model_presets
from trainers.embedded import BASE_DIR

ARCHITECTURES = {
    "135M": "smollm2-135m", "360M": "smollm2-360m", "qwen3-0.6b": "qwen3-0.6b", "qwen3-1.7b": "qwen3-1.7b",
    "llama-3.1-8b": "llama-3.1-8b",
}  # fmt: skip
NAMES = ("embedded", "24M", "360M-16", *ARCHITECTURES)
TINY = "tiny-"
"""Prefix of a name: two narrow layers of that model, for tests."""
_24M = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 6,
        "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 8192}  # fmt: skip
_16_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 60}
"""For "360M-16": the heads of 360M, of which it has 15, divided by tensor parallelism of 2 and 4."""
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048}  # fmt: skip


def model_folder(name: str, folder: Path, layers: int | None = None) -> Path:
    """The folder of a model that any tool can load: the embedded one, one of 24M parameters, or a real shape.

    Weights are fp32, or bf16 in models of more than half a billion parameters.

    Args:
        name: one of `NAMES`, or `TINY` and one of `ARCHITECTURES`.
        folder: parent folder, in which it is created once.
        layers: number of layers instead of its own; not for the embedded model, whose weights are stored.
    """
    if name == "embedded":
        return BASE_DIR
    target = folder / (name if layers is None else f"{name}-{layers}")
    if not target.exists():
        unfinished = target.with_name(f"{target.name}.unfinished")
        shutil.copytree(BASE_DIR, unfinished, ignore=shutil.ignore_patterns("model.safetensors"))
        config = _config(name) | ({} if layers is None else {"num_hidden_layers": layers})
        (unfinished / "config.json").write_text(json.dumps(config))
        _write_weights(unfinished)
        unfinished.rename(target)
    return target


def _config(name: str) -> dict[str, Any]:
    if name == "24M":
        return {**json.loads((BASE_DIR / "config.json").read_text()), **_24M}
    divided = _16_HEADS if name == "360M-16" else {}
    published = model_presets(ARCHITECTURES[name.removeprefix(TINY).removesuffix("-16")]).model
    assert published
    shape = published.config
    classes = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    tiny = _TINY if name.startswith(TINY) else {}
    return {**shape, **divided, **tiny, "architectures": [classes[shape["model_type"]]]}


def empty_model(folder: Path) -> Any:
    """The model of a folder on the meta device, without memory for its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def _write_weights(folder: Path) -> None:
    """Writes random matrices, norms of one, biases of zero; on the GPU if there is one, as 8B take minutes on a CPU."""
    import torch
    from safetensors.torch import save_file

    model = empty_model(folder)
    dtype = torch.bfloat16 if model.num_parameters() > 500_000_000 else torch.float32
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(0)
    weights = {}
    for name, shape in ((name, weight.shape) for name, weight in model.named_parameters()):  # tied weights appear once
        drawn = torch.empty(shape, dtype=dtype, device=generator.device)
        if len(shape) > 1:
            drawn.normal_(0.0, model.config.initializer_range, generator=generator)
        else:
            drawn.fill_(0.0 if name.endswith("bias") else 1.0)
        weights[name] = drawn.cpu()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # for the runs, which are other processes
