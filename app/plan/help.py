"""`tunesmith plan --help`."""

from __future__ import annotations

from app.option_help import DEVICE_HELP, config_options, option, show_help


def show_plan_help() -> None:
    """Prints the help of `plan`."""
    text = (
        "Estimate what `train` with the same arguments needs under each strategy: peak memory per GPU by use, "
        "communication, pipeline bubble, and an upper bound on speed. Nothing is trained and no weights are read. "
        "Exit status: 0 done, 2 invalid request."
    )
    own = {
        "strategies": option("strategies", "<a,b,c>", "Strategy names or Accelerate YAMLs.", "Options", "all"),
        "gpu_memory": option("gpu_memory", "<GiB>", "Plan for GPUs of this memory, --num_processes of them, in place "
                              "of those that are here.", "Options"),
        "link": option("link", "<GB/s>", "Bandwidth per GPU; default: 25 (PCIe 4). NVLink: 200 or more.",
                        "Options"),
        "config": option("config", "<file>", "YAML file with options.", "Options"),
    }  # fmt: skip
    show_help("plan", "preset", "Preset to start from.", text, {**own, **config_options()}, DEVICE_HELP)
