"""Models to measure with: real shapes, random weights, the embedded model's tokenizer. Nothing is downloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.launching import ROOT
from trainers.embedded import BASE_DIR

NAMES = ("embedded", "24M", "135M")
_24M = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 6,
        "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 8192}  # fmt: skip


def model_folder(name: str, folder: Path) -> Path:
    """A model that any tool loads: the embedded one, one of 24M parameters, or SmolLM2-135M's shape.

    Args:
        folder: where it is made, once.
    """
    if name == "embedded":
        return BASE_DIR
    made = folder / name
    if made.exists():
        return made
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    base = json.loads((BASE_DIR / "config.json").read_text())
    smol = json.loads((ROOT / "tests/unit/architectures/smollm2-135m.json").read_text())["config"]
    shutil.copytree(BASE_DIR, made)
    (made / "model.safetensors").unlink()
    config = {**base, **_24M} if name == "24M" else {**smol, "architectures": ["LlamaForCausalLM"]}
    (made / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made), dtype=torch.float32).save_pretrained(made)
    return made
