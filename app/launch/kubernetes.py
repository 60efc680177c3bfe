"""`--on kubernetes`: resolves and checks a run on this machine, and writes it as a manifest."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from app.command_line import Args
from app.console import shortened
from app.launch.cluster_job import cluster_job, refuse_decided
from app.launch.job import TrainJob
from app.schedulers.kubernetes import KubernetesOptions, head_name, manifest, object_name
from trainers.config.local_paths import INPUT_PATHS
from trainers.config.mistakes import ConfigError, Mistake, Mistakes
from trainers.config.options import EMBEDDED, TrainConfig
from trainers.config.parse import dump_yaml
from trainers.run.folder import RunFolder


def kubernetes_job(args: Args, run: RunFolder | None = None) -> tuple[TrainJob, KubernetesOptions]:
    """The job of a run that Kubernetes is to start. Nothing is written.

    Args:
        args: the command line of `train`.
        run: the run to resume, which is refused.

    Raises:
        ConfigError: with all mistakes at once.
    """
    if run is not None:
        remedy = "hand its manifest to `kubectl replace --force -f -`, which goes on from the newest checkpoint"
        raise ConfigError.about("on", "kubernetes", "is not for `resume`", remedy)
    mistakes, options = Mistakes(), None
    refuse_decided(args, "Kubernetes", mistakes)
    if "dry_run" not in args.own:
        remedy = "add --dry_run, and hand what it prints to `kubectl apply -f -`"
        mistakes.append(Mistake("--on kubernetes", None, "only prints a manifest", remedy))
    with mistakes:
        options = KubernetesOptions.read({name: args.own[name] for name in args.own if name not in ("on", "dry_run")})
    if options is None:
        mistakes.refuse()
        raise AssertionError("no mistake, and yet no options")
    output_dir = str(args.request.options.get("output_dir") or "")
    if not options.holds(output_dir):
        remedy = f"write --output_dir {options.volume_path}/runs/first"
        mistakes.append(_outside("output_dir", output_dir or None, options, remedy))
    with tempfile.TemporaryDirectory() as folder:  # stands for the run folder, which this machine may not see
        args.request.options["output_dir"] = str(Path(folder) / object_name(output_dir, options.volume_claim))
        head = head_name(output_dir, options.volume_claim)
        job = cluster_job(args, None, options.nodes, options.gpus_per_node, mistakes, head)
    cache = {} if "cache_dir" in args.request.chosen else {"cache_dir": f"{options.volume_path}/cache"}
    config = job.config.model_copy(update={"output_dir": output_dir, **cache})
    if outside := _not_on_the_volume(config, options):
        raise ConfigError(outside)
    return replace(job, config=config, run=RunFolder(Path(output_dir))), options


def preview(job: TrainJob, options: KubernetesOptions) -> str:
    """The manifest of a job."""
    config, strategy = dump_yaml(job.config), job.strategy.dump()
    return manifest(str(job.run.path), job.devices.num_processes, config, strategy, options)


def refuse_start(job: TrainJob, options: KubernetesOptions, quiet: bool = True) -> dict[str, Any]:
    """Raises, as Tunesmith starts nothing on Kubernetes; `kubernetes_job` has refused it before."""
    raise ConfigError("--on kubernetes only prints a manifest; add --dry_run")


def _not_on_the_volume(config: TrainConfig, options: KubernetesOptions) -> list[Mistake]:
    """Mistakes for paths of this machine, which the pods do not see."""
    values = {name: str(getattr(config, name) or "") for name in (*INPUT_PATHS, "cache_dir", "resume_from_checkpoint")}
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
