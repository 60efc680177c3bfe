"""A run whose nodes a scheduler chooses, as a job: what the schedulers have in common."""

from __future__ import annotations

from collections.abc import Mapping

from app.command_line import Args
from app.hardware import Gpu
from app.launch.job import TrainJob, job_of, named_preset, refuse_unresumable, run_attempt
from app.runs.runs import world_size
from trainers.config.mistakes import Mistake, Mistakes
from trainers.run.folder import RunFolder

HEAD, PORT = "head-node", 29500
"""Stand in an Accelerate file for machine 0's address until the job has started."""
_DECIDED = ("gpus", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "min_machines")


def refuse_decided(args: Args, title: str, mistakes: Mistakes) -> None:
    """Adds a mistake for each option that the scheduler decides.

    Args:
        args: the command line of `train` or `resume`.
        title: name of the scheduler.
        mistakes: receives the mistakes.
    """
    for name in [name for name in _DECIDED if name in args.launch]:
        mistakes.append(Mistake(name, args.launch[name], f"is decided by {title}", f"leave --{name} out"))
    if "detach" in args.switches:
        mistakes.append(Mistake("--detach", None, f"is not needed with --on {title.lower()}", "leave it out"))


def cluster_job(
    args: Args, run: RunFolder | None, nodes: int, gpus_per_node: int, mistakes: Mistakes, head: str = HEAD
) -> TrainJob:
    """The job of a run on nodes that a scheduler chooses.

    Args:
        args: the command line of `train` or `resume`.
        run: the run to resume; None for a new one.
        nodes: number of nodes.
        gpus_per_node: GPUs of each; 0: it trains on the CPU.
        mistakes: mistakes found so far.
        head: name of machine 0, where it is known.

    Raises:
        ConfigError: with all mistakes at once; also if the run is done or still live.
    """
    gpus = [Gpu(index, f"node-{index}", "GPU of a node", 0) for index in range(gpus_per_node)]
    if run is None:
        args.request.preset = named_preset(args.names, args.request.preset, mistakes)
        values = _launch_values(args.launch, nodes, gpus_per_node, mistakes, head)
        return job_of(args.request, values, mistakes, None, gpus)
    refuse_unresumable(run)
    attempt = run_attempt(run)
    chosen = {"strategy": str(run.accelerate), **args.launch}
    if not gpus_per_node and (processes := world_size(run)):
        chosen.setdefault("num_processes", str(processes))
    args.request.config, args.request.preset = str(run.config), None
    args.request.options["force_resume"] = "force" in args.switches
    job = job_of(args.request, _launch_values(chosen, nodes, gpus_per_node, mistakes, head), mistakes, run, gpus)
    job.attempt = attempt
    return job


def _launch_values(
    chosen: Mapping[str, str], nodes: int, gpus_per_node: int, mistakes: Mistakes, head: str
) -> dict[str, str]:
    """The launch options, with the machines and processes that the job will have."""
    values = {name: value for name, value in chosen.items() if name not in _DECIDED}
    if gpus_per_node:
        if count := values.pop("num_processes", None):
            problem = "is decided by --nodes and --gpus_per_node: one process runs on each GPU"
            mistakes.append(Mistake("num_processes", count, problem, "leave --num_processes out"))
        values["gpus"] = ",".join(map(str, range(gpus_per_node)))
    else:
        values.setdefault("num_processes", str(nodes))
    values["num_machines"] = str(nodes)  # also for one, as the file of a resumed run may have had more
    if nodes > 1:
        values |= {"machine_rank": "0", "main_process_ip": head}
        values["main_process_port"] = str(PORT)
    return values
