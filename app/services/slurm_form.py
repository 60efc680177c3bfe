"""The part of the Train page's form for jobs of SLURM: when it is offered, its fields, and what they start from."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from app.schedulers.slurm_options import SlurmOptions, site_file
from trainers.config.mistakes import ConfigError

SLURM_FIELDS = {
    "nodes": ("Nodes", "Machines that train the run together."),
    "gpus_per_node": ("GPUs on each node", "One process runs on each; 0 trains on the CPU, with one process per node."),
    "partition": ("Partition", "The queue of the cluster to submit to."),
    "account": ("Account", "The account that is charged."),
    "qos": ("QOS", "Quality of service."),
    "time": ("Time limit", "Such as 30 (minutes), 8:00:00 or 2-00:00:00. Before it the run saves, and queues again."),
    "constraint": ("Constraint", "Features that the nodes must have, such as a100|h100."),
}
"""Label and help of the options that a page may set. `container` and `slurm_extra` are code, which comes from the
command line or the user's site file alone.
"""


def slurm_offered() -> bool:
    """Whether jobs can be submitted here, or the user has described a site."""
    return shutil.which("sbatch") is not None or site_file().exists()


def slurm_texts() -> dict[str, str]:
    """The texts that the fields start with: the defaults of the site; of a file with mistakes, the preview tells."""
    try:
        options = SlurmOptions.read({})
    except ConfigError:
        options = SlurmOptions()
    values = {name: getattr(options, name) for name in SLURM_FIELDS}
    return {name: "" if value is None else str(value) for name, value in values.items()}


def chosen_options(texts: Mapping[str, str]) -> dict[str, str]:
    """The options of a form that are filled in; the site's defaults stand for the others."""
    return {name: texts[name].strip() for name in SLURM_FIELDS if texts.get(name, "").strip()}


def slurm_args(options: SlurmOptions) -> list[str]:
    """The options as arguments of `tunesmith train`, without what a site file sets and a page cannot."""
    chosen = {name: getattr(options, name) for name in SLURM_FIELDS}
    return ["--on", "slurm", *(word for name, value in chosen.items() if value is not None
                               for word in (f"--{name}", str(value)))]  # fmt: skip
