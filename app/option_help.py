"""`tunesmith train --help`: every option of `TrainConfig` by section, in the look of the other verbs."""

from __future__ import annotations

import inspect
import shutil
import textwrap
import types
import typing
from typing import Any, Literal

import typer

from app.console import report
from app.typer_style import Verbs
from trainers.config.options import sections

_DRAWN_WIDTH = 110

_TITLES = {"ddp": "Data parallel", "precision": "Precision and memory"}
LAUNCH_HELP = {
    "strategy": (
        "<name|file>",
        "Strategy name or Accelerate YAML; default: the preset's choice for the number of GPUs, else single or ddp.",
    ),
    "gpus": ("<ids>", "GPU ids, such as 0,2; default: the free GPUs, as many as divide the global batch."),
    "num_processes": ("<int>", "Number of processes across all machines; needed only without GPUs."),
    "num_machines": (
        "<int>",
        "Number of machines; run the same command on each with its own --machine_rank. Default: 1.",
    ),
    "machine_rank": ("<int>", "Rank of this machine, from 0."),
    "main_process_ip": ("<host>", "Address of machine 0."),
    "main_process_port": ("<int>", "Port on machine 0 for the rendezvous."),
}
_SWITCHES = {
    "json": "Print a single JSON document on stdout, and nothing else.",
    "quiet": "Print only warnings and errors.",
}


DEVICE_HELP = {name: LAUNCH_HELP[name] for name in ("gpus", "num_processes")}


def show_train_help() -> None:
    """Prints the help of `train`."""
    text = "Fine-tune a model: a preset (`tunesmith presets`), a config file, options, or all three; later ones win."
    own = {**switch("check", "Check options, data and model without starting anything."), **_detach()}
    config = {"config": option("config", "<file>", "YAML file with options.", "Options")}
    show_help("train", "preset", "Preset to start from.", text, {**config, **own, **config_options()})


def show_resume_help() -> None:
    """Prints the help of `resume`."""
    text = (
        "Resume a stopped or failed run from its newest good checkpoint. "
        "Options of `train` may be changed; changes that affect the remaining steps need --force."
    )
    folder = {
        "runs_dir": option("runs_dir", "<dir>", "Parent folder of run folders.", "Options"),
        **switch("force", "Resume even if data, options or code have changed since the checkpoint was saved."),
    }
    show_help("resume", "run", "Run id, or path of a run folder.", text, {**folder, **_detach()})


def show_clone_help() -> None:
    """Prints the help of `runs clone`."""
    text = "Start a new run with the settings, strategy and devices of another one; options given here override them."
    folder = {"runs_dir": option("runs_dir", "<dir>", "Parent folder of run folders.", "Options")}
    show_help("runs clone", "run", "Run id, or path of a run folder.", text, {**folder, **_detach()})


def show_data_help() -> None:
    """Prints the help of `data`."""
    text = (
        "Show what `train` with the same arguments would train on, without using a GPU: counts and shares, token "
        "lengths, packing, bad rows, and the first rows with their trained tokens marked."
    )
    own = {
        "rows": option("rows", "<int>", "Number of rows to show.", "Options", "3"),
        "config": option("config", "<file>", "YAML file with options.", "Options"),
    }
    show_help("data", "preset", "Preset to start from.", text, {**own, **config_options()}, {})


def show_help(
    verb: str,
    name: str,
    name_help: str,
    text: str,
    more: dict[str, Any],
    own: dict[str, tuple[str, str]] = LAUNCH_HELP,
) -> None:
    """Lets typer draw the help of a command that has these options; it is never run.

    In a narrow terminal typer would cut the names of the options, so there each has a line of its own.
    """
    options = {
        **{key: option(key, metavar, words, "Options") for key, (metavar, words) in own.items()},
        **{key: value for name, words in _SWITCHES.items() for key, value in switch(name, words).items()},
        **more,
    }
    if shutil.get_terminal_size().columns < _DRAWN_WIDTH:
        _print_narrow(f"tunesmith {verb} [OPTIONS] [{name.upper()}]", text, f"{name.upper()}: {name_help}", options)
        return
    argument = typer.Argument(None, metavar=name.upper(), help=name_help)

    def command(**values: Any) -> None:
        """Never called: only its signature is shown."""

    kinds = {key: bool if key in (*_SWITCHES, "check", "detach", "resume") else str for key in options} | {
        f"{name}_name": str
    }
    given = {f"{name}_name": argument, **options}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kinds[key])
            for key, value in given.items()
        ]
    )
    command.__annotations__ = kinds
    drawn = Verbs()
    drawn.command(help=text)(command)
    drawn(args=["--help"], prog_name=f"tunesmith {verb}", standalone_mode=False)


def option(name: str, metavar: str, words: str, panel: str, default: str | None = None) -> Any:
    """One option as typer draws it."""
    return typer.Option(default, f"--{name}", metavar=metavar, help=words, rich_help_panel=panel)


def _detach() -> dict[str, Any]:
    return switch("detach", "Start in the background and return; the run keeps going when this terminal closes.")


def switch(name: str, words: str) -> dict[str, Any]:
    """An option without a value, by its name."""
    return {name: typer.Option(False, f"--{name}", metavar="", help=words)}


def _print_narrow(usage: str, text: str, argument: str, options: dict[str, Any]) -> None:
    """Name and values of an option on a line, what it does below."""
    wide = shutil.get_terminal_size().columns

    def wrapped(words: str, indent: int) -> str:
        margin = " " * indent
        return textwrap.fill(words, max(20, wide - 1), initial_indent=margin, subsequent_indent=margin,
                             break_on_hyphens=False)  # fmt: skip

    lines = [f"Usage: {usage}", "", wrapped(text, 0), "", wrapped(argument, 0)]
    panels: dict[str, list[str]] = {}
    for name, entry in options.items():
        given = "" if entry.default in (None, False) else f" [default: {entry.default}]"
        shown = [f"  --{name} {entry.metavar}".rstrip(), wrapped(f"{entry.help}{given}", 6)]
        panels.setdefault(entry.rich_help_panel or "Options", []).extend(shown)
    panels["Options"] += ["  --help, -h", wrapped("Show this message and exit.", 6)]
    for panel, shown in panels.items():
        lines += ["", f"{panel}:", *shown]
    report("\n".join(lines))


def config_options() -> dict[str, Any]:
    """Every option of `TrainConfig` but the preset, by name."""
    made: dict[str, Any] = {}
    for section, fields in sections().items():
        panel = _TITLES.get(section, section.capitalize())
        for name, field in fields.items():
            if name != "preset":
                words = f"{field.description} {_limits(field)}".strip()
                made[name] = option(name, _metavar(field.annotation), words, panel, _default(field))
    return made


def _metavar(kind: Any) -> str:
    """`<int>`, `<a|b>` or the like for an annotation."""
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return _metavar(next(part for part in typing.get_args(kind) if part is not type(None)))
    if typing.get_origin(kind) is Literal:
        return f"<{'|'.join(typing.get_args(kind))}>"
    names = {bool: "<true|false>", int: "<int>", float: "<number>", list: "<a,b>", dict: "<a=b,c=d>"}
    return names.get(typing.get_origin(kind) or kind, "<text>")


def _limits(field: Any) -> str:
    """Unit and range of an option."""
    bounds = {name: getattr(rule, name) for rule in field.metadata for name in ("ge", "gt", "le", "lt", "max_length")
              if getattr(rule, name, None) is not None}  # fmt: skip
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below", "max_length": "letters at most"}
    told = [f"{signs[name]} {value}" for name, value in bounds.items()]
    unit = field.json_schema_extra.get("unit")
    return f"({', '.join([*([unit] if unit else []), *told])})" if unit or told else ""


def _default(field: Any) -> str | None:
    """The default as one would write it; none for a required option."""
    value = None if field.is_required() else field.get_default()
    if value is None or value in ([], {}):
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value)
