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
from app.plain_help import Verbs
from trainers.config import TrainConfig, sections

_DRAWN_WIDTH = 110

_TITLES = {"ddp": "Data parallel", "precision": "Precision and memory"}
_OWN = {
    "strategy": (
        "<name|file>",
        "Strategy, or an Accelerate YAML; default: the preset's for so many GPUs, else single or ddp.",
    ),
    "gpus": ("<ids>", "GPU ids such as 0,2; default: those that are free and divide the global batch."),
    "num_processes": ("<int>", "Processes over all machines; needed only without GPUs."),
    "num_machines": ("<int>", "Machines; the same command is typed on each, but for --machine_rank. Default: 1."),
    "machine_rank": ("<int>", "This machine's number, from 0."),
    "main_process_ip": ("<host>", "Address of machine 0."),
    "main_process_port": ("<int>", "Port there at which the machines meet."),
}
_SWITCHES = {
    "json": "Print one JSON document and nothing else on stdout.",
    "quiet": "Print warnings and errors alone.",
}


_DEVICES = {name: _OWN[name] for name in ("gpus", "num_processes")}


def show_train_help() -> None:
    """Prints the help of `train`."""
    text = "Fine-tune a model: a preset (`tunesmith presets`), a config file, options, or all three; later ones win."
    own = {**_switch("check", "Check the request, its data and its model, and start nothing."), **_detach()}
    config = {"config": _option("config", "<file>", "YAML file with options.", "Options")}
    _show("train", "preset", "Preset to start from.", text, {**config, **own, **_config_options()})


def show_resume_help() -> None:
    """Prints the help of `resume`."""
    text = (
        "Go on with a stopped or failed run from its newest good checkpoint. "
        "Options of `train` may change; those that change the steps to come need --force."
    )
    folder = {
        "runs_dir": _option("runs_dir", "<dir>", "Folder of run folders.", "Options"),
        **_switch("force", "Go on although data, options or code have changed since the checkpoint was saved."),
    }
    _show("resume", "run", "Id of a run, or the path of its folder.", text, {**folder, **_detach()})


def show_clone_help() -> None:
    """Prints the help of `runs clone`."""
    text = "Start a new run with the settings, strategy and devices of another; options given replace its values."
    folder = {"runs_dir": _option("runs_dir", "<dir>", "Folder of run folders.", "Options")}
    _show("runs clone", "run", "Id of a run, or the path of its folder.", text, {**folder, **_detach()})


def show_data_help() -> None:
    """Prints the help of `data`."""
    text = (
        "Show what `train` with the same words would train on, before any GPU is taken: counts and shares, token "
        "lengths, packing, bad rows, and the first rows with their trained tokens marked."
    )
    own = {
        "rows": _option("rows", "<int>", "Rows to show.", "Options", "3"),
        "config": _option("config", "<file>", "YAML file with options.", "Options"),
    }
    _show("data", "preset", "Preset to start from.", text, {**own, **_config_options()}, {})


def show_prove_help() -> None:
    """Prints the help of `prove`."""
    from app.prove_plan import PRESET, SETTINGS, STEPS

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
    fields = _config_options()
    own = {
        "strategies": _option("strategies", "<a,b,c>", "Strategies or Accelerate YAMLs.", "Options", "all"),
        "steps": _option("steps", "<int>", "Steps of each run.", "Options", str(STEPS)),
        **_switch("resume", "Save in the middle under each strategy, and go on from there under each."),
        "layers": _option("layers", "<int>", "Keep the first decoder layers alone, for one process.", "Options"),
        "control": _option("control", "<none|mean-of-means>", control, "Options", "none"),
        "config": _option("config", "<file>", "YAML file with options.", "Options"),
    }
    kept = {name: option for name, option in fields.items() if name not in (*SETTINGS, *own, "max_steps")}
    hints = f"Preset to start from; default: {PRESET}, when no model is named either."
    _show("prove", "preset", hints, text, {**own, **kept}, _DEVICES)


def show_bench_help() -> None:
    """Prints the help of `bench`."""
    from app.bench_plan import SETTINGS, SHORT_RUN, TURNS, WARM

    text = (
        "Measure what `train` with the same words would do in its first steps, with your settings and with one of them "
        "changed at a time, in turns; then with all changes that helped. Nothing is saved. Exit status: 0 your "
        "settings were measured, 1 they could not be, 130 interrupted, 2 the request was wrong."
    )
    own = {
        "settings": _option("settings", "<a,b,c>", "Options to vary.", "Options", ",".join(SETTINGS)),
        "steps": _option("steps", "<int>", f"Timed steps of each run, after {WARM} more; default: 3 to 20, as many as "
                         "fit into 20 seconds.", "Options"),
        "turns": _option("turns", "<int>", "How often each is run; at least 2.", "Options", str(TURNS)),
        "config": _option("config", "<file>", "YAML file with options.", "Options"),
    }  # fmt: skip
    without = {*SHORT_RUN, *own, "max_steps", "num_train_epochs", "output_dir", "resume_from_checkpoint"}
    kept = {name: option for name, option in _config_options().items() if name not in without}
    devices = {name: _OWN[name] for name in ("strategy", *_DEVICES)}
    _show("bench", "preset", "Preset to start from.", text, {**own, **kept}, devices)


def show_plan_help() -> None:
    """Prints the help of `plan`."""
    text = (
        "Reckon what `train` with the same words would need under each strategy: memory on the fullest GPU by use, "
        "traffic, the bubble of a pipeline, and a bound of its speed. Nothing is trained and no weights are read. "
        "Exit status: 0 done, 2 the request was wrong."
    )
    own = {
        "strategies": _option("strategies", "<a,b,c>", "Strategies or Accelerate YAMLs.", "Options", "all"),
        "gpu_memory": _option("gpu_memory", "<GiB>", "Plan for GPUs of this memory, --num_processes of them, in place "
                              "of those that are here.", "Options"),
        "link": _option("link", "<GB/s>", "What a GPU sends; default: 25, which is PCIe 4. NVLink: 200 or more.",
                        "Options"),
        "config": _option("config", "<file>", "YAML file with options.", "Options"),
    }  # fmt: skip
    _show("plan", "preset", "Preset to start from.", text, {**own, **_config_options()}, _DEVICES)


def _show(
    verb: str, name: str, name_help: str, text: str, more: dict[str, Any], own: dict[str, tuple[str, str]] = _OWN
) -> None:
    """Lets typer draw the help of a command that has these options; it is never run.

    In a narrow terminal typer would cut the names of the options, so there each has a line of its own.
    """
    options = {
        **{key: _option(key, metavar, words, "Options") for key, (metavar, words) in own.items()},
        **{key: value for name, words in _SWITCHES.items() for key, value in _switch(name, words).items()},
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


def _option(name: str, metavar: str, words: str, panel: str, default: str | None = None) -> Any:
    return typer.Option(default, f"--{name}", metavar=metavar, help=words, rich_help_panel=panel)


def _detach() -> dict[str, Any]:
    return _switch("detach", "Start in the background and return; the run outlives this terminal.")


def _switch(name: str, words: str) -> dict[str, Any]:
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
    for name, option in options.items():
        given = "" if option.default in (None, False) else f" [default: {option.default}]"
        shown = [f"  --{name} {option.metavar}".rstrip(), wrapped(f"{option.help}{given}", 6)]
        panels.setdefault(option.rich_help_panel or "Options", []).extend(shown)
    panels["Options"] += ["  --help, -h", wrapped("Show this message and exit.", 6)]
    for panel, shown in panels.items():
        lines += ["", f"{panel}:", *shown]
    report("\n".join(lines))


def _config_options() -> dict[str, Any]:
    made: dict[str, Any] = {}
    for section, fields in sections().items():
        panel = _TITLES.get(section, section.capitalize())
        for name, field in fields.items():
            if name != "preset":
                words = f"{field.description} {_limits(field)}".strip()
                made[name] = _option(name, _metavar(field.annotation), words, panel, _default(field))
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
