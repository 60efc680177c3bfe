"""Command-line options of `TrainConfig`, for the training script and every `tunesmith` command that takes them.

The typer options are generated from the fields, so that parsing and `--help` share one definition. Imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trainers.config.fields import TITLES, fields
from trainers.config.mistakes import ConfigError, Mistake, no_value
from trainers.config.options import LAUNCH_OPTIONS, unknown_option

_VALUES = {"bool": "true|false", "int": "int", "float": "number", "text": "text", "list": "a,b", "map": "a=b,c=d"}
_WIDEST = 70
"""Most letters of all values of an option beside its name."""


def option(name: str, metavar: str, text: str, panel: str = "Options", hidden: bool = False) -> Any:
    """Builds the typer option `--name VALUE`.

    Args:
        name: Option name, without dashes.
        metavar: Placeholder for the value, such as `<int>`.
        text: Help text.
        panel: Help section that lists the option.
        hidden: Whether to hide the option from the help.
    """
    import typer

    return typer.Option(
        None, f"--{name}", metavar=metavar, help=text, rich_help_panel=panel, show_default=False, hidden=hidden
    )


def switch(name: str, text: str, hidden: bool = False) -> Any:
    """Builds the typer flag `--name`, which takes no value."""
    import typer

    return typer.Option(False, f"--{name}", metavar="", help=text, hidden=hidden)


def config_options(hidden: Collection[str] = ()) -> dict[str, Any]:
    """Returns every option of `TrainConfig` by name.

    Args:
        hidden: Options to hide from the help, in addition to `preset`, which is a positional argument.
    """
    options = {"preset": option("preset", "<name>", "Preset to start from.", hidden=True)}
    for field in fields():
        values, listed = "|".join(field.choices) or _VALUES[field.kind], ""
        if len(values) > _WIDEST:  # it would not wrap
            values, listed = "name", f"one of {', '.join(field.choices)}"
        default = (
            f"default: {field.default}" if field.default and not (field.optional and field.default == "none") else ""
        )
        details = ", ".join(part for part in (listed, field.limits, default) if part)
        text = f"{field.help} ({details})" if details else field.help
        options[field.name] = option(field.name, f"<{values}>", text, TITLES[field.section], field.name in hidden)
    return options


def read(
    argv: Sequence[str], options: Mapping[str, Any], verb: str, argument: str = "names", **settings: Any
) -> tuple[list[str], dict[str, Any], list[Mistake]] | None:
    """Parses a command line.

    Args:
        argv: Arguments, without the program name.
        options: Options built by `option` and `switch`, by name.
        verb: The `tunesmith` command, named in the help and in messages about unknown options.
        argument: Name of the positional argument in the help.
        settings: Keyword arguments of `typer.Typer.command`, such as `help`.

    Returns:
        The positional arguments, the given values by option name (True for a switch), and the mistakes so far: unknown
        options, and options without a value. None if the help was requested and printed.

    Raises:
        ConfigError: If a switch is given a value.
    """
    import typer

    values: dict[str, Any] = {}

    def command(**parsed: Any) -> None:
        values.update(parsed)

    # typer reads the options from the function's signature, so build one from `options`.
    argument_info = typer.Argument(None, metavar=argument.upper(), help=settings.pop("argument_help", None))
    # For a list, the help would show the argument as repeatable.
    argument_type = str if {"-h", "--help"} & set(argv) and settings.get("add_help_option", True) else list[str]
    kinds = {name: bool if info.default is False else str for name, info in options.items()}
    command.__annotations__ = {"names": argument_type, **kinds}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=command.__annotations__[name]
            )
            for name, info in {"names": argument_info, **options}.items()
        ]
    )
    context = {"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=context, **settings)(command)
    kept_argv, mistakes = _without_empty(argv, {f"--{name}" for name, kind in kinds.items() if kind is str})
    try:
        app(args=kept_argv, prog_name=f"tunesmith {verb}", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise ConfigError(str(error.format_message())) from None
    if not values:
        return None
    names, unknown = _sorted(values.pop("names") or [])
    known = [name for name in options if name not in LAUNCH_OPTIONS]
    mistakes += [unknown_option(name, known, verb) for name in unknown]
    return names, {name: value for name, value in values.items() if value not in (None, False)}, mistakes


def _without_empty(argv: Sequence[str], flags: Collection[str]) -> tuple[list[str], list[Mistake]]:
    """Removes flags without a value, for which typer would consume the next option, and reports each as a mistake.

    An empty value is none: typer, and options that may be `none`, would take it for an option that was not given.
    """
    kept_argv, mistakes, queue = [], [], list(argv)
    while queue:
        word, following = queue.pop(0), queue[0] if queue else "--"
        flag, equals, value = word.partition("=")
        if flag in flags and (not value if equals else not following or following.startswith("--")):
            mistakes.append(no_value(flag))
            if not equals and not following:
                queue.pop(0)
            continue
        kept_argv.append(word)
        if word in flags:
            kept_argv.append(queue.pop(0))
    return kept_argv, mistakes


def _sorted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates positional arguments from the names of unknown options, each of which consumes the next word."""
    names, unknown, queue = [], [], list(argv)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            names.append(word)
            continue
        name, equals, _ = word.removeprefix("--").partition("=")
        unknown.append(name)
        if not equals and queue and not queue[0].startswith("--"):
            queue.pop(0)
    return names, unknown
