"""What a plan tells the user to do: the command of each row, why the first is the first, and what would fit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from app.command_line import Args
from app.plan.estimate import CLOSE, Row
from app.plan.hardware import Hardware
from trainers.config.byte_text import byte_text
from trainers.config.options import MESH_OPTIONS, TrainConfig
from trainers.strategy.micro_batch import OPTION
from trainers.strategy.strategy import Strategy

BILLION = 10**9
_PORT = "29500"


def run_tokens(config: TrainConfig) -> int | None:
    """Tokens of the run; None if they depend on the data."""
    return config.max_steps * config.global_batch_size * config.example_tokens if config.max_steps else None


def set_price(row: Row, config: TrainConfig, price: float | None) -> None:
    """Sets the hours for all tokens of the run, or for a billion if unknown, and what they cost."""
    if row.tokens_per_second:
        row.hours = (run_tokens(config) or BILLION) / row.tokens_per_second / 3600
        row.cost = None if price is None else row.hours * row.sizes.world * price


def train_command(row: Row, strategy: Strategy, name: str, args: Args, config: TrainConfig, hardware: Hardware) -> str:
    """The line that starts a row; for several machines, with variables for what differs between them.

    Args:
        row: a row that can be trained.
        strategy: its strategy, as loaded.
        name: its name or file, as the user gave it.
        args: the user's command line, whose options are kept.
        config: the user's config.
        hardware: the hardware that the plan is made for.
    """
    request, sizes = args.request, row.sizes
    argv = ["tunesmith", "train", *([request.preset] if request.preset else [])]
    argv += ["--config", request.config] if request.config else []
    for option, value in request.options.items():
        if option not in (OPTION, "pp_size"):
            argv += [f"--{option}={value}"] if str(value).startswith("-") else [f"--{option}", str(value)]
    argv += ["--strategy", name]
    # What the file says, and the axis that takes the remaining processes, need no flag.
    for flag in MESH_OPTIONS:
        axis = flag.removesuffix("_size")
        size, written = getattr(sizes, axis), strategy.ep_size if axis == "ep" else strategy.mesh.get(axis, 1)
        taken = axis == "dp_replicate" and (strategy.distributed_type == "MULTI_GPU" or written == -1)
        if size != written and not taken:
            argv += [f"--{flag}", str(size)]
    if sizes.pp != strategy.pp_size or config.pp_size:
        argv += ["--pp_size", str(sizes.pp)]
    if OPTION in request.options or row.micro_batch != config.per_device_train_batch_size:
        argv += [f"--{OPTION}", str(row.micro_batch)]
    line = shlex.join([*argv, *_device_args(sizes.world, args.launch, hardware)])
    return line + (_machine_args(sizes.world // hardware.per_machine, config) if sizes.world > hardware.per_machine
                   else "")  # fmt: skip


def _device_args(world: int, launch: Mapping[str, str], hardware: Hardware) -> list[str]:
    ids = hardware.gpu_ids
    selected = "gpus" in launch or bool(hardware.left_out)
    if not ids or (world > len(ids) and not selected):
        return ["--num_processes", str(world)]
    chosen = selected or "num_processes" in launch
    return ["--gpus", ",".join(map(str, ids[:world]))] if chosen or world < len(ids) else []


def _machine_args(machines: int, config: TrainConfig) -> str:
    folder = "" if config.output_dir else ' --output_dir "$SHARED_FOLDER"'
    return (
        f' --num_machines {machines} --machine_rank "$RANK" --main_process_ip "$MACHINE_0" '
        f"--main_process_port {_PORT}{folder}"
    )


def why_first(rows: Sequence[Row]) -> str | None:
    """Why the first row is the first, in one sentence; None if it does not fit."""
    fitting = [row for row in rows if row.fits]
    if not fitting or fitting[0] is not rows[0]:
        return None
    first, others = fitting[0], fitting[1:]
    in_memory = [row for row in others if not row.host]
    if first.host:
        return f"{first.strategy} is first because nothing fits without offloading"
    if not in_memory:
        return f"{first.strategy} is first because it is the only one that fits" + (
            " without offload" if others else ""
        )
    limit = (first.seconds or 0.0) * (1 + CLOSE)
    equal = [row for row in in_memory if (row.seconds or 0.0) <= limit]
    if not equal:
        ratio = min(row.seconds or 0.0 for row in in_memory) / (first.seconds or 1.0)
        return f"{first.strategy} is first because it is the fastest: the next one takes {ratio:.2f} times as long"
    least, names = min(row.total for row in equal), _listed([row.strategy for row in equal])
    reason = f"needs the least memory: {byte_text(first.total)}, the others at least {byte_text(least)}"
    if least <= first.total * (1 + CLOSE):
        reason = f"is the simplest of those that need the least memory, {byte_text(first.total)}"
    return f"{first.strategy} is first because of all that are as fast within {CLOSE:.0%} (also {names}) it {reason}"


def _listed(names: Sequence[str], most: int = 4) -> str:
    extra = len(names) - most
    return ", ".join(names[:most]) + (f" and {extra} more" if extra > 0 else "")


def needed_line(needed: tuple[Row, int] | None, config: TrainConfig, hardware: Hardware) -> str:
    """What would fit where nothing does."""
    gpus = f"GPUs of {byte_text(hardware.memory)}"
    remedy = "try --method lora or qlora, a shorter max_length, or --gradient_checkpointing true"
    if needed is None:
        most = max(hardware.processes, *hardware.larger_counts(), 0)
        return f"nothing fits, not even on {most} {gpus}: {remedy}"
    row, batch = needed
    more = "" if batch == config.global_batch_size else f" with a global_batch_size of {batch}"
    return f"nothing fits; {row.sizes.world} {gpus} would do{more} ({row.strategy}, {row.sizes}); or {remedy}"
