"""The schedulers that start runs on clusters, by the name that `--on` has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from app.launch import kubernetes, ray_job, slurm
from app.launch.job import TrainJob
from app.runs.scheduled import TITLES
from app.schedulers.kubernetes import KubernetesOptions
from app.schedulers.ray_options import RayOptions
from app.schedulers.slurm import script
from app.schedulers.slurm_options import SlurmOptions


@dataclass(frozen=True)
class Scheduler:
    """How a scheduler takes a run.

    Args:
        title: its name.
        options: the options of its jobs.
        job: makes the job and its options of a command line, and of the run to resume, if any.
        preview: what would be submitted, as text.
        start: checks a job and submits it; returns the run's state.
    """

    title: str
    options: type[BaseModel]
    job: Callable[..., tuple[TrainJob, Any]]
    preview: Callable[[TrainJob, Any], str]
    start: Callable[[TrainJob, Any, bool], dict[str, Any]]


SCHEDULERS = {
    "slurm": Scheduler(
        TITLES["slurm"], SlurmOptions, slurm.slurm_job, lambda job, options: script(job.run, options), slurm.start
    ),
    "ray": Scheduler(TITLES["ray"], RayOptions, ray_job.ray_job, ray_job.preview, ray_job.start),
    "kubernetes": Scheduler(
        "Kubernetes", KubernetesOptions, kubernetes.kubernetes_job, kubernetes.preview, kubernetes.refuse_start
    ),
}
