"""`tunesmith plan`: the request, the count of the model in a program of its own, and the table."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.accelerate_launch import ROOT, launch_environment, module_argv, module_environment
from app.console import clean, number, report, report_json, show_table
from app.hardware import Devices, choose_devices, cpu_count, find_gpus
from app.launch.foreground import spinner, told_by
from app.launch.job import Mistakes, Words, for_verb, named_preset, sort_words
from app.plan.estimate import GIB, Candidate, Hardware, Row, best_first, candidate, case_of, plan_row, told_size
from trainers.config.options import MACHINE_OPTIONS, ConfigError, TrainConfig, absolute_paths
from trainers.config.parse import Request, dump_yaml, parse_request
from trainers.run import host_memory
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.strategy import Strategy, load_strategy, strategy_names

_OWN = ("gpu_memory", "link", "strategies")
_USES = ("weights", "gradients", "optimizer", "gathered", "activations", "overhead")
_HEADERS = ("strategy", "mesh", "micro-batch", "fits", "GiB", *_USES, "tokens/s at most", "sent GiB", "bubble")
_EXPENDABLE = (
    "mesh", "micro-batch", "overhead", "gathered", "gradients", "optimizer", "weights", "activations", "sent GiB",
)  # fmt: skip


def plan_verb(words: Sequence[str]) -> int:
    """`tunesmith plan`.

    Returns:
        The exit status: 0, whatever fits.

    Raises:
        ConfigError: for a request that is wrong, or a model that cannot be had.
        CheckBroke: when the count crashed.
    """
    sorted_words = sort_words(words)
    if "help" in sorted_words.switches:
        from app.plan.help import show_plan_help

        show_plan_help()
        return 0
    config, hardware, strategies, names = _read(sorted_words)
    able, rows = _candidates(strategies, config, hardware)
    with spinner("counting the model", "quiet" in sorted_words.switches):
        counted = count(config, hardware, able)
    rows = best_first([*(plan_row(*one, counted, hardware) for one in able), *rows])
    document = _document(rows, config, hardware, counted)
    if "json" in sorted_words.switches:
        report_json(document)
    else:
        _show(rows, document, names, config)
    return 0


def _read(words: Words) -> tuple[TrainConfig, Hardware, list[Strategy], dict[str, str]]:
    """Config, hardware and strategies of a command line, and what the user calls each.

    Raises:
        ConfigError: with every mistake at once.
    """
    mistakes, request = Mistakes(), Request()
    with mistakes:
        request = parse_request(words.options)
    own = {name: str(request.options.pop(name)) for name in _OWN if name in request.options}
    request.preset = named_preset(words.names, request.preset, mistakes)
    mistakes.lines += [f"--{name}: a plan is for the GPUs of one machine; leave it out" for name in MACHINE_OPTIONS
                       if name in words.values]  # fmt: skip
    mistakes.lines += [f"--{name} is for `tunesmith train`; leave it out" for name in ("check", "detach", "force")
                       if name in words.switches]  # fmt: skip
    if "strategy" in words.values:
        mistakes.lines.append(f"--strategy {words.values['strategy']}: a plan has several; write --strategies a,b,c")
    config = hardware = None
    with mistakes:
        config = absolute_paths(request.resolve())
    with mistakes:
        hardware = _hardware(words.values, own.get("gpu_memory"))
    with mistakes:
        link = told_size(own["link"], "link", "GB/s", 200) if "link" in own else None
        hardware = replace(hardware, link=link) if hardware else None
    strategies: list[Strategy] = []
    names: dict[str, str] = {}
    for name in strategy_names() if own.get("strategies", "all") == "all" else own["strategies"].split(","):
        with mistakes:
            strategies.append(load_strategy(name.strip()))
            if strategies[-1].name in names:
                raise ConfigError(f"strategies: two rows would be named {strategies[-1].name}; name it once")
            names[strategies[-1].name] = name.strip()
    mistakes.lines = [for_verb(line, "plan", _OWN) for line in mistakes.lines]
    mistakes.refuse()
    if not (config and hardware):
        raise AssertionError("no mistake, and yet no config")
    return config, hardware, strategies, names


def _hardware(values: Mapping[str, str], gpu_memory: str | None) -> Hardware:
    """What is planned for: this machine's GPUs or CPU, or GPUs of a memory that is told."""
    if gpu_memory is not None:
        memory = told_size(gpu_memory, "gpu_memory", "GiB", 80) * GIB
        if "gpus" in values:
            raise ConfigError(f"gpus={values['gpus']} with gpu_memory={gpu_memory}; write --num_processes, how many")
        count = choose_devices(None, values.get("num_processes"), []).num_processes
        return Hardware("gpu", count if "num_processes" in values else 1, memory, here=False)
    devices = choose_devices(values.get("gpus"), values.get("num_processes"))
    if devices.gpu_ids:
        memories = [gpu.memory for gpu in find_gpus() if gpu.index in devices.gpu_ids]
        return Hardware("gpu", devices.num_processes, min(memories), tuple(devices.gpu_ids), host=_host_memory())
    return Hardware("cpu", devices.num_processes, _host_memory() / devices.num_processes)


def _host_memory() -> float:
    return float(host_memory.total())


def _candidates(
    strategies: Sequence[Strategy], config: TrainConfig, hardware: Hardware
) -> tuple[list[Candidate], list[Row]]:
    """What can be trained there, and rows for the strategies that cannot."""
    able: list[Candidate] = []
    rows: list[Row] = []
    for strategy in strategies:
        try:
            able.append(candidate(strategy, config, hardware))
        except ConfigError as error:
            reason = "; ".join(error.mistakes).removeprefix(f"strategy {strategy.name}: ")
            rows.append(Row(strategy.name, MeshSizes(dp_replicate=hardware.processes), reason=reason))
    return able, rows


def count(config: TrainConfig, hardware: Hardware, able: Sequence[Candidate]) -> dict[str, Any]:
    """What `trainers/tools/memory_estimate.py` counts of the model, on a device as one rank gets it.

    Raises:
        ConfigError: when this machine or the model will not do.
        CheckBroke: when the count crashed.
    """
    env = module_environment({**os.environ, "OMP_NUM_THREADS": str(max(1, cpu_count() // hardware.processes))})
    if hardware.gpu_ids or not hardware.here:
        env = launch_environment(Devices(list(hardware.gpu_ids[:1]), 1), env)
    hidden = {} if hardware.here else {"CUDA_VISIBLE_DEVICES": ""}
    cases = sorted({case_of(*one) for one in able})
    with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_yaml(config), encoding="utf-8")
        words = ["--config", str(file), *(["--here"] if hardware.here else []), "--cases", *cases]
        out = told_by(module_argv("trainers.tools.memory_estimate", words), {**env, **hidden}, ROOT)
    return dict(json.loads(out.splitlines()[-1]))


def _document(
    rows: Sequence[Row], config: TrainConfig, hardware: Hardware, counted: Mapping[str, Any]
) -> dict[str, Any]:
    """The plan as plain values."""
    return {
        "rows": [row.as_json() for row in rows],
        "model": config.model_name_or_path, "method": config.method,
        "parameters": int(counted["whole"]["parameters"]),
        "devices": {"kind": hardware.kind, "count": hardware.processes, "memory_gib": hardware.memory / GIB,
                    "flops_per_second": counted["flops_per_second"] if hardware.here else None},
        "global_batch_size": config.global_batch_size, "max_length": config.max_length,
        "assumed": "; ".join([hardware.assumed(), *_ignored(config)]),
    }  # fmt: skip


def _ignored(config: TrainConfig) -> list[str]:
    """Choices that change memory or traffic, and not the plan."""
    choices = {"activation_offloading": config.activation_offloading, "ddp_comm_hook": config.ddp_comm_hook != "none"}
    return [f"{name} is not estimated" for name, chosen in choices.items() if chosen]


def _show(rows: Sequence[Row], document: Mapping[str, Any], names: Mapping[str, str], config: TrainConfig) -> None:
    """The table, the reasons, what was assumed and what to do, on stdout."""
    devices = document["devices"]
    what = "processes on the CPU" if devices["kind"] == "cpu" else "GPUs"
    report(clean(f"{document['model']}, method={document['method']}, {document['parameters'] / 1e9:.2f}B parameters"))
    report(f"{devices['count']} {what} of {devices['memory_gib']:.1f} GiB, global batches of "
           f"{document['global_batch_size']} rows of {document['max_length']} tokens")  # fmt: skip
    report("")
    show_table(_HEADERS, [_cells(row) for row in rows if row.seconds is not None], _EXPENDABLE)
    report("")
    for row in rows:
        if row.reason:
            report(clean(f"{row.strategy}: {row.reason}").replace("\n", " "))
    report(f"assumed: {document['assumed']}")
    report(clean(_advice(rows, names, config, devices["count"])))


def _advice(rows: Sequence[Row], names: Mapping[str, str], config: TrainConfig, processes: int) -> str:
    """The last line: what to add to the words of `train`."""
    best = rows[0] if rows and rows[0].fits else None
    if best:
        same = best.micro_batch == config.per_device_train_batch_size
        micro = "" if same else f" --per_device_train_batch_size {best.micro_batch}"
        count = "" if best.sizes.world == processes else f" --num_processes {best.sizes.world}"
        return f"best: --strategy {shlex.quote(names[best.strategy])}{count}{micro}"
    if any(row.fits is False for row in rows):
        return (
            "nothing fits: try --method lora or qlora, a smaller micro-batch, --gradient_checkpointing true, more GPUs"
        )
    return "no strategy could be estimated; see the reasons above"


def _cells(row: Row) -> list[str]:
    fits = {True: "yes", False: "no", None: "?"}[row.fits]
    uses = [_gib(row.memory[name]) if row.memory else "-" for name in _USES]
    rate = "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"
    bubble = "-" if row.bubble is None else f"{row.bubble:.0%}"
    total = _gib(row.total) if row.memory else "-"
    return [
        row.strategy,
        str(row.sizes),
        str(row.micro_batch),
        fits,
        total,
        *uses,
        rate,
        number((row.sent or 0.0) / GIB, 2),
        bubble,
    ]


def _gib(size: float) -> str:
    return number(size / GIB, 1 if size >= 10 * GIB else 2)
