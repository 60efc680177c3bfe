"""`tunesmith export` and `tunesmith push`. Each imports its dependencies when it runs, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.cli_runs import RUNS, Json, RunName, RunsDir


def export(
    run: RunName,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="<name>", help="Checkpoint, such as step-00000120; default: the newest.")
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", metavar="", help="Merge the adapters into the base model.")
    ] = False,
    ema: Annotated[
        bool, typer.Option("--ema", metavar="", help="Export the moving average of the weights (ema_decay).")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="<dir>", help="Output folder; default: export-KIND in the run folder.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="<dtype>", help="float32, bfloat16 or float16; default: the run's export_dtype."),
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(metavar="<types>", help="Also write GGUF files, such as f16,q8_0,q4_k_m.")
    ] = None,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            "--llama_cpp", metavar="<dir>", help="Source of llama.cpp, for --gguf; default: TUNESMITH_LLAMA_CPP."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", metavar="", help="Replace what this run exported to its own folder before.")
    ] = False,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Export a checkpoint to a folder that transformers or peft can load."""
    from app.commands.runs import export_verb
    from app.launch.actions import ExportRequest

    wanted = ExportRequest(checkpoint, merged, output, dtype, ema, gguf, llama_cpp, replace)
    return export_verb(run, wanted, runs_dir, json)


def push(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run (what it exported), RUN@EXPORT, or the folder of an export.")
    ],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="Repository on the Hub; made if it does not exist.")],
    public: Annotated[
        bool, typer.Option("--public", metavar="", help="Let everybody read it; otherwise it is private.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="<branch>", help="Branch; made if it does not exist. Default: main.")
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option("--base_model", metavar="<org/name>", help="Hub id of a base model that was a local folder."),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", metavar="", help="Replace another model that is in the repository.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry_run", metavar="", help="List files and sizes; send nothing, not even to ask.")
    ] = False,
    runs_dir: RunsDir = RUNS,
    json: Json = False,
) -> int:
    """Publish what a run exported on the Hugging Face Hub, privately unless you say otherwise."""
    from app.push.command import push_verb
    from app.push.upload import Target

    return push_verb(run, Target(repo, public, revision, replace), base_model, dry_run, runs_dir, json)
