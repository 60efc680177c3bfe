"""`tunesmith prove --help`."""

from __future__ import annotations

from app.option_help import DEVICE_HELP, config_options, option, show_help, switch
from app.prove.plan import PRESET, SETTINGS, STEPS
from trainers.config.options import TrainConfig


def show_prove_help() -> None:
    """Prints the help of `prove`."""
    text = (
        "Train your model on your data under each strategy here, and compare loss and gradient norm of every step "
        f"with one process. It sets {', '.join(name for name in SETTINGS if name in TrainConfig.model_fields)} and "
        "max_steps itself, and says what of yours it replaces. Exit status: 0 all that could run have passed, "
        "1 one has not, 130 interrupted, 2 the request was wrong."
    )
    control = (
        "Train every row, but not the reference, with a known fault: the mean of the micro-batches' means. Then each "
        "row must differ; exit status 0 when the test saw the fault in all that ran."
    )
    fields = config_options()
    own = {
        "strategies": option("strategies", "<a,b,c>", "Strategies or Accelerate YAMLs.", "Options", "all"),
        "steps": option("steps", "<int>", "Steps of each run.", "Options", str(STEPS)),
        **switch("resume", "Save in the middle under each strategy, and go on from there under each."),
        "layers": option("layers", "<int>", "Keep the first decoder layers alone, for one process.", "Options"),
        "control": option("control", "<none|mean-of-means>", control, "Options", "none"),
        "config": option("config", "<file>", "YAML file with options.", "Options"),
    }
    kept = {name: entry for name, entry in fields.items() if name not in (*SETTINGS, *own, "max_steps")}
    hints = f"Preset to start from; default: {PRESET}, when no model is named either."
    show_help("prove", "preset", hints, text, {**own, **kept}, DEVICE_HELP)
