"""The `tunesmith sweep` verbs. Each imports its dependencies when it runs, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from app.cli_runs import RUNS, Json, RunsDir
from app.typer_style import Verbs

sweep_app = Verbs(name="sweep", help="Work on sweeps.")
SweepName = Annotated[str, typer.Argument(metavar="SWEEP", help="Id of a sweep, or the path of its folder.")]
VERBS = ("list", "show", "stop", "resume")


@sweep_app.command("list")
def sweep_list(runs_dir: RunsDir = RUNS, json: Json = False) -> int:
    """List sweeps, newest first."""
    from app.commands.sweep import list_sweeps_verb

    return list_sweeps_verb(runs_dir, json)


@sweep_app.command("show")
def sweep_show(sweep: SweepName, runs_dir: RunsDir = RUNS, json: Json = False) -> int:
    """Show the trials of a sweep, best first, their spread over seeds, and which is the best."""
    from app.commands.sweep import show_sweep

    return show_sweep(sweep, runs_dir, json)


@sweep_app.command("stop")
def sweep_stop(
    sweep: SweepName,
    timeout: Annotated[str, typer.Option(metavar="<seconds>", help="How long to wait for its runs to end.")] = "300",
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Save and stop all runs of a sweep; `sweep resume` goes on."""
    from app.commands.runs import parse_seconds
    from app.commands.sweep import stop_sweep

    return stop_sweep(sweep, runs_dir, parse_seconds(timeout), json)


@sweep_app.command("resume")
def sweep_resume(
    sweep: SweepName,
    quiet: Annotated[bool, typer.Option("--quiet", metavar="", help="Print only the result.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", metavar="", help="Go on in the background when this terminal closes.")
    ] = False,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Go on with a sweep that was stopped, or whose process is gone; runs that are done are not run again."""
    from app.commands.sweep import resume_sweep

    return resume_sweep(sweep, runs_dir, json, quiet, detach)


def sweep_line(args: Sequence[str]) -> Any:
    """`tunesmith sweep ARGS`: one of the verbs above, or a new sweep."""
    if args and args[0] in VERBS:
        return sweep_app(args=list(args), prog_name="tunesmith sweep", standalone_mode=False)
    if args and args[0].isalpha():
        _refuse_misspelled(args[0])
    from app.commands.sweep import sweep_verb

    return sweep_verb(args)


def _refuse_misspelled(word: str) -> None:
    """Raises for what is no preset and close to one of the verbs."""
    import difflib

    from trainers.config.mistakes import ConfigError
    from trainers.config.presets import is_preset

    if (near := difflib.get_close_matches(word, VERBS, n=1)) and not is_preset(word):
        raise ConfigError(f"sweep has no verb {word!r}, and no preset has this name; did you mean {near[0]}?")
