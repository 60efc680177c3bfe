"""`tunesmith bench --help`."""

from __future__ import annotations

from app.bench.plan import SETTINGS, SHORT_RUN, TURNS, WARM
from app.option_help import DEVICE_HELP, LAUNCH_HELP, config_options, option, show_help


def show_bench_help() -> None:
    """Prints the help of `bench`."""
    text = (
        "Measure the first steps of `train` with the same arguments, with your settings and with one of them "
        "changed at a time, interleaved; then with all changes that helped. Nothing is saved. Exit status: 0 your "
        "settings were measured, 1 they could not be, 130 interrupted, 2 invalid request."
    )
    own = {
        "settings": option("settings", "<a,b,c>", "Options to vary.", "Options", ",".join(SETTINGS)),
        "steps": option("steps", "<int>", f"Timed steps per run, after {WARM} more; default: 3 to 20, as many as "
                         "fit into 20 seconds.", "Options"),
        "turns": option("turns", "<int>", "Number of runs per setting; at least 2.", "Options", str(TURNS)),
        "config": option("config", "<file>", "YAML file with options.", "Options"),
    }  # fmt: skip
    without = {*SHORT_RUN, *own, "max_steps", "num_train_epochs", "output_dir", "resume_from_checkpoint"}
    kept = {name: entry for name, entry in config_options().items() if name not in without}
    devices = {name: LAUNCH_HELP[name] for name in ("strategy", *DEVICE_HELP)}
    show_help("bench", "preset", "Preset to start from.", text, {**own, **kept}, devices)
