"""Command lines of the verbs that take training options: what each one reads, refuses and shows in its help."""

from __future__ import annotations

import shutil
import textwrap
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.console import report
from app.typer_style import PlainCommand
from trainers.config.command_line import config_options, option, read, switch
from trainers.config.mistakes import Mistake
from trainers.config.options import LAUNCH_OPTIONS, MESH_OPTIONS, TrainConfig
from trainers.config.parse import Request, request_of

_DRAWN_WIDTH = 110
_LAUNCH_HELP = {
    "strategy": (
        "<name|file>",
        "Strategy name or Accelerate YAML; default: the preset's choice for the number of GPUs, else single or ddp.",
    ),
    "tp_size": ("<int>", "Ranks that share each matrix (tensor parallel); default: as in the strategy's file."),
    "cp_size": ("<int>", "Ranks that share each row, gathering keys and values (context parallel); default likewise."),
    "sp_size": ("<int>", "Ranks that share each row, exchanging heads (Ulysses); default likewise."),
    "ep_size": ("<int>", "Ranks that divide the experts of each layer (expert parallel); default likewise."),
    "dp_replicate_size": ("<int>", "Copies of the weights, each sharded over the other ranks; default likewise."),
    "gpus": ("<ids>", "GPU ids, such as 0,2; default: the free GPUs, as many as divide the global batch."),
    "num_processes": ("<int>", "Number of processes across all machines; needed only without GPUs."),
    "num_machines": (
        "<int>",
        "Number of machines; run the same command on each with its own --machine_rank. Default: 1.",
    ),
    "machine_rank": ("<int>", "Rank of this machine, from 0."),
    "main_process_ip": ("<host>", "Address of machine 0."),
    "main_process_port": ("<int>", "Port on machine 0 for the rendezvous."),
    "min_machines": (
        "<int>",
        "Go on with as few machines when others are lost, at the same global batch; default: all are needed.",
    ),
}
DEVICES = (*MESH_OPTIONS, "gpus", "num_processes")
_SWITCHES = {
    "json": "Print a single JSON document on stdout, and nothing else.",
    "quiet": "Print only warnings and errors.",
    "check": "Check options, data and model without starting anything.",
    "detach": "Start in the background and return; the run keeps going when this terminal closes.",
    "force": "Resume even if data, options or code have changed since the checkpoint was saved.",
}


@dataclass
class Args:
    """A parsed command line, not yet validated.

    Args:
        names: positional arguments: the preset, or the run.
        launch: values of the given `LAUNCH_OPTIONS`, such as `strategy`.
        switches: the given switches out of `json`, `quiet`, `check`, `detach` and `force`.
        request: preset, config file and training options.
        own: values of the verb's own options.
    """

    names: list[str] = field(default_factory=list)
    launch: dict[str, str] = field(default_factory=dict)
    switches: set[str] = field(default_factory=set)
    request: Request = field(default_factory=Request)
    own: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verb:
    """A verb that takes training options.

    Every verb parses all options and switches, so that those it does not support can be refused with a reason; its
    help shows only those that it supports.

    Args:
        name: name of the verb, such as `train`.
        help: help text of the verb.
        argument: name and help text of the positional argument.
        own: the verb's own options by name; may also replace the help of a training option.
        launch: the `LAUNCH_OPTIONS` to show in the help.
        switches: the switches to show in the help, besides `--json` and `--quiet`.
        hidden: training options to leave out of the help.
    """

    name: str
    help: str
    argument: tuple[str, str] = ("preset", "Preset to start from.")
    own: Mapping[str, Any] = field(default_factory=dict)
    launch: Collection[str] = LAUNCH_OPTIONS
    switches: Collection[str] = ()
    hidden: Collection[str] = ()

    def options(self) -> dict[str, Any]:
        """All options and switches by name, in the order of the help."""
        hidden = set(self.hidden)
        launch = {
            name: option(name, metavar, text, hidden=name not in self.launch)
            for name, (metavar, text) in _LAUNCH_HELP.items()
        }
        visible = {"json", "quiet", *self.switches}
        switches = {name: switch(name, text, name not in visible) for name, text in _SWITCHES.items()}
        file = option("config", "<file>", "YAML file with options.", hidden="config" in hidden)
        training = {name: info for name, info in config_options(hidden).items() if name not in self.own}
        return {**launch, **switches, **self.own, "config": file, **training}

    def read(self, argv: Sequence[str]) -> Args | None:
        """Parses a command line; if it asks for help, prints the help and returns None.

        Raises:
            ConfigError: for a switch with a value.
        """
        options, (argument, argument_help) = self.options(), self.argument
        if {"-h", "--help"} & set(argv) and shutil.get_terminal_size().columns < _DRAWN_WIDTH:
            self._print_narrow(options)
            return None
        parsed = read(argv, options, self.name, argument, argument_help=argument_help, help=self.help, cls=PlainCommand)
        if parsed is None:
            return None
        names, values, mistakes = parsed
        counts = Counter(word.partition("=")[0] for word in argv)
        single = [*LAUNCH_OPTIONS, *(name for name in self.own if name not in TrainConfig.model_fields)]
        repeated = [f"--{name}" for name in single if counts[f"--{name}"] > 1]
        mistakes += [Mistake(flag, None, "is given twice", f"write {flag} VALUE once") for flag in repeated]
        training = {name: value for name, value in values.items() if name in ("config", *TrainConfig.model_fields)}
        return Args(
            names,
            {name: value for name, value in values.items() if name in LAUNCH_OPTIONS},
            {name for name in values if name in _SWITCHES},
            request_of(training, mistakes),
            {name: value for name, value in values.items() if name in self.own and name not in training},
        )

    def _print_narrow(self, options: Mapping[str, Any]) -> None:
        """Prints the help with each option's text below its name; typer would truncate the names to fit its columns."""
        width, name = shutil.get_terminal_size().columns, self.argument[0].upper()

        def wrapped(text: str, indent: int) -> str:
            margin = " " * indent
            return textwrap.fill(text, max(20, width - 1), initial_indent=margin, subsequent_indent=margin,
                                 break_on_hyphens=False)  # fmt: skip

        usage = f"Usage: tunesmith {self.name} [OPTIONS] [{name}]"
        lines = [usage, "", wrapped(self.help, 0), "", wrapped(f"{name}: {self.argument[1]}", 0)]
        panels: dict[str, list[str]] = {}
        for flag, info in options.items():
            if not info.hidden:
                entry = [f"  --{flag} {info.metavar}".rstrip(), wrapped(info.help, 6)]
                panels.setdefault(info.rich_help_panel or "Options", []).extend(entry)
        panels["Options"] += ["  --help, -h", wrapped("Show this message and exit.", 6)]
        for panel, entries in panels.items():
            lines += ["", f"{panel}:", *entries]
        report("\n".join(lines))


_CLUSTER = {
    "on": ("<local|slurm|ray|kubernetes>", "Where to train: on this machine, or on a cluster; default: local."),
    "nodes": ("<int>", "Number of nodes; default: 1."),
    "gpus_per_node": ("<int>", "GPUs of each node, with a process on each; 0: on the CPU. Default: 1."),
    "cpus_per_node": ("<int>", "CPUs of each node; default: the site's; on Ray, one for each process."),
    "partition": ("<name>", "SLURM: partition; default: the site's."),
    "account": ("<name>", "SLURM: account to charge."),
    "qos": ("<name>", "SLURM: quality of service."),
    "time": ("<limit>", "SLURM: time limit, such as 30 (minutes), 8:00:00 or 2-00:00:00; default: the site's."),
    "constraint": ("<features>", "SLURM: features that the nodes must have, such as a100|h100."),
    "container": ("<path>", "SLURM: OCI bundle in which the nodes run the job."),
    "signal_before": ("<seconds>", "SLURM: how long before its time limit a run saves, to go on in another job."),
    "slurm_extra": ("<options>", "SLURM: further options of sbatch, such as 'mem=0 exclusive'."),
    "image": ("<name>", "Kubernetes: container image with Tunesmith in it."),
    "volume_claim": ("<name>", "Kubernetes: PersistentVolumeClaim for runs, data and models."),
    "volume_path": ("<path>", "Kubernetes: where the pods mount it; default: /shared."),
    "memory_per_node": ("<amount>", "Kubernetes: memory that each pod requests, such as 64Gi."),
    "namespace": ("<name>", "Kubernetes: namespace; default: that of kubectl."),
    "secret": ("<name>", "Kubernetes: Secret with environment variables such as HF_TOKEN."),
}
SCHEDULER_OPTIONS = {name: option(name, metavar, text, "Cluster") for name, (metavar, text) in _CLUSTER.items()}
SCHEDULER_OPTIONS |= {"dry_run": switch("dry_run", "Print what would be submitted, and submit nothing.")}
TRAIN = Verb(
    "train",
    "Fine-tune a model: a preset (`tunesmith presets`), a config file, options, or all three; later ones win.",
    own=SCHEDULER_OPTIONS, switches=("check", "detach"),
)  # fmt: skip
_RUN = ("run", "Run id, or path of a run folder.")
_RUNS_DIR = {
    "runs_dir": option("runs_dir", "<dir>", "Parent folder of run folders."),
    "apply": option("apply", "<int>", "Change the options as this remedy says; `tunesmith runs show` lists them."),
}
_TRAINING = {"config", *TrainConfig.model_fields}
RESUME = Verb(
    "resume",
    "Resume a stopped or failed run from its newest good checkpoint. "
    "Options of `train` may be changed; changes that affect the remaining steps need --force.",
    _RUN, {**_RUNS_DIR, **SCHEDULER_OPTIONS}, switches=("force", "detach"), hidden=_TRAINING,
)  # fmt: skip
CLONE = Verb(
    "runs clone",
    "Start a new run with the settings, strategy and devices of another one; options given here override them.",
    _RUN, _RUNS_DIR, switches=("detach",), hidden=_TRAINING,
)  # fmt: skip
