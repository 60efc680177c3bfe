"""The `tunesmith runs` verbs. Each imports its dependencies when it runs, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.typer_style import Verbs

runs_app = Verbs(help="List, show and read runs.")

RAW = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
Raw = Annotated[list[str] | None, typer.Argument(metavar="...")]
Json = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON document and nothing else on stdout.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, or the path of its folder.")]
RunsDir = Annotated[
    Path, typer.Option("--runs_dir", metavar="<dir>", file_okay=False, help="Parent folder of run folders.")
]
RUNS = Path("runs")


@runs_app.command("list")
def runs_list(runs_dir: RunsDir = RUNS, json: Json = False) -> int:
    """List runs, newest first."""
    from app.commands.runs import list_verb

    return list_verb(runs_dir, json)


@runs_app.command("show")
def runs_show(
    run: RunName,
    plan: Annotated[
        bool, typer.Option("--plan", metavar="", help="Count the model, and show planned beside measured memory.")
    ] = False,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Show the status of a run: state, cause, latest metrics, checkpoints, memory, proofs."""
    from app.commands.runs import show_verb

    return show_verb(run, plan, runs_dir, json)


@runs_app.command("logs")
def runs_logs(
    run: RunName,
    follow: Annotated[bool, typer.Option("--follow", metavar="", help="Keep printing until the run ends.")] = False,
    runs_dir: RunsDir = RUNS,
) -> int:
    """Print a run's log. With --follow the exit status is that of the run: 0 done, 1 failed, 130 stopped."""
    from app.commands.runs import logs_verb

    return logs_verb(run, follow, runs_dir)


@runs_app.command("clone", context_settings=RAW)
def runs_clone(args: Raw = None) -> int:
    """Start a new run with the settings of another one, optionally changed."""
    from app.commands.runs import clone_verb

    return clone_verb(args or [])


@runs_app.command("rename")
def runs_rename(
    run: RunName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="New id.")],
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Rename a run that has ended, and its folder."""
    from app.commands.runs import rename_verb

    return rename_verb(run, name, runs_dir, json)


@runs_app.command("delete")
def runs_delete(
    run: RunName,
    yes: Annotated[bool, typer.Option("--yes", metavar="", help="Do not ask for confirmation.")] = False,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Delete a run that has ended, with its checkpoints and exports."""
    from app.commands.runs import delete_verb

    return delete_verb(run, yes, runs_dir, json)


@runs_app.command("compare")
def runs_compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids of runs, or paths of their folders.")],
    by: Annotated[
        str | None, typer.Option(metavar="<measure>", help="Measure that decides, such as best_eval_loss.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="<file>", help="Also write all numbers and options to this CSV file.")
    ] = None,
    all_options: Annotated[
        bool, typer.Option("--all_options", metavar="", help="Also show options that do not differ.")
    ] = False,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Compare runs: measures, options that differ, the spread over seeds, and which is the best."""
    from app.commands.runs import compare_verb

    return compare_verb(runs, by, csv, not all_options, runs_dir, json)


@runs_app.command("queue")
def runs_queue(runs_dir: RunsDir = RUNS, json: Json = False) -> int:
    """List the queued runs of this machine, first in line first, and who holds the devices they need."""
    from app.commands.runs import queue_verb

    return queue_verb(runs_dir, json)


@runs_app.command("move", context_settings={"ignore_unknown_options": True})
def runs_move(
    run: RunName,
    places: Annotated[
        str | None,
        typer.Argument(metavar="PLACES", help="Places to move towards the end; -1 moves one place towards the front."),
    ] = None,
    to: Annotated[str | None, typer.Option(metavar="<int>", help="New place instead; 1: the front.")] = None,
    before: Annotated[
        str | None, typer.Option(metavar="<run>", help="Queued run to be right in front of instead.")
    ] = None,
    after: Annotated[str | None, typer.Option(metavar="<run>", help="Queued run to be right behind instead.")] = None,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Move a run in the queue; `tunesmith stop` cancels it."""
    from app.commands.runs import move_verb

    return move_verb(run, places, to, before, after, runs_dir, json)
