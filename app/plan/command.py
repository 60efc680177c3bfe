"""`tunesmith plan`: reads the request, counts the model in a separate program, and searches for the best mesh."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.accelerate_launch import ROOT, launch_environment, module_argv, module_environment
from app.command_line import DEVICES, Args, Verb
from app.console import report_json
from app.hardware import Devices, choose_devices, cpu_count, find_gpus
from app.launch.foreground import run_checker, spinner
from app.launch.job import named_preset
from app.launch.machines import MOST_MACHINES
from app.plan.advice import set_price, train_command
from app.plan.estimate import Candidate, case_of
from app.plan.hardware import GIB, MOST_GPUS, PER_MACHINE, Hardware, parse_size
from app.plan.report import as_document, show
from app.plan.scale import scale_assumed, scale_rows, show_scale
from app.plan.search import Request, best_rows, fewest_gpus
from trainers.config.command_line import option, switch
from trainers.config.local_paths import absolute_paths
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import MACHINE_OPTIONS, TrainConfig
from trainers.config.parse import dump_yaml, whole_number
from trainers.run import host_memory
from trainers.run.disk import free_bytes
from trainers.run.from_run import resolve_request
from trainers.strategy.mesh_options import read_sizes
from trainers.strategy.strategy import Strategy, load_strategy, strategy_names

PLAN = Verb(
    "plan",
    "Estimate what `train` with the same arguments needs under each strategy, on the best mesh: peak memory per GPU by "
    "use, communication, pipeline bubble, and a bound on speed. Nothing is trained and no weights are read. "
    "Exit status: 0 done, 2 invalid request.",
    own={
        "strategies": option("strategies", "<a,b,c>", "Strategy names or Accelerate YAMLs; default: all."),
        "gpu_memory": option("gpu_memory", "<GiB>", "Plan for --num_processes GPUs with this much memory, instead of "
                             "the GPUs of this machine."),
        "host_memory": option("host_memory", "<GiB>", "Host memory of a machine; default: this one's, for its GPUs."),
        "link": option("link", "<GB/s>", "Bandwidth per GPU inside a machine; default: 25 (PCIe 4). NVLink: 200 or "
                       "more."),
        "machine_link": option("machine_link", "<GB/s>", "Bandwidth per GPU to other machines; default: 12.5 (100 Gb/s "
                               "per GPU)."),
        "tflops": option("tflops", "<TFLOP/s>", "Speed of a GPU's matrix products; default: measured on this machine, "
                         "300 for GPUs elsewhere."),
        "price": option("price", "<number>", "Price of a GPU for an hour, to show what training costs."),
        "table": switch("table", "Show what models of 1B to 175B parameters need on 1 to 1,024 GPUs of 80 GiB."),
    },
    launch=(*DEVICES, "num_machines"),
)  # fmt: skip
_TABLE_OPTIONS = {"gpu_memory", "link", "machine_link", "tflops", "table"}


@dataclass(frozen=True)
class Plan:
    """A validated request.

    Args:
        config: the user's config.
        hardware: the hardware to plan for.
        strategies: the strategies to compare.
        names: the user's name or file of each strategy, by its name.
        sizes: mesh sizes that the user fixed, by axis.
        price: price of a GPU for an hour; None if not given.
    """

    config: TrainConfig
    hardware: Hardware
    strategies: list[Strategy]
    names: dict[str, str]
    sizes: dict[str, int]
    price: float | None


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
    if args.own.get("table"):
        return _table(args)
    plan = _read(args)
    config, hardware = plan.config, plan.hardware
    with spinner("counting the model", "quiet" in args.switches):
        counted = count(config, hardware, [], _most_tp(plan))
    request = Request(config, hardware, counted, plan.sizes)
    rows = best_rows(plan.strategies, request)
    nothing = hardware.kind == "gpu" and not any(row.fits for row in rows)
    needed = fewest_gpus(plan.strategies, request) if nothing else None
    loaded = {strategy.name: strategy for strategy in plan.strategies}
    for row in rows:
        set_price(row, config, plan.price)
        if row.seconds is not None:
            strategy = loaded[row.strategy]
            row.command = train_command(row, strategy, plan.names[row.strategy], args, config, hardware)
    document = as_document(rows, config, hardware, counted, needed)
    if "json" in args.switches:
        report_json(document)
    else:
        show(rows, document)
    return 0


def _table(args: Args) -> int:
    """`tunesmith plan --table`."""
    mistakes = Mistakes(args.request.mistakes)
    unused = [*args.launch, *(name for name in args.own if name not in _TABLE_OPTIONS), *args.request.options]
    unused += ["config"] if args.request.config else []
    unused += ["preset"] if args.request.preset or args.names else []
    mistakes += [Mistake(name, None, "is not for --table, which has models of its own", "leave it out")
                 for name in dict.fromkeys(unused)]  # fmt: skip
    hardware = None
    with mistakes:
        hardware = _with_speeds(Hardware("gpu", 1, _memory(args.own.get("gpu_memory", "80")), is_local=False), args.own)
    mistakes.refuse()
    if hardware is None:
        raise AssertionError("no mistake, and yet no hardware")
    rows = scale_rows(hardware)
    if "json" in args.switches:
        report_json({"rows": rows, "assumed": scale_assumed(hardware)})
    else:
        show_scale(rows, hardware)
    return 0


def _read(args: Args) -> Plan:
    """The request of a command line.

    Raises:
        ConfigError: with every mistake at once.
    """
    mistakes, request, own = Mistakes(), args.request, args.own
    request.preset = named_preset(args.names, request.preset, mistakes)
    mistakes += [Mistake(name, args.launch[name], ": a plan needs no addresses", "leave it out")
                 for name in (*MACHINE_OPTIONS[1:], "min_machines") if name in args.launch]  # fmt: skip
    mistakes += [Mistake(f"--{name}", None, "is for `tunesmith train`", "leave it out")
                 for name in ("check", "detach", "force") if name in args.switches]  # fmt: skip
    if "strategy" in args.launch:
        problem = ": a plan compares several"
        mistakes.append(Mistake("strategy", args.launch["strategy"], problem, "use --strategies a,b,c"))
    config = hardware = sizes = price = None
    with mistakes:
        config = absolute_paths(resolve_request(request))
    with mistakes:
        hardware = _hardware(args.launch, own.get("gpu_memory"))
    with mistakes:
        hardware = _with_speeds(hardware, own) if hardware else None
    with mistakes:
        hardware = _with_host(hardware, own, config) if hardware else None
    if hardware and hardware.machines == 1 and "machine_link" in own:
        problem = ": there is one machine"
        mistakes.append(Mistake("machine_link", own["machine_link"], problem, "leave it out, or add --num_machines"))
    with mistakes:
        sizes = read_sizes(args.launch)
    with mistakes:
        price = parse_size(own["price"], "price", "money per hour", 2) if "price" in own else None
    strategies: list[Strategy] = []
    names: dict[str, str] = {}
    for name in strategy_names() if own.get("strategies", "all") == "all" else own["strategies"].split(","):
        with mistakes:
            strategies.append(load_strategy(name.strip()))
            if strategies[-1].name in names:
                raise ConfigError(f"strategies: two rows would be named {strategies[-1].name}; list it once")
            names[strategies[-1].name] = name.strip()
    mistakes.refuse()
    if not (config and hardware and sizes is not None):
        raise AssertionError("no mistake, and yet no config")
    return Plan(config, hardware, strategies, names, sizes, price)


def _with_speeds(hardware: Hardware, own: Mapping[str, str]) -> Hardware:
    """The hardware with the speeds of the command line."""
    mistakes, speeds = Mistakes(), dict[str, Any]()
    for name, unit, example in (("link", "GB/s", 200), ("machine_link", "GB/s", 50), ("tflops", "TFLOP/s", 300)):
        with mistakes:
            speeds |= {name: parse_size(own[name], name, unit, example)} if name in own else {}
    mistakes.refuse()
    flops = speeds.pop("tflops", None)
    return replace(hardware, **speeds, flops=None if flops is None else flops * 1e12)


def _with_host(hardware: Hardware, own: Mapping[str, str], config: TrainConfig | None) -> Hardware:
    """The hardware with the host memory of the command line, and the free space where the runs are."""
    if "host_memory" in own:
        host = parse_size(own["host_memory"], "host_memory", "GiB", 512) * GIB
        memory = host / hardware.per_machine if hardware.kind == "cpu" else hardware.memory
        hardware = replace(hardware, host=host, memory=memory)
    if hardware.is_local and config:
        hardware = replace(hardware, disk=float(free_bytes(Path(config.output_dir or config.runs_dir))))
    return hardware


def _hardware(values: Mapping[str, str], gpu_memory: str | None) -> Hardware:
    """The hardware to plan for: this machine's GPUs or CPU, or GPUs with the given memory."""
    machines = _machines(values.get("num_machines"))
    if gpu_memory is not None:
        memory = _memory(gpu_memory)
        if "gpus" in values:
            problem = f"with gpu_memory={gpu_memory}"
            raise ConfigError.about("gpus", values["gpus"], problem, "use --num_processes, their number")
        processes = _processes(values.get("num_processes"), machines)
        return Hardware("gpu", processes, memory, is_local=False, machines=machines or _assumed_machines(processes))
    machines = machines or 1
    if machines > 1 and not find_gpus():
        processes = _processes(values.get("num_processes"), machines)
        return Hardware("cpu", processes, _host_memory() * machines / processes, machines=machines)
    local = values.get("num_processes")
    if machines > 1 and local is not None:
        local = str(_processes(local, machines) // machines)
    devices = choose_devices(values.get("gpus"), local)
    if devices.gpu_ids:
        memories = [gpu.memory for gpu in find_gpus() if gpu.index in devices.gpu_ids]
        processes = devices.num_processes * machines
        return Hardware("gpu", processes, min(memories), tuple(devices.gpu_ids), host=_host_memory(),
                        machines=machines, left_out=devices.left_out)  # fmt: skip
    return Hardware("cpu", devices.num_processes, _host_memory() / devices.num_processes)


def _machines(text: str | None) -> int | None:
    if text is None:
        return None
    if (count := whole_number(text, 1, MOST_MACHINES)) is None:
        problem = f"is not a whole number from 1 to {MOST_MACHINES}"
        raise ConfigError.about("num_machines", repr(text[:40]), problem, "write one")
    return count


def _processes(text: str | None, machines: int | None) -> int:
    """The number of processes on all machines; one on each, if not given."""
    count = whole_number(text, 1, MOST_GPUS) if text is not None else machines or 1
    if count is None:
        problem = f"is not a whole number from 1 to {MOST_GPUS}"
        raise ConfigError.about("num_processes", repr(str(text)[:40]), problem, "write one")
    if count % (machines or 1):
        problem, remedy = f"is not divisible by num_machines={machines}", "it is the total over all machines"
        raise ConfigError.about("num_processes", count, problem, remedy)
    return count


def _assumed_machines(processes: int) -> int:
    """The machines that so many GPUs are in, if the user does not say: the fewest with up to `PER_MACHINE` each.

    Raises:
        ConfigError: if they are more than a run can have.
    """
    machines = processes // max(size for size in range(1, PER_MACHINE + 1) if processes % size == 0)
    if machines > MOST_MACHINES:
        problem = f"would be {machines} machines of at most {PER_MACHINE} GPUs; a run has at most {MOST_MACHINES}"
        raise ConfigError.about("num_processes", processes, problem, "add --num_machines")
    return machines


def _memory(text: str) -> float:
    return parse_size(text, "gpu_memory", "GiB", 80) * GIB


def _host_memory() -> float:
    return float(host_memory.total())


def _most_tp(plan: Plan) -> int:
    """The largest tensor parallelism worth counting: inside a machine, unless the user says more."""
    used = plan.sizes.get("tp", 1) > 1 or any(strategy.mesh.get("tp", 1) != 1 for strategy in plan.strategies)
    machine = PER_MACHINE if plan.hardware.kind == "gpu" else plan.hardware.per_machine
    return max(machine, plan.hardware.per_machine, plan.sizes.get("tp", 1)) if used else 1


def count(
    config: TrainConfig, hardware: Hardware, able: Sequence[Candidate], most_tp: int | None = None
) -> dict[str, Any]:
    """Runs `trainers/tools/memory_estimate.py` on the model, with the device of one rank.

    Args:
        config: the user's config.
        hardware: the hardware to plan for.
        able: candidates to count exactly.
        most_tp: to also count what the cases of every mesh up to this tensor parallelism follow from.

    Raises:
        ConfigError: if this machine or the model is not suitable.
        CheckBroke: if the count crashed.
    """
    env = module_environment({**os.environ, "OMP_NUM_THREADS": str(max(1, cpu_count() // hardware.per_machine))})
    if hardware.gpu_ids or not hardware.is_local:
        env = launch_environment(Devices(list(hardware.gpu_ids[:1]), 1), env)
    hidden = {} if hardware.is_local else {"CUDA_VISIBLE_DEVICES": ""}
    cases = sorted({case_of(*runnable) for runnable in able})
    with tempfile.TemporaryDirectory(prefix="tunesmith-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_yaml(config), encoding="utf-8")
        counter_args = ["--config", str(file), *(["--here"] if hardware.is_local else [])]
        counter_args += ["--cases", *cases] if cases else []
        counter_args += ["--basis", str(most_tp)] if most_tp else []
        out = run_checker(module_argv("trainers.tools.memory_estimate", counter_args), {**env, **hidden}, ROOT)
    return {**json.loads(out.splitlines()[-1]), "timed_processes": hardware.per_machine}
