"""`tunesmith plan --help`."""

from __future__ import annotations

from app.option_help import DEVICE_HELP, config_options, option, show_help


def show_plan_help() -> None:
    """Prints the help of `plan`."""
    text = (
        "Reckon what `train` with the same words would need under each strategy: memory on the fullest GPU by use, "
        "traffic, the bubble of a pipeline, and a bound of its speed. Nothing is trained and no weights are read. "
        "Exit status: 0 done, 2 the request was wrong."
    )
    own = {
        "strategies": option("strategies", "<a,b,c>", "Strategies or Accelerate YAMLs.", "Options", "all"),
        "gpu_memory": option("gpu_memory", "<GiB>", "Plan for GPUs of this memory, --num_processes of them, in place "
                              "of those that are here.", "Options"),
        "link": option("link", "<GB/s>", "What a GPU sends; default: 25, which is PCIe 4. NVLink: 200 or more.",
                        "Options"),
        "config": option("config", "<file>", "YAML file with options.", "Options"),
    }  # fmt: skip
    show_help("plan", "preset", "Preset to start from.", text, {**own, **config_options()}, DEVICE_HELP)
