"""`--on kubernetes`: resolves and checks a run on this machine, and writes it as a manifest."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from app.command_line import Args
from app.console import shortened
from app.hardware import Gpu
from app.launch.job import PATHS, TrainJob, job_of, named_preset
from app.launch.slurm import DECIDED, launch_values
from app.schedulers.kubernetes import KubernetesOptions, head_name, manifest, object_name
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.parse import dump_yaml


def kubernetes_manifest(args: Args) -> tuple[TrainJob, str]:
    """The job of a run that Kubernetes is to start, and its manifest. Nothing is written or started.

    Args:
        args: the command line of `train`.

    Raises:
        ConfigError: with all mistakes at once.
    """
    mistakes = Mistakes()
    for name in [name for name in DECIDED if name in args.launch]:
        mistakes.append(Mistake(name, args.launch[name], "is decided by Kubernetes", f"leave --{name} out"))
    for name in [name for name in ("detach", "force") if name in args.switches]:
        mistakes.append(Mistake(f"--{name}", None, "does not go with --on kubernetes", "leave it out"))
    chosen = {name: value for name, value in args.own.items() if name not in ("on", "dry_run")}
    if "dry_run" not in args.own:
        remedy = "add --dry_run, and hand what it prints to `kubectl apply -f -`"
        mistakes.append(Mistake("--on kubernetes", None, "only prints a manifest", remedy))
    options = None
    with mistakes:
        options = KubernetesOptions.read(chosen)
    if options is None:
        mistakes.refuse()
        raise AssertionError("no mistake, and yet no options")
    output_dir = str(args.request.options.get("output_dir") or "")
    if not options.holds(output_dir):
        example = f"{options.volume_path}/runs/first"
        mistakes.append(_outside("output_dir", output_dir or None, options, f"write --output_dir {example}"))
    gpus = [Gpu(index, f"node-{index}", "GPU of a node", 0) for index in range(options.gpus_per_node)]
    args.request.preset = named_preset(args.names, args.request.preset, mistakes)
    with tempfile.TemporaryDirectory() as folder:  # stands for the run folder, which this machine may not see
        args.request.options["output_dir"] = str(Path(folder) / object_name(output_dir))
        values = launch_values(args.launch, options.nodes, options.gpus_per_node, mistakes, head_name(output_dir))
        job = job_of(args.request, values, mistakes, None, gpus)
    config = job.config.model_copy(update={"cache_dir": f"{options.volume_path}/cache"})
    if "cache_dir" in args.request.chosen:
        config = job.config
    if outside := _not_on_the_volume(config, options):
        raise ConfigError(outside)
    text = manifest(output_dir, job.devices.num_processes, dump_yaml(config), job.strategy.dump(), options)
    return job, text


def _not_on_the_volume(config: TrainConfig, options: KubernetesOptions) -> list[Mistake]:
    """Mistakes for paths of this machine, which the pods do not see."""
    values = {name: str(getattr(config, name) or "") for name in PATHS if name not in ("output_dir", "runs_dir")}
    local = {name: value for name, value in values.items() if os.path.isabs(value) and value != EMBEDDED}
    remedy = "copy it there, and give the path that the pods see"
    return [_outside(name, value, options, remedy) for name, value in local.items() if not options.holds(value)]


def _outside(name: str, value: str | None, options: KubernetesOptions, remedy: str) -> Mistake:
    return Mistake(
        name,
        shortened(value) if value else None,
        f"is not on the volume that the pods see, {options.volume_path}",
        remedy,
    )
