"""The document and the table of `tunesmith plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.console import clean, number, report, show_table
from app.plan.advice import BILLION, needed_line, run_tokens, why_first
from app.plan.estimate import Row
from app.plan.hardware import GIB, Hardware
from app.plan.memory import TeacherBytes
from trainers.config.byte_text import byte_text
from trainers.config.options import TrainConfig

_USES = ("weights", "gradients", "optimizer", "gathered", "activations", "overhead")
_HEADERS = ("strategy", "mesh", "micro-batch", "largest", "fits", "GiB", *_USES, "tokens/s at most", "hours", "cost",
            "sent GiB", "bubble")  # fmt: skip
_EXPENDABLE = (
    "mesh", "overhead", "gathered", "gradients", "optimizer", "weights", "activations", "sent GiB", "largest",
    "micro-batch",
)  # fmt: skip


def as_document(
    rows: Sequence[Row], config: TrainConfig, hardware: Hardware, counted: Mapping[str, Any],
    needed: tuple[Row, int] | None,
) -> dict[str, Any]:  # fmt: skip
    """The plan as plain values."""
    fewest = None if needed is None else {**needed[0].as_json(), "global_batch_size": needed[1]}
    return {
        "rows": [row.as_json() for row in rows],
        "model": config.model_name_or_path, "method": config.method,
        "parameters": int(counted["whole"]["parameters"]),
        "teacher": config.teacher, "teacher_parameters": int(TeacherBytes.of(counted).parameters),
        "devices": {"kind": hardware.kind, "count": hardware.processes, "memory_gib": hardware.memory / GIB,
                    "machines": hardware.machines,
                    "flops_per_second": hardware.flops or (counted["flops_per_second"] if hardware.is_local else None)},
        "global_batch_size": config.global_batch_size, "max_length": config.max_length,
        "tokens": run_tokens(config), "why": why_first(rows), "needed": fewest,
        "advice": _advice(rows, config, hardware, needed), "notes": _notes(hardware),
        "assumed": "; ".join([hardware.assumed(), *_ignored(config, counted)]),
    }  # fmt: skip


def _ignored(config: TrainConfig, counted: Mapping[str, Any]) -> list[str]:
    """What affects memory, traffic or time and is not in the estimate."""
    choices = {
        "activation_offloading": config.activation_offloading,
        "ddp_comm_hook": config.ddp_comm_hook != "none",
        "the extra forward pass of load balancing (about a third more time)": counted["load_balancing"],
    }
    return [f"{name} is not estimated" for name, chosen in choices.items() if chosen]


def _notes(hardware: Hardware) -> list[str]:
    """What the plan leaves out."""
    if not hardware.left_out:
        return []
    every = ",".join(map(str, sorted([*hardware.gpu_ids, *hardware.left_out])))
    several = len(hardware.left_out) > 1
    listed = ", ".join(map(str, hardware.left_out))
    return [
        f"GPU{'s' * several} {listed} left out: other programs use {'them' if several else 'it'}; --gpus {every} plans "
        f"with {'them' if several else 'it'} anyway"
    ]


def _advice(
    rows: Sequence[Row], config: TrainConfig, hardware: Hardware, needed: tuple[Row, int] | None
) -> str:  # fmt: skip
    """What to do if nothing fits; empty if something does."""
    if any(row.fits for row in rows):
        return ""
    if all(row.fits is None for row in rows):
        return "no strategy could be estimated; see the reasons above"
    if hardware.kind == "cpu":
        return "nothing fits: try --method lora or qlora, a smaller micro-batch, --gradient_checkpointing true"
    return needed_line(needed, config, hardware)


def show(rows: Sequence[Row], document: Mapping[str, Any]) -> None:
    """Prints the table, the reasons, the assumptions and the advice on stdout."""
    devices, tokens = document["devices"], document["tokens"]
    devices_label = "processes on the CPU" if devices["kind"] == "cpu" else "GPUs"
    machines = f" in {devices['machines']} machines" if devices["machines"] > 1 else ""
    report(clean(f"{document['model']}, method={document['method']}, {document['parameters'] / 1e9:.2f}B parameters"))
    if document["teacher_parameters"]:
        size = f"{document['teacher_parameters'] / 1e9:.2f}B parameters"
        beside = f"teacher: {document['teacher']}" if document["teacher"] else "copy of the initial model"
        report(clean(f"{beside}, {size}; its weights are among the weights"))
    memory = byte_text(devices["memory_gib"] * GIB)
    report(f"{devices['count']} {devices_label} of {memory}{machines}, global batches of "
           f"{document['global_batch_size']} rows of {document['max_length']} tokens")  # fmt: skip
    report("")
    estimated = [row for row in rows if row.seconds is not None]
    headers = [name for name in _HEADERS if name != "cost" or any(row.cost is not None for row in rows)]
    show_table(headers, [[_cells(row)[name] for name in headers] for row in estimated], _EXPENDABLE)
    report("")
    length = f"the {tokens:,} tokens of the run" if tokens else f"{BILLION:,} tokens"
    report(
        f"hours{' and cost' if 'cost' in headers else ''} are for {length}; largest: the largest micro-batch that fits"
    )
    for row in rows:
        if row.reason:
            report(clean(f"{row.strategy}: {row.reason}").replace("\n", " "))
    for line in document["notes"]:
        report(line)
    report(f"assumed: {document['assumed']}")
    if document["why"]:
        report(clean(document["why"]))
        report(clean(f"best: {rows[0].command}"))
    else:
        report(clean(document["advice"]))


def _cells(row: Row) -> dict[str, str]:
    """The cells of a row, by header."""
    return {
        "strategy": row.strategy, "mesh": str(row.sizes), "micro-batch": str(row.micro_batch),
        "largest": "-" if row.largest is None else str(row.largest),
        "fits": {True: "yes", False: "no", None: "?"}[row.fits],
        "GiB": _gib(row.total) if row.memory else "-",
        **{name: _gib(row.memory[name]) if row.memory else "-" for name in _USES},
        "tokens/s at most": "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        "hours": "-" if row.hours is None else number(row.hours, 2),
        "cost": "-" if row.cost is None else number(row.cost, 2),
        "sent GiB": number((row.sent or 0.0) / GIB, 2),
        "bubble": "-" if row.bubble is None else f"{row.bubble:.0%}",
    }  # fmt: skip


def _gib(size: float) -> str:
    return number(size / GIB, 1 if size >= 10 * GIB else 2)
