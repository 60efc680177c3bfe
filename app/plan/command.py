"""`tunesmith plan`: reads the request, counts the model in a separate program, and shows the table."""

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
from app.command_line import DEVICES, Args, Verb
from app.console import clean, number, report, report_json, show_table
from app.hardware import Devices, choose_devices, cpu_count, find_gpus
from app.launch.foreground import run_checker, spinner
from app.launch.job import named_preset
from app.plan.estimate import Candidate, Row, best_first, candidate, case_of, plan_row
from app.plan.hardware import GIB, Hardware, parse_size
from trainers.config.command_line import option
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import MACHINE_OPTIONS, TrainConfig, absolute_paths
from trainers.config.parse import dump_yaml
from trainers.run import host_memory
from trainers.run.disk import free_bytes
from trainers.strategy.mesh import MeshSizes
from trainers.strategy.strategy import Strategy, load_strategy, strategy_names

PLAN = Verb(
    "plan",
    "Estimate what `train` with the same arguments needs under each strategy: peak memory per GPU by use, "
    "communication, pipeline bubble, and an upper bound on speed. Nothing is trained and no weights are read. "
    "Exit status: 0 done, 2 invalid request.",
    own={
        "strategies": option("strategies", "<a,b,c>", "Strategy names or Accelerate YAMLs; default: all."),
        "gpu_memory": option("gpu_memory", "<GiB>", "Plan for --num_processes GPUs with this much memory, instead of "
                             "the GPUs of this machine."),
        "host_memory": option("host_memory", "<GiB>", "Host memory of a machine; default: this one's, for its GPUs."),
        "link": option("link", "<GB/s>", "Bandwidth per GPU; default: 25 (PCIe 4). NVLink: 200 or more."),
    },
    launch=DEVICES,
)  # fmt: skip
_USES = ("weights", "gradients", "optimizer", "gathered", "activations", "overhead")
_HEADERS = ("strategy", "mesh", "micro-batch", "fits", "GiB", *_USES, "tokens/s at most", "sent GiB", "bubble")
_EXPENDABLE = (
    "mesh", "micro-batch", "overhead", "gathered", "gradients", "optimizer", "weights", "activations", "sent GiB",
)  # fmt: skip


def plan_verb(argv: Sequence[str]) -> int:
    """`tunesmith plan`.

    Returns:
        The exit status: 0, whether or not anything fits.

    Raises:
        ConfigError: if the request is wrong, or the model is not available.
        CheckBroke: if the count crashed.
    """
    args = PLAN.read(argv)
    if args is None:
        return 0
    config, hardware, strategies, names = _read(args)
    able, rows = _candidates(strategies, config, hardware)
    with spinner("counting the model", "quiet" in args.switches):
        counted = count(config, hardware, able)
    rows = best_first([*(plan_row(*candidate, counted, hardware) for candidate in able), *rows])
    document = _document(rows, config, hardware, counted)
    if "json" in args.switches:
        report_json(document)
    else:
        _show(rows, document, names, config)
    return 0


def _read(args: Args) -> tuple[TrainConfig, Hardware, list[Strategy], dict[str, str]]:
    """Config, hardware and strategies of a command line, and the user's name of each strategy.

    Raises:
        ConfigError: with every mistake at once.
    """
    mistakes, request, own = Mistakes(), args.request, args.own
    request.preset = named_preset(args.names, request.preset, mistakes)
    mistakes += [Mistake(name, args.launch[name], ": a plan is for the GPUs of one machine", "leave it out")
                 for name in MACHINE_OPTIONS if name in args.launch]  # fmt: skip
    mistakes += [Mistake(f"--{name}", None, "is for `tunesmith train`", "leave it out")
                 for name in ("check", "detach", "force") if name in args.switches]  # fmt: skip
    if "strategy" in args.launch:
        problem = ": a plan compares several"
        mistakes.append(Mistake("strategy", args.launch["strategy"], problem, "use --strategies a,b,c"))
    config = hardware = None
    with mistakes:
        config = absolute_paths(request.resolve())
    with mistakes:
        hardware = _hardware(args.launch, own.get("gpu_memory"))
    with mistakes:
        link = parse_size(own["link"], "link", "GB/s", 200) if "link" in own else None
        hardware = replace(hardware, link=link) if hardware else None
    with mistakes:
        if hardware and "host_memory" in own:
            host = parse_size(own["host_memory"], "host_memory", "GiB", 512) * GIB
            memory = host / hardware.processes if hardware.kind == "cpu" else hardware.memory
            hardware = replace(hardware, host=host, memory=memory)
    if hardware and hardware.is_local and config:
        hardware = replace(hardware, disk=float(free_bytes(Path(config.output_dir or config.runs_dir))))
    strategies: list[Strategy] = []
    names: dict[str, str] = {}
    for name in strategy_names() if own.get("strategies", "all") == "all" else own["strategies"].split(","):
        with mistakes:
            strategies.append(load_strategy(name.strip()))
            if strategies[-1].name in names:
                raise ConfigError(f"strategies: two rows would be named {strategies[-1].name}; list it once")
            names[strategies[-1].name] = name.strip()
    mistakes.refuse()
    if not (config and hardware):
        raise AssertionError("no mistake, and yet no config")
    return config, hardware, strategies, names


def _hardware(values: Mapping[str, str], gpu_memory: str | None) -> Hardware:
    """The hardware to plan for: this machine's GPUs or CPU, or GPUs with the given memory."""
    if gpu_memory is not None:
        memory = parse_size(gpu_memory, "gpu_memory", "GiB", 80) * GIB
        if "gpus" in values:
            problem = f"with gpu_memory={gpu_memory}"
            raise ConfigError.about("gpus", values["gpus"], problem, "use --num_processes, their number")
        count = choose_devices(None, values.get("num_processes"), []).num_processes
        return Hardware("gpu", count if "num_processes" in values else 1, memory, is_local=False)
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
    """Candidates that can be trained, and rows for the strategies that cannot.

    A strategy that cannot use all devices gets as many as it can, as `train` does.
    """
    able: list[Candidate] = []
    rows: list[Row] = []
    most = hardware.processes
    for strategy in strategies:
        first: ConfigError | None = None
        for processes in range(most, min(most, 2) - 1, -1):
            try:
                able.append(candidate(strategy, config, replace(hardware, processes=processes)))
                break
            except ConfigError as error:
                first = first or error
        else:
            reason = "; ".join(str(replace(mistake, source="")) for mistake in first.mistakes) if first else ""
            rows.append(Row(strategy.name, MeshSizes(dp_replicate=most), reason=reason))
    return able, rows


def count(config: TrainConfig, hardware: Hardware, able: Sequence[Candidate]) -> dict[str, Any]:
    """Runs `trainers/tools/memory_estimate.py` on the model, with the device of one rank.

    Raises:
        ConfigError: if this machine or the model is not suitable.
        CheckBroke: if the count crashed.
    """
    env = module_environment({**os.environ, "OMP_NUM_THREADS": str(max(1, cpu_count() // hardware.processes))})
    if hardware.gpu_ids or not hardware.is_local:
        env = launch_environment(Devices(list(hardware.gpu_ids[:1]), 1), env)
    hidden = {} if hardware.is_local else {"CUDA_VISIBLE_DEVICES": ""}
    cases = sorted({case_of(*runnable) for runnable in able})
    with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_yaml(config), encoding="utf-8")
        counter_args = ["--config", str(file), *(["--here"] if hardware.is_local else []), "--cases", *cases]
        out = run_checker(module_argv("trainers.tools.memory_estimate", counter_args), {**env, **hidden}, ROOT)
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
                    "flops_per_second": counted["flops_per_second"] if hardware.is_local else None},
        "global_batch_size": config.global_batch_size, "max_length": config.max_length,
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


def _show(rows: Sequence[Row], document: Mapping[str, Any], names: Mapping[str, str], config: TrainConfig) -> None:
    """Prints the table, the reasons, the assumptions and the advice on stdout."""
    devices = document["devices"]
    devices_label = "processes on the CPU" if devices["kind"] == "cpu" else "GPUs"
    report(clean(f"{document['model']}, method={document['method']}, {document['parameters'] / 1e9:.2f}B parameters"))
    report(f"{devices['count']} {devices_label} of {devices['memory_gib']:.1f} GiB, global batches of "
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
    """The last line: the arguments to add to `train`."""
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
