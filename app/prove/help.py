"""`tunesmith prove --help`."""

from __future__ import annotations

from app.option_help import DEVICE_HELP, config_options, option, show_help, switch
from app.prove.plan import PRESET, SETTINGS, STEPS
from trainers.config.options import TrainConfig


def show_prove_help() -> None:
    """Prints the help of `prove`."""
    text = (
        "Train your model on your data under each strategy, and compare loss and gradient norm of every step "
        f"with one process. It sets {', '.join(name for name in SETTINGS if name in TrainConfig.model_fields)} and "
        "max_steps itself, and reports which of your options it overrides. Exit status: 0 all that could run passed, "
        "1 a strategy failed, 130 interrupted, 2 invalid request."
    )
    control = (
        "Train every row, but not the reference, with a known fault: the mean of the micro-batches' means. Then each "
        "row must differ; exit status 0 when the test saw the fault in all that ran."
    )
    fields = config_options()
    own = {
        "strategies": option("strategies", "<a,b,c>", "Strategy names or Accelerate YAMLs.", "Options", "all"),
        "steps": option("steps", "<int>", "Number of steps per run.", "Options", str(STEPS)),
        **switch("resume", "Save half-way under each strategy, and resume under every strategy from each checkpoint."),
        "layers": option(
            "layers",
            "<int>",
            "Keep only the first N decoder layers, so that the reference fits in one process.",
            "Options",
        ),
        "control": option("control", "<none|mean-of-means>", control, "Options", "none"),
        "config": option("config", "<file>", "YAML file with options.", "Options"),
    }
    kept = {name: entry for name, entry in fields.items() if name not in (*SETTINGS, *own, "max_steps")}
    hints = f"Preset to start from; default: {PRESET}, when no model is named either."
    show_help("prove", "preset", hints, text, {**own, **kept}, DEVICE_HELP)
