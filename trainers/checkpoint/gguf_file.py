"""What is known of a GGUF file that was written beside an export. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainers.checkpoint.modelfile import MODELFILE

SUFFIX = ".gguf"
_BLOCK = 256
"""Weights of a row that a k-quant takes together."""


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file of an export.

    Args:
        name: File name.
        type: Its type, such as `q4_k_m`.
        matrices: How many matrices it has of each type: llama.cpp mixes them, and takes others for short rows.
        loss: Its loss in llama.cpp; None if it was not computed.
        trainer_loss: The trainer's loss on the same tokens.
        other_tokens: How many of a few texts llama.cpp splits into other tokens; None if that was not tried.
    """

    name: str
    type: str
    matrices: Mapping[str, int] = field(default_factory=dict)
    loss: float | None = None
    trainer_loss: float | None = None
    other_tokens: int | None = None

    @property
    def difference(self) -> float | None:
        """By how much its loss exceeds the trainer's; None if it was not computed."""
        return None if self.loss is None or self.trainer_loss is None else self.loss - self.trainer_loss

    def as_json(self) -> dict[str, Any]:
        """Its record in `tunesmith.json`."""
        return {**asdict(self), "difference": self.difference}

    def __str__(self) -> str:
        text = f"{self.name}: {', '.join(f'{count} matrices in {name}' for name, count in self.matrices.items())}"
        others = sum(count for name, count in self.matrices.items() if not name.endswith("_K"))
        if "_k" in self.type and others:
            text += f" ({others} because their rows are no multiple of {_BLOCK} weights, which k-quants need)"
        if self.difference is None:
            return f"{text}; not compared with the trainer"
        text += f"; loss in llama.cpp {self.loss:.6f}, the trainer's {self.trainer_loss:.6f}"
        if self.other_tokens:
            text += "; llama.cpp splits some text into other tokens than the tokenizer of the run"
        return text


def gguf_section(files: Sequence[GgufFile]) -> str:
    """The section of the model card; empty without files."""
    if not files:
        return ""
    rows = [
        f"| {file.name} | {', '.join(f'{count} {name}' for name, count in file.matrices.items())} | "
        f"{'not measured' if file.loss is None else f'{file.loss:.5g}'} | "
        f"{'' if file.difference is None else f'{file.difference:+.2g}'} |"
        for file in files
    ]
    head = "| file | matrices | loss in llama.cpp | more than the trainer's |\n|---|---|---|---|"
    notes = []
    if any(file.other_tokens for file in files):
        notes = ["llama.cpp splits some text into other tokens than the tokenizer that the model was trained with."]
    use = f"`llama-server -m {files[0].name} --jinja`, or `ollama create NAME -f {MODELFILE}`."
    return "\n\n".join(["## GGUF", "\n".join([head, *rows]), *notes, use])
