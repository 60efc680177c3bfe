"""`tunesmith plan --table`: what models of 1B to 175B parameters need on 1 to 1,024 GPUs.

Nothing is counted with torch here: weights follow from the shapes, and activations from a formula that was fitted to
the counts of `trainers/tools/memory_estimate.py` (bf16, gradient checkpointing, all weights trained).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from app.console import number, report, show_table
from app.plan.estimate import Row
from app.plan.hardware import GIB, MOST_GPUS, PER_MACHINE, Hardware
from app.plan.search import Request, best_rows
from trainers.config.options import TrainConfig
from trainers.config.validation import build
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.strategy import load_strategy

LENGTH, BATCH, MICRO_BATCH = 2048, 1024, 8
STRATEGIES = ("single", "ddp", "fsdp2", "hsdp", "tp", "fsdp2_tp", "hsdp_tp", "pp", "pp_interleaved", "pp_fsdp2", "3d")
"""Those without offload, which would need the size of the host's memory; ZeRO's stages are those of ddp and FSDP."""
LINK, MACHINE_LINK = 200.0, 25.0
"""GB/s per GPU: NVLink inside a machine, 200 Gb/s per GPU between machines."""
_FP32, _HEAD, _CHUNK, _WIDE, _INNER = 4, 16.25, 0.19 * GIB, 31.5, 12.1
"""Bytes of fp32; of a token per hidden value while the head runs, and of its chunk of logits; and of a token per hidden
value, and per value of the feed-forward layer, while a layer is recomputed."""


@dataclass(frozen=True)
class Shape:
    """A Llama-like model: gated feed-forward layers, no biases.

    Args:
        name: how the field calls its size.
        hidden: width of the hidden states.
        layers: number of layers.
        heads: attention heads.
        key_heads: key-value heads.
        inner: width of the feed-forward layers.
        vocab_size: size of the vocabulary.
        tied: whether embedding and head share a weight.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocab_size: int
    tied: bool = False

    @property
    def layer_matrices(self) -> int:
        """Parameters in the matrices of a layer."""
        attention = 2 * self.hidden * self.hidden * (1 + self.key_heads / self.heads)
        return int(attention) + 3 * self.hidden * self.inner

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        outside = self.vocab_size * self.hidden * (1 if self.tied else 2) + self.hidden
        return outside + self.layers * (self.layer_matrices + 2 * self.hidden)

    def counted(self) -> dict[str, Any]:
        """What `trainers/tools/memory_estimate.py` would count, computed from the shape."""
        common = gcd(self.heads, self.key_heads, self.inner)
        sizes = range(2, MOST_GPUS + 1)
        limits = {
            "tp": {str(size): None if common % size == 0 else f"tp={size} does not divide the heads" for size in sizes},
            "cp": dict.fromkeys(map(str, sizes)),
            "sp": {str(size): None if self.heads % size == 0 else f"sp={size} does not divide the heads"
                   for size in sizes},
            "ep": dict.fromkeys(map(str, sizes), "ep divides experts, and these models have none"),
            "stages": {str(size): None if size <= self.layers else f"{size} stages for {self.layers} layers"
                       for size in sizes},
        }  # fmt: skip
        head = self.vocab_size * self.hidden
        return {
            "layers": self.layers, "hidden": self.hidden, "heads": self.heads, "key_heads": self.key_heads,
            "head_size": self.hidden // self.heads, "words": self.vocab_size, "tied": self.tied,
            "matmul_trained": self.layers * self.layer_matrices + head, "matmul_frozen": 0, "all_linear": True,
            "layer_matmul": self.layer_matrices, "flops_per_second": None, "load_balancing": False,
            "process_bytes": 0.0, "whole": self._weights(1), "stored_dtype": "bfloat16", "limits": limits,
            "cases": {f"{tp}:1:1:1:{rows}": self._case(tp, rows) for tp in (1, PER_MACHINE)
                      for rows in (1, 2, 4, 8, 16, 1024)},
        }  # fmt: skip

    def _weights(self, tp: int) -> dict[str, float]:
        vectors = (2 * self.layers + 1) * self.hidden
        outside = self.vocab_size * self.hidden * (1 if self.tied else 2) / tp + self.hidden
        inside = self.layers * (self.layer_matrices / tp + 2 * self.hidden)
        return {"parameters": inside + outside, "parameters_outside": outside, "vectors": vectors, "scales": 0.0,
                "trained_inside": inside, "trained_outside": outside, "frozen_inside": 0.0,
                "frozen_outside": 0.0}  # fmt: skip

    def _case(self, tp: int, rows: int) -> dict[str, float]:
        tokens = rows * LENGTH
        gradients = (2.5 if self.tied else 2) * self.vocab_size * self.hidden * _FP32 / tp
        head = gradients + _CHUNK + _HEAD * self.hidden * tokens
        layer = tokens * (_WIDE * self.hidden + _INNER * self.inner / tp)
        return {**self._weights(tp), "fixed": max(head, layer), "layer": float(tokens * self.hidden * _FP32),
                "later": 0.0, "heap_fixed": 0.0, "heap_layer": 0.0}  # fmt: skip


SHAPES = (
    Shape("1B", 2048, 16, 32, 8, 8192, 128_256, tied=True),
    Shape("7B", 4096, 32, 32, 32, 11_008, 32_000),
    Shape("13B", 5120, 40, 40, 40, 13_824, 32_000),
    Shape("70B", 8192, 80, 64, 8, 28_672, 128_256),
    Shape("175B", 12_288, 96, 96, 96, 32_768, 50_304),
)
"""Llama 3.2 1B, Llama 2 7B and 13B, Llama 3 70B, and GPT-3's width and depth with gated layers."""


def scale_config() -> TrainConfig:
    """How the models of the table are trained."""
    return build({
        "model_name_or_path": "embedded", "dataset_name": "embedded", "method": "full", "mixed_precision": "bf16",
        "gradient_checkpointing": True, "max_length": LENGTH, "global_batch_size": BATCH,
        "per_device_train_batch_size": MICRO_BATCH,
    })  # fmt: skip


def scale_rows(hardware: Hardware) -> list[dict[str, Any]]:
    """The best strategy of each model on each number of GPUs, as plain values; `needs` where nothing fits."""
    strategies, config, rows = [load_strategy(name) for name in STRATEGIES], scale_config(), list[dict[str, Any]]()
    for shape in SHAPES:
        counted, pending = shape.counted(), list[dict[str, Any]]()
        count = 1
        while count <= MOST_GPUS:
            sized = _sized(hardware, count)
            row = best_rows(strategies, Request(config, sized, counted))[0]
            values = _values(shape, count, row if row.fits else None)
            if not row.fits:
                pending.append(values)
            for earlier in pending if row.fits else []:
                earlier["needs"] = count
            pending = [] if row.fits else pending
            rows.append(values)
            count *= 2
    return rows


def _sized(hardware: Hardware, count: int) -> Hardware:
    machines = max(1, count // PER_MACHINE)
    return Hardware("gpu", count, hardware.memory, is_local=False, link=hardware.link or LINK, machines=machines,
                    machine_link=hardware.machine_link or MACHINE_LINK, flops=hardware.flops)  # fmt: skip


def _values(shape: Shape, count: int, row: Row | None) -> dict[str, Any]:
    values = {"model": shape.name, "parameters": shape.parameters, "gpus": count, "needs": None}
    return values | (row.as_json() if row else dict.fromkeys(Row("", MeshSizes()).as_json()))


def show_scale(rows: Sequence[dict[str, Any]], hardware: Hardware) -> None:
    """Prints the table on stdout."""
    report(f"all weights trained in bf16 with gradient checkpointing, global batches of {BATCH} rows of {LENGTH} "
           f"tokens, GPUs of {hardware.memory / GIB:.0f} GiB, machines of {PER_MACHINE}, no offload")  # fmt: skip
    report("")
    headers = ("model", "GPUs", "strategy", "mesh", "GiB per GPU", "micro-batch", "largest", "tokens/s at most")
    show_table(headers, [_cells(row) for row in rows])
    report("")
    report(f"assumed: {scale_assumed(hardware)}")


def scale_assumed(hardware: Hardware) -> str:
    """The assumptions of the table."""
    analytical = "weights from the shapes, activations by a formula fitted to counted models"
    return f"{analytical}; {_sized(hardware, MOST_GPUS).assumed()}"


def _cells(row: dict[str, Any]) -> list[str]:
    name, count = row["model"], f"{row['gpus']:,}"
    if row["strategy"] is None:
        needs = f"needs at least {row['needs']:,} GPUs" if row["needs"] else f"does not fit on {MOST_GPUS:,}"
        return [name, count, needs, "", "", "", "", ""]
    sizes = " x ".join(f"{axis} {size}" for axis, size in row["sizes"].items() if size > 1) or "1"
    return [name, count, row["strategy"], sizes, number(row["memory_gib"]["total"], 1),
            str(row["per_device_train_batch_size"]), str(row["largest_micro_batch"]),
            f"{row['tokens_per_second']:,.0f}"]  # fmt: skip
